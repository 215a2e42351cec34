"""Warnings that point at the user's own line."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence

from treering._printable import list_lines, printable


def warn_of(what: str, lines: Sequence[str], category: type[UserWarning]) -> None:
    """Warn of several things at once, at the line outside of treering from which the call came.

    Args:
        what: what they have in common.
        lines: one for each.
        category: the class of the warning.
    """
    level = 1
    frame = inspect.currentframe()
    while frame is not None and str(frame.f_globals.get("__name__", "")).split(".")[0] in ("treering", "contextlib"):
        frame = frame.f_back
        level += 1
    warnings.warn(f"{printable(what)}:{list_lines(lines)}", category, stacklevel=level)
