"""Boxes: the part of an array between two corners, and its place in C order.

Nothing here allocates by shape: shapes may be those of a hostile file.
"""

from __future__ import annotations

import collections
import functools
import math
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Final, TypeAlias, TypeVar

from treering._values.human import pluralize

Box: TypeAlias = tuple[tuple[int, int], ...]
"""One half-open range for each axis; () for the whole of a 0-d array."""

_PRIME: Final = (1 << 127) - 1
Device = TypeVar("Device", bound=Hashable)


@functools.lru_cache(maxsize=1024)
def whole(shape: tuple[int, ...]) -> Box:
    """Return the box that is all of an array.

    Example:
        >>> whole((2, 3))
        ((0, 2), (0, 3))
    """
    return tuple((0, length) for length in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the lengths of the sides.

    Example:
        >>> shape_of(((2, 4), (0, 3)))
        (2, 3)
    """
    return tuple([stop - start for start, stop in box])


def size_of(box: Box) -> int:
    """Return how many items a box holds.

    Example:
        >>> size_of(((2, 4), (0, 3))), size_of(())
        (6, 1)
    """
    return math.prod([stop - start for start, stop in box])


def text_of(box: Box) -> str:
    """Return the box as text, the way it stands in the names of parts.

    Example:
        >>> text_of(((0, 4), (2, 8)))
        '0:4,2:8'
    """
    return ",".join(f"{start}:{stop}" for start, stop in box)


def slices(box: Box, steps: Sequence[int] | None = None) -> tuple[slice, ...]:
    """Return what takes the box, or every n-th item of it along its axes, out of an array.

    Example:
        >>> slices(((0, 4), (2, 8)))
        (slice(0, 4, None), slice(2, 8, None))
    """
    each = [None] * len(box) if steps is None else steps
    return tuple(slice(start, stop, step) for (start, stop), step in zip(box, each, strict=True))


def intersection(a: Box, b: Box) -> Box | None:
    """Return what two boxes of one array have in common; None where that is no item.

    Example:
        >>> intersection(((0, 4), (0, 4)), ((2, 8), (3, 5)))
        ((2, 4), (3, 4))
        >>> intersection(((0, 4),), ((4, 8),)) is None
        True
    """
    common = []
    for (a_start, a_stop), (b_start, b_stop) in zip(a, b, strict=True):
        start, stop = max(a_start, b_start), min(a_stop, b_stop)
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def pick_overlap(place: Box, box: Box, steps: Sequence[int] | None) -> tuple[Box, tuple[slice, ...]] | None:
    """Return what lies in ``place`` of the items that are picked from a box: their box among all picked, their slices.

    Args:
        place: a box of the array.
        box: a box of the array, from whose first corner the items are picked.
        steps: the stride along each axis; None: every item is picked.

    Example:
        >>> pick_overlap(((4, 8), (0, 9)), ((1, 9), (0, 9)), (2, 4))
        (((2, 4), (0, 3)), (slice(1, 4, 2), slice(0, 9, 4)))
        >>> pick_overlap(((4, 8),), ((1, 9),), (7,)) is None
        True
    """
    among: list[tuple[int, int]] = []
    inner: list[slice] = []
    for (low, high), (start, stop), step in zip(place, box, steps or (1,) * len(box), strict=True):
        first = max(-(-(low - start) // step), 0)
        behind = -(-(min(high, stop) - start) // step)
        if first >= behind:
            return None
        among.append((first, behind))
        inner.append(slice(start + first * step - low, start + (behind - 1) * step + 1 - low, step))
    return tuple(among), tuple(inner)


def picked_shape(box: Box, steps: Sequence[int] | None) -> tuple[int, ...]:
    """Return the shape of what is picked from a box.

    Example:
        >>> picked_shape(((1, 9), (0, 9)), (2, 4)), picked_shape(((1, 9),), None)
        ((4, 3), (8,))
    """
    shape = shape_of(box)
    return shape if steps is None else tuple(-(-length // step) for length, step in zip(shape, steps, strict=True))


def bounding_box(boxes: Iterable[Box]) -> Box:
    """Return the smallest box that holds some boxes of one array.

    Example:
        >>> bounding_box([((0, 2), (1, 2)), ((1, 3), (0, 1))])
        ((0, 3), (0, 2))
    """
    return tuple(
        (min(start for start, _ in sides), max(stop for _, stop in sides)) for sides in zip(*boxes, strict=True)
    )


def contains(outer: Box, inner: Box) -> bool:
    """Tell whether ``inner`` lies in ``outer`` altogether.

    Example:
        >>> contains(((0, 4),), ((1, 3),)), contains(((0, 4),), ((1, 5),))
        (True, False)
    """
    return all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def relative(inner: Box, outer: Box) -> Box:
    """Return ``inner`` as it is seen from ``outer``'s first corner.

    Example:
        >>> relative(((5, 6), (2, 4)), ((4, 8), (0, 4)))
        ((1, 2), (2, 4))
    """
    return tuple((start - corner, stop - corner) for (start, stop), (corner, _) in zip(inner, outer, strict=True))


def runs(box: Box, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return how many runs of neighbouring items a box is in an array of ``shape``, and how many items each is.

    Example:
        >>> runs(((0, 4), (2, 4)), (4, 8)), runs(((0, 4), (0, 8)), (4, 8)), runs(((0, 0),), (4,))
        ((4, 2), (1, 32), (0, 0))
    """
    if not (size := size_of(box)):
        return 0, 0
    items = 1
    for (start, stop), length in zip(reversed(box), reversed(shape), strict=True):
        items *= stop - start
        if stop - start != length:
            break
    return size // items, items


def flat_range(box: Box, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return where a box that is one run lies in an array of ``shape``, in items of C order; None where it is more.

    A box without items is the range (0, 0).

    Example:
        >>> flat_range(((1, 3), (0, 8)), (4, 8)), flat_range(((2, 3), (2, 4)), (4, 8))
        ((8, 24), (18, 20))
        >>> flat_range(((0, 2), (2, 4)), (4, 8)) is None
        True
    """
    count, items = runs(box, shape)
    if count != 1:
        return None if count else (0, 0)
    first = 0
    for (start, _), length in zip(box, shape, strict=True):
        first = first * length + start
    return first, first + items


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Return a range of items in C order as few boxes, in that order: at most two for each axis, less one.

    Example:
        >>> boxes_of_range((3, 4), 2, 9)
        [((0, 1), (2, 4)), ((1, 2), (0, 4)), ((2, 3), (0, 1))]
        >>> boxes_of_range((), 0, 1), boxes_of_range((3, 4), 5, 5)
        ([()], [])
    """
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    boxes: list[Box] = []
    while start < stop:
        if not shape:
            return [()]
        # The outermost axis along which whole steps can be made from here.
        axis = 0
        while start % strides[axis] or start + strides[axis] > stop:
            axis += 1
        here = [start // stride % length for stride, length in zip(strides, shape, strict=True)]
        steps = min((stop - start) // strides[axis], shape[axis] - here[axis])
        fixed = [(place, place + 1) for place in here[:axis]]
        boxes.append((*fixed, (here[axis], here[axis] + steps), *whole(shape[axis + 1 :])))
        start += steps * strides[axis]
    return boxes


def find_cover_error(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Return None where the boxes hold each item of an array of ``shape`` exactly once, else what is wrong.

    An array without items has one box, the whole. Costs time in proportion to the boxes, however they lie.

    Example:
        >>> find_cover_error((4,), [((0, 1),), ((1, 4),)])
        >>> find_cover_error((4,), [((0, 1),), ((2, 4),)])
        '1 item lies in no box, of 4'
    """
    everything = whole(shape)
    if len(boxes) == 1 and boxes[0] == everything:
        return None
    if not (size := size_of(everything)):
        return f"an array of shape {shape} has no items, so it has one box, the whole; {len(boxes)} were found"
    for box in boxes:
        if len(box) != len(shape):
            return f"the box [{text_of(box)}] has {pluralize(len(box), 'axes')}, the shape {shape} has {len(shape)}"
        if not all(0 <= start < stop <= length for (start, stop), length in zip(box, shape, strict=True)):
            return f"the box [{text_of(box)}] is empty or leads out of the shape {shape}"
    if (found := sum(map(size_of, boxes))) < size:
        return f"{pluralize(size - found, 'items lie')} in no box, of {size}"
    if found > size:
        return f"boxes overlap: they hold {pluralize(found, 'items')}, there are {size}"
    return None if _same_cover([everything], boxes) else "boxes overlap, and as many items lie in no box"


def _same_cover(some: Iterable[Box], others: Iterable[Box]) -> bool:
    """Tell whether two lists of boxes hold every item equally often.

    Draw a secret number for each coordinate of each axis and take a box as the product of (number at its start less
    number at its stop). Multiplied out, that is the signed sum of the box's corners, and signed corners determine
    how often each item is held. So equal covers have equal sums, and others agree by chance only: about once in
    2 ** 120, as two polynomials do at a random point.
    """
    numbers: dict[tuple[int, int], int] = collections.defaultdict(lambda: int.from_bytes(os.urandom(16)) >> 1)
    total = 0
    for sign, boxes in ((1, some), (-1, others)):
        for box in boxes:
            product = sign
            for axis, (start, stop) in enumerate(box):
                product = product * (numbers[axis, start] - numbers[axis, stop]) % _PRIME
            total += product
    return total % _PRIME == 0


def box_of_slices(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """Return slices of step one as a box; those of a shard beyond the end of the array have no items.

    Example:
        >>> box_of_slices((slice(2, 4), slice(None)), (8, 3))
        ((2, 4), (0, 3))
    """
    return tuple(part.indices(length)[:2] for part, length in zip(index, shape, strict=True))


def held_boxes(
    indices: Mapping[Device, tuple[slice, ...]], shape: tuple[int, ...], owner_of: Callable[[Device], int]
) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    """Return the distinct boxes of a sharding in C order, each with its owners, ascending.

    Args:
        indices: device -> its part of the array, as ``Sharding.devices_indices_map`` gives it.
        shape: global shape.
        owner_of: which owner a device belongs to, such as its process.

    Boxes without items are left out, but for an array that has none: that one has one box, the whole.

    Example:
        >>> halves = {0: (slice(0, 4),), 1: (slice(4, 8),), 2: (slice(0, 4),), 3: (slice(4, 8),)}
        >>> held_boxes(halves, (8,), lambda device: device // 2)
        ((((0, 4),), (0, 1)), (((4, 8),), (0, 1)))
    """
    owners: dict[Box, set[int]] = collections.defaultdict(set)
    for device, index in indices.items():
        box = whole(shape) if 0 in shape else box_of_slices(index, shape)
        if size_of(box) or 0 in shape:
            owners[box].add(owner_of(device))
    return tuple((box, tuple(sorted(owners[box]))) for box in sorted(owners))
