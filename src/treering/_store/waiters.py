"""Waiting for a change that another thread announces.

`threading.Condition` and `threading.Event` are written in Python: an interrupt between two of their instructions leaves
their lock held, and everything that asks for it later hangs. Here nothing is held while a thread waits.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable


class Waiters:
    """The threads that wait for one kind of change.

    Example:
        >>> Waiters().wait(lambda: False, 0.01)
        False
    """

    def __init__(self) -> None:
        self._waiting: deque[queue.SimpleQueue[None]] = deque()

    def wait(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until ``ready()``, asked now and after each `notify`; whether it is true within ``timeout`` seconds."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            woken: queue.SimpleQueue[None] = queue.SimpleQueue()
            self._waiting.append(woken)  # first, so that no change is missed
            try:
                left = end - time.monotonic()
                if ready() or left <= 0:
                    return ready()
                with contextlib.suppress(queue.Empty):
                    woken.get(timeout=min(left, threading.TIMEOUT_MAX))
            finally:
                with contextlib.suppress(ValueError):  # a change took it out
                    self._waiting.remove(woken)

    def notify(self) -> None:
        """Announce a change that has been made."""
        with contextlib.suppress(IndexError):
            while True:
                self._waiting.popleft().put(None)


class Latch:
    """Something that happens once, and that threads wait for.

    Example:
        >>> latch = Latch()
        >>> latch.set()
        >>> latch.wait(1.0), latch.is_set()
        (True, True)
    """

    def __init__(self) -> None:
        self._waiters = Waiters()
        self._set = False

    def set(self) -> None:
        """Note that it has happened."""
        self._set = True
        self._waiters.notify()

    def is_set(self) -> bool:
        """Tell whether it has happened."""
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it; whether it has happened within ``timeout`` seconds."""
        return self._waiters.wait(self.is_set, timeout)
