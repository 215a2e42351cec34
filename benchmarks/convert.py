"""treering.convert between the formats that it reads and writes, and Hugging Face folders straight onto a mesh.

The workloads are formats of the source; the groups are those of the target. What others write was written by them.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import convert_mesh, convert_pairs
from benchmarks.convert_scene import LARGEST_LEAF, PACKED, SOURCES, ConvertFiles
from benchmarks.measure import Group
from benchmarks.suite import Benchmark, Goal, Scene
from benchmarks.workloads import LeafKind

__all__ = ["BENCHMARK"]

_MESH = "mesh"
_MIB = 1 << 20


class _ConvertScene(Scene):
    """One format of the source, with the transformer tree in it."""

    repeats = 1

    def __init__(self, name: str, leaves: LeafKind, factor: float, folder: Path) -> None:
        assert leaves == "jax"  # all its workloads are jax_only
        self._on_mesh = name == _MESH
        self._files = ConvertFiles("hf" if self._on_mesh else name, factor, folder)
        self.title = self._files.work.title
        self.nbytes = self._files.work.nbytes

    def prepare(self) -> None:
        """Write the source."""
        self._files.prepare()

    def close(self) -> None:
        """Remove every file."""
        self._files.close()

    def groups(self) -> tuple[Group, ...]:
        """Every target, or the mesh."""
        return (convert_mesh if self._on_mesh else convert_pairs).groups(self._files)


_GOALS = (
    *(
        Goal(
            row=1,
            workload=source,
            group=convert_pairs.group_name(target),
            kind="peak bytes",
            bound=256 * _MIB + (LARGEST_LEAF if source in PACKED else 0),
        )
        for source in SOURCES
        for target in convert_pairs.TARGETS
    ),
    Goal(row=2, workload=_MESH, group=convert_mesh.GROUP, kind="faster", against=convert_mesh.PEER, bound=3.0),
    Goal(row=2, workload=_MESH, group=convert_mesh.GROUP, kind="peak share", bound=1.05),
)

BENCHMARK = Benchmark(
    name="convert",
    title="treering.convert between formats, and Hugging Face folders onto a mesh",
    workloads=(*SOURCES, _MESH),
    numpy_only=(),
    jax_only=(*SOURCES, _MESH),
    meshes=(_MESH,),
    packages=("jax", "numpy", "flax", "orbax-checkpoint", "safetensors", "tensorstore"),
    scene=_ConvertScene,
    goals=_GOALS,
)
