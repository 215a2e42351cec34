"""Workers of `test_different_calls`: processes of a job that make different joint calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import treering as tr
from tests.multiprocess import trees
from tests.multiprocess.meetings import told
from tests.multiprocess.refusals import tree
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves

GENEROUS = 60.0


def makes_different_calls(folder: str) -> dict[str, list[dict[str, Any]]]:
    """Let process 1 make another call than process 0, then let both make the same ones."""
    number = jax.process_index()
    run = tr.Run(f"{folder}/run", timeout=GENEROUS, keep=tr.retention.KeepLast(2))
    found: dict[str, list[dict[str, Any]]] = {}

    def load() -> Any:
        return int(run.load()["step"])

    def joint_load(step: int) -> int:
        crossed = trees.spread("line columns", jax.devices(), 2)
        return int(run.load(step, shardings={"w": crossed, "step": None})["step"])

    def init() -> int | None:
        return run.load_or_init(lambda: {"w": jnp.zeros((24, 24), jnp.float32), "step": 0}).step

    def gc() -> int:
        return len(run.gc(dry_run=False))

    def leaves() -> float:
        shardings = {"w": trees.spread("line columns", jax.devices(), 2), "step": None}
        return float(tree_deserialize_leaves(f"{folder}/leaves", shardings=shardings, timeout=GENEROUS)["w"].sum())

    def tried(name: str, step: int, first: Callable[[], Any], second: Callable[[], Any]) -> None:
        def save() -> int:
            run.save(step, tree(step)).result(GENEROUS)
            return step

        said = [told(second if number else first)]
        found[name] = said + [told(work) for work in (save, load, gc, init)]

    # The first save of a job begins with a collective.
    tried("save, load", 1, lambda: run.save(1, tree(1)).result(GENEROUS), load)
    tried("gc, load", 2, gc, load)
    tried("load 1, load 2", 3, lambda: joint_load(1), lambda: joint_load(2))
    tried("init, gc", 4, init, gc)
    tried("delete, branch", 5, lambda: run.delete(4), lambda: run.branch(4, f"{folder}/branch"))
    tree_serialize_leaves(f"{folder}/leaves", tree(1), timeout=GENEROUS)
    tried("leaves, load", 6, leaves, load)
    return found
