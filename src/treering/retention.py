"""Retention: rules that decide which steps of a run stay. They are values and use no files.

``KeepLast``, ``KeepEvery``, ``KeepBest`` and ``KeepSteps`` are also names of ``treering`` itself. ``a | b`` keeps what
``a`` or ``b`` keeps. The ``repr`` of a rule is its text in ``run.json`` and on the command line: Python's syntax.
"""

from __future__ import annotations

import abc
import dataclasses
import datetime
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Literal

from treering._store.run_folder import HIGHEST_STEP
from treering._values.human import interval_text, parse_every, require_count
from treering.errors import UnsupportedError

__all__ = [
    "AnyRule", "KeepBest", "KeepEvery", "KeepLast", "KeepSteps", "Policy", "StepFacts", "Verdict", "best_steps",
    "retained",
]  # fmt: skip

_ALL = "all are kept"
_NO_RULE = "no rule keeps it"
_number = operator.attrgetter("step")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """The facts about a step that rules use.

    Example:
        >>> StepFacts(step=100, saved=1.5e9, metrics={"loss": 0.25}).temporary
        False
    """

    step: int
    """Its number."""
    saved: float
    """The time of the save, in POSIX seconds."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Metric -> value."""
    temporary: bool = False
    """Whether it is removed when a newer step is committed."""
    nbytes: int = 0
    """The bytes of its files."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a step stays, and why."""

    step: int
    """Its number."""
    kept: bool
    """Whether it stays."""
    reasons: tuple[str, ...]
    """The rules that keep it, or why it is removed."""


class Policy(abc.ABC):
    """A rule that decides which steps stay; rules compose with ``|``."""

    __slots__ = ()

    @abc.abstractmethod
    def kept(self, facts: Sequence[StepFacts]) -> dict[int, tuple[str, ...]]:
        """Return the steps that are kept, each with the texts of the rules that keep it.

        Args:
            facts: the steps, in any order; no two of one number.
        """

    def __or__(self, other: Policy) -> Policy:
        if not isinstance(other, Policy):
            return NotImplemented
        rules = tuple(dict.fromkeys((*_rules(self), *_rules(other))))
        return AnyRule(rules) if len(rules) > 1 else self


def _rules(policy: Policy) -> tuple[Policy, ...]:
    return policy.rules if isinstance(policy, AnyRule) else (policy,)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class AnyRule(Policy):
    """The result of ``a | b``: a step stays if any rule keeps it.

    Example:
        >>> policy = KeepLast(2) | KeepEvery(steps=1000) | KeepLast(2)
        >>> policy
        KeepLast(2) | KeepEvery(steps=1000)
        >>> policy.kept([StepFacts(step=step, saved=step) for step in (900, 1000, 1100, 1200)])
        {1000: ('KeepEvery(steps=1000)',), 1100: ('KeepLast(2)',), 1200: ('KeepLast(2)',)}
    """

    rules: tuple[Policy, ...]
    """The rules, each once, in the order in which they were written."""

    def kept(self, facts: Sequence[StepFacts]) -> dict[int, tuple[str, ...]]:
        """Return the steps that any rule keeps; see `Policy.kept`."""
        said = [rule.kept(facts) for rule in self.rules]
        steps = sorted(set().union(*said))
        return {step: tuple(text for one in said for text in one.get(step, ())) for step in steps}

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.rules))


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class KeepLast(Policy):
    """Keep the last ``n`` steps.

    Example:
        >>> KeepLast(1).kept([StepFacts(step=step, saved=0.0) for step in (30, 10, 20)])
        {30: ('KeepLast(1)',)}
    """

    n: int
    """How many."""

    def __post_init__(self) -> None:
        require_count(self.n, "n")

    def kept(self, facts: Sequence[StepFacts]) -> dict[int, tuple[str, ...]]:
        """Return the last steps; see `Policy.kept`."""
        return _by_rule(self, sorted(fact.step for fact in facts)[-self.n :])

    def __repr__(self) -> str:
        return f"KeepLast({self.n})"


