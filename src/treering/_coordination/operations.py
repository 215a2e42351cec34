"""What the protocol of a joint save is made of: the call, its operations, and what carries these out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import os
import platform
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar

from treering._coordination.message_board import MessageBoard
from treering._coordination.messages import DecisionMessage, Failure, PrepareMessage, SumMessage, VoteMessage
from treering._store.api import LARGEST_MESSAGE
from treering._values import timing
from treering._values.processes import Processes
from treering._values.timing import Timing
from treering.errors import CorruptError, StoreError, TimedOutError, TreeringError

_Message = TypeVar("_Message", PrepareMessage, VoteMessage, SumMessage, DecisionMessage)


# Tuples: the simulation makes a hundred million of them.
class Put(NamedTuple):
    """Make ``data`` the content of a message."""

    name: str
    data: bytes


class Get(NamedTuple):
    """Read a message; answered with its content, or None where it is not there or cannot be read now."""

    name: str


class Remove(NamedTuple):
    """Remove messages, as many as can be."""

    names: tuple[str, ...]


class MakeFolder(NamedTuple):
    """Make the folder that the messages lie in, if it is not there."""


class Sleep(NamedTuple):
    """Wait so many seconds."""

    seconds: float


class Now(NamedTuple):
    """Ask what time it is; answered in seconds."""


class PrepareData(NamedTuple):
    """Write the own data and make it durable; answered with what process 0 needs for the commit."""


class Commit(NamedTuple):
    """Commit; only process 0 is asked."""

    parts: tuple[bytes, ...]
    """What the work of each process has answered, in order."""


class Rollback(NamedTuple):
    """Remove the own data, if any was written.

    Process 0 is asked when all others have left: it may then remove whatever there is of the attempt, unless it finds
    that the commit did happen. Where it is not asked, what proves that the attempt's data are leftovers has to stay.
    """


Operation: TypeAlias = Put | Get | Remove | MakeFolder | Sleep | Now | PrepareData | Commit | Rollback
Operations: TypeAlias = Generator[Operation, Any, None]


MOST_PAYLOADS: Final = LARGEST_MESSAGE // 4
"""Bytes of payloads in one sum, if nothing else is said."""
_LATER_CALLS: Final = 64
_FEW: Final = 8
_MANY: Final = 1024


class Renumbered(Exception):
    """Process 0 counts this very save otherwise than this process.

    Attributes:
        number: which joint save of the job it is there.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class OutOfStep(TimedOutError):
    """Process 0 has gone on to a later call.

    Attributes:
        number: that call.
    """

    number: int = 0


