"""The protocol of process 0, the coordinator of a joint save. ``treering._coordination`` says what it rests on."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Generator, Iterable
from typing import Any, Final

from treering._coordination import operations
from treering._coordination.messages import DecisionMessage, Failure, PrepareMessage, VoteMessage, VoteStage
from treering._coordination.operations import Call, Operation, Operations
from treering._coordination.votes import Votes, await_departures, children_of, messages_of
from treering._values.checkpoint_names import decision_name, prepare_name, signature_name, vote_name
from treering._values.processes import format_processes
from treering.errors import TimedOutError

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
    below = children_of(0, call.processes.count, call.timing.fan_in)
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
    votes = Votes(call)
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


def _report_missing(call: Call, votes: Votes) -> Generator[Operation, Any, operations.OutcomeKnown]:
    """Tell all that some processes did not come, and return what to raise."""
    waiting = votes.waiting
    missing = tuple(sorted(waiting))
    absent = [process for process in missing if waiting[process] is None]
    reasons = [f"{format_processes(absent)} did not arrive within {call.timeout:g} s"] if absent else []
    others = [process for process in missing if waiting[process] is not None]
    for process in others[:_MOST_REASONS]:
        vote = waiting[process]
        if isinstance(vote, VoteMessage):
            reasons.append(
                f"{operations.describe_process(process, vote.who)} has not finished its part within {call.timeout:g} s"
            )
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
    return (yield from await_departures(call, waited_for, put, every=call.linger / _TIMES_SAID))


def _remove_messages(call: Call, processes: Iterable[int]) -> Operations:
    """Remove the messages of some processes and those of the call. Where some are to be read, the next saver does."""
    of_call = prepare_name(call.job), decision_name(call.attempt), signature_name(call.attempt)
    with contextlib.suppress(OSError):
        yield operations.Remove((*messages_of(call, processes), vote_name(call.attempt, 0), *of_call))