@dataclasses.dataclass(frozen=True, slots=True, repr=False, init=False)
class KeepEvery(Policy):
    """Keep the steps whose number is a multiple of ``steps``; or the first, and then one for each ``interval``.

    Args:
        steps: the number of steps from one to the next.
        interval: the time from one to the next: a ``timedelta`` or seconds, between the times of the saves. If the
            clock was set back, its distance counts: there is never a longer gap without a step that is kept.

    Example:
        >>> KeepEvery(interval=3600)
        KeepEvery(interval=timedelta(hours=1))
        >>> facts = [StepFacts(step=step, saved=60.0 * step) for step in (10, 30, 50, 70, 90)]
        >>> list(KeepEvery(interval=3600).kept(facts)), list(KeepEvery(steps=30).kept(facts))
        ([10, 70], [30, 90])
    """

    steps: int | None
    """The number of steps from one to the next."""
    interval: datetime.timedelta | None
    """The time from one to the next."""

    def __init__(self, *, steps: int | None = None, interval: datetime.timedelta | float | None = None) -> None:
        parse_every(self, steps, interval, "keep what either keeps")

    def kept(self, facts: Sequence[StepFacts]) -> dict[int, tuple[str, ...]]:
        """Return one step of each stretch; see `Policy.kept`."""
        ordered = sorted(facts, key=_number)
        if self.interval is None:
            every = self.steps or 1
            return _by_rule(self, [fact.step for fact in ordered if fact.step % every == 0])
        seconds = self.interval.total_seconds()
        chosen: list[StepFacts] = []
        for fact in ordered:
            # Only what is kept is compared with: once the others are removed, the answer is the same.
            if not chosen or abs(fact.saved - chosen[-1].saved) >= seconds:
                chosen.append(fact)
        return _by_rule(self, [fact.step for fact in chosen])

    def __repr__(self) -> str:
        every = f"steps={self.steps}" if self.interval is None else f"interval={interval_text(self.interval)}"
        return f"KeepEvery({every})"


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class KeepBest(Policy):
    """Keep the ``n`` steps whose metric is best; of two equal ones the later is better.

    A step without the metric, or with nan, is never best. While no step has the metric, all steps stay: it is not
    measured yet, or its name is misspelt, and the best step may be among them.

    Example:
        >>> losses = {1: 0.5, 2: 0.25, 3: 0.75}
        >>> facts = [StepFacts(step=step, saved=0.0, metrics={"loss": loss}) for step, loss in losses.items()]
        >>> list(KeepBest("loss").kept(facts)), list(KeepBest("loss", n=2, mode="max").kept(facts))
        ([2], [1, 3])
        >>> list(KeepBest("los").kept(facts))
        [1, 2, 3]
    """

    metric: str
    """Its name."""
    n: int = dataclasses.field(default=1, kw_only=True)
    """The number of steps."""
    mode: Literal["min", "max"] = dataclasses.field(default="min", kw_only=True)
    """Whether the smallest or the largest value is best."""

    def __post_init__(self) -> None:
        _require_metric(self.metric, self.mode)
        require_count(self.n, "n")

    def kept(self, facts: Sequence[StepFacts]) -> dict[int, tuple[str, ...]]:
        """Return the best steps; see `Policy.kept`."""
        if not any(self.metric in fact.metrics for fact in facts):
            return _by_rule(self, sorted({fact.step for fact in facts}))
        return _by_rule(self, sorted(best_steps(facts, self.metric, self.mode)[: self.n]))

    def __repr__(self) -> str:
        n = "" if self.n == 1 else f", n={self.n}"
        return f"KeepBest({self.metric!r}{n}, mode={self.mode!r})"


@dataclasses.dataclass(frozen=True, slots=True, repr=False, init=False)
class KeepSteps(Policy):
    """Keep these steps.

    Example:
        >>> KeepSteps(5000, 100)
        KeepSteps(100, 5000)
    """

    steps: tuple[int, ...]
    """Their numbers, ascending, each once."""

    def __init__(self, *steps: int) -> None:
        for step in steps:
            if type(step) is not int or not 0 <= step <= HIGHEST_STEP:
                hint = "steps are ints from 0 to 2**63 - 1, as in KeepSteps(100, 5000)"
                raise UnsupportedError(f"{step!r:.100} is not a step", hint=hint)
        object.__setattr__(self, "steps", tuple(sorted(set(steps))))

    def kept(self, facts: Sequence[StepFacts]) -> dict[int, tuple[str, ...]]:
        """Return those that exist; see `Policy.kept`."""
        return _by_rule(self, sorted({fact.step for fact in facts}.intersection(self.steps)))

    def __repr__(self) -> str:
        return f"KeepSteps({', '.join(map(str, self.steps))})"


