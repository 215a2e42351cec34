"""Every case of the bucket benchmark runs on small trees and is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.bucket import BENCHMARK
from benchmarks.byte_bucket import ask_server
from benchmarks.measure import interleave

pytestmark = pytest.mark.benchmark

SMALL = {"A": 2e-4, "B": 2e-3, "S": 1.0, "R": 0.01, "M": 0.01}


@pytest.mark.parametrize("name", BENCHMARK.workloads)
def test_every_case_is_right(name: str, tmp_path: Path) -> None:
    scene = BENCHMARK.scene(name, "numpy" if name in BENCHMARK.numpy_only else "jax", SMALL[name], tmp_path)
    scene.prepare()
    for group in scene.groups():
        rounds = interleave(group, 1)
        assert rounds.wrong == []
        assert all(rounds.counts.values())
    scene.close()
    assert b"<Contents>" not in ask_server("GET", "/bench?list-type=2")


@pytest.mark.parametrize(
    "goal", BENCHMARK.goals, ids=lambda goal: f"{goal.row}-{goal.workload}-{goal.group}-{goal.kind}"
)
def test_every_goal_is_about_a_group_that_exists(goal: Any, tmp_path: Path) -> None:
    leaves: Any = "numpy" if goal.workload in BENCHMARK.numpy_only else "jax"
    scene = BENCHMARK.scene(goal.workload, leaves, SMALL[goal.workload], tmp_path)
    group = next(group for group in scene.groups() if group.name == goal.group)
    assert group.cases[0].name == "treering"
    assert goal.against in {None, "s3fs + safetensors", *(case.name for case in group.cases)}
    assert group.peaks or not goal.kind.startswith("peak")


def test_the_command_says_what_is_not_installed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--only", "A", "--groups", "save", "--size", "2e-4", "--no-memory", "--rounds", "1"]
    assert main(["bucket", "--json", "--dir", str(tmp_path), *arguments]) == 0
    document = json.loads(capsys.readouterr().out)
    cases = {outcome["case"] for outcome in document["jobs"][0]["outcomes"]}
    missing = "not installed" in document["machine"]["s3fs"]
    assert ("s3fs + safetensors" in cases) != missing
    assert {verdict["goal"]["kind"] for verdict in document["verdicts"]} >= {"count over", "faster"}
    assert main(["bucket", "--dir", str(tmp_path), *arguments]) == 0
    assert "<= 0.3 + that of raw obstore" in capsys.readouterr().out
