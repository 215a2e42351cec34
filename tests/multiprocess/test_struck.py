"""One process of several is killed or stopped, or meets damage, while it holds, follows, resumes or regroups.

All others end within a bound, with a result on which all agree or with an error that says what is missing. Nothing that
somebody holds is lost, and a lease of the dead ends by itself. Afterwards the run is saved to.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import treering as tr
from tests import clocks
from tests.multiprocess.each_states import merge, saves_for_another_job, split
from tests.multiprocess.jobs import Crews, Job, results, start_job
from tests.multiprocess.struck import does_as_told, hurt
from tests.multiprocess.test_async_jobs import answers, ask
from tests.on_disk import step_path
from torture.process_points import Point

_DEADLINE: Final = 2.0
# Three waits of which the last is lengthened, and what a loaded machine adds.
_LONGEST: Final = 3.1 * _DEADLINE + 15
_LEASE: Final = "treering._runs.leases:Lease"
_WATCH: Final = "treering._runs.leases:StepWatch"
_BACK: Final = "treering._runs.fallback:NewestStep"
_FOLDER: Final = "treering._runs.folder:RunFolder"
_SWAP: Final = "treering._store.posix.writing:StagedFile.commit"
_EACH: Final = "treering._tree.each"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the training not wait for long for a lease that whoever stands still has locked."""
    clocks.wait_at_most(monkeypatch, swap_patience=0.2)


@pytest.fixture
def crew(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    """A job of as many processes as the test has as its ``count``."""
    count = request.getfixturevalue("count")
    with start_job(does_as_told, count, devices=1, arguments=[str(tmp_path)], heartbeat=100) as job:
        yield job


def strike(job: Job, where: Point, victim: int, action: str, **damage: str) -> tuple[int, str]:
    """Let a process be struck at a point; return what it says then."""
    what = {"do": "harm", **damage} if damage else {"do": "arm", "action": action}
    point = {field.name: getattr(where, field.name) for field in dataclasses.fields(Point)}
    ask(job, [victim], point=point, **what)
    assert "error" not in answers(job, [victim])[victim]
    return victim, f"at {where.name}"


def all_do(job: Job, count: int, **command: Any) -> list[Any]:
    """Let all do the same; once more where the first time told them that some had given up before."""
    said: dict[int, dict[str, Any]] = {}
    for _ in range(3):
        ask(job, range(count), **command)
        said = answers(job, range(count))
        if not any("given up" in one.get("message", "") for one in said.values()):
            break
    assert not any("error" in one for one in said.values()), said
    return [said[number]["result"] for number in range(count)]


def check_late(said: dict[str, Any], victim: int) -> None:
    """Whoever cannot go on says for whom it has waited, and soon."""
    assert said["error"] in {"TimedOutError", "ProcessFailedError"}, said
    # Of four, one that was there first, and has given up already, gives no sign of life either.
    assert victim in [*said.get("missing", ()), *said.get("processes", ())], said
    assert "process" in said["message"], said
    assert said["seconds"] < _LONGEST, said


def strikes(table: Iterable[Any], default: Iterable[str]) -> list[Any]:
    """Return each row of a table with 2 and 4 processes, and each process that comes by; few of them by default."""
    rows = []
    for row in table:
        for count in (2, 4):
            for victim in (0, count // 2):
                if row.concerns(victim, count):
                    name = f"{row.name.replace(' ', '-')}-{count}-{victim}"
                    marks = [] if name in default else [pytest.mark.strikes]
                    rows.append(pytest.param(row, count, victim, id=name, marks=marks))
    return rows


# ----------------------------------------------------------------------------------------------------- holding a step


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Holding(Point):
    """A point on the way of a process that holds a step."""

    call: str
    """What it does: hold, renew or release."""
    leased: bool = True
    """Whether its lease is there when it stands here for good."""
    locked: bool = False
    """Whether it stands there with its lease locked, which then lasts until it is gone."""


_HOLDING: Final = (
    Holding(name="the lease is not written yet", place=f"{_LEASE}._create", when="before", call="hold", leased=False),
    Holding(name="the lease is there", place=f"{_LEASE}._written", when="before", call="hold"),
    Holding(name="the lease is written", place=f"{_LEASE}._create", when="after", call="hold"),
    Holding(name="the step is proved", place=f"{_LEASE}._prove", when="after", call="hold"),
    Holding(name="it is about to renew", place=f"{_LEASE}._renew", when="before", call="renew"),
    Holding(name="it renews halfway", place=_SWAP, when="before", call="renew", locked=True),
    Holding(name="it has renewed", place=f"{_LEASE}._renew", when="after", call="renew"),
    Holding(name="it has not released yet", place=f"{_LEASE}._remove", when="before", call="release"),
    Holding(name="its lease is removed", place=f"{_LEASE}._remove", when="after", call="release", leased=False),
    Holding(name="the stamp goes", place=f"{_FOLDER}.unstamp", when="before", call="release", leased=False),
    Holding(name="the stamp is gone", place=f"{_FOLDER}.unstamp", when="after", call="release", leased=False),
)  # fmt: skip


def train(folder: Path, *steps: int) -> list[int]:
    """Save steps of which retention keeps the newest alone; return those that are there afterwards."""
    with tr.Run(folder / "run", keep=tr.KeepLast(1)) as run:
        for step in steps:
            run.save(step, {"w": np.full((8, 4), float(step)), "step": step}).result(60)
    return tr.Run(folder / "run").steps()


def let_leases_expire(folder: Path) -> None:
    """Let every lease be older than it counts, by the clock of the store."""
    for lease in folder.glob("run/.leases/step_*"):
        os.utime(lease, (1e9, 1e9))


def check_run(folder: Path, *steps: int) -> None:
    """Nothing but these steps is there, each of them whole: no lease, and nothing that somebody has left."""
    # Whoever dies between the last two things of a release leaves the folder, which the next one takes along; whoever
    # dies in a meeting leaves a sign of life, which nobody takes for one for long.
    left = [each for each in (folder / "run").iterdir() if not each.name.startswith(".treering-waiting-")]
    names = sorted(each.name for each in left if each.name != ".leases" or list(each.iterdir()))
    assert names == ["run.json", *(f"step_{step:08d}" for step in steps)]
    for step in steps:
        assert tr.verify(step_path(folder / "run", step)).ok
        assert float(np.asarray(tr.load(step_path(folder / "run", step))["w"])[0, 0]) == step


def begin_to_hold(folder: Path, job: Job, count: int, where: Holding, *, victim: int, action: str) -> None:
    """Let all hold step 10, and one of them be struck while it begins to, or later on its way."""
    others = [number for number in range(count) if number != victim]
    train(folder, 10)
    if where.call != "hold":
        all_do(job, count, do="hold", step=10)
    struck = strike(job, where, victim, action)
    if where.call == "hold":
        ask(job, range(count), do="hold", step=10)
        said = answers(job, others, struck)
    else:
        ask(job, others, do="renew")
        said = answers(job, others)
    if where.call == "release" and "stamp" in where.name:  # only the last one to release takes the stamp away
        ask(job, others, do="release")
        answers(job, others)
    if where.call != "hold":
        ask(job, [victim], do=where.call)
        answers(job, [], struck)
    assert not any("error" in one for one in said.values()), said


@pytest.mark.parametrize(
    ("where", "count", "victim"), strikes(_HOLDING, {"it-renews-halfway-2-1", "the-lease-is-written-2-1"})
)
def test_whoever_stands_still_while_it_holds_a_step(
    tmp_path: Path, crew: Job, *, where: Holding, count: int, victim: int
) -> None:
    others = [number for number in range(count) if number != victim]
    begin_to_hold(tmp_path, crew, count, where, victim=victim, action="pause")
    held = where.leased or "stamp" not in where.name
    assert train(tmp_path, 20, 30) == [10, 30] if held else [30]
    if "stamp" not in where.name:
        for wanted in ({"do": "renew"}, {"do": "reads", "step": 10}, {"do": "release"}):
            ask(crew, others, **wanted)
            assert not any("error" in one for one in answers(crew, others).values()), wanted
    assert train(tmp_path, 40) == ([10, 40] if where.leased else [40])
    let_leases_expire(tmp_path)
    assert train(tmp_path, 50) == ([10, 50] if where.locked else [50])
    crew.wake(victim)
    said = answers(crew, [victim])[victim]
    assert said["seconds"] < 60
    lost: dict[str, set[str | None]] = {
        "hold": {"NotFoundError", "LeaseLostError"}, "renew": {"LeaseLostError"}, "release": {None},
    }  # fmt: skip
    if where.locked or where.name in ("it has renewed", "the step is proved"):
        lost[where.call].add(None)  # it had all it asked for, or has it still
    assert said.get("error") in lost[where.call], said
    assert "error" not in said or "step 10" in said["message"]
    all_do(crew, count, do="release")
    let_leases_expire(tmp_path)
    assert train(tmp_path, 60) == [60]
    all_do(crew, count, do="hold", step=60)
    assert train(tmp_path, 70) == [60, 70]
    all_do(crew, count, do="release")
    assert train(tmp_path, 80) == [80]
    check_run(tmp_path, 80)
    ask(crew, range(count), do="end")
    results(crew.wait())


@pytest.mark.parametrize(("where", "count", "victim"), strikes(_HOLDING, {"it-has-renewed-2-1"}))
def test_whoever_is_killed_while_it_holds_a_step(
    tmp_path: Path, crew: Job, *, where: Holding, count: int, victim: int
) -> None:
    begin_to_hold(tmp_path, crew, count, where, victim=victim, action="kill")
    # jax ends all others with process 0, and what they hold stays for as long as what that holds.
    others = [number for number in range(count) if number != victim] if victim else []
    if others and "stamp" not in where.name:
        assert train(tmp_path, 20, 30) == [10, 30]
        for wanted in ({"do": "renew"}, {"do": "reads", "step": 10}, {"do": "release"}):
            ask(crew, others, **wanted)
            assert not any("error" in one for one in answers(crew, others).values()), wanted
        assert train(tmp_path, 40) == ([10, 40] if where.leased else [40])
    elif where.leased:
        assert train(tmp_path, 40) == [10, 40]  # it may only stand still
    let_leases_expire(tmp_path)
    assert train(tmp_path, 50) == [50]
    check_run(tmp_path, 50)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.strikes)])
