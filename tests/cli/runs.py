"""Runs that the tests of the command line look at, made from their parts so that every step has its time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import treering
from tests.on_disk import note_step, step_path, with_note

BEGAN = 1_700_000_000.0


def add_step(
    run: Path,
    step: int,
    *,
    metrics: Mapping[str, float] | None = None,
    temporary: bool = False,
    keep: str | None = None,
    **noted_of_it: Any,
) -> Path:
    """Save a step a minute after the one before it, and note it as a run does."""
    note = with_note({}, step=step, saved=BEGAN + 60 * step, metrics=metrics, temporary=temporary)
    path = step_path(run, step)
    tree = {"w": np.arange(100.0) + step, "step": step}
    treering.save(path, tree, metadata=note)
    note_step(run, step, keep=keep, **noted_of_it)
    return path


def a_run(path: Path, *steps: int, keep: str | None = None) -> Path:
    """A run with these steps, whose loss falls."""
    for step in steps:
        add_step(path, step, metrics={"loss": 10.0 / (step + 1)}, keep=keep, seconds=0.5)
    return path
