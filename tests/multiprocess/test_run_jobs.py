"""Runs in jobs of real processes: one clock and one word for all."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import jax.numpy as jnp
import pytest

import treering as tr
from tests.multiprocess.jobs import Crews, results, run_job
from tests.multiprocess.run_workers import (
    all_of_it,
    breaks_off_on_the_way_back,
    ends_for_good,
    finds_nothing_whole,
    follows,
    goes_back,
    goes_on_after_damage,
    saves_iterators,
    searches,
)
from tests.on_disk import step_path


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


def a_run(path: Path, *steps: int) -> Path:
    with tr.Run(path) as run:
        for step in steps:
            run.save(step, {"w": jnp.full((8, 4), float(step)), "count": jnp.int32(step)})
    return path


def hurt(path: Path, step: int) -> str:
    """Damage the data of a step; return the name of the file."""
    [file] = step_path(path, step).glob("data-*")
    data = file.read_bytes()
    file.write_bytes(data[:-3] + bytes([data[-3] ^ 4]) + data[-2:])
    return file.name


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("who", [0, 1])
def test_damage_that_one_process_sees_lets_all_go_back_to_the_same_step(
    tmp_path: Path, crews: Crews, joint: bool, who: int
) -> None:
    a_run(tmp_path / "0" / "run", 10, 20, 30)
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    name = hurt(tmp_path / str(who) / "run", 30)
    outcomes = results(crews.run(goes_back, 2, devices=1, arguments=[str(tmp_path), joint], timeout=120))
    for found in outcomes:
        for (step, least, greatest, [told]), wanted in zip(found, (20, 20, 10), strict=True):
            assert (step, least, greatest) == (wanted, wanted, wanted)
            assert "step 30: " in told
            assert name in told
            assert ("step 20: it was resumed 1 time" in told) == (wanted == 10)
    noted = [(tmp_path / each / "run" / ".run.json.resumed").exists() for each in "01"]
    assert noted == [True, False]  # process 0 alone writes


def test_where_one_process_sees_no_whole_step_all_raise(tmp_path: Path, crews: Crews) -> None:
    a_run(tmp_path / "0" / "run", 10, 20)
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    names = [hurt(tmp_path / str(process) / "run", step) for process, step in ((0, 10), (1, 20))]
    for told in results(crews.run(finds_nothing_whole, 2, devices=1, arguments=[str(tmp_path)])):
        assert "no step of the run" in told
        assert "step 10: process 0: leaf 'w' is damaged" in told or names[0] in told
        assert names[1] in told


def test_all_processes_save_on_after_damage(tmp_path: Path, crews: Crews) -> None:
    path = a_run(tmp_path / "run", 10, 20, 30)
    hurt(path, 30)
    outcomes = results(crews.run(goes_on_after_damage, 2, devices=1, arguments=[str(path)], timeout=120))
    assert outcomes[0] == [20, [25, 30], [30], [31]]
    assert outcomes[1][0] == 20
    assert tr.verify(path).ok


def test_all_follow_a_run_together_and_process_0_alone_is_called(tmp_path: Path, crews: Crews) -> None:
    zero, one = results(crews.run(follows, 2, devices=1, arguments=[str(tmp_path / "run")], timeout=120))
    assert (zero[0], one[0]) == ([1, 2, 4], [])
    assert zero[1] == [2]
    assert zero[2] == one[2] == [2, [2, 4], 4]
    assert not (tmp_path / "run" / ".leases").exists()


@pytest.mark.parametrize("fallback", [False, True])
def test_all_processes_resume_from_another_root_that_all_see(tmp_path: Path, crews: Crews, fallback: bool) -> None:
    a_run(tmp_path / "run", 10)
    other = str(a_run(tmp_path / "other" / "run", 10, 20))
    arguments = [str(tmp_path / "run"), [other, other], fallback]
    for found in results(crews.run(searches, 2, devices=1, arguments=arguments)):
        assert found == [20, 20, [10, 21], 21]
    assert tr.Run(other).steps() == [10, 20]
    # Of the next one only process 0 sees the step.
    a_run(tmp_path / "mine" / "run", 30)
    arguments = [str(tmp_path / "run"), [str(tmp_path / "mine" / "run"), other], fallback]
    for found in results(crews.run(searches, 2, devices=1, arguments=arguments)):
        assert found == ["refused", [1]]


def test_a_process_that_breaks_off_on_the_way_back_ends_it_for_all_and_counts_nothing(
    tmp_path: Path, crews: Crews
) -> None:
    path = a_run(tmp_path / "run", 10, 20, 30)
    hurt(path, 30)
    first, second = results(crews.run(breaks_off_on_the_way_back, 2, devices=1, arguments=[str(path)]))
    assert first[0].startswith("ProcessFailedError: could not load step 20 of")
    assert "no memory left for the model" in first[0]
    assert second[0] == "ValueError: no memory left for the model"
    assert [first[1:], second[1:]] == [[20, 1], [20, 1]]  # the one that failed was no resume
