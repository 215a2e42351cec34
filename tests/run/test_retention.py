"""Which steps stay: each rule by examples, all of them against a naive model, and as values."""

from __future__ import annotations

import math
import pickle
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.run.naive import facts_lists, kept_by, policies, stays
from treering import retention
from treering.errors import UnsupportedError
from treering.rules import (
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepLatest,
    KeepNear,
    KeepSteps,
    Policy,
    SaveEvery,
    StepFacts,
    best_steps,
    find_deciders,
    removable,
    retained,
)

NAMES = {name: getattr(retention, name) for name in retention.__all__ if name.startswith("Keep")}


def facts(*steps: int, **metrics: list[float]) -> list[StepFacts]:
    return [
        StepFacts(step=step, saved=60.0 * step, metrics={name: values[n] for name, values in metrics.items()})
        for n, step in enumerate(steps)
    ]


def wrong(value: Any) -> Any:
    """What a type checker would not let through."""
    return value


def kept(policy: Policy | None, given: list[StepFacts]) -> list[int]:
    return [verdict.step for verdict in retained(policy, given) if verdict.kept]


# ---------------------------------------------------------------------------------------------------- against a model


@given(policies, facts_lists)
def test_a_policy_keeps_what_the_model_keeps(policy: Policy, given: list[StepFacts]) -> None:
    assert set(policy.kept(given)) == kept_by(policy, given)


@given(st.none() | policies, facts_lists)
def test_what_stays_is_what_the_model_says(policy: Policy | None, given: list[StepFacts]) -> None:
    verdicts = retained(policy, given)
    assert {verdict.step for verdict in verdicts if verdict.kept} == stays(policy, given)
    assert [verdict.step for verdict in verdicts] == sorted(fact.step for fact in given)
    assert all(verdict.reasons for verdict in verdicts)


@given(st.none() | policies, facts_lists)
def test_once_the_others_are_removed_all_stay(policy: Policy | None, given: list[StepFacts]) -> None:
    left = [fact for fact in given if fact.step in stays(policy, given)]
    assert kept(policy, left) == sorted(fact.step for fact in left)


@given(policies, facts_lists, st.randoms(use_true_random=False))
def test_the_order_of_the_steps_does_not_matter(policy: Policy, given: list[StepFacts], random: Any) -> None:
    shuffled = random.sample(given, len(given))
    assert retained(policy, shuffled) == retained(policy, given)


@given(policies, policies, policies, facts_lists)
def test_either_rule_is_enough(a: Policy, b: Policy, c: Policy, given: list[StepFacts]) -> None:
    assert set((a | b).kept(given)) == set(a.kept(given)) | set(b.kept(given)) == set((b | a).kept(given))
    assert (a | b) | c == a | (b | c)
    assert repr((a | b) | c) == repr(a | (b | c))


@given(policies)
def test_the_text_of_a_policy_is_the_policy(policy: Policy) -> None:
    again = eval(repr(policy), {**NAMES, "timedelta": timedelta})
    assert (again, hash(again), repr(again)) == (policy, hash(policy), repr(policy))
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert policy | policy == policy


# ---------------------------------------------------------------------------------------------------------- by example


def test_the_newest_stays_though_no_rule_keeps_it() -> None:
    given = facts(1, 2, 3, loss=[0.1, 0.2, 0.3])
    assert kept(KeepBest("loss"), given) == [1, 3]
    assert retained(KeepBest("loss"), given)[-1].reasons == ("the newest",)
    assert retained(KeepLast(1), given)[-1].reasons == ("the newest", "KeepLast(1)")


def test_every_rule_that_keeps_a_step_is_named() -> None:
    policy = KeepLast(2) | KeepEvery(steps=2) | KeepBest("loss", n=2, mode="max") | KeepSteps(2)
    said = {verdict.step: verdict.reasons for verdict in retained(policy, facts(1, 2, 3, 4, loss=[1, 2, 0, 0]))}
    assert said == {
        1: ("KeepBest('loss', n=2, mode='max')",),
        2: ("KeepEvery(steps=2)", "KeepBest('loss', n=2, mode='max')", "KeepSteps(2)"),
        3: ("KeepLast(2)",),
        4: ("the newest", "KeepLast(2)", "KeepEvery(steps=2)"),
    }


