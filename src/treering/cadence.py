"""When a run saves: rules that decide whether a step is saved. They are values and use no clocks and no files.

``SaveEvery`` is also a name of ``treering`` itself. ``a | b`` saves when ``a`` or ``b`` does. The ``repr`` of a rule is
its text in ``run.json`` and on the command line: Python's syntax.
"""

from __future__ import annotations

import abc
import dataclasses
import datetime

from treering._values.human import duration_text, interval_text, parse_every

__all__ = ["AnyTime", "Cadence", "Decision", "LastSave", "SaveEvery"]


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


class Cadence(abc.ABC):
    """A rule that decides when to save; rules compose with ``|``."""

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

    def __or__(self, other: Cadence) -> Cadence:
        if not isinstance(other, Cadence):
            return NotImplemented
        rules = tuple(dict.fromkeys((*_rules(self), *_rules(other))))
        return AnyTime(rules) if len(rules) > 1 else self


def _rules(cadence: Cadence) -> tuple[Cadence, ...]:
    return cadence.rules if isinstance(cadence, AnyTime) else (cadence,)


@dataclasses.dataclass(frozen=True, slots=True, repr=False, init=False)
class SaveEvery(Cadence):
    """Save every so many steps; or temporarily, when so much time has passed since the last save.

    With ``steps``, a step is saved if its number is a multiple of it. If a loop skips a multiple, the next step is
    saved. With ``interval``, the saved step is temporary: it is removed when the next one is committed.

    Args:
        steps: the number of steps.
        interval: the time: a ``timedelta`` or seconds.

    Example:
        >>> from datetime import timedelta
        >>> SaveEvery(steps=1000) | SaveEvery(interval=600)
        SaveEvery(steps=1000) | SaveEvery(interval=timedelta(minutes=10))
        >>> cadence = SaveEvery(steps=1000) | SaveEvery(interval=timedelta(minutes=10))
        >>> cadence.decide(1200, now=700.0, last=LastSave(step=1000, time=90.0)).temporary
        True
    """

    steps: int | None
    """The number of steps."""
    interval: datetime.timedelta | None
    """The time."""

    def __init__(self, *, steps: int | None = None, interval: datetime.timedelta | float | None = None) -> None:
        parse_every(self, steps, interval, "save when either does")

    @property
    def seconds(self) -> float | None:
        """The interval in seconds; None if steps are counted."""
        return None if self.interval is None else self.interval.total_seconds()

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

    def __repr__(self) -> str:
        every = f"steps={self.steps}" if self.interval is None else f"interval={interval_text(self.interval)}"
        return f"SaveEvery({every})"


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class AnyTime(Cadence):
    """The result of ``a | b``: a step is saved if any rule says so, and is temporary only if all such rules say so.

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

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.rules))
