"""A few own threads around one function, whose first error waits for the caller."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

__all__ = ["Crew", "FirstError"]


class FirstError:
    """A ``with`` block that keeps the first error of any thread and lets the thread go on."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self.error is None:
            self.error = error
        return error is not None

    def reraise(self) -> None:
        """Raise the kept error here, if there is one."""
        if self.error is not None:
            raise self.error


class Crew:
    """Threads that all run ``work``, started at once.

    Not an executor: those refuse work while the interpreter goes down, which is when a last save runs. Where the
    system gives fewer threads than asked, or none, ``size`` says so and the caller does the work itself.
    """

    def __init__(self, work: Callable[[], None], threads: int) -> None:
        self._threads: list[threading.Thread] = []
        for number in range(threads):
            # Daemons: an interrupt in the wrong instant may leave one waiting, and it must not hold the program.
            thread = threading.Thread(target=work, name=f"treering-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                break
            self._threads.append(thread)

    @property
    def size(self) -> int:
        """How many threads really run."""
        return len(self._threads)

    def join(self) -> None:
        """Wait for all threads. An interrupt is held back until they are gone, for they still use the file."""
        interrupt: KeyboardInterrupt | None = None
        while self._threads:
            try:
                self._threads[-1].join()
                self._threads.pop()
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt
