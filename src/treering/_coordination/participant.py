"""The steps of every participant in a joint save. ``treering._coordination.rendezvous`` says what they rest on."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator
from typing import Any, Final

from treering._coordination.messages import DecisionMessage, Failure, PrepareMessage, VoteMessage, VoteStage
from treering._coordination.steps import (
    LOOK,
    MAKE_FOLDER,
    NOTHING_SAVED,
    NOW,
    PREPARE_DATA,
    Call,
    Get,
    Operation,
    Operations,
    OutcomeKnown,
    OutOfStep,
    Put,
    Sleep,
    convert_error,
    decode_or_error,
    describe_failure,
    describe_process,
    poll_intervals,
    raise_converted,
    roll_back,
)
from treering._values.checkpoint_names import decision_name, prepare_name, vote_name
from treering.errors import Corrupt, Timeout

_NOT_KNOWN: Final = "this process had done its part, so whether it was saved is not known here"


def participate(call: Call, check: Callable[[bytes], None]) -> Operations:
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
    mine = vote_name(call.attempt, call.processes.this)
    has_worked = False
    begin: PrepareMessage | None = None
    try:
        begin = yield from _await_prepare(call)
        check(begin.signature)
        yield Put(mine, VoteMessage(stage=VoteStage.PREPARING, who=call.who).text())
        has_worked = True
        payload = yield PREPARE_DATA
        yield from _require_same_call(call, begin)
    except GeneratorExit:
        raise
    except OutcomeKnown as told:
        yield from _acknowledge(call, mine, withdraw=has_worked)
        raise told.error from None
    except OutOfStep:
        if has_worked:
            yield from roll_back()
        raise
    except BaseException as error:  # noqa: BLE001 - an interrupt too: the others are told before it goes on
        if begin is None:  # process 0 may come later, and is to hear that it waits in vain
            with contextlib.suppress(OSError):
                yield MAKE_FOLDER
        yield from _abort(call, mine, error, withdraw=has_worked)
        raise_converted(call, error)
    # From here on process 0 may commit: an error of this very message, too, may mean that it is there.
    try:
        yield Put(mine, VoteMessage(stage=VoteStage.PREPARED, who=call.who, payload=payload).text())
        yield from _await_decision(call, begin)
    except (GeneratorExit, OutOfStep):
        raise
    except OutcomeKnown as told:
        yield from _acknowledge(call, mine, withdraw=not told.kept)
        raise told.error from None
    except BaseException as error:  # noqa: BLE001 - as above
        yield from _abort(call, mine, error, withdraw=False)
        raise_converted(call, error)
    yield from _acknowledge(call, mine, withdraw=False)


def _await_prepare(call: Call) -> Generator[Operation, Any, PrepareMessage]:
    """Wait until process 0 has begun with this call.

    Raises:
        Told: it could not.
        OutOfStep: it has gone on.
        Timeout: it did not come.
    """
    pause = poll_intervals(call.timing)
    end = (yield NOW) + call.timeout
    while True:
        now = yield NOW  # before the look: whoever sleeps through the deadline looks once more
        begin = yield from _read_prepare(call)
        if isinstance(begin, PrepareMessage):
            return begin
        if now >= end:
            damage = f"; what it says cannot be read ({begin})" if isinstance(begin, Corrupt) else ""
            what = f"process 0 did not come within {call.timeout:g} s{damage}; {NOTHING_SAVED}"
            raise _coordinator_missing(call, what)
        yield Sleep(min(next(pause), end - now))


def _read_prepare(call: Call) -> Generator[Operation, Any, PrepareMessage | Corrupt | None]:
    """Return the prepare message if it is of this call; Corrupt where it cannot be read, None for another one.

    Raises:
        Told: the attempt failed.
        OutOfStep: process 0 has gone on.
    """
    yield from _read_decision(call)
    begin = decode_or_error(PrepareMessage.read, (yield Get(prepare_name(call.job))))
    if not isinstance(begin, PrepareMessage):
        return begin
    if begin.number > call.number:
        raise _out_of_step(call, begin, NOTHING_SAVED)
    return begin if begin.number == call.number else None


def _require_same_call(call: Call, begun: PrepareMessage) -> Operations:
    """See that process 0 still is in this call: its messages are there. A network file system may need a moment.

    Raises:
        Told: the attempt failed meanwhile.
        OutOfStep: process 0 has gone on.
        Timeout: process 0 has left, and nobody knows why.
    """
    pause = poll_intervals(call.timing)
    end = (yield NOW) + call.linger
    while True:
        now = yield NOW  # before the look: whoever sleeps through the deadline looks once more
        if isinstance((yield from _read_prepare(call)), PrepareMessage):
            return
        if now >= end:
            raise _coordinator_missing(call, f"{describe_process(0, begun.who)} has left this save; {NOTHING_SAVED}")
        yield Sleep(min(next(pause), end - now))


def _await_decision(call: Call, begun: PrepareMessage) -> Operations:
    """Wait until process 0 has committed.

    Raises:
        Told: it has not, and will not.
        OutOfStep: it has gone on; nobody knows what became of this call.
        Timeout: it says nothing.
    """
    part = vote_name(call.attempt, 0)
    pause = poll_intervals(call.timing)
    start = now = yield NOW
    end = start + call.timeout
    has_written = False
    while not (yield from _read_decision(call)):
        if not has_written:
            first = decode_or_error(VoteMessage.read, (yield Get(part)))
            if isinstance(first, VoteMessage) and first.stage is VoteStage.PREPARED:
                has_written = True
                # From now on process 0 waits for the others as long as that, and then commits or says why not.
                end = now + call.timeout * 1.1 + call.linger
        begin = decode_or_error(PrepareMessage.read, (yield Get(prepare_name(call.job))))
        if isinstance(begin, PrepareMessage) and begin.number > call.number:
            if (yield from _read_decision(call)):
                return
            raise _out_of_step(call, begin, _NOT_KNOWN)
        if now >= end:
            did = "has not said whether it committed" if has_written else "has not ended its part"
            raise _coordinator_missing(
                call, f"{describe_process(0, begun.who)} {did} within {now - start:.0f} s; {_NOT_KNOWN}"
            )
        yield Sleep(min(next(pause), end - now))
        now = yield NOW


def _read_decision(call: Call) -> Generator[Operation, Any, bool]:
    """Return whether process 0 says that it has committed.

    Raises:
        Told: it says that the attempt failed.
    """
    verdict = decode_or_error(DecisionMessage.read, (yield Get(decision_name(call.attempt))))
    if not isinstance(verdict, DecisionMessage):
        return False
    if verdict.failure is not None:
        raise OutcomeKnown(verdict.failure.error(describe_failure(call), verdict.processes), kept=verdict.kept)
    return True


def _acknowledge(call: Call, mine: str, *, withdraw: bool) -> Operations:
    """Leave, knowing what became of the attempt."""
    if withdraw:
        yield from roll_back()
    with contextlib.suppress(OSError):  # process 0 then leaves the messages to the next saver
        yield Put(mine, VoteMessage(stage=VoteStage.ACKNOWLEDGED, who=call.who, left=True).text())


def _abort(call: Call, mine: str, error: BaseException, *, withdraw: bool) -> Operations:
    """Tell the others at once, then remove the own data if that is safe, then leave."""
    part = VoteMessage(
        stage=VoteStage.FAILED, who=call.who, failure=Failure.of(convert_error(call, error)), left=not withdraw
    )
    with contextlib.suppress(OSError):  # the error that brought us here says more
        yield Put(mine, part.text())
    if withdraw:
        yield from roll_back()
        with contextlib.suppress(OSError):
            yield Put(mine, dataclasses.replace(part, left=True).text())


def _coordinator_missing(call: Call, what: str) -> Timeout:
    error = Timeout(f"{describe_failure(call)}: {what}", hint=LOOK)
    error.missing = (0,)
    return error


def _out_of_step(call: Call, begin: PrepareMessage, left: str) -> OutOfStep:
    there = f"{describe_process(0, begin.who)} is at its joint save number {begin.number}"
    what = f"{there}, this process at number {call.number}"
    hint = "all processes have to make the same saves in the same order"
    error = OutOfStep(f"{describe_failure(call)}: {what}; {left}", hint=hint)
    error.number = begin.number
    error.missing = (0,)
    return error
