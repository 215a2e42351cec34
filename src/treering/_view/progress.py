"""How far long work is: one line on stderr that is rewritten, where stderr is a terminal."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, Self, TypeAlias

from treering._values import timing
from treering._values.human import bytes_text, duration_text, rate_text
from treering.errors import UnsupportedError

Progress: TypeAlias = Callable[[int, int], object]
"""Called as ``progress(done, total)``, in bytes."""

_BAR: Final = 20
_USUAL_WIDTH: Final = 80


def reporter(progress: Progress | bool | None, verb: str) -> Progress | None:
    """Return what is called with the bytes that are done: the caller's function, a `ProgressLine` for True, or None.

    Args:
        progress: the argument of that name of a public function.
        verb: what is being done, such as "saving".

    Raises:
        UnsupportedError: it is something else.

    Example:
        >>> reporter(True, "saving").line(1, 2, 0.5)[:31]
        'saving: 50% [##########        '
        >>> reporter(False, "saving") is None
        True
    """
    if progress is True:
        return ProgressLine(verb)
    if progress is None or progress is False:
        return None
    if not callable(progress):
        raise UnsupportedError(f"progress= is True or a function of (done, total), found {progress!r:.100}")
    return progress


def showing(progress: Progress | None) -> AbstractContextManager[Any]:
    """Return a context in which a line of ours is shown, and at whose end it is cleared."""
    return progress if isinstance(progress, ProgressLine) else contextlib.nullcontext()


class ProgressLine:
    """Shows bytes done and bytes in all; a context manager that clears its line at the end.

    Call it with both numbers, as ``progress=`` of the operations does. It says nothing in the first 0.3 seconds, and
    never anything where stderr is no terminal.

    Args:
        verb: what is being done, such as "checking".
    """

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._wanted = sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()
        self._shown = False
        self._begin()

    def _begin(self) -> None:
        self._began = time.monotonic()
        self._next = self._began + timing.current.bar_first

    def __enter__(self) -> Self:
        self._begin()  # a save in the background has waited for its turn
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._print("")

    def __call__(self, done: int, total: int) -> None:
        """Take in how far it is."""
        now = time.monotonic()
        if not self._wanted or now < self._next:
            return
        self._next = now + timing.current.bar_every
        self._shown = True
        self._print(self.line(done, total, now - self._began)[: _width() - 1])

    def line(self, done: int, total: int, seconds: float) -> str:
        """Write the line.

        Example:
            >>> ProgressLine("checking").line(1 << 30, 4 << 30, 0.5)
            'checking: 25% [#####               ] 1.00 GiB of 4.00 GiB, 2.15 GB/s, 1.50 s left'
        """
        share = done / total if total else 1.0
        left = f", {duration_text(seconds * (1 - share) / share)} left" if share else ""
        rate = rate_text(done, seconds)
        bar = f"[{'#' * int(share * _BAR):<{_BAR}}]"
        return f"{self._verb}: {share:.0%} {bar} {bytes_text(done)} of {bytes_text(total)}, {rate}{left}"

    def _print(self, text: str) -> None:
        try:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
        except (OSError, ValueError):  # the terminal is gone: that is no reason for the work to fail
            self._wanted = self._shown = False


def _width() -> int:
    """Return how many columns the terminal behind stderr has: a longer line would wrap, and could not be rewritten."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _USUAL_WIDTH
    except (OSError, ValueError):
        return _USUAL_WIDTH
