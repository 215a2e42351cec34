"""Rules of retention over the whole life of a run: saves, removals that are cut short, other rules, other clocks."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.drawn import drawn
from tests.run.naive import METRICS, metric_values, policies, stays
from treering.rules import Policy, StepFacts, retained


class Retention(RuleBasedStateMachine):
    """A run of which only the facts exist, beside all that was ever saved of it."""

    @initialize(policy=st.none() | policies)
    def begin(self, policy: Policy | None) -> None:
        self.policy = policy
        self.clock = 1e6
        self.there: dict[int, StepFacts] = {}
        self.ever: dict[int, StepFacts] = {}

    @rule(
        stride=st.integers(1, 9),
        seconds=st.floats(-5000, 5000),
        metrics=st.dictionaries(st.sampled_from(METRICS), metric_values),
        temporary=st.booleans(),
        done=st.integers(0, 3),
    )
    def save(self, stride: int, seconds: float, metrics: dict[str, float], temporary: bool, done: int) -> None:
        """Commit a step; of the removals that follow only some are done, if there are more than three left to do."""
        self.clock += seconds  # a clock may be set back
        step = max(self.ever, default=-1) + stride
        facts = StepFacts(step=step, saved=self.clock, metrics=metrics, temporary=temporary)
        self.there[step] = self.ever[step] = facts
        self._remove(done if done < 3 else None)

    @rule()
    def collect(self) -> None:
        self._remove(None)
        # Rules that look at what is left say what they would say of all that ever was.
        lasting = [facts for facts in self.ever.values() if not facts.temporary]
        newest = [facts for facts in self.ever.values() if facts.step == max(self.ever)]
        assert set(self.there) == stays(self.policy, {facts.step: facts for facts in [*lasting, *newest]}.values())

    @precondition(lambda self: self.there)
    @rule(policy=st.none() | policies)
    def go_on_with_other_rules(self, policy: Policy | None) -> None:
        self._remove(None)
        self.policy = policy
        self.ever = dict(self.there)

    @precondition(lambda self: self.there)
    @rule(data=st.data(), stride=st.integers(0, 3))
    def go_on_from_an_older_step(self, data: Any, stride: int) -> None:
        """Overwrite: what was saved later goes."""
        step = data.draw(st.sampled_from(sorted(self.there))) + stride
        self.there = {number: facts for number, facts in self.there.items() if number < step}
        self.there[step] = StepFacts(step=step, saved=self.clock)
        self._remove(None)
        self.ever = dict(self.there)

    @invariant()
    def the_newest_is_there(self) -> None:
        if getattr(self, "ever", None):
            assert max(self.ever) in self.there

    def _remove(self, most: int | None) -> None:
        verdicts = retained(self.policy, [dataclasses.replace(facts) for facts in self.there.values()])
        assert {verdict.step for verdict in verdicts if verdict.kept} == stays(self.policy, self.there.values())
        for verdict in [verdict for verdict in verdicts if not verdict.kept][:most]:
            del self.there[verdict.step]


TestRetention = Retention.TestCase
TestRetention.settings = settings(max_examples=drawn(60), stateful_step_count=30)
