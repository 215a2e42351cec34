"""What the verbs that show something have in common: lines on stdout, and the answer when nothing matches."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import islice

from treering._cli.terminal import NO, explain

__all__ = ["nothing_matches", "write_lines"]

_LINES_A_WRITE = 500


def write_lines(lines: Iterable[str]) -> None:
    """Write lines to stdout, some hundred at a time; what its encoding lacks comes out as an escape."""
    left = iter(lines)
    encoding = sys.stdout.encoding or "ascii"
    while batch := list(islice(left, _LINES_A_WRITE)):
        text = "\n".join(batch) + "\n"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))


def nothing_matches(path: str, globs: Sequence[str]) -> int:
    """Say that no leaf matches, and return the exit code for that."""
    explain(
        f"nothing in {path!r} matches {' or '.join(map(repr, globs))}",
        "'*' stays inside one part of a key; '**/NAME' looks at every depth",
    )
    return NO
