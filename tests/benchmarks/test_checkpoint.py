"""Every case of the checkpoint benchmark runs on small trees and is right, and what it switches off is off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering
from benchmarks.__main__ import main
from benchmarks.checkpoint import BENCHMARK
from benchmarks.checkpoint_peers import unchecked, without_checksums
from benchmarks.files import bytes_read, contents, forget
from benchmarks.measure import interleave
from treering.errors import CorruptError

pytestmark = pytest.mark.benchmark

SMALL = {"A": 2e-4, "B": 2e-3, "C": 1e-4, "D": 2e-4}


@pytest.mark.parametrize("name", BENCHMARK.workloads)
def test_every_case_is_right(name: str, tmp_path: Path) -> None:
    scene = BENCHMARK.scene(name, "jax", SMALL[name], tmp_path)
    scene.prepare()
    for group in scene.groups():
        rounds = interleave(group, 1)
        assert rounds.wrong == []
        assert all(taken > 0 for each in rounds.seconds.values() for taken in each)
        assert (group.unit is None) == (not any(rounds.counts.values()))
        if group.between is not None:
            group.between()
    scene.close()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    "goal", BENCHMARK.goals, ids=lambda goal: f"{goal.row}-{goal.workload}-{goal.group}-{goal.kind}-{goal.against}"
)
def test_every_goal_is_about_a_case_that_exists(goal: Any, tmp_path: Path) -> None:
    scene = BENCHMARK.scene(goal.workload, "jax", SMALL[goal.workload], tmp_path)
    group = next(group for group in scene.groups() if group.name == goal.group)
    assert group.cases[0].name == "treering"
    if goal.against is not None:
        assert group.case(goal.against).limit == (goal.kind == "times")
    if goal.kind == "count":
        assert group.cases[0].count is not None
    if goal.kind.startswith("peak"):
        assert group.peaks


def test_the_command_reports_counts_and_goals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--only", "C", "--groups", "save", "--size", "1e-4", "--no-memory", "--rounds", "1"]
    assert main(["checkpoint", "--json", "--dir", str(tmp_path), *arguments]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["wrong"] == []
    saved = document["jobs"][0]
    assert (saved["group"], saved["leaves"], saved["unit"]) == ("save", "jax", "files")
    assert saved["outcomes"][0]["counts"] == [2]

    assert main(["checkpoint", "--dir", str(tmp_path), *arguments]) == 0
    text = capsys.readouterr().out
    assert "save: files" in text
    assert "C with jax leaves" in text


def test_a_mesh_is_turned_and_every_byte_is_read_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--only", "D", "--groups", "load over", "--size", "0.01", "--no-memory", "--rounds", "1"]
    assert main(["checkpoint", "--json", "--dir", str(tmp_path), *arguments]) == 0
    document = json.loads(capsys.readouterr().out)
    (job,) = document["jobs"]
    assert job["unit"] == "bytes read / needed"
    (verdict,) = document["verdicts"]
    (share,) = job["outcomes"][0]["counts"]
    assert verdict["value"]["median"] == share
    assert verdict["met"] == (share <= 1.05)
    if bytes_read():
        assert 1 <= share < 1.1


def test_without_checksums_none_are_made_and_unchecked_none_are_compared(tmp_path: Path) -> None:
    tree = {"a": np.arange(1000.0, dtype=np.float32), "b": np.arange(1 << 20, dtype=np.float32)}
    with without_checksums():
        treering.save(tmp_path / "blind", tree)
    for key in tree:
        with pytest.raises(CorruptError):
            treering.load(tmp_path / "blind", only=key)

    treering.save(tmp_path / "flipped", tree)
    (data,) = (path for path in contents(tmp_path / "flipped") if path.suffix == ".safetensors")
    content = bytearray(data.read_bytes())
    content[-4000] ^= 1
    data.write_bytes(content)
    with pytest.raises(CorruptError):
        treering.load(tmp_path / "flipped")
    with unchecked():
        assert not np.array_equal(treering.load(tmp_path / "flipped")["a"], tree["a"])
    with pytest.raises(CorruptError):
        treering.load(tmp_path / "flipped")


def test_bytes_that_are_read_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    path.parent.mkdir()
    path.write_bytes(bytes(1 << 20))
    forget(path.parent)
    before = bytes_read()
    if not before:
        pytest.skip("only Linux counts the bytes that a process reads")
    assert path.read_bytes() == bytes(1 << 20)
    assert 1 << 20 <= bytes_read() - before < (1 << 20) + 4096
