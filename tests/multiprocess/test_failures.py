"""Loops of several real processes that go on over failed saves, and that hear of a signal between saves."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

import treering as tr
from tests.multiprocess.failures import (
    cannot_hear,
    ends_between_saves,
    goes_on,
    hears_between_saves,
    hears_of_jax_between_saves,
    tells_the_others,
)
from tests.multiprocess.jobs import Crews, results, run_job, start_job

COUNTS = [2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.mark.parametrize("count", COUNTS)
def test_all_warn_of_what_fails_on_one_and_all_raise_when_it_is_too_much(
    tmp_path: Path, crews: Crews, count: int
) -> None:
    every = results(crews.run(goes_on, count, devices=1, arguments=[str(tmp_path)], timeout=150))
    for number, (*calls, end) in enumerate(every):
        raised = {step: error for step, _, error, _ in calls if error}
        assert raised == {8: "SavesFailedError"}, (number, calls)
        warned = [text for _, texts, _, _ in calls for text in texts]
        for step, text in zip((2, 4, 6, 7), warned, strict=True):
            assert f"the save of step {step} of" in text, (number, warned)
        for step in (2, 6):
            assert any(f"step {step} " in text and "No space left" in text for text in warned), (number, warned)
        assert "(2 in a row)" in warned[-1], (number, warned)
        # After each of the calls, whoever failed.
        assert [failures for _, _, _, failures in calls] == [0, 1, 0, 1, 0, 1, 2, 2, 0], (number, calls)
        assert end[:2] == [[5, 9], 9], (number, end)
    assert len({end[2] for *_, end in every}) == 1
    for step in (5, 9):
        assert np.asarray(tr.load(tmp_path / "run" / f"step_{step:08d}")["state"]["w"])[0, 0] == step
        assert tr.verify(tmp_path / "run" / f"step_{step:08d}").ok


def test_one_that_has_had_too_many_alone_tells_the_others(tmp_path: Path, crews: Crews) -> None:
    every = results(crews.run(tells_the_others, 2, devices=1, arguments=[str(tmp_path)], timeout=150))
    for number, (*calls, steps) in enumerate(every):
        raised = [step for step, error in calls if error == "SavesFailedError"]
        assert raised == [2 if number else 3], every
        assert steps == [4], every


@pytest.mark.parametrize("count", COUNTS)
def test_all_hear_of_a_signal_to_one_at_the_same_place_without_a_meeting(tmp_path: Path, count: int) -> None:
    first, *others = results(run_job(hears_between_saves, count, devices=1, arguments=[str(tmp_path)], timeout=150))
    assert all(other == first for other in others), (first, others)
    (step, batch, reason, meetings, has_deadline), told, after, steps = first
    assert (step, batch) >= (5, 1)
    assert (reason, meetings, has_deadline) == ("jax was told that a machine is going away", 0, True)
    assert told == [True, "SIGUSR1 came", True]
    assert (after, steps) == (False, [step])


def test_the_signal_that_ends_programs_reaches_all_where_treering_has_taken_it(tmp_path: Path) -> None:
    with start_job(ends_between_saves, 2, devices=1, arguments=[str(tmp_path)], heartbeat=100) as job:
        said = dict(zip(range(2), job.events(), strict=False))
        places = {text for _, text in said.values()}
        assert {number for number, _ in said.values()} == {0, 1}
        outcomes = job.wait(60)
    (place,) = places
    step, _, meetings, left = place.split()
    assert (meetings, left) == ("0", "None")
    # The first that ends may take jax's service along, and so the other.
    assert -signal.SIGTERM in [one.code for one in outcomes]
    assert tr.Run(tmp_path / "run").steps() == [int(step)]


@pytest.mark.slow
def test_what_jax_heard_reaches_all_between_saves(tmp_path: Path) -> None:
    first, second = results(run_job(hears_of_jax_between_saves, 2, devices=1, arguments=[str(tmp_path)], timeout=150))
    assert first == second
    step, _, reason, meetings, saved, after = first
    assert (reason, meetings, saved, after) == ("jax was told that a machine is going away", 0, True, False)
    assert tr.Run(tmp_path / "run").steps() == [step]


def test_where_jax_cannot_tell_the_others_it_is_refused_by_name(tmp_path: Path) -> None:
    for told in results(run_job(cannot_hear, 2, devices=1, arguments=[str(tmp_path)])):
        assert told.startswith("UnsupportedError: run.preempted tells the other processes of a signal by jax's handler")
        assert "call save_on_signal after jax.distributed.initialize" in told