def test_temporary_steps_go_when_there_is_a_newer_one_and_take_nobodys_place() -> None:
    given = [
        StepFacts(step=1, saved=0.0),
        StepFacts(step=2, saved=1.0, temporary=True, metrics={"loss": -1.0}),
        StepFacts(step=3, saved=2.0),
        StepFacts(step=4, saved=3.0, temporary=True),
    ]
    assert kept(KeepLast(2) | KeepBest("loss"), given) == [1, 3, 4]
    assert kept(None, given) == [1, 3, 4]
    assert [verdict.reasons for verdict in retained(None, given)] == [
        ("all are kept",),
        ("temporary, and 3 came after it",),
        ("all are kept",),
        ("the newest",),
    ]


def test_a_step_without_the_metric_or_with_nan_is_never_best() -> None:
    given = [*facts(1, 2, 3, loss=[math.nan, math.inf, 0.5]), StepFacts(step=4, saved=0.0), *facts(5, other=[0.0])]
    assert best_steps(given, "loss") == [3, 2]
    assert best_steps(given, "loss", "max") == [2, 3]
    assert list(KeepBest("loss", n=5).kept(given)) == [2, 3]


def test_before_a_step_has_the_metric_all_stay() -> None:
    """A misspelt name must not be the end of the steps that it was to keep."""
    given = facts(1, 2, 3, loss=[0.1, 0.2, 0.3])
    assert kept(KeepLast(1) | KeepBest("los"), given) == [1, 2, 3]
    assert kept(KeepLast(1) | KeepBest("loss"), given) == [1, 3]


def test_of_two_alike_the_later_is_best() -> None:
    assert best_steps(facts(1, 2, 3, loss=[0.5, 0.5, 0.5]), "loss") == [3, 2, 1]
    assert best_steps(facts(1, 2, 3, loss=[0.0, -0.0, 1.0]), "loss", "max") == [3, 2, 1]


def test_an_interval_counts_from_the_step_that_was_kept_before() -> None:
    hours = KeepEvery(interval=timedelta(hours=1))
    assert list(hours.kept(facts(0, 59, 61, 119, 121, 200))) == [0, 61, 121, 200]


def test_a_clock_that_was_set_back_ends_no_interval_for_good() -> None:
    given = [StepFacts(step=step, saved=saved) for step, saved in enumerate([1e6, 1e6 + 5, 0.0, 5.0, 10.0])]
    assert list(KeepEvery(interval=10).kept(given)) == [0, 2, 4]


def test_a_pause_or_a_clock_that_was_set_back_makes_no_step_old() -> None:
    policy = KeepLatest(duration=150)
    assert kept(policy, facts(1, 2, 3, 4)) == [2, 3, 4]
    late = [*facts(1, 2, 3), StepFacts(step=4, saved=86_400.0)]
    assert kept(policy, late) == [4]
    assert kept(policy, [*late, StepFacts(step=5, saved=100.0)]) == [1, 2, 3, 4, 5]


def test_a_temporary_step_says_not_how_old_the_others_are() -> None:
    late = StepFacts(step=4, saved=86_400.0, temporary=True)
    assert kept(KeepLatest(duration=150), [*facts(1, 2, 3), late]) == [1, 2, 3, 4]


@given(
    wanted=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    steps=st.sets(st.integers(0, 60), min_size=1, max_size=15),
)
def test_the_nearest_of_all_steps_is_kept_though_others_are_removed_as_they_come(
    wanted: list[int], steps: set[int]
) -> None:
    there: list[int] = []
    for step in sorted(steps):
        there.append(step)
        there = kept(KeepNear(wanted), facts(*there))
    nearest = {step for one in wanted for step in steps if abs(step - one) == min(abs(each - one) for each in steps)}
    assert set(there) == nearest | {max(steps)}


@given(policies, facts_lists)
def test_what_decides_alone_decides_the_same(policy: Policy, given: list[StepFacts]) -> None:
    going = removable(policy, given)
    by_presence, by_value = find_deciders(policy, given, going)
    named = [fact for fact in given if fact.step in {*going, *by_presence, *by_value}]
    assert set(going) <= set(removable(policy, named))


def test_nothing_is_kept_of_nothing() -> None:
    assert retained(KeepLast(1), []) == retained(None, []) == []
    assert KeepSteps().kept(facts(1, 2)) == {}


