"""Every case of the convert benchmark runs on small trees and is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.convert import BENCHMARK
from benchmarks.files import bytes_read
from benchmarks.measure import interleave

pytestmark = pytest.mark.benchmark

_SMALL = 2e-4


@pytest.mark.parametrize("name", BENCHMARK.workloads)
def test_every_case_is_right(name: str, tmp_path: Path) -> None:
    scene = BENCHMARK.scene(name, "jax", _SMALL, tmp_path)
    scene.prepare()
    for group in scene.groups():
        rounds = interleave(group, 1)
        assert rounds.wrong == []
        assert all(taken > 0 for each in rounds.seconds.values() for taken in each)
        if group.between is not None:
            group.between()
    scene.close()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("goal", BENCHMARK.goals, ids=lambda goal: f"{goal.row}-{goal.workload}-{goal.group}")
def test_every_goal_is_about_a_case_that_exists(goal: Any, tmp_path: Path) -> None:
    scene = BENCHMARK.scene(goal.workload, "jax", _SMALL, tmp_path)
    group = next(group for group in scene.groups() if group.name == goal.group)
    assert group.cases[0].name == "treering"
    assert goal.against is None or not group.case(goal.against).limit


def test_a_folder_onto_a_mesh_is_read_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--only", "mesh", "--size", "0.01", "--no-memory", "--rounds", "1"]
    assert main(["convert", "--json", "--dir", str(tmp_path), *arguments]) == 0
    document = json.loads(capsys.readouterr().out)
    (job,) = document["jobs"]
    assert document["wrong"] == []
    assert job["outcomes"][0]["case"] == "treering"
    (share,) = job["outcomes"][0]["counts"]
    if bytes_read():
        assert 1 <= share < 1.1