@pytest.mark.parametrize(
    ("files", "how", "told"),
    [
        ("run/.leases/step_*", "removed", "LeaseLostError"),
        ("run/.leases/step_*", "flipped", "LeaseLostError"),
        ("run/.leases/step_*", "emptied", "LeaseLostError"),
        ("run/step_00000010/data-*", "flipped", None),
        ("run/step_00000010/data-*", "removed", None),
        ("run/step_00000010/treering.json", "removed", "LeaseLostError"),
        ("run/run.json", "flipped", None),
        ("run/run.json", "removed", None),
        ("run/.run.json.left", "removed", None),
    ],
)
@pytest.mark.strikes
def test_damage_while_all_hold_a_step(
    tmp_path: Path, crew: Job, *, count: int, files: str, how: str, told: str
) -> None:
    train(tmp_path, 10)
    all_do(crew, count, do="hold", step=10)
    hurt(tmp_path, files, how)
    ask(crew, range(count), do="renew")
    for said in answers(crew, range(count)).values():
        assert said.get("error") == told, said
        assert told is None or "step 10" in said["message"]
    ask(crew, range(count), do="reads", step=10)
    for said in answers(crew, range(count)).values():
        damaged = "step_00000010" in files
        assert said.get("error", "") in (("CorruptError", "NotFoundError") if damaged else ("",)), said
        assert not damaged or "step_00000010" in said["message"]
    there = train(tmp_path, 20, 30)
    lost = "treering.json" in files or (".leases" in files and how == "removed")
    assert there == ([30] if lost else [10, 30])
    all_do(crew, count, do="release")
    let_leases_expire(tmp_path)
    assert train(tmp_path, 40)[-1] == 40
    ask(crew, range(count), do="end")
    results(crew.wait())


# ------------------------------------------------------------------------------------------------- following together

