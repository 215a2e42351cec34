"""A run that becomes a root of Orbax, killed again and again; whoever calls this looks at what each of them left."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import treering

__all__ = ["main"]

STEPS = (10, 20, 30)
KILLS = 36
_CHANGES = frozenset({"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir"})


def tree(step: int) -> dict[str, Any]:
    """Return what a step holds: arrays of one chunk and of several."""
    return {"w": np.arange(3000) + step, "big": np.full((3, 1 << 20), step, np.float64), "step": step}


def _convert(source: Path, target: Path, kill_at: int) -> int:
    """Convert a run, and end this process at one of the changes that it makes; return how many there were."""
    seen = 0

    def count(*_: object) -> None:
        nonlocal seen
        seen += 1
        if seen == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def listen(event: str, given: tuple[Any, ...]) -> None:
        if event in _CHANGES and str(target) in str(given[0]):
            count()

    sys.addaudithook(listen)
    treering.convert(source, target, to="orbax", progress=count)
    return seen


def _in_child(act: Callable[[], int]) -> int | None:
    """Return what a forked process returns; None where it was killed."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        with contextlib.suppress(BaseException):
            os.write(writing, str(act()).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return int(said) if said else None


def main() -> None:
    """Write a run and what is left of its conversions into the folder of the first argument."""
    folder = Path(sys.argv[1])
    for step in STEPS:
        note = {"step": step, "saved": "2026-01-01T00:00:00.000000Z", "metrics": {"loss": 1 / step}}
        metadata = {"treering": note | {"temporary": False, "branch": None}}
        treering.save(folder / "run" / f"step_{step:08d}", tree(step), metadata=metadata)
    changes = _in_child(lambda: _convert(folder / "run", folder / "whole", -1)) or 0
    points = sorted({1 + changes * number // KILLS for number in range(KILLS)})
    killed = 0
    for point in points:
        target = folder / f"killed-{point}"
        killed += _in_child(lambda: _convert(folder / "run", target, point)) is None  # noqa: B023 - called at once
    sys.stdout.write(f"{killed}\n")


if __name__ == "__main__":
    main()
