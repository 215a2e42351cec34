"""How a leaf is cut into the chunks of a zarr array: as its sharding cuts it, where that is a grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from treering._values.boxes import Box, shape_of, size_of

_MOST_TRIES: Final = 1 << 12


def chunk_shape(shape: tuple[int, ...], boxes: Sequence[Box], itemsize: int, limit: int | None) -> tuple[int, ...]:
    """Return the shape of a leaf's chunks; those at the end of an axis may reach beyond it.

    One chunk is one box of the sharding where the boxes are a grid of equal ones (the last of an axis may be
    smaller); else the whole array is one chunk. Where a chunk is larger than ``limit``, it is cut along the leading
    axes: into equal parts of a box, as far as that makes no chunk smaller than half of what is allowed.

    Args:
        shape: of the leaf.
        boxes: the distinct boxes of its sharding, in any order.
        itemsize: bytes of an item.
        limit: bytes of a chunk, at most (a single item may be larger); None: no limit.

    Example:
        >>> quarters = [((0, 4), (0, 3)), ((0, 4), (3, 6)), ((4, 8), (0, 3)), ((4, 8), (3, 6))]
        >>> chunk_shape((8, 6), quarters, 4, None), chunk_shape((8, 6), quarters[:1], 4, None)
        ((4, 3), (8, 6))
        >>> chunk_shape((8, 6), quarters, 4, 24)
        (2, 3)
    """
    chunks = _grid_chunk(shape, boxes)
    if limit is not None:
        chunks = _cut(shape, chunks, itemsize, limit)
    return tuple(max(length, 1) for length in chunks)


def shared_chunk_shape(
    shape: tuple[int, ...], boxes: Sequence[Box], itemsize: int, limit: int | None
) -> tuple[int, ...]:
    """Return the shape of the chunks of a leaf that lies with several processes: no chunk reaches over a box's end.

    As `chunk_shape`, but a box is only cut into parts that divide it, even if those are smaller than half of what is
    allowed, or, where a length has no fitting divisor, larger.

    Args:
        shape: of the leaf.
        boxes: the distinct boxes of its sharding, in any order.
        itemsize: bytes of an item.
        limit: bytes of a chunk; None: no limit.

    Example:
        >>> halves = [((0, 23), (0, 8)), ((23, 46), (0, 8))]
        >>> chunk_shape((46, 8), halves, 1, 80), shared_chunk_shape((46, 8), halves, 1, 80)
        ((10, 8), (23, 3))
    """
    # Where XLA pads, the last boxes may be empty.
    chunk = _grid_chunk(shape, [box for box in boxes if size_of(box)])
    cut = [max(length, 1) for length in chunk]
    if 0 in shape:
        return tuple(cut)
    # At first cuts that leave about as much as is allowed, then any that there are.
    for least in (2, math.inf):
        for axis, length in enumerate(chunk):
            others = math.prod(cut[:axis] + cut[axis + 1 :]) * itemsize
            if limit is None or cut[axis] * others <= limit:
                return tuple(cut)
            row = math.prod(cut[axis + 1 :]) * itemsize
            most = max(limit // others, 1)
            part = _divisor(cut[axis], most) if length < shape[axis] else -(-length // -(-length // most))
            if row > limit:
                cut[axis] = 1
            elif part is not None and others <= limit * (least - 1) and most < least * part:
                cut[axis] = part
    return tuple(cut)


def _divisor(length: int, most: int) -> int | None:
    """Return the largest divisor that is at most ``most``, as far as it is found in time."""
    fewest = -(-length // most)
    return next(
        (length // count for count in range(fewest, min(length, fewest + _MOST_TRIES) + 1) if length % count == 0), None
    )


def _grid_chunk(shape: tuple[int, ...], boxes: Sequence[Box]) -> tuple[int, ...]:
    distinct = set(boxes)
    if not distinct or 0 in shape:
        return shape
    lengths = [shape_of(box) for box in distinct]
    chunk = tuple(map(max, zip(*lengths, strict=True)))
    if 0 in chunk:
        return shape
    for box in distinct:
        for (start, stop), size, length in zip(box, shape, chunk, strict=True):
            if start % length or stop != min(start + length, size):
                return shape
    grid = math.prod(-(-size // length) for size, length in zip(shape, chunk, strict=True))
    return chunk if len(distinct) == grid else shape


def _cut(shape: tuple[int, ...], chunk: tuple[int, ...], itemsize: int, limit: int) -> tuple[int, ...]:
    """Make a chunk smaller along its leading axes until it takes ``limit`` bytes at most."""
    cut = list(chunk)
    for axis, length in enumerate(chunk):
        step = math.prod(chunk[axis + 1 :]) * itemsize
        if length * step <= limit:
            break
        cut[axis] = _part(shape[axis], length, max(limit // step, 1))
        if step <= limit:
            break
    return tuple(cut)


def _part(size: int, length: int, most: int) -> int:
    """Return how long the parts of a box of ``length`` are, ``most`` at most, along an axis of ``size``."""
    if length < size:
        # More boxes follow along this axis: parts that divide a box lie in one box each.
        fewest = -(-length // most)
        for count in range(fewest, min(2 * fewest, fewest + _MOST_TRIES) + 1):
            if length % count == 0 and 2 * (length // count) >= most:
                return length // count
    # As few parts as can be, about equally long, so that the last one is hardly padded.
    return -(-size // -(-size // most))
