"""Who reads which boxes of a stored leaf: each process what it needs, or a share of all that any process needs.

Where processes want columns of what lies in rows, each would read nearly everything to get its part, and where parts
are smaller than a block, each would read what its neighbours read. Then it is better that each reads some rows of its
own, all together once, checks them, and the devices exchange the items.
``docs/design/planning.md`` has the figures.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from treering._plan.exchange import PERCENT, Grid, Parts, StoredChunk, Turns, plan_parts
from treering._values.boxes import Box, intersection, pick_overlap, relative, runs, shape_of, size_of
from treering._values.checksums import SMALLEST_BLOCK

ByteRange = tuple[int, int]
"""First byte and the byte behind the last."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredLeaf:
    """A leaf as it is stored, and as it is wanted."""

    shape: tuple[int, ...]
    """Global shape."""
    itemsize: int
    """Bytes of an item."""
    chunks: tuple[StoredChunk, ...]
    """Stored boxes, which tile the leaf."""
    wanted: Sequence[Sequence[Box]]
    """Process -> the boxes that it wants, no two of which overlap. Leaves that are wanted alike share one."""
    grid: Grid | None = None
    """The devices that it is wanted on; None where they cannot exchange anything. Shared as ``wanted`` is."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What one process reads of one chunk."""

    chunk: int
    """Number of the chunk."""
    ranges: tuple[ByteRange, ...]
    """Bytes in the chunk: whole blocks, ascending, apart from each other."""
    boxes: tuple[tuple[int, Box], ...]
    """Where items go: number of the box of those that the process reads, and which box of the leaf."""

    @property
    def nbytes(self) -> int:
        """How many bytes that is."""
        return sum(stop - start for start, stop in self.ranges)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeafLoadPlan:
    """Who reads what of one leaf."""

    parts: Parts | None
    """Who reads which rows where items are exchanged; None where each process reads what it wants."""
    _shape: tuple[int, ...]
    """Global shape."""
    _itemsize: int
    """Bytes of an item."""
    _chunks: _Chunks
    """What is stored."""
    _wanted: Sequence[Sequence[Box]]
    """Process -> boxes that it wants."""

    def boxes_of(self, process: int) -> Sequence[Box]:
        """Return the boxes that one process reads."""
        return self._wanted[process] if self.parts is None else self.parts.boxes_of(process, self._shape)

    def reads_of(self, process: int) -> tuple[Read, ...]:
        """Return what one process reads, in the order of the chunks; other processes' reads are not made."""
        return tuple(self._chunks.direct_reads(self.boxes_of(process), self._itemsize))


def plan_load(
    shape: tuple[int, ...],
    itemsize: int,
    chunks: Sequence[StoredChunk],
    wanted: Sequence[Sequence[Box]],
    grid: Grid | None = None,
) -> LeafLoadPlan:
    """Divide the reading of one leaf among processes.

    Each process reads what it wants, and no more than the blocks around it. Where all together would so read more
    than 1.05 times what there is, and either more than 1.05 times what they want or one box in many runs, they read
    disjoint rows instead, of about equal number, and all together 1.05 times what there is at most. What is no larger
    than one small block is always read directly. Every process comes to the same plan by itself.

    Args:
        shape: global shape.
        itemsize: bytes of an item.
        chunks: stored boxes, which tile the leaf; none where parts of it cannot be read.
        wanted: process -> the boxes of the leaf that it wants, no two of which overlap.
        grid: the devices that it is wanted on; None where they cannot exchange anything.

    Example:
        >>> rows = [StoredChunk(box=((start, start + 512), (0, 4096)), block=65536) for start in (0, 512)]
        >>> columns = [[((0, 1024), (start, start + 2048))] for start in (0, 2048)]
        >>> grid = Grid(shape=(2,), owners=(0, 1), spec=((), (0,)))
        >>> plan = plan_load((1024, 4096), 4, rows, columns, grid)
        >>> plan.boxes_of(1)
        (((512, 1024), (0, 4096)),)
    """
    table = _Chunks(chunks)
    unique = math.prod(shape) * itemsize
    worth = grid is not None and bool(chunks) and unique > SMALLEST_BLOCK and _want_all(shape, wanted)
    exchange = worth and _costs_too_much(table, itemsize, wanted, unique)
    parts = plan_parts(shape, itemsize, chunks, grid) if exchange and grid is not None else None
    return LeafLoadPlan(parts=parts, _shape=shape, _itemsize=itemsize, _chunks=table, _wanted=wanted)