_FOLLOWING: Final = (
    Point(name="it has not asked yet", place=f"{_WATCH}.__next__", when="before", of="follower"),
    Point(name="it looks", place=f"{_WATCH}._look", when="before", of="leader"),
    Point(name="it waits between two looks", place=f"{_WATCH}._next_pause", when="after", of="leader"),
    Point(name="it is about to hold a step", place=f"{_LEASE}._create", when="before", of="leader", done=None),
    Point(name="it holds a step", place=f"{_LEASE}._prove", when="after", of="leader", done=None),
    Point(name="it has not told the others", place=f"{_WATCH}._await_step", when="after", of="leader", done=None),
)


def begin_to_follow(folder: Path, job: Job, count: int, where: Point, *, victim: int, action: str) -> dict[int, Any]:
    """Let all follow a run up to step 10, and one be struck on the way to the next; return what the others answer."""
    train(folder, 10)
    assert all_do(job, count, do="follow", timeout=_DEADLINE) == [10] * count
    struck = strike(job, where, victim, action)
    if where.done is None:
        train(folder, 20)
    ask(job, range(count), do="follow")
    others = [number for number in range(count) if number != victim]
    return answers(job, others if victim or action == "pause" else [], struck)


@pytest.mark.parametrize(
    ("where", "count", "victim"), strikes(_FOLLOWING, {"it-has-not-asked-yet-2-1", "it-has-not-told-the-others-2-0"})
)
def test_whoever_stands_still_while_all_follow(
    tmp_path: Path, crew: Job, *, where: Point, count: int, victim: int
) -> None:
    for said in begin_to_follow(tmp_path, crew, count, where, victim=victim, action="pause").values():
        check_late(said, victim)
    if where.done is False:
        train(tmp_path, 20)
    crew.wake(victim)
    said = answers(crew, [victim])[victim]
    assert said.get("result") == 20 or said["error"] == "TimedOutError", said
    # Nobody has missed a step: all get the one that was found while they did not hear each other.
    while (found := all_do(crew, count, do="follow")) == [10] * count:
        pass
    assert found == [20] * count
    train(tmp_path, 30)
    assert all_do(crew, count, do="follow") == [30] * count
    assert train(tmp_path, 40, 50) == [30, 50]
    assert all_do(crew, count, do="follow") == [50] * count
    ask(crew, range(count), do="end")
    results(crew.wait())
    let_leases_expire(tmp_path)
    assert train(tmp_path, 60) == [60]
    check_run(tmp_path, 60)


@pytest.mark.parametrize(("where", "count", "victim"), strikes(_FOLLOWING, ()))
def test_whoever_is_killed_while_all_follow(
    tmp_path: Path, crew: Job, *, where: Point, count: int, victim: int
) -> None:
    for said in begin_to_follow(tmp_path, crew, count, where, victim=victim, action="kill").values():
        check_late(said, victim)
    train(tmp_path, 30)
    let_leases_expire(tmp_path)
    assert train(tmp_path, 40) == [40]
    check_run(tmp_path, 40)
    with start_job(does_as_told, count, devices=1, arguments=[str(tmp_path)], heartbeat=100) as job:
        assert all_do(job, count, do="follow") == [40] * count
        ask(job, range(count), do="end")
        results(job.wait())


# -------------------------------------------------------------------------------------------- resuming past damage

_RESUMING: Final = (
    Point(name="the choice is not made yet", place=f"{_BACK}.choose", when="before", of="leader"),
    Point(name="it has chosen", place=f"{_BACK}.choose", when="after", of="leader"),
    Point(name="it is about to read", place=f"{_BACK}.try_step", when="before"),
    Point(name="it has found the damage", place=f"{_BACK}._outcome_of", when="after"),
    Point(name="it has heard of the damage", place=f"{_BACK}._agree", when="after"),
    Point(name="it reads the older step", place=f"{_BACK}.try_step", when="before", nth=2),
    Point(name="it has read the older step", place=f"{_BACK}.try_step", when="after", nth=2),
    Point(name="the resume is not noted yet", place=f"{_BACK}.finish", when="before"),
    Point(name="the note is written halfway", place=_SWAP, when="before", of="leader", done=None),
    Point(name="the note is written", place=f"{_FOLDER}.write_resumes", when="after", of="leader", done=None),
    Point(name="the resume is noted", place=f"{_BACK}.finish", when="after", done=True),
)
_KNOWS_OF_IT: Final = {"it is about to read", "it has found the damage"}
_BAD: Final = "run/step_00000030/data-*"


