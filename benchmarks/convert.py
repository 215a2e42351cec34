"""treering.convert between the formats that it reads and writes, Hugging Face folders straight onto a mesh, and Orbax.

The workloads are formats of the source; the groups are those of the target. What others write was written by them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks import convert_mesh, convert_orbax, convert_pairs
from benchmarks.convert_orbax import OrbaxFiles
from benchmarks.convert_scene import LARGEST_LEAF, PACKED, SOURCES, ConvertFiles
from benchmarks.measure import Group
from benchmarks.suite import Benchmark, Goal, Scene
from benchmarks.workloads import LeafKind

__all__ = ["BENCHMARK"]

_MESH = "mesh"
_ORBAX = {"orbax-A": "A", "orbax-B": "B"}
_OTHERS = (_MESH, *_ORBAX)
_MIB = 1 << 20


class _ConvertScene(Scene):
    """One format of the source with the transformer tree in it, or a checkpoint that Orbax wrote."""

    repeats = 1

    def __init__(self, name: str, leaves: LeafKind, factor: float, folder: Path) -> None:
        assert leaves == "jax"  # all its workloads are jax_only
        self._files: ConvertFiles | OrbaxFiles
        self._groups: Callable[[], tuple[Group, ...]]
        if name in _ORBAX:
            self._files = orbax = OrbaxFiles(_ORBAX[name], factor, folder)
            self._groups = lambda: convert_orbax.groups(orbax)
        else:
            self._files = files = ConvertFiles("hf" if name == _MESH else name, factor, folder)
            self._groups = lambda: (convert_mesh if name == _MESH else convert_pairs).groups(files)
        self.title = self._files.work.title
        self.nbytes = self._files.work.nbytes

    def prepare(self) -> None:
        """Write the source."""
        self._files.prepare()

    def close(self) -> None:
        """Remove every file."""
        self._files.close()

    def groups(self) -> tuple[Group, ...]:
        """Every target, the mesh, or reading."""
        return self._groups()


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
    *(
        Goal(row=3, workload=name, group=convert_orbax.GROUP, kind="faster", against=convert_orbax.PEER, bound=bound)
        for name, bound in zip(_ORBAX, (2.0, 8.0), strict=True)
    ),
    *(
        Goal(row=4, workload=name, group=convert_orbax.WRITE, kind="faster", against=convert_orbax.PEER, bound=1.0)
        for name in _ORBAX
    ),
)

BENCHMARK = Benchmark(
    name="convert",
    title="treering.convert between formats, Hugging Face folders onto a mesh, and Orbax",
    workloads=(*SOURCES, *_OTHERS),
    numpy_only=(),
    jax_only=(*SOURCES, *_OTHERS),
    meshes=(_MESH,),
    packages=("jax", "numpy", "flax", "orbax-checkpoint", "safetensors", "tensorstore"),
    scene=_ConvertScene,
    goals=_GOALS,
)
