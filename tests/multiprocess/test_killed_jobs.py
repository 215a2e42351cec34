"""A training whose job is killed, and that other numbers of processes take up: its losses are the same, bit for bit."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

import treering as tr
from tests.multiprocess.jobs import start_job
from tests.multiprocess.killed_jobs import trains

pytestmark = pytest.mark.slow

_LAST = 32
_AHEAD = 20


def losses_of(path: Path, count: int, kill: tuple[int, int] | None = None) -> dict[int, str]:
    """Let a job train; return the losses that process 0 said until the end, or until that process is killed."""
    found: dict[int, str] = {}
    with start_job(trains, count, devices=1, arguments=[str(path), _LAST], heartbeat=100) as job:
        for number, text in job.events():
            if number == 0:
                step, loss = text.split()
                found[int(step)] = loss
                if kill is not None and len(found) == kill[1]:
                    job.send(kill[0], signal.SIGKILL)
                    return found
                if int(step) == _LAST - 1:
                    break
        assert not any(one.code or one.error for one in job.wait(120))
    return found


@pytest.mark.parametrize("counts", [(2, 4, 1)])
def test_losses_after_kills_are_those_of_a_training_that_was_never_killed(
    tmp_path: Path, counts: tuple[int, ...]
) -> None:
    wanted = losses_of(tmp_path / "whole", 2)
    assert sorted(wanted) == list(range(_LAST))
    assert len(set(wanted.values())) > _LAST // 2
    chance = random.Random(str(counts))
    lives = [losses_of(tmp_path / "run", n, (chance.randrange(n), chance.randrange(2, 6))) for n in counts[:-1]]
    lives.append(losses_of(tmp_path / "run", counts[-1]))
    for life in lives:
        assert life == {number: wanted[number] for number in life}
    assert min(lives[-1]) > 0  # something was saved before the kills
    assert len(lives[-1]) >= _AHEAD
    assert tr.Run(tmp_path / "run").latest() == _LAST - 1
