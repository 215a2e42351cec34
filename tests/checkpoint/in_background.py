"""Saves in the background: that stand still for as long as a test wants, and that nobody has asked for."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from treering._background import saves
from treering._background.writer import Writer
from treering._checkpoint.transaction import CheckpointFolder

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


# ------------------------------------------------------------------------------------------- what the program would see


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """After a test nothing is in flight, and no error is untold: the end of the program would say so."""
    yield
    writer = saves.writer()
    writer.wait(None, PATIENCE)
    assert writer.take_failed() == []


def wait_until_ended(path: Path) -> None:
    """Wait until nothing is in flight to a path, or of the run there, as a load does, but ask for no error."""
    saves.wait_for(path, PATIENCE)


def count_in_flight(path: Path) -> int:
    """Return how many saves to a path are in flight."""
    return len(saves.in_flight(path))


def begin_without_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process have written nothing in the background yet."""
    monkeypatch.setitem(saves._current, "writer", Writer())


class _Writers(threading.local):
    """What writes the saves of the process that this thread is."""

    def __init__(self) -> None:
        self.writer = Writer()

    def __getitem__(self, _: str) -> Writer:
        return self.writer


def write_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each thread be a process with a writing thread of its own."""
    monkeypatch.setattr(saves, "_current", _Writers())


def commits_wait(event: threading.Event) -> None:
    """Let the commits of this program wait until an event is set; it is never undone."""
    commit = CheckpointFolder.commit

    def wait(*given: Any, **named: Any) -> Any:
        assert event.wait(PATIENCE)
        return commit(*given, **named)

    CheckpointFolder.commit = wait  # type: ignore[method-assign]


begin_load = saves.begin_load
"""Begin a load in the background, as ``load_async`` does."""
