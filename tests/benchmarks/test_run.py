"""Every case of the run benchmark runs on small trees and is right, and its clocks measure what they say."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import treering
from benchmarks import workloads
from benchmarks.__main__ import main
from benchmarks.measure import interleave
from benchmarks.run import BENCHMARK
from benchmarks.run_loop import Loop, blocked, updated
from benchmarks.run_peers import Treering

pytestmark = pytest.mark.benchmark

SMALL = {"A": 2e-4, "A16": 1e-2, "B": 2e-3, "B1": 1e-2, "K": 1e-3}


@pytest.mark.parametrize("name", BENCHMARK.workloads)
def test_every_case_is_right(name: str, tmp_path: Path) -> None:
    scene = BENCHMARK.scene(name, "jax", SMALL[name], tmp_path)
    scene.prepare()
    for group in scene.groups():
        rounds = interleave(group, 1)
        assert rounds.wrong == []
        assert all(taken > 0 for each in rounds.seconds.values() for taken in each)
        assert (group.unit is None) == (not any(rounds.counts.values()))
    scene.close()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("goal", BENCHMARK.goals, ids=lambda goal: f"{goal.row}-{goal.workload}-{goal.group}")
def test_every_goal_is_about_a_case_that_exists(goal: Any, tmp_path: Path) -> None:
    scene = BENCHMARK.scene(goal.workload, "jax", SMALL[goal.workload], tmp_path)
    group = next(group for group in scene.groups() if group.name == goal.group)
    assert group.cases[0].name == "treering"
    assert goal.against is None or not group.case(goal.against).limit


def test_the_command_reports_blocking_and_total_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--only", "A16", "--groups", "blocked", "--size", "1e-2", "--no-memory", "--rounds", "1"]
    assert main(["run", "--json", "--dir", str(tmp_path), *arguments]) == 0
    document = json.loads(capsys.readouterr().out)
    (job,) = document["jobs"]
    assert document["wrong"] == []
    for outcome in job["outcomes"]:
        assert outcome["seconds"][0] < outcome["counts"][0]


class _Slow:
    """Saves nothing: three steps long, and one second of its caller's."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock
        self.asked = itertools.count()
        self.held: Any = None

    def begin(self, path: Path, tree: Any) -> Any:
        self.clock[0] += 1.0
        self.held = tree
        return self

    def done(self) -> bool:
        return next(self.asked) == 3

    def finish(self) -> None:
        self.clock[0] += 10.0

    def load(self, path: Path, target: Any) -> Any:
        raise AssertionError(path, target)

    def close(self) -> None: ...


def test_stolen_is_what_the_loop_took_longer(tmp_path: Path) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.25  # so long takes each step, and each look at the clock between them
        return now[0]

    loop = Loop({"w": jnp.ones(3)}, rows=1, steps=1, clock=clock)
    found = loop.beside(_Slow(now), tmp_path)
    # Four steps of two looks each, one look at the end, and the second that the caller was held.
    assert found.seconds == pytest.approx(1.0 + 8 * 0.25 + 0.25 - 4 * 0.25)
    assert found.longest == pytest.approx(1.0)


def test_blocked_ends_when_the_call_returns_and_finished_when_it_is_written(tmp_path: Path) -> None:
    now = [0.0]
    found = blocked(_Slow(now), tmp_path, {}, clock=lambda: now[0])
    assert (found.blocked, found.finished) == (1.0, 11.0)


def test_the_state_that_the_loop_renews_stays_what_it_was(tmp_path: Path) -> None:
    work = workloads.build("B", 0.03)
    tree = updated(workloads.to_jax(work.tree), jnp.float32(1), donate=False)
    assert list(tree) == list(work.tree)
    path = tmp_path / "saved"
    loop = Loop(tree, rows=1, steps=2)
    assert loop.beside(Treering(), path).seconds > 0
    assert (
        workloads.same_leaves(dict(workloads.flat(treering.load(path))), dict(workloads.flat(work.tree)), object)
        is None
    )
    assert np.asarray(next(leaf for _, leaf in workloads.flat(tree)).is_deleted())
