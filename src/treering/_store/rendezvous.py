"""How the processes of a job save together: who says what when, who waits for whom, and when data may be removed.

Pure: the steps of process 0 (`leading`, `refused`) and of the others (`following`) are generators that yield operations
and are sent the answers. `treering._store.joint` carries them out on a real folder, ``python -m torture schedules`` in
a world of its own with kills, pauses and lost answers.

The rules that everything rests on:

- Process 0 commits only when every process has said that its data is durable.
- Whoever has said so removes its data only when process 0 says that the attempt failed and was not committed.
- Process 0 says so only if it never asked for the commit. If the commit itself failed, nobody removes anything but
  process 0, which can look.
- Every wait has a deadline, and whoever gives up tells the others first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import platform
from collections.abc import Callable, Generator, Iterator
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias

from treering._store.checkpoint_names import begin_note, part_note, verdict_note
from treering._store.note_text import Begin, Failure, Part, Stage, Verdict
from treering._values.processes import Processes, named
from treering.errors import Corrupt, StoreFailed, Timeout, TreeringError

__all__ = [
    "Call",
    "Commit",
    "Get",
    "Now",
    "Operation",
    "OutOfStep",
    "Pace",
    "Put",
    "Remove",
    "Sleep",
    "Steps",
    "Withdraw",
    "Work",
    "attempt_of",
    "following",
    "leading",
    "refused",
]


# Tuples: the simulation makes a hundred million of them.
class Put(NamedTuple):
    """Make ``data`` the content of a note."""

    name: str
    data: bytes


class Get(NamedTuple):
    """Read a note; answered with its content, or None where it is not there or cannot be read now."""

    name: str


class Remove(NamedTuple):
    """Remove a note."""

    name: str


class Sleep(NamedTuple):
    """Wait so many seconds."""

    seconds: float


class Now(NamedTuple):
    """Ask what time it is; answered in seconds."""


class Work(NamedTuple):
    """Write the own data and make it durable; answered with what process 0 needs for the commit."""


class Commit(NamedTuple):
    """Commit; only process 0 is asked."""

    parts: tuple[bytes, ...]
    """What the work of each process has answered, in order."""


class Withdraw(NamedTuple):
    """Remove the own data, if any was written.

    Process 0 is asked when all others have left: it may then remove whatever there is of the attempt, unless it finds
    that the commit did happen. Where it is not asked, what proves that the attempt's data are leftovers has to stay.
    """


Operation: TypeAlias = Put | Get | Remove | Sleep | Now | Work | Commit | Withdraw
Steps: TypeAlias = Generator[Operation, Any, None]


class Pace(NamedTuple):
    """How often one looks, and how long one stays for those who are late."""

    first: float = 0.001
    """Seconds of the first pause between two looks."""
    most: float = 0.05
    """Seconds of the longest."""
    growth: float = 1.5
    """How much longer each is than the one before."""
    linger: float = 5.0
    """Seconds that process 0 stays to see that all have read its verdict."""


USUAL_PACE: Final = Pace()


class OutOfStep(Timeout):
    """Process 0 has gone on to a later call.

    Attributes:
        number: that call.
    """

    number: int = 0


def attempt_of(job: str, number: int) -> str:
    """Return the attempt of one call of a job, which all its processes know without talking.

    Example:
        >>> attempt_of("0123456789abcdef", 1)
        '5d2a91aff8af74fb'
    """
    return hashlib.sha256(f"{job} {number}".encode()).hexdigest()[:16]


def _this_one() -> str:
    return f"{platform.node() or 'this machine'}, pid {os.getpid()}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One joint save, seen by one of the processes.

    Example:
        >>> two = Processes(this=0, count=2)
        >>> call = Call(job="0123456789abcdef", number=1, processes=two, timeout=60.0, doing="save 'x'")
        >>> call.attempt == attempt_of("0123456789abcdef", 1)
        True
    """

    job: str
    """16 hexadecimal digits that all processes agreed on."""
    number: int
    """How many joint saves the process has made, this one included."""
    processes: Processes
    """Which one this is, of how many."""
    timeout: float
    """Seconds to wait at one point for others."""
    doing: str
    """What it does, for messages: ``save '/x/ckpt'``."""
    who: str = dataclasses.field(default_factory=_this_one)
    """Where this process runs, for the messages of others."""
    pace: Pace = USUAL_PACE
    """How often it looks."""

    @property
    def attempt(self) -> str:
        """The attempt of this call."""
        return attempt_of(self.job, self.number)


