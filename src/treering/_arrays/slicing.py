"""numpy's basic indexing over an array that lies in a file: which box has to be read, and what to do with it."""

from __future__ import annotations

import operator
from types import EllipsisType
from typing import Any, TypeAlias

from treering._values.boxes import Box
from treering._values.human import pluralize

Key: TypeAlias = int | slice | EllipsisType | tuple[int | slice | EllipsisType | None, ...] | None


def box_and_rest(key: Any, shape: tuple[int, ...]) -> tuple[Box, tuple[int, ...] | None, tuple[Any, ...]]:
    """Return the smallest box that holds all that ``key`` selects, its steps, and the key to apply to what they pick.

    The steps say along each axis every how manyth item of the box is selected; None: all of them.

    Args:
        key: integers, slices, ``...`` and None, as numpy takes them; no lists, arrays or booleans.
        shape: the shape that is indexed.

    Raises:
        IndexError: too many indices, or one that is out of bounds.
        TypeError: something else than basic indexing.

    Example:
        >>> box_and_rest((slice(None), -1), (4, 5))
        (((0, 4), (4, 5)), None, (slice(None, None, None), 0))
        >>> box_and_rest(..., ())
        ((), None, (Ellipsis,))
        >>> box_and_rest(slice(6, 1, -2), (8,))
        (((2, 7),), (2,), (slice(None, None, -1),))
        >>> box_and_rest((slice(5, 9), -1), (1 << 62, 1 << 62))[0]  # the shape alone costs nothing
        ((5, 9), (4611686018427387903, 4611686018427387904))
    """
    parts = list(key) if isinstance(key, tuple) else [key]
    if (used := sum(part is not None and part is not Ellipsis for part in parts)) > len(shape):
        raise IndexError(f"too many indices: the leaf has {pluralize(len(shape), 'axes')}, {used} were indexed")
    dots = [at for at, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    at = dots[0] if dots else len(parts)
    parts[at : at + 1] = [slice(None)] * (len(shape) - used)
    box: list[tuple[int, int]] = []
    steps: list[int] = []
    rest: list[Any] = []
    for part in parts:
        if part is None:
            rest.append(None)
            continue
        side, step, inner = _side(part, shape[len(box)], len(box))
        box.append(side)
        steps.append(step)
        rest.append(inner)
    if dots:  # numpy then returns an array, also one without axes
        rest.append(Ellipsis)
    return tuple(box), tuple(steps) if max(steps, default=1) > 1 else None, tuple(rest)


def _side(part: Any, length: int, axis: int) -> tuple[tuple[int, int], int, int | slice]:
    """Return the range of one axis that holds what is selected, the step inside it, and the index of what they pick."""
    if isinstance(part, slice):
        if not (picked := range(*part.indices(length))):
            return (0, 0), 1, slice(None)
        low, high = min(picked[0], picked[-1]), max(picked[0], picked[-1]) + 1
        step = abs(picked.step) if len(picked) > 1 else 1
        return (low, high), step, slice(None, None, -1 if picked.step < 0 else None)
    if isinstance(part, bool):
        raise TypeError("a leaf in a file is indexed with integers, slices, ... and None")
    try:
        index = operator.index(part)
    except TypeError as error:
        hint = "read what is needed with slices, and index the array that comes back"
        raise TypeError(f"a leaf in a file is not indexed with {type(part).__name__}; {hint}") from error
    if not -length <= index < length:
        raise IndexError(f"index {index} is out of bounds for axis {axis} with size {length}")
    return (index % length, index % length + 1), 1, 0
