"""treering's leaves directories against eformer and TensorStore by itself.

eformer's manager syncs every file; its index is not synced. TensorStore here is a limit: what one call for each leaf
can reach without key paths, structure or checksums. Both loads are also timed on what eformer wrote.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import workloads
from benchmarks.files import Files, contents, warm, write
from benchmarks.leaves_peers import Eformer, tensorstore_load, tensorstore_save
from benchmarks.measure import Case, Group, Work
from benchmarks.suite import Benchmark, Goal, Scene
from benchmarks.workloads import LeafKind, Tree
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves

__all__ = ["BENCHMARK"]


class _LeavesScene(Scene):
    """One workload with jax leaves; D is A over a mesh of 4 x 2 devices."""

    repeats = 1

    def __init__(self, name: str, leaves: LeafKind, factor: float, folder: Path) -> None:
        assert leaves == "jax"  # eformer stores no numpy arrays
        folder = folder.resolve()
        self._work = workloads.build("A" if name == "D" else name, factor)
        self._over = workloads.mesh() if name == "D" else None
        self._flat: dict[str, Any] = dict(workloads.flat(self._work.tree))
        self._files = Files(folder / "written")
        self._peer = Eformer()
        self._ours = folder / f"{name}-treering"
        self._theirs = folder / f"{name}-eformer"
        self.title = self._work.title + (" over 4 x 2 devices" if self._over is not None else "")
        self.nbytes = self._work.nbytes

    def prepare(self) -> None:
        """Write the folders that loads read, each by its own library."""
        tree_serialize_leaves(self._ours, self._fresh())
        self._peer.save(self._theirs, self._fresh())

    def close(self) -> None:
        """Remove every file."""
        self._files.clear()
        for path in (self._ours, self._theirs):
            shutil.rmtree(path, ignore_errors=True)

    def groups(self) -> tuple[Group, ...]:
        """Saving; loading what each of the two wrote."""
        room = 3 * self.nbytes
        saves = (
            self._saving("treering", tree_serialize_leaves),
            self._saving("eformer", self._peer.save),
            self._saving("TensorStore", lambda path, tree: tensorstore_save(path, tree, durable=True), limit=True),
            self._saving(
                "TensorStore, not synced", lambda path, tree: tensorstore_save(path, tree, durable=False), limit=True
            ),
            self._plain(),
        )
        return (
            Group(name="save", cases=saves, between=self._files.clear, room=room, unit="files"),
            Group(
                name="load",
                cases=(self._ours_loads(self._ours), self._eformer_loads(self._ours), *self._raw(self._ours)),
                between=self._files.clear,
                room=room,
            ),
            Group(
                name="load eformer's",
                cases=(self._ours_loads(self._theirs), self._eformer_loads(self._theirs), *self._raw(self._theirs)),
                between=self._files.clear,
                room=room,
            ),
        )

    # Inputs.

    def _fresh(self) -> Tree:
        """A tree of jax arrays that nobody has converted to numpy yet."""
        over = self._over
        if over is None:
            return workloads.to_jax(self._work.tree)
        tree = workloads.mapped(lambda leaf: jax.device_put(leaf, workloads.sharded(leaf, over)), self._work.tree)
        return jax.block_until_ready(tree)

    @cached_property
    def _bytes(self) -> bytes:
        return b"".join(leaf.tobytes() for leaf in self._flat.values())

    @property
    def _mesh(self) -> jax.sharding.Mesh:
        return self._over or jax.sharding.Mesh(jax.devices()[:1], ("all",))

    def _shardings(self) -> dict[str, Any] | None:
        """Where every leaf goes, by dotted key."""
        over = self._over
        if over is None:
            return None
        return {key.replace("/", "."): workloads.sharded(leaf, over) for key, leaf in self._flat.items()}

    # Cases.

    def _saving(self, name: str, save: Callable[[Path, Tree], object], *, limit: bool = False) -> Case:
        def begin() -> Work:
            tree, path = self._fresh(), self._files.new()
            os.sync()  # what the case before it left to be written is not ours to wait for

            def work() -> Path:
                save(path, tree)
                return path

            return work

        return Case(name=name, begin=begin, check=self._right_folder, limit=limit, count=_count)

    def _plain(self) -> Case:
        def begin() -> Work:
            data, path = self._bytes, self._files.new()
            return lambda: write(path, data, durable=True)

        return Case(name="write + fsync", begin=begin, check=lambda _: None, limit=True)

    def _ours_loads(self, path: Path) -> Case:
        def load(link: Path) -> Tree:
            tree = tree_deserialize_leaves(link, self._mesh, shardings=self._shardings())
            return jax.block_until_ready(tree)

        return Case(name="treering", begin=lambda: self._cached(path, load), check=self._right_tree)

    def _eformer_loads(self, path: Path) -> Case:
        def load(link: Path) -> Tree:
            return self._peer.load(link, self._mesh, self._shardings())

        return Case(name="eformer", begin=lambda: self._cached(path, load), check=self._right_tree)

    def _raw(self, path: Path) -> tuple[Case, ...]:
        if self._over is not None:
            return ()

        def load(link: Path) -> dict[str, Any]:
            return tensorstore_load(link, list(self._flat))

        return (Case(name="TensorStore", begin=lambda: self._cached(path, load), check=self._right_leaves, limit=True),)

    def _cached(self, path: Path, load: Callable[[Path], Any]) -> Work:
        """The load, once every file is in the page cache, by a path that nobody has loaded from before.

        jax lets TensorStore keep up to 10 GB of decoded chunks by path: loading one folder again and again would time
        that cache.
        """
        warm(path, self._room)
        link = self._files.new()
        link.symlink_to(path)
        return lambda: load(link)

    @cached_property
    def _room(self) -> Any:
        return np.ones(1 << 22, np.uint8)

    # Checks.

    def _right_folder(self, path: Path) -> str | None:
        return self._right_tree(tree_deserialize_leaves(path, self._mesh, shardings=self._shardings()))

    def _right_tree(self, tree: Tree) -> str | None:
        return self._right_leaves(dict(workloads.flat(tree)))

    def _right_leaves(self, leaves: dict[str, Any]) -> str | None:
        return workloads.same_leaves(leaves, self._flat, jax.Array)


def _count(path: Path) -> float:
    return len(contents(path))


_GOALS = (
    Goal(row=6, workload="A", group="save", kind="faster", against="eformer", bound=2.5),
    Goal(row=6, workload="B", group="save", kind="faster", against="eformer", bound=8.0),
    *(Goal(row=6, workload=name, group="save", kind="peak share", bound=0.05) for name in ("A", "C", "D")),
    *(
        Goal(row=7, workload=name, group=group, kind="faster", against="eformer", bound=bound)
        for group in ("load", "load eformer's")
        for name, bound in (("A", 4.0), ("B", 8.0))
    ),
    *(
        Goal(row=7, workload=name, group=group, kind="peak share", bound=1.05)
        for group in ("load", "load eformer's")
        for name in ("A", "C", "D")
    ),
)

BENCHMARK = Benchmark(
    name="leaves",
    title="treering.leaves, eformer and TensorStore",
    workloads=("A", "B", "C", "D"),
    numpy_only=(),
    jax_only=("A", "B", "C", "D"),
    meshes=("D",),
    packages=("jax", "numpy", "xxhash", "eformer", "tensorstore", "zstandard"),
    scene=_LeavesScene,
    goals=_GOALS,
)
