"""Slices on devices -> distinct boxes and who holds each: what a sharding says, without jax."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

from treering._values.boxes import Box, size_of

Device = TypeVar("Device", bound=Hashable)


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
    owners: dict[Box, set[int]] = {}
    everybody: set[int] = set()
    for device, index in indices.items():
        owner = owner_of(device)
        everybody.add(owner)
        box = box_of_slices(index, shape)
        if size_of(box):
            owners.setdefault(box, set()).add(owner)
    if not owners and 0 in shape:
        owners[tuple((0, length) for length in shape)] = everybody
    return tuple((box, tuple(sorted(owners[box]))) for box in sorted(owners))
