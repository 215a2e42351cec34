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
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar

from treering._coordination.message_board import MessageBoard
from treering._coordination.messages import DecisionMessage, Failure, PrepareMessage, SumMessage, VoteMessage, VoteStage
from treering._store.api import LARGEST_MESSAGE
from treering._values import timing
from treering._values.checkpoint_names import arrival_name, departure_name, sum_name, vote_name
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


_ALL: Final = 8
"""Up to how many missing messages a process looks at all of them at once."""
_GLANCE: Final = 3
"""At how many it looks where more are missing."""
_LINGERS_FOR: Final = 256
"""Of how many processes the departures fit into the time that process 0 lingers; for more it waits longer."""


class Votes:
    """What has come in for one process from those that hand in to it.

    Attributes:
        payloads: what process 0 needs for the commit, by process.
        failures: why processes failed.
        waiting: the processes whose message is missing, and what was read in its place.

    Args:
        call: the call.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._fan_in = call.timing.fan_in
        self.payloads: dict[int, bytes] = {}
        self.failures: dict[int, Failure] = {}
        self.waiting: dict[int, VoteMessage | SumMessage | CorruptError | None] = dict.fromkeys(
            children_of(call.processes.this, call.processes.count, self._fan_in)
        )

    def look(self) -> Generator[Operation, Any, bool]:
        """Look at some of the messages that are missing; return whether more are likely to be there."""
        found = 0
        for process in (some := choose_some(self.waiting)):
            del self.waiting[process]  # those not seen now are looked at before it is looked at again
            found += yield from (self._look_at_sum(process) if self._collects(process) else self._look_at_vote(process))
        return 2 * found > len(some)

    def look_at_all(self) -> Operations:
        """Look at the vote of each process that is missing, also of those that would come through another one."""
        for top in tuple(self.waiting):
            del self.waiting[top]
            yield from self._look_directly(top)
        for process, read in tuple(self.waiting.items()):
            if read is None:
                name = arrival_name(self._call.attempt, process)
                self.waiting[process] = decode_or_error(VoteMessage.decode, (yield Get(name)))

    def put_sum(self, own: bytes) -> Operations:
        """Hand on what has come in, with the own payload."""
        payloads = {self._call.processes.this: own, **self.payloads}
        if self.failures or sum(map(len, payloads.values())) > self._call.most_payloads:
            payloads = {}
        message = SumMessage(payloads=payloads, failures=self.failures)
        yield Put(sum_name(self._call.attempt, self._call.processes.this), message.encode())

    def _collects(self, process: int) -> bool:
        return bool(children_of(process, self._call.processes.count, self._fan_in))

    def _look_at_sum(self, process: int) -> Generator[Operation, Any, bool]:
        name = sum_name(self._call.attempt, process)
        read = decode_or_error(SumMessage.decode, (yield Get(name)))
        if not isinstance(read, SumMessage):
            self.waiting[process] = read
            return False
        below = set(subtree_of(process, self._call.processes.count, self._fan_in))
        if read.failures.keys() <= below and (read.failures or read.payloads.keys() == below):
            self.failures |= read.failures
            self.payloads |= read.payloads
        elif read.payloads or read.failures:
            self.waiting[process] = CorruptError("it speaks for other processes than those that hand in to it")
            return False
        else:
            yield from self._look_directly(process)
            return self.waiting.keys().isdisjoint(below)
        return True

    def _look_directly(self, top: int) -> Operations:
        for process in subtree_of(top, self._call.processes.count, self._fan_in):
            yield from self._look_at_vote(process)

    def _look_at_vote(self, process: int) -> Generator[Operation, Any, bool]:
        name = vote_name(self._call.attempt, process)
        vote = decode_or_error(VoteMessage.decode, (yield Get(name)))
        if isinstance(vote, VoteMessage) and vote.failure is not None:
            self.failures[process] = attribute(vote.failure, process, vote.who)
        elif isinstance(vote, VoteMessage) and vote.stage is VoteStage.PREPARED:
            self.payloads[process] = vote.payload
        else:
            self.waiting[process] = vote
            return False
        return True


def choose_some(waiting: Collection[int]) -> list[int]:
    """Return at which processes to look next: those that were not looked at for the longest time.

    Example:
        >>> choose_some(range(1, 8)), choose_some(range(1, 33))
        ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3])
    """
    return list(waiting)[: _GLANCE if len(waiting) > _ALL else _ALL]


def attribute(failure: Failure, process: int, who: str) -> Failure:
    """Return why a process failed, in wire form.

    A process that has given up waiting for another is the one that is missing now.

    Example:
        >>> late = Failure(name="TimedOutError", message="process 0 did not arrive", missing=(0,))
        >>> attribute(late, 3, "host").missing
        (3,)
    """
    told = failure.attribute_to(describe_process(process, who))
    return dataclasses.replace(told, missing=(process,) if told.missing else ())


def put_failure(call: Call, failure: Failure) -> Operations:
    """Hand on why this process failed, at once: also in the place of those above, which may be at work for long."""
    this = process = call.processes.this
    message = SumMessage(failures={this: attribute(failure, this, call.who)}).encode()
    while process:
        if process != this or children_of(this, call.processes.count, call.timing.fan_in):
            yield Put(sum_name(call.attempt, process), message)
        process = parent_of(process, call.timing.fan_in)


def await_departures(
    call: Call, processes: Iterable[int], repeat: Operation | None = None, *, every: float = 0.0
) -> Generator[Operation, Any, tuple[int, ...] | None]:
    """Wait until processes have left, but not long; return those that were waited for, None where some have not left.

    Args:
        call: the call.
        processes: those that are waited for.
        repeat: what is carried out first, and again while processes are missing; an error of it is no reason to end.
        every: after how many seconds it is carried out again.
    """
    waiting = dict.fromkeys(processes)
    waited = dict(waiting)
    pause = poll_intervals(call, collects=True)
    now = yield NOW
    # Only process 0 can wait for more than fit into that time.
    patience = 1.0 if call.processes.this else max(1.0, call.processes.count / _LINGERS_FOR)
    due, end = now, now + call.linger * patience
    while True:
        if repeat is not None and now >= due:
            with contextlib.suppress(OSError):
                yield repeat
            due = now + every
        found = 0
        for process in (some := choose_some(waiting)):
            del waiting[process]
            name = departure_name(call.attempt, process)
            left = decode_or_error(VoteMessage.decode, (yield Get(name)))
            if not isinstance(left, VoteMessage):
                waiting[process] = None
                continue
            found += 1
            if left.stage is VoteStage.FAILED:  # it gave up and waited for none of those that hand in to it
                below = dict.fromkeys(children_of(process, call.processes.count, call.timing.fan_in))
                waiting |= {one: None for one in below if one not in waited}
                waited |= below
        if not waiting:
            return tuple(waited)
        if 2 * found <= len(some):  # else more are likely to be there, and are looked at although the time is over
            if now >= end:
                return None
            yield Sleep(min(next(pause), end - now))
        now = yield NOW


def messages_of(call: Call, processes: Iterable[int]) -> tuple[str, ...]:
    """Return the names of all messages of some processes."""
    attempt, count, fan_in = call.attempt, call.processes.count, call.timing.fan_in
    names: list[str] = []
    for process in processes:
        names += (arrival_name(attempt, process), vote_name(attempt, process), departure_name(attempt, process))
        if process and children_of(process, count, fan_in):
            names.append(sum_name(attempt, process))
    return tuple(names)


def parent_of(process: int, fan_in: int) -> int:
    """Return the process that collects the vote of another; of process 0 there is none, and 0 stands for it.

    Example:
        >>> parent_of(32, 32), parent_of(33, 32)
        (0, 1)
    """
    return max(process - 1, 0) // fan_in


def children_of(process: int, count: int, fan_in: int) -> range:
    """Return the processes whose votes a process collects.

    Example:
        >>> children_of(0, 34, 32), children_of(1, 34, 32), children_of(2, 34, 32)
        (range(1, 33), range(33, 34), range(34, 34))
    """
    first = fan_in * process + 1
    return range(min(first, count), min(first + fan_in, count))


def subtree_of(process: int, count: int, fan_in: int) -> Iterator[int]:
    """Yield a process and all whose votes go through it.

    Example:
        >>> list(subtree_of(1, 12, 2))
        [1, 3, 4, 7, 8, 9, 10]
    """
    level = range(process, process + 1)
    while level:
        yield from level
        level = range(children_of(level[0], count, fan_in).start, children_of(level[-1], count, fan_in).stop)
