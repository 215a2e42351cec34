"""Who writes which chunk file of a leaves directory: each one by a process that holds it, nobody much more than others.

A chunk that one process holds is written by that process. Chunks that the same several processes hold are dealt out to
them, the largest first, so that the loads become level. Each process comes to the same plan by itself.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from treering._plan.balance import Pool, leveled, poured
from treering._plan.save import LeafLayout
from treering._values.boxes import shape_of
from treering._values.human import counted
from treering._values.keys import split_key
from treering.errors import Unsupported

# With chunks of a tenth of a share at most, the busiest has at most 1.10 shares.
_PARTS_OF_SHARE: Final = 10
_SMALLEST: Final = 1 << 20

# Tuples of boxes up to this many are told apart by what is in them, longer ones by their identity.
_FEW_BOXES: Final = 8


def balanced_chunk(layouts: Sequence[LeafLayout], processes: int) -> int:
    """Return how many bytes a chunk that several processes hold may have, so that writing can be balanced.

    Example:
        >>> leaf = LeafLayout(nbytes_per_item=4, shape=(1 << 24,), boxes=((((0, 1 << 24),), (0, 1)),))
        >>> balanced_chunk([leaf], 2), balanced_chunk([leaf], 64)
        (3355443, 1048576)
    """
    total = sum(math.prod(layout.shape) * layout.nbytes_per_item for layout in layouts)
    return max(total // (processes * _PARTS_OF_SHARE), _SMALLEST)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Leaves that lie alike and are cut alike."""

    nbytes: int
    """Bytes of a chunk file, before any compressor."""
    leaves: list[int]
    """Their numbers."""
    alone: Mapping[int, Sequence[int]]
    """Process -> the chunks that only it holds."""
    shared: Mapping[tuple[int, ...], Sequence[int]]
    """Several processes -> the chunks that they all hold."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Chunk files of one size that the same processes hold, one leaf after the other."""

    nbytes: int
    """Bytes of each."""
    kinds: list[tuple[_Kind, Sequence[int]]]
    """Leaves, and which chunks of each of them."""
    ends: list[int]
    """How many files there are up to the end of each kind."""

    def files(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield leaf and chunk of the files from ``start`` to ``stop``."""
        place = bisect.bisect_right(self.ends, start)
        while start < stop:
            kind, numbers = self.kinds[place]
            begin = self.ends[place - 1] if place else 0
            end = min(stop, self.ends[place])
            for at in range(start - begin, end - begin):
                yield kind.leaves[at // len(numbers)], numbers[at % len(numbers)]
            start = end
            place += 1


class LeafWriters:
    """Which process writes which chunk files.

    Attributes:
        loads: bytes that each process writes, before any compressor.
    """

    def __init__(self, loads: Sequence[int], kinds: Sequence[_Kind], dealt: Sequence[tuple[int, _Group, int, int]]):
        self.loads = tuple(loads)
        self._kinds = kinds
        self._dealt: dict[int, list[tuple[_Group, int, int]]] = {}
        for process, group, start, stop in dealt:
            self._dealt.setdefault(process, []).append((group, start, stop))

    def chunks_of(self, process: int) -> dict[int, list[int]]:
        """Return what one process writes: leaf -> numbers of chunks, both ascending."""
        found: dict[int, list[int]] = {}
        for kind in self._kinds:
            numbers = kind.alone.get(process)
            if numbers:
                for leaf in kind.leaves:
                    found[leaf] = list(numbers)
        for group, start, stop in self._dealt.get(process, ()):
            for leaf, number in group.files(start, stop):
                found.setdefault(leaf, []).append(number)
        return {leaf: sorted(found[leaf]) for leaf in sorted(found)}


def plan_writers(
    layouts: Sequence[LeafLayout], chunks: Sequence[tuple[int, ...]], processes: int, keys: Sequence[str]
) -> LeafWriters:
    """Divide the chunk files of leaves among the processes.

    Each is written once, by a process that holds all of its part inside the leaf. Call the share the least load that
    the busiest process could have if bytes could be divided at will; then it has at most a share and one chunk more.

    Args:
        layouts: where each leaf lies.
        chunks: the shape of each leaf's chunks.
        processes: how many there are.
        keys: key texts of the leaves, for errors.

    Raises:
        Unsupported: no process holds a chunk of some leaf alone.

    Example:
        >>> both = LeafLayout(nbytes_per_item=4, shape=(1024,), boxes=((((0, 1024),), (0, 1)),))
        >>> plan = plan_writers([both, both], [(512,), (1024,)], 2, ["a", "b"])
        >>> plan.chunks_of(0), plan.chunks_of(1), plan.loads
        ({1: [0]}, {0: [0, 1]}, (4096, 4096))
    """
    kinds = _kinds_of(layouts, chunks, processes, keys)
    loads = [0] * processes
    for kind in kinds:
        for process, numbers in kind.alone.items():
            loads[process] += len(numbers) * len(kind.leaves) * kind.nbytes
    lines = _lines_of(kinds)
    # Those with the most freedom come last: they make up for what the others missed.
    owners = sorted(lines, key=lambda those: (len(those), those))
    lengths = [sum(group.nbytes * group.ends[-1] for group in lines[those]) for those in owners]
    amounts = leveled(loads, [Pool(owners=those, amount=length) for those, length in zip(owners, lengths, strict=True)])
    dealt: list[tuple[int, _Group, int, int]] = []
    for those, length, wished in zip(owners, lengths, amounts, strict=True):
        dealt += _deal(lines[those], those, length, wished, loads)
    return LeafWriters(loads, kinds, dealt)


def _kinds_of(
    layouts: Sequence[LeafLayout], chunks: Sequence[tuple[int, ...]], processes: int, keys: Sequence[str]
) -> list[_Kind]:
    kinds: dict[object, _Kind] = {}
    for leaf, (layout, chunk) in enumerate(zip(layouts, chunks, strict=True)):
        boxes = layout.boxes
        # Equal tuples that are not the same one become two kinds, which is slower and no harm.
        key = (layout.nbytes_per_item, layout.shape, chunk, boxes if len(boxes) <= _FEW_BOXES else id(boxes))
        kind = kinds.get(key)
        if kind is None:
            try:
                kind = kinds[key] = _kind_of(layout, chunk, processes)
            except Unsupported as error:
                error.path = split_key(keys[leaf])
                raise
        kind.leaves.append(leaf)
    return list(kinds.values())


def _kind_of(layout: LeafLayout, chunk: tuple[int, ...], processes: int) -> _Kind:
    alone: dict[int, list[int]] = {}
    shared: dict[tuple[int, ...], list[int]] = {}
    for number, owners in enumerate(_holders(layout, chunk)):
        if not owners:
            raise Unsupported(
                f"an array of shape {layout.shape} lies with several processes in parts that are no grid, so that none"
                " of them holds a whole chunk",
                hint="lay it out as a grid, or save with treering.save",
            )
        if not 0 <= owners[0] <= owners[-1] < processes:
            raise Unsupported(
                f"a part of an array lies with the processes {owners}; there are {counted(processes, 'processes')}"
            )
        if len(owners) == 1:
            alone.setdefault(owners[0], []).append(number)
        else:
            shared.setdefault(owners, []).append(number)
    nbytes = math.prod(chunk) * layout.nbytes_per_item
    return _Kind(nbytes=nbytes, leaves=[], alone=alone, shared=shared)


def _holders(layout: LeafLayout, chunk: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the processes that hold each chunk, in the order of the grid."""
    grid = [-(-size // length) for size, length in zip(layout.shape, chunk, strict=True)]
    steps = [math.prod(grid[axis + 1 :]) for axis in range(len(grid))]
    holders: list[tuple[int, ...]] = [()] * math.prod(grid)
    parts: dict[int, dict[int, int]] = {}
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
            items = 1
            for at, (start, stop), length in zip(place, box, chunk, strict=True):
                items *= min(stop, (at + 1) * length) - max(start, at * length)
            held = parts.setdefault(number, {})
            for owner in owners:
                held[owner] = held.get(owner, 0) + items
    for number, held in parts.items():
        items, left = 1, number
        for step, size, length in zip(steps, layout.shape, chunk, strict=True):
            at, left = divmod(left, step)
            items *= min(size, (at + 1) * length) - at * length
        holders[number] = tuple(sorted(owner for owner, found in held.items() if found == items))
    return holders


def _lines_of(kinds: Sequence[_Kind]) -> dict[tuple[int, ...], list[_Group]]:
    """Return what each set of processes shares, the largest chunks first."""
    lines: dict[tuple[int, ...], dict[int, _Group]] = {}
    for kind in kinds:
        for owners, numbers in kind.shared.items():
            line = lines.setdefault(owners, {})
            group = line.get(kind.nbytes)
            if group is None:
                group = line[kind.nbytes] = _Group(nbytes=kind.nbytes, kinds=[], ends=[])
            group.kinds.append((kind, numbers))
            group.ends.append((group.ends[-1] if group.ends else 0) + len(numbers) * len(kind.leaves))
    return {owners: [line[nbytes] for nbytes in sorted(line, reverse=True)] for owners, line in lines.items()}


def _deal(
    groups: Sequence[_Group], owners: tuple[int, ...], length: int, wished: Sequence[int], loads: list[int]
) -> Iterator[tuple[int, _Group, int, int]]:
    """Deal out what ``owners`` share, so that their loads, of which ``wished`` are to be taken back, become level.

    Yields:
        Process, group, and which files of the group it writes.
    """
    without = [loads[owner] - amount for owner, amount in zip(owners, wished, strict=True)]
    # How far each is from what it should have: the one that is farthest gets the next file.
    queue = [(-amount, place) for place, amount in enumerate(poured(length, without))]
    heapq.heapify(queue)
    for group in groups:
        start = 0
        for place, count in sorted(_counts(queue, group.ends[-1], group.nbytes).items()):
            without[place] += count * group.nbytes
            yield owners[place], group, start, start + count
            start += count
    for place, owner in enumerate(owners):
        loads[owner] = without[place]


def _counts(queue: list[tuple[int, int]], count: int, nbytes: int) -> dict[int, int]:
    """Return how many of ``count`` files each gets if every file goes to the one with the lowest level then.

    Args:
        queue: a heap of levels and places; the levels rise.
        count: how many files.
        nbytes: bytes of each.
    """
    counts: dict[int, int] = {}
    if count > len(queue):  # most of them at once
        for at, amount in enumerate(poured(count * nbytes, [level for level, _ in queue])):
            level, place = queue[at]
            whole = amount // nbytes
            if whole:
                counts[place] = whole
                queue[at] = (level + whole * nbytes, place)
        heapq.heapify(queue)
    for _ in range(count - sum(counts.values())):
        level, place = queue[0]
        counts[place] = counts.get(place, 0) + 1
        heapq.heapreplace(queue, (level + nbytes, place))
    return counts