def begin_run(folder: Path, job: Job, count: int) -> None:
    """Save three steps together, of which the newest is damaged afterwards; load once, which compiles what it needs."""
    for step in (10, 20, 30):
        all_do(job, count, do="save", step=step)
    for joint in (True, False):
        assert all_do(job, count, do="resume", joint=joint) == [[30, 30, 30]] * count
    hurt(folder, _BAD, "flipped")


def resume(job: Job, count: int, where: Point, victim: int, *, action: str, joint: bool) -> dict[int, Any]:
    """Let all resume, and one be struck on the way; return what the others answer."""
    struck = strike(job, where, victim, action)
    ask(job, range(count), do="resume", joint=joint, timeout=_DEADLINE)
    others = [number for number in range(count) if number != victim]
    return answers(job, others if victim or action == "pause" else [], struck)


def check_resumed(said: dict[int, Any], where: Point, victim: int) -> None:
    """Whoever has resumed did so from the same step, and whoever has not says for whom it has waited."""
    for one in said.values():
        if "error" in one:
            assert where.done is not True, one
            check_late(one, victim)
            if where.name in _KNOWS_OF_IT:  # who is missing does not hide the damage, which all have found by then
                assert "CorruptError" in one["message"], one
                assert "step_00000030" in one["message"], one
        else:
            # The last one to be heard may be gone when the others have all they need.
            assert one["result"] == [20, 20, 20], one


def goes_on(folder: Path, job: Job, count: int, joint: bool) -> None:
    """Resume all from the step below the damaged one, and save on; nothing that was there is gone."""
    assert all_do(job, count, do="resume", joint=joint) == [[20, 20, 20]] * count
    run = tr.Run(folder / "run")
    assert run.steps() == [10, 20, 30]
    assert 1 <= run.attempts(20) <= 4
    all_do(job, count, do="save", step=40)
    assert all_do(job, count, do="resume", joint=joint) == [[40, 40, 40]] * count
    assert run.steps() == [10, 20, 30, 40]
    assert [tr.verify(step_path(folder / "run", step)).ok for step in (10, 20, 30, 40)] == [True, True, False, True]
    # A sign of life of one that still waits for the dead one may be there.
    names = {each.name for each in (folder / "run").iterdir() if not each.name.startswith(".treering-waiting-")}
    assert names == {"run.json", ".run.json.resumed", *(f"step_{step:08d}" for step in (10, 20, 30, 40))}
    ask(job, range(count), do="end")
    results(job.wait())


@pytest.mark.parametrize("joint", [False, pytest.param(True, marks=pytest.mark.strikes)])
@pytest.mark.parametrize(("where", "count", "victim"), strikes(_RESUMING, {"it-has-found-the-damage-2-1"}))
def test_whoever_stands_still_while_all_resume_past_damage(
    tmp_path: Path, crew: Job, *, where: Point, count: int, victim: int, joint: bool
) -> None:
    begin_run(tmp_path, crew, count)
    check_resumed(resume(crew, count, where, victim, action="pause", joint=joint), where, victim)
    crew.wake(victim)
    said = answers(crew, [victim])[victim]
    assert said.get("result") == [20, 20, 20] or said["error"] in {"TimedOutError", "ProcessFailedError"}, said
    goes_on(tmp_path, crew, count, joint)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize(("where", "count", "victim"), strikes(_RESUMING, ()))
def test_whoever_is_killed_while_all_resume_past_damage(
    tmp_path: Path, crew: Job, *, where: Point, count: int, victim: int, joint: bool
) -> None:
    begin_run(tmp_path, crew, count)
    check_resumed(resume(crew, count, where, victim, action="kill", joint=joint), where, victim)
    with start_job(does_as_told, count, devices=1, arguments=[str(tmp_path)], heartbeat=100) as job:
        goes_on(tmp_path, job, count, joint)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("how", ["flipped", "removed"])
