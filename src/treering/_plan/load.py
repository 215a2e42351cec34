"""Who reads which boxes of a stored leaf: each process what it needs, or a share of all that any process needs.

Where processes want columns of what lies in rows, each would read nearly everything to get its part, and where parts
are smaller than a block, each would read what its neighbours read. Then it is better that each reads some rows of its
own, all together once, checks them, and the devices exchange the items.

XLA reshards arrays that are cut evenly along an axis, nothing else. So the leaf is taken as an array that is cut along
one axis into one part of equal length for each device, padded at its ends, and each process reads the parts of its
devices. Blocks are read whole, so a block at the border of two processes is read by both: where that would cost too
much, parts are longer, and some devices have nothing but padding.
``docs/design/planning.md`` has the figures.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from treering._values.boxes import Box, intersection, pick_overlap, relative, runs, shape_of, size_of, whole
from treering._values.checksums import SMALLEST_BLOCK

if TYPE_CHECKING:
    from numpy.typing import NDArray

PERCENT: Final = 105
"""What is worth reading, of what there is: 1.05 times the bytes."""

# Parts of whole blocks are cheaper than others; they may be so much longer.
_ALIGNED_PERCENT: Final = 110


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunk:
    """One stored box of a leaf: its items in C order, checked in blocks."""

    box: Box
    """Which box of the leaf."""
    block: int
    """Bytes of a checksummed block; all of the chunk where it can only be read whole."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """How a leaf is wanted: cut along the axes of a mesh of devices, without jax.

    Example:
        >>> columns = Grid(shape=(2, 2), owners=(0, 1, 2, 3), spec=((), (1,)))
        >>> columns.order(0), columns.owners_along(0)
        ((0, 1), (0, 1, 2, 3))
        >>> columns.order(1), columns.owners_along(1)
        ((1, 0), (0, 2, 1, 3))
    """

    shape: tuple[int, ...]
    """Shape of the mesh."""
    owners: tuple[int, ...]
    """The process of each device, in C order."""
    spec: tuple[tuple[int, ...], ...]
    """For each axis of the leaf the axes of the mesh that cut it, outermost first."""

    def order(self, axis: int) -> tuple[int, ...]:
        """Return the axes of the mesh in the order in which they cut a leaf's axis into one part for each device.

        Those that cut it in the end come first, then those that only replicate, then those that cut other axes: so
        the exchange is an all-to-all over the last, and a gathering over the middle, and no device ever has more than
        its part, or what it wants.
        """
        others = [number for at, some in enumerate(self.spec) if at != axis for number in some]
        free = [n for n in range(len(self.shape)) if n not in self.spec[axis] and n not in others]
        return (*self.spec[axis], *free, *others)

    def owners_along(self, axis: int) -> tuple[int, ...]:
        """Return the process of each part, where a leaf's axis is cut into one for each device."""
        return _owners_along(self.shape, self.owners, self.order(axis))


