"""The part of an array in a command: ``KEY[2:10, -1]``, read by hand and never evaluated."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TypeAlias

from treering._values.human import pluralize
from treering.errors import Format

Part: TypeAlias = int | slice
Selected: TypeAlias = int | range
"""What is selected of one axis: one place, which drops the axis, or a range of them."""

_INT = re.compile(r"[+-]?(0|[1-9][0-9]{0,17})")
_EXAMPLES = "write KEY[2:10, -1] or KEY[..., ::2]: integers, start:stop:step, '...'"


def split_request(text: str, keys: Collection[str]) -> tuple[str, str | None]:
    """Divide a request into the key and the text between its last brackets; a key that is there wins.

    Example:
        >>> split_request("params/w[:2,3]", {"params/w"})
        ('params/w', ':2,3')
        >>> split_request("a[0]", {"a[0]"})
        ('a[0]', None)
    """
    if text in keys or not text.endswith("]") or "[" not in text:
        return text, None
    key, _, slices = text[:-1].rpartition("[")
    return key, slices


def parse_slices(text: str) -> tuple[list[Part], list[Part] | None]:
    """Read slices: those before the dots, and those behind them, None where there are no dots.

    Raises:
        Format: it is none.

    Example:
        >>> parse_slices("1, ..., ::-2")
        ([1], [slice(None, None, -2)])
    """
    before: list[Part] = []
    behind: list[Part] | None = None
    items = text.split(",")
    if len(items) > 1 and not items[-1].strip():
        items.pop()  # a trailing comma, as Python allows it
    for item in items:
        if item.strip() == "...":
            if behind is not None:
                raise Format(f"[{text}] has '...' twice", hint=_EXAMPLES)
            behind = []
            continue
        (before if behind is None else behind).append(_part(item.strip(), text))
    return before, behind


def ranges_of(text: str, shape: tuple[int, ...]) -> list[Selected]:
    """Read slices and say what they select of each axis of an array.

    Raises:
        Format: they are none, there are more than axes, or an integer is out of range.

    Example:
        >>> ranges_of(":2, -1", (5, 4, 3))
        [range(0, 2), 3, range(0, 3)]
    """
    before, behind = parse_slices(text)
    if (count := len(before) + len(behind or ())) > len(shape):
        axes = f"{len(shape)} {'axis' if len(shape) == 1 else 'axes'}"
        raise Format(f"[{text}] has {pluralize(count, 'indices')}, the array has {axes}: {list(shape)}", hint=_EXAMPLES)
    parts: list[Part] = [*before, *[slice(None)] * (len(shape) - count), *(behind or ())]
    return [_selected(part, length, axis) for axis, (part, length) in enumerate(zip(parts, shape, strict=True))]


def _part(item: str, text: str) -> Part:
    if _INT.fullmatch(item):
        return int(item)
    bounds = [bound.strip() for bound in item.split(":")]
    if len(bounds) not in (2, 3) or not all(not bound or _INT.fullmatch(bound) for bound in bounds):
        raise Format(f"[{text}] is not a slice: {item!r} cannot be read", hint=_EXAMPLES)
    start, stop, step = [int(bound) if bound else None for bound in [*bounds, ""][:3]]
    if step == 0:
        raise Format(f"[{text}] is not a slice: a step cannot be 0", hint=_EXAMPLES)
    return slice(start, stop, step)


def _selected(part: Part, length: int, axis: int) -> Selected:
    if isinstance(part, slice):
        return range(*part.indices(length))
    if not -length <= part < length:
        raise Format(
            f"index {part} is out of range: axis {axis} has {length} {'item' if length == 1 else 'items'}",
            hint=f"{-length} to {length - 1} are there" if length else "the array is empty",
        )
    return part % length
