"""How far long work is: one line on stderr that is rewritten, where stderr is a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from treering._values.human import bytes_text, duration_text, rate_text

__all__ = ["ProgressLine"]

_FIRST_AFTER_S = 0.3
_EVERY_S = 0.1


class ProgressLine:
    """Shows bytes done and bytes in all; a context manager that clears its line at the end.

    Call it with both numbers, as ``progress=`` of the operations does. It says nothing in the first 0.3 seconds, and
    never anything where stderr is no terminal.

    Args:
        verb: what is being done, such as "checking".
    """

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._wanted = sys.stderr.isatty()
        self._began = time.monotonic()
        self._next = self._began + _FIRST_AFTER_S
        self._shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def __call__(self, done: int, total: int) -> None:
        """Take in how far it is."""
        now = time.monotonic()
        if not self._wanted or now < self._next:
            return
        self._next = now + _EVERY_S
        self._shown = True
        print(f"\r\x1b[K{self.line(done, total, now - self._began)}", end="", file=sys.stderr, flush=True)

    def line(self, done: int, total: int, seconds: float) -> str:
        """Write the line.

        Example:
            >>> ProgressLine("checking").line(1 << 30, 4 << 30, 0.5)
            'checking: 25%, 1.00 GiB of 4.00 GiB, 2.15 GB/s, 1.50 s left'
        """
        share = done / total if total else 1.0
        left = f", {duration_text(seconds * (1 - share) / share)} left" if share else ""
        rate = rate_text(done, seconds)
        return f"{self._verb}: {share:.0%}, {bytes_text(done)} of {bytes_text(total)}, {rate}{left}"
