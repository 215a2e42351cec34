"""Runs in jobs of real processes: one clock and one word for all."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import treering as tr
from tests.multiprocess.jobs import Crews, results, run_job
from tests.multiprocess.run_workers import all_of_it, ends_for_good, follows, saves_iterators


def test_all_processes_save_the_same_steps_and_hear_the_same_word(tmp_path: Path) -> None:
    first, second = results(run_job(all_of_it, 2, devices=2, arguments=[str(tmp_path)], timeout=150))
    assert first == second
    (saved, heard, steps), (step, count, initialised), of_jax = first
    assert heard
    last, temporary, reason = saved[-1]
    assert (temporary, reason) == (last % 5 != 0, "SIGUSR1 came")
    assert 7 <= last <= 7 + 100  # they meet again after a hundred steps at most
    assert all(number % 5 == 0 and not temporary for number, temporary, _ in saved[:-1])
    assert steps[-1] == last
    assert (step, count, initialised) == (last, last, ["new"])
    assert len(of_jax) == 1
    assert of_jax[0][2] == "jax was told that a machine is going away"
    assert tr.Run(tmp_path / "other").steps() == [of_jax[0][0]]


@pytest.mark.slow
def test_a_signal_that_ends_programs_ends_all_of_them_after_a_last_step(tmp_path: Path) -> None:
    outcomes = run_job(ends_for_good, 2, devices=1, arguments=[str(tmp_path / "run")], timeout=120)
    # The first that ends may take jax's service along, and so the other.
    assert outcomes[1].code == -signal.SIGTERM or outcomes[0].code == -signal.SIGTERM
    assert not any(one.late or one.result for one in outcomes)
    run = tr.Run(tmp_path / "run")
    last = run.latest()
    assert last is not None
    assert last >= 7
    assert int(run.load()["count"]) == last


def test_iterators_that_differ_are_refused_on_all_processes(tmp_path: Path, crews: Crews) -> None:
    for told, steps, count in results(crews.run(saves_iterators, 2, devices=1, arguments=[str(tmp_path / "run")])):
        assert "leaf 'data/train/count' differs on process 1" in told
        assert (steps, count) == ([2], 5)


def test_all_follow_a_run_together_and_process_0_alone_is_called(tmp_path: Path, crews: Crews) -> None:
    zero, one = results(crews.run(follows, 2, devices=1, arguments=[str(tmp_path / "run")], timeout=120))
    assert (zero[0], one[0]) == ([1, 2, 4], [])
    assert zero[1] == [2]
    assert zero[2] == one[2] == [2, [2, 4], 4]
    assert not (tmp_path / "run" / ".leases").exists()
