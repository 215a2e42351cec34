"""The rules of a run: which of its steps stay, and when it saves one. They are values and use no clocks and no files.

``KeepLast``, ``KeepEvery``, ``KeepBest`` and ``SaveEvery`` are also names of ``treering`` itself.
``a | b`` keeps a step if ``a`` or ``b`` keeps it, and saves one if ``a`` or ``b`` does. The ``repr`` of a rule is its
text in ``run.json`` and on the command line: Python's syntax.
"""

from __future__ import annotations

import abc
import bisect
import dataclasses
import datetime
import functools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, ParamSpec, TypeVar, cast

from treering._format.run_document import StepFacts
from treering._printable import kind_of
from treering._values.checkpoint_names import HIGHEST_STEP
from treering._values.human import duration_text, interval_of, interval_text, near, require_count
from treering.errors import UnsupportedError

__all__ = [
    "AnyRule", "AnyTime", "Cadence", "Decision", "KeepBest", "KeepEvery", "KeepLast", "KeepLatest", "KeepNear",
    "KeepSteps", "LastSave", "Policy", "Rule", "SaveEvery", "StepFacts", "Verdict", "best_steps", "retained",
]  # fmt: skip

P = ParamSpec("P")
T = TypeVar("T", bound="Rule[Any]")

_ALL = "all are kept"
_NO_RULE = "no rule keeps it"
_number = operator.attrgetter("step")


class Rule(abc.ABC, Generic[T]):
    """A rule of a run, a `Policy` or a `Cadence`. Rules of the same kind compose with ``|``."""

    __slots__ = ()

    def __or__(self, other: T) -> T:
        kind: Any = Policy if isinstance(self, Policy) else Cadence
        if not isinstance(other, kind):
            return NotImplemented
        rules: list[T] = []
        for rule in (*single_rules(self), *single_rules(other)):
            if rule not in rules:  # a rule of a user's own may have no hash
                rules.append(rule)
        joined: Any = AnyRule if kind is Policy else AnyTime
        return self if len(rules) == 1 else joined(tuple(rules))  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class _AnyOf(Rule[T]):
    """The result of ``a | b``."""

    rules: tuple[T, ...]
    """The rules, each once, in the order in which they were written."""

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.rules))


def _by_keyword(init: Callable[P, None]) -> Callable[P, None]:
    """Let an argument without a name, or of another name, raise a TypeError that names the rule and its keywords."""

    @functools.wraps(init)
    def call(*given: P.args, **named: P.kwargs) -> None:
        if len(given) > 1 or named.keys() - {"steps", "interval"}:
            rule = type(given[0]).__name__
            raise TypeError(f"{rule} takes steps= or interval=, as in {rule}(steps=1000)")
        init(*given, **named)

    return call


@dataclasses.dataclass(frozen=True, slots=True, repr=False, init=False)
class _Every(Rule[T]):
    """A rule that takes steps, or an interval."""

    steps: int | None
    """The number of steps from one to the next."""
    interval: datetime.timedelta | None
    """The time from one to the next."""

    @_by_keyword
    def __init__(self, *, steps: int | None = None, interval: datetime.timedelta | float | None = None) -> None:
        if (steps is None) == (interval is None):
            raise UnsupportedError(f"{type(self).__name__} takes steps= or interval=", hint="join two rules with |")
        if steps is not None:
            require_count(steps, "steps")
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "interval", None if interval is None else interval_of(interval, "interval"))

    @property
    def seconds(self) -> float | None:
        """The interval in seconds; None if steps are counted."""
        return None if self.interval is None else self.interval.total_seconds()

    def __repr__(self) -> str:
        every = f"steps={self.steps}" if self.interval is None else f"interval={interval_text(self.interval)}"
        return f"{type(self).__name__}({every})"


def single_rules(rule: Rule[T]) -> tuple[T, ...]:
    """Return the rules that ``|`` has joined; of a single rule itself.

    Example:
        >>> single_rules(KeepLast(2) | KeepEvery(steps=1000)), single_rules(SaveEvery(steps=10))
        ((KeepLast(2), KeepEvery(steps=1000)), (SaveEvery(steps=10),))
    """
    return rule.rules if isinstance(rule, _AnyOf) else (rule,)