_AGAIN_AFTER: Final = 1.0
_NOW: Final = Now()
_WORK: Final = Work()
_WITHDRAW: Final = Withdraw()
_NOTHING_SAVED: Final = "nothing was saved, and what stood at the path is untouched"
_NOT_KNOWN: Final = "this process had done its part, so whether it was saved is not known here"
_LOOK: Final = (
    "look what became of them; should they live, the path may not be shared by all machines, or the time is too short: "
    "raise timeout= or TREERING_TIMEOUT_S"
)

_Note = TypeVar("_Note", Begin, Part, Verdict)


class _Told(Exception):
    """All know that the attempt failed, and why."""

    def __init__(self, error: TreeringError, *, kept: bool) -> None:
        super().__init__()
        self.error = error
        self.kept = kept


def leading(call: Call, signature: bytes) -> Steps:
    """Yield the steps of process 0, which has entered the folder.

    Args:
        call: the call.
        signature: what this process is saving; the others compare.

    Raises:
        Timeout: others did not come, or did not end their work. Nothing was saved.
        TreeringError: another process failed, or this one; the class is that of its error, `ProcessFailed` where it was
            none of ours. Nothing was saved, unless the commit itself failed and says otherwise.
    """
    attempt = call.attempt
    try:
        begin = Begin(number=call.number, attempt=attempt, signature=signature, who=call.who)
        yield Put(begin_note(call.job), begin.text())
        payload = yield _WORK
        yield Put(part_note(attempt, 0), Part(stage=Stage.WRITTEN, who=call.who).text())
        parts = yield from _gathered(call, payload)
    except GeneratorExit:
        raise
    except _Told as told:
        raise told.error from None
    except BaseException as error:  # an interrupt too: the others are told before it goes on
        yield from _failed(call, _own_failure(call, error), (0,))
        _raise(call, error)
    try:
        yield Commit(parts)
    except GeneratorExit:
        raise
    except BaseException as error:  # as above
        # It may have happened all the same. Then the data of the others is needed.
        yield from _failed(call, _own_failure(call, error), (0,), kept=True)
        _raise(call, error)
    # From here on it is saved, whatever becomes of the notes.
    if (yield from _announced(call, Verdict(who=call.who), call.processes.others)):
        yield from _cleared(call)


def refused(call: Call, error: BaseException) -> Steps:
    """Yield the steps of process 0 where it could not enter the folder: the others are told why. It raises nothing."""
    verdict = Verdict(who=call.who, failure=_own_failure(call, error), processes=(0,))
    if (yield from _announced(call, verdict, call.processes.others)):
        yield from _cleared(call)


def following(call: Call, check: Callable[[bytes], None]) -> Steps:
    """Yield the steps of every other process.

    Args:
        call: the call.
        check: compares what this process is saving with the signature of process 0, and raises what is wrong.

    Raises:
        OutOfStep: process 0 has gone on to a later call.
        Timeout: process 0 or another one did not come. If this process had done its part, it may have been committed;
            the message says so.
        TreeringError: another process failed, or this one.
    """
    mine = part_note(call.attempt, call.processes.this)
    has_worked = False
    try:
        begin = yield from _begun(call)
        check(begin.signature)
        yield Put(mine, Part(stage=Stage.AT_WORK, who=call.who).text())
        has_worked = True
        payload = yield _WORK
        yield from _still_on(call, begin)
    except GeneratorExit:
        raise
    except _Told as told:
        yield from _left(call, mine, withdraw=has_worked)
        raise told.error from None
    except OutOfStep:
        if has_worked:
            yield from _withdrawn()
        raise
    except BaseException as error:  # an interrupt too: the others are told before it goes on
        yield from _gave_up(call, mine, error, withdraw=has_worked)
        _raise(call, error)
    # From here on process 0 may commit: an error of this very note, too, may mean that it is there.
    try:
        yield Put(mine, Part(stage=Stage.WRITTEN, who=call.who, payload=payload).text())
        yield from _committed(call, begin)
    except (GeneratorExit, OutOfStep):
        raise
    except _Told as told:
        yield from _left(call, mine, withdraw=not told.kept)
        raise told.error from None
    except BaseException as error:  # as above
        yield from _gave_up(call, mine, error, withdraw=False)
        _raise(call, error)
    yield from _left(call, mine, withdraw=False)


