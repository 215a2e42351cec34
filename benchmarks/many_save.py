"""Groups that save very many leaves: to a folder, to one file, and in the background.

The first save in the background is made by a process of its own, for there is only one in each process:
``python -m benchmarks.many_save NAME FACTOR FOLDER PATH``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.flax
import xxhash

import treering
from benchmarks import workloads
from benchmarks.files import fsync
from benchmarks.many_scene import ManyFiles, Spent
from benchmarks.measure import Case, Group, Work

__all__ = ["blocked", "groups"]

_AT_ONCE = 1024
"""Buffers of one call of the system."""


def groups(scene: ManyFiles) -> tuple[Group, ...]:
    """Saving, durable, to a path where nothing is; and what a save in the background blocks its caller for."""
    unit, room, clear = "CPU us a leaf", 2 * scene.nbytes, scene.files.clear
    ours, peer, limit = _treering(scene), _safetensors(scene), _limit(scene)
    one_file = _treering(scene, ".safetensors")
    orbax = () if scene.peer is None else (_orbax(scene),)
    # Orbax takes 20 s for each save of 10,000 leaves.
    beside = (Group(name="save, Orbax", cases=(ours, *orbax), between=clear, room=room, unit=unit, once=True),)
    later, first = _later(scene), _first(scene)
    return (
        Group(name="save", cases=(ours, peer, limit), between=clear, room=room, unit=unit),
        Group(name="save to .safetensors", cases=(one_file, peer, limit), between=clear, room=room, unit=unit),
        *(beside if orbax else ()),
        Group(name="save_async blocks, later", cases=(later,), between=clear, room=room, unit=unit),
        Group(name="save_async blocks, first", cases=(first,), between=clear, room=room, unit=unit, peaks=False),
    )


def _treering(scene: ManyFiles, suffix: str = "") -> Case:
    def begin() -> Work:
        tree, path = scene.fresh(), _new(scene, suffix)

        def work() -> Path:
            treering.save(path, tree)
            return path

        return work

    return scene.case("treering", begin, scene.right_tensors if suffix else scene.right_checkpoint)


def _new(scene: ManyFiles, suffix: str) -> Path:
    """A path where nothing is, in a folder that is cleared."""
    if not suffix:
        return scene.files.new()
    folder = scene.files.new()
    folder.mkdir()
    return folder / f"tree{suffix}"


def _safetensors(scene: ManyFiles) -> Case:
    def begin() -> Work:
        leaves, path = scene.fresh_flat(), scene.files.new()

        def work() -> Path:
            safetensors.flax.save_file(leaves, path)
            fsync(path)
            return path

        return work

    return scene.case("safetensors + fsync", begin, scene.right_tensors)


def _orbax(scene: ManyFiles) -> Case:
    def begin() -> Work:
        assert scene.peer is not None  # asked before the case was made
        tree, path, peer = scene.fresh(), scene.files.new(), scene.peer
        return lambda: peer.save(path, tree)

    return scene.case("Orbax", begin, scene.right_orbax)


def _limit(scene: ManyFiles) -> Case:
    """Each leaf as numpy sees it, its checksum, and calls that write a thousand of them; flushed."""

    def begin() -> Work:
        leaves, path = list(scene.fresh_flat().values()), scene.files.new()

        def work() -> Path:
            rows = [memoryview(np.asarray(leaf)) for leaf in leaves]
            sums = [xxhash.xxh3_64_intdigest(row) for row in rows]
            assert len(sums) == len(rows)  # both were made
            with path.open("wb", buffering=0) as file:
                for start in range(0, len(rows), _AT_ONCE):
                    os.writev(file.fileno(), rows[start : start + _AT_ONCE])
                os.fsync(file.fileno())
            return path

        return work

    return scene.case("data loop", begin, scene.right_plain, limit=True)


def blocked(tree: workloads.Tree, path: Path) -> Spent:
    """Save in the background, wait for it, and tell what it took until the caller went on."""
    start, before = time.perf_counter(), time.process_time()
    saving = treering.save_async(path, tree)
    seconds, cpu = time.perf_counter() - start, time.process_time() - before
    saving.result()
    return Spent(path, seconds, cpu)


def _later(scene: ManyFiles) -> Case:
    def begin() -> Work:
        scene.saved_in_background()
        tree, path = scene.fresh(), scene.files.new()
        return lambda: blocked(tree, path)

    return _blocking(scene, begin)


def _first(scene: ManyFiles) -> Case:
    def begin() -> Work:
        path, (name, factor, folder) = scene.files.new(), scene.arguments
        command = [sys.executable, "-m", "benchmarks.many_save", name, repr(factor), str(folder), str(path)]

        def work() -> Spent:
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            return Spent(path, *json.loads(done.stdout))

        return work

    return _blocking(scene, begin)


def _blocking(scene: ManyFiles, begin: Any) -> Case:
    return Case(
        name="treering",
        begin=begin,
        check=lambda spent: scene.right_checkpoint(spent.result),
        count=lambda spent: spent.cpu * 1e6 / scene.leaves,
        seconds=lambda spent: spent.seconds,
    )


def main() -> None:
    """Be the process that saves for the first time, and print the seconds and the processor time."""
    name, factor, folder, path = sys.argv[1:]
    spent = blocked(ManyFiles(name, float(factor), Path(folder)).fresh(), Path(path))
    print(json.dumps([spent.seconds, spent.cpu]))


if __name__ == "__main__":
    main()
