"""Protocols and saves that are broken on purpose: proof that the simulated schedules find what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from torture.simulated_store import SimulatedSave
from torture.versioned_store import VersionedTransaction
from torture.virtual_processes import REAL
from treering._coordination import two_phase_commit
from treering._coordination.messages import DecisionMessage, PrepareMessage, SumMessage, VoteMessage, VoteStage
from treering._coordination.operations import (
    Call,
    Commit,
    Get,
    MakeFolder,
    Operation,
    Operations,
    PrepareData,
    Put,
    Remove,
    Rollback,
    Sleep,
    subtree_of,
)
from treering._coordination.two_phase_commit import coordinate, participate
from treering._store.api import Held
from treering._values.checkpoint_names import INDEX, decision_name, signature_name, sum_name, vote_name
from treering.errors import TimedOutError

__all__ = ["BROKEN_SAVES", "BROKEN_STEPS", "MUTANTS", "OVER_MEMORY"]


def alter(
    steps: Operations,
    told: Callable[[Operation], list[Operation]] = lambda step: [step],
    read: Callable[[Get, bytes | None], bytes | None] = lambda _, data: data,
) -> Operations:
    """Yield the same steps with other operations in place of some, and other answers to what they read."""
    answer: Any = None
    thrown: BaseException | None = None
    while True:
        try:
            step = steps.send(answer) if thrown is None else steps.throw(thrown)
        except StopIteration:
            return
        thrown = None
        try:
            for one in told(step):
                answer = yield one
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - goes into the steps
            thrown = error
        if isinstance(step, Get):
            answer = read(step, answer)


def replace_text(step: Operation, old: bytes, new: bytes) -> list[Operation]:
    return [step._replace(data=step.data.replace(old, new))] if isinstance(step, Put) else [step]


def impatient(call: Call, signature: bytes) -> Operations:
    written = VoteMessage(stage=VoteStage.PREPARED, who="nobody").encode()
    return alter(
        coordinate(call, signature), read=lambda step, data: data or ("-part-" in step.name and written) or None
    )


def eager(call: Call, check: Callable[[bytes], None]) -> Operations:
    """Others hand in before their data are durable."""
    vote = VoteMessage(stage=VoteStage.PREPARED, who="eager").encode()
    said = Put(vote_name(call.attempt, call.processes.this), vote)
    return alter(participate(call, check), lambda step: [said, step] if isinstance(step, PrepareData) else [step])


def hand_on_early(call: Call, check: Callable[[bytes], None]) -> Operations:
    """A process that collects takes a missing vote of another for one without data."""
    vote = VoteMessage(stage=VoteStage.PREPARED, who="missing").encode()
    votes = {vote_name(call.attempt, other) for other in call.processes.others}
    return alter(participate(call, check), read=lambda step, data: data or (vote if step.name in votes else None))


def leave_early(call: Call, check: Callable[[bytes], None]) -> Operations:
    """A process that collects does not wait until those below have seen the decision, and removes their messages."""
    left = VoteMessage(stage=VoteStage.LEFT, who="any").encode()
    return alter(participate(call, check), read=lambda step, data: left if "-left-" in step.name else data)


def hasty(call: Call, signature: bytes) -> Operations:
    said = Put(decision_name(call.attempt), DecisionMessage(who="hasty").encode())
    return alter(coordinate(call, signature), lambda step: [said, step] if isinstance(step, Commit) else [step])


def careless(call: Call, signature: bytes) -> Operations:
    return alter(coordinate(call, signature), lambda step: replace_text(step, b'"kept":true', b'"kept":false'))


def tidy(call: Call, signature: bytes) -> Operations:
    """When some did not come, the proof that what they may yet write is a leftover goes too."""
    try:
        yield from coordinate(call, signature)
    except TimedOutError:
        yield Rollback()
        raise


def faithless(call: Call, check: Callable[[bytes], None]) -> Operations:
    try:
        yield from participate(call, check)
    except TimedOutError as error:
        if "not known here" in str(error):
            yield Rollback()
        raise


def trusting(call: Call, check: Callable[[bytes], None]) -> Operations:
    try:
        yield from participate(call, check)
    except TimedOutError as error:
        if "not known here" not in str(error):
            raise


def accusing(call: Call, check: Callable[[bytes], None]) -> Operations:
    """Others name themselves where process 0 names the processes that are missing."""
    try:
        yield from participate(call, check)
    except TimedOutError as error:
        error.missing = error.missing and (call.processes.this,)
        raise


def patient(call: Call, check: Callable[[bytes], None]) -> Operations:
    """The clock of the others stands still."""
    return alter(participate(call, check), lambda step: [step] if not isinstance(step, Sleep) else [Sleep(4.0)])


def unheard(call: Call, check: Callable[[bytes], None]) -> Operations:
    """Those that give up before process 0 has made the folder leave no word for it."""
    return alter(participate(call, check), lambda step: [] if isinstance(step, MakeFolder) else [step])


def littering(call: Call, signature: bytes) -> Operations:
    """Process 0 removes all messages but that of a long signature."""

    def told(step: Operation) -> list[Operation]:
        if isinstance(step, Remove):
            return [Remove(tuple(name for name in step.names if name != signature_name(call.attempt)))]
        return [step]

    return alter(coordinate(call, signature), told)


def credulous(call: Call, signature: bytes) -> Operations:
    """Process 0 takes a sum without payloads for votes without payloads."""
    count, fan_in, without = call.processes.count, call.timing.fan_in, SumMessage().encode()

    def read(step: Get, data: bytes | None) -> bytes | None:
        for process in call.processes.others if data == without else ():
            if step.name == sum_name(call.attempt, process):
                return SumMessage(payloads=dict.fromkeys(subtree_of(process, count, fan_in), b"")).encode()
        return data

    return alter(coordinate(call, signature), read=read)


def incurious(call: Call, _: Callable[[bytes], None]) -> Operations:
    """Others do not compare what they are saving with what process 0 is."""
    return participate(call, lambda _: None)


def silent(_: Call, __: BaseException) -> Operations:
    return
    yield


MUTANTS = {
    "process 0 does not wait for missing parts": REAL._replace(coordinate=impatient),
    "others hand in before their data are durable": REAL._replace(participate=eager),
    "a process hands on votes that have not come": REAL._replace(participate=hand_on_early),
    "a process does not wait for those below": REAL._replace(participate=leave_early),
    "process 0 acknowledges before it commits": REAL._replace(coordinate=hasty),
    "process 0 removes the proof while others may write": REAL._replace(coordinate=tidy),
    "process 0 does not say that it was refused": REAL._replace(refuse=silent),
    "others withdraw after they have handed in": REAL._replace(participate=faithless),
    "others withdraw although the commit may have happened": REAL._replace(coordinate=careless),
    "others take silence for success": REAL._replace(participate=trusting),
    "others name other processes than process 0 does": REAL._replace(participate=accusing),
    "others wait too long": REAL._replace(participate=patient),
    "others that give up make no folder to say so": REAL._replace(participate=unheard),
    "others do not compare their trees": REAL._replace(participate=incurious),
    "process 0 leaves a long signature in the folder": REAL._replace(coordinate=littering),
    "process 0 takes sums without payloads for votes without": REAL._replace(coordinate=credulous),
    "process 0 sweeps what was said of its own later calls": REAL._replace(live=lambda _: ()),
    "others take over the number of process 0": REAL._replace(counted=max),
    "a job has the name of the one before": REAL._replace(job_name=lambda _: f"{0:016x}"),
}


OVER_MEMORY = {
    "process 0 acknowledges before it commits": REAL._replace(coordinate=hasty),
    "others hand in before their data are durable": REAL._replace(participate=eager),
    "others withdraw although the commit may have happened": REAL._replace(coordinate=careless),
    "others take silence for success": REAL._replace(participate=trusting),
}


def take_at_once(call: Call, prepare: PrepareMessage) -> Generator[Operation, Any, bytes]:
    if prepare.signature is not None:
        return prepare.signature
    return (yield Get(signature_name(call.attempt))) or b""


BROKEN_STEPS = {
    "others take a long signature as they read it first, whatever its digest": (
        two_phase_commit,
        "_await_signature",
        take_at_once,
    )
}


def remove_what_may_be_committed(save: SimulatedSave) -> None:
    save._unknown = False
    REMOVE(save)


def replace_whatever_is_there(save: SimulatedSave) -> None:
    found = save._store.find(INDEX)
    if found is not None:
        save._transaction._state = found.version
    SWAP(save)


def sweep_all(transaction: VersionedTransaction, _: str, data: Sequence[str]) -> Held:
    transaction.store.remove(*data)
    return Held.NO


REMOVE, SWAP = SimulatedSave._remove_own, SimulatedSave._swap
BROKEN_SAVES = {
    "a save that may be committed yet removes its data": (SimulatedSave, "_remove_own", remove_what_may_be_committed),
    "a save replaces whatever is there": (SimulatedSave, "_swap", replace_whatever_is_there),
    "a save takes silence for death": (VersionedTransaction, "sweep", sweep_all),
}
