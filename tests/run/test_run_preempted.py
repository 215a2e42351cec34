"""Whether a job is to end soon, asked between saves; `tests/multiprocess/test_failures.py` has real jobs."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

import treering as tr
from tests import faults
from tests.jobs import be_process
from tests.run.schedules import Job
from treering.errors import UnsupportedError

TREE = {"w": np.arange(3.0)}


@pytest.fixture(autouse=True)
def heard() -> Iterator[list[int]]:
    """The signals that reach the handler that was there before."""
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda signum, frame: heard.append(signum))
    yield heard
    signal.signal(signal.SIGUSR1, before)


def test_the_save_after_it_is_the_last_whatever_the_rules_say(tmp_path: Path, heard: list[int]) -> None:
    with tr.Run(tmp_path / "run", save_every=tr.SaveEvery(steps=1000)) as run:
        run.save_on_signal(signal.SIGUSR1, grace=30)
        assert run.preempted(1) is None
        signal.raise_signal(signal.SIGUSR1)
        preemption = run.preempted(1)
        assert preemption is not None
        assert preemption.reason == "SIGUSR1 came"
        assert preemption.deadline is not None
        assert preemption.deadline - time.monotonic() == pytest.approx(30, abs=20)
        assert preemption.seconds_left is not None
        assert 10 < preemption.seconds_left <= 30
        assert run.preempted(2) is preemption
        saved = run.save(2, TREE)
        assert (saved.saved, saved.reason, heard) == (True, "SIGUSR1 came", [signal.SIGUSR1])
        assert not run.save(1001, TREE, force=False).temporary


def test_without_a_grace_there_is_no_deadline(tmp_path: Path) -> None:
    with tr.Run(tmp_path / "run") as run:
        run.save_on_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        preemption = run.preempted(1)
        assert preemption is not None
        assert (preemption.deadline, preemption.seconds_left) == (None, None)
    assert tr.run.Preemption(reason="late", deadline=time.monotonic() - 1).seconds_left == 0


@pytest.mark.parametrize("grace", [0, -1, float("inf"), float("nan"), True, "30"])
def test_a_grace_that_is_no_time_is_refused(tmp_path: Path, grace: float) -> None:
    with tr.Run(tmp_path / "run") as run, pytest.raises(UnsupportedError, match="a positive number of seconds"):
        run.save_on_signal(signal.SIGUSR1, grace=grace)


def test_all_of_a_job_answer_alike_and_meet_only_in_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, tr.SaveEvery(steps=1000), 3, watching=True)
    assert job.ask(1) == [None] * 3
    job.send(2, signal.SIGUSR1)
    assert job.ask(1, 1) == [None] * 3
    assert [one.has_told_jax for one in job.signals] == [False, False, True]
    for one in job.signals:
        one.jax_has_told = True  # where jax lets all hear it
    assert job.ask(1, 1) == [None] * 3  # this place was asked about
    answers = job.ask(2)
    assert [answer and answer.reason for answer in answers] == ["jax was told that a machine is going away"] * 3
    assert job.meetings == []
    decision = job.one(2)
    assert (decision.save, decision.final, decision.signum, decision.reason) == (
        True, True, signal.SIGUSR1, "SIGUSR1 came",
    )  # fmt: skip
    assert job.meetings == [2]
    for one in job.signals:
        one.noted = None
    assert not job.one(3).save
    assert all(job.ask(3))


def test_without_a_handler_nobody_meets_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, tr.SaveEvery(steps=1000), 2)
    for one in job.signals:
        one.jax_has_told = True
    assert all(job.ask(5))
    decision = job.one(5)
    assert (decision.save, decision.final, decision.signum) == (True, True, None)
    assert (job.meetings, job.one(6).save) == ([], False)


def test_jax_without_its_service_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tr.Run(tmp_path / "run")
    be_process(monkeypatch, 0, 2)
    with monkeypatch.context() as patch:
        off = RuntimeError("Preemption sync manager has not been initialized.")
        faults.fail(patch, multihost_utils, "reached_preemption_sync_point", off)
        with pytest.raises(UnsupportedError, match=r"jax_enable_preemption_service"):
            run.preempted(1)
    faults.answer(monkeypatch, multihost_utils, "reached_preemption_sync_point", False)
    assert run.preempted(2) is None
    assert jax.process_count() == 2
