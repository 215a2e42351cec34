"""Groups that save very many leaves into a bucket and load them, beside the same in a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax

import treering
from benchmarks.bucket_scene import url_of
from benchmarks.byte_bucket import remove_objects, start_server
from benchmarks.many_scene import ManyFiles
from benchmarks.measure import Case, Group, Work

__all__ = ["FOLDER", "LOAD", "SAVE", "groups"]

SAVE = "save in a bucket"
LOAD = "load in a bucket"
FOLDER = "treering, folder"
_TOP = f"many-{os.getpid()}"


def groups(scene: ManyFiles) -> tuple[Group, ...]:
    """Saving and loading where 10,000 leaves are the most; the server keeps all bytes in memory."""
    if scene.peer is None:
        return ()
    start_server()
    unit, room = "CPU us a leaf", 9 * scene.nbytes // 4
    saves = (_save(scene, "treering", bucket=True), _save(scene, FOLDER, bucket=False))
    loads = (_load(scene, "treering", bucket=True), _load(scene, FOLDER, bucket=False))

    def clear() -> None:
        scene.files.clear()
        remove_objects(f"{_TOP}/")

    return (
        Group(name=SAVE, cases=saves, between=clear, room=room, unit=unit, peaks=False),
        Group(name=LOAD, cases=loads, between=clear, room=room, unit=unit, peaks=False),
    )


def _place(scene: ManyFiles, *, bucket: bool) -> Any:
    """A place where nothing is."""
    path: Path = scene.files.new()
    return url_of(f"{_TOP}/{path.name}") if bucket else path


def _save(scene: ManyFiles, name: str, *, bucket: bool) -> Case:
    def begin() -> Work:
        tree, place = scene.fresh(), _place(scene, bucket=bucket)

        def work() -> Any:
            treering.save(place, tree)
            return place

        return work

    return scene.case(name, begin, scene.right_checkpoint, limit=not bucket)


def _load(scene: ManyFiles, name: str, *, bucket: bool) -> Case:
    def begin() -> Work:
        tree, place, target = scene.fresh(), _place(scene, bucket=bucket), scene.target()
        treering.save(place, tree)
        return lambda: jax.block_until_ready(treering.load(place, target))

    return scene.case(name, begin, scene.right_tree, limit=not bucket)
