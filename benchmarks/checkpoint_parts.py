"""Groups that read parts: one leaf of an opened checkpoint, one of N shares, and another mesh than the saved one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import safetensors

import treering
from benchmarks import workloads
from benchmarks.checkpoint_scene import CheckpointFiles
from benchmarks.files import bytes_read
from benchmarks.measure import Case, Group, Work, equal_bytes
from benchmarks.workloads import Tree

__all__ = ["FIRST_LEAF", "SHARES", "TURNED", "groups", "share_group"]

FIRST_LEAF = "open one leaf"
TURNED = "load over the turned mesh"
SHARES = (2, 4, 8)
_ROWS = 2


def groups(scene: CheckpointFiles) -> tuple[Group, ...]:
    """Parts that make sense for this workload: a mesh is turned where there is one."""
    found = [Group(name=FIRST_LEAF, cases=(_first(scene), _first_of_safetensors(scene)), repeats=3, peaks=False)]
    if scene.work.name != "B":  # of arrays of 1 KiB nothing smaller than one block can be read
        found += [
            Group(name=share_group(parts), cases=(_share(scene, parts),), unit="bytes read / needed", peaks=False)
            for parts in SHARES
        ]
    if scene.mesh is not None:
        found.append(
            Group(
                name=TURNED,
                cases=(_turned(scene), _turned_orbax(scene)),
                room=9 * scene.work.nbytes // 4,
                unit="bytes read / needed",
            )
        )
    return tuple(found)


def share_group(parts: int) -> str:
    """Name of the group that reads one of so many shares."""
    return f"open 1/{parts} of the rows"


def _first(scene: CheckpointFiles) -> Case:
    key = next(iter(scene.flat))

    def begin() -> Work:
        path = scene.cached(scene.ours)

        def work() -> Any:
            with treering.open(path) as checkpoint:
                return np.asarray(checkpoint[key][:_ROWS])

        return work

    return Case(name="treering", begin=begin, check=_first_rows(scene, key))


def _first_of_safetensors(scene: CheckpointFiles) -> Case:
    key = next(iter(scene.flat))

    def begin() -> Work:
        path = scene.cached(scene.tensors)

        def work() -> Any:
            with safetensors.safe_open(path, framework="flax") as file:
                return np.asarray(file.get_slice(key)[:_ROWS])

        return work

    return Case(name="safetensors", begin=begin, check=_first_rows(scene, key))


def _first_rows(scene: CheckpointFiles, key: str) -> Callable[[Any], str | None]:
    def check(found: Any) -> str | None:
        wanted = scene.flat[key][:_ROWS]
        same = found.dtype == wanted.dtype and found.shape == wanted.shape and equal_bytes(found, wanted)
        return None if same else f"{key}: the first rows differ"

    return check


def _share(scene: CheckpointFiles, parts: int) -> Case:
    """Every process of so many in turn reads its rows of every leaf; what counts is the one that reads most."""

    def begin() -> Work:
        def work() -> tuple[list[dict[str, Any]], float]:
            found, worst = [], 0.0
            for part in range(parts):
                before = bytes_read()
                with treering.open(scene.ours) as checkpoint:
                    rows = {key: np.asarray(checkpoint[key][_rows(leaf, part, parts)]) for key, leaf in leaves.items()}
                needed = sum(array.nbytes for array in rows.values())
                worst = max(worst, (bytes_read() - before) / needed)
                found.append(rows)
            return found, worst

        return work

    def check(result: tuple[list[dict[str, Any]], float]) -> str | None:
        for part, rows in enumerate(result[0]):
            wanted = {key: leaf[_rows(leaf, part, parts)] for key, leaf in leaves.items()}
            fault = workloads.same_leaves(rows, wanted, np.ndarray)
            if fault is not None:
                return fault
        return _countable(result[1])

    leaves = scene.flat
    return Case(name="treering", begin=begin, check=check, count=lambda result: result[1])


def _rows(leaf: Any, part: int, parts: int) -> slice:
    rows = leaf.shape[0]
    return slice(rows * part // parts, rows * (part + 1) // parts)


def _countable(share: float) -> str | None:
    """A share below one would mean that reads go past the counter, and that the figure says nothing."""
    return "fewer bytes were counted than are needed" if 0 < share < 1 else None


def _turned(scene: CheckpointFiles) -> Case:
    """Saved over 4 x 2 devices, wanted over 2 x 4."""

    def begin() -> Work:
        path, target = scene.cached(scene.ours), scene.target(workloads.mesh(turned=True))

        def work() -> tuple[Tree, float]:
            before = bytes_read()
            tree = jax.block_until_ready(treering.load(path, target))
            return tree, (bytes_read() - before) / scene.work.nbytes

        return work

    def check(result: tuple[Tree, float]) -> str | None:
        return scene.right_tree(result[0]) or _countable(result[1])

    return Case(name="treering", begin=begin, check=check, count=lambda result: result[1])


def _turned_orbax(scene: CheckpointFiles) -> Case:
    def begin() -> Work:
        path, target = scene.cached(scene.orbax), scene.target(workloads.mesh(turned=True))
        return lambda: scene.peer.load(path, target)

    return Case(name="Orbax", begin=begin, check=scene.right_tree)
