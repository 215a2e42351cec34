"""Groups that save: against Orbax, safetensors and the disk, and with checksums against without."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.flax

import treering
from benchmarks import workloads
from benchmarks.checkpoint_peers import inside, without_checksums
from benchmarks.checkpoint_scene import CheckpointFiles
from benchmarks.files import contents, fsync, write
from benchmarks.measure import Case, Group, Work

__all__ = ["groups"]


def groups(scene: CheckpointFiles) -> tuple[Group, ...]:
    """Saving, durable, to a path where nothing is; and what the checksums cost."""
    peers = (_orbax(scene), _safetensors(scene))
    limits = (_plain(scene, "write", durable=False), _plain(scene, "write + fsync", durable=True))
    return (
        Group(
            name="save",
            cases=(_treering(scene), *peers, _overwriting(scene), *limits),
            between=scene.files.clear,
            room=2 * scene.work.nbytes,
            unit="files",
        ),
        Group(
            name="checksums save",
            cases=(dataclasses.replace(_treering(scene), count=None), _without(scene)),
            between=scene.files.clear,
            room=scene.work.nbytes // 4,
            repeats=3,
            peaks=False,
        ),
    )


def _files(path: Path) -> float:
    return len(contents(path))


def _save(scene: CheckpointFiles) -> Callable[[], Path]:
    tree, path = scene.fresh(), scene.files.new()

    def work() -> Path:
        treering.save(path, tree)
        return path

    return work


def _treering(scene: CheckpointFiles) -> Case:
    return Case(name="treering", begin=lambda: _save(scene), check=scene.right_checkpoint, count=_files)


def _overwriting(scene: CheckpointFiles) -> Case:
    def begin() -> Work:
        tree, path = scene.fresh(), scene.files.new()
        treering.save(path, tree)

        def work() -> Path:
            treering.save(path, tree, overwrite=True)
            return path

        return work

    return Case(name="treering, overwriting", begin=begin, check=scene.right_checkpoint, count=_files)


def _without(scene: CheckpointFiles) -> Case:
    def begin() -> Work:
        return inside(without_checksums, _save(scene))

    return Case(name="treering, no checksums", begin=begin, check=scene.right_without_checksums, limit=True)


def _orbax(scene: CheckpointFiles) -> Case:
    def begin() -> Work:
        tree, path = scene.fresh(), scene.files.new()
        return lambda: scene.peer.save(path, tree)

    return Case(name="Orbax", begin=begin, check=scene.right_orbax, count=_files)


def _safetensors(scene: CheckpointFiles) -> Case:
    def begin() -> Work:
        leaves, path = dict(workloads.flat(scene.fresh())), scene.files.new()

        def work() -> Path:
            safetensors.flax.save_file(leaves, path)
            fsync(path)
            return path

        return work

    return Case(name="safetensors + fsync", begin=begin, check=scene.right_tensors, count=_files)


def _plain(scene: CheckpointFiles, name: str, *, durable: bool) -> Case:
    def begin() -> Work:
        data, path = scene.bytes, scene.files.new()
        return lambda: write(path, data, durable=durable)

    return Case(name=name, begin=begin, check=_right(scene), limit=True)


def _right(scene: CheckpointFiles) -> Callable[[Any], str | None]:
    return scene.right_plain
