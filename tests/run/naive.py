"""What rules mean, said once more and as plainly as can be; and rules and steps to try it on."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from treering.rules import AnyRule, KeepBest, KeepEvery, KeepLast, KeepLatest, KeepNear, KeepSteps, Policy, StepFacts

__all__ = ["METRICS", "facts_lists", "kept_by", "metric_values", "policies", "stays"]

METRICS = ("loss", "accuracy")

metric_values = st.one_of(
    st.sampled_from([0.0, -0.0, 0.25, 0.5, math.inf, -math.inf, math.nan]), st.floats(allow_nan=True)
)
_counts = st.integers(1, 5)
_rules: st.SearchStrategy[Policy] = st.one_of(
    st.builds(KeepLast, _counts),
    st.builds(lambda steps: KeepEvery(steps=steps), st.integers(1, 12)),
    st.builds(lambda seconds: KeepEvery(interval=seconds), st.sampled_from([0.5, 10, 60.0, 3600])),
    st.builds(
        lambda metric, n, mode: KeepBest(metric, n=n, mode=mode),
        st.sampled_from(METRICS),
        _counts,
        st.sampled_from(["min", "max"]),
    ),
    st.builds(lambda steps: KeepSteps(*steps), st.lists(st.integers(0, 40), max_size=3)),
    st.builds(lambda seconds: KeepLatest(duration=seconds), st.sampled_from([0.5, 10, 60.0, 3600])),
    st.builds(KeepNear, st.lists(st.integers(0, 50), min_size=1, max_size=3)),
)


def _joined(rules: list[Policy]) -> Policy:
    joined = rules[0]
    for rule in rules[1:]:
        joined = joined | rule
    return joined


policies: st.SearchStrategy[Policy] = st.lists(_rules, min_size=1, max_size=4).map(_joined)

_facts = st.builds(
    lambda step, saved, metrics, temporary: StepFacts(step=step, saved=saved, metrics=metrics, temporary=temporary),
    st.integers(0, 40),
    st.floats(0, 10_000),
    st.dictionaries(st.sampled_from(METRICS), metric_values),
    st.booleans(),
)
facts_lists = st.lists(_facts, max_size=12, unique_by=lambda fact: fact.step)


def kept_by(rule: Policy, facts: Iterable[StepFacts]) -> set[int]:
    """Return the steps that a rule keeps, by counting for each which others come before it."""
    steps = {fact.step: fact for fact in facts}
    match rule:
        case AnyRule(rules):
            return {step for one in rules for step in kept_by(one, steps.values())}
        case KeepLast(n):
            return {step for step in steps if sum(other > step for other in steps) < n}
        case KeepSteps(wanted):
            return {step for step in steps if step in wanted}
        case KeepNear(wanted):
            return {
                step for step in steps for one in wanted if all(abs(step - one) <= abs(other - one) for other in steps)
            }
        case KeepLatest(duration):
            return {step for step in steps if steps[max(steps)].saved - duration.total_seconds() <= steps[step].saved}
        case KeepBest(metric=metric, n=n, mode=mode):
            having = {step: fact.metrics[metric] for step, fact in steps.items() if metric in fact.metrics}
            if not having:
                return set(steps)
            having = {step: value if mode == "min" else -value for step, value in having.items() if value == value}  # noqa: PLR0124
            ranked = {step: (value, -step) for step, value in having.items()}
            return {step for step, rank in ranked.items() if sum(other < rank for other in ranked.values()) < n}
        case KeepEvery(steps=int() as every):
            return {step for step in steps if step in range(0, max(steps) + 1, every)}
    assert isinstance(rule, KeepEvery)
    assert rule.interval is not None
    kept: set[int] = set()
    last: float | None = None
    for step in sorted(steps):
        far = last is None or not (
            -rule.interval.total_seconds() < steps[step].saved - last < rule.interval.total_seconds()
        )
        if far:
            kept.add(step)
            last = steps[step].saved
    return kept


def stays(policy: Policy | None, facts: Iterable[StepFacts]) -> set[int]:
    """Return the steps of a run that stay."""
    facts = list(facts)
    lasting = [fact for fact in facts if not fact.temporary]
    kept = {fact.step for fact in lasting} if policy is None else kept_by(policy, lasting)
    newest: Any = {max(fact.step for fact in facts)} if facts else set()
    return kept | newest
