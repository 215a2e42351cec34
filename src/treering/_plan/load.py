"""Who reads which bytes of a stored leaf: what each process needs, or a share of all that any process needs.

Where processes want columns of what lies in rows, each would read nearly everything to get its part, and where parts
are smaller than a block, each would read what its neighbours read. Then it is better that each reads a stretch of its
own, all together once, checks it, and the devices exchange the items.
``docs/design/planning.md`` has the figures.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from treering._plan.blocks import ByteRange, covering_ranges
from treering._values.boxes import Box, intersection, relative, runs, shape_of, size_of
from treering._values.checksums import SMALLEST_BLOCK

__all__ = [
    "LoadPlan",
    "Read",
    "StoredChunk",
    "StoredLeaf",
    "Strategy",
    "covering_ranges",
    "plan_load",
    "plan_loads",
]

# Reading more than 1.05 times the bytes is worth an exchange.
_PERCENT: Final = 105


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunk:
    """One stored box of a leaf: its items in C order, checked in blocks."""

    box: Box
    """Which box of the leaf."""
    block: int
    """Bytes of a checksummed block."""


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What one process reads of one chunk."""

    chunk: int
    """Number of the chunk."""
    ranges: tuple[ByteRange, ...]
    """Bytes in the chunk: whole blocks, ascending, apart from each other."""
    boxes: tuple[tuple[int, Box], ...] = ()
    """Where items go: number of the wanted box, and which box of the leaf; none where items are exchanged."""

    @property
    def nbytes(self) -> int:
        """How many bytes that is."""
        return sum(stop - start for start, stop in self.ranges)


class Strategy(enum.Enum):
    """How the wanted boxes come together."""

    DIRECT = "direct"
    """Each process reads what it wants."""
    EXCHANGE = "exchange"
    """Each process reads a stretch, then items go from device to device."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Who reads what of one leaf."""

    strategy: Strategy
    """Whether processes read what they want, or stretches to be exchanged."""
    _itemsize: int
    """Bytes of an item."""
    _chunks: _Chunks
    """What is stored."""
    _wanted: Sequence[Sequence[Box]]
    """Process -> boxes that it wants."""
    _line: _Line
    """All bytes that anybody wants, once."""

    def reads_of(self, process: int) -> tuple[Read, ...]:
        """Return what one process reads, in the order of the chunks; other processes' reads are not made."""
        if self.strategy is Strategy.EXCHANGE:
            return tuple(self._line.reads(process, len(self._wanted)))
        return tuple(self._chunks.direct_reads(self._wanted[process], self._itemsize))

    @property
    def reads(self) -> tuple[tuple[Read, ...], ...]:
        """What every process reads; each needs only its own."""
        return tuple(self.reads_of(process) for process in range(len(self._wanted)))


def plan_load(
    shape: tuple[int, ...], itemsize: int, chunks: Sequence[StoredChunk], wanted: Sequence[Sequence[Box]]
) -> LoadPlan:
    """Divide the reading of one leaf among processes.

    Each process reads what it wants, and no more than the blocks around it. Where all together would so read more
    than 1.05 times what there is, and either more than 1.05 times what they want or one box in many runs, they read
    disjoint stretches of whole blocks instead, of equal length but for a block. What is no larger than one small block
    is always read directly. Every process comes to the same plan by itself.

    Args:
        shape: global shape.
        itemsize: bytes of an item.
        chunks: stored boxes, which tile the leaf.
        wanted: process -> the boxes of the leaf that it wants, no two of which overlap.

    Example:
        >>> rows = [StoredChunk(box=((start, start + 512), (0, 4096)), block=65536) for start in (0, 512)]
        >>> columns = [[((0, 1024), (start, start + 2048))] for start in (0, 2048)]
        >>> plan = plan_load((1024, 4096), 4, rows, columns)
        >>> plan.strategy, plan.reads_of(1)
        (<Strategy.EXCHANGE: 'exchange'>, (Read(chunk=1, ranges=((0, 8388608),), boxes=()),))
    """
    table = _Chunks(chunks)
    line = _Line.of(shape, itemsize, chunks, wanted)
    exchange = line.length > SMALLEST_BLOCK and _costs_too_much(table, itemsize, wanted, line.length)
    return LoadPlan(
        strategy=Strategy.EXCHANGE if exchange else Strategy.DIRECT,
        _itemsize=itemsize,
        _chunks=table,
        _wanted=wanted,
        _line=line,
    )


