"""The benchmark of many processes on a small tree: real processes, right results, counts that mean something."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import process_crew, workloads
from benchmarks.__main__ import main
from benchmarks.files import bytes_read, contents
from benchmarks.measure import Group, Rounds, interleave
from benchmarks.process_crew import CrewFailed, crew
from benchmarks.process_groups import groups, small_groups
from benchmarks.process_scene import ProcessFiles, Turn
from benchmarks.process_trees import Pieces, read_tree, shardings, write_tree, wrong_shard
from benchmarks.process_worker import share_of_cores
from benchmarks.processes import BENCHMARK

# Sides that eight devices divide.
pytestmark = pytest.mark.benchmark

FACTOR = 1 / 1024


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessFiles]:
    """Two processes against one."""
    files = ProcessFiles("A", FACTOR, tmp_path_factory.mktemp("processes"), counts=(2,))
    files.prepare()
    yield files
    files.close()
    process_crew.dismiss()


def rounds_of(name: str, found: tuple[Group, ...]) -> Rounds:
    group = next(group for group in found if group.name == name)
    rounds = interleave(group, 1)
    assert rounds.wrong == []
    if group.between is not None:
        group.between()
    return rounds


def test_two_processes_save_half_each(scene: ProcessFiles) -> None:
    rounds = rounds_of("save sharded, 2 processes", groups(scene))
    assert list(rounds.seconds) == ["treering", "one process", "Orbax", "Orbax, one process"]
    if bytes_read():
        (share,), (alone,) = rounds.counts["treering"], rounds.counts["one process"]
        assert 1 <= alone < share < 1.3


def test_two_processes_load_over_the_turned_mesh(scene: ProcessFiles) -> None:
    rounds = rounds_of("load over the turned mesh, 2 processes", groups(scene))
    assert list(rounds.seconds) == ["treering", "Orbax"]
    if bytes_read():
        assert 1 <= rounds.counts["treering"][0] < 2.1


@pytest.mark.parametrize("name", ["leaves: save mixed, all bytes, 2 processes", "leaves: load sharded, 2 processes"])
def test_leaves_directories_of_two_processes(scene: ProcessFiles, name: str) -> None:
    rounds = rounds_of(name, groups(scene))
    if bytes_read():
        assert 1 <= rounds.counts["treering"][0] < 1.3


def test_notes_and_the_end_of_a_save_are_counted(scene: ProcessFiles) -> None:
    found = small_groups(scene)
    assert rounds_of("save, 2 processes", found).counts["treering"][0] >= 4
    (after,) = rounds_of("save, its end, 2 processes", found).counts["treering"]
    assert 0 < after < 60_000


def test_a_crew_that_fails_says_why_and_the_next_one_is_new(scene: ProcessFiles) -> None:
    (*_, data) = (each for each in contents(scene.saved("treering", "sharded")) if each.suffix == ".safetensors")
    content = bytearray(data.read_bytes())
    content[-100] ^= 1
    data.write_bytes(content)
    group = Group(name="load", cases=(scene.load("treering", 1, "treering", "sharded", counter=written),))
    before = crew(1)
    damaged = interleave(group, 1)
    assert "a crew of 1: go: process 0: Corrupt" in damaged.wrong[0]
    assert damaged.counts == {"treering": [0]}
    with pytest.raises(CrewFailed, match="ended before"):
        before.ask("check")
    content[-100] ^= 1
    data.write_bytes(content)
    assert interleave(group, 1).wrong == []


def written(turn: Turn) -> float:
    return len(turn.done)


@pytest.mark.parametrize("layout", ["sharded", "replicated", "mixed", "rows", "turned", "whole"])
def test_a_tree_lies_on_devices_as_its_layout_says(layout: Any, tmp_path: Path) -> None:
    work = workloads.build("A", FACTOR)
    write_tree(tmp_path / "A.bytes", work.tree)
    tree = read_tree(tmp_path / "A.bytes")
    assert workloads.same_leaves(dict(workloads.flat(tree)), dict(workloads.flat(work.tree)), np.ndarray) is None
    assert wrong_shard(Pieces(tree).arrays(layout), tree, layout) is None


def test_what_is_wrong_with_shards_is_seen() -> None:
    tree = {"a": np.arange(64.0, dtype=np.float32), "b": {"c": np.ones((8, 8), np.float32)}}
    arrays = Pieces(tree).arrays("sharded")
    assert wrong_shard(arrays, tree, "sharded") is None
    assert "a: the values" in (wrong_shard(arrays | {"a": arrays["a"].at[63].set(0)}, tree, "sharded") or "")
    elsewhere = jax.device_put(arrays["a"], jax.devices()[3])
    assert "a: wanted NamedSharding" in (wrong_shard(arrays | {"a": elsewhere}, tree, "sharded") or "")
    assert "a: wanted float32" in (wrong_shard(arrays | {"a": arrays["a"].astype(jnp.int32)}, tree, "sharded") or "")
    assert "a: wanted float32" in (wrong_shard(arrays | {"a": tree["a"]}, tree, "sharded") or "")
    assert wrong_shard({}, tree, "sharded") == "the keys are not those of the tree"


def test_mixed_is_half_of_each() -> None:
    tree = workloads.outline("A", FACTOR).tree
    whole = [each.is_fully_replicated for each in shardings(tree, "mixed").values()]
    assert abs(2 * sum(whole) - len(whole)) <= 1
    assert not any(each.is_fully_replicated for each in shardings(tree, "sharded").values())


def test_cores_are_shared_out() -> None:
    assert [share_of_cores([0, 1, 2, 3], number, 2) for number in range(2)] == [[0, 1], [2, 3]]
    assert [share_of_cores([5, 7], number, 4) for number in range(4)] == [[5], [7], [5], [7]]
    assert share_of_cores([5, 7], 0, 1) == [5, 7]


@pytest.mark.parametrize("name", BENCHMARK.workloads)
def test_every_goal_is_about_a_case_that_exists(name: str, tmp_path: Path) -> None:
    found = {group.name: group for group in BENCHMARK.scene(name, "jax", FACTOR, tmp_path).groups()}
    for goal in BENCHMARK.goals:
        if goal.workload == name:
            group = found[goal.group]
            assert group.cases[0].name == "treering"
            assert goal.against is None or not group.case(goal.against).limit
            assert goal.kind != "count" or group.cases[0].count is not None


def test_plans_are_even_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = ["--only", "plans of A", "--groups", "plan save mixed,leaves: plan save mixed"]
    assert main(["plans", *only, "--rounds", "1", "--json", "--dir", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["wrong"] == []
    assert len(document["verdicts"]) == 5
    assert [each["goal"]["group"] for each in document["verdicts"] if not each["met"]] == []
