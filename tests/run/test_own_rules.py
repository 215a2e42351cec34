"""A retention rule of the user's own: in a run, composed, as text, and on the command line; and one that fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering as tr
from tests.command import inside
from treering.errors import UnsupportedError
from treering.retention import KeepLatest, KeepNear, Policy, StepFacts
from treering.rules import find_deciders

TREE = {"w": np.arange(4.0)}


@dataclasses.dataclass(frozen=True)
class KeepBelow(Policy):
    """Keep the steps whose metric lies below a value."""

    metric: str
    value: float

    def kept(self, facts: Sequence[StepFacts]) -> dict[int, tuple[str, ...]]:
        return {fact.step: (repr(self),) for fact in facts if fact.metrics.get(self.metric, self.value) < self.value}


class Failing(Policy):
    """A rule with an error that shows once there are three steps."""

    def kept(self, facts: Sequence[StepFacts]) -> Any:
        return {facts[0].step: ("the first",)} if len(facts) < 3 else facts[0].metrics["loss"]  # as a user errs

    def __repr__(self) -> str:
        return "Failing()"


def save_losses(run: tr.Run, *losses: float) -> None:
    for step, loss in enumerate(losses, 1):
        run.save(step, TREE, metrics={"loss": loss}).result()


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_a_run_keeps_what_a_rule_of_ones_own_keeps(place: str, tmp_path: Path) -> None:
    path: Any = tmp_path / "run" if place == "disk" else f"memory://own-rules-{tmp_path.name}/run"
    policy = tr.KeepLast(1) | KeepBelow("loss", 0.5)
    with tr.Run(path, keep=policy) as run:
        save_losses(run, 0.9, 0.4, 0.6, 0.3, 0.8)
    assert run.steps() == [2, 4, 5]
    assert repr(policy) == "KeepLast(1) | KeepBelow(metric='loss', value=0.5)"
    reasons = {verdict.step: verdict.reasons for verdict in tr.Run(path, keep=policy).gc()}
    assert reasons[2] == ("KeepBelow(metric='loss', value=0.5)",)
    assert reasons[5] == ("the newest", "KeepLast(1)")


def test_an_error_in_a_rule_is_told_and_removes_nothing(tmp_path: Path) -> None:
    run = tr.Run(tmp_path / "run", keep=Failing())
    save_losses(run, 0.9, 0.4)
    with pytest.raises(UnsupportedError, match="the rule Failing returned a float, not steps with texts; no step was"):
        run.save(3, TREE, metrics={"loss": 0.5}).result()
    run.close()
    assert run.steps() == [1, 2, 3]  # the step is durable all the same
    for dry_run in (True, False):
        with pytest.raises(UnsupportedError, match="the rule Failing returned"):
            run.gc(dry_run=dry_run)
    assert tr.Run(tmp_path / "run").steps() == [1, 2, 3]
    assert tr.Run(tmp_path / "run").metrics(3) == {"loss": 0.5}


def test_the_command_line_shows_a_rule_that_it_does_not_know_and_removes_nothing_by_it(tmp_path: Path) -> None:
    with tr.Run(tmp_path / "run", keep=KeepBelow("loss", 0.5) | tr.KeepLast(1)) as run:
        save_losses(run, 0.4, 0.3, 0.9)
    said = inside("log", str(run.path), code=0)[0]
    assert "KeepBelow(metric='loss', value=0.5) | KeepLast(1)" in said
    assert "the retention rules cannot be read" in said
    for more in ([], ["--yes"]):
        refused = inside("gc", str(run.path), *more, code=2)[1]
        assert "is not a rule that this version knows" in refused
        assert "run.gc() applies rules of a program's own" in refused
    assert run.steps() == [1, 2, 3]
    inside("gc", str(run.path), "--keep", "KeepLast(1)", "--yes", code=0)
    assert run.steps() == [3]


def test_the_command_line_knows_the_rules_of_times_and_of_nearness(tmp_path: Path) -> None:
    with tr.Run(tmp_path / "run", keep=KeepLatest(duration=3600) | KeepNear(steps=[2])) as run:
        save_losses(run, 0.4, 0.3, 0.9)
    assert run.steps() == [1, 2, 3]
    said = inside("log", str(run.path), code=0)[0]
    assert "KeepLatest(duration=timedelta(hours=1)) | KeepNear([2])" in said
    inside("gc", str(run.path), "--keep", "KeepNear([1])", "--yes", code=0)
    assert run.steps() == [1, 3]


class KeepGood(tr.KeepLast):
    """A rule that inherits the text of another, and keeps by a metric."""

    def kept(self, facts: Sequence[StepFacts]) -> dict[int, tuple[str, ...]]:
        return {fact.step: ("good",) for fact in facts if fact.metrics["loss"] < 0.5}


def test_a_rule_that_inherits_from_one_of_ours_is_not_taken_for_it(tmp_path: Path) -> None:
    with tr.Run(tmp_path / "run", keep=KeepGood(1)) as run:
        save_losses(run, 0.4, 0.3, 0.9)
    assert run.steps() == [1, 2, 3]
    assert "is not a rule that this version knows" in inside("gc", str(run.path), "--yes", code=2)[1]
    assert run.steps() == [1, 2, 3]
    facts = [StepFacts(step=step, saved=0.0, metrics={"loss": 1.0}) for step in (1, 2, 3)]
    assert find_deciders(KeepGood(1), facts, [1, 2]) == ({3}, {1, 2, 3})
