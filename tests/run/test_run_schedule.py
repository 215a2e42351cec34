"""When a run saves, alone and in a job of many processes: decided once, and seldom talked about."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treering as tr
from tests.drawn import drawn
from tests.run.schedules import Job
from tests.run.test_cadence import cadences
from treering.errors import ExistsError, MismatchError
from treering.rules import SaveEvery

ALONE_AND_TOGETHER = pytest.mark.parametrize("count", [1, 3])


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@contextmanager
def job(*args: Any, **wishes: Any) -> Iterator[Job]:
    with pytest.MonkeyPatch.context() as patch:
        yield Job(patch, *args, **wishes)


@ALONE_AND_TOGETHER
def test_without_rules_every_step_is_saved(patch: pytest.MonkeyPatch, count: int) -> None:
    run = Job(patch, None, count)
    assert all(run.one(step).save for step in (0, 1, 1, 7, 3))
    assert run.meetings == []


@ALONE_AND_TOGETHER
def test_rules_that_count_steps_are_followed_without_a_word(patch: pytest.MonkeyPatch, count: int) -> None:
    run = Job(patch, SaveEvery(steps=10) | SaveEvery(steps=25), count)
    assert [step for step in range(61) if run.one(step).save] == [0, 10, 20, 25, 30, 40, 50, 60]
    assert run.meetings == []


def test_multiples_count_from_the_latest_step_of_the_run(patch: pytest.MonkeyPatch) -> None:
    assert not Job(patch, SaveEvery(steps=10), 1).one(21, latest=20).save
    assert Job(patch, SaveEvery(steps=10), 1).one(21, latest=19).save
    assert not Job(patch, SaveEvery(steps=10), 1).one(21).save


@ALONE_AND_TOGETHER
def test_the_interval_begins_when_the_first_step_is_offered(patch: pytest.MonkeyPatch, count: int) -> None:
    run = Job(patch, SaveEvery(interval=10), count)
    saved = []
    for step in range(40):
        if run.one(step, latest=0 if step else None).save:
            saved.append(step)
        run.pass_time(1.0)
    assert saved == [10, 20, 30]


@ALONE_AND_TOGETHER
def test_force_saves_for_good_and_begins_the_interval_anew(patch: pytest.MonkeyPatch, count: int) -> None:
    run = Job(patch, SaveEvery(interval=10), count)
    run.one(1)
    run.pass_time(9.0)
    decision = run.one(2, force=True)
    assert (decision.save, decision.temporary, decision.reason) == (True, False, "force=True")
    run.pass_time(9.0)
    assert not run.one(3).save
    run.pass_time(1.0)
    assert run.one(4).temporary
    run.pass_time(11.0)
    assert not run.one(5, force=True).temporary


@ALONE_AND_TOGETHER
def test_a_rule_that_is_due_anyway_is_the_reason_though_it_is_forced(patch: pytest.MonkeyPatch, count: int) -> None:
    assert Job(patch, SaveEvery(steps=10), count).one(10, force=True).reason == "SaveEvery(steps=10)"


def test_what_was_not_saved_after_all_is_made_up_for(patch: pytest.MonkeyPatch) -> None:
    run = Job(patch, SaveEvery(steps=10) | SaveEvery(interval=60), 1)
    assert run.one(9).save is False
    assert run.one(10).save
    run.schedules[0].take_back()
    assert run.one(11).reason == "SaveEvery(steps=10): 10 was not saved"
    assert not run.one(12).save
    run.pass_time(61.0)
    assert run.one(13).temporary
    run.schedules[0].take_back()
    run.schedules[0].take_back()  # once is enough
    assert run.one(14).temporary
    assert not run.one(15).save


def test_the_clock_of_process_0_decides(patch: pytest.MonkeyPatch) -> None:
    run = Job(patch, SaveEvery(interval=10), 2)
    run.one(1)
    run.pass_time(1.0, 100.0)
    assert not run.one(2).save
    run.pass_time(9.5, 0.0)
    assert run.one(3).save


def test_they_meet_once_in_a_second_at_most_and_in_a_hundredth_of_a_short_interval(patch: pytest.MonkeyPatch) -> None:
    for interval, seconds, apart in [(600, 0.1, 10), (600, 0.02, 50), (600, 0.001, 100), (10, 0.01, 10), (600, 5.0, 1)]:
        run = Job(patch, SaveEvery(interval=interval), 2)
        for step in range(400):
            run.one(step)
            run.pass_time(seconds)
        gaps = [later - step for step, later in zip(run.meetings, run.meetings[1:], strict=False)]
        assert gaps[0] == 1
        assert set(gaps[1:]) <= {apart - 1, apart}  # a step less, for what a float makes of it


def test_they_meet_more_often_again_when_steps_become_slow(patch: pytest.MonkeyPatch) -> None:
    run = Job(patch, SaveEvery(interval=600), 2)
    for step in range(400):
        run.one(step)
        run.pass_time(0.001)
    before = len(run.meetings)
    for step in range(400, 700):
        run.one(step)
        run.pass_time(10.0)
    assert len(run.meetings) - before >= 198  # a hundred steps were agreed on, and from then on each


def test_a_step_that_counts_for_itself_is_saved_between_meetings(patch: pytest.MonkeyPatch) -> None:
    run = Job(patch, SaveEvery(steps=7) | SaveEvery(interval=600), 2)
    saved = []
    for step in range(1, 50):
        if run.one(step).save:
            saved.append(step)
        run.pass_time(0.01)
    assert saved == [7, 14, 21, 28, 35, 42, 49]


def test_what_is_said_between_meetings(patch: pytest.MonkeyPatch) -> None:
    run = Job(patch, SaveEvery(steps=70) | SaveEvery(interval=600), 2)
    for step in range(1, 40):
        decision = run.one(step)
        run.pass_time(0.05)
    assert "all processes check again at step" in decision.reason
    assert decision.next == 70


def test_going_back_to_an_older_step_does_not_skip_meetings(patch: pytest.MonkeyPatch) -> None:
    run = Job(patch, SaveEvery(interval=10), 2)
    for step in (1000, 1001, 1002):
        run.one(step)
    run.pass_time(11.0)
    assert run.one(5).save


def test_processes_at_different_steps_are_told_so(patch: pytest.MonkeyPatch) -> None:
    run = Job(patch, SaveEvery(interval=10), 3)
    with pytest.raises(MismatchError, match=r"save step 7 of 'runs/a': .*step 7 .*step 8 of 'a'; all processes"):
        run.offer(7, 7, 8)


# ------------------------------------------------------------------------------------------------------------ signals


def test_alone_a_signal_saves_the_next_step(patch: pytest.MonkeyPatch) -> None:
    run = Job(patch, SaveEvery(steps=100), 1, watching=True)
    assert not run.one(1).save
    run.send(0)
    decision = run.one(2)
    assert (decision.save, decision.final, decision.signum, decision.temporary) == (True, True, signal.SIGTERM, False)
    assert decision.reason == "SIGTERM came"


@pytest.mark.parametrize("process", [0, 2])
def test_a_signal_to_one_process_saves_on_all_at_the_next_meeting(patch: pytest.MonkeyPatch, process: int) -> None:
    run = Job(patch, SaveEvery(steps=1000), 3, watching=True)
    for step in range(1, 100):
        run.one(step)
        run.pass_time(0.125)
    run.send(process, signal.SIGUSR2)
    told = []
    for step in range(100, 110):
        decision = run.one(step)
        run.pass_time(0.125)
        if decision.final:
            told.append((step, decision.signum))
            for one in run.signals:
                one.noted = None
    assert len(told) == 1
    assert told[0][1] == signal.SIGUSR2
    assert told[0][0] <= 108  # within a second


def test_a_step_out_of_turn_is_temporary_where_such_steps_are(patch: pytest.MonkeyPatch) -> None:
    for cadence, temporary in [
        (None, False),
        (SaveEvery(steps=100), False),
        (SaveEvery(interval=60), True),
        (SaveEvery(steps=100) | SaveEvery(interval=60), True),
    ]:
        run = Job(patch, cadence, 1, watching=True)
        run.send(0)
        assert run.one(7).temporary is temporary
        assert not run.one(100).temporary or cadence == SaveEvery(interval=60)


@ALONE_AND_TOGETHER
def test_what_jax_has_heard_saves_at_once_and_no_signal_has_to_have_its_way(
    patch: pytest.MonkeyPatch, count: int
) -> None:
    run = Job(patch, SaveEvery(interval=600), count, watching=True)
    run.one(1)
    for one in run.signals:
        one.jax_has_told = True
    met = list(run.meetings)
    decision = run.one(2)
    assert run.meetings == met  # all have heard it from jax
    assert (decision.save, decision.final, decision.signum, decision.temporary) == (True, True, None, True)
    assert decision.reason == "jax was told that a machine is going away"
    assert not run.one(3).save


def test_who_waits_for_no_signal_is_told_of_none(patch: pytest.MonkeyPatch) -> None:
    run = Job(patch, SaveEvery(steps=100), 1)
    run.signals[0].jax_has_told = True
    assert not run.one(1).save


# --------------------------------------------------------------------------------------------------------- any course

_moves = st.lists(
    st.tuples(
        st.integers(-3, 9),  # steps on
        st.lists(st.floats(0, 40), min_size=1, max_size=3),  # seconds on each process
        st.sampled_from([None, None, None, None, 0, 1, 2]),  # who gets a signal
        st.sampled_from([False] * 7 + [True]),  # whether it is forced
    ),
    max_size=40,
)


@settings(max_examples=drawn(60))
@given(st.none() | cadences, st.booleans(), st.none() | st.integers(0, 5), _moves)
def test_all_processes_decide_alike_whatever_happens(
    cadence: Any, watching: bool, latest: int | None, moves: Any
) -> None:
    with job(cadence, 3, watching=watching) as run:
        step = 10
        waits: int | None = None  # steps offered since a signal came
        for stride, seconds, process, force in moves:
            step = max(0, step + stride)
            run.pass_time(*seconds)
            if watching and process is not None:
                run.send(process)
                waits = 0 if waits is None else waits
            decision = run.one(step, latest=latest, force=force)
            if force or cadence is None:
                assert decision.save
            if decision.final:
                assert waits is not None
                waits = None
                for one in run.signals:
                    one.noted = None
            elif waits is not None:
                waits += 1
                assert waits <= 100
        if not watching and (cadence is None or cadence.seconds is None):
            assert run.meetings == []


@settings(max_examples=drawn(60))
@given(cadences, st.lists(st.tuples(st.integers(1, 5), st.floats(0, 40)), max_size=40))
def test_one_process_alone_follows_the_rules_to_the_letter(cadence: Any, moves: Any) -> None:
    with job(cadence, 1) as run:
        step, saved_at, counted = 10, None, 9
        for stride, seconds in moves:
            now = run.clocks[0].now
            saved_at = now if saved_at is None else saved_at
            decision = run.one(step, latest=None)
            due, lasting = False, False
            for rule in getattr(cadence, "rules", (cadence,)):
                if rule.seconds is not None:
                    due |= now - saved_at >= rule.seconds
                else:
                    multiples = [n for n in range(counted + 1, step + 1) if n % rule.steps == 0]
                    lasting |= bool(multiples)
            assert (decision.save, decision.temporary) == (due or lasting, due and not lasting)
            if decision.save:
                saved_at, counted = now, step
            step += stride
            run.pass_time(seconds)


@pytest.mark.parametrize("again", [False, True])
def test_a_loop_that_goes_back_saves_the_steps_that_it_saved_before(tmp_path: Path, *, again: bool) -> None:
    run = tr.Run(tmp_path / "run", save_every=tr.SaveEvery(steps=100))
    saved = [step for step in range(0, 701, 7) if run.save(step, {"step": step})]
    if again:
        run.close()
        run = tr.Run(tmp_path / "run", save_every=tr.SaveEvery(steps=100))
    wanted = [step for step in saved if step >= 210]
    assert wanted[:2] == [301, 406]
    assert [step for step in range(210, 701, 7) if run.save(step, {"step": -step}, rollback=True)] == wanted
    run.wait()
    assert run.steps() == saved
    assert all(run.load(step) == {"step": -step} for step in wanted)


def test_a_refused_step_back_changes_nothing_of_what_is_due(tmp_path: Path) -> None:
    run = tr.Run(tmp_path / "run", save_every=SaveEvery(steps=3))
    assert run.save(1, {"step": 1}, force=True)
    with pytest.raises(ExistsError):
        run.save(0, {"step": 0}, force=True)
    assert [step for step in range(2, 8) if run.save(step, {"step": step})] == [3, 6]
