"""Groups that load the whole: into memory and mapped, checked and unchecked, from the page cache and cold."""

from __future__ import annotations

from typing import Any

import jax
import safetensors.flax

import treering
from benchmarks.checkpoint_peers import inside, unchecked
from benchmarks.checkpoint_scene import CheckpointFiles
from benchmarks.files import forget
from benchmarks.measure import Case, Group, Work
from benchmarks.workloads import Tree, sharded

__all__ = ["groups"]


def groups(scene: CheckpointFiles) -> tuple[Group, ...]:
    """Loading everything, ``verify``, and what the checksums cost."""
    room = 9 * scene.work.nbytes // 4
    orbax, once = _orbax(scene), scene.work.nbytes
    mapped = _load(scene, "treering", mapped=True)
    unverified = _load(scene, "treering", mapped=True, checked=False)
    loaded, trusting = _load(scene, "treering"), _load(scene, "treering, unchecked", checked=False, limit=True)
    return (
        Group(
            name="load",
            cases=(loaded, orbax, _safetensors(scene), _load(scene, "treering, no like", like=False), _read(scene)),
            room=room,
        ),
        Group(name="load mapped", cases=(mapped, orbax), room=room),
        Group(name="load mapped unchecked", cases=(unverified, orbax), room=room, peaks=False),
        Group(name="checksums load", cases=(loaded, trusting), room=once, repeats=3, peaks=False),
        Group(
            name="checksums load cold",
            cases=(_cold(scene, loaded), _cold(scene, trusting)),
            room=once,
            repeats=2,
            peaks=False,
        ),
        Group(name="verify", cases=(_verify(scene), _read(scene)), repeats=2),
    )


def _load(
    scene: CheckpointFiles,
    name: str,
    *,
    like: bool = True,
    mapped: bool = False,
    checked: bool = True,
    limit: bool = False,
) -> Case:
    def begin() -> Work:
        path, target = scene.cached(scene.ours), scene.target() if like else None

        def work() -> Tree:
            tree: Tree = jax.block_until_ready(treering.load(path, target, mapped=mapped))
            return tree

        return work if checked else inside(unchecked, work)

    return Case(name=name, begin=begin, check=scene.right_tree, limit=limit)


def _cold(scene: CheckpointFiles, case: Case) -> Case:
    """The same with files that are not in the page cache."""

    def begin() -> Work:
        work = case.begin()
        forget(scene.ours)
        return work

    return Case(name=case.name, begin=begin, check=case.check, limit=case.limit)


def _orbax(scene: CheckpointFiles) -> Case:
    def begin() -> Work:
        path, target = scene.cached(scene.orbax), scene.target()
        return lambda: scene.peer.load(path, target)

    return Case(name="Orbax", begin=begin, check=scene.right_tree)


def _safetensors(scene: CheckpointFiles) -> Case:
    def place(leaves: dict[str, Any]) -> dict[str, Any]:
        over = scene.mesh
        if over is not None:
            leaves = jax.device_put(leaves, {key: sharded(leaf, over) for key, leaf in leaves.items()})
        return jax.block_until_ready(leaves)

    def begin() -> Work:
        path = scene.cached(scene.tensors)
        return lambda: place(safetensors.flax.load_file(path))

    return Case(name="safetensors", begin=begin, check=scene.right_leaves)


def _read(scene: CheckpointFiles) -> Case:
    def begin() -> Work:
        scene.cached(scene.plain)
        return scene.read_plain

    return Case(name="read", begin=begin, check=scene.right_room, limit=True)


def _verify(scene: CheckpointFiles) -> Case:
    def begin() -> Work:
        path = scene.cached(scene.ours)
        return lambda: treering.verify(path)

    def check(result: Any) -> str | None:
        return None if result.ok else f"verify found damage: {result}"

    return Case(name="treering", begin=begin, check=check)
