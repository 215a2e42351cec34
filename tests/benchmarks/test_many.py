"""Every case of the benchmark of many leaves runs on small trees and is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.many import BENCHMARK
from benchmarks.measure import interleave

pytestmark = pytest.mark.benchmark

SMALL = {"1k": 0.12, "10k": 0.012, "100k": 0.0012, "1M": 1.2e-4}


@pytest.mark.parametrize("name", BENCHMARK.workloads)
def test_every_case_is_right(name: str, tmp_path: Path) -> None:
    scene = BENCHMARK.scene(name, "jax", SMALL[name], tmp_path)
    scene.prepare()
    for group in scene.groups():
        rounds = interleave(group, 1)
        assert rounds.wrong == []
        assert all(taken > 0 for each in rounds.seconds.values() for taken in each)
        assert all(rounds.counts.values())
        if group.between is not None:
            group.between()
    scene.close()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("name", BENCHMARK.workloads)
def test_every_goal_is_about_a_case_that_exists(name: str, tmp_path: Path) -> None:
    scene = BENCHMARK.scene(name, "jax", SMALL[name], tmp_path)
    groups = {group.name: group for group in scene.groups()}
    for goal in (goal for goal in BENCHMARK.goals if goal.workload == name):
        assert groups[goal.group].cases[0].name == "treering"
        if goal.against is not None:
            assert groups[goal.group].case(goal.against).limit == (goal.kind == "times")


def test_the_command_reports_what_a_leaf_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--only", "10k", "--groups", "save,open", "--size", "0.01", "--no-memory", "--rounds", "1"]
    assert main(["many", "--json", "--dir", str(tmp_path), *arguments]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["wrong"] == []
    assert {job["workload"] for job in document["jobs"]} == {"10k"}
    units = {job["group"]: job["unit"] for job in document["jobs"]}
    assert units["save"] == units["save_async blocks, first"] == "CPU us a leaf"
    assert units["open, all keys"] == "index bytes"
    arguments[arguments.index("save,open")] = "open"
    assert main(["many", "--dir", str(tmp_path), *arguments]) == 0
    assert "open, all keys: index bytes" in capsys.readouterr().out
