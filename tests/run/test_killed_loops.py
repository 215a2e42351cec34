"""Trainings that are killed and taken up on other meshes: their losses are those of one never killed, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import treering as tr

pytestmark = pytest.mark.slow

_ROOT = Path(__file__).parents[2]
_LAST = 48
_AHEAD = 20


def _lines(name: str, folder: Path, devices: int, kill_after: int | None) -> list[tuple[int, str]]:
    """Let a program train, and kill it after it has printed so many lines; return these and what else it printed."""
    settings = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "tests.run.killed_loops", name, str(folder), str(_LAST)]
    found: list[tuple[int, str]] = []
    with subprocess.Popen(
        command, cwd=_ROOT, env={**os.environ, **settings}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        for line in program.stdout:
            number, loss = line.split()
            found.append((int(number), loss))
            if len(found) == kill_after:
                program.send_signal(signal.SIGKILL)
        _, errors = program.communicate()
    assert program.returncode == (0 if kill_after is None else -signal.SIGKILL), errors[-3000:]
    return found


@pytest.mark.parametrize("name", ["nnx", "equinox", "linen"])
def test_losses_after_a_kill_are_those_of_a_training_that_was_never_killed(name: str, tmp_path: Path) -> None:
    wanted = dict(_lines(name, tmp_path / "whole", 1, None))
    assert sorted(wanted) == list(range(_LAST))
    assert len(set(wanted.values())) > _LAST // 2
    chance = random.Random(name)
    lives = [_lines(name, tmp_path / "run", 4, chance.randrange(2, 11)), _lines(name, tmp_path / "run", 1, None)]
    for life in lives:
        assert dict(life) == {number: wanted[number] for number, _ in life}
    assert lives[-1][0][0] > 0  # something was saved before the kill
    assert len(lives[-1]) >= _AHEAD
    assert tr.Run(tmp_path / "run").latest() == _LAST - 1
