"""Trees of very many small leaves: what each leaf costs treering, safetensors, Orbax, and a loop that only moves bytes.

Counted is the processor time of the process, all threads together, for each leaf: it says more than the clock where
other programs run beside. Orbax takes part where it ends in time, with 1,000 and 10,000 leaves.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import many_bucket, many_load, many_save
from benchmarks.many_scene import SIZES, ManyFiles
from benchmarks.measure import Group
from benchmarks.suite import Benchmark, Goal, Scene
from benchmarks.workloads import LeafKind

__all__ = ["BENCHMARK"]

_MIB = 1 << 20


class _ManyScene(Scene):
    """One number of leaves, with jax leaves."""

    repeats = 1

    def __init__(self, name: str, leaves: LeafKind, factor: float, folder: Path) -> None:
        assert leaves == "jax"  # all its workloads are jax_only
        self._files = ManyFiles(name, factor, folder)
        self.title = self._files.title
        self.nbytes = self._files.nbytes

    def prepare(self) -> None:
        """Write the reference files."""
        self._files.prepare()

    def close(self) -> None:
        """Remove every file."""
        self._files.close()

    def groups(self) -> tuple[Group, ...]:
        """Saving, saving in the background, loading, opening; in a bucket too."""
        return tuple(group for part in (many_save, many_load, many_bucket) for group in part.groups(self._files))


def _each(row: int, group: str, bounds: dict[str, float]) -> tuple[Goal, ...]:
    """One goal for what is counted with each number of leaves."""
    return tuple(Goal(row=row, workload=name, group=group, kind="count", bound=bound) for name, bound in bounds.items())


_GOALS = (
    *_each(1, "load", {"10k": 7.5, "100k": 8, "1M": 6}),
    *(Goal(row=1, workload=name, group="load", kind="faster", against="safetensors", bound=2) for name in SIZES[1:3]),
    *_each(2, "save", {"10k": 4, "100k": 4, "1M": 3}),
    *(
        Goal(row=2, workload=name, group="save", kind="faster", against="safetensors + fsync", bound=1.1)
        for name in SIZES[1:3]
    ),
    *_each(3, "save to .safetensors", {"10k": 5, "100k": 5}),
    *(
        Goal(row=4, workload=name, group="save_async blocks, later", kind="seconds", bound=bound)
        for name, bound in {"10k": 0.015, "100k": 0.2, "1M": 2.0}.items()
    ),
    Goal(row=5, workload="10k", group="save_async blocks, first", kind="seconds", bound=0.1),
    *(
        Goal(row=6, workload=name, group="open, one leaf", kind="seconds", bound=bound)
        for name, bound in {"10k": 0.005, "100k": 0.04}.items()
    ),
    Goal(row=7, workload="1M", group="open, all keys", kind="count", bound=40 * _MIB),
    *(
        Goal(row=8, workload="10k", group=group, kind="times", against=many_bucket.FOLDER, bound=1.5)
        for group in (many_bucket.SAVE, many_bucket.LOAD)
    ),
)

BENCHMARK = Benchmark(
    name="many",
    title="treering with very many leaves, safetensors, Orbax, and loops that only move bytes",
    workloads=SIZES,
    numpy_only=(),
    jax_only=SIZES,
    packages=("jax", "numpy", "xxhash", "orbax-checkpoint", "safetensors", "obstore"),
    scene=_ManyScene,
    goals=_GOALS,
)
