"""What the verbs write to: exit codes, lines on stdout, errors on stderr, and what a stream can show."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from itertools import islice
from typing import TextIO

import click

from treering._printable import printable
from treering._view.plain import cut

GOOD = 0
"""Exit code: done, and the answer is good."""
NO = 1
"""Exit code: the answer is no (the file is damaged, nothing matches, a proof failed)."""
NOT_DONE = 2
"""Exit code: it could not be done (no such file, another form, a wrong option)."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells expect it: 128 + SIGINT."""

_LONGEST_LINE = 2000
_LINES_A_WRITE = 500


def wants_color(stream: TextIO) -> bool:
    """Tell whether to color: a terminal that understands it, unless NO_COLOR is set (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def can_show(text: str, stream: TextIO) -> bool:
    """Tell whether the stream's encoding has these characters."""
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def explain(message: str, hint: str | None = None) -> None:
    """Say on stderr what went wrong, and below it what to do about it; both may be lists of several lines."""
    color = wants_color(sys.stderr)
    bold_red, bold, plain = ("\x1b[1;31m", "\x1b[1m", "\x1b[0m") if color else ("", "", "")
    for label, text in ((f"{bold_red}error:{plain}", message), (f"{bold}hint:{plain}", hint)):
        if text:
            shown = "\n".join(plain_line(line, sys.stderr) for line in text.split("\n"))
            click.echo(f"{label} {shown}", err=True, color=color)


def note(message: str) -> None:
    """Say on stderr, in one line, what the output does not say itself."""
    click.echo(f"note: {plain_line(message, sys.stderr)}", err=True)


def plain_line(text: str, stream: TextIO) -> str:
    """Make a text one line that the stream can encode, with nothing in it that could move the cursor."""
    encoding = stream.encoding or "ascii"
    return printable(cut(text, _LONGEST_LINE)).encode(encoding, "backslashreplace").decode(encoding)


def write_lines(lines: Iterable[str]) -> None:
    """Write lines to stdout, some hundred at a time; what its encoding lacks comes out as an escape."""
    left = iter(lines)
    encoding = sys.stdout.encoding or "ascii"
    while batch := list(islice(left, _LINES_A_WRITE)):
        text = "\n".join(batch) + "\n"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
