"""The steps of process 0 in a joint save. ``treering._coordination.rendezvous`` says what they rest on."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Iterable
from typing import Any, Final

from treering._coordination.messages import Begin, Failure, Part, Stage, Verdict
from treering._coordination.steps import (
    LOOK,
    NOTHING_SAVED,
    NOW,
    WORK,
    Call,
    Commit,
    Get,
    Operation,
    Put,
    Remove,
    Sleep,
    Steps,
    Told,
    called,
    own_failure,
    pauses,
    raise_ours,
    understood,
    undone,
    withdrawn,
)
from treering._values.checkpoint_names import begin_note, part_note, verdict_note
from treering._values.processes import named
from treering.errors import Corrupt, Timeout

_TIMES_SAID: Final = 5


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
        begin = Begin(
            number=call.number, attempt=attempt, signature=signature, who=call.who, processes=call.processes.count
        )
        yield Put(begin_note(call.job), begin.text())
        payload = yield WORK
        yield Put(part_note(attempt, 0), Part(stage=Stage.WRITTEN, who=call.who).text())
        parts = yield from _gathered(call, payload)
    except GeneratorExit:
        raise
    except Told as told:
        raise told.error from None
    except BaseException as error:  # noqa: BLE001 - an interrupt too: the others are told before it goes on
        yield from _failed(call, own_failure(call, error), (0,))
        raise_ours(call, error)
    try:
        yield Commit(parts)
    except GeneratorExit:
        raise
    except BaseException as error:  # noqa: BLE001 - as above
        # It may have happened all the same. Then the data of the others is needed.
        yield from _failed(call, own_failure(call, error), (0,), kept=True)
        raise_ours(call, error)
    # From here on it is saved, whatever becomes of the notes.
    if (yield from _announced(call, Verdict(who=call.who), call.processes.others)):
        yield from _cleared(call)


def refused(call: Call, error: BaseException) -> Steps:
    """Yield the steps of process 0 where it could not enter the folder: the others are told why. It raises nothing."""
    verdict = Verdict(who=call.who, failure=own_failure(call, error), processes=(0,))
    if (yield from _announced(call, verdict, call.processes.others)):
        yield from _cleared(call)


def _gathered(call: Call, own: bytes) -> Generator[Operation, Any, tuple[bytes, ...]]:
    """Wait until every process has written, and return what each has answered.

    Raises:
        Told: one of them failed, or some did not come; the others know it.
    """
    attempt = call.attempt
    payloads = {0: own}
    waiting: dict[int, Part | Corrupt | None] = dict.fromkeys(call.processes.others)
    pause = pauses(call.pace)
    end = (yield NOW) + call.timeout
    while True:
        now = yield NOW  # before the look: whoever sleeps through the deadline looks once more
        failed: dict[int, Failure] = {}
        for process in tuple(waiting):
            part = understood(Part.read, (yield Get(part_note(attempt, process))))
            if isinstance(part, Part) and part.stage is Stage.WRITTEN:
                payloads[process] = part.payload
                del waiting[process]
                continue
            waiting[process] = part
            if isinstance(part, Part) and part.failure is not None:
                failure = part.failure.blamed_on(called(process, part.who))
                # Whoever has given up waiting for another is the one that is missing now.
                failed[process] = dataclasses.replace(failure, missing=(process,) if failure.missing else ())
        if failed:
            raise (yield from _told_failed(call, failed))
        if not waiting:
            return tuple(payloads[process] for process in range(call.processes.count))
        if now >= end:
            raise (yield from _told_missing(call, waiting))
        yield Sleep(min(next(pause), end - now))


def _told_failed(call: Call, failed: dict[int, Failure]) -> Generator[Operation, Any, Told]:
    """Tell all that some processes failed, and return what to raise."""
    processes = tuple(failed)
    failure = failed[processes[0]]
    if others := processes[1:]:
        failure = dataclasses.replace(failure, message=f"{failure.message} ({named(others)} failed as well)")
    yield from _failed(call, failure, processes)
    return Told(failure.error(undone(call), processes), kept=False)


def _told_missing(call: Call, waiting: dict[int, Part | Corrupt | None]) -> Generator[Operation, Any, Told]:
    """Tell all that some processes did not come, and return what to raise."""
    missing = tuple(waiting)
    absent = [process for process in missing if waiting[process] is None]
    reasons = [f"{named(absent)} did not come within {call.timeout:g} s"] if absent else []
    for process, part in waiting.items():
        if isinstance(part, Part):
            reasons.append(f"{called(process, part.who)} has not ended its part within {call.timeout:g} s")
        elif part is not None:
            reasons.append(f"what process {process} says cannot be read ({part})")
    message = f"{'; '.join(reasons)}; {NOTHING_SAVED}"
    failure = Failure(name=Timeout.__name__, message=message, hint=LOOK, missing=missing)
    yield from _failed(call, failure, missing, absent=missing)
    return Told(failure.error(undone(call), missing), kept=False)


def _failed(
    call: Call, failure: Failure, processes: tuple[int, ...], *, absent: tuple[int, ...] = (), kept: bool = False
) -> Steps:
    """Tell all that the attempt failed; when all have left, nothing of it stays.

    Args:
        call: the call.
        failure: why it failed.
        processes: those that failed.
        absent: those that did not come in all that time, and are not waited for once more.
        kept: whether the commit may have happened all the same.
    """
    waited_for = [process for process in call.processes.others if process not in absent]
    verdict = Verdict(who=call.who, failure=failure, processes=processes, kept=kept)
    have_left = yield from _announced(call, verdict, waited_for)
    if have_left and not absent:
        yield from withdrawn()
        yield from _cleared(call)


def _announced(call: Call, verdict: Verdict, waited_for: Iterable[int]) -> Generator[Operation, Any, bool]:
    """Put the verdict, stay until the processes have read it, but not long; return whether they have.

    It raises nothing of its own: all is decided already.
    """
    attempt = call.attempt
    name, data = verdict_note(attempt), verdict.text()
    waiting = list(waited_for)
    pause = pauses(call.pace)
    now = yield NOW
    again, end = now, now + call.linger
    while True:
        if now >= again:
            # Said more than once: the first time may have failed, or a saver of another job may have swept it.
            with contextlib.suppress(OSError):
                yield Put(name, data)
            again = now + call.linger / _TIMES_SAID
        for process in tuple(waiting):
            part = understood(Part.read, (yield Get(part_note(attempt, process))))
            if isinstance(part, Part) and part.left:
                waiting.remove(process)
        if not waiting or now >= end:
            return not waiting
        yield Sleep(min(next(pause), end - now))
        now = yield NOW


def _cleared(call: Call) -> Steps:
    """Remove all notes of the call. Where some are still to be read they stay, and the next saver sweeps them."""
    attempt = call.attempt
    parts = (part_note(attempt, process) for process in range(call.processes.count))
    for name in (*parts, begin_note(call.job), verdict_note(attempt)):
        with contextlib.suppress(OSError):
            yield Remove(name)
