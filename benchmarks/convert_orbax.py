"""A checkpoint that Orbax wrote, read by treering and by Orbax in turns, and a tree that both write for Orbax."""

from __future__ import annotations

from pathlib import Path

import jax

import treering
from benchmarks.checkpoint_scene import CheckpointFiles
from benchmarks.measure import Case, Group, Work
from benchmarks.workloads import Tree

__all__ = ["GROUP", "PEER", "WRITE", "OrbaxFiles", "groups"]

GROUP = "read Orbax"
WRITE = "write Orbax"
PEER = "Orbax"


class OrbaxFiles(CheckpointFiles):
    """A tree of jax arrays as Orbax holds it; A or B."""

    def prepare(self) -> None:
        """Write it, by Orbax."""
        self.orbax.parent.mkdir(parents=True, exist_ok=True)
        self.peer.save(self.orbax, self.fresh())


def groups(scene: OrbaxFiles) -> tuple[Group, ...]:
    """Loading the whole into a target, treering also without one; and saving it in Orbax' form."""
    cases = (_ours(scene, "treering"), _orbax(scene), _ours(scene, "treering, no like", like=False))
    return (
        Group(name=GROUP, cases=cases, room=9 * scene.work.nbytes // 4),
        Group(name=WRITE, cases=(_export(scene), _save(scene)), between=scene.files.clear),
    )


def _export(scene: OrbaxFiles) -> Case:
    def begin() -> Work:
        tree, path = scene.fresh(), scene.files.new()

        def work() -> Path:
            treering.export(path, tree, to="orbax")
            return path

        return work

    def check(path: Path) -> str | None:
        return scene.right_tree(scene.peer.load(path, scene.target()))

    return Case(name="treering", begin=begin, check=check)


def _save(scene: OrbaxFiles) -> Case:
    def begin() -> Work:
        tree, path = scene.fresh(), scene.files.new()
        return lambda: scene.peer.save(path, tree)

    return Case(name=PEER, begin=begin, check=scene.right_orbax)


def _ours(scene: OrbaxFiles, name: str, *, like: bool = True) -> Case:
    def begin() -> Work:
        path, target = scene.cached(scene.orbax), scene.target() if like else None

        def work() -> Tree:
            tree: Tree = jax.block_until_ready(treering.load(path, target))
            return tree

        return work

    return Case(name=name, begin=begin, check=scene.right_tree)


def _orbax(scene: OrbaxFiles) -> Case:
    def begin() -> Work:
        path, target = scene.cached(scene.orbax), scene.target()
        return lambda: scene.peer.load(path, target)

    return Case(name=PEER, begin=begin, check=scene.right_tree)
