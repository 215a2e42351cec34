"""Workers of `test_interrupted`: one process is interrupted, or fails, before its joint save was counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

import treering as tr
from tests.multiprocess.meetings import told
from tests.multiprocess.refusals import tree
from treering._checkpoint import save as saving
from treering._leaves import serialize as serializing
from treering._runs import save_step as stepping
from treering.leaves import tree_serialize_leaves

GENEROUS = 60.0


def _interrupted(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        return told(work)
    except KeyboardInterrupt:
        return {"error": "KeyboardInterrupt", "message": "", "seconds": 0.0}


def _interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def interrupts_before_counting(folder: str, victim: int) -> dict[str, list[dict[str, Any]]]:
    """Save by every door, then with one process that is interrupted or given a wrong argument, then again."""
    number = jax.process_index()
    path, run = Path(folder, "ckpt"), tr.Run(f"{folder}/run", timeout=GENEROUS)
    steps = iter(range(1, 100))

    def saved(timeout: float = GENEROUS) -> None:
        tr.save(path, tree(1), overwrite=True, timeout=timeout)

    def in_background(timeout: float = GENEROUS) -> None:
        tr.save_async(path, tree(1), overwrite=True, timeout=timeout).result(GENEROUS)

    def leaves(timeout: float = GENEROUS) -> None:
        tree_serialize_leaves(f"{folder}/leaves", tree(1), timeout=timeout)

    def step(timeout: float = GENEROUS) -> None:
        run.timeout = timeout  # type: ignore[attr-defined]
        run.save(next(steps), tree(1)).result(GENEROUS)

    doors: dict[str, tuple[Callable[..., None], Any, str]] = {
        "save": (saved, saving, "plan_tree"),
        "async": (in_background, saving, "plan_tree"),
        "leaves": (leaves, serializing, "flatten"),
        "run": (step, stepping, "replace_stateful_items"),
    }
    found: dict[str, list[dict[str, Any]]] = {}
    for name, (work, module, place) in doors.items():
        said = [told(work)]
        with pytest.MonkeyPatch.context() as patch:
            if number == victim:
                patch.setattr(module, place, _interrupt)
            said.append(_interrupted(work))
        said.append(told(work))
        found[name] = said
    found["argument"] = [told(lambda: saved(-1.0 if number == victim else 2.0)), told(saved)]
    return found


def interrupts_the_first_save(folder: str) -> list[dict[str, Any]]:
    """Interrupt process 1 before the job has a name, then save until all do."""
    path = Path(folder, "ckpt")
    found = []
    with pytest.MonkeyPatch.context() as patch:
        if jax.process_index() == 1:
            patch.setattr(saving, "plan_tree", _interrupt)
        found.append(_interrupted(lambda: tr.save(path, tree(1), timeout=2)))
    return found + [told(lambda: tr.save(path, tree(1), overwrite=True, timeout=GENEROUS)) for _ in range(3)]