def best_steps(facts: Sequence[StepFacts], metric: str, mode: Literal["min", "max"] = "min") -> list[int]:
    """Return the steps that have a metric, the best first; of two equal ones the later comes first.

    Args:
        facts: the steps.
        metric: its name. A step where it is nan is left out.
        mode: whether the smallest or the largest value is best.

    Raises:
        UnsupportedError: there is no such mode, or the metric is not a name.

    Example:
        >>> losses = {1: 0.5, 2: 0.25, 3: 0.5}
        >>> facts = [StepFacts(step=step, saved=0.0, metrics={"loss": loss}) for step, loss in losses.items()]
        >>> best_steps(facts, "loss"), best_steps(facts, "loss", "max"), best_steps(facts, "accuracy")
        ([2, 3, 1], [3, 1, 2], [])
    """
    _require_metric(metric, mode)
    sign = 1 if mode == "min" else -1
    having = [(fact.metrics[metric], fact.step) for fact in facts if not math.isnan(fact.metrics.get(metric, math.nan))]
    return [step for _, step in sorted(having, key=lambda pair: (sign * pair[0], -pair[1]))]


def retained(policy: Policy | None, facts: Sequence[StepFacts]) -> list[Verdict]:
    """Return the verdict on each step of a run, the oldest first.

    The newest always stays. A temporary step is removed when there is a newer one, whatever the rules say, and does not
    count among the steps that they keep.

    Args:
        policy: the rules; None keeps all but temporary steps.
        facts: the steps, in any order.

    Example:
        >>> facts = [StepFacts(step=1, saved=0.0), StepFacts(step=2, saved=9.0)]
        >>> facts += [StepFacts(step=3, saved=10.0, temporary=True)]
        >>> for verdict in retained(KeepLast(1), facts):
        ...     print(verdict.step, verdict.kept, *verdict.reasons)
        1 False no rule keeps it
        2 True KeepLast(1)
        3 True the newest
    """
    ordered = sorted(facts, key=_number)
    kept = _kept(policy, ordered)
    verdicts = []
    for position, fact in enumerate(ordered, 1):
        reasons = kept.get(fact.step, ())
        if position == len(ordered):
            reasons = ("the newest", *reasons) if policy is not None or not reasons else reasons
        why = f"temporary, and {ordered[position].step} came after it" if fact.temporary and not reasons else _NO_RULE
        verdicts.append(Verdict(step=fact.step, kept=bool(reasons), reasons=reasons or (why,)))
    return verdicts


def removable(policy: Policy | None, facts: Sequence[StepFacts]) -> list[int]:
    """Return the steps that `retained` does not keep, ascending.

    Example:
        >>> removable(KeepLast(1), [StepFacts(step=step, saved=0.0) for step in (1, 2, 3)])
        [1, 2]
    """
    kept = _kept(policy, facts)
    newest = max((fact.step for fact in facts), default=None)
    return sorted(fact.step for fact in facts if fact.step not in kept and fact.step != newest)


def _kept(policy: Policy | None, facts: Sequence[StepFacts]) -> dict[int, tuple[str, ...]]:
    lasting = [fact for fact in facts if not fact.temporary]
    return {fact.step: (_ALL,) for fact in lasting} if policy is None else policy.kept(lasting)


def _by_rule(rule: Policy, steps: Sequence[int]) -> dict[int, tuple[str, ...]]:
    return dict.fromkeys(steps, (repr(rule),))


def _require_metric(metric: object, mode: object) -> None:
    if not isinstance(metric, str) or not metric:
        raise UnsupportedError(f"metric is {metric!r:.100}, but must be the name of a metric")
    if mode not in ("min", "max"):
        raise UnsupportedError(f'mode is {mode!r:.100}, but must be "min" or "max"')