# -------------------------------------------------------------------------------------------------- which steps stay


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a step stays, and why."""

    step: int
    """Its number."""
    kept: bool
    """Whether it stays."""
    reasons: tuple[str, ...]
    """The rules that keep it, or why it is removed."""


class Policy(Rule["Policy"]):
    """A rule that decides which steps stay. A subclass with a method ``kept`` is a rule of your own.

    The newest step stays whatever ``kept`` returns, and a rule that raises, or returns anything else than steps with
    texts, removes nothing. Its answer may depend on nothing but the facts, and must not change when steps that it did
    not keep are gone, for it is asked again after each save. ``run.json`` has its ``repr`` for people, which therefore
    should be one short line; ``treering gc`` cannot read that, and refuses to remove anything by it.

    Example:
        >>> import dataclasses
        >>> @dataclasses.dataclass(frozen=True)
        ... class KeepBelow(Policy):
        ...     metric: str
        ...     value: float
        ...     def kept(self, facts):
        ...         good = [fact.step for fact in facts if fact.metrics.get(self.metric, self.value) < self.value]
        ...         return {step: (repr(self),) for step in good}
        >>> losses = {1: 0.5, 2: 0.25, 3: 0.75}
        >>> facts = [StepFacts(step=step, saved=0.0, metrics={"loss": loss}) for step, loss in losses.items()]
        >>> [(verdict.step, verdict.kept) for verdict in retained(KeepLast(1) | KeepBelow("loss", 0.3), facts)]
        [(1, False), (2, True), (3, True)]
    """

    __slots__ = ()

    @abc.abstractmethod
    def kept(self, facts: Sequence[StepFacts]) -> dict[int, tuple[str, ...]]:
        """Return the steps that are kept, each with the texts of the rules that keep it.

        Args:
            facts: the steps, in any order; no two of one number.
        """


class AnyRule(_AnyOf[Policy], Policy):
    """The result of ``a | b``: a step stays if any rule keeps it.

    Example:
        >>> policy = KeepLast(2) | KeepEvery(steps=1000) | KeepLast(2)
        >>> policy
        KeepLast(2) | KeepEvery(steps=1000)
        >>> policy.kept([StepFacts(step=step, saved=step) for step in (900, 1000, 1100, 1200)])
        {1000: ('KeepEvery(steps=1000)',), 1100: ('KeepLast(2)',), 1200: ('KeepLast(2)',)}
    """

    __slots__ = ()

    def kept(self, facts: Sequence[StepFacts]) -> dict[int, tuple[str, ...]]:
        """Return the steps that any rule keeps; see `Policy.kept`."""
        said = [_ask(rule, facts) for rule in self.rules]
        steps = sorted(set().union(*said))
        return {step: tuple(text for one in said for text in one.get(step, ())) for step in steps}


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


class KeepEvery(_Every[Policy], Policy):
    """Keep the steps whose number is a multiple of ``steps``; or the first, and then one for each ``interval``.

    Args:
        steps: the number of steps from one to the next.
        interval: the least time from one to the next: a ``timedelta`` or seconds, between the times of the saves. If
            the clock was set back by as much or more, the next step is kept.

    Example:
        >>> KeepEvery(interval=3600)
        KeepEvery(interval=timedelta(hours=1))
        >>> facts = [StepFacts(step=step, saved=60.0 * step) for step in (10, 30, 50, 70, 90)]
        >>> list(KeepEvery(interval=3600).kept(facts)), list(KeepEvery(steps=30).kept(facts))
        ([10, 70], [30, 90])
    """

    __slots__ = ()

    def kept(self, facts: Sequence[StepFacts]) -> dict[int, tuple[str, ...]]:
        """Return one step of each stretch; see `Policy.kept`."""
        ordered = sorted(facts, key=_number)
        if (seconds := self.seconds) is None:
            every = self.steps or 1
            return _by_rule(self, [fact.step for fact in ordered if fact.step % every == 0])
        chosen: list[StepFacts] = []
        for fact in ordered:
            # Only what is kept is compared with: once the others are removed, the answer is the same.
            if not chosen or abs(fact.saved - chosen[-1].saved) >= seconds:
                chosen.append(fact)
        return _by_rule(self, [fact.step for fact in chosen])


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


@dataclasses.dataclass(frozen=True, slots=True, repr=False, init=False)
class KeepLatest(Policy):
    """Keep the steps that were saved within a time before the newest one.

    The time of the newest step counts, not that of now: a training that stands still, or is resumed a week later, loses
    no step by that. Where a clock was set back, steps that seem to be newer than the newest one stay.

    Args:
        duration: a ``timedelta`` or seconds.

    Example:
        >>> KeepLatest(duration=5400)
        KeepLatest(duration=timedelta(minutes=90))
        >>> facts = [StepFacts(step=step, saved=3600.0 * step) for step in (1, 2, 3, 4)]
        >>> list(KeepLatest(duration=5400).kept(facts))
        [3, 4]
    """

    duration: datetime.timedelta
    """How long before the newest step the others were saved at most."""

    def __init__(self, *, duration: datetime.timedelta | float) -> None:
        object.__setattr__(self, "duration", interval_of(duration, "duration"))

    def kept(self, facts: Sequence[StepFacts]) -> dict[int, tuple[str, ...]]:
        """Return the newest step and those that were saved shortly before it; see `Policy.kept`."""
        ordered = sorted(facts, key=_number)
        since = ordered[-1].saved - self.duration.total_seconds() if ordered else 0.0
        return _by_rule(self, [fact.step for fact in ordered if fact.saved >= since])

    def __repr__(self) -> str:
        return f"KeepLatest(duration={interval_text(self.duration)})"


@dataclasses.dataclass(frozen=True, slots=True, repr=False, init=False)
class KeepNear(Policy):
    """Keep for each number the step that is nearest to it, and both where two are equally near.

    A number that the training has not reached yet keeps the newest step, until there is one that is nearer.

    Args:
        steps: the numbers.

    Example:
        >>> KeepNear([5000, 100])
        KeepNear([100, 5000])
        >>> facts = [StepFacts(step=step, saved=0.0) for step in (60, 90, 110, 4000)]
        >>> list(KeepNear([100, 3000, 9000]).kept(facts))
        [90, 110, 4000]
    """

    steps: tuple[int, ...]
    """The numbers, ascending, each once."""

    def __init__(self, steps: Iterable[int]) -> None:
        given: object = steps
        numbers = KeepSteps(*given).steps if isinstance(given, Iterable) and not isinstance(given, str) else ()
        if not numbers:
            raise UnsupportedError(f"steps is {given!r:.100}", hint="name steps, as in KeepNear([100, 5000])")
        object.__setattr__(self, "steps", numbers)

    def kept(self, facts: Sequence[StepFacts]) -> dict[int, tuple[str, ...]]:
        """Return the nearest steps; see `Policy.kept`."""
        there = sorted(fact.step for fact in facts)
        chosen: set[int] = set()
        for wanted in self.steps if there else ():
            place = bisect.bisect_left(there, wanted)
            around = there[max(place - 1, 0) : place + 1]
            least = min(abs(step - wanted) for step in around)
            chosen.update(step for step in around if abs(step - wanted) == least)
        return _by_rule(self, sorted(chosen))

    def __repr__(self) -> str:
        return f"KeepNear([{', '.join(map(str, self.steps))}])"


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
    return {fact.step: (_ALL,) for fact in lasting} if policy is None else _ask(policy, lasting)


def _ask(rule: Policy, facts: Sequence[StepFacts]) -> dict[int, tuple[str, ...]]:
    """Return what a rule keeps; one of a user's own may fail, and what it returns is checked.

    Raises:
        UnsupportedError: it raised, or did not return steps with texts.
    """
    if _is_ours(rule):
        return rule.kept(facts)
    name = type(rule).__name__
    try:
        said: object = rule.kept(facts)
    except Exception as error:
        hint = "no step was removed; correct the rule"
        raise UnsupportedError(f"the rule {name} raised {type(error).__name__}: {error}", hint=hint) from error
    told = cast("Mapping[object, object]", said) if isinstance(said, Mapping) else None
    if told is None or not all(isinstance(step, int) and _are_texts(texts) for step, texts in told.items()):
        hint = "no step was removed; kept() returns a dict: step -> texts, as in {100: ('why it stays',)}"
        shown = kind_of(said) if told is None else f"{said!r:.100}"
        raise UnsupportedError(f"the rule {name} returned {shown}, not steps with texts", hint=hint)
    return {step: tuple(texts) for step, texts in cast("Mapping[int, Sequence[str]]", told).items()}


def _is_ours(rule: Policy) -> bool:
    return type(rule).__module__ == __name__


def policy_text(policy: Policy) -> str:
    """Return the text of a policy, which no reader takes for a rule of ours where it is another's.

    Example:
        >>> KeepMore = type("KeepMore", (KeepLast,), {"__module__": "my_rules"})
        >>> policy_text(KeepBest("loss") | KeepMore(3))
        "KeepBest('loss', mode='min') | <KeepMore like KeepLast(3)>"
    """
    texts = []
    for rule in single_rules(policy):
        inherits = not _is_ours(rule) and getattr(type(rule).__repr__, "__module__", None) == __name__
        texts.append(f"<{type(rule).__name__} like {rule!r}>" if inherits else repr(rule))
    return " | ".join(texts)


def _are_texts(said: object) -> bool:
    return isinstance(said, tuple | list) and bool(said) and all(isinstance(text, str) for text in said)


def find_deciders(policy: Policy | None, facts: Sequence[StepFacts], going: Sequence[int]) -> tuple[set[int], set[int]]:
    """Return the steps by which a policy decides that others go.

    Args:
        policy: the policy; None where only temporary steps go.
        facts: all steps.
        going: the steps that go.

    Returns:
        The steps that decide by being there, and those that decide by a metric, or by when they were saved.

    Example:
        >>> facts = [StepFacts(step=step, saved=0.0, metrics={"loss": step}) for step in (1, 2, 3, 4, 5)]
        >>> find_deciders(KeepLast(2) | KeepBest("loss"), facts, [2, 3])
        ({4, 5}, {1})
    """
    if not going:
        return set(), set()
    by_presence, by_value = {max([fact.step for fact in facts])}, set[int]()
    lasting = [fact for fact in facts if not fact.temporary]
    for rule in () if policy is None else single_rules(policy):
        if not _is_ours(rule):  # it may go by anything
            by_value.update(fact.step for fact in facts)
        elif isinstance(rule, KeepLast | KeepNear):
            by_presence.update(rule.kept(lasting))
        elif isinstance(rule, KeepLatest):
            by_value.update([max(fact.step for fact in lasting)] if lasting else [])
        elif isinstance(rule, KeepBest):
            best = best_steps(lasting, rule.metric, rule.mode)[: rule.n]
            # Where all are nan, one that has the metric decides that it is measured.
            having = [] if best else [fact.step for fact in lasting if rule.metric in fact.metrics][-1:]
            by_value.update(best, having)
        elif isinstance(rule, KeepEvery):
            chosen = sorted(rule.kept(lasting)) if rule.interval is not None else []
            # For each step that goes, the last one before it that was chosen: it was saved too shortly after that.
            by_value.update(chosen[place - 1] for step in going if (place := bisect.bisect(chosen, step)))
    return by_presence, by_value


def unknown_metrics(rules: Policy | None, steps: Collection[StepFacts]) -> dict[str, str | None]:
    """Return the metrics that rules go by and no step has, each with the name that was probably meant.

    Without steps nothing is known, and nothing is returned.

    Example:
        >>> unknown_metrics(KeepBest("los"), [StepFacts(step=1, saved=0.0, metrics={"loss": 0.5})])
        {'los': 'loss'}
        >>> unknown_metrics(KeepBest("los"), [])
        {}
    """
    wanted = [rule.metric for rule in single_rules(rules) if isinstance(rule, KeepBest)] if rules and steps else []
    there = {name for step in steps for name in step.metrics} if wanted else set[str]()
    return {metric: near(metric, there) for metric in wanted if metric not in there}


def _by_rule(rule: Policy, steps: Sequence[int]) -> dict[int, tuple[str, ...]]:
    return dict.fromkeys(steps, (repr(rule),))


def _require_metric(metric: object, mode: object) -> None:
    if not isinstance(metric, str) or not metric:
        raise UnsupportedError(f"metric is {metric!r:.100}, but must be the name of a metric")
    if mode not in ("min", "max"):
        raise UnsupportedError(f'mode is {mode!r:.100}, but must be "min" or "max"')


# --------------------------------------------------------------------------------------------------- when one is saved


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LastSave:
    """The save from which steps and seconds are counted."""

    step: int
    """The latest step that was saved; before the first save, the step before the first call."""
    time: float
    """The time of that save, in seconds of the same clock as ``now``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Whether a step is saved, and why.

    Example:
        >>> decision = SaveEvery(steps=100).decide(101, now=8.0, last=LastSave(step=100, time=7.5))
        >>> decision.save, decision.reason, decision.next
        (False, 'SaveEvery(steps=100): the next is 200', 200)
    """

    save: bool
    """Whether it is saved."""
    temporary: bool = False
    """Whether it is removed when a newer step is committed."""
    reason: str
    """Why, in words for people."""
    next: int | None = None
    """If the step is not saved, the next one that will be, if it is known."""
    final: bool = False
    """Whether the program was told to end, so that ``save`` waits until the step is durable."""
    signum: int | None = None
    """The signal to re-raise when the save is durable; None if there is none."""


class Cadence(Rule["Cadence"]):
    """A rule that decides when to save."""

    __slots__ = ()

    @property
    @abc.abstractmethod
    def seconds(self) -> float | None:
        """The shortest interval of its rules, in seconds; None if no rule uses a clock."""

    @abc.abstractmethod
    def decide(self, step: int, now: float, last: LastSave) -> Decision:
        """Return whether a step is saved.

        Args:
            step: its number.
            now: seconds of a clock that is never set back.
            last: the save from which steps and seconds are counted.
        """


class SaveEvery(_Every[Cadence], Cadence):
    """Save each n-th step; or one step temporarily, when an interval has passed since the last save.

    With ``steps``, a step is saved if its number is a multiple of it. If a loop skips a multiple, the next step is
    saved. With ``interval``, the saved step is temporary: it is removed when the next one is committed.

    Args:
        steps: the number of steps from one save to the next.
        interval: the time from one to the next: a ``timedelta`` or seconds.

    Example:
        >>> from datetime import timedelta
        >>> SaveEvery(steps=1000) | SaveEvery(interval=600)
        SaveEvery(steps=1000) | SaveEvery(interval=timedelta(minutes=10))
        >>> cadence = SaveEvery(steps=1000) | SaveEvery(interval=timedelta(minutes=10))
        >>> cadence.decide(1200, now=700.0, last=LastSave(step=1000, time=90.0)).temporary
        True
    """

    __slots__ = ()

    def decide(self, step: int, now: float, last: LastSave) -> Decision:
        """Return whether a step is saved; see `Cadence.decide`."""
        if self.seconds is not None:
            if (passed := now - last.time) >= self.seconds:
                return Decision(save=True, temporary=True, reason=f"{self!r}: {duration_text(passed)} have passed")
            return Decision(save=False, reason=f"{self!r}: the next is in {duration_text(self.seconds - passed)}")
        every = self.steps or 1
        # The first multiple of it that is not behind.
        due = max(-(-step // every), 0) * every
        if step == due:
            return Decision(save=True, reason=repr(self))
        if last.step < due - every:
            return Decision(save=True, reason=f"{self!r}: {due - every} was not saved")
        return Decision(save=False, reason=f"{self!r}: the next is {due}", next=due)


class AnyTime(_AnyOf[Cadence], Cadence):
    """The result of ``a | b``: a step is saved if any rule says so, and is temporary only if all such rules say so.

    Example:
        >>> cadence = SaveEvery(steps=1000) | SaveEvery(interval=600)
        >>> cadence.decide(2000, now=700.0, last=LastSave(step=1000, time=90.0)).temporary
        False
        >>> print(cadence.decide(1001, now=96.0, last=LastSave(step=1000, time=90.0)).reason)
        SaveEvery(steps=1000): the next is 2000; SaveEvery(interval=timedelta(minutes=10)): the next is in 9 min 54 s
    """

    __slots__ = ()

    @property
    def seconds(self) -> float | None:
        """The shortest interval of the rules; None if no rule uses a clock."""
        return min((rule.seconds for rule in self.rules if rule.seconds is not None), default=None)

    def decide(self, step: int, now: float, last: LastSave) -> Decision:
        """Return whether a step is saved; see `Cadence.decide`."""
        said = [rule.decide(step, now, last) for rule in self.rules]
        if saying := [decision for decision in said if decision.save]:
            return min(saying, key=lambda decision: decision.temporary)
        reason = "; ".join(decision.reason for decision in said)
        nexts = [decision.next for decision in said if decision.next is not None]
        return Decision(save=False, reason=reason, next=min(nexts, default=None))
