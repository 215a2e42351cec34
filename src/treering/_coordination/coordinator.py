"""The protocol of process 0, the coordinator of a joint save. ``treering._coordination`` says what it rests on."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Iterable
from typing import Any, Final

from treering._coordination import operations
from treering._coordination.messages import DecisionMessage, Failure, PrepareMessage, VoteMessage, VoteStage
from treering._coordination.operations import Call, Operation, Operations
from treering._values.checkpoint_names import decision_name, prepare_name, vote_name
from treering._values.processes import format_processes
from treering.errors import Corrupt, Timeout

_TIMES_SAID: Final = 5


def coordinate(call: Call, signature: bytes) -> Operations:
    """Yield the operations of process 0, which has entered the folder.

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
        prepare = PrepareMessage(
            number=call.number, attempt=attempt, signature=signature, who=call.who, processes=call.processes.count
        )
        yield operations.Put(prepare_name(call.job), prepare.encode())
        payload = yield operations.PREPARE_DATA
        yield operations.Put(vote_name(attempt, 0), VoteMessage(stage=VoteStage.PREPARED, who=call.who).encode())
        payloads = yield from _collect_votes(call, payload)
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
    if (yield from _announce(call, DecisionMessage(who=call.who), call.processes.others)):
        yield from _remove_messages(call)


def refuse(call: Call, error: BaseException) -> Operations:
    """Yield the operations of process 0 that tells the others why it could not enter the folder. It raises nothing."""
    decision = DecisionMessage(who=call.who, failure=operations.describe_own_error(call, error), processes=(0,))
    if (yield from _announce(call, decision, call.processes.others)):
        yield from _remove_messages(call)


def _collect_votes(call: Call, own: bytes) -> Generator[Operation, Any, tuple[bytes, ...]]:
    """Wait until every process has written, and return what each has answered.

    Raises:
        OutcomeKnown: one of them failed, or some did not come; the others know it.
    """
    attempt = call.attempt
    payloads = {0: own}
    waiting: dict[int, VoteMessage | Corrupt | None] = dict.fromkeys(call.processes.others)
    pause = operations.poll_intervals(call.timing)
    end = (yield operations.NOW) + call.timeout
    while True:
        now = yield operations.NOW  # before the look: a process that sleeps through the deadline looks once more
        failed: dict[int, Failure] = {}
        for process in tuple(waiting):
            vote = operations.decode_or_error(VoteMessage.decode, (yield operations.Get(vote_name(attempt, process))))
            if isinstance(vote, VoteMessage) and vote.stage is VoteStage.PREPARED:
                payloads[process] = vote.payload
                del waiting[process]
                continue
            waiting[process] = vote
            if isinstance(vote, VoteMessage) and vote.failure is not None:
                failure = vote.failure.attribute_to(operations.describe_process(process, vote.who))
                # A process that has given up waiting for another is the one that is missing now.
                failed[process] = dataclasses.replace(failure, missing=(process,) if failure.missing else ())
        if failed:
            raise (yield from _report_failures(call, failed))
        if not waiting:
            return tuple(payloads[process] for process in range(call.processes.count))
        if now >= end:
            raise (yield from _report_missing(call, waiting))
        yield operations.Sleep(min(next(pause), end - now))


def _report_failures(call: Call, failed: dict[int, Failure]) -> Generator[Operation, Any, operations.OutcomeKnown]:
    """Tell all that some processes failed, and return what to raise."""
    processes = tuple(failed)
    failure = failed[processes[0]]
    if others := processes[1:]:
        failure = dataclasses.replace(failure, message=f"{failure.message} ({format_processes(others)} failed as well)")
    yield from _announce_failure(call, failure, processes)
    return operations.OutcomeKnown(failure.to_error(operations.describe_failure(call), processes), in_doubt=False)


def _report_missing(
    call: Call, waiting: dict[int, VoteMessage | Corrupt | None]
) -> Generator[Operation, Any, operations.OutcomeKnown]:
    """Tell all that some processes did not come, and return what to raise."""
    missing = tuple(waiting)
    absent = [process for process in missing if waiting[process] is None]
    reasons = [f"{format_processes(absent)} did not arrive within {call.timeout:g} s"] if absent else []
    for process, vote in waiting.items():
        if isinstance(vote, VoteMessage):
            reasons.append(
                f"{operations.describe_process(process, vote.who)} has not finished its part within {call.timeout:g} s"
            )
        elif vote is not None:
            reasons.append(f"the message of process {process} cannot be read ({vote})")
    message = f"{'; '.join(reasons)}; {operations.NOTHING_SAVED}"
    failure = Failure(name=Timeout.__name__, message=message, hint=operations.LOOK, missing=missing)
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
    have_left = yield from _announce(call, decision, waited_for)
    if have_left and not absent:
        yield from operations.roll_back()
        yield from _remove_messages(call)


def _announce(call: Call, decision: DecisionMessage, waited_for: Iterable[int]) -> Generator[Operation, Any, bool]:
    """Put the decision, stay until the processes have read it, but not long; return whether they have.

    It raises nothing of its own: all is decided already.
    """
    attempt = call.attempt
    name, data = decision_name(attempt), decision.encode()
    waiting = list(waited_for)
    pause = operations.poll_intervals(call.timing)
    now = yield operations.NOW
    again, end = now, now + call.linger
    while True:
        if now >= again:
            # Said more than once: the first time may have failed, or a saver of another job may have swept it.
            with contextlib.suppress(OSError):
                yield operations.Put(name, data)
            again = now + call.linger / _TIMES_SAID
        for process in tuple(waiting):
            vote = operations.decode_or_error(VoteMessage.decode, (yield operations.Get(vote_name(attempt, process))))
            if isinstance(vote, VoteMessage) and vote.finished:
                waiting.remove(process)
        if not waiting or now >= end:
            return not waiting
        yield operations.Sleep(min(next(pause), end - now))
        now = yield operations.NOW


def _remove_messages(call: Call) -> Operations:
    """Remove all messages of the call. Where some are still to be read they stay, and the next saver sweeps them."""
    attempt = call.attempt
    votes = (vote_name(attempt, process) for process in range(call.processes.count))
    for name in (*votes, prepare_name(call.job), decision_name(attempt)):
        with contextlib.suppress(OSError):
            yield operations.Remove(name)