@functools.lru_cache(maxsize=2 * _LATER_CALLS)
def derive_attempt(job: str, number: int) -> str:
    """Return the attempt of one call of a job, which all its processes know without talking.

    Example:
        >>> derive_attempt("0123456789abcdef", 1)
        '5d2a91aff8af74fb'
    """
    return hashlib.sha256(f"{job} {number}".encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One joint save, seen by one of the processes.

    Example:
        >>> two = Processes(this=0, count=2)
        >>> call = Call(job="0123456789abcdef", number=1, processes=two, timeout=60.0, doing="save 'x'")
        >>> call.attempt == derive_attempt("0123456789abcdef", 1)
        True
    """

    job: str
    """16 hexadecimal digits that all processes agreed on."""
    number: int
    """How many joint saves the process has made, this one included; process 0 counts for all."""
    processes: Processes
    """Which one this is, of how many."""
    timeout: float
    """Seconds to wait at one point for others."""
    doing: str
    """What it does, for messages: ``save '/x/ckpt'``."""
    who: str = dataclasses.field(default_factory=lambda: f"{platform.node() or 'this machine'}, pid {os.getpid()}")
    """Where this process runs, for the messages of others."""
    timing: Timing = dataclasses.field(default_factory=lambda: timing.current)
    """How often it looks, and how long the coordinator lingers."""
    begun: int = 0
    """How many joint saves this process has begun by its own count, this one included."""
    fresh: bool = False
    """Whether it is the first one of this process at its path, so that all that meet there mean the same save."""
    most_payloads: int = MOST_PAYLOADS
    """Bytes of payloads in one sum; above that, its reader reads the votes themselves."""

    @property
    def attempt(self) -> str:
        """The attempt of this call."""
        return derive_attempt(self.job, self.number)

    @property
    def live_attempts(self) -> frozenset[str]:
        """The attempts of this call and of the next ones, which others may have given up while process 0 was late."""
        return frozenset(derive_attempt(self.job, self.number + later) for later in range(_LATER_CALLS))

    @property
    def linger(self) -> float:
        """Seconds to stay for those who are late; less than those who are in the next call already wait for us."""
        return min(self.timing.linger, self.timeout / 2)


MAKE_FOLDER: Final = MakeFolder()
NOW: Final = Now()
PREPARE_DATA: Final = PrepareData()
ROLLBACK: Final = Rollback()
NOTHING_SAVED: Final = "nothing was saved, and the path is unchanged"
"""What is left, for messages."""
LOOK: Final = (
    "find out what happened to them; if they still run, the path may not be shared by all machines, or the time is too "
    "short: raise timeout= or TREERING_TIMEOUT_S"
)
"""What to do about processes that did not arrive."""


class OutcomeKnown(Exception):
    """All know that the attempt failed, and why."""

    def __init__(self, error: TreeringError, *, in_doubt: bool) -> None:
        super().__init__()
        self.error = error
        self.in_doubt = in_doubt


def roll_back() -> Operations:
    """Remove the own data; what cannot be removed stays, and the next saver sweeps it."""
    with contextlib.suppress(OSError):
        yield ROLLBACK


def poll_intervals(call: Call, *, took: float = 0.0, collects: bool = False) -> Iterator[float]:
    """Yield the pauses between looks, which grow.

    Among more than eight processes they are longer: the more look, the rarer each does.

    Args:
        call: the call.
        took: seconds that the process took to write its own part: others need about as long.
        collects: whether others wait for what this process finds, so that it looks more often.

    Example:
        >>> few, many = (Call(job="0123456789abcdef", number=1, processes=Processes(this=1, count=count), timeout=60.0,
        ...     doing="save 'x'") for count in (8, 1024))
        >>> next(poll_intervals(few, took=10.0)), next(poll_intervals(many, took=10.0))
        (0.001, 0.1)
    """
    of, count = call.timing, call.processes.count
    pause, longest, growth = of.poll_first, of.poll_longest, of.poll_growth
    if count > _FEW:
        crowd = min(count / _MANY, 1.0)
        longest += (of.poll_longest_crowded - longest) * (0.75 * crowd if collects else crowd)
        pause = min(max(pause * (1 + 15 * crowd), took / 100), longest)
        growth = max(growth, of.poll_growth_crowded)
    while True:
        yield pause
        pause = min(pause * growth, longest)


def decode_or_error(read: Callable[[bytes], _Message], data: bytes | None) -> _Message | CorruptError | None:
    """Return what a message says; an error, not raised, where it is damaged: then it may yet be written anew."""
    if data is None:
        return None
    try:
        return read(data)
    except CorruptError as error:
        return error


def describe_process(process: int, who: str) -> str:
    """Return a process for messages."""
    return f"process {process} ({who})"


def describe_failure(call: Call) -> str:
    """Return what failed, for messages."""
    return f"could not {call.doing}"


def describe_own_error(call: Call, error: BaseException) -> Failure:
    """Describe an error of this process for the others."""
    return Failure.of(convert_error(call, error)).attribute_to(describe_process(call.processes.this, call.who))


def convert_error(call: Call, error: BaseException, left: str = "") -> BaseException:
    """Return an error of the messages as one of ours, which also says what is left; any other as it is."""
    if not isinstance(error, OSError) or isinstance(error, TreeringError):
        return error
    refusal = StoreError(f"{describe_failure(call)}: {error.strerror or error}{left}")
    refusal.errno = error.errno
    return refusal


def raise_converted(call: Call, error: BaseException, left: str = "") -> NoReturn:
    """Raise an error, as one of ours."""
    if (raised := convert_error(call, error, left)) is error:
        raise error
    raise raised from error


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
        except OutOfStep as error:  # a class that only protocols tell from others
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
            case Get(name):
                return self._get(name)
            case Put(name, data):
                self._put(name, data)
            case Remove(names):
                self.board.remove_all(names)
            case MakeFolder():
                self.make()
            case Sleep(seconds):
                self.sleep(seconds)
            case Now():
                return self.clock()
            case PrepareData():
                return self.participant.prepare()
            case Commit(parts):
                self.participant.commit(parts)
            case Rollback():
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
