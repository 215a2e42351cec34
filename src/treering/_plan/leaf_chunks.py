"""How a leaf is cut into the chunks of a zarr array: as its sharding cuts it, where that is a grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from treering._values.boxes import Box, shape_of

__all__ = ["chunk_shape"]

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
