"""One tree of very many leaves that are alike: its reference files, and what makes a result right."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import numpy as np
import safetensors.flax

import treering
from benchmarks import workloads
from benchmarks.checkpoint_peers import Orbax
from benchmarks.files import Files, contents, warm
from benchmarks.measure import Case, Work, equal_bytes
from benchmarks.workloads import Tree

__all__ = ["SIZES", "ManyFiles", "Spent", "spending"]

_LEAVES: Final = {"1k": (1_000, 256), "10k": (10_000, 256), "100k": (100_000, 256), "1M": (1_000_000, 4)}
"""Leaves, and float32 values of each."""
SIZES: Final = tuple(_LEAVES)
_BRANCH: Final = 100


class Spent(NamedTuple):
    """A result, and what it cost this process."""

    result: Any
    seconds: float
    cpu: float


def spending(work: Work) -> Work:
    """The same work, which tells its time and the processor time of this process too, all threads together."""

    def done() -> Spent:
        start, before = time.perf_counter(), time.process_time()
        result = work()
        return Spent(result, time.perf_counter() - start, time.process_time() - before)

    return done


class ManyFiles:
    """A tree of jax arrays, and the same leaves as treering, Orbax, safetensors and a plain file hold them.

    Args:
        name: one of ``SIZES``.
        factor: scales the number of leaves.
        folder: where files go.
    """

    def __init__(self, name: str, factor: float, folder: Path) -> None:
        folder = folder.resolve()  # Orbax takes no relative paths
        leaves, items = _LEAVES[name]
        self.arguments = (name, factor, folder)
        self.leaves = max(1, round(leaves * factor))
        self.nbytes = self.leaves * items * 4
        self.title = f"{self.leaves:,} leaves of {items * 4:,} B"
        self.block = np.random.default_rng(7).standard_normal((self.leaves, items), dtype=np.float32)
        """The values of all leaves, one in each row."""
        self.keys = [f"block_{at // _BRANCH:03d}/leaf_{at % _BRANCH:02d}" for at in range(self.leaves)]
        self.peer = Orbax() if name in SIZES[:2] else None
        """Orbax, where it ends in time."""
        self.files = Files(folder / "written")
        self.ours = folder / f"{name}-treering"
        self.tensors = folder / f"{name}.safetensors"
        self.plain = folder / f"{name}.bytes"
        self.orbax = folder / f"{name}-orbax"
        self._sure_of_orbax = self._saved_in_background = False

    def prepare(self) -> None:
        """Write the reference files, each by its own library."""
        self.plain.parent.mkdir(parents=True, exist_ok=True)
        treering.save(self.ours, self.fresh())
        safetensors.flax.save_file(self.fresh_flat(), self.tensors)
        self.plain.write_bytes(self.block)
        if self.peer is not None:
            self.peer.save(self.orbax, self.fresh())

    def close(self) -> None:
        """Remove every file."""
        self.files.clear()
        if self.peer is not None:
            self.peer.close()
        for path in (self.ours, self.orbax):
            shutil.rmtree(path, ignore_errors=True)
        for path in (self.tensors, self.plain):
            path.unlink(missing_ok=True)

    # Inputs, made outside the clock and outside the peak.

    @cached_property
    def tree(self) -> Tree:
        """The tree with numpy leaves."""
        tree: Tree = {}
        for key, row in zip(self.keys, self.block, strict=True):
            branch, _, name = key.partition("/")
            tree.setdefault(branch, {})[name] = row
        return tree

    def fresh(self) -> Tree:
        """The input tree, of jax arrays that nobody has converted to numpy yet."""
        return workloads.to_jax(self.tree)

    def fresh_flat(self) -> dict[str, Any]:
        """The same leaves by their keys."""
        return dict(workloads.flat(self.fresh()))

    def target(self) -> Tree:
        """What to load into: shapes, dtypes and shardings."""
        single = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return workloads.mapped(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=single), self.tree)

    def cached(self, path: Path) -> Path:
        """The path, once all of its pages are in the page cache."""
        warm(path, np.empty(1 << 20, np.uint8))
        return path

    def saved_in_background(self) -> None:
        """See to it that this process has saved the tree in the background before."""
        if not self._saved_in_background:
            treering.save_async(self.files.new(), self.fresh()).result()
            self._saved_in_background = True

    # Cases.

    def case(
        self, name: str, begin: Callable[[], Work], right: Callable[[Any], str | None], *, limit: bool = False
    ) -> Case:
        """A case that counts the processor time of each leaf, in microseconds."""
        return Case(
            name=name,
            begin=lambda: spending(begin()),
            check=lambda spent: right(spent.result),
            count=lambda spent: spent.cpu * 1e6 / self.leaves,
            limit=limit,
        )

    # Checks.

    def right_tree(self, tree: Tree) -> str | None:
        """Whether these are the tree's leaves, as jax arrays."""
        return self.right_flat(dict(workloads.flat(tree)))

    def right_flat(self, leaves: dict[str, Any]) -> str | None:
        """The same for a flat dict, in any order."""
        if leaves.keys() != set(self.keys):
            return "the keys are not those of the tree"
        if not all(isinstance(leaf, jax.Array) for leaf in leaves.values()):
            return "not every leaf is a jax array"
        return self.right_rows([np.asarray(leaves[key]) for key in self.keys])

    def right_rows(self, rows: list[np.ndarray[Any, Any]]) -> str | None:
        """Whether these are the values of the leaves, in order."""
        if any((row.dtype, row.shape) != (self.block.dtype, self.block.shape[1:]) for row in rows):
            return "a leaf has another dtype or shape"
        return None if equal_bytes(np.stack(rows), self.block) else "the values differ"

    def right_checkpoint(self, path: Path | str) -> str | None:
        """Whether treering reads the tree back."""
        return self.right_tree(treering.load(path))

    def right_tensors(self, path: Path) -> str | None:
        """Whether safetensors reads the tree back."""
        return self.right_flat(safetensors.flax.load_file(path))

    def right_orbax(self, path: Path) -> str | None:
        """Whether Orbax reads the tree back: asked once, because it takes longer than all the rest."""
        if self._sure_of_orbax or self.peer is None:
            return None
        fault = self.right_tree(self.peer.load(path, self.target()))
        self._sure_of_orbax = fault is None
        return fault

    def right_plain(self, path: Path) -> str | None:
        """Whether these are the bytes of the leaves."""
        return None if equal_bytes(np.fromfile(path, np.uint8), self.block) else "the bytes are not those of the leaves"

    def index_bytes(self) -> int:
        """Bytes of what says where the leaves lie."""
        return sum(path.stat().st_size for path in contents(self.ours) if path.suffix == ".json")
