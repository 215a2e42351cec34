"""Saves that stand still in the background for as long as a test wants."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 60
"""Seconds in which everything that is to happen has happened, on a loaded machine too."""


class Gate:
    """A ``progress`` function that does not come back before the gate is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, done: int, total: int) -> None:
        self.reached.set()
        assert self._open.wait(PATIENCE)

    def open(self) -> None:
        """Let all through, now and later."""
        self._open.set()


@contextmanager
def gate() -> Iterator[Gate]:
    """Return a gate that is open at the end, whatever happens."""
    found = Gate()
    try:
        yield found
    finally:
        found.open()


class Elsewhere:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:  # noqa: BLE001 - for the test to look at
            self.error = error

    def is_on(self, seconds: float = 0.3) -> bool:
        """Tell whether it is still on after so many seconds."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def end(self) -> Any:
        """Return what it returned."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.result
