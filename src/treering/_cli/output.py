"""What the verbs that show something have in common: lines on stdout, and the answer when nothing matches."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from treering._cli.terminal import NO, explain
from treering._values.human import near
from treering._view.flat import nodes_of

_LINES_A_WRITE = 500


def write_lines(lines: Iterable[str]) -> None:
    """Write lines to stdout, some hundred at a time; what its encoding lacks comes out as an escape."""
    left = iter(lines)
    encoding = sys.stdout.encoding or "ascii"
    while batch := list(islice(left, _LINES_A_WRITE)):
        text = "\n".join(batch) + "\n"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))


def nothing_matches(path: str, globs: Sequence[str], root: Any) -> int:
    """Say that no leaf below ``root`` matches, and which keys were perhaps meant; return the exit code for that."""
    found = (near(glob, (key for key, _ in nodes_of(root) if key)) for glob in globs)
    close = list(dict.fromkeys(key for key in found if key))
    hint = "treering ls without a glob lists all keys"
    if close:
        hint = f"did you mean {' or '.join(map(repr, close))}?"
    elif any("*" in glob for glob in globs):
        hint = "'*' stays inside one part of a key; '**/NAME' looks at every depth"
    explain(f"nothing in {path!r} matches {' or '.join(map(repr, globs))}", hint)
    return NO
