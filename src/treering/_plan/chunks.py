"""The chunks of the leaves of a leaves directory: how long they are, who holds each, and who writes it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Final

from treering._plan.save import AlikeLeaves, LeafLayout, SavePlan, Stretch, divide, group_alike
from treering._values.boxes import Box, intersection, shape_of, size_of, whole
from treering._values.keys import split_key
from treering.errors import UnsupportedError

_MOST_TRIES: Final = 1 << 12
# With chunks of a tenth of a share at most, the busiest has at most 1.10 shares.
_PARTS_OF_SHARE: Final = 10
_SMALLEST: Final = 1 << 20


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
    counts = range(fewest, min(length, fewest + _MOST_TRIES) + 1)
    return next((length // count for count in counts if length % count == 0), None)


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
    # Where more boxes follow along this axis, parts that divide a box lie in one box each.
    if length < size and (part := _divisor(length, most)) is not None and 2 * part >= most:
        return part
    # As few parts as can be, about equally long, so that the last one is hardly padded.
    return -(-size // -(-size // most))


def balanced_chunk(layouts: Sequence[LeafLayout], processes: int) -> int:
    """Return how many bytes a chunk that several processes hold may have, so that writing can be balanced.

    Example:
        >>> leaf = LeafLayout(nbytes_per_item=4, shape=(1 << 24,), boxes=((((0, 1 << 24),), (0, 1)),))
        >>> balanced_chunk([leaf], 2), balanced_chunk([leaf], 64)
        (3355443, 1048576)
    """
    total = sum(math.prod(layout.shape) * layout.nbytes_per_item for layout in layouts)
    return max(total // (processes * _PARTS_OF_SHARE), _SMALLEST)


def plan_writers(
    layouts: Sequence[LeafLayout], chunks: Sequence[tuple[int, ...]], processes: int, keys: Sequence[str]
) -> SavePlan[int]:
    """Divide the chunk files of leaves among the processes.

    Each is written once, by a process that holds all of its part inside the leaf. Call the share the least load that
    the busiest process could have if bytes could be divided at will; then it has at most a share and one chunk more.

    Args:
        layouts: where each leaf lies.
        chunks: the shape of each leaf's chunks.
        processes: how many there are.
        keys: key texts of the leaves, for errors.

    Raises:
        UnsupportedError: no process holds a chunk of some leaf alone.

    Example:
        >>> both = LeafLayout(nbytes_per_item=4, shape=(1024,), boxes=((((0, 1024),), (0, 1)),))
        >>> plan = plan_writers([both, both], [(512,), (1024,)], 2, ["a", "b"])
        >>> list(map(tuple, plan.parts_of(0))), list(map(tuple, plan.parts_of(1))), plan.loads
        ([(0, 0), (0, 1)], [(1, 0)], (4096, 4096))
    """
    kinds = group_alike(layouts, processes, lambda leaf: _held_chunks(layouts[leaf], chunks[leaf], keys[leaf]), chunks)

    def nbytes(kind: AlikeLeaves[int], numbers: Sequence[int]) -> int:
        return math.prod(chunks[kind.leaves[0]]) * kind.layout.nbytes_per_item * len(numbers)

    def stretches(kind: AlikeLeaves[int], numbers: Sequence[int]) -> Iterator[Stretch[int]]:
        size = nbytes(kind, numbers[:1])
        yield Stretch(kind=kind, parts=numbers, nbytes=size, step=size, rank=size.bit_length())

    return divide(kinds, processes, nbytes, stretches)


def _held_chunks(layout: LeafLayout, chunk: tuple[int, ...], key: str) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the chunks of a leaf, each with the processes that hold it."""
    for number, owners in enumerate(_holders(layout, chunk)):
        if not owners:
            raise UnsupportedError(
                f"an array of shape {layout.shape} lies with several processes in parts that form no grid, so that none"
                " of them holds a whole chunk",
                path=split_key(key),
                hint="use a sharding that forms a grid, or save with treering.save",
            )
        yield number, owners


def _holders(layout: LeafLayout, chunk: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the processes that hold each chunk, in the order of the grid."""
    grid = [-(-size // length) for size, length in zip(layout.shape, chunk, strict=True)]
    steps = [math.prod(grid[axis + 1 :]) for axis in range(len(grid))]
    holders: list[tuple[int, ...]] = [()] * math.prod(grid)
    parts: dict[int, tuple[int, dict[int, int]]] = {}
    for box, those in layout.boxes:
        owners = tuple(sorted(set(those)))
        touched = [range(start // length, -(-stop // length)) for (start, stop), length in zip(box, chunk, strict=True)]
        inside = all(
            start % length == 0 and (stop % length == 0 or stop == size)
            for (start, stop), length, size in zip(box, chunk, layout.shape, strict=True)
        )
        for place in itertools.product(*touched) if math.prod(shape_of(box)) else ():
            number = sum(at * step for at, step in zip(place, steps, strict=True))
            if inside:  # every chunk that it touches lies in it
                holders[number] = owners
                continue
            inner = tuple((at * length, (at + 1) * length) for at, length in zip(place, chunk, strict=True))
            common = size_of(intersection(inner, box) or ())
            _, held = parts.setdefault(number, (size_of(intersection(inner, whole(layout.shape)) or ()), {}))
            for owner in owners:
                held[owner] = held.get(owner, 0) + common
    for number, (items, held) in parts.items():
        holders[number] = tuple(sorted(owner for owner, found in held.items() if found == items))
    return holders
