"""treering's checkpoint directory against Orbax, safetensors, plain writes and plain reads.

Orbax' saves are not durable and its loads are not checked; treering's are both. Every library reads what it wrote
itself.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import checkpoint_load, checkpoint_parts, checkpoint_save
from benchmarks.checkpoint_parts import FIRST_LEAF, SHARES, TURNED, share_group
from benchmarks.checkpoint_scene import CheckpointFiles
from benchmarks.measure import Group
from benchmarks.suite import Benchmark, Goal, Scene
from benchmarks.workloads import LeafKind

__all__ = ["BENCHMARK"]

_MIB = 1 << 20


class _CheckpointScene(Scene):
    """One workload with jax leaves."""

    # Orbax takes 20 s for each save of B: no more rounds than were asked for.
    repeats = 1

    def __init__(self, name: str, leaves: LeafKind, factor: float, folder: Path) -> None:
        assert leaves == "jax"  # all its workloads are jax_only
        self._files = CheckpointFiles(name, factor, folder)
        self.title = self._files.work.title + (" over 4 x 2 devices" if self._files.mesh is not None else "")
        self.nbytes = self._files.work.nbytes

    def prepare(self) -> None:
        """Write the reference files."""
        self._files.prepare()

    def close(self) -> None:
        """Remove every file."""
        self._files.close()

    def groups(self) -> tuple[Group, ...]:
        """Saving, loading the whole, reading parts."""
        parts = (checkpoint_save, checkpoint_load, checkpoint_parts)
        return tuple(group for part in parts for group in part.groups(self._files))


_GOALS = (
    Goal(row=1, workload="A", group="save", kind="faster", against="Orbax", bound=3.0),
    Goal(row=1, workload="A", group="save", kind="count", bound=4),
    Goal(row=1, workload="A", group="save", kind="peak bytes", bound=64 * _MIB),
    Goal(row=1, workload="B", group="save", kind="faster", against="Orbax", bound=60.0),
    Goal(row=1, workload="B", group="save", kind="count", bound=4),
    Goal(row=1, workload="B", group="save", kind="peak bytes", bound=64 * _MIB),
    Goal(row=1, workload="C", group="save", kind="peak bytes", bound=64 * _MIB),
    Goal(row=1, workload="D", group="save", kind="peak bytes", bound=64 * _MIB),
    Goal(row=2, workload="A", group="load", kind="faster", against="Orbax", bound=4.0),
    Goal(row=2, workload="A", group="load", kind="faster", against="safetensors", bound=3.0),
    Goal(row=2, workload="A", group="load", kind="peak share", bound=1.05),
    Goal(row=2, workload="A", group="load mapped", kind="faster", against="Orbax", bound=12.0),
    Goal(row=2, workload="A", group="load mapped unchecked", kind="faster", against="Orbax", bound=100.0),
    Goal(row=2, workload="B", group="load", kind="faster", against="Orbax", bound=25.0),
    Goal(row=2, workload="C", group="load", kind="peak share", bound=1.05),
    Goal(row=2, workload="D", group="load", kind="peak share", bound=1.05),
    Goal(row=3, workload="A", group=FIRST_LEAF, kind="seconds", bound=0.005),
    Goal(row=3, workload="B", group=FIRST_LEAF, kind="seconds", bound=0.060),
    Goal(row=3, workload="C", group=FIRST_LEAF, kind="seconds", bound=0.005),
    *(
        Goal(row=4, workload=name, group=share_group(parts), kind="count", bound=1.05)
        for name in ("A", "C", "D")
        for parts in SHARES
    ),
    Goal(row=4, workload="D", group=TURNED, kind="count", bound=1.05),
    *(
        Goal(row=5, workload="A", group=group, kind="times", against=against, bound=bound)
        for group, against, bound in (
            ("checksums save", "treering, no checksums", 1.10),
            ("checksums load", "treering, unchecked", 1.35),
            ("checksums load cold", "treering, unchecked", 1.10),
        )
    ),
)

BENCHMARK = Benchmark(
    name="checkpoint",
    title="treering.save and treering.load, Orbax and safetensors",
    workloads=("A", "B", "C", "D"),
    numpy_only=(),
    jax_only=("A", "B", "C", "D"),
    meshes=("D",),
    packages=("jax", "numpy", "xxhash", "orbax-checkpoint", "tensorstore", "safetensors"),
    scene=_CheckpointScene,
    goals=_GOALS,
)
