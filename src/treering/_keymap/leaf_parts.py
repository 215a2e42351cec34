"""What a rule of a key map makes of one stored leaf: parts with their axes in the order of the new leaf. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from treering._keymap.key_rule import KeyRule
from treering._values.boxes import Box, whole
from treering._values.dtypes import is_kind_kept
from treering._values.human import pluralize


class MapLeaf(NamedTuple):
    """A leaf as a map sees it."""

    key: str
    """Its key text."""
    shape: tuple[int, ...] | None = None
    """Its shape; None where it can only have another key, as a Python value or a PRNG key can."""
    dtype: str | None = None
    """Name of its dtype."""


class Piece(NamedTuple):
    """A box of a new leaf that is one box of a stored one."""

    box: Box
    """Which box of the new leaf."""
    leaf: int
    """Number of the stored leaf."""
    start: tuple[int, ...]
    """First corner of the box of the stored leaf."""
    axes: tuple[int | None, ...]
    """As in ``SourceBox``; the box has the length one along axes that are not among them."""


class LeafPart(NamedTuple):
    """A box of a stored leaf with its axes in the order of the new one, without stacked axes."""

    leaf: int
    start: tuple[int, ...]
    shape: tuple[int, ...] | None
    axes: tuple[int | None, ...]
    """Before they are joined by ``flatten``; None: the first one of the two that ``unflatten`` makes."""
    dtype: str | None


class LeafCut(NamedTuple):
    """How a rule divides a leaf, and orders the axes of the parts."""

    lengths: list[int]
    """Of the axes that are unstacked."""
    axis: int
    """The axis that is split."""
    targets: list[tuple[int, tuple[int | None, ...], tuple[int, ...] | None]]
    """For each of them where its part of that axis begins, and axes and shape as in ``LeafPart``."""


def cut_leaf(leaf: MapLeaf, rule: KeyRule) -> LeafCut | str:
    """Return how a rule divides a leaf, or why it cannot.

    Example:
        >>> cut_leaf(MapLeaf("w", (6, 4), "int8"), KeyRule("w", "w", unflatten=(0, 3))).targets
        [(0, (None, 0, 1), (3, 2, 4))]
    """
    if (shape := leaf.shape) is None:
        whole_leaf = LeafCut([], 0, [(0, (), None)])
        return "changes arrays, and it can only have another key" if rule.moves_items else whole_leaf
    if rule.cast is not None and leaf.dtype != rule.cast[0]:
        return f"casts from {rule.cast[0]}, found {leaf.dtype}"
    if rule.cast is not None and not is_kind_kept(*rule.cast):
        return f"casts from {rule.cast[0]} to {rule.cast[1]}, which holds another kind of number"
    gone = rule.unstack.values()
    if any(axis >= len(shape) for axis in gone):
        return f"unstacks an axis that it does not have, its shape is {shape}"
    axes = [axis for axis in range(len(shape)) if axis not in gone]
    axis, ranges = 0, [(0, 0)]
    if rule.split is not None:
        if not -len(axes) <= rule.split < len(axes):
            return f"splits an axis that it does not have, its shape is {shape}"
        axis = axes[rule.split]
        if (sizes := part_sizes(shape[axis], rule.sizes, len(rule.targets))) is None:
            return f"splits axis {axis} into {rule.sizes or f'{len(rule.targets)} equal parts'}, its shape is {shape}"
        ranges = list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))
    cut = LeafCut([shape[one] for one in gone], axis, [])
    for start, stop in ranges:
        lengths = [stop - start if rule.split is not None and one == axis else shape[one] for one in axes]
        if isinstance(made := _order_axes(axes, lengths, rule), str):
            return f"{made}, its shape is {shape}"
        cut.targets.append((start, *made))
    return cut


def _order_axes(
    stored: Sequence[int], lengths: list[int], rule: KeyRule
) -> tuple[tuple[int | None, ...], tuple[int, ...]] | str:
    """Return axes and shape of a part, as in ``LeafPart``, or why the rule does not fit them."""
    axes: list[int | None] = list(stored)
    if rule.unflatten is not None:
        place, count = rule.unflatten
        if place >= len(axes) or lengths[place] % count:
            return f"unflattens axis {place} into {count} equal parts"
        axes.insert(place, None)
        lengths[place : place + 1] = [count, lengths[place] // count]
    order = range(len(axes)) if rule.transpose is None else rule.transpose
    if len(order) != len(axes):
        return f"is for {pluralize(len(order), 'axes')}"
    lengths = [lengths[one] for one in order]
    if rule.flatten is not None:
        place, count = rule.flatten
        if place + 1 >= len(axes) or lengths[place] != count:
            return f"flattens axis {place} of the length {count} and the next one"
        lengths[place : place + 2] = [count * lengths[place + 1]]
    return tuple(axes[one] for one in order), tuple(lengths)


def divide_part(part: LeafPart, rule: KeyRule) -> Iterator[Piece]:
    """Yield the pieces of a part: one for each place along an axis that is added or taken away.

    Example:
        >>> part = LeafPart(0, (0,), (2, 2), (None, 0), "int8")
        >>> [(piece.box, piece.start) for piece in divide_part(part, KeyRule("w", "w", unflatten=(0, 2)))]
        [(((0, 1), (0, 2)), (0,)), (((1, 2), (0, 2)), (2,))]
    """
    lengths, divided, inner = list(part.shape or ()), 0, 0
    joined, count = rule.flatten or (0, 1)
    if rule.flatten is not None:
        inner = lengths[joined] // count
        lengths[joined : joined + 1] = [count, inner]
    if rule.unflatten is not None:
        divided = sorted(axis for axis in part.axes if axis is not None)[rule.unflatten[0]]
    for place, row in itertools.product(range((rule.unflatten or (0, 1))[1]), range(count)):
        box, start, axes = list(whole(tuple(lengths))), list(part.start), list(part.axes)
        if rule.unflatten is not None:
            box[axes.index(None)] = (place, place + 1)
            start[divided] += place * lengths[axes.index(divided)]
        if rule.flatten is not None:
            if (outer := axes.pop(joined)) is not None:
                start[outer] += row
            elif row != place:
                continue
            low, high = box[joined + 1]
            box[joined : joined + 2] = [(row * inner + low, row * inner + high)]
        yield Piece(tuple(box), part.leaf, tuple(start), tuple(axes))


def part_sizes(length: int, sizes: Sequence[int] | None, count: int) -> list[int] | None:
    """Return how long each part of an axis is; None where it has another length.

    Example:
        >>> part_sizes(6, None, 3), part_sizes(6, (4, 2), 2), part_sizes(7, None, 3)
        ([2, 2, 2], [4, 2], None)
    """
    if sizes is not None:
        return list(sizes) if sum(sizes) == length else None
    return [length // count] * count if length and length % count == 0 else None


def place_piece(piece: Piece, places: Sequence[int], merge: int, first: int, stacks: Sequence[int]) -> Piece:
    """Return a piece of a part at its place in the new leaf: that of its source, and along the stacked axes.

    Args:
        piece: of the part.
        places: the places along the stacked axes.
        merge: the axis along which sources are joined.
        first: where the source begins along it.
        stacks: the stacked axes.
    """
    box = list(piece.box)
    if first:
        box[merge] = (first + box[merge][0], first + box[merge][1])
    axes = list(piece.axes)
    for axis, place in zip(stacks, places, strict=True):
        box.insert(axis, (place, place + 1))
        axes.insert(axis, None)
    return Piece(tuple(box), piece.leaf, piece.start, tuple(axes))
