"""One workload of the checkpoint benchmark: its tree, its reference files, and what makes a result right."""

from __future__ import annotations

import shutil
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.flax

import treering
from benchmarks import workloads
from benchmarks.checkpoint_peers import Orbax, unchecked
from benchmarks.files import Files, read_into, warm
from benchmarks.measure import equal_bytes
from benchmarks.workloads import Tree

__all__ = ["CheckpointFiles"]


class CheckpointFiles:
    """A tree of jax arrays, and the same bytes as treering, Orbax, safetensors and plain files hold them.

    Args:
        name: A, B, C, or D, which is A over a mesh of 4 x 2 devices.
        factor: scales its bytes.
        folder: where files go.
    """

    def __init__(self, name: str, factor: float, folder: Path) -> None:
        folder = folder.resolve()  # Orbax takes no relative paths
        self.work = workloads.build("A" if name == "D" else name, factor)
        self.mesh = workloads.mesh() if name == "D" else None
        self.flat: dict[str, Any] = dict(workloads.flat(self.work.tree))
        self.files = Files(folder / "written")
        self.peer = Orbax()
        self.ours = folder / f"{name}-treering"
        self.orbax = folder / f"{name}-orbax"
        self.tensors = folder / f"{name}.safetensors"
        self.plain = folder / f"{name}.bytes"
        self._orbax_is_right = False

    def prepare(self) -> None:
        """Write the reference files, each by its own library."""
        self.plain.parent.mkdir(parents=True, exist_ok=True)
        tree = self.fresh()
        treering.save(self.ours, tree)
        self.peer.save(self.orbax, tree)
        safetensors.flax.save_file(dict(workloads.flat(tree)), self.tensors)
        self.plain.write_bytes(self.bytes)

    def close(self) -> None:
        """Remove every file."""
        self.files.clear()
        self.peer.close()
        for path in (self.ours, self.orbax):
            shutil.rmtree(path, ignore_errors=True)
        for path in (self.tensors, self.plain):
            path.unlink(missing_ok=True)

    # Inputs, made outside the clock and outside the peak.

    @cached_property
    def bytes(self) -> bytes:
        """The bytes of all leaves."""
        return b"".join(array.data.cast("B") for array in map(_as_bytes, self.flat.values()))

    @cached_property
    def room(self) -> np.ndarray[Any, Any]:
        """Memory for all the bytes, every page of it touched."""
        return np.ones(self.work.nbytes, np.uint8)

    def fresh(self) -> Tree:
        """The input tree, of jax arrays that nobody has converted to numpy yet."""
        over = self.mesh
        if over is None:
            return workloads.to_jax(self.work.tree)
        tree = workloads.mapped(lambda leaf: jax.device_put(leaf, workloads.sharded(leaf, over)), self.work.tree)
        jax.block_until_ready(tree)
        return tree

    def target(self, over: jax.sharding.Mesh | None = None) -> Tree:
        """What to restore into: shapes, dtypes and shardings; over the tree's own mesh, or another one."""
        over = over or self.mesh
        single = jax.sharding.SingleDeviceSharding(jax.devices()[0])

        def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
            sharding = single if over is None else workloads.sharded(leaf, over)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return workloads.mapped(abstract, self.work.tree)

    def cached(self, path: Path) -> Path:
        """The path, once all of its pages are in the page cache."""
        warm(path, self.room)
        return path

    def read_plain(self) -> None:
        """One read of the bytes into memory that is already there."""
        read_into(self.plain, self.room)

    # Checks.

    def right_tree(self, tree: Tree) -> str | None:
        """Whether these are the tree's leaves, as jax arrays."""
        return self.right_leaves(dict(workloads.flat(tree)))

    def right_leaves(self, leaves: dict[str, Any]) -> str | None:
        """The same for a flat dict."""
        return workloads.same_leaves(leaves, self.flat, jax.Array)

    def right_checkpoint(self, path: Path) -> str | None:
        """Whether treering reads the tree back."""
        return self.right_tree(treering.load(path))

    def right_without_checksums(self, path: Path) -> str | None:
        """The same for a checkpoint whose checksums are zeros."""
        with unchecked():
            return self.right_checkpoint(path)

    def right_orbax(self, path: Path) -> str | None:
        """Whether Orbax reads the tree back: asked once, because it takes longer than all the rest."""
        if not self._orbax_is_right:
            fault = self.right_tree(self.peer.load(path, self.target()))
            self._orbax_is_right = fault is None
            return fault
        # How many bytes it writes is another number each time, what it says of the tree is not.
        before, now = (Path(folder, "_METADATA").read_bytes() for folder in (self.orbax, path))
        return None if now == before else "what Orbax says of the tree is not what it said before"

    def right_tensors(self, path: Path) -> str | None:
        """Whether these are the bytes that safetensors wrote before."""
        return _same_file(path, self.tensors)

    def right_plain(self, path: Path) -> str | None:
        """Whether these are the bytes of the leaves."""
        return _same_file(path, self.plain)

    def right_room(self, _: Any) -> str | None:
        """Whether the room holds the bytes of the leaves."""
        return None if equal_bytes(self.room, self.bytes) else "the bytes are not those of the leaves"


def _as_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.reshape(-1).view(np.uint8)


def _same_file(path: Path, wanted: Path) -> str | None:
    found, reference = (np.memmap(each, np.uint8, "r") for each in (path, wanted))
    return None if equal_bytes(found, reference) else "the bytes are not those of the reference file"
