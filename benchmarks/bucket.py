"""Checkpoints in a bucket: treering, raw obstore, raw sockets, s3fs + safetensors, TensorStore's kvstore.

The server only moves bytes (`benchmarks.byte_server`), in a process of its own on this machine, over plain HTTP. The
raw cases write one object of plain bytes and check nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.bucket_mesh import COMPARED, WHOLE, MeshScene
from benchmarks.bucket_requests import RunScene, SmallScene
from benchmarks.bucket_scene import TreeScene
from benchmarks.suite import Benchmark, Goal, Scene
from benchmarks.workloads import LeafKind

__all__ = ["BENCHMARK"]

_MIB = 1 << 20
_TREE_BYTES = 1_100_421_120
"""Of workload A."""


def _scene(name: str, leaves: LeafKind, factor: float, folder: Path) -> Scene:
    scenes: dict[str, Callable[[str, LeafKind, float, Path], Scene]] = {"S": SmallScene, "R": RunScene, "M": MeshScene}
    return scenes.get(name, TreeScene)(name, leaves, factor, folder)


_MESH_LOADS = ("load", "load as saved", "load over 2 x 4", "load whole leaves over 4 x 2")
_MESH_READS = ("open, leaf by leaf", "verify")
_GOALS = (
    Goal(row=1, workload="A", group="save", kind="count over", against="raw obstore", bound=0.3),
    Goal(row=1, workload="A", group="load", kind="count over", against="raw obstore", bound=0.6),
    Goal(row=2, workload="A", group="save", kind="faster", against="raw obstore", bound=0.6),
    Goal(row=2, workload="A", group="load", kind="faster", against="raw obstore", bound=0.5),
    Goal(row=3, workload="A", group="save", kind="faster", against="s3fs + safetensors", bound=4),
    Goal(row=3, workload="A", group="load", kind="faster", against="s3fs + safetensors", bound=2.5),
    Goal(row=4, workload="A", group="save", kind="peak bytes", bound=128 * _MIB),
    Goal(row=4, workload="A", group="load", kind="peak bytes", bound=_TREE_BYTES + 128 * _MIB),
    Goal(row=5, workload="S", group="save", kind="count", bound=9),
    Goal(row=5, workload="S", group="overwrite", kind="count", bound=9),
    Goal(row=5, workload="S", group="save, 50 ms a request", kind="count", bound=6),
    Goal(row=5, workload="S", group="overwrite, 50 ms a request", kind="count", bound=6),
    *(Goal(row=6, workload="S", group=group, kind="count", bound=4) for group in ("ls", "inspect", "open one leaf")),
    Goal(row=7, workload="S", group="save, 50 ms a request", kind="seconds", bound=0.6),
    Goal(row=7, workload="R", group="Run.latest, 50 ms a request", kind="seconds", bound=0.3),
    *(Goal(row=8, workload="M", group=group, kind="count", bound=14) for group in (*_MESH_LOADS, *_MESH_READS)),
    Goal(row=8, workload="M", group="diff", kind="count", bound=28),
    *(Goal(row=9, workload="M", group=f"{group}, 30 ms a request", kind="seconds", bound=2) for group in _MESH_LOADS),
    Goal(row=10, workload="M", group=COMPARED, kind="times", against=WHOLE, bound=1.3),
)

BENCHMARK = Benchmark(
    name="bucket",
    title="treering, raw obstore and sockets, s3fs + safetensors, TensorStore's kvstore at a server that moves bytes",
    workloads=("A", "B", "S", "R", "M"),
    numpy_only=("S", "R"),
    jax_only=("A", "B", "M"),
    meshes=("M",),
    packages=("jax", "numpy", "xxhash", "obstore", "s3fs", "safetensors", "tensorstore"),
    scene=_scene,
    goals=_GOALS,
)