def plan_loads(leaves: Iterable[StoredLeaf], processes: int) -> list[LeafLoadPlan]:
    """Divide the reading of many leaves; those that are stored alike and share ``wanted`` are planned as one.

    Small leaves, which few processes read for all, are read by different ones in turn.

    Args:
        leaves: what is stored and wanted.
        processes: how many there are.

    Example:
        >>> rows = StoredLeaf(
        ...     shape=(8,),
        ...     itemsize=4,
        ...     chunks=(StoredChunk(box=((0, 8),), block=65536),),
        ...     wanted=[[((0, 4),)], [((4, 8),)]],
        ... )
        >>> first, second = plan_loads([rows, rows], 2)
        >>> first is second, first.reads_of(1)
        (True, (Read(chunk=0, ranges=((0, 32),), boxes=((0, ((4, 8),)),)),))
    """
    leaves = list(leaves)
    same: dict[int, LeafLoadPlan] = {}
    known: dict[tuple[object, ...], LeafLoadPlan] = {}
    turns = Turns(processes)
    plans = []
    for leaf in leaves:
        if (plan := same.get(id(leaf))) is None:
            # By identity: to compare boxes for 1,024 processes costs more than to plan for them.
            kind = (leaf.shape, leaf.itemsize, leaf.chunks, id(leaf.wanted), leaf.grid is None)
            if (plan := known.get(kind)) is None:
                plan = known[kind] = plan_load(leaf.shape, leaf.itemsize, leaf.chunks, leaf.wanted, leaf.grid)
            same[id(leaf)] = plan
        if plan.parts is not None:
            row_bytes = math.prod(leaf.shape) * leaf.itemsize // plan.parts.length
            parts = turns.assign(plan.parts, row_bytes)
            plan = plan if parts is plan.parts else dataclasses.replace(plan, parts=parts)
        plans.append(plan)
    return plans


def _want_all(shape: tuple[int, ...], wanted: Sequence[Sequence[Box]]) -> bool:
    """Tell whether each item is wanted by somebody, as it is where a sharding wants them."""
    return sum(map(size_of, {box for boxes in wanted for box in boxes})) >= math.prod(shape)


def _costs_too_much(table: _Chunks, itemsize: int, wanted: Sequence[Sequence[Box]], unique: int) -> bool:
    """Tell whether reading directly costs more than it should; counts no longer than until that is known."""
    most = unique * PERCENT // 100
    most_in_long_runs = max(most, sum(size_of(box) for boxes in wanted for box in boxes) * itemsize * PERCENT // 100)
    cost, strided = 0, False
    for boxes, count in Counter(tuple(boxes) for boxes in wanted).items():
        for read in table.direct_reads(boxes, itemsize):
            cost += read.nbytes * count
            strided = strided or table.is_strided(read)
            if cost > (most if strided else most_in_long_runs):
                return True
    return False


class _Chunks:
    """The chunks of one leaf, to be asked which of them meet a box.

    For each axis and each different side on it there is the set of the chunks with that side, as the bits of an
    integer: a question costs as many steps as there are different sides, not as there are chunks.
    """

    def __init__(self, chunks: Sequence[StoredChunk]) -> None:
        self._chunks = chunks
        self._sides: list[dict[tuple[int, int], int]] = [{} for _ in (chunks[0].box if chunks else ())]
        for number, chunk in enumerate(chunks):
            for sides, side in zip(self._sides, chunk.box, strict=True):
                sides[side] = sides.get(side, 0) | 1 << number

    def find_overlapping(self, box: Box) -> Iterator[int]:
        """Yield the numbers of the chunks that hold an item of the box, ascending."""
        if not size_of(box):
            return
        found = (1 << len(self._chunks)) - 1
        for sides, (start, stop) in zip(self._sides, box, strict=True):
            here = 0
            for (first, last), numbers in sides.items():
                if first < stop and start < last:
                    here |= numbers
            found &= here
        digits = f"{found:b}"
        at = digits.rfind("1")
        while at >= 0:
            yield len(digits) - 1 - at
            at = digits.rfind("1", 0, at)

    def direct_reads(self, boxes: Sequence[Box], itemsize: int) -> Iterator[Read]:
        """Yield what must be read to get some boxes, in the order of the chunks."""
        goals: dict[int, list[tuple[int, Box]]] = {}
        for target, box in enumerate(boxes):
            for number in self.find_overlapping(box):
                if (common := intersection(self._chunks[number].box, box)) is not None:
                    goals.setdefault(number, []).append((target, common))
        for number, parts in sorted(goals.items()):
            chunk = self._chunks[number]
            ranges = covering_ranges(chunk.box, [box for _, box in parts], itemsize, chunk.block)
            yield Read(chunk=number, ranges=tuple(ranges), boxes=tuple(parts))

    def is_strided(self, read: Read) -> bool:
        """Tell whether some box of a read is more than one run of its chunk."""
        outer = self._chunks[read.chunk].box
        return any(runs(relative(box, outer), shape_of(outer))[0] > 1 for _, box in read.boxes)


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
        steps: the stride per axis at which items of a box are wanted; None: all of them.

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
        if (common := pick_overlap(chunk_box, wanted, steps)) is not None:
            ranges += _cover_one(common[1], shape_of(chunk_box), itemsize, block)
    merged: list[ByteRange] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return merged


def _cover_one(parts: Sequence[slice], shape: tuple[int, ...], itemsize: int, block: int) -> list[ByteRange]:
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
    starts = (first + sum(offsets) for offsets in itertools.product(*reversed(steps)))
    # The last block of the chunk may be shorter; the stride is now the bytes of all of it.
    return [(start - start % block, min(start + extent + -(start + extent) % block, stride)) for start in starts]