@functools.lru_cache(maxsize=256)
def _owners_along(shape: tuple[int, ...], owners: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    steps = [range(0, shape[axis] * strides[axis], strides[axis]) for axis in order]
    return tuple(owners[sum(place)] for place in itertools.product(*steps))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A leaf cut along one axis into parts of equal length, one for each device; some or all of a part is padding.

    Example:
        >>> parts = Parts(axis=0, length=10, rows=4, first=1, owners=(0, 0, 1, 1))
        >>> [parts.rows_of(place) for place in range(4)], parts.padded
        ([(0, 0), (0, 4), (4, 8), (8, 10)], 16)
        >>> parts.box_of(2, (10, 2)), parts.box_of(0, (10, 2))
        (((4, 8), (0, 2)), None)
    """

    axis: int
    """Which axis is cut."""
    length: int
    """How long the leaf is along it."""
    rows: int
    """How long a part is along it."""
    first: int = 0
    """Number of the part that begins where the leaf begins; those before it are padding."""
    owners: tuple[int, ...]
    """The process that reads each part."""

    @property
    def used(self) -> int:
        """How many parts hold something."""
        return -(-self.length // self.rows)

    @property
    def padded(self) -> int:
        """How long all parts are together."""
        return self.rows * len(self.owners)

    def rows_of(self, place: int) -> tuple[int, int]:
        """Return which rows of the leaf a part holds; (0, 0) for none."""
        start = (place - self.first) * self.rows
        stop = min(start + self.rows, self.length)
        return (start, stop) if 0 <= start < stop else (0, 0)

    def box_of(self, place: int, shape: tuple[int, ...]) -> Box | None:
        """Return which box of a leaf of ``shape`` a part holds; None for none."""
        start, stop = self.rows_of(place)
        box = whole(shape)
        return (*box[: self.axis], (start, stop), *box[self.axis + 1 :]) if start < stop else None


def plan_parts(shape: tuple[int, ...], itemsize: int, chunks: Sequence[StoredChunk], grid: Grid) -> Parts:
    """Cut a leaf for reading: among as many processes as can be, and all together read 1.05 times its bytes at most.

    Args:
        shape: global shape; it has items.
        itemsize: bytes of an item.
        chunks: stored boxes, which tile the leaf.
        grid: how it is wanted.

    Example:
        >>> chunk = StoredChunk(box=((0, 1024), (0, 1024)), block=65536)
        >>> grid = Grid(shape=(8,), owners=(0, 0, 1, 1, 2, 2, 3, 3), spec=((), (0,)))
        >>> plan_parts((1024, 1024), 4, [chunk], grid).rows
        128
    """
    worth = math.prod(shape) * itemsize * (PERCENT - 100) // 100
    cuttings = []
    for axis, length in enumerate(shape):
        along = Counter(_Along.of(chunk, axis, itemsize) for chunk in chunks)
        cuttings.append(_cut_axis(axis, length, grid.owners_along(axis), along, worth))
    return max(cuttings, key=lambda parts: len(set(parts.owners[: parts.used])))


def _cut_axis(axis: int, length: int, owners: tuple[int, ...], chunks: Counter[_Along], worth: int) -> Parts:
    """Return the shortest parts along an axis that are cheap enough; one that is all is, always."""
    step = max((along.step for along in chunks), default=1)

    def align(rows: int) -> int:
        """Return the next number of rows that are whole blocks."""
        return -(-rows // step) * step

    def cost_of(rows: int) -> int:
        """Return how many bytes are read more than once, at most: blocks in which the parts of two processes meet."""
        cuts = [at * rows for at in range(1, -(-length // rows)) if owners[at] != owners[at - 1]]
        return sum(along.torn(cuts) * count for along, count in chunks.items()) if cuts else 0

    count = min(len(owners), length)
    blocks = align(-(-length // count))
    if cost_of(blocks) > worth:
        blocks = length
    while True:
        rows = -(-length // count)
        if 100 * align(rows) <= _ALIGNED_PERCENT * rows:
            rows = align(rows)
        cost = cost_of(rows)
        if cost <= worth or rows >= blocks:
            return Parts(axis=axis, length=length, rows=min(rows, blocks), owners=owners)
        count = max(1, min(count - 1, count * worth // cost))


@dataclasses.dataclass(frozen=True, slots=True)
class _Along:
    """A chunk as it lies along one axis."""

    start: int
    """Where it begins, and ends."""
    stop: int
    outer: int
    """How many steps its outer axes make together."""
    stride: int
    """Bytes from one row to the next."""
    block: int

    @classmethod
    def of(cls, chunk: StoredChunk, axis: int, itemsize: int) -> _Along:
        lengths = shape_of(chunk.box)
        stride = math.prod(lengths[axis + 1 :]) * itemsize
        return cls(*chunk.box[axis], math.prod(lengths[:axis]), stride, chunk.block)

    @property
    def step(self) -> int:
        """After how many rows a block ends where a row ends."""
        return self.block // math.gcd(self.block, self.stride)

    def torn(self, cuts: Sequence[int]) -> int:
        """Return how many bytes of the chunk are read more than once where it is cut so, at most."""
        if not (inside := cuts[bisect.bisect_right(cuts, self.start) : bisect.bisect_left(cuts, self.stop)]):
            return 0
        row = (self.stop - self.start) * self.stride
        aligned = row % self.block == 0 or self.outer == 1
        torn = sum(1 for cut in inside if not aligned or (cut - self.start) * self.stride % self.block)
        # Where one step of the outer axes ends and the next begins, the last part meets the first.
        borders = torn * self.outer + (0 if aligned else self.outer - 1)
        nbytes = self.outer * row
        return min(borders * min(self.block, nbytes), len(inside) * nbytes)


class Turns:
    """Gives leaves that have not a part for each device to the processes that have read the least so far.

    Args:
        processes: how many there are.

    Example:
        >>> turns = Turns(3)
        >>> small = Parts(axis=0, length=4, rows=4, owners=(0, 1, 2))
        >>> [turns.assign(small, 16).first for _ in range(4)]
        [0, 1, 2, 0]
    """

    def __init__(self, processes: int) -> None:
        self._loads = np.zeros(processes, np.int64)
        self._places: dict[int, tuple[tuple[int, ...], NDArray[np.int64]]] = {}

    def assign(self, parts: Parts, row_bytes: int) -> Parts:
        """Return the parts in the places where they are read by whoever is next.

        Args:
            parts: of one leaf, from the first place on.
            row_bytes: bytes of one row.
        """
        if not (spare := len(parts.owners) - parts.used):
            return parts
        first = self._next_place(parts.owners, spare)
        if _borders(parts, first) != _borders(parts, 0):
            first = 0  # other blocks would be read by two, and nobody has counted them
        turned = dataclasses.replace(parts, first=first)
        for place in range(first, first + parts.used):
            start, stop = turned.rows_of(place)
            self._loads[parts.owners[place]] += (stop - start) * row_bytes
        return turned

    def _next_place(self, owners: tuple[int, ...], last: int) -> int:
        """Return the first place of the process with the least load, of those that have one up to the last."""
        if (known := self._places.get(id(owners))) is None:
            places = np.full(len(self._loads), len(owners))
            for place, owner in reversed(list(enumerate(owners))):
                places[owner] = place
            known = self._places[id(owners)] = (owners, places)  # held, so that its id stays its own
        able = np.flatnonzero(known[1] <= last)
        return int(known[1][able[self._loads[able].argmin()]])


def _borders(parts: Parts, first: int) -> list[bool]:
    """Tell of each part, but for the first, whether it is read by another process than the one before."""
    owners = parts.owners[first : first + parts.used]
    return [a != b for a, b in itertools.pairwise(owners)]


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


def plan_load(leaf: StoredLeaf) -> Parts | None:
    """Return who reads which rows of a leaf whose items are exchanged; None where each process reads what it wants.

    Each process reads what it wants, and no more than the blocks around it. Where all together would so read more
    than 1.05 times what there is, and either more than 1.05 times what they want or one box in many runs, they read
    disjoint rows instead, of about equal number, and all together 1.05 times what there is at most. What is no larger
    than one small block is always read directly. Every process comes to the same plan by itself.

    Args:
        leaf: what is stored and wanted; it has no chunks where parts of it cannot be read.

    Example:
        >>> rows = tuple(StoredChunk(box=((start, start + 512), (0, 4096)), block=65536) for start in (0, 512))
        >>> columns = [[((0, 1024), (start, start + 2048))] for start in (0, 2048)]
        >>> grid = Grid(shape=(2,), owners=(0, 1), spec=((), (0,)))
        >>> parts = plan_load(StoredLeaf(shape=(1024, 4096), itemsize=4, chunks=rows, wanted=columns, grid=grid))
        >>> parts.box_of(1, (1024, 4096))
        ((512, 1024), (0, 4096))
    """
    unique = math.prod(leaf.shape) * leaf.itemsize
    if leaf.grid is None or not leaf.chunks or unique <= SMALLEST_BLOCK or not _want_all(leaf.shape, leaf.wanted):
        return None
    if not _costs_too_much(ChunkTable(leaf.chunks), leaf.itemsize, leaf.wanted, unique):
        return None
    return plan_parts(leaf.shape, leaf.itemsize, leaf.chunks, leaf.grid)


def plan_loads(leaves: Iterable[StoredLeaf], processes: int) -> list[Parts | None]:
    """Return what `plan_load` does of many leaves; those that are stored alike and share ``wanted`` are planned as one.

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
        >>> plan_loads([rows, rows], 2)
        [None, None]
    """
    leaves = list(leaves)
    kinds: dict[tuple[object, ...], Parts | None] = {}
    known: dict[int, Parts | None] = {}
    for number, leaf in {id(leaf): leaf for leaf in leaves}.items():
        # By identity: to compare boxes for 1,024 processes costs more than to plan for them.
        kind = (leaf.shape, leaf.itemsize, leaf.chunks, id(leaf.wanted), leaf.grid is None)
        if kind not in kinds:
            kinds[kind] = plan_load(leaf)
        known[number] = kinds[kind]
    turns = Turns(processes)
    plans = []
    for leaf in leaves:
        if (parts := known[id(leaf)]) is not None:
            parts = turns.assign(parts, math.prod(leaf.shape) * leaf.itemsize // parts.length)
        plans.append(parts)
    return plans


def _want_all(shape: tuple[int, ...], wanted: Sequence[Sequence[Box]]) -> bool:
    """Tell whether each item is wanted by somebody, as it is where a sharding wants them."""
    return sum(map(size_of, {box for boxes in wanted for box in boxes})) >= math.prod(shape)


def _costs_too_much(table: ChunkTable, itemsize: int, wanted: Sequence[Sequence[Box]], unique: int) -> bool:
    """Tell whether reading directly costs more than it should; counts no longer than until that is known."""
    most = unique * PERCENT // 100
    most_in_long_runs = max(most, sum(size_of(box) for boxes in wanted for box in boxes) * itemsize * PERCENT // 100)
    cost, strided = 0, False
    for boxes, count in Counter(tuple(boxes) for boxes in wanted).items():
        for nbytes, is_strided in table.costs_of(boxes, itemsize):
            cost += nbytes * count
            strided = strided or is_strided
            if cost > (most if strided else most_in_long_runs):
                return True
    return False


class ChunkTable:
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

    def costs_of(self, boxes: Sequence[Box], itemsize: int) -> Iterator[tuple[int, bool]]:
        """Yield how many bytes are read of each chunk that holds some of the boxes, and whether any is several runs."""
        found: dict[int, list[Box]] = {}
        for box in boxes:
            for number in self.find_overlapping(box):
                if (common := intersection(self._chunks[number].box, box)) is not None:
                    found.setdefault(number, []).append(common)
        for number, parts in sorted(found.items()):
            chunk = self._chunks[number]
            ranges = covering_ranges(chunk.box, parts, itemsize, chunk.block)
            is_strided = any(runs(relative(part, chunk.box), shape_of(chunk.box))[0] > 1 for part in parts)
            yield sum(stop - start for start, stop in ranges), is_strided


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