# ------------------------------------------------------------------------------------------------- what process 0 does


def _gathered(call: Call, own: bytes) -> Generator[Operation, Any, tuple[bytes, ...]]:
    """Wait until every process has written, and return what each has answered.

    Raises:
        _Told: one of them failed, or some did not come; the others know it.
    """
    attempt = call.attempt
    payloads = {0: own}
    waiting: dict[int, Part | Corrupt | None] = dict.fromkeys(call.processes.others)
    pauses = _pauses(call.pace)
    end = (yield _NOW) + call.timeout
    while True:
        failed: dict[int, Failure] = {}
        for process in tuple(waiting):
            part = _understood(Part.read, (yield Get(part_note(attempt, process))))
            if isinstance(part, Part) and part.stage is Stage.WRITTEN:
                payloads[process] = part.payload
                del waiting[process]
                continue
            waiting[process] = part
            if isinstance(part, Part) and part.failure is not None:
                failed[process] = part.failure.blamed_on(_called(process, part.who))
        if failed:
            raise (yield from _told_failed(call, failed))
        if not waiting:
            return tuple(payloads[process] for process in range(call.processes.count))
        now = yield _NOW
        if now >= end:
            raise (yield from _told_missing(call, waiting))
        yield Sleep(min(next(pauses), end - now))


def _told_failed(call: Call, failed: dict[int, Failure]) -> Generator[Operation, Any, _Told]:
    """Tell all that some processes failed, and return what to raise."""
    processes = tuple(failed)
    failure = failed[processes[0]]
    if others := processes[1:]:
        failure = dataclasses.replace(failure, message=f"{failure.message} ({named(others)} failed as well)")
    yield from _failed(call, failure, processes)
    return _Told(failure.error(_undone(call), processes), kept=False)


def _told_missing(call: Call, waiting: dict[int, Part | Corrupt | None]) -> Generator[Operation, Any, _Told]:
    """Tell all that some processes did not come, and return what to raise."""
    missing = tuple(waiting)
    absent = [process for process in missing if waiting[process] is None]
    reasons = [f"{named(absent)} did not come within {call.timeout:g} s"] if absent else []
    for process, part in waiting.items():
        if isinstance(part, Part):
            reasons.append(f"{_called(process, part.who)} has not ended its part within {call.timeout:g} s")
        elif part is not None:
            reasons.append(f"what process {process} says cannot be read ({part})")
    message = f"{'; '.join(reasons)}; {_NOTHING_SAVED}"
    failure = Failure(name=Timeout.__name__, message=message, hint=_LOOK, missing=missing)
    yield from _failed(call, failure, missing)
    return _Told(failure.error(_undone(call), missing), kept=False)


def _failed(call: Call, failure: Failure, processes: tuple[int, ...], *, kept: bool = False) -> Steps:
    """Tell all that the attempt failed; when all have left, nothing of it stays."""
    # Whoever did not come in all that time is not waited for once more.
    waited_for = [process for process in call.processes.others if process not in failure.missing]
    verdict = Verdict(who=call.who, failure=failure, processes=processes, kept=kept)
    have_left = yield from _announced(call, verdict, waited_for)
    if have_left and len(waited_for) == len(call.processes.others):
        yield from _withdrawn()
        yield from _cleared(call)


