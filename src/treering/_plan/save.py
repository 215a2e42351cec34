"""Who writes which box: every item once, and nobody much more than the others.

A box that one process holds is written by that process. Boxes that the same several processes hold (replicas) are
laid end to end and the line is cut into one stretch for each of them, as long as levels the loads. Each process
comes to the same plan by itself, from shapes and owners alone. ``docs/design/planning.md`` has the figures.

Levelling is water that each pool pours on its owners. All sums are of whole numbers, so every process that computes
them comes to the same plan, whatever its Python.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

from treering._values.boxes import Box, boxes_of_range, find_cover_error, shape_of, size_of, whole
from treering._values.human import pluralize
from treering.errors import UnsupportedError

# Pieces smaller than these are not cut off: each costs an entry in the index.
_SMALLEST_PIECE: Final = 256
_SMALLEST_LARGE_PIECE: Final = 64 << 10

# A cut may miss its place by this part of a share, so that it falls between rows.
_PARTS_OF_SHARE: Final = 100

# Tuples of boxes up to this many are told apart by what is in them, longer ones by their identity.
_FEW_BOXES: Final = 8
FILE_BYTES: Final = 32 << 30
"""A file is not begun beyond this many bytes: object stores and copies like files of moderate size."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeafLayout:
    """Where the parts of one leaf lie before it is saved.

    Leaves that lie alike may share one tuple of boxes; then they are planned together, which is fast.
    """

    nbytes_per_item: int
    """Bytes of an item."""
    shape: tuple[int, ...]
    """Global shape."""
    boxes: tuple[tuple[Box, tuple[int, ...]], ...]
    """Distinct boxes that tile the leaf, each with the processes that hold it."""


Part = TypeVar("Part")


