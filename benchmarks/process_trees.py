"""A tree that all processes of a run share as one file, and the ways in which it lies on eight devices.

However many processes there are, together they have the same eight devices, so the shards are the same too.
"""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from benchmarks import workloads
from benchmarks.measure import equal_bytes
from benchmarks.workloads import Tree

__all__ = ["Layout", "Pieces", "read_tree", "shardings", "targets", "write_tree", "wrong_shard"]

Layout: TypeAlias = Literal["sharded", "replicated", "mixed", "rows", "turned", "whole"]
"""Rows and columns over 4 x 2 devices; on all of them; the one and the other by turns; rows over all eight; over
2 x 4 devices; on one device."""

_ALIGNMENT = 64


def write_tree(path: Path, tree: Tree) -> None:
    """Write the leaves end to end, each at a multiple of 64 bytes, and beside them where each one is."""
    index = []
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for key, leaf in workloads.flat(tree):
            file.write(bytes(-file.tell() % _ALIGNMENT))
            index.append((key, leaf.dtype.name, leaf.shape, file.tell()))
            file.write(leaf.reshape(-1).view(np.uint8).data)
    _index_of(path).write_text(json.dumps(index), encoding="utf-8")


def read_tree(path: Path) -> Tree:
    """The tree of such a file, as read-only arrays that lie in the page cache, once for all processes."""
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0), mmap.PROT_READ)
    tree: Tree = {}
    for key, name, shape, start in json.loads(_index_of(path).read_text(encoding="utf-8")):
        dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
        *branches, last = key.split("/")
        branch = tree
        for part in branches:
            branch = branch.setdefault(part, {})
        branch[last] = np.ndarray(tuple(shape), dtype, pages, start)
    return tree


def _index_of(path: Path) -> Path:
    return path.with_suffix(".json")


def shardings(tree: Tree, layout: Layout) -> dict[str, Sharding]:
    """Where every leaf lies, by its key."""
    grid = workloads.mesh(turned=layout == "turned")
    replicated = NamedSharding(grid, PartitionSpec())

    def sharding(number: int, leaf: Any) -> Sharding:
        match layout:
            case "sharded" | "turned":
                return workloads.sharded(leaf, grid)
            case "replicated":
                return replicated
            case "mixed":
                return replicated if number % 2 else workloads.sharded(leaf, grid)
            case "rows":
                even = leaf.shape[0] % workloads.DEVICES == 0
                return NamedSharding(grid, PartitionSpec(grid.axis_names)) if even else replicated
            case "whole":
                return SingleDeviceSharding(jax.devices()[0])

    return {key: sharding(number, leaf) for number, (key, leaf) in enumerate(workloads.flat(tree))}


def targets(tree: Tree, layout: Layout) -> Tree:
    """What to load into: shapes, dtypes and shardings."""
    places = iter(shardings(tree, layout).values())

    def target(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=next(places))

    return workloads.mapped(target, tree)


class Pieces:
    """Makes jax arrays of a tree over the devices of all processes, new ones each time.

    They alias the tree, or copies of those shards that do not lie in one piece; the copies are made once.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._copies: dict[tuple[str, str], np.ndarray[Any, Any]] = {}

    def arrays(self, layout: Layout) -> Tree:
        """The tree as jax arrays that nobody has converted to numpy yet."""
        places = iter(shardings(self._tree, layout).items())

        def array(leaf: Any) -> jax.Array:
            key, sharding = next(places)
            parts = [
                jax.device_put(self._piece(key, leaf, index), device)
                for device, index in sharding.addressable_devices_indices_map(leaf.shape).items()
            ]
            return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)

        tree = workloads.mapped(array, self._tree)
        jax.block_until_ready(tree)
        return tree

    def _piece(self, key: str, leaf: Any, index: Any) -> np.ndarray[Any, Any]:
        piece: np.ndarray[Any, Any] = leaf[index]
        if piece.flags.c_contiguous and piece.ctypes.data % _ALIGNMENT == 0:
            return piece
        known = self._copies.get((key, str(index)))
        if known is None:
            known = self._copies[key, str(index)] = _aligned_copy(piece)
        return known


def _aligned_copy(piece: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    room = np.empty(piece.nbytes + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    copy = room[start : start + piece.nbytes].view(piece.dtype).reshape(piece.shape)
    copy[...] = piece
    return copy


def wrong_shard(found: Tree, tree: Tree, layout: Layout) -> str | None:
    """What is wrong with the shards that this process holds of a loaded tree, or None."""
    arrays, wanted = dict(workloads.flat(found)), dict(workloads.flat(tree))
    if arrays.keys() != wanted.keys():
        return "the keys are not those of the tree"
    for key, sharding in shardings(tree, layout).items():
        array, leaf = arrays[key], wanted[key]
        if not isinstance(array, jax.Array) or (array.dtype, array.shape) != (leaf.dtype, leaf.shape):
            return f"{key}: wanted {leaf.dtype}{leaf.shape}, found {array!r:.200}"
        if not array.sharding.is_equivalent_to(sharding, leaf.ndim):
            return f"{key}: wanted {sharding}, found {array.sharding}"
        for shard in array.addressable_shards:
            if not equal_bytes(np.ascontiguousarray(np.asarray(shard.data)), np.ascontiguousarray(leaf[shard.index])):
                return f"{key}: the values of {shard.index} differ"
    return None
