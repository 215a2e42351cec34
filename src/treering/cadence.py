"""When a run saves: rules as values that know nothing of clocks or files, and what they say of a step.

``SaveEvery`` is also a name of ``treering`` itself. ``a | b`` saves when ``a`` or ``b`` does. The ``repr`` of a rule is
its text in ``run.json`` and on the command line: what one would write.
"""

from __future__ import annotations

import abc
import dataclasses
import datetime

from treering._values.human import duration_text
from treering._values.intervals import interval_of, interval_text
from treering.errors import Unsupported

__all__ = ["AnyTime", "Cadence", "Decision", "LastSave", "SaveEvery"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LastSave:
    """From where steps and seconds are counted."""

    step: int
    """The latest step that was saved; before the first save, the one before the first that was offered."""
    time: float
    """When that was, in seconds of the clock that says when it is now."""


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
    """Whether it goes when a newer step is committed."""
    reason: str
    """Why, in words for people."""
    next: int | None = None
    """Where the step is not saved, the next one that is, as far as it is known."""
    final: bool = False
    """Whether the program was told to end, so that the save has to be waited for."""
    signum: int | None = None
    """The signal that has to have its way once the save is durable; None where there is none."""


class Cadence(abc.ABC):
    """Says when to save; composed with ``|``."""

    __slots__ = ()

    @property
    @abc.abstractmethod
    def seconds(self) -> float | None:
        """The shortest interval of its rules, in seconds; None where no rule looks at a clock."""

    @abc.abstractmethod
    def decide(self, step: int, now: float, last: LastSave) -> Decision:
        """Return whether a step is saved.

        Args:
            step: its number.
            now: seconds of a clock that is never set back.
            last: from where steps and seconds count.
        """

    def __or__(self, other: Cadence) -> Cadence:
        if not isinstance(other, Cadence):
            return NotImplemented
        rules = tuple(dict.fromkeys((*_rules(self), *_rules(other))))
        return AnyTime(rules) if len(rules) > 1 else self


def _rules(cadence: Cadence) -> tuple[Cadence, ...]:
    return cadence.rules if isinstance(cadence, AnyTime) else (cadence,)


@dataclasses.dataclass(frozen=True, slots=True, repr=False, init=False)
class SaveEvery(Cadence):
    """Save each so many steps; or, for the time being, when so much time has passed since the last save.

    With ``steps``, those steps are saved whose number is a multiple of it. Where a loop jumps over a multiple, the
    step that comes next is. With ``interval``, what is saved is temporary: it goes when the next step is committed.

    Args:
        steps: how many steps.
        interval: how long: a ``timedelta`` or seconds.

    Example:
        >>> from datetime import timedelta
        >>> SaveEvery(steps=1000) | SaveEvery(interval=600)
        SaveEvery(steps=1000) | SaveEvery(interval=timedelta(minutes=10))
        >>> cadence = SaveEvery(steps=1000) | SaveEvery(interval=timedelta(minutes=10))
        >>> cadence.decide(1200, now=700.0, last=LastSave(step=1000, time=90.0)).temporary
        True
    """

    steps: int | None
    """How many steps."""
    interval: datetime.timedelta | None
    """How long."""

    def __init__(self, *, steps: int | None = None, interval: datetime.timedelta | float | None = None) -> None:
        if (steps is None) == (interval is None):
            raise Unsupported("SaveEvery takes steps= or interval=", hint="join two with |, to save when either does")
        if steps is not None and (type(steps) is not int or steps < 1):
            raise Unsupported(f"steps is {steps!r:.100}, it has to be an int, 1 or more")
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "interval", None if interval is None else interval_of(interval, "interval"))

    @property
    def seconds(self) -> float | None:
        """The interval in seconds; None where steps are counted."""
        return None if self.interval is None else self.interval.total_seconds()

    def decide(self, step: int, now: float, last: LastSave) -> Decision:
        """Return whether a step is saved; see `Cadence.decide`."""
        if self.seconds is not None:
            passed = now - last.time
            if passed >= self.seconds:
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

    def __repr__(self) -> str:
        every = f"steps={self.steps}" if self.interval is None else f"interval={interval_text(self.interval)}"
        return f"SaveEvery({every})"


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class AnyTime(Cadence):
    """What ``a | b`` makes: a step is saved if any rule says so, and for good if any such rule does.

    Example:
        >>> cadence = SaveEvery(steps=1000) | SaveEvery(interval=600)
        >>> cadence.decide(2000, now=700.0, last=LastSave(step=1000, time=90.0)).temporary
        False
        >>> print(cadence.decide(1001, now=96.0, last=LastSave(step=1000, time=90.0)).reason)
        SaveEvery(steps=1000): the next is 2000; SaveEvery(interval=timedelta(minutes=10)): the next is in 9 min 54 s
    """

    rules: tuple[Cadence, ...]
    """The rules, each once, in the order in which they were written."""

    @property
    def seconds(self) -> float | None:
        """The shortest interval of the rules; None where none looks at a clock."""
        return min((rule.seconds for rule in self.rules if rule.seconds is not None), default=None)

    def decide(self, step: int, now: float, last: LastSave) -> Decision:
        """Return whether a step is saved; see `Cadence.decide`."""
        said = [rule.decide(step, now, last) for rule in self.rules]
        saying = [decision for decision in said if decision.save]
        if saying:
            return min(saying, key=lambda decision: decision.temporary)
        reason = "; ".join(decision.reason for decision in said)
        nexts = [decision.next for decision in said if decision.next is not None]
        return Decision(save=False, reason=reason, next=min(nexts, default=None))

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.rules))