@pytest.mark.parametrize(("where", "count", "victim"), strikes(_RESUMING, ()))
def test_more_is_damaged_while_all_resume(
    tmp_path: Path, crew: Job, *, where: Point, count: int, victim: int, how: str, joint: bool
) -> None:
    begin_run(tmp_path, crew, count)
    strike(crew, where, victim, "harm", files="run/step_00000020/data-*", how=how)
    found = all_do(crew, count, do="resume", joint=joint)
    assert found[0] in ([20, 20, 20], [10, 10, 10])
    assert found == [found[0]] * count
    assert all_do(crew, count, do="resume", joint=joint) == [[10, 10, 10]] * count
    assert tr.Run(tmp_path / "run").steps() == [10, 20, 30]
    all_do(crew, count, do="save", step=40)
    assert all_do(crew, count, do="resume", joint=joint) == [[40, 40, 40]] * count
    ask(crew, range(count), do="end")
    results(crew.wait())


@pytest.mark.parametrize("count", [2])
def test_damage_hides_nobody_who_is_missing_and_the_other_way_round(tmp_path: Path, crew: Job, count: int) -> None:
    begin_run(tmp_path, crew, count)
    for how in ("load", "step", "run", "init", "run with fallback", "init with fallback"):
        for number in range(count):
            ask(crew, [number], do="load", how=how, leaves=number == 1, timeout=_DEADLINE)
        said = answers(crew, range(count))
        assert "error" not in said[1], said
        assert said[0]["missing"] == [1], (how, said)
        for text in ("process 1 did not arrive within 2 s", "CorruptError", "step_00000030", "is damaged"):
            assert text in said[0]["message"], (how, said)
        check_late(said[0], 1)
        for _ in range(3):  # the next call meets what process 0 was left alone in, and all hear of that
            ask(crew, range(count), do="resume", joint=False)
            said = answers(crew, range(count))
        assert [one.get("result") for one in said.values()] == [[20, 20, 20]] * count, said
    ask(crew, range(count), do="end")
    results(crew.wait())


# ------------------------------------------------------------------------------------------------- states of iterators

_STATES: Final = "tests.multiprocess.each_states"
_LOADING_EACH: Final = (
    Point(name="it has not opened it", place="treering._runs.iterators:load_items", when="before"),
    Point(name="it is about to merge", place=f"{_STATES}:merge", when="before"),
    Point(name="it has split", place=f"{_EACH}:Each.regroup", when="after"),
    Point(name="it has read all", place="treering._runs.iterators:load_items", when="after"),
    Point(name="its iterator is about to go on", place=f"{_STATES}:Shard.set_state", when="before", done=True),
    Point(name="its iterator goes on", place=f"{_STATES}:Shard.set_state", when="after", done=True),
)
_SAVE: Final = "treering._checkpoint.save_folder:_CheckpointShare"
_SAVING_EACH: Final = (
    Point(name="its state is not taken yet", place=f"{_STATES}:Shard.get_state", when="before"),
    Point(name="its state is taken", place=f"{_STATES}:Shard.get_state", when="after"),
    Point(name="the states are not put yet", place=f"{_SAVE}._put_states", when="before", of="leader"),
    Point(name="the states are put", place=f"{_SAVE}._put_states", when="after", of="leader"),
)


def others_rows(found: Iterable[list[int]]) -> list[int]:
    """Return the rows that are left of all, in order."""
    return sorted(row for rows in found for row in rows)


def states_of(folder: Path, crews: Crews, count: int) -> list[int]:
    """Save the states of another number of processes; return the rows that are left."""
    other = 4 if count == 2 else 2
    results(crews.run(saves_for_another_job, other, devices=1, arguments=[str(folder / "ckpt")], timeout=120))
    return others_rows(state["left"] for state in tr.load(folder / "ckpt")["data"]["a"])


