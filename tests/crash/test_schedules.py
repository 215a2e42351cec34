"""A slice of the simulated schedules, and proof that broken protocols are found by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.crash.attacks import attack
from torture.schedules import tried
from torture.simulated_store import SimulatedSave, WatchedStore
from torture.virtual_processes import REAL, Protocol
from treering._coordination.coordinator import coordinate
from treering._coordination.messages import DecisionMessage, VoteMessage, VoteStage
from treering._coordination.operations import Call, Commit, Get, MakeFolder, Operation, Operations, Put, Rollback, Sleep
from treering._coordination.participant import participate
from treering._store.api import Held, Version
from treering._values.checkpoint_names import INDEX, decision_name
from treering.errors import Timeout

pytestmark = pytest.mark.slow

SEED = 5
SLICE = range(2000)


def test_a_slice_of_the_schedules_keeps_the_rules_and_visits_every_end() -> None:
    found = tried(SEED, SLICE)
    assert found.violations == []
    ends = {
        "committed",
        "timed out",
        "timed out, outcome unknown",
        "overtaken",
        "refused",
        "StoreFailed",
        "ProcessFailed",
        "KeyboardInterrupt",
    }
    assert ends | {"killed", "paused", "interrupted", "restarted"} <= set(found.counts)


def test_many_processes_of_a_job() -> None:
    assert tried(SEED, range(20), processes=40).violations == []


def test_a_slice_over_a_store_that_proves_of_nobody_that_it_lives() -> None:
    found = tried(SEED, range(500), store="memory")
    assert found.violations == []
    assert {"committed", "refused", "killed", "paused", "late", "timed out, outcome unknown"} <= set(found.counts)


def test_the_same_seed_gives_the_same_schedules() -> None:
    assert tried(SEED, range(10), store="memory") == tried(SEED, range(10), store="memory")
    assert tried(SEED, range(40)) == tried(SEED, range(40))
    assert tried(SEED, range(40)).counts != tried(SEED + 1, range(40)).counts


def altered(
    steps: Operations,
    told: Callable[[Operation], list[Operation]] = lambda step: [step],
    read: Callable[[Get, bytes | None], bytes | None] = lambda step, data: data,
) -> Operations:
    """The same steps with other operations in place of some, and other answers to what they read."""
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


def retold(step: Operation, old: bytes, new: bytes) -> list[Operation]:
    return [step._replace(data=step.data.replace(old, new))] if isinstance(step, Put) else [step]


def impatient(call: Call, signature: bytes) -> Operations:
    written = VoteMessage(stage=VoteStage.PREPARED, who="nobody").encode()
    return altered(
        coordinate(call, signature), read=lambda step, data: data or ("-part-" in step.name and written) or None
    )


def credulous(call: Call, signature: bytes) -> Operations:
    steps = coordinate(call, signature)
    return altered(steps, read=lambda step, data: data and data.replace(b"at work", b"written"))


def hasty(call: Call, signature: bytes) -> Operations:
    said = Put(decision_name(call.attempt), DecisionMessage(who="hasty").encode())
    return altered(coordinate(call, signature), lambda step: [said, step] if isinstance(step, Commit) else [step])


def careless(call: Call, signature: bytes) -> Operations:
    return altered(coordinate(call, signature), lambda step: retold(step, b'"kept":true', b'"kept":false'))


def tidy(call: Call, signature: bytes) -> Operations:
    """When some did not come, the proof that what they may yet write is a leftover goes too."""
    try:
        yield from coordinate(call, signature)
    except Timeout:
        yield Rollback()
        raise


def faithless(call: Call, check: Callable[[bytes], None]) -> Operations:
    try:
        yield from participate(call, check)
    except Timeout as error:
        if "not known here" in str(error):
            yield Rollback()
        raise


def trusting(call: Call, check: Callable[[bytes], None]) -> Operations:
    try:
        yield from participate(call, check)
    except Timeout as error:
        if "not known here" not in str(error):
            raise


def patient(call: Call, check: Callable[[bytes], None]) -> Operations:
    """The clock of the others stands still."""
    return altered(participate(call, check), lambda step: [step] if not isinstance(step, Sleep) else [Sleep(4.0)])


def unheard(call: Call, check: Callable[[bytes], None]) -> Operations:
    """Those that give up before process 0 has made the folder leave no word for it."""
    return altered(participate(call, check), lambda step: [] if isinstance(step, MakeFolder) else [step])


def silent(call: Call, error: BaseException) -> Operations:
    return
    yield


MUTANTS = {
    "process 0 does not wait for missing parts": REAL._replace(coordinate=impatient),
    "process 0 does not wait for the end of the work": REAL._replace(coordinate=credulous),
    "process 0 acknowledges before it commits": REAL._replace(coordinate=hasty),
    "process 0 removes the proof while others may write": REAL._replace(coordinate=tidy),
    "process 0 does not say that it was refused": REAL._replace(refuse=silent),
    "others withdraw after they have handed in": REAL._replace(participate=faithless),
    "others withdraw although the commit may have happened": REAL._replace(coordinate=careless),
    "others take silence for success": REAL._replace(participate=trusting),
    "others wait too long": REAL._replace(participate=patient),
    "others that give up make no folder to say so": REAL._replace(participate=unheard),
    "process 0 sweeps what was said of its own later calls": REAL._replace(live=lambda call: ()),
    "others take over the number of process 0": REAL._replace(counted=max),
    "a job has the name of the one before": REAL._replace(job_name=lambda number: f"{0:016x}"),
}


@pytest.mark.parametrize("protocol", MUTANTS.values(), ids=MUTANTS.keys())
def test_a_broken_protocol_is_found(protocol: Protocol) -> None:
    assert tried(SEED, SLICE, protocol=protocol, enough=1).violations


OVER_MEMORY = {
    "process 0 acknowledges before it commits": REAL._replace(coordinate=hasty),
    "process 0 does not wait for the end of the work": REAL._replace(coordinate=credulous),
    "others withdraw although the commit may have happened": REAL._replace(coordinate=careless),
    "others take silence for success": REAL._replace(participate=trusting),
}


@pytest.mark.parametrize("protocol", OVER_MEMORY.values(), ids=OVER_MEMORY.keys())
def test_a_broken_protocol_is_found_over_the_memory_store(protocol: Protocol) -> None:
    assert tried(SEED, SLICE, protocol=protocol, enough=1, store="memory").violations


def removes_what_may_be_committed(save: SimulatedSave) -> None:
    save._unknown = False
    REMOVE(save)


def replaces_whatever_is_there(save: SimulatedSave) -> None:
    assert save._claim is not None
    found = save._store.find(INDEX)
    if found is not None:
        save._claim._state = found.version  # type: ignore[attr-defined]
    SWAP(save)


def sweeps_all(self: WatchedStore, marker: str, data: Sequence[str], name: str, current: Version | None) -> Held:
    for one in data:
        self.remove(one)
    return Held.NO


REMOVE, SWAP = SimulatedSave._remove_own, SimulatedSave._swap
BROKEN_SAVES = {
    "a save that may be committed yet removes its data": (SimulatedSave, "_remove_own", removes_what_may_be_committed),
    "a save replaces whatever is there": (SimulatedSave, "_swap", replaces_whatever_is_there),
    "a save takes silence for death": (WatchedStore, "sweep", sweeps_all),
}


@pytest.mark.parametrize("broken", BROKEN_SAVES.values(), ids=BROKEN_SAVES.keys())
def test_a_broken_save_over_the_memory_store_is_found(
    broken: tuple[type, str, Callable[..., object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*broken)
    assert tried(SEED, SLICE, enough=1, store="memory").violations


def test_the_command_says_what_it_saw() -> None:
    done = attack("schedules", "--schedules", "60", "--seed", "5", "--jobs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n0 violations" in done.stdout
    assert "60 schedules in " in done.stdout
    assert "committed" in done.stdout
