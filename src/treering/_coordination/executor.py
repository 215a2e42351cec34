"""The steps of a joint save, carried out on real notes and real data."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from treering._coordination.message_board import Notes
from treering._coordination.steps import Commit, Get, Make, Now, Operation, Put, Remove, Sleep, Steps, Withdraw, Work
from treering.errors import Timeout

_TRIED_FOR: Final = 1.0
_FIRST_PAUSE: Final = 0.01


class Deeds(Protocol):
    """What a process does for a joint save, beside talking."""

    def work(self) -> bytes:
        """Write the own data, make it durable, return what process 0 needs for the commit."""

    def commit(self, parts: Sequence[bytes]) -> None:
        """Commit, given what the work of each process has answered, in order. Only process 0 is asked."""

    def withdraw(self) -> None:
        """Remove the own data, if any was written.

        Process 0 is asked when all others have left: it may then remove whatever there is of the attempt, its proof
        too, unless the commit did happen after all. Where it is not asked, the proof that the attempt's data are
        leftovers has to stay.
        """


def driven(
    steps: Steps,
    notes: Notes,
    deeds: Deeds,
    *,
    make: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Carry out the steps, until they end or raise.

    Whatever an operation raises goes into the steps, an interrupt too: they tell the others before it goes on. A note
    that cannot be read is as good as one that is not there yet; if that lasts until the deadline it is the cause of
    the error. A note that cannot be put is tried again for a second. ``make`` makes the folder of the notes.

    Raises:
        Timeout: another process did not come.
        TreeringError: another process failed, or this one.
    """
    hands = _Hands(notes, deeds, make, clock, sleep)
    answer: object = None
    thrown: BaseException | None = None
    while True:
        try:
            step = steps.send(answer) if thrown is None else steps.throw(thrown)
        except StopIteration:
            return
        except Timeout as error:
            if hands.unreadable is not None and error.__cause__ is None:
                raise error from hands.unreadable
            raise
        answer = thrown = None
        try:
            answer = hands.do(step)
        except BaseException as error:  # noqa: BLE001 - the steps decide, and raise it or another one
            thrown = error


class _Hands:
    """Does one step after the other."""

    def __init__(
        self,
        notes: Notes,
        deeds: Deeds,
        make: Callable[[], object],
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self.unreadable: OSError | None = None
        """Why the last note that was asked for could not be read."""
        self._notes = notes
        self._deeds = deeds
        self._make = make
        self._clock = clock
        self._sleep = sleep

    def do(self, step: Operation) -> object:
        """Do one, and return the answer."""
        match step:
            case Get(name):
                return self._get(name)
            case Put(name, data):
                self._put(name, data)
            case Remove(name):
                self._notes.remove(name)
            case Make():
                self._make()
            case Sleep(seconds):
                self._sleep(seconds)
            case Now():
                return self._clock()
            case Work():
                return self._deeds.work()
            case Commit(parts):
                self._deeds.commit(parts)
            case Withdraw():
                self._deeds.withdraw()
        return None

    def _get(self, name: str) -> bytes | None:
        try:
            found = self._notes.get(name)
        except OSError as error:
            self.unreadable = error
            return None
        self.unreadable = None
        return found

    def _put(self, name: str, data: bytes) -> None:
        end = self._clock() + _TRIED_FOR
        pause = _FIRST_PAUSE
        while True:
            try:
                self._notes.put(name, data)
            except OSError:
                if self._clock() + pause > end:
                    raise
            else:
                return
            self._sleep(pause)
            pause *= 2
