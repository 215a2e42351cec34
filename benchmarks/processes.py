"""Saves and loads by real ``jax.distributed`` processes: 1, 2 and 4 of them, and plans for 1,024.

However many they are, they have the same eight devices and the same cores together, so a tree lies in the same shards.
Orbax runs in the same processes.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import plans, process_groups
from benchmarks.measure import Group
from benchmarks.process_groups import FORMS, ONE, SHAPES, title
from benchmarks.process_scene import COUNTS, ProcessFiles
from benchmarks.suite import Benchmark, Goal, Scene
from benchmarks.workloads import LeafKind

__all__ = ["BENCHMARK"]

_SMALL_LEAVES = 0.001


class _Large(Scene):
    """The transformer over eight devices: throughput and bytes."""

    repeats = 1

    def __init__(self, factor: float, folder: Path) -> None:
        self._files = ProcessFiles("A", factor, folder)
        self.title = self._files.work.title + " over eight devices of 1, 2 or 4 processes"
        self.nbytes = self._files.work.nbytes

    def prepare(self) -> None:
        """Let every library save the tree."""
        self._files.prepare()

    def close(self) -> None:
        """Remove every file."""
        self._files.close()

    def groups(self) -> tuple[Group, ...]:
        """Throughput and bytes."""
        return process_groups.groups(self._files)


class _Small(_Large):
    """Ten leaves of 1 KiB, whatever the size asked for: what a save costs that hardly writes."""

    def __init__(self, folder: Path) -> None:
        self._files = ProcessFiles("B", _SMALL_LEAVES, folder)
        self.title = self._files.work.title + " over eight devices of 2 or 4 processes"
        self.nbytes = self._files.work.nbytes

    def groups(self) -> tuple[Group, ...]:
        """Notes, and the end of a save."""
        return process_groups.small_groups(self._files)


def _scene(name: str, leaves: LeafKind, factor: float, folder: Path) -> Scene:
    assert leaves == "jax"  # all its workloads are jax_only
    match name:
        case "A":
            return _Large(factor, folder)
        case "S":
            return _Small(folder)
    return plans.BENCHMARK.scene(name, leaves, factor, folder)


_GOALS = (
    *(
        Goal(row=9, workload="A", group=title(form, shape.what, count), kind="faster", against=ONE, bound=0.85)
        for form in FORMS
        for shape in SHAPES
        for count in COUNTS
        if shape.timed
    ),
    *(
        Goal(
            row=8 if shape.verb == "save" else 4,
            workload="A",
            group=title(form, shape.what, count),
            kind="count",
            bound=shape.bound,
        )
        for form in FORMS
        for shape in SHAPES
        for count in COUNTS
    ),
)

BENCHMARK = Benchmark(
    name="processes",
    title="treering.save, treering.load and treering.leaves with many processes, and Orbax",
    workloads=("A", "S", *plans.BENCHMARK.workloads),
    numpy_only=(),
    jax_only=("A", "S", *plans.BENCHMARK.workloads),
    packages=("jax", "numpy", "xxhash", "orbax-checkpoint", "tensorstore"),
    scene=_scene,
    goals=_GOALS + plans.BENCHMARK.goals,
)
