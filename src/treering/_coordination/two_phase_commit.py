"""The protocol of a joint save: that of process 0, the coordinator, and that of the others, the participants.

``treering._coordination`` says what it rests on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Generator, Iterable
from typing import Any, Final

from treering._coordination import operations
from treering._coordination.messages import DecisionMessage, Failure, PrepareMessage, VoteMessage, VoteStage
from treering._coordination.operations import Call, Operation, Operations
from treering._values.checkpoint_names import (
    arrival_name,
    decision_name,
    departure_name,
    prepare_name,
    signature_name,
    vote_name,
)
from treering._values.processes import format_processes
from treering.errors import CorruptError, TimedOutError

_TIMES_SAID: Final = 5
_MOST_REASONS: Final = 20
"""How many processes that have not finished are named each with what it last said."""
_LONGEST_SIGNATURE: Final = 1024
"""Bytes of a signature that the prepare message holds, which all processes look at more than once."""


def coordinate(call: Call, signature: bytes) -> Operations:
    """Yield the operations of process 0, which has entered the folder.

    Args:
        call: the call.
        signature: what this process is saving; the others compare.

    Raises:
        TimedOutError: others did not come, or did not end their work. Nothing was saved.
        TreeringError: another process failed, or this one; the class is that of its error, `ProcessFailedError` where
            it was none of ours. Nothing was saved, unless the commit itself failed and says otherwise.
    """
    try:
        yield from _put_prepare(call, signature)
        started = yield operations.NOW
        payload = yield operations.PREPARE_DATA
        yield operations.Put(vote_name(call.attempt, 0), VoteMessage(stage=VoteStage.PREPARED, who=call.who).encode())
        payloads = yield from _collect_votes(call, payload, started)
    except GeneratorExit:
        raise
    except operations.OutcomeKnown as known:
        raise known.error from None
    except BaseException as error:  # noqa: BLE001 - an interrupt too: the others are told before it goes on
        yield from _announce_failure(call, operations.describe_own_error(call, error), (0,))
        operations.raise_converted(call, error)
    try:
        yield operations.Commit(payloads)
    except GeneratorExit:
        raise
    except BaseException as error:  # noqa: BLE001 - as above
        # It may have happened all the same. Then the data of the others is needed.
        yield from _announce_failure(call, operations.describe_own_error(call, error), (0,), in_doubt=True)
        operations.raise_converted(call, error)
    # From here on it is saved, whatever becomes of the messages.
    below = operations.children_of(0, call.processes.count, call.timing.fan_in)
    if (left := (yield from _announce(call, DecisionMessage(who=call.who), below))) is not None:
        yield from _remove_messages(call, left)


def refuse(call: Call, error: BaseException) -> Operations:
    """Yield the operations of process 0 that tells the others why it could not enter the folder. Never raises."""
    decision = DecisionMessage(who=call.who, failure=operations.describe_own_error(call, error), processes=(0,))
    if (left := (yield from _announce(call, decision, call.processes.others))) is not None:
        yield from _remove_messages(call, left)


def _put_prepare(call: Call, signature: bytes) -> Operations:
    """Put the prepare message; a long signature lies in a message of its own, which each process reads once."""
    prepare = PrepareMessage(
        number=call.number, attempt=call.attempt, signature=signature, who=call.who,
        processes=call.processes.count, fresh=call.fresh,
    )  # fmt: skip
    if len(signature) > _LONGEST_SIGNATURE:
        yield operations.Put(signature_name(call.attempt), signature)
        prepare = dataclasses.replace(prepare, signature=None, digest=hashlib.sha256(signature).hexdigest())
    yield operations.Put(prepare_name(call.job), prepare.encode())


def _collect_votes(call: Call, own: bytes, started: float) -> Generator[Operation, Any, tuple[bytes, ...]]:
    """Wait until every process has written, and return what each has answered.

    Raises:
        OutcomeKnown: one of them failed, or some did not come; the others know it.
    """
    votes = operations.Votes(call)
    now = yield operations.NOW
    pause = operations.poll_intervals(call, took=now - started, collects=True)
    end = now + call.timeout
    # Before the last look at all votes there is another one: a read may fail, or a network file system hide a name.
    full = [end, end - call.linger / _TIMES_SAID]
    while True:
        now = yield operations.NOW  # before the look: a process that sleeps through the deadline looks once more
        more = yield from votes.look()
        if now >= full[-1] and votes.waiting:
            yield from votes.look_at_all()
            full = full[:1]
        if votes.failures:
            raise (yield from _report_failures(call, votes.failures))
        if not votes.waiting:
            payloads = {0: own, **votes.payloads}
            return tuple(payloads[process] for process in range(call.processes.count))
        if now >= end:
            raise (yield from _report_missing(call, votes))
        if not more:
            yield operations.Sleep(min(next(pause), max(full[-1] - now, call.timing.poll_first)))


def _report_failures(call: Call, failed: dict[int, Failure]) -> Generator[Operation, Any, operations.OutcomeKnown]:
    """Tell all that some processes failed, and return what to raise."""
    processes = tuple(sorted(failed))
    failure = failed[processes[0]]
    if others := processes[1:]:
        failure = dataclasses.replace(failure, message=f"{failure.message} ({format_processes(others)} failed as well)")
    yield from _announce_failure(call, failure, processes)
    return operations.OutcomeKnown(failure.to_error(operations.describe_failure(call), processes), in_doubt=False)


def _report_missing(call: Call, votes: operations.Votes) -> Generator[Operation, Any, operations.OutcomeKnown]:
    """Tell all that some processes did not come, and return what to raise."""
    waiting = votes.waiting
    missing = tuple(sorted(waiting))
    absent = [process for process in missing if waiting[process] is None]
    reasons = [f"{format_processes(absent)} did not arrive within {call.timeout:g} s"] if absent else []
    others = [process for process in missing if waiting[process] is not None]
    for process in others[:_MOST_REASONS]:
        vote = waiting[process]
        if isinstance(vote, VoteMessage):
            who = operations.describe_process(process, vote.who)
            reasons.append(f"{who} has not finished its part within {call.timeout:g} s")
        elif vote is not None:
            reasons.append(f"the message of process {process} cannot be read ({vote})")
    if more := others[_MOST_REASONS:]:
        reasons.append(f"nor did {format_processes(more)} hand in a vote")
    message = f"{'; '.join(reasons)}; {operations.NOTHING_SAVED}"
    failure = Failure(name=TimedOutError.__name__, message=message, hint=operations.LOOK, missing=missing)
    yield from _announce_failure(call, failure, missing, absent=missing)
    return operations.OutcomeKnown(failure.to_error(operations.describe_failure(call), missing), in_doubt=False)


def _announce_failure(
    call: Call, failure: Failure, processes: tuple[int, ...], *, absent: tuple[int, ...] = (), in_doubt: bool = False
) -> Operations:
    """Tell all that the attempt failed; when all have left, nothing of it stays.

    Args:
        call: the call.
        failure: why it failed.
        processes: those that failed.
        absent: those that did not come in all that time, and are not waited for once more.
        in_doubt: whether the commit may have happened all the same.
    """
    waited_for = [process for process in call.processes.others if process not in absent]
    decision = DecisionMessage(who=call.who, failure=failure, processes=processes, in_doubt=in_doubt)
    left = yield from _announce(call, decision, waited_for)
    if left is not None and not absent:
        yield from operations.roll_back()
        yield from _remove_messages(call, left)


def _announce(
    call: Call, decision: DecisionMessage, waited_for: Iterable[int]
) -> Generator[Operation, Any, tuple[int, ...] | None]:
    """Put the decision, stay until the processes have read it, but not long; return which have, None where not all.

    Never raises an error of its own: all is decided. The decision is put more than once: the first time may have
    failed, or a saver of another job may have swept it.
    """
    put = operations.Put(decision_name(call.attempt), decision.encode())
    return (yield from operations.await_departures(call, waited_for, put, every=call.linger / _TIMES_SAID))


def _remove_messages(call: Call, processes: Iterable[int]) -> Operations:
    """Remove the messages of some processes and those of the call. Where some are to be read, the next saver does."""
    of_call = prepare_name(call.job), decision_name(call.attempt), signature_name(call.attempt)
    with contextlib.suppress(OSError):
        yield operations.Remove((*operations.messages_of(call, processes), vote_name(call.attempt, 0), *of_call))


_FULL_LOOK: Final = 4
"""At each n-th look for the decision a process also looks whether process 0 has gone on."""
_NOT_KNOWN: Final = "this process had voted, so whether it was saved is not known here"


def participate(call: Call, check: Callable[[bytes], None]) -> Operations:
    """Yield the operations of every other process.

    Args:
        call: the call.
        check: compares what this process is saving with the signature of process 0, and raises what is wrong.

    Raises:
        Renumbered: process 0 counts this save otherwise. Nothing was done, and it can be begun anew with that number.
        OutOfStep: process 0 has gone on to a later call.
        TimedOutError: process 0 or another one did not come. If this process had done its part, it may have been
            committed; the message says so.
        TreeringError: another process failed, or this one.
    """
    this = call.processes.this
    may_have_data = False
    prepare: PrepareMessage | None = None
    try:
        prepare = yield from _await_prepare(call, call.timeout, f"process 0 did not arrive within {call.timeout:g} s")
        check((yield from _await_signature(call, prepare)))
        arrival = VoteMessage(stage=VoteStage.PREPARING, who=call.who)
        yield operations.Put(arrival_name(call.attempt, this), arrival.encode())
        may_have_data = True
        started = yield operations.NOW
        payload = yield operations.PREPARE_DATA
        coordinator = operations.describe_process(0, prepare.who)
        yield from _await_prepare(call, call.linger, f"{coordinator} has left this save")
    except (GeneratorExit, operations.Renumbered):
        raise
    except operations.OutcomeKnown as known:
        yield from _leave(call, roll_back_data=may_have_data)
        raise known.error from None
    except operations.OutOfStep:
        if may_have_data:
            yield from operations.roll_back()
        raise
    except BaseException as error:  # noqa: BLE001 - an interrupt too: the others are told before it goes on
        if prepare is None:  # process 0 may come later, and is to hear that it waits in vain
            yield from withdraw(call, error)
        else:
            yield from _abort(call, error, roll_back_data=may_have_data)
        operations.raise_converted(call, error)
    # From here on process 0 may commit: an error of this very message, too, may mean that it is there.
    try:
        vote = VoteMessage(stage=VoteStage.PREPARED, who=call.who, payload=payload)
        yield operations.Put(vote_name(call.attempt, this), vote.encode())
        yield from _await_decision(call, prepare, payload, started)
    except (GeneratorExit, operations.OutOfStep):
        raise
    except operations.OutcomeKnown as known:
        yield from _leave(call, roll_back_data=not known.in_doubt)
        raise known.error from None
    except BaseException as error:  # noqa: BLE001 - as above
        yield from _abort(call, error, roll_back_data=False)
        operations.raise_converted(call, error, f"; {_NOT_KNOWN}")
    yield from _leave_after_success(call)


def withdraw(call: Call, error: BaseException) -> Operations:
    """Yield the operations of a process that ends a call before it began with it; it waits for nobody."""
    with contextlib.suppress(OSError):
        yield operations.MAKE_FOLDER
    yield from _abort(call, error, roll_back_data=False)


def _await_prepare(call: Call, seconds: float, missing: str) -> Generator[Operation, Any, PrepareMessage]:
    """Wait until process 0 is in this call: its messages are there. A network file system may need a moment.

    Raises:
        OutcomeKnown: it could not begin, or the attempt failed meanwhile.
        OutOfStep: it has gone on.
        TimedOutError: it is not there after so many seconds; ``missing`` says what that means.
    """
    pause = operations.poll_intervals(call)
    end = (yield operations.NOW) + seconds
    while True:
        now = yield operations.NOW  # before the look: a process that sleeps through the deadline looks once more
        prepare = yield from _read_prepare(call)
        if isinstance(prepare, PrepareMessage):
            return prepare
        if now >= end:
            damage = f"; its message cannot be read ({prepare})" if isinstance(prepare, CorruptError) else ""
            raise _coordinator_missing(call, f"{missing}{damage}; {operations.NOTHING_SAVED}")
        yield operations.Sleep(min(next(pause), end - now))


def _read_prepare(call: Call) -> Generator[Operation, Any, PrepareMessage | CorruptError | None]:
    """Return the prepare message if it is of this call; the error where it cannot be read, None for another one.

    Raises:
        OutcomeKnown: the attempt failed.
        Renumbered: it is this call, which process 0 counts otherwise.
        OutOfStep: process 0 has gone on.
    """
    yield from _read_decision(call)
    prepare = operations.decode_or_error(PrepareMessage.decode, (yield operations.Get(prepare_name(call.job))))
    if not isinstance(prepare, PrepareMessage):
        return prepare
    if prepare.number != call.number and prepare.fresh and call.fresh:
        raise operations.Renumbered(prepare.number)
    if prepare.number > call.number:
        raise _out_of_step(call, prepare, operations.NOTHING_SAVED)
    return prepare if prepare.number == call.number else None


def _await_signature(call: Call, prepare: PrepareMessage) -> Generator[Operation, Any, bytes]:
    """Return what process 0 saves; its message was put before the prepare message.

    Raises:
        TimedOutError: it cannot be read.
    """
    if prepare.signature is not None:
        return prepare.signature
    pause = operations.poll_intervals(call)
    end = (yield operations.NOW) + call.linger
    while True:
        now = yield operations.NOW
        signature: bytes | None = yield operations.Get(signature_name(call.attempt))
        if signature is not None and hashlib.sha256(signature).hexdigest() == prepare.digest:
            return signature
        if now >= end:
            unread = f"the signature of {operations.describe_process(0, prepare.who)} cannot be read"
            raise _coordinator_missing(call, f"{unread}; {operations.NOTHING_SAVED}")
        yield from _read_prepare(call)  # process 0 may have ended the call, or be in a later one
        yield operations.Sleep(min(next(pause), end - now))


def _await_decision(call: Call, prepare: PrepareMessage, payload: bytes, started: float) -> Operations:
    """Wait until process 0 has committed, and hand on what comes in for it meanwhile.

    Raises:
        OutcomeKnown: it has not, and will not.
        OutOfStep: it has gone on; what became of this call is not known.
        TimedOutError: it says nothing.
    """
    votes = operations.Votes(call)
    collects = bool(votes.waiting)
    start = now = yield operations.NOW
    pause = operations.poll_intervals(call, took=start - started, collects=collects)
    end = start + call.timeout
    has_written, looks = False, 0
    while not (yield from _read_decision(call)):
        if collects:
            more = yield from votes.look()
            if votes.failures or not votes.waiting:
                with contextlib.suppress(OSError):  # put again at the next look; process 0 can do without it
                    yield from votes.put_sum(payload)
                    collects = False
            if more and collects and now < end:
                now = yield operations.NOW
                continue
        if looks % _FULL_LOOK == 0 or now >= end:
            if not has_written and (yield from _has_voted(call)):
                has_written = True
                # From now on process 0 waits for the others as long as that, and then commits or says why not.
                end = now + call.timeout * 1.1 + call.linger
            if (latest := (yield from _read_later(call))) is not None:
                if (yield from _read_decision(call)):
                    return
                raise _out_of_step(call, latest, _NOT_KNOWN)
        if now >= end:
            did = "has not announced its decision" if has_written else "has not finished its part"
            who = operations.describe_process(0, prepare.who)
            raise _coordinator_missing(call, f"{who} {did} within {now - start:.0f} s; {_NOT_KNOWN}")
        looks += 1
        yield operations.Sleep(min(next(pause), end - now))
        now = yield operations.NOW


def _has_voted(call: Call) -> Generator[Operation, Any, bool]:
    """Return whether process 0 has finished its own part."""
    vote = operations.decode_or_error(VoteMessage.decode, (yield operations.Get(vote_name(call.attempt, 0))))
    return isinstance(vote, VoteMessage) and vote.stage is VoteStage.PREPARED


def _read_later(call: Call) -> Generator[Operation, Any, PrepareMessage | None]:
    """Return the prepare message of a later call, if process 0 is in one."""
    latest = operations.decode_or_error(PrepareMessage.decode, (yield operations.Get(prepare_name(call.job))))
    return latest if isinstance(latest, PrepareMessage) and latest.number > call.number else None


def _read_decision(call: Call) -> Generator[Operation, Any, bool]:
    """Return whether process 0 says that it has committed.

    Raises:
        OutcomeKnown: it says that the attempt failed.
    """
    decision = operations.decode_or_error(DecisionMessage.decode, (yield operations.Get(decision_name(call.attempt))))
    if not isinstance(decision, DecisionMessage):
        return False
    if decision.failure is not None:
        error = decision.failure.to_error(operations.describe_failure(call), decision.processes)
        raise operations.OutcomeKnown(error, in_doubt=decision.in_doubt)
    return True


def _leave_after_success(call: Call) -> Operations:
    """Leave when those below have left, then remove their messages; where some stay, they stay for the next saver."""
    below = operations.children_of(call.processes.this, call.processes.count, call.timing.fan_in)
    if (left := (yield from operations.await_departures(call, below))) is None:
        return
    yield from _leave(call, roll_back_data=False)
    if left:  # while the process above already goes on
        with contextlib.suppress(OSError):
            yield operations.Remove(operations.messages_of(call, left))


def _leave(call: Call, *, roll_back_data: bool, failure: Failure | None = None) -> Operations:
    """Remove the own data if that is asked for, then say that this process has left, and why if it gave up."""
    if roll_back_data:
        yield from operations.roll_back()
    message = VoteMessage(stage=VoteStage.FAILED if failure else VoteStage.LEFT, who=call.who, failure=failure)
    with contextlib.suppress(OSError):  # process 0 then leaves the messages to the next saver
        yield operations.Put(departure_name(call.attempt, call.processes.this), message.encode())


def _abort(call: Call, error: BaseException, *, roll_back_data: bool) -> Operations:
    """Tell the others at once, then remove the own data if that is safe, then leave."""
    failure, this = Failure.of(operations.convert_error(call, error)), call.processes.this
    with contextlib.suppress(OSError):  # the error that brought us here says more
        vote = VoteMessage(stage=VoteStage.FAILED, who=call.who, failure=failure)
        yield operations.Put(vote_name(call.attempt, this), vote.encode())
        yield from operations.put_failure(call, failure)
    yield from _leave(call, roll_back_data=roll_back_data, failure=failure)


def _coordinator_missing(call: Call, what: str) -> TimedOutError:
    return TimedOutError(f"{operations.describe_failure(call)}: {what}", hint=operations.LOOK, missing=(0,))


def _out_of_step(call: Call, prepare: PrepareMessage, left: str) -> operations.OutOfStep:
    there = f"{operations.describe_process(0, prepare.who)} is at its joint save number {prepare.number}"
    what = f"{there}, this process at number {call.number}"
    hint = "all processes must make the same saves in the same order"
    error = operations.OutOfStep(f"{operations.describe_failure(call)}: {what}; {left}", hint=hint, missing=(0,))
    error.number = prepare.number
    return error