def _announced(call: Call, verdict: Verdict, waited_for: Iterable[int]) -> Generator[Operation, Any, bool]:
    """Put the verdict, stay until the processes have read it, but not long; return whether they have.

    It raises nothing of its own: all is decided already.
    """
    attempt = call.attempt
    name, data = verdict_note(attempt), verdict.text()
    waiting = list(waited_for)
    pauses = _pauses(call.pace)
    now = yield _NOW
    again, end = now, now + call.pace.linger
    while True:
        if now >= again:
            # Said more than once: the first time may have failed, or a saver of another job may have swept it.
            with contextlib.suppress(OSError):
                yield Put(name, data)
            again = now + _AGAIN_AFTER
        for process in tuple(waiting):
            part = _understood(Part.read, (yield Get(part_note(attempt, process))))
            if isinstance(part, Part) and part.left:
                waiting.remove(process)
        if not waiting or now >= end:
            return not waiting
        yield Sleep(min(next(pauses), end - now))
        now = yield _NOW


def _cleared(call: Call) -> Steps:
    """Remove all notes of the call. Where some are still to be read they stay, and the next saver sweeps them."""
    attempt = call.attempt
    parts = (part_note(attempt, process) for process in range(call.processes.count))
    for name in (*parts, begin_note(call.job), verdict_note(attempt)):
        with contextlib.suppress(OSError):
            yield Remove(name)


# ------------------------------------------------------------------------------------------------- what the others do


def _begun(call: Call) -> Generator[Operation, Any, Begin]:
    """Wait until process 0 has begun with this call.

    Raises:
        _Told: it could not.
        OutOfStep: it has gone on.
        Timeout: it did not come.
    """
    pauses = _pauses(call.pace)
    end = (yield _NOW) + call.timeout
    while True:
        yield from _heard(call)
        begin = _understood(Begin.read, (yield Get(begin_note(call.job))))
        if isinstance(begin, Begin) and begin.number >= call.number:
            if begin.number > call.number:
                raise _out_of_step(call, begin, _NOTHING_SAVED)
            return begin
        now = yield _NOW
        if now >= end:
            damage = f"; what it says cannot be read ({begin})" if isinstance(begin, Corrupt) else ""
            what = f"process 0 did not come within {call.timeout:g} s{damage}; {_NOTHING_SAVED}"
            raise _leader_missing(call, what)
        yield Sleep(min(next(pauses), end - now))


def _still_on(call: Call, begun: Begin) -> Steps:
    """See that process 0 still is in this call: its notes are there. A network file system may need a moment to say so.

    Raises:
        _Told: the attempt failed meanwhile.
        OutOfStep: process 0 has gone on.
        Timeout: process 0 has left, and nobody knows why.
    """
    pauses = _pauses(call.pace)
    end = (yield _NOW) + call.pace.linger
    while True:
        yield from _heard(call)
        begin = _understood(Begin.read, (yield Get(begin_note(call.job))))
        if isinstance(begin, Begin) and begin.number >= call.number:
            if begin.number > call.number:
                raise _out_of_step(call, begin, _NOTHING_SAVED)
            return
        now = yield _NOW
        if now >= end:
            raise _leader_missing(call, f"{_called(0, begun.who)} has left this save; {_NOTHING_SAVED}")
        yield Sleep(min(next(pauses), end - now))


def _committed(call: Call, begun: Begin) -> Steps:
    """Wait until process 0 has committed.

    Raises:
        _Told: it has not, and will not.
        OutOfStep: it has gone on; nobody knows what became of this call.
        Timeout: it says nothing.
    """
    part = part_note(call.attempt, 0)
    pauses = _pauses(call.pace)
    start = yield _NOW
    end = start + call.timeout
    has_written = False
    while not (yield from _heard(call)):
        if not has_written:
            first = _understood(Part.read, (yield Get(part)))
            if isinstance(first, Part) and first.stage is Stage.WRITTEN:
                has_written = True
                # From now on process 0 waits for the others as long as that, and then commits or says why not.
                end = (yield _NOW) + call.timeout * 1.1 + call.pace.linger
        begin = _understood(Begin.read, (yield Get(begin_note(call.job))))
        if isinstance(begin, Begin) and begin.number > call.number:
            if (yield from _heard(call)):
                return
            raise _out_of_step(call, begin, _NOT_KNOWN)
        now = yield _NOW
        if now >= end:
            did = "has not said whether it committed" if has_written else "has not ended its part"
            raise _leader_missing(call, f"{_called(0, begun.who)} {did} within {now - start:.0f} s; {_NOT_KNOWN}")
        yield Sleep(min(next(pauses), end - now))


