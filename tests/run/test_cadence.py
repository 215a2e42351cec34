"""When to save: by steps, by time, by either; and as values."""

from __future__ import annotations

import itertools
import pickle
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treering.errors import UnsupportedError
from treering.rules import Cadence, Decision, LastSave, SaveEvery

START = LastSave(step=0, time=0.0)

rules = st.one_of(
    st.builds(lambda steps: SaveEvery(steps=steps), st.integers(1, 12)),
    st.builds(lambda seconds: SaveEvery(interval=seconds), st.sampled_from([0.5, 1, 30.0, 600])),
)
cadences: st.SearchStrategy[Cadence] = st.lists(rules, min_size=1, max_size=4).map(
    lambda found: list(itertools.accumulate(found, lambda joined, rule: joined | rule))[-1]
)


def wrong(value: Any) -> Any:
    """What a type checker would not let through."""
    return value


def walked(cadence: Cadence, offered: list[tuple[int, float]], first: int = 0) -> list[tuple[int, Decision]]:
    """Offer steps at times, as a loop does; return those that are saved."""
    last = LastSave(step=first, time=0.0)
    saved = []
    for step, now in offered:
        decision = cadence.decide(step, now, last)
        if decision.save:
            saved.append((step, decision))
            last = LastSave(step=step, time=now)
        else:
            assert decision.next is None or decision.next > step
            assert decision.reason
    return saved


def test_multiples_are_saved_for_good() -> None:
    saved = walked(SaveEvery(steps=100), [(step, 0.0) for step in range(1, 1001)])
    assert [step for step, _ in saved] == list(range(100, 1001, 100))
    assert not any(decision.temporary for _, decision in saved)


def test_step_0_is_a_multiple() -> None:
    assert SaveEvery(steps=100).decide(0, 0.0, LastSave(step=-1, time=0.0)).save


@given(st.integers(1, 20), st.lists(st.integers(1, 30), max_size=30), st.integers(0, 100))
def test_a_multiple_that_a_loop_jumps_over_is_made_up_for_once(every: int, strides: list[int], first: int) -> None:
    offered = list(itertools.accumulate(strides, initial=first))[1:]
    saved = [step for step, _ in walked(SaveEvery(steps=every), [(step, 0.0) for step in offered], first)]
    # One step for each stretch from one multiple to the next that the loop touches, the first there is.
    assert saved == [later for step, later in itertools.pairwise([first, *offered]) if later // every > step // every]


def test_the_next_step_is_said() -> None:
    decision = SaveEvery(steps=100).decide(101, 0.0, LastSave(step=100, time=0.0))
    assert (decision.save, decision.next, decision.reason) == (False, 200, "SaveEvery(steps=100): the next is 200")
    decision = (SaveEvery(steps=100) | SaveEvery(steps=30)).decide(101, 0.0, LastSave(step=100, time=0.0))
    assert decision.next == 120
    decision = SaveEvery(interval=60).decide(101, 20.0, LastSave(step=100, time=0.0))
    assert decision.next is None
    assert "the next is in 40.0 s" in decision.reason


def test_an_interval_saves_for_the_time_being() -> None:
    saved = walked(SaveEvery(interval=10), [(step, 3.0 * step) for step in range(1, 15)])
    assert [step for step, _ in saved] == [4, 8, 12]
    assert all(decision.temporary for _, decision in saved)


def test_a_save_of_either_kind_begins_the_interval_anew() -> None:
    cadence = SaveEvery(steps=5) | SaveEvery(interval=10)
    saved = walked(cadence, [(step, 4.0 * step) for step in range(1, 11)])
    assert [(step, decision.temporary) for step, decision in saved] == [(3, True), (5, False), (8, True), (10, False)]


@given(cadences, st.lists(st.tuples(st.integers(1, 9), st.floats(0, 1000)), max_size=30))
def test_either_rule_is_enough(cadence: Cadence, strides: list[tuple[int, float]]) -> None:
    last, step, now = START, 0, 0.0
    parts = getattr(cadence, "rules", (cadence,))
    for stride, seconds in strides:
        step, now = step + stride, now + seconds
        said = [rule.decide(step, now, last) for rule in parts]
        decision = cadence.decide(step, now, last)
        assert decision.save == any(one.save for one in said)
        assert decision.temporary == (decision.save and not any(one.save and not one.temporary for one in said))
        if decision.save:
            last = LastSave(step=step, time=now)


@given(cadences, cadences, cadences)
def test_the_text_of_a_cadence_is_the_cadence(a: Cadence, b: Cadence, c: Cadence) -> None:
    joined = (a | b) | c
    assert joined == a | (b | c)
    again = eval(repr(joined), {"SaveEvery": SaveEvery, "timedelta": timedelta})
    assert (again, hash(again)) == (joined, hash(joined))
    assert pickle.loads(pickle.dumps(joined)) == joined


def test_the_shortest_interval_is_known() -> None:
    assert SaveEvery(steps=3).seconds is None
    assert (SaveEvery(steps=3) | SaveEvery(steps=4)).seconds is None
    assert (SaveEvery(steps=3) | SaveEvery(interval=60) | SaveEvery(interval=5)).seconds == 5.0


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (SaveEvery, "steps= or interval="),
        (lambda: SaveEvery(steps=1, interval=1), "steps= or interval="),
        (lambda: SaveEvery(steps=0), "steps is 0"),
        (lambda: SaveEvery(steps=True), "steps is True"),
        (lambda: SaveEvery(steps=wrong(1e3)), "steps is 1000.0"),
        (lambda: SaveEvery(interval=-1), "interval"),
        (lambda: SaveEvery(interval=wrong("10 min")), "interval is '10 min'"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, told: str) -> None:
    with pytest.raises(UnsupportedError, match=told):
        make()


def test_a_cadence_is_joined_with_cadences_only() -> None:
    with pytest.raises(TypeError):
        SaveEvery(steps=1) | wrong(3)
