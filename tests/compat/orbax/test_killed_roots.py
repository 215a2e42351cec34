"""A run that becomes a root, killed in the middle: Orbax never sees a half step, and the next call ends it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

import treering
from torture.converted_roots import STEPS, tree

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
logging.getLogger("absl").setLevel(logging.ERROR)

ROOT = Path(__file__).parents[3]


def _steps(root: Path) -> list[int]:
    """Return the steps that Orbax sees, each of which it restores as it was saved."""
    with ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        steps = list(manager.all_steps())
        for step in steps:
            found, wanted = manager.restore(step), tree(step)
            assert found.keys() == wanted.keys()
            assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
            assert manager.metrics(step) == {"loss": 1 / step}
    return steps


def test_no_half_step_is_seen(tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "OPENBLAS_NUM_THREADS": "1",  # children are forked from a process with one thread
        "PYTHONWARNINGS": "ignore::RuntimeWarning",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-m", "torture.converted_roots", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 30
    assert _steps(tmp_path / "whole") == list(STEPS)
    counts = set()
    for number, root in enumerate(sorted(tmp_path.glob("killed-*"))):
        steps = _steps(root)
        counts.add(len(steps))
        assert steps == list(STEPS[: len(steps)])
        if number % 4 == 0:
            treering.convert(tmp_path / "run", root, to="orbax")
            assert _steps(root) == list(STEPS)
            assert sorted(place.name for place in root.iterdir()) == sorted(map(str, STEPS))
    assert {0, 1, 2} <= counts
