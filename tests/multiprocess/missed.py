"""Workers of `test_missed`: one process does something else while the others save; then all save again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

import treering as tr
from tests.multiprocess import trees
from tests.multiprocess.meetings import told
from tests.multiprocess.refusals import tree

GENEROUS = 60.0


def misses_saves(folder: str, victim: int) -> dict[str, list[dict[str, Any]]]:
    """Let one process do something else while the others save, then let all save and load, twice."""
    number = jax.process_index()
    steps = iter(range(1, 100))
    found: dict[str, list[dict[str, Any]]] = {}

    def run(timeout: float) -> tr.Run:
        return tr.Run(f"{folder}/run", timeout=timeout)

    def save_step(step: int, timeout: float = GENEROUS) -> None:
        run(timeout).save(step, tree(step)).result(GENEROUS)

    def save(step: int, timeout: float = GENEROUS) -> None:
        tr.save(f"{folder}/run/step_{step:08d}", tree(step), timeout=timeout)

    def load(step: int) -> int:
        crossed = trees.spread("line columns", jax.devices(), 2)
        shardings = {"w": crossed, "step": None}
        return int(tr.load(f"{folder}/run/step_{step:08d}", shardings=shardings, timeout=GENEROUS)["step"])

    def tried(name: str, save: Callable[..., None], elsewhere: Callable[[], Any]) -> None:
        missed, *later = [next(steps) for _ in range(3)]
        said = [told(elsewhere if number == victim else lambda: save(missed, 2.0))]
        for step in later:
            said += [told(lambda: save(step)), told(lambda: load(step))]  # noqa: B023 - called at once
            said[-1]["step"] = step
        found[name] = said

    save_step(next(steps))
    tried("gc", save_step, lambda: run(2.0).gc(dry_run=False))
    tried("load", save_step, lambda: run(2.0).load())
    tried("nothing", save_step, lambda: None)
    tried("load beside another form", save, lambda: run(2.0).load())
    return found
