"""Workers of `test_interrupted`: one process is interrupted, or fails, before its joint save was counted."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final, Self

import jax
import pytest
from jax.experimental import multihost_utils

import treering as tr
from tests.multiprocess import trees
from tests.multiprocess.meetings import told
from tests.multiprocess.refusals import tree
from treering._checkpoint import save as saving
from treering._leaves import serialize as serializing
from treering._runs import save_step as stepping
from treering.leaves import tree_serialize_leaves

GENEROUS = 60.0

_SOURCE: Final = str(Path(tr.__file__).parent)
_BEFORE_COUNTING: Final = 60
"""So many lines of a call may go by before it is known to be one of the job."""


def _interrupted(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        return told(work)
    except KeyboardInterrupt as error:
        return {"error": "KeyboardInterrupt", "message": str(error), "seconds": 0.0}


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
        "run, undecided": (step, stepping, "require_step_number"),
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
    refused = told(lambda: saved(-1.0 if number == victim else GENEROUS))
    # Whoever looks late would find the other in the next save.
    multihost_utils.sync_global_devices("refused")
    found["argument"] = [refused, told(saved)]
    first: Any = "one" if number == victim else next(steps)
    run = tr.Run(run.path, timeout=2.0)
    wrong = told(lambda: run.save(first, tree(1)).result(GENEROUS))
    run = tr.Run(run.path, timeout=GENEROUS)
    found["argument of a run"] = [wrong, told(lambda: run.save(50, tree(1)).result(GENEROUS))]
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


def _statement(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()


class _Striking:
    """Interrupts the lines of treering that this thread comes to, when so many have gone by; counts them at None.

    The end of a ``with`` block is left out: tracing would raise before its ``__exit__``, where no signal comes.
    """

    def __init__(self, after: int | None) -> None:
        self.lines = 0
        self._after = after
        self._latest: dict[FrameType, int] = {}

    def __enter__(self) -> Self:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._latest.clear()

    def _ends_block(self, frame: FrameType) -> bool:
        """Tell whether a frame comes back to the line of a ``with`` block that it was in."""
        before, self._latest[frame] = self._latest.get(frame, 0), frame.f_lineno
        return before > frame.f_lineno and _statement(frame).startswith("with ")

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_SOURCE):
            return None
        if event == "line" and not self._ends_block(frame):
            self.lines += 1
            if self.lines == self._after:
                sys.settrace(None)
                raise KeyboardInterrupt(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        return self._trace


def interrupts_any_line(folder: str, victim: int, door: str, points: int, timeout: float) -> list[list[dict[str, Any]]]:
    """Interrupt one process at some lines of its call, then let all make it until they are in step again."""
    number, path = jax.process_index(), Path(folder, "ckpt")
    run = tr.Run(f"{folder}/run", timeout=timeout)
    steps = iter(range(1, 10_000))
    shardings = {"w": trees.spread("line columns", jax.devices(), 2), "step": None}

    def step() -> None:
        run.save(next(steps), tree(1)).result(GENEROUS)

    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: tr.save(path, tree(1), overwrite=True, timeout=timeout),
        "run": step,
        "load": lambda: str(tr.load(path, shardings=shardings, timeout=timeout)["step"]),
        "latest": lambda: str(run.load()["step"]),
    }
    for before in ("save", "run", door):
        calls[before]()
    with _Striking(None) as counted:
        calls[door]()
    # What comes before is not in the call yet: as if the interrupt had come before it.
    found = []
    for point in range(points):
        at = _BEFORE_COUNTING + (counted.lines - _BEFORE_COUNTING) * point // points
        with _Striking(at if number == victim else None):
            said = [_interrupted(calls[door])]
        found.append([*said, *(told(calls[door]) for _ in range(2)), told(calls["save"])])
    return found
