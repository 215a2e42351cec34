"""Processes that save in the background together: one that is killed or stands still is named, and all goes on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import treering as tr
from tests.multiprocess.async_jobs import answer_of, not_asked, obeys, refused, trains
from tests.multiprocess.jobs import Crews, Job, results, start_job
from torture.process_points import Point
from torture.process_scenes import SCENES
from torture.process_table import points_of
from torture.run_kills import litter

_DEADLINE: Final = 2.0
# Three waits of which the last is lengthened, and what a loaded machine adds.
_LONGEST: Final = 60.0
_RUN: Final = next(scene for scene in SCENES if scene.name == "run, next step")
_FORMS: Final = ("run", "ckpt")


def point(name: str, number: int) -> Point:
    """Return the point of that name by which a process comes."""
    return next(one for one in points_of(_RUN, "jax") if one.name == name and one.concerns(number, 4))


def ask(job: Job, numbers: Iterable[int], **command: Any) -> None:
    for number in numbers:
        job.tell(number, json.dumps(command))


def answers(job: Job, numbers: Iterable[int], struck: tuple[int, str] | None = None) -> dict[int, dict[str, Any]]:
    """Wait for the answers of processes, and for what one says who is struck; on a busy machine that may come last."""
    waited = set(numbers)
    found: dict[int, dict[str, Any]] = {}
    for number, text in job.events(_LONGEST):
        if (answer := answer_of(text)) is not None:
            found[number] = answer
            waited.discard(number)
        elif (number, text) == struck:
            struck = None
        if not waited and struck is None:
            return found
    raise AssertionError(f"{waited} ended without an answer; {found}")


def saved(folder: Path, form: str) -> dict[int, float]:
    """Return what is there, step by step, each loaded whole and verified."""
    places = [folder / "ckpt"] if form == "ckpt" else sorted((folder / "run").glob("step_*"))
    found = {}
    for place in places:
        if (place / "treering.json").exists():
            tree = tr.load(place)
            assert tr.verify(place).ok, place
            assert np.array_equal(np.asarray(tree["w"]) - np.asarray(tree["w"])[0, 0], np.arange(576.0).reshape(24, 24))
            found[tree["step"]] = float(np.asarray(tree["w"])[0, 0])
    assert all(step == value for step, value in found.items()), found
    return found


def save_all(job: Job, count: int, form: str, number: int) -> None:
    """Save by all processes; once more where the first time told them that some had given up before."""
    for tries_left in (1, 0):
        ask(job, range(count), do=form, number=number)
        said = answers(job, range(count))
        if not any("error" in one for one in said.values()):
            return
        assert tries_left, said
        assert all("given up" in one.get("message", "") for one in said.values()), said


def left_over(folder: Path, form: str) -> list[str]:
    if form == "run":
        return litter(folder / "run", ())
    known = {
        "treering.json",
        *(file["name"] for file in json.loads((folder / "ckpt" / "treering.json").read_bytes())["files"]),
    }
    return sorted(entry.name for entry in (folder / "ckpt").iterdir() if entry.name not in known)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_steps_are_saved_while_the_loop_goes_on(tmp_path: Path, crews: Crews, count: int) -> None:
    every = results(crews.run(trains, count, devices=1, arguments=[str(tmp_path)], timeout=120))
    assert every == [{"done": [True] * 5, "steps": [4, 5], "latest": 5, "best": 5}] * count
    assert litter(tmp_path / "run", ()) == []
    for step in (4, 5):
        tree = tr.load(tmp_path / "run" / f"step_{step:08d}")
        assert np.asarray(tree["own"]).tolist() == [step] * 5
        assert np.array_equal(np.asarray(tree["w"]), np.arange(576.0).reshape(24, 24) + step)
    for step in range(1, 6):
        tree = tr.load(tmp_path / f"aside {step}")
        assert (tree["step"], np.asarray(tree["w"])[0, 0]) == (step, step)


def test_what_one_cannot_save_all_hear_of(tmp_path: Path, crews: Crews) -> None:
    every = results(crews.run(refused, 2, devices=1, arguments=[str(tmp_path)], timeout=120))
    for number, (first, odd, good, again, older, replaced, end) in enumerate(every):
        assert "error" not in first, first
        assert odd["error"] in {"UnsupportedError", "ProcessFailedError", "MismatchError"}, odd
        assert "odd" in odd["message"] or "process 1" in odd["message"], (number, odd)
        assert "error" not in good, good
        assert (again.get("error"), older.get("error")) == ("ExistsError", "ExistsError"), (number, again, older)
        assert "error" not in replaced, replaced
        assert end["result"] == [[1, 2], 20.0], end


@pytest.mark.slow
def test_the_next_save_raises_what_nobody_asked_for(tmp_path: Path) -> None:
    with start_job(not_asked, 2, devices=1, arguments=[str(tmp_path)], heartbeat=100) as job:
        job.wait_for(0, "has heard")
        job.tell(1)
        job.tell(0)
        zero, one = results(job.wait(120))
    first, waited, later, *rest = zero
    assert "error" not in first
    assert (waited["error"], waited["seconds"] < 10) == ("TimedOutError", True), waited
    assert later["error"] == "TimedOutError", later
    assert later["missing"] == [1], later
    assert "step_00000002" in later["message"], later
    assert "error" not in one[0]
    # What one process raises instead of a save, the others hear of.
    assert "error" in one[1], one
    assert "step_00000002" in one[2]["message"], one
    assert [said.get("result") for said in (rest[-1], one[-1])] == [4, 4], (zero, one)
    assert saved(tmp_path, "run") == {1: 1.0, 4: 4.0}


def paused_at(tmp_path: Path, count: int, victim: int, form: str, names: Iterable[str]) -> None:
    """Let a process stand still at each point, and come back."""
    others = [number for number in range(count) if number != victim]
    with start_job(obeys, count, devices=1, arguments=[str(tmp_path)], heartbeat=100) as job:
        last = 1
        save_all(job, count, form, last)
        for name in names:
            where = point(name, victim)
            ask(job, [victim], do="arm", point=dataclasses.asdict(where), action="pause")
            answers(job, [victim])
            before = saved(tmp_path, form)
            ask(job, range(count), do=form, number=last + 1, timeout=_DEADLINE)
            said = answers(job, others, (victim, f"at {name}"))
            there = saved(tmp_path, form)
            check_there(before, there, last + 1, form)
            for number in others:
                check_answer(said[number], number, victim, new=last + 1 in there, where=name)
            job.wake(victim)
            came_back = answers(job, [victim])[victim]
            there = saved(tmp_path, form)
            check_there(before, there, last + 1, form)
            assert "error" in came_back or last + 1 in there, (name, came_back)
            last += 2
            save_all(job, count, form, last)
            assert max(saved(tmp_path, form)) == last
            assert left_over(tmp_path, form) == []
        ask(job, range(count), do="end")
        results(job.wait())


def killed_at(tmp_path: Path, count: int, victim: int, form: str, name: str) -> None:
    """Kill a process at a point; another job goes on."""
    others = [number for number in range(count) if number != victim]
    where = point(name, victim)
    with start_job(obeys, count, devices=1, arguments=[str(tmp_path)], heartbeat=100) as job:
        save_all(job, count, form, 1)
        ask(job, [victim], do="arm", point=dataclasses.asdict(where), action="kill")
        answers(job, [victim])
        ask(job, range(count), do=form, number=2, timeout=_DEADLINE)
        # jax ends all others with process 0.
        said = answers(job, others if victim else (), (victim, f"at {name}"))
        there = saved(tmp_path, form)
        check_there({1: 1.0}, there, 2, form)
        for number in said:
            check_answer(said[number], number, victim, new=2 in there, where=name)
    with start_job(obeys, count, devices=1, arguments=[str(tmp_path)], heartbeat=100) as job:
        save_all(job, count, form, 3)
        assert max(saved(tmp_path, form)) == 3
        assert left_over(tmp_path, form) == []
        ask(job, range(count), do="end")
        results(job.wait())


def check_there(before: dict[int, float], there: dict[int, float], new: int, form: str) -> None:
    """Nothing but what was there before, and perhaps the new step; the checkpoint holds one of the two."""
    assert set(there) <= {*before, new}
    assert there
    assert form == "ckpt" or max(before) in there, (before, there)


def check_answer(said: dict[str, Any], number: int, victim: int, *, new: bool, where: str) -> None:
    told = (where, number, said)
    if "error" not in said:
        assert new, told
        return
    assert said["error"] in {"TimedOutError", "ProcessFailedError"}, told
    assert said.get("missing", said.get("processes")) == [victim], told
    assert f"process {victim}" in said["message"], told
    assert said["seconds"] < 3.1 * _DEADLINE + 15, told


@pytest.mark.parametrize("form", [_FORMS[0], pytest.param(_FORMS[1], marks=pytest.mark.slow)])
def test_a_process_that_stands_still_is_named(tmp_path: Path, form: str) -> None:
    paused_at(tmp_path, 2, 1, form, ["in the middle of a file", "its part is put"])


# `python -m torture processes` goes through all numbers of processes, forms and points. Here each point meets each
# form, and each number of processes.
@pytest.mark.slow
@pytest.mark.parametrize(("count", "victim", "form"), [(2, 0, "run"), (2, 1, "ckpt"), (4, 0, "ckpt"), (4, 2, "run")])
def test_a_process_stands_still_at_every_point(tmp_path: Path, count: int, victim: int, form: str) -> None:
    leading = ["the folder is entered", "all parts are there", "it is committed", "the verdict is put"]
    following = ["it has no file yet", "the verdict is seen"]
    both = ["it is handed over", "before the first byte", "its part is not put yet", "its part is put"]
    paused_at(tmp_path, count, victim, form, both + (following if victim else leading))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "victim", "name", "form"),
    [
        (2, 0, "its part is put", "run"),
        (2, 0, "it is committed", "run"),
        (2, 0, "it is committed", "ckpt"),
        (2, 1, "it is handed over", "ckpt"),
        (2, 1, "its part is not put yet", "run"),
        (2, 1, "its part is put", "ckpt"),
        (2, 1, "the verdict is seen", "ckpt"),
        (4, 2, "before the first byte", "run"),
        (4, 0, "all parts are there", "ckpt"),
        (4, 3, "the verdict is seen", "run"),
    ],
)
def test_a_process_is_killed_at_every_point(tmp_path: Path, count: int, victim: int, name: str, form: str) -> None:
    killed_at(tmp_path, count, victim, form, name)
