"""Named points of joint saves and loads: functions that are wrapped in the process that is attacked, not hooks."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from treering._coordination.operations import children_of
from treering._values import timing

__all__ = ["Point", "install"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A place on the way of one process through a joint call."""

    name: str
    """What people call it."""
    place: str
    """``module:attribute``, as the callers look it up; a dot leads to a method."""
    when: Literal["before", "after", "first", "middle"]
    """Before or after the function; or before its iterable argument gives the first, or the second, buffer."""
    of: Literal["leader", "follower", "collector", "all"] = "all"
    """Who comes by."""
    named: str = ""
    """Only when an argument that is text, or names, has this in it."""
    says: str = ""
    """Only when an argument that is bytes has this in it."""
    nth: int = 1
    """Only the so many-th time."""
    done: bool | None = False
    """When one stops here for good, whether the others save, or load, all the same; None: they may."""
    again: bool = True
    """Once the process has come back, the same job can go on."""

    def concerns(self, number: int, count: int) -> bool:
        """Whether a process of so many comes by here."""
        if self.of == "collector":
            return number > 0 and bool(children_of(number, count, timing.current.fan_in))
        return self.of == "all" or (self.of == "leader") == (number == 0)


def install(point: Point, act: Callable[[], None]) -> None:
    """Wrap the function of a point, for the rest of this process, so that ``act`` happens when one comes by.

    Raises:
        AttributeError: there is no such function.
    """
    module, _, attribute = point.place.partition(":")
    owner: Any = importlib.import_module(module)
    *way, last = attribute.split(".")
    for part in way:
        owner = getattr(owner, part)
    function = getattr(owner, last)
    left = point.nth

    def come_by() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            act()

    @functools.wraps(function)
    def wrapped(*given: Any, **named: Any) -> Any:
        if not _fits(point, given):
            return function(*given, **named)
        if point.when == "before":
            come_by()
        elif point.when in ("first", "middle"):
            at = 0 if point.when == "first" else 1
            given = tuple(_stopping(one, at, come_by) if _gives_buffers(one) else one for one in given)
        result = function(*given, **named)
        if point.when == "after":
            come_by()
        return result

    setattr(owner, last, wrapped)


def _fits(point: Point, given: tuple[Any, ...]) -> bool:
    texts = (text for one in given for text in (one if isinstance(one, tuple) else (one,)) if isinstance(text, str))
    named = not point.named or any(point.named in text for text in texts)
    return named and (not point.says or any(isinstance(one, bytes) and point.says.encode() in one for one in given))


def _gives_buffers(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes)


def _stopping(buffers: Iterable[Any], at: int, come_by: Callable[[], None]) -> Iterator[Any]:
    for number, buffer in enumerate(buffers):
        if number == at:
            come_by()
        yield buffer
