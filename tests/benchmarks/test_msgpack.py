"""Every case of the msgpack benchmark runs on small trees, gives the right result, and a wrong one is noticed."""

from __future__ import annotations

import json
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import workloads
from benchmarks.__main__ import main
from benchmarks.measure import interleave
from benchmarks.msgpack import BENCHMARK
from benchmarks.workloads import LeafKind
from treering import serialization

pytestmark = pytest.mark.benchmark

SMALL = {"A": 2e-4, "B": 2e-3, "C": 1e-4, "S": 1e-4}


@pytest.mark.parametrize("leaves", ["numpy", "jax"])
@pytest.mark.parametrize("name", BENCHMARK.workloads)
def test_every_case_is_right(name: str, leaves: LeafKind, tmp_path: Path) -> None:
    scene = BENCHMARK.scene(name, leaves, SMALL[name], tmp_path)
    scene.prepare()
    for group in scene.groups():
        rounds = interleave(group, 1)
        assert rounds.wrong == []
        assert all(taken > 0 for each in rounds.seconds.values() for taken in each)
        if group.between is not None:
            group.between()
    scene.close()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("goal", BENCHMARK.goals, ids=lambda goal: f"{goal.row}-{goal.workload}-{goal.kind}")
def test_every_goal_is_about_a_case_that_exists(goal: Any, tmp_path: Path) -> None:
    scene = BENCHMARK.scene(goal.workload, "numpy", SMALL[goal.workload], tmp_path)
    group = next(group for group in scene.groups() if group.name == goal.group)
    assert group.cases[0].name == "treering"
    if goal.against is not None:
        assert group.case(goal.against).limit == (goal.kind == "times")


def test_workloads_are_what_they_are_called() -> None:
    small = {name: workloads.build(name, SMALL[name]) for name in "ABC"}
    assert (small["A"].leaves, small["B"].leaves, small["C"].leaves) == (147, 20, 1)
    for work in small.values():
        for _, array in workloads.flat(work.tree):
            assert array.ctypes.data % 64 == 0
            assert array.any()
    layer = dict(workloads.flat(small["A"].tree))
    assert {str(array.dtype) for array in layer.values()} == {"bfloat16", "float32"}


def test_jax_leaves_are_new_each_time_and_in_order() -> None:
    tree = workloads.build("A", SMALL["A"]).tree
    first, second = (dict(workloads.flat(workloads.to_jax(tree))) for _ in range(2))
    assert list(first) == list(second) == [key for key, _ in workloads.flat(tree)]
    for key, leaf in first.items():
        assert isinstance(leaf, jax.Array)
        assert leaf is not second[key]
        assert np.array_equal(np.asarray(leaf), dict(workloads.flat(tree))[key])


def test_the_command_reports_ratios_peaks_and_goals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--only", "C", "--leaves", "numpy", "--groups", "load_from_file mapped", "--size", "1e-4"]
    assert main(["msgpack", "--json", "--rounds", "2", "--dir", str(tmp_path), *arguments]) == 0
    document = json.loads(capsys.readouterr().out)
    (job,) = document["jobs"]
    assert job["outcomes"][0]["case"] == "treering"
    assert len(job["outcomes"][0]["seconds"]) == 2
    assert job["outcomes"][0]["peak"] is None or job["outcomes"][0]["peak"]["extra"] >= 0
    (verdict,) = document["verdicts"]
    assert verdict["goal"]["row"] == 5
    assert verdict["met"] == (verdict["value"]["median"] <= verdict["goal"]["bound"])
    assert document["wrong"] == []
    made = document["machine"]
    assert made["date"] == datetime.now(UTC).date().isoformat()
    assert made["command"].startswith("python -m benchmarks msgpack --json --rounds 2")
    assert {"system", "processor", "cores", "memory", "file system", "treering", "jax", "flax"} <= set(made)
    assert platform.node() not in made.values()

    assert main(["msgpack", "--no-memory", "--rounds", "1", "--dir", str(tmp_path), *arguments]) == 0
    text = capsys.readouterr().out
    assert "C with numpy leaves" in text
    assert "<= 5 ms" in text
    assert list(tmp_path.iterdir()) == []


def test_wrong_bytes_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = serialization.to_bytes
    monkeypatch.setattr(serialization, "to_bytes", lambda tree: right(tree)[:-1] + b"\xff")
    arguments = ["--only", "B", "--groups", "to_bytes", "--leaves", "numpy", "--size", "1e-3", "--dir", str(tmp_path)]
    assert main(["msgpack", "--no-memory", "--rounds", "1", *arguments]) == 1
    text = capsys.readouterr().out
    assert "WRONG RESULTS" in text
    assert "to_bytes, treering, round 1: the bytes are not those that flax writes" in text


def test_unknown_workloads_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["msgpack", "--only", "Z"])
    assert "A, B, C, S" in capsys.readouterr().err
