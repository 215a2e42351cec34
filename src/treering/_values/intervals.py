"""Stretches of time as people give them: a ``timedelta``, or a number of seconds."""

from __future__ import annotations

import datetime
import functools

from treering.errors import Unsupported

_UNITS = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))


def interval_of(given: datetime.timedelta | float, name: str) -> datetime.timedelta:
    """Return a stretch of time that is longer than nothing.

    Args:
        given: what the user gave; a number counts seconds.
        name: of the argument, for the message.

    Raises:
        Unsupported: it is no such stretch.

    Example:
        >>> interval_of(90, "interval")
        datetime.timedelta(seconds=90)
    """
    interval = given
    if isinstance(given, int | float) and not isinstance(given, bool):
        try:
            interval = datetime.timedelta(seconds=given)
        except (OverflowError, ValueError):  # more than timedelta holds, or nan
            raise Unsupported(f"{name}={given!r} is not a number of seconds") from None
    if not isinstance(interval, datetime.timedelta) or interval <= datetime.timedelta():
        raise Unsupported(f"{name} is {given!r:.100}, but must be a timedelta or seconds, more than 0")
    return interval


# A loop hears at each step when the next one is saved.
@functools.lru_cache(maxsize=100)
def interval_text(interval: datetime.timedelta) -> str:
    """Write it as Python does, in the largest unit that gives a whole number.

    Example:
        >>> interval_text(datetime.timedelta(minutes=90)), interval_text(datetime.timedelta(hours=24))
        ('timedelta(minutes=90)', 'timedelta(days=1)')
        >>> interval_text(datetime.timedelta(seconds=1.5))
        'timedelta(seconds=1.5)'
    """
    for name, seconds in _UNITS:
        count, rest = divmod(interval, datetime.timedelta(seconds=seconds))
        if not rest:
            return f"timedelta({name}={count})"
    return f"timedelta(seconds={interval.total_seconds()!r})"


def parse_every(rule: object, steps: int | None, interval: datetime.timedelta | float | None, both: str) -> None:
    """Set the steps or the interval of a rule, of which it takes one.

    Args:
        rule: the rule; its class is frozen.
        steps: what the user gave.
        interval: what the user gave.
        both: what two rules do that are joined.

    Raises:
        Unsupported: it is none or both of them, or one that is not possible.
    """
    if (steps is None) == (interval is None):
        raise Unsupported(f"{type(rule).__name__} takes steps= or interval=", hint=f"join two with | to {both}")
    if steps is not None:
        require_count(steps, "steps")
    object.__setattr__(rule, "steps", steps)
    object.__setattr__(rule, "interval", None if interval is None else interval_of(interval, "interval"))


def require_count(given: object, name: str) -> None:
    """Refuse what is no int from 1 on.

    Raises:
        Unsupported: it is none.
    """
    if type(given) is not int or given < 1:
        raise Unsupported(f"{name} is {given!r:.100}, but must be an int, 1 or more")
