"""What one more leaf costs a save: calls of Python's, and objects that the collector looks at; counted, never timed."""

from __future__ import annotations

import functools
import gc
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import treering
from tests import meshes
from tests.checkpoint.in_background import PATIENCE, gate, nothing_left
from treering.checkpoint import save_async

__all__ = ["nothing_left"]

FEW, MANY = 256, 1280

names = itertools.count()
behind: list[Any] = []


def tree_of(leaves: int, kind: str, name: object = "w") -> Any:
    arrays: list[Any] = [np.full(256, number, np.float32) for number in range(leaves)]
    if kind == "jax":
        arrays = [jax.device_put(array) for array in arrays]
    return [{f"{name}": one, "b": other} for one, other in zip(arrays[::2], arrays[1::2], strict=True)]


def calls_of(work: Callable[[], object]) -> int:
    """Return how many functions of Python this thread entered; a generator is entered for each item."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        del frame, argument
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def calls_a_leaf(path: Path, kind: str, save: Callable[[Path, Any], object], *, again: bool) -> float:
    found = {}
    save(path / "warm", tree_of(2, kind, next(names)))  # whatever is imported, is
    for leaves in (FEW, MANY):
        name = next(names)  # so that nothing is known of the tree
        tree, other = tree_of(leaves, kind, name), tree_of(leaves, kind, name)
        if again:
            save(path / f"{leaves} before", tree)
        found[leaves] = calls_of(functools.partial(save, path / str(leaves), other))
    return (found[MANY] - found[FEW]) / (MANY - FEW)


def save_file(path: Path, tree: Any) -> None:
    treering.save(path.with_suffix(".safetensors"), tree)


def save_behind(path: Path, tree: Any) -> None:
    behind.append(save_async(path, tree))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("kind", "save", "first", "later"),
    [
        ("jax", treering.save, 25, 9),
        ("jax", save_file, 25, 9),
        ("jax", save_behind, 17, 7),
        ("numpy", treering.save, 18, 4),
        ("numpy", save_file, 19, 4),
        ("numpy", save_behind, 11, 0.2),
    ],
)
def test_few_functions_are_called_for_each_leaf(
    tmp_path: Path, kind: str, save: Callable[[Path, Any], object], first: float, later: float
) -> None:
    """What jax itself calls for the sharding of each array counts too, and so do the keys of containers."""
    assert calls_a_leaf(tmp_path / "first", kind, save, again=False) <= first
    assert calls_a_leaf(tmp_path / "later", kind, save, again=True) <= later
    while behind:  # before the place that they go to is taken away
        behind.pop().result(PATIENCE)


def test_what_a_leaf_costs_grows_as_the_devices_that_it_lies_on(tmp_path: Path) -> None:
    found = {}
    for devices in (2, 8):
        sharding = NamedSharding(meshes.line(devices), PartitionSpec("x"))
        trees = [[jax.device_put(array, sharding) for array in tree_of(FEW, "numpy")[0].values()] for _ in range(3)]
        trees = [tree * FEW for tree in trees]
        for number, tree in enumerate(trees[:2]):
            treering.save(tmp_path / f"{devices} {number}", tree)
        found[devices] = calls_of(functools.partial(treering.save, tmp_path / f"{devices}", trees[2]))
    assert found[8] < 4.5 * found[2], found


@pytest.mark.parametrize("kind", ["jax", "numpy"])
def test_a_snapshot_has_no_object_for_each_leaf(tmp_path: Path, kind: str) -> None:
    trees = [tree_of(MANY, kind) for _ in range(2)]
    treering.save(tmp_path / "before", trees[0])  # what is known of the structure stays
    with gate() as closed:
        save_async(tmp_path / "first", {"x": np.zeros(3)}, progress=closed)
        assert closed.reached.wait(PATIENCE)
        gc.collect()
        before = len(gc.get_objects())
        pending = save_async(tmp_path / "held", trees[1])
        gc.collect()
        held = len(gc.get_objects()) - before
    pending.result(PATIENCE)
    assert held < MANY // 20
