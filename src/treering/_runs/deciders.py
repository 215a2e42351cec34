"""The steps that decide that other steps go: before anything is removed, only these have to be looked at."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

from treering.retention import AnyRule, KeepBest, KeepEvery, KeepLast, KeepSteps, Policy, StepFacts, best_steps


@dataclasses.dataclass(frozen=True, slots=True)
class Deciders:
    """Steps that decide something."""

    of_presence: set[int] = dataclasses.field(default_factory=set)
    """By being there."""
    of_value: set[int] = dataclasses.field(default_factory=set)
    """By a metric, or by when they were saved."""


def deciders(policy: Policy | None, facts: Sequence[StepFacts], going: Sequence[int]) -> Deciders:
    """Return the steps by which a policy decides that others go.

    Args:
        policy: the policy; None where only temporary steps go.
        facts: all steps.
        going: the steps that go.

    Example:
        >>> facts = [StepFacts(step=step, saved=0.0, metrics={"loss": step}) for step in (1, 2, 3, 4, 5)]
        >>> deciders(KeepLast(2) | KeepBest("loss"), facts, [2, 3])
        Deciders(of_presence={4, 5}, of_value={1})
    """
    found = Deciders()
    if not going:
        return found
    found.of_presence.add(max(fact.step for fact in facts))
    lasting = [fact for fact in facts if not fact.temporary]
    for rule in policy.rules if isinstance(policy, AnyRule) else (policy,):
        if isinstance(rule, KeepLast):
            found.of_presence.update(rule.kept(lasting))
        elif isinstance(rule, KeepBest):
            best = best_steps(lasting, rule.metric, rule.mode)[: rule.n]
            # Where all are nan, one that has the metric decides that it is measured.
            having = [] if best else [fact.step for fact in lasting if rule.metric in fact.metrics][-1:]
            found.of_value.update(best, having)
        elif isinstance(rule, KeepEvery):
            found.of_value.update(_before(sorted(rule.kept(lasting)), going) if rule.interval is not None else ())
        elif not isinstance(rule, KeepSteps | None):  # a user's own
            found.of_value.update(fact.step for fact in facts)
    return found


def _before(chosen: Sequence[int], going: Sequence[int]) -> set[int]:
    """Return, for each step that goes, the last one before it that was chosen: it was saved too shortly after that."""
    return {chosen[place - 1] for step in going if (place := bisect.bisect(chosen, step))}
