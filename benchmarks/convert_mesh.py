"""A Hugging Face folder of some shards, straight onto a mesh of devices, against safetensors and ``device_put``."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import safetensors.flax
import safetensors.numpy

import treering
from benchmarks import workloads
from benchmarks.convert_scene import ConvertFiles
from benchmarks.files import bytes_read, contents, read_into
from benchmarks.measure import Case, Group, Work

__all__ = ["GROUP", "PEER", "groups"]

GROUP = "hf onto a mesh"
PEER = "safetensors.flax"
_NUMPY = "safetensors.numpy"


def groups(scene: ConvertFiles) -> tuple[Group, ...]:
    """Loading the whole, each leaf over rows and columns of the mesh."""
    cases = (_ours(scene), _peer(scene, PEER, safetensors.flax), _peer(scene, _NUMPY, safetensors.numpy), _read(scene))
    room = 5 * scene.work.nbytes // 2
    return (Group(name=GROUP, cases=cases, room=room, unit="bytes read / bytes of the tree"),)


def _shardings(scene: ConvertFiles) -> dict[str, Any]:
    over = workloads.mesh()
    return {key.replace("/", "."): workloads.sharded(leaf, over) for key, leaf in scene.flat.items()}


def _ours(scene: ConvertFiles) -> Case:
    def begin() -> Work:
        path, shardings = scene.cached(), _shardings(scene)

        def work() -> tuple[Any, int]:
            before = bytes_read()
            return jax.block_until_ready(treering.load(path, shardings=shardings)), bytes_read() - before

        return work

    return Case(
        name="treering",
        begin=begin,
        check=lambda result: _check(scene, result[0]),
        count=lambda result: result[1] / scene.work.nbytes,
    )


def _peer(scene: ConvertFiles, name: str, reader: Any) -> Case:
    """Load one file after the other, and put each on the devices before the next: no more than one is held twice."""

    def begin() -> Work:
        path, shardings = scene.cached(), _shardings(scene)

        def work() -> dict[str, Any]:
            tree: dict[str, Any] = {}
            for file in sorted(path.glob("*.safetensors")):
                leaves = reader.load_file(file)
                tree |= jax.device_put(leaves, {key: shardings[key] for key in leaves})
            return jax.block_until_ready(tree)

        return work

    return Case(name=name, begin=begin, check=lambda tree: _check(scene, tree))


def _read(scene: ConvertFiles) -> Case:
    """One read of all files into memory that is there."""

    def begin() -> Work:
        path, room = scene.cached(), np.ones(max(each.stat().st_size for each in contents(scene.path)), np.uint8)

        def work() -> None:
            for each in contents(path):
                read_into(each, room)

        return work

    return Case(name="read", begin=begin, check=lambda _: None, limit=True)


def _check(scene: ConvertFiles, tree: dict[str, Any]) -> str | None:
    wanted = _shardings(scene)
    wrong = [key for key, leaf in tree.items() if leaf.sharding != wanted[key]]
    return f"{wrong[0]}: it has another sharding" if wrong else scene.right_leaves(tree)
