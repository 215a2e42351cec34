"""Every case of the benchmark of leaves directories runs on small trees and is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.leaves import BENCHMARK
from benchmarks.measure import interleave

SMALL = {"A": 2e-4, "B": 2e-3, "C": 1e-4, "D": 2e-4}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", BENCHMARK.workloads)
def test_every_case_is_right(name: str, tmp_path: Path) -> None:
    scene = BENCHMARK.scene(name, "jax", SMALL[name], tmp_path)
    scene.prepare()
    for group in scene.groups():
        assert interleave(group, 1).wrong == []
        if group.between is not None:
            group.between()
    scene.close()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_every_goal_is_about_a_case_that_exists(tmp_path: Path) -> None:
    for goal in BENCHMARK.goals:
        scene = BENCHMARK.scene(goal.workload, "jax", SMALL[goal.workload], tmp_path)
        group = next(group for group in scene.groups() if group.name == goal.group)
        assert group.cases[0].name == "treering"
        assert goal.against is None or not group.case(goal.against).limit
