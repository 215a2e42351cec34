"""Which blocks of a stored chunk hold the wanted items: checksums hold for whole blocks, so whole blocks are read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from treering._values.boxes import Box, picked, shape_of

ByteRange = tuple[int, int]
"""First byte and the byte behind the last."""


def covering_ranges(
    chunk_box: Box, wanted_boxes: Iterable[Box], itemsize: int, block: int, steps: Sequence[int] | None = None
) -> list[ByteRange]:
    """Return which bytes of a chunk must be read and checked to get the wanted boxes.

    Exactly the blocks that hold a wanted byte, as ascending ranges that neither overlap nor touch. Costs time and
    memory in proportion to the blocks of the chunk at most, not to the runs of the wanted boxes.

    Args:
        chunk_box: the box of the leaf that the chunk holds, in C order.
        wanted_boxes: boxes of the leaf; what lies outside the chunk is left out.
        itemsize: bytes of an item.
        block: bytes of a block; the last block of the chunk may be shorter.
        steps: along each axis, every how manyth item of a box is wanted; None: all.

    Example:
        >>> chunk = ((0, 1024), (0, 1024))
        >>> covering_ranges(chunk, [chunk], 4, 65536)
        [(0, 4194304)]
        >>> covering_ranges(chunk, [((16, 17), (0, 8)), ((1000, 1024), (0, 1024))], 4, 65536)
        [(65536, 131072), (4063232, 4194304)]
    """
    nbytes = math.prod(shape_of(chunk_box)) * itemsize
    ranges: list[ByteRange] = []
    for wanted in dict.fromkeys(wanted_boxes):
        if wanted == chunk_box and steps is None:
            return [(0, nbytes)] if nbytes else []
        common = picked(chunk_box, wanted, steps)
        if common is not None:
            ranges += _covering_one(common[1], shape_of(chunk_box), itemsize, block)
    ranges.sort()
    return _clipped(_merged(ranges), nbytes)


def _covering_one(parts: Sequence[slice], shape: tuple[int, ...], itemsize: int, block: int) -> list[ByteRange]:
    """Return ranges of whole blocks that cover slices of an array, ascending; neighbours may still touch."""
    first = 0
    stride = extent = itemsize
    steps: list[range] = []
    # From the innermost axis out: where the gap between two steps is smaller than a block, no block lies in it, and
    # all steps together are one run. Further out, every step is a run of its own, and each costs a block at least.
    for part, length in zip(reversed(parts), reversed(shape), strict=True):
        first += part.start * stride
        count = len(range(part.start, part.stop, part.step))
        apart = part.step * stride
        if not steps and apart - extent < block:
            extent += (count - 1) * apart
        elif count > 1:
            steps.append(range(0, count * apart, apart))
        stride *= length
    ranges: list[ByteRange] = []
    for offsets in itertools.product(*reversed(steps)):
        start = first + sum(offsets)
        stop = start + extent
        ranges.append((start - start % block, stop + -stop % block))
    return ranges


def _merged(ranges: list[ByteRange]) -> list[ByteRange]:
    """Join ascending ranges that touch or overlap."""
    merged = ranges[:1]
    for start, stop in ranges[1:]:
        last_start, last_stop = merged[-1]
        if start <= last_stop:
            merged[-1] = last_start, max(last_stop, stop)
        else:
            merged.append((start, stop))
    return merged


def _clipped(ranges: list[ByteRange], nbytes: int) -> list[ByteRange]:
    """End the last range where the chunk ends: its last block may be shorter."""
    if ranges and ranges[-1][1] > nbytes:
        ranges[-1] = ranges[-1][0], nbytes
    return ranges
