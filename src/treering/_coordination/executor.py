"""Runs the protocol of a joint save: its operations, carried out on real messages and real data."""

from __future__ import annotations

import dataclasses
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from treering._coordination import operations
from treering._coordination.message_board import MessageBoard
from treering._coordination.operations import Operation, Operations
from treering._values import timing
from treering.errors import TimedOutError


class Participant(Protocol):
    """What a process does for a joint save, beside talking."""

    def prepare(self) -> bytes:
        """Write the own data, make it durable, return what process 0 needs for the commit."""

    def commit(self, parts: Sequence[bytes]) -> None:
        """Commit, given what the work of each process has answered, in order. Only process 0 is asked."""

    def roll_back(self) -> None:
        """Remove the own data, if any was written.

        Process 0 is asked when all others have left: it may then remove whatever there is of the attempt, its proof
        too, unless the commit did happen after all. Where it is not asked, the proof that the attempt's data are
        leftovers has to stay.
        """


def run_protocol(
    protocol: Operations,
    board: MessageBoard,
    participant: Participant,
    *,
    make: Callable[[], object] = lambda: None,
    begin: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Carry out the operations, until they end or raise.

    What an operation raises, an interrupt too, is thrown into the generator, which tells the others before it goes on.
    A message that cannot be read counts as one that is not there yet; if that lasts until the deadline, it is the cause
    of the error. A message that cannot be put is tried again for a second. ``make`` makes the folder of the messages.
    ``begin`` is called at the first operation: from then on the protocol tells the others how the call ends.

    Raises:
        TimedOutError: another process did not come.
        TreeringError: another process failed, or this one.
    """
    executor = _Executor(board, participant, make, begin, clock, sleep)
    thrown: BaseException | None = None
    while True:
        try:
            _carry_out(protocol, executor, thrown)
        except BaseException as error:  # an interrupt between two operations: the protocol decides about it too
            if inspect.getgeneratorstate(protocol) == inspect.GEN_CLOSED:
                raise
            thrown = error
        else:
            return


def _carry_out(protocol: Operations, executor: _Executor, thrown: BaseException | None) -> None:
    answer: object = None
    while True:
        try:
            operation = protocol.send(answer) if thrown is None else protocol.throw(thrown)
        except StopIteration:
            return
        except operations.OutOfStep as error:  # a class that only protocols tell from others
            raise TimedOutError(error.message, hint=error.hint, missing=error.missing) from None
        except TimedOutError as error:
            if executor.unreadable is not None and error.__cause__ is None:
                raise error from executor.unreadable
            raise
        answer = thrown = None
        try:
            answer = executor.run(operation)
        except BaseException as error:  # noqa: BLE001 - the protocol decides, and raises it or another one
            thrown = error


@dataclasses.dataclass(slots=True)
class _Executor:
    """Does one step after the other."""

    board: MessageBoard
    participant: Participant
    make: Callable[[], object]
    begin: Callable[[], object]
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    unreadable: OSError | None = None
    """Why the last message that was asked for could not be read."""
    has_begun: bool = False

    def run(self, operation: Operation) -> object:
        """Do one, and return the answer."""
        if not self.has_begun:
            self.begin()
            self.has_begun = True
        match operation:
            case operations.Get(name):
                return self._get(name)
            case operations.Put(name, data):
                self._put(name, data)
            case operations.Remove(names):
                self.board.remove_all(names)
            case operations.MakeFolder():
                self.make()
            case operations.Sleep(seconds):
                self.sleep(seconds)
            case operations.Now():
                return self.clock()
            case operations.PrepareData():
                return self.participant.prepare()
            case operations.Commit(parts):
                self.participant.commit(parts)
            case operations.Rollback():
                self.participant.roll_back()
        return None

    def _get(self, name: str) -> bytes | None:
        self.unreadable = None
        try:
            return self.board.get(name)
        except OSError as error:
            self.unreadable = error
            return None

    def _put(self, name: str, data: bytes) -> None:
        end = self.clock() + timing.current.put_retries
        pause = timing.current.put_pause
        while True:
            try:
                self.board.put(name, data)
            except OSError:
                if self.clock() + pause > end:
                    raise
            else:
                return
            self.sleep(pause)
            pause *= 2
