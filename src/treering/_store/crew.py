"""A few own threads around one function, whose first error waits for the caller; and waiting for another thread."""

from __future__ import annotations

import _thread
import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class FirstError:
    """A ``with`` block that keeps the first error of any thread and lets the thread go on."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if self.error is None:
            self.error = error
        return error is not None

    def reraise(self) -> None:
        """Raise the kept error here, if there is one."""
        if self.error is not None:
            raise self.error


class ThreadPool:
    """Threads that all run ``work``, a context manager. ``with contextlib.closing(crew), crew:`` always joins them.

    Not an executor: those refuse work while the interpreter goes down, which is when a last save runs. Where the
    system gives fewer threads than asked, or none, ``size`` says so and the caller does the work itself.
    """

    def __init__(self, work: Callable[[], None], threads: int) -> None:
        """Nothing runs yet."""
        self._work = work
        self._wanted = threads
        self._started: list[int] = []
        self._ended: list[None] = []
        self._changed: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        with contextlib.suppress(RuntimeError):  # the interpreter goes down, or the system has no more threads
            # One call of C starts and counts a thread; `threading.Thread.start` hangs after an interrupt in it.
            self._started.extend(map(_thread.start_new_thread, [self._run] * self._wanted, [()] * self._wanted))
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def size(self) -> int:
        """How many threads were started."""
        return len(self._started)

    def close(self) -> None:
        """Wait for all threads. An interrupt is held back until they are gone, for they still use the file."""
        interrupt: BaseException | None = None
        while len(self._ended) < len(self._started):
            try:
                self._changed.get()
            except BaseException as error:  # noqa: BLE001 - what a signal handler raised; raised again below
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._ended.append(None)
            self._changed.put(None)


def work_together(work: Callable[[], None], threads: int, own: Callable[[], None] | None = None) -> None:
    """Run ``work`` in some threads, and ``own``, or ``work`` too, in the caller's; return when all have ended."""
    with contextlib.closing(ThreadPool(work, threads)) as crew, crew:
        (own or work)()


def map_together(work: Callable[[T], R], items: Sequence[T], threads: int) -> list[R]:
    """Return what ``work`` returns for each item, done by some threads and the caller's; raise the first error.

    Example:
        >>> map_together(len, ["a", "bc"], 4)
        [1, 2]
    """
    results: dict[int, R] = {}
    numbers = iter(range(len(items)))
    failed = FirstError()

    def run() -> None:
        for number in numbers:
            with failed:
                results[number] = work(items[number])
            if failed.error is not None:
                break

    work_together(run, min(threads, len(items)) - 1)
    failed.reraise()
    return [results[number] for number in range(len(items))]


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
                if ready() or not left > 0:  # not a number, too
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
