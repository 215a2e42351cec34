"""What a training loop pays for saving: ``treering.save_async`` against Orbax' AsyncCheckpointer; the plan cache.

The workload K is a run that keeps thousands of steps. Orbax' saves are not durable and
have no checksums; treering's are and have.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import workloads
from benchmarks.files import Files
from benchmarks.measure import Case, Group, Work
from benchmarks.run_kept import KeptScene
from benchmarks.run_loop import Loop, Saved, Stolen, blocked, updated
from benchmarks.run_peers import Orbax, Saver, Treering
from benchmarks.suite import Benchmark, Goal, Scene
from benchmarks.workloads import LeafKind, Tree, Workload
from treering._arrays.plan_cache import TreePlan, forget, plan_tree

__all__ = ["BENCHMARK"]

# Name -> the workload that it is a part of, and which part.
_PARTS = {"A": ("A", 1.0), "A16": ("A", 1 / 64), "B": ("B", 1.0), "B1": ("B", 1 / 10)}
_ATTEMPT = "0123456789abcdef"
_SMALL = 1 / 50


class _RunScene(Scene):
    """One tree of jax arrays that a jitted step made, as those of a training loop are."""

    # Orbax takes 20 s for each save of B: no more rounds than were asked for.
    repeats = 1

    def __init__(self, name: str, leaves: LeafKind, factor: float, folder: Path) -> None:
        assert leaves == "jax"  # all its workloads are jax_only
        whole, part = _PARTS[name]
        self._work: Workload = workloads.build(whole, part * factor)
        self._flat: dict[str, Any] = dict(workloads.flat(self._work.tree))
        self._files = Files(folder.resolve() / "written")  # Orbax takes no relative paths
        self._savers: dict[str, Saver] = {"treering": Treering(), "Orbax": Orbax()}
        self._looked_at: set[str] = set()
        # What only has to run, runs in short.
        self._steps, self._rows = (3, 16) if factor < _SMALL else (12, 512)
        self.title = self._work.title
        self.nbytes = self._work.nbytes

    def prepare(self) -> None:
        """Nothing: no case reads what another one wrote."""

    def close(self) -> None:
        """Remove every file."""
        self._files.clear()
        for saver in self._savers.values():
            saver.close()
        forget()

    def groups(self) -> tuple[Group, ...]:
        """Blocking, stealing, planning."""
        return (
            Group(
                name="blocked",
                cases=tuple(map(self._blocked, self._savers)),
                between=self._files.clear,
                room=2 * self.nbytes,
                peaks=False,
                unit="s until it is written",
            ),
            Group(
                name="stolen",
                cases=tuple(map(self._stolen, self._savers)),
                between=self._files.clear,
                room=3 * self.nbytes,
                peaks=False,
                unit="longest step, in usual steps",
            ),
            Group(name="plan again", cases=(self._again(), self._first()), repeats=3, peaks=False),
        )

    def _fresh(self) -> Tree:
        """The tree in memory that is jax's own."""
        return jax.block_until_ready(updated(workloads.to_jax(self._work.tree), jnp.float32(1), donate=False))

    # Cases.

    def _blocked(self, name: str) -> Case:
        def begin() -> Work:
            return partial(blocked, self._savers[name], self._files.new(), self._fresh())

        return Case(
            name=name,
            begin=begin,
            check=self._right(name),
            seconds=lambda saved: saved.blocked,
            count=lambda saved: saved.finished,
        )

    def _stolen(self, name: str) -> Case:
        def begin() -> Work:
            loop = Loop(self._fresh(), rows=self._rows, steps=self._steps)
            return partial(loop.beside, self._savers[name], self._files.new())

        return Case(
            name=name,
            begin=begin,
            check=self._right(name),
            seconds=lambda stolen: stolen.seconds,
            count=lambda stolen: stolen.longest,
        )

    def _again(self) -> Case:
        def begin() -> Work:
            forget()
            _plan(self._fresh())
            return partial(_plan, self._fresh())

        return Case(name="treering", begin=begin, check=self._right_plan)

    def _first(self) -> Case:
        def begin() -> Work:
            forget()
            return partial(_plan, self._fresh())

        return Case(name="first plan", begin=begin, check=self._right_plan)

    # Checks.

    def _right(self, name: str) -> Callable[[Saved | Stolen], str | None]:
        """Whether a library reads back what it wrote; Orbax is asked once, as it takes longer than all the rest."""

        def check(saved: Saved | Stolen) -> str | None:
            if name in self._looked_at:
                shutil.rmtree(saved.path)
                return None
            if name != "treering":
                self._looked_at.add(name)
            tree = self._savers[name].load(saved.path, workloads.mapped(_abstract, self._work.tree))
            shutil.rmtree(saved.path)
            return workloads.same_leaves(dict(workloads.flat(tree)), self._flat, jax.Array)

        return check

    def _right_plan(self, plan: TreePlan) -> str | None:
        """Whether all leaves are in it, with their bytes."""
        found = sum(plan.layout(_ATTEMPT).chunks.nbytes)
        if plan.flat.keys != list(self._flat) or found != self.nbytes:
            return f"the plan has {len(plan.flat.keys)} leaves of {found} bytes"
        return None


def _scene(name: str, leaves: LeafKind, factor: float, folder: Path) -> Scene:
    return KeptScene(factor, folder) if name == "K" else _RunScene(name, leaves, factor, folder)


def _plan(tree: Tree) -> TreePlan:
    plan = plan_tree(tree)
    plan.layout(_ATTEMPT)
    return plan


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))


BENCHMARK = Benchmark(
    name="run",
    title="treering.save_async and Orbax' AsyncCheckpointer beside a training loop",
    workloads=("A", "A16", "B", "B1", "K"),
    numpy_only=("K",),
    jax_only=("A", "A16", "B", "B1"),
    packages=("jax", "numpy", "xxhash", "orbax-checkpoint", "tensorstore"),
    scene=_scene,
    goals=(
        Goal(row=1, workload="A", group="blocked", kind="faster", against="Orbax", bound=8.0),
        Goal(row=2, workload="A", group="stolen", kind="faster", against="Orbax", bound=3.0),
        *(
            Goal(row=3, workload=name, group="plan again", kind="faster", against="first plan", bound=10.0)
            for name in ("A", "B1", "B")
        ),
        Goal(row=4, workload="K", group="kept, save", kind="seconds", bound=0.010),
        Goal(row=5, workload="K", group="kept, calls", kind="count", bound=150),
        Goal(row=6, workload="K", group="kept, latest", kind="seconds", bound=0.100),
    ),
)