def plan_loads(leaves: Iterable[StoredLeaf]) -> list[LoadPlan]:
    """Divide the reading of many leaves; those that are stored alike and share ``wanted`` get one plan.

    Example:
        >>> rows = StoredLeaf(
        ...     shape=(8,),
        ...     itemsize=4,
        ...     chunks=(StoredChunk(box=((0, 8),), block=65536),),
        ...     wanted=[[((0, 4),)], [((4, 8),)]],
        ... )
        >>> first, second = plan_loads([rows, rows])
        >>> first is second, first.reads_of(1)
        (True, (Read(chunk=0, ranges=((0, 32),), boxes=((0, ((4, 8),)),)),))
    """
    known: dict[tuple[object, ...], LoadPlan] = {}
    plans = []
    for leaf in leaves:
        # By identity: to compare boxes for 1,024 processes costs more than to plan for them. The plan keeps them alive.
        kind = (leaf.shape, leaf.itemsize, leaf.chunks, id(leaf.wanted))
        plan = known.get(kind)
        if plan is None:
            plan = known[kind] = plan_load(leaf.shape, leaf.itemsize, leaf.chunks, leaf.wanted)
        plans.append(plan)
    return plans


def _costs_too_much(table: _Chunks, itemsize: int, wanted: Sequence[Sequence[Box]], unique: int) -> bool:
    """Tell whether reading directly costs more than it should; counts no longer than until that is known."""
    most = unique * _PERCENT // 100
    most_in_long_runs = max(most, sum(size_of(box) for boxes in wanted for box in boxes) * itemsize * _PERCENT // 100)
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

    def meeting(self, box: Box) -> Iterator[int]:
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
            for number in self.meeting(box):
                common = intersection(self._chunks[number].box, box)
                if common is not None:
                    goals.setdefault(number, []).append((target, common))
        for number, parts in sorted(goals.items()):
            chunk = self._chunks[number]
            ranges = covering_ranges(chunk.box, [box for _, box in parts], itemsize, chunk.block)
            yield Read(chunk=number, ranges=tuple(ranges), boxes=tuple(parts))

    def is_strided(self, read: Read) -> bool:
        """Tell whether some box of a read is more than one run of its chunk."""
        outer = self._chunks[read.chunk].box
        return any(runs(relative(box, outer), shape_of(outer))[0] > 1 for _, box in read.boxes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """What anybody wants of a leaf, each byte once, end to end."""

    stretches: tuple[tuple[int, ByteRange], ...]
    """Number of a chunk, and which bytes of it."""
    ends: tuple[int, ...]
    """Where each stretch ends on the line."""
    steps: tuple[int, ...]
    """Each stretch may be cut at multiples of so many bytes of its chunk."""

    @classmethod
    def of(
        cls, shape: tuple[int, ...], itemsize: int, chunks: Sequence[StoredChunk], wanted: Sequence[Sequence[Box]]
    ) -> _Line:
        distinct = dict.fromkeys(box for boxes in wanted for box in boxes)
        everything = sum(map(size_of, distinct)) >= math.prod(shape)
        stretches, ends, steps = [], [], []
        length = 0
        for number, chunk in enumerate(chunks):
            boxes = [chunk.box] if everything else distinct
            for start, stop in covering_ranges(chunk.box, boxes, itemsize, chunk.block):
                stretches.append((number, (start, stop)))
                length += stop - start
                ends.append(length)
                steps.append(math.lcm(chunk.block, itemsize))
        return cls(stretches=tuple(stretches), ends=tuple(ends), steps=tuple(steps))

    @property
    def length(self) -> int:
        """Bytes on the line."""
        return self.ends[-1] if self.ends else 0

    def reads(self, process: int, processes: int) -> Iterator[Read]:
        """Yield one process's share: from one cut to the next."""
        start = self._nearest_cut(self.length * process // processes)
        stop = self._nearest_cut(self.length * (process + 1) // processes)
        place = bisect.bisect_right(self.ends, start)
        while start < stop:
            number, (_, last) = self.stretches[place]
            to_chunk = last - self.ends[place]
            end = min(stop, self.ends[place])
            yield Read(chunk=number, ranges=((start + to_chunk, end + to_chunk),))
            start = end
            place += 1

    def _nearest_cut(self, position: int) -> int:
        """Return the nearest place on the line between two blocks, or two chunks."""
        place = bisect.bisect_right(self.ends, position)
        if place == len(self.ends):
            return self.length
        _, (first, last) = self.stretches[place]
        to_chunk = last - self.ends[place]
        inside, step = position + to_chunk, self.steps[place]
        below = max(first, inside - inside % step)
        above = min(last, inside - inside % step + step)
        return (below if inside - below <= above - inside else above) - to_chunk