def check_regrouped(folder: Path, job: Job, count: int) -> None:
    """Load in all, which get what merge and split say of what is there; then save their own and load it."""
    states = list(tr.load(folder / "ckpt")["data"]["a"])
    wanted = [one["left"] for one in (states if len(states) == count else split(merge(states), count))]
    assert all_do(job, count, do="load each") == [list(rows) for rows in wanted]
    all_do(job, count, do="save each")
    assert tr.verify(folder / "ckpt").ok
    states = list(tr.load(folder / "ckpt")["data"]["a"])
    assert len(states) == count
    assert all_do(job, count, do="load each") == [list(one["left"]) for one in states]
    ask(job, range(count), do="end")
    results(job.wait())


def do_each(job: Job, count: int, where: Point, victim: int, *, action: str, what: str) -> dict[int, Any]:
    """Let all load or save states, and one be struck on the way; return what the others answer."""
    struck = strike(job, where, victim, action)
    ask(job, range(count), do=what, timeout=_DEADLINE)
    others = [number for number in range(count) if number != victim]
    return answers(job, others if victim or action == "pause" else [], struck)


_EACH_TABLE: Final = [(row, "load each") for row in _LOADING_EACH] + [(row, "save each") for row in _SAVING_EACH]
_EACH_ROWS: Final = [
    pytest.param(*one.values, what, id=f"{what.replace(' ', '-')}-{one.id}", marks=one.marks)
    for row, what in _EACH_TABLE
    for one in strikes([row], {"it-is-about-to-merge-2-1"})
]


@pytest.mark.parametrize(("where", "count", "victim", "what"), _EACH_ROWS)
def test_whoever_stands_still_while_states_are_regrouped(
    tmp_path: Path, crews: Crews, crew: Job, *, where: Point, count: int, victim: int, what: str
) -> None:
    left = states_of(tmp_path, crews, count)
    assert others_rows(all_do(crew, count, do="load each")) == left
    for said in do_each(crew, count, where, victim, action="pause", what=what).values():
        assert "error" in said or where.done, said
        if "error" in said:
            check_late(said, victim)
    crew.wake(victim)
    said = answers(crew, [victim])[victim]
    assert said.get("error", "TimedOutError") in {"TimedOutError", "ProcessFailedError"}, said
    check_regrouped(tmp_path, crew, count)


@pytest.mark.strikes
@pytest.mark.parametrize(("where", "count", "victim", "what"), _EACH_ROWS)
def test_whoever_is_killed_while_states_are_regrouped(
    tmp_path: Path, crews: Crews, crew: Job, *, where: Point, count: int, victim: int, what: str
) -> None:
    left = states_of(tmp_path, crews, count)
    assert others_rows(all_do(crew, count, do="load each")) == left
    for said in do_each(crew, count, where, victim, action="kill", what=what).values():
        assert "error" in said or where.done, said
        if "error" in said:
            check_late(said, victim)
    assert others_rows(state["left"] for state in tr.load(tmp_path / "ckpt")["data"]["a"]) == left
    with start_job(does_as_told, count, devices=1, arguments=[str(tmp_path)], heartbeat=100) as job:
        check_regrouped(tmp_path, job, count)


@pytest.mark.strikes
@pytest.mark.parametrize("how", ["flipped", "removed"])
@pytest.mark.parametrize(("where", "count", "victim", "what"), _EACH_ROWS)
def test_states_are_damaged_while_they_are_regrouped(
    tmp_path: Path, crews: Crews, crew: Job, *, where: Point, count: int, victim: int, what: str, how: str
) -> None:
    states_of(tmp_path, crews, count)
    all_do(crew, count, do="load each")
    names = f"ckpt/data-*-of-{(4 if count == 2 else 2) + 1:05d}.safetensors"
    strike(crew, where, victim, "harm", files=names, how=how)
    ask(crew, range(count), do=what, timeout=60.0)
    told = [said.get("error") for said in answers(crew, range(count)).values()]
    # All are through, or all hear of it; a save replaces what was damaged.
    assert told == [None] * count or (what == "load each" and None not in told), told
    assert set(told) <= {None, "CorruptError", "NotFoundError", "ProcessFailedError"}, told
    all_do(crew, count, do="save each")
    check_regrouped(tmp_path, crew, count)
