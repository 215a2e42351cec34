"""Workers of `test_missed`: one process does something else while the others save; then all save again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest

import treering as tr
from tests import clocks
from tests.multiprocess import trees
from tests.multiprocess.meetings import told
from tests.multiprocess.refusals import tree

GENEROUS = 60.0


def misses_saves(folder: str, victim: int) -> dict[str, list[dict[str, Any]]]:
    """Let one process do something else while the others save, then let all save and load, twice."""
    with pytest.MonkeyPatch.context() as patch:
        clocks.wait_at_most(patch, heartbeat_first=0.2, heartbeat_every=0.2)
        return _misses(folder, victim)


def _misses(folder: str, victim: int) -> dict[str, list[dict[str, Any]]]:
    number = jax.process_index()
    steps = iter(range(1, 100))
    found: dict[str, list[dict[str, Any]]] = {}

    def run(timeout: float) -> tr.Run:
        return tr.Run(f"{folder}/run", timeout=timeout)

    def save_step(step: int, timeout: float = GENEROUS) -> None:
        run(timeout).save(step, tree(step)).result(GENEROUS)

    def load(step: int) -> int:
        shardings = {"w": trees.spread("line columns", jax.devices(), 2), "step": None}
        return int(tr.load(f"{folder}/run/step_{step:08d}", shardings=shardings, timeout=GENEROUS)["step"])

    def save_over(step: int, timeout: float = GENEROUS) -> None:
        tr.save(f"{folder}/over/step_00000500", tree(step), overwrite=True, timeout=timeout)

    def load_over(step: int) -> int:
        assert step
        shardings = {"w": trees.spread("line columns", jax.devices(), 2), "step": None}
        return int(tr.load(f"{folder}/over/step_00000500", shardings=shardings, timeout=GENEROUS)["step"])

    def tried(
        name: str,
        elsewhere: Callable[[], Any],
        save: Callable[..., None] = save_step,
        load: Callable[[int], int] = load,
        timeout: float = GENEROUS,
    ) -> None:
        missed, *later = [next(steps) for _ in range(3)]
        said = [told(elsewhere if number == victim else lambda: save(missed, timeout))]
        for step in later:
            said += [told(lambda: save(step)), told(lambda: load(step))]  # noqa: B023 - called at once
            said[-1]["step"] = step
        found[name] = said

    save_step(next(steps))
    save_over(next(steps))
    tried("gc", lambda: run(GENEROUS).gc(dry_run=False))
    tried("latest", lambda: run(GENEROUS).load())
    tried("load", lambda: load(1))
    tried("load of what is replaced", lambda: load_over(1), save_over, load_over)
    tried("nothing", lambda: None, timeout=2.0)
    return found
