"""Saves in flight, and the thread that writes them: one for each process, first in, first out.

A thread of our own, and a daemon: executors refuse work while the interpreter goes down, which is when a last save is
written; and what hangs must not hold the program for ever. ``treering._ops.leaving`` waits for what is in flight then.
"""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from treering._ops.flight import Flight, Stage, writes_here
from treering._ops.room import async_bytes
from treering.errors import Timeout

__all__ = ["Writer"]

MOST: Final = 2
"""How many saves are in flight at most: one is written, one waits."""

_LOOK_SECONDS: Final = 0.5


class Writer:
    """The saves of this process that are in flight, and those whose errors nobody knows.

    Attributes:
        changed: held while anything here changes; notified then.
        flights: what is in flight, in the order in which it was admitted.
        failed: what has failed, as long as nobody was told.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.flights: list[Flight] = []
        self.failed: list[Flight] = []
        self._queue: deque[tuple[Flight, Callable[[], None]]] = deque()
        self._thread: threading.Thread | None = None

    # -------------------------------------------------------------------------------------------------- taking saves

    def _admit(self, flight: Flight) -> None:
        limit = async_bytes()
        with self.changed:
            while not (self._has_room(flight, limit) or writes_here()):
                self._require_progress(f"could not {flight.doing}: no room beside the saves in flight")
                self.changed.wait(_LOOK_SECONDS)
            self.flights.append(flight)

    @contextmanager
    def room_for(self, flight: Flight) -> Iterator[None]:
        """Wait until there is room for a save, and keep it, unless the block fails before it hands the save over.

        Raises:
            Timeout: those in flight show no progress any more.
        """
        try:
            self._admit(flight)
            yield
        except BaseException:  # an interrupt too; raised again below
            with self.changed:
                if not self.has_taken(flight):
                    self._drop(flight)
            raise

    def has_taken(self, flight: Flight) -> bool:
        """Tell whether a save was handed over: it will end, well or not."""
        return flight.stage is not Stage.WAITING or any(other is flight for other, _ in tuple(self._queue))

    def hand_over(self, flight: Flight, write: Callable[[], None]) -> None:
        """Let the thread write an admitted save.

        While the program ends nobody would wait for it, or there is no thread any more: then it is written, when its
        turn has come, before this returns.

        Raises:
            BaseException: it was written here, and failed.
        """
        with self.changed:
            if flight not in self.flights:  # what only tells others why it failed needs no room
                self.flights.append(flight)
            if threading.main_thread().is_alive() and self._has_thread():
                self._queue.append((flight, write))
                self.changed.notify_all()
                return
            while self.flights[0] is not flight and not self._stalled():
                self.changed.wait(_LOOK_SECONDS)
        self._do(flight, write)
        if flight.error is not None and not flight.told:
            flight.told = True
            raise flight.error

    def _has_room(self, flight: Flight, limit: int) -> bool:
        held = sum(other.nbytes for other in self.flights)
        return not self.flights or (len(self.flights) < MOST and held + flight.nbytes <= limit)

    def _has_thread(self) -> bool:
        if self._thread is None or not self._thread.is_alive():
            # Noted first: were this interrupted once it runs, there would be two.
            self._thread = threading.Thread(target=self._work, name="treering-saves", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter goes down, or the system has no more threads
                return False
        return True

    # ------------------------------------------------------------------------------------------------------- writing

    def _work(self) -> None:
        while True:
            with self.changed:
                while not self._queue:
                    self.changed.wait()
                flight, write = self._queue.popleft()
            self._do(flight, write)
            del flight, write  # or their arrays would stay until the next save comes

    def _do(self, flight: Flight, write: Callable[[], None]) -> None:
        error: BaseException | None = None
        flight.begin()
        try:
            write()
        except BaseException as raised:  # noqa: BLE001 - an interrupt too: whoever waits for the save gets it
            # It may be kept for long, and holds no arrays then: not by this frame, nor by those that are over.
            error = raised.with_traceback(raised.__traceback__ and raised.__traceback__.tb_next)
            _release_frames(error)
        with self.changed:
            flight.end(error)
            self.failed = [one for one in (*self.failed, flight) if one.error is not None and not one.told]
            self._drop(flight)

    def _drop(self, flight: Flight) -> None:
        self.flights = [other for other in self.flights if other is not flight]
        self.changed.notify_all()

    # ------------------------------------------------------------------------------------------------------- waiting

    def of(self, path: Path) -> list[Flight]:
        """Return what is in flight to a path, or as a step of the run there."""
        with self.changed:
            return self._of(path)

    def _of(self, path: Path | None) -> list[Flight]:
        return [flight for flight in self.flights if path is None or path in (flight.path, flight.run)]

    def take_failed(self, path: Path | None = None) -> list[Flight]:
        """Return the saves to a path, or of a run, whose errors nobody knows yet; from now on somebody does.

        Args:
            path: the path; None for all.
        """
        with self.changed:
            untold = [flight for flight in self.failed if not flight.told]
            taken = [flight for flight in untold if path is None or path in (flight.path, flight.run)]
            for flight in taken:
                flight.told = True
            self.failed = [flight for flight in untold if not flight.told]
            return taken

    def wait(self, path: Path | None, timeout: float | None) -> None:
        """Wait until nothing is in flight to a path, or of a run; None for all. The thread that writes does not wait.

        Raises:
            Timeout: it did not end within ``timeout`` seconds, or shows no progress any more.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        with self.changed:
            while not writes_here() and (flights := self._of(path)):
                what = f"the save to {flights[0].shown!r} is not done"
                self._require_progress(what)
                left = end - time.monotonic()
                if left <= 0:
                    raise Timeout(f"{what} within {timeout:g} s", hint="it goes on")
                self.changed.wait(min(left, _LOOK_SECONDS))

    def _stalled(self) -> bool:
        """Tell whether nothing moves any more; a save that waits for its turn moves with the one that has it."""
        begun = [flight for flight in self.flights if flight.stage is not Stage.WAITING]
        return all(flight.stalled() for flight in begun or self.flights)

    def _require_progress(self, what: str) -> None:
        if self._stalled():
            raise Timeout(f"{what}: nothing was written for the {self.flights[0].timeout:g} s of its timeout")


def _release_frames(error: BaseException) -> None:
    """Let the frames of an error, and of those that led to it, hold nothing."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            left += [one.__cause__, one.__context__]
