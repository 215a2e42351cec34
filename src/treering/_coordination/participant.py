"""The steps of every participant in a joint save. ``treering._coordination.rendezvous`` says what they rest on."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator
from typing import Any, Final

from treering._coordination.messages import Begin, Failure, Part, Stage, Verdict
from treering._coordination.steps import (
    LOOK,
    MAKE,
    NOTHING_SAVED,
    NOW,
    WORK,
    Call,
    Get,
    Operation,
    OutOfStep,
    Put,
    Sleep,
    Steps,
    Told,
    called,
    ours,
    pauses,
    raise_ours,
    understood,
    undone,
    withdrawn,
)
from treering._values.checkpoint_names import begin_note, part_note, verdict_note
from treering.errors import Corrupt, Timeout

_NOT_KNOWN: Final = "this process had done its part, so whether it was saved is not known here"


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
    begin: Begin | None = None
    try:
        begin = yield from _begun(call)
        check(begin.signature)
        yield Put(mine, Part(stage=Stage.AT_WORK, who=call.who).text())
        has_worked = True
        payload = yield WORK
        yield from _still_on(call, begin)
    except GeneratorExit:
        raise
    except Told as told:
        yield from _left(call, mine, withdraw=has_worked)
        raise told.error from None
    except OutOfStep:
        if has_worked:
            yield from withdrawn()
        raise
    except BaseException as error:  # noqa: BLE001 - an interrupt too: the others are told before it goes on
        if begin is None:  # process 0 may come later, and is to hear that it waits in vain
            with contextlib.suppress(OSError):
                yield MAKE
        yield from _gave_up(call, mine, error, withdraw=has_worked)
        raise_ours(call, error)
    # From here on process 0 may commit: an error of this very note, too, may mean that it is there.
    try:
        yield Put(mine, Part(stage=Stage.WRITTEN, who=call.who, payload=payload).text())
        yield from _committed(call, begin)
    except (GeneratorExit, OutOfStep):
        raise
    except Told as told:
        yield from _left(call, mine, withdraw=not told.kept)
        raise told.error from None
    except BaseException as error:  # noqa: BLE001 - as above
        yield from _gave_up(call, mine, error, withdraw=False)
        raise_ours(call, error)
    yield from _left(call, mine, withdraw=False)


def _begun(call: Call) -> Generator[Operation, Any, Begin]:
    """Wait until process 0 has begun with this call.

    Raises:
        Told: it could not.
        OutOfStep: it has gone on.
        Timeout: it did not come.
    """
    pause = pauses(call.pace)
    end = (yield NOW) + call.timeout
    while True:
        now = yield NOW  # before the look: whoever sleeps through the deadline looks once more
        begin = yield from _begin_now(call)
        if isinstance(begin, Begin):
            return begin
        if now >= end:
            damage = f"; what it says cannot be read ({begin})" if isinstance(begin, Corrupt) else ""
            what = f"process 0 did not come within {call.timeout:g} s{damage}; {NOTHING_SAVED}"
            raise _leader_missing(call, what)
        yield Sleep(min(next(pause), end - now))


def _begin_now(call: Call) -> Generator[Operation, Any, Begin | Corrupt | None]:
    """Return what process 0's note says if it is of this call; Corrupt where it cannot be read, None for another one.

    Raises:
        Told: the attempt failed.
        OutOfStep: process 0 has gone on.
    """
    yield from _heard(call)
    begin = understood(Begin.read, (yield Get(begin_note(call.job))))
    if not isinstance(begin, Begin):
        return begin
    if begin.number > call.number:
        raise _out_of_step(call, begin, NOTHING_SAVED)
    return begin if begin.number == call.number else None


def _still_on(call: Call, begun: Begin) -> Steps:
    """See that process 0 still is in this call: its notes are there. A network file system may need a moment to say so.

    Raises:
        Told: the attempt failed meanwhile.
        OutOfStep: process 0 has gone on.
        Timeout: process 0 has left, and nobody knows why.
    """
    pause = pauses(call.pace)
    end = (yield NOW) + call.linger
    while True:
        now = yield NOW  # before the look: whoever sleeps through the deadline looks once more
        if isinstance((yield from _begin_now(call)), Begin):
            return
        if now >= end:
            raise _leader_missing(call, f"{called(0, begun.who)} has left this save; {NOTHING_SAVED}")
        yield Sleep(min(next(pause), end - now))


def _committed(call: Call, begun: Begin) -> Steps:
    """Wait until process 0 has committed.

    Raises:
        Told: it has not, and will not.
        OutOfStep: it has gone on; nobody knows what became of this call.
        Timeout: it says nothing.
    """
    part = part_note(call.attempt, 0)
    pause = pauses(call.pace)
    start = now = yield NOW
    end = start + call.timeout
    has_written = False
    while not (yield from _heard(call)):
        if not has_written:
            first = understood(Part.read, (yield Get(part)))
            if isinstance(first, Part) and first.stage is Stage.WRITTEN:
                has_written = True
                # From now on process 0 waits for the others as long as that, and then commits or says why not.
                end = now + call.timeout * 1.1 + call.linger
        begin = understood(Begin.read, (yield Get(begin_note(call.job))))
        if isinstance(begin, Begin) and begin.number > call.number:
            if (yield from _heard(call)):
                return
            raise _out_of_step(call, begin, _NOT_KNOWN)
        if now >= end:
            did = "has not said whether it committed" if has_written else "has not ended its part"
            raise _leader_missing(call, f"{called(0, begun.who)} {did} within {now - start:.0f} s; {_NOT_KNOWN}")
        yield Sleep(min(next(pause), end - now))
        now = yield NOW


def _heard(call: Call) -> Generator[Operation, Any, bool]:
    """Return whether process 0 says that it has committed.

    Raises:
        Told: it says that the attempt failed.
    """
    verdict = understood(Verdict.read, (yield Get(verdict_note(call.attempt))))
    if not isinstance(verdict, Verdict):
        return False
    if verdict.failure is not None:
        raise Told(verdict.failure.error(undone(call), verdict.processes), kept=verdict.kept)
    return True


def _left(call: Call, mine: str, *, withdraw: bool) -> Steps:
    """Leave, knowing what became of the attempt."""
    if withdraw:
        yield from withdrawn()
    with contextlib.suppress(OSError):  # process 0 then leaves the notes to the next saver
        yield Put(mine, Part(stage=Stage.SEEN, who=call.who, left=True).text())


def _gave_up(call: Call, mine: str, error: BaseException, *, withdraw: bool) -> Steps:
    """Tell the others at once, then remove the own data if that is safe, then leave."""
    part = Part(stage=Stage.FAILED, who=call.who, failure=Failure.of(ours(call, error)), left=not withdraw)
    with contextlib.suppress(OSError):  # the error that brought us here says more
        yield Put(mine, part.text())
    if withdraw:
        yield from withdrawn()
        with contextlib.suppress(OSError):
            yield Put(mine, dataclasses.replace(part, left=True).text())


def _leader_missing(call: Call, what: str) -> Timeout:
    error = Timeout(f"{undone(call)}: {what}", hint=LOOK)
    error.missing = (0,)
    return error


def _out_of_step(call: Call, begin: Begin, left: str) -> OutOfStep:
    what = f"{called(0, begin.who)} is at its joint save number {begin.number}, this process at number {call.number}"
    hint = "all processes have to make the same saves in the same order"
    error = OutOfStep(f"{undone(call)}: {what}; {left}", hint=hint)
    error.number = begin.number
    error.missing = (0,)
    return error