class PlannedPart(NamedTuple, Generic[Part]):
    """What one process writes of one leaf."""

    leaf: int
    """Number of the leaf."""
    part: Part
    """Which part of it: a box that lies in one of the layout's, or the number of a chunk."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AlikeLeaves(Generic[Part]):
    """Leaves that lie alike."""

    layout: LeafLayout
    """How they lie."""
    leaves: list[int]
    """Their numbers."""
    alone: dict[int, list[Part]]
    """Process -> the parts that only it holds."""
    shared: dict[tuple[int, ...], list[Part]]
    """Several processes -> the parts that they all hold."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stretch(Generic[Part]):
    """A piece of the line of a pool: some parts of each leaf of one kind, one leaf after the other."""

    kind: AlikeLeaves[Part]
    """The leaves."""
    parts: Sequence[Part]
    """The parts of each."""
    nbytes: int
    """Bytes of a part."""
    step: int
    """A part may be cut at multiples of so many bytes."""
    rank: int = 0
    """The higher is cut first. What is cut last in small parts makes up for what the cuts of larger ones missed."""

    @property
    def length(self) -> int:
        """Bytes of the whole stretch."""
        return self.nbytes * len(self.parts) * len(self.kind.leaves)

    def nearest_cut(self, position: int) -> int:
        """Return the nearest place where this stretch may be cut; both count from its start."""
        first, inside = position - position % self.nbytes, position % self.nbytes
        # The last step takes what is left over, so that no piece is smaller than a step.
        last = (self.nbytes // self.step - 1) * self.step
        below = min(inside - inside % self.step, max(0, last))
        above = below + self.step if below + self.step <= last else self.nbytes
        return first + (below if inside - below <= above - inside else above)

    def planned(self, start: int, stop: int) -> Iterator[PlannedPart[Part]]:
        """Yield what lies between two cuts, counted from the start of the stretch."""
        leaves, parts, nbytes = self.kind.leaves, self.parts, self.nbytes
        for number in range(start // nbytes, -(-stop // nbytes)):
            leaf, part = leaves[number // len(parts)], parts[number % len(parts)]
            first, last = max(0, start - number * nbytes), min(nbytes, stop - number * nbytes)
            if last - first == nbytes:
                yield PlannedPart(leaf, part)
            else:
                yield from (PlannedPart(leaf, piece) for piece in self._pieces(part, first, last))

    def _pieces(self, part: Part, start: int, stop: int) -> Iterable[Part]:
        raise NotImplementedError(f"{part!r} is written whole, not from byte {start} to {stop}")


class _BoxStretch(Stretch[Box]):
    """Boxes, which may be cut."""

    def _pieces(self, part: Box, start: int, stop: int) -> Iterator[Box]:
        itemsize = self.kind.layout.nbytes_per_item
        for piece in boxes_of_range(shape_of(part), start // itemsize, stop // itemsize):
            yield tuple((a + c, b + c) for (a, b), (c, _) in zip(piece, part, strict=True))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Line(Generic[Part]):
    """All parts that the same processes hold, end to end."""

    owners: tuple[int, ...]
    """Those processes."""
    stretches: list[Stretch[Part]]
    """What lies on the line."""
    ends: list[int]
    """Where each stretch ends, in bytes."""
    cuts: list[int]
    """Owner number n writes from ``cuts[n]`` to ``cuts[n + 1]``; filled by ``cut``."""

    def cut(self, loads: list[int], amounts: Sequence[int]) -> None:
        """Cut the line so that the loads, of which ``amounts`` are to be taken back, become level."""
        without = [loads[owner] - amount for owner, amount in zip(self.owners, amounts, strict=True)]
        position = 0
        self.cuts.append(0)
        for place, amount in enumerate(pour(self.ends[-1], without)):
            position += amount
            self.cuts.append(self._nearest_cut(position))
            loads[self.owners[place]] = without[place] + self.cuts[-1] - self.cuts[-2]

    def planned(self, process: int) -> Iterator[PlannedPart[Part]]:
        """Yield what one owner writes."""
        place = self.owners.index(process)
        start, stop = self.cuts[place], self.cuts[place + 1]
        for number, first, last in split_at_ends(self.ends, start, stop):
            yield from self.stretches[number].planned(first, last)

    def _nearest_cut(self, position: int) -> int:
        if (number := bisect.bisect_right(self.ends, position)) == len(self.ends):
            return position
        begin = self.ends[number - 1] if number else 0
        return begin + self.stretches[number].nearest_cut(position - begin)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan(Generic[Part]):
    """Who writes what."""

    loads: tuple[int, ...]
    """Bytes that each process writes."""
    _kinds: Sequence[AlikeLeaves[Part]]
    """The leaves, those that lie alike together."""
    _lines: Sequence[_Line[Part]]
    """What several processes hold, with its cuts."""

    def parts_of(self, process: int) -> tuple[PlannedPart[Part], ...]:
        """Return what one process writes, in the order of the leaves; other processes' parts are not made."""
        parts: list[PlannedPart[Part]] = []
        for kind in self._kinds:
            if alone := kind.alone.get(process, ()):
                parts += [PlannedPart(leaf, part) for leaf in kind.leaves for part in alone]
        for line in self._lines:
            if process in line.owners:
                parts += line.planned(process)
        parts.sort()
        return tuple(parts)

    @property
    def writers(self) -> tuple[int, ...]:
        """The processes that write anything; one without bytes may have a leaf without items."""
        alone = {process for kind in self._kinds for process in kind.alone}
        return tuple(process for process, load in enumerate(self.loads) if load or process in alone)


def plan_save(layouts: Sequence[LeafLayout], processes: int) -> SavePlan[Box]:
    """Divide leaves among the processes that hold them.

    Every item is written once, by a process that holds it. Call the share the least load that the busiest process
    could have if bytes could be divided at will; then it has at most 1.10 shares, or a share and 512 bytes. A leaf
    without items is one part of one process.

    Raises:
        UnsupportedError: boxes do not tile their leaf, or name a process that is none.

    Example:
        >>> both = LeafLayout(nbytes_per_item=4, shape=(1024,), boxes=((((0, 1024),), (0, 1)),))
        >>> plan = plan_save([both], 2)
        >>> plan.parts_of(0), plan.parts_of(1), plan.loads
        ((PlannedPart(leaf=0, part=((0, 512),)),), (PlannedPart(leaf=0, part=((512, 1024),)),), (2048, 2048))
    """
    kinds = group_alike(layouts, processes, lambda leaf: _boxes_of(layouts[leaf]))
    total = sum(size_of(whole(kind.layout.shape)) * kind.layout.nbytes_per_item * len(kind.leaves) for kind in kinds)
    share = total // processes

    def stretches(kind: AlikeLeaves[Box], boxes: Sequence[Box]) -> Iterator[Stretch[Box]]:
        itemsize = kind.layout.nbytes_per_item
        for box in boxes:
            nbytes = size_of(box) * itemsize
            step = min(_cut_step(shape_of(box), itemsize, share), nbytes)
            yield _BoxStretch(kind=kind, parts=[box], nbytes=nbytes, step=step)

    return divide(
        kinds, processes, lambda kind, boxes: sum(map(size_of, boxes)) * kind.layout.nbytes_per_item, stretches
    )


def divide(
    kinds: Sequence[AlikeLeaves[Part]],
    processes: int,
    nbytes: Callable[[AlikeLeaves[Part], Sequence[Part]], int],
    stretches: Callable[[AlikeLeaves[Part], Sequence[Part]], Iterable[Stretch[Part]]],
) -> SavePlan[Part]:
    """Divide the parts of leaves among the processes that hold them.

    Args:
        kinds: the leaves.
        processes: how many there are.
        nbytes: returns the bytes of some parts of one leaf of a kind.
        stretches: returns how such parts of all leaves of the kind lie on a line.
    """
    loads = [0] * processes
    found: dict[tuple[tuple[int, ...], int], _Line[Part]] = {}
    for kind in kinds:
        for process, parts in kind.alone.items():
            loads[process] += nbytes(kind, parts) * len(kind.leaves)
        for owners, parts in kind.shared.items():
            for stretch in stretches(kind, parts):
                if (line := found.get((owners, stretch.rank))) is None:
                    line = found[owners, stretch.rank] = _Line(owners=owners, stretches=[], ends=[], cuts=[])
                line.stretches.append(stretch)
                line.ends.append((line.ends[-1] if line.ends else 0) + stretch.length)
    # Those with the most freedom come last: they make up for what the cuts of the others missed.
    lines = [found[key] for key in sorted(found, key=lambda key: (len(key[0]), -key[1]))]
    amounts = level_loads(loads, [(line.owners, line.ends[-1]) for line in lines])
    for line, wished in zip(lines, amounts, strict=True):
        line.cut(loads, wished)
    return SavePlan(loads=tuple(loads), _kinds=kinds, _lines=lines)


def group_alike(
    layouts: Sequence[LeafLayout],
    processes: int,
    parts_of: Callable[[int], Iterable[tuple[Part, tuple[int, ...]]]],
    cuts: Sequence[Hashable] | None = None,
) -> list[AlikeLeaves[Part]]:
    """Return the leaves, those that lie alike together, with what one or several processes hold of each.

    Args:
        layouts: where each leaf lies.
        processes: how many there are.
        parts_of: number of a leaf -> its parts, each with the processes that hold it, ascending.
        cuts: how each leaf is cut, where leaves that lie alike are cut differently.

    Raises:
        UnsupportedError: a part lies with a process that is none.
    """
    kinds: dict[object, AlikeLeaves[Part]] = {}
    for leaf, layout in enumerate(layouts):
        boxes = layout.boxes
        # Equal tuples that are not the same one become two kinds, which is slower and no harm.
        alike = boxes if len(boxes) <= _FEW_BOXES else id(boxes)
        key = (layout.nbytes_per_item, layout.shape, alike, cuts and cuts[leaf])
        if (kind := kinds.get(key)) is None:
            kind = kinds[key] = AlikeLeaves(layout=layout, leaves=[], alone={}, shared={})
            for part, owners in parts_of(leaf):
                if not owners or not 0 <= owners[0] <= owners[-1] < processes:
                    there = pluralize(processes, "processes")
                    raise UnsupportedError(f"a part of an array lies with the processes {owners}; there are {there}")
                if len(owners) == 1:
                    kind.alone.setdefault(owners[0], []).append(part)
                else:
                    kind.shared.setdefault(owners, []).append(part)
        kind.leaves.append(leaf)
    return list(kinds.values())


def split_at_ends(ends: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield which of the stretches with these ends lie between two places, each with where it starts and stops in it.

    Example:
        >>> list(split_at_ends([4, 6, 10], 3, 8))
        [(0, 3, 4), (1, 0, 2), (2, 0, 2)]
    """
    for number in range(bisect.bisect_right(ends, start), bisect.bisect_left(ends, stop) + 1 if start < stop else 0):
        begin = ends[number - 1] if number else 0
        yield number, max(start - begin, 0), min(stop, ends[number]) - begin


def _boxes_of(layout: LeafLayout) -> list[tuple[Box, tuple[int, ...]]]:
    boxes = [(box, tuple(sorted(set(owners)))) for box, owners in layout.boxes if size_of(box)]
    if not boxes and not size_of(whole(layout.shape)):
        holders = [min(owners) for _, owners in layout.boxes if owners]
        boxes = [(whole(layout.shape), (min(holders, default=0),))]
    if (wrong := find_cover_error(layout.shape, [box for box, _ in boxes])) is not None:
        raise UnsupportedError(f"the parts of an array of shape {layout.shape} do not cover it: {wrong}")
    return boxes


def _cut_step(shape: tuple[int, ...], itemsize: int, share: int) -> int:
    """Return at which multiples of bytes a box is cut: whole rows, or steps of inner axes where rows are long."""
    fine = share // _PARTS_OF_SHARE
    unit = size_of(whole(shape)) * itemsize
    for length in shape:
        if unit <= fine:
            break
        unit //= length
    smallest = max(_SMALLEST_PIECE, min(_SMALLEST_LARGE_PIECE, fine))
    return unit * -(-smallest // unit)


def file_counts(plan: SavePlan[Box], limit: int = FILE_BYTES) -> list[int]:
    """Return how many file numbers each process has; the first process's come first.

    Example:
        >>> from treering._plan.save import LeafLayout, plan_save
        >>> big = LeafLayout(nbytes_per_item=4, shape=(1000,), boxes=((((0, 1000),), (1,)),))
        >>> file_counts(plan_save([big], 2), limit=1000)
        [0, 4]
    """
    writers = set(plan.writers)
    return [max(1, -(-load // limit)) if process in writers else 0 for process, load in enumerate(plan.loads)]


def files_by_position(sizes: Iterable[int], count: int, limit: int = FILE_BYTES) -> Sequence[int]:
    """Return for each box, in order, which of a process's files it goes into: the one in which its first byte lies.

    A box larger than a file's limit may leave the numbers after its own without boxes.

    Example:
        >>> files_by_position([600, 600, 600, 200], 2, limit=1000), files_by_position([2500, 500], 3, limit=1000)
        ([0, 0, 1, 1], [0, 2])
    """
    starts = itertools.accumulate(sizes, initial=0)
    # The last start is the end; boxes without items may lie there.
    return [min(start // limit, count - 1) for start in starts][:-1]


# Pools that overlap crosswise push load along from one to the next, each round by one step and by less each time.
_MOST_ROUNDS: Final = 64


Pool: TypeAlias = tuple[tuple[int, ...], int]
"""Work that any of its owners can do any part of: these processes, ascending, and how much work there is."""


def pour(amount: int, levels: Sequence[int]) -> list[int]:
    """Pour an amount on columns of given heights, as water would lie; return how much lies on each.

    Example:
        >>> pour(10, [0, 4, 30])
        [7, 3, 0]
    """
    order = sorted(range(len(levels)), key=levels.__getitem__)
    wet, below = 0, 0
    while wet < len(order):
        height = levels[order[wet]]
        if wet and height * wet - below >= amount:
            break
        below += height
        wet += 1
    surface, left = divmod(amount + below, wet)
    result = [0] * len(levels)
    for rank, column in enumerate(order[:wet]):
        result[column] = surface + (rank < left) - levels[column]
    return result


def level_loads(loads: list[int], pools: Sequence[Pool]) -> list[list[int]]:
    """Add every pool's work to ``loads`` so that the highest is as low as can be; return each owner's amount.

    One pool after the other is poured anew while the others lie still, until a round moves next to nothing. That is
    descent along one coordinate at a time on the sum of squares, which is convex, so it ends where no load can be
    lowered but by raising a higher one. Pools that nest or do not touch are done after the first round when the
    smallest come first.
    """
    amounts = [[0] * len(owners) for owners, _ in pools]
    order = sorted(range(len(pools)), key=lambda number: (len(pools[number][0]), number))
    near = (sum(loads) + sum(amount for _, amount in pools)) // (1000 * max(1, len(loads)))
    for _ in range(_MOST_ROUNDS):
        if max((_pour_anew(loads, *pools[number], amounts[number]) for number in order), default=0) <= near:
            break
    return amounts


def _pour_anew(loads: list[int], owners: tuple[int, ...], work: int, amounts: list[int]) -> int:
    """Pour one pool again; return the largest change of a load."""
    without = [loads[owner] - amount for owner, amount in zip(owners, amounts, strict=True)]
    farthest = 0
    for place, amount in enumerate(pour(work, without)):
        farthest = max(farthest, abs(amount - amounts[place]))
        amounts[place] = amount
        loads[owners[place]] = without[place] + amount
    return farthest