def test_texts_are_what_one_would_write() -> None:
    policy = KeepLast(3) | KeepEvery(steps=1000) | KeepEvery(interval=7200) | KeepBest("loss") | KeepSteps(9, 1, 9)
    policy = policy | KeepLatest(duration=90) | KeepNear([9, 1, 9])
    assert repr(policy).split(" | ") == [
        "KeepLast(3)",
        "KeepEvery(steps=1000)",
        "KeepEvery(interval=timedelta(hours=2))",
        "KeepBest('loss', mode='min')",
        "KeepSteps(1, 9)",
        "KeepLatest(duration=timedelta(seconds=90))",
        "KeepNear([1, 9])",
    ]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: KeepLast(0), "n is 0"),
        (lambda: KeepLast(True), "n is True"),
        (lambda: KeepLast(wrong(2.0)), "n is 2.0"),
        (KeepEvery, "steps= or interval="),
        (lambda: KeepEvery(steps=1, interval=1), "steps= or interval="),
        (lambda: KeepEvery(steps=0), "steps is 0"),
        (lambda: KeepEvery(interval=timedelta()), "interval"),
        (lambda: KeepBest(""), "metric is ''"),
        (lambda: KeepBest("loss", n=-1), "n is -1"),
        (lambda: KeepBest("loss", mode=wrong("least")), "mode is 'least'"),
        (lambda: KeepSteps(1, -2), "-2 is not a step"),
        (lambda: KeepNear([]), "name steps"),
        (lambda: KeepNear(wrong(3)), "steps is 3"),
        (lambda: KeepNear(wrong("3")), "steps is '3'"),
        (lambda: KeepNear([wrong(1.5)]), "1.5 is not a step"),
        (lambda: KeepLatest(duration=0), "duration is 0"),
        (lambda: KeepSteps(wrong("3")), "'3' is not a step"),
        (lambda: KeepSteps(2**63), r"is not a step; steps are ints from 0 to 2\*\*63 - 1"),
        (lambda: best_steps([], "loss", wrong("most")), "mode is 'most'"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, told: str) -> None:
    with pytest.raises(UnsupportedError, match=told):
        make()


def test_a_policy_is_joined_with_policies_only() -> None:
    with pytest.raises(TypeError):
        KeepLast(1) | wrong(3)


def test_values_do_not_change() -> None:
    named = {
        "n": KeepLast(1),
        "steps": KeepEvery(steps=1),
        "metric": KeepBest("loss"),
        "rules": KeepLast(1) | KeepSteps(2),
    }
    for name, policy in named.items():
        with pytest.raises(AttributeError):
            setattr(policy, name, 2)
        assert not hasattr(policy, "__dict__")


def test_a_rule_of_ones_own_composes() -> None:
    class Even(Policy):
        def kept(self, facts: Any) -> dict[int, tuple[str, ...]]:
            return {fact.step: ("Even()",) for fact in facts if fact.step % 2 == 0}

    assert kept(Even() | KeepSteps(1), facts(1, 2, 3, 4, 5)) == [1, 2, 4, 5]


class Answering(Policy):
    """A rule that answers what it is told to, and cannot be hashed."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answering) and self.answer == other.answer

    def kept(self, facts: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (ZeroDivisionError("no loss"), "the rule Answering raised ZeroDivisionError: no loss; no step was removed"),
        (None, "returned None, not steps with texts"),
        ([1, 2], "returned a list, not steps"),
        ({"1": ("why",)}, "not steps with texts"),
        ({1: "why"}, "not steps with texts"),
        ({1: ()}, "not steps with texts"),
        ({1: (2,)}, "not steps with texts"),
    ],
)
def test_a_rule_of_ones_own_that_fails_removes_nothing(answer: Any, told: str) -> None:
    for policy in (Answering(answer), KeepLast(1) | Answering(answer)):
        for ask in (retained, removable):
            with pytest.raises(UnsupportedError, match=told):
                ask(policy, facts(1, 2, 3))


def test_a_rule_of_ones_own_may_be_without_hash_and_name_steps_that_are_not_there() -> None:
    same = Answering({2: ["why"], 100: ["why"]})
    assert isinstance(same | Answering(same.answer), Answering)
    assert kept(same | KeepLast(1), facts(1, 2, 3)) == [2, 3]


@pytest.mark.parametrize("rule", [KeepEvery, SaveEvery])
@pytest.mark.parametrize(("given", "named"), [((3,), {}), ((), {"step": 3})])
def test_a_rule_of_every_nth_step_names_itself_and_its_keywords(
    rule: Any, given: tuple[int, ...], named: dict[str, int]
) -> None:
    with pytest.raises(TypeError, match=rf"^{rule.__name__} takes steps= or interval=, as in {rule.__name__}\(steps="):
        rule(*given, **named)
