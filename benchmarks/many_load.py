"""Groups that read very many leaves: all of them, one of them, and only their keys."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.flax
import xxhash

import treering
from benchmarks.files import read_into
from benchmarks.many_scene import ManyFiles, spending
from benchmarks.measure import Case, Group, Work

__all__ = ["groups"]


def groups(scene: ManyFiles) -> tuple[Group, ...]:
    """Loading everything, opening and one leaf, and the bytes of the index."""
    unit, room = "CPU us a leaf", 9 * scene.nbytes // 4
    ours, without = _load(scene, "treering", like=True), _load(scene, "treering, no like", like=False)
    limits = (_limit(scene, "data loop", placed=False), _limit(scene, "data loop, device_put", placed=True))
    orbax = () if scene.peer is None else (_orbax(scene),)
    beside = (Group(name="load, Orbax", cases=(ours, *orbax), room=room, unit=unit, once=True),)
    return (
        Group(name="load", cases=(ours, _safetensors(scene), without, *limits), room=room, unit=unit),
        *(beside if orbax else ()),
        Group(name="open, one leaf", cases=(_open(scene), _safe_open(scene)), unit="CPU ms", repeats=3),
        Group(name="open, all keys", cases=(_keys(scene), _safe_keys(scene)), unit="index bytes", peaks=False),
    )


def _load(scene: ManyFiles, name: str, *, like: bool) -> Case:
    def begin() -> Work:
        path, target = scene.cached(scene.ours), scene.target() if like else None
        return lambda: jax.block_until_ready(treering.load(path, target))

    return scene.case(name, begin, scene.right_tree)


def _safetensors(scene: ManyFiles) -> Case:
    def begin() -> Work:
        path = scene.cached(scene.tensors)
        return lambda: jax.block_until_ready(safetensors.flax.load_file(path))

    return scene.case("safetensors", begin, scene.right_flat)


def _orbax(scene: ManyFiles) -> Case:
    def begin() -> Work:
        assert scene.peer is not None  # asked before the case was made
        path, target, peer = scene.cached(scene.orbax), scene.target(), scene.peer
        return lambda: peer.load(path, target)

    return scene.case("Orbax", begin, scene.right_tree)


def _limit(scene: ManyFiles, name: str, *, placed: bool) -> Case:
    """One read, a checksum and a view of each leaf; placed, one ``device_put`` of all of them too."""

    def begin() -> Work:
        scene.cached(scene.plain)

        def work() -> list[Any]:
            room = np.empty(scene.block.shape, scene.block.dtype)
            read_into(scene.plain, room.reshape(-1).view(np.uint8))
            rows = list(room)
            sums = [xxhash.xxh3_64_intdigest(row) for row in rows]
            assert len(sums) == len(rows)  # both were made
            return jax.block_until_ready(jax.device_put(rows)) if placed else rows

        return work

    return scene.case(name, begin, lambda rows: scene.right_rows([np.asarray(row) for row in rows]), limit=True)


def _reading(scene: ManyFiles, name: str, path: Any, read: Any) -> Case:
    """Open, and read the leaf in the middle."""
    middle = scene.leaves // 2

    def begin() -> Work:
        scene.cached(path)
        return spending(lambda: read(scene.keys[middle]))

    def check(spent: Any) -> str | None:
        same = np.array_equal(np.asarray(spent.result), scene.block[middle])
        return None if same else "these are not the values of the leaf"

    return Case(name=name, begin=begin, check=check, count=lambda spent: spent.cpu * 1e3)


def _open(scene: ManyFiles) -> Case:
    def read(key: str) -> Any:
        with treering.open(scene.ours) as checkpoint:
            return checkpoint[key][...]

    return _reading(scene, "treering", scene.ours, read)


def _safe_open(scene: ManyFiles) -> Case:
    def read(key: str) -> Any:
        with safetensors.safe_open(scene.tensors, "numpy") as file:
            return file.get_tensor(key)

    return _reading(scene, "safetensors", scene.tensors, read)


def _keys(scene: ManyFiles) -> Case:
    def work() -> list[str]:
        with treering.open(scene.ours) as checkpoint:
            return list(checkpoint)

    return _listing(scene, "treering", work, scene.index_bytes)


def _safe_keys(scene: ManyFiles) -> Case:
    def work() -> list[str]:
        with safetensors.safe_open(scene.tensors, "numpy") as file:
            return list(file.keys())

    return _listing(scene, "safetensors", work, lambda: scene.tensors.stat().st_size - scene.nbytes)


def _listing(scene: ManyFiles, name: str, work: Any, nbytes: Any) -> Case:
    def check(keys: list[str]) -> str | None:
        return None if set(keys) == set(scene.keys) else "the keys are not those of the tree"

    return Case(name=name, begin=lambda: work, check=check, count=lambda _: nbytes())