def _heard(call: Call) -> Generator[Operation, Any, bool]:
    """Return whether process 0 says that it has committed.

    Raises:
        _Told: it says that the attempt failed.
    """
    verdict = _understood(Verdict.read, (yield Get(verdict_note(call.attempt))))
    if not isinstance(verdict, Verdict):
        return False
    if verdict.failure is not None:
        raise _Told(verdict.failure.error(_undone(call), verdict.processes), kept=verdict.kept)
    return True


def _left(call: Call, mine: str, *, withdraw: bool) -> Steps:
    """Leave, knowing what became of the attempt."""
    if withdraw:
        yield from _withdrawn()
    with contextlib.suppress(OSError):  # process 0 then leaves the notes to the next saver
        yield Put(mine, Part(stage=Stage.SEEN, who=call.who, left=True).text())


def _gave_up(call: Call, mine: str, error: BaseException, *, withdraw: bool) -> Steps:
    """Tell the others at once, then remove the own data if that is safe, then leave."""
    part = Part(stage=Stage.FAILED, who=call.who, failure=Failure.of(_ours(call, error)), left=not withdraw)
    with contextlib.suppress(OSError):  # the error that brought us here says more
        yield Put(mine, part.text())
    if withdraw:
        yield from _withdrawn()
        with contextlib.suppress(OSError):
            yield Put(mine, dataclasses.replace(part, left=True).text())


def _withdrawn() -> Steps:
    """Remove the own data; what cannot be removed stays, and the next saver sweeps it."""
    with contextlib.suppress(OSError):
        yield _WITHDRAW


# ------------------------------------------------------------------------------------------------------------ in common


def _pauses(pace: Pace) -> Iterator[float]:
    pause = pace.first
    while True:
        yield pause
        pause = min(pause * pace.growth, pace.most)


def _understood(read: Callable[[bytes], _Note], data: bytes | None) -> _Note | Corrupt | None:
    """Return what a note says; an error, not raised, where it is damaged: then it may yet be written anew."""
    if data is None:
        return None
    try:
        return read(data)
    except Corrupt as error:
        return error


def _called(process: int, who: str) -> str:
    return f"process {process} ({who})"


def _undone(call: Call) -> str:
    return f"could not {call.doing}"


def _own_failure(call: Call, error: BaseException) -> Failure:
    return Failure.of(_ours(call, error)).blamed_on(_called(call.processes.this, call.who))


def _ours(call: Call, error: BaseException) -> BaseException:
    """Return an error of the notes as one of ours; any other as it is."""
    if not isinstance(error, OSError) or isinstance(error, TreeringError):
        return error
    refusal = StoreFailed(f"{_undone(call)}: {error.strerror or error}")
    refusal.errno = error.errno
    return refusal


def _raise(call: Call, error: BaseException) -> NoReturn:
    ours = _ours(call, error)
    if ours is error:
        raise error
    raise ours from error


def _leader_missing(call: Call, what: str) -> Timeout:
    error = Timeout(f"{_undone(call)}: {what}", hint=_LOOK)
    error.missing = (0,)
    return error


def _out_of_step(call: Call, begin: Begin, left: str) -> OutOfStep:
    what = f"{_called(0, begin.who)} is at its joint save number {begin.number}, this process at number {call.number}"
    hint = "all processes have to make the same saves in the same order"
    error = OutOfStep(f"{_undone(call)}: {what}; {left}", hint=hint)
    error.number = begin.number
    error.missing = (0,)
    return error
