"""Who reads what: the blocks that hold a wanted byte, little else, and together once where the mesh was turned."""

from __future__ import annotations

import dataclasses
import itertools
import math
import tracemalloc
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import faults
from tests.drawn import drawn
from tests.plan.test_save import AWKWARD, ITEMSIZES, grid_boxes, mesh_layout
from tests.properties.strategies import quick
from treering._plan.load import Grid, Parts, StoredChunk, StoredLeaf, covering_ranges, plan_load, plan_loads
from treering._values.boxes import Box, find_cover_error, intersection, relative, runs, shape_of, size_of, slices, whole
from treering._values.checksums import SMALLEST_BLOCK, block_bytes

plans = settings(derandomize=True, max_examples=drawn(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
Shape = tuple[int, ...]
Wanted = list[list[Box]]


def stored(shape: Shape, itemsize: int, splits: tuple[int, ...]) -> list[StoredChunk]:
    boxes = [box for _, box in grid_boxes(shape, splits) if size_of(box)]
    return [StoredChunk(box=box, block=block_bytes(size_of(box) * itemsize)) for box in boxes]


def wanted_by(shape: Shape, mesh: tuple[int, ...], spec: tuple[int | None, ...], devices: int = 1) -> Wanted:
    wanted: Wanted = [[] for _ in range(math.prod(mesh) // devices)]
    for box, owners in mesh_layout(shape, 1, mesh, spec, devices).boxes:
        for owner in owners:
            wanted[owner].append(box)
    return wanted


def grid_of(mesh: tuple[int, ...], spec: tuple[int | None, ...], devices: int = 1) -> Grid:
    owners = tuple(number // devices for number in range(math.prod(mesh)))
    return Grid(shape=mesh, owners=owners, spec=tuple(() if axis is None else (axis,) for axis in spec))


class Read(NamedTuple):
    """What one process reads of one chunk, as arrays are read."""

    chunk: int
    ranges: Sequence[tuple[int, int]]
    boxes: Sequence[tuple[int, Box]]

    @property
    def nbytes(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@dataclasses.dataclass(frozen=True)
class Planned:
    """A leaf, and who reads which rows of it."""

    leaf: StoredLeaf
    parts: Parts | None

    def boxes_of(self, process: int) -> Sequence[Box]:
        parts = self.parts
        return self.leaf.wanted[process] if parts is None else boxes_of_process(parts, process, self.leaf.shape)

    def reads_of(self, process: int) -> list[Read]:
        boxes = self.boxes_of(process)
        reads = []
        for number, chunk in enumerate(self.leaf.chunks):
            common = [(target, intersection(chunk.box, box)) for target, box in enumerate(boxes)]
            if found := [(target, box) for target, box in common if box is not None]:
                wanted = [box for _, box in found]
                ranges = covering_ranges(chunk.box, wanted, self.leaf.itemsize, chunk.block)
                reads.append(Read(number, ranges, found))
        return reads


def boxes_of_process(parts: Parts, process: int, shape: Shape) -> tuple[Box, ...]:
    places = [place for place, owner in enumerate(parts.owners) if owner == process]
    return tuple(box for place in places if (box := parts.box_of(place, shape)) is not None)


def planned(
    shape: Shape, itemsize: int, chunks: Sequence[StoredChunk], wanted: Wanted, grid: Grid | None = None
) -> Planned:
    leaf = StoredLeaf(shape=shape, itemsize=itemsize, chunks=tuple(chunks), wanted=wanted, grid=grid)
    return Planned(leaf, plan_load(leaf))


def all_reads(plan: Planned) -> list[list[Read]]:
    return list(map(plan.reads_of, range(len(plan.leaf.wanted))))


def total(plan: Planned) -> int:
    return sum(read.nbytes for reads in all_reads(plan) for read in reads)


def wanted_bytes(wanted: Wanted, itemsize: int) -> int:
    return sum(map(size_of, itertools.chain.from_iterable(wanted))) * itemsize


def check(
    shape: Shape, itemsize: int, chunks: Sequence[StoredChunk], wanted: Wanted, grid: Grid | None = None
) -> Planned:
    plan = planned(shape, itemsize, chunks, wanted, grid)
    sizes = [size_of(chunk.box) * itemsize for chunk in chunks]
    for process, reads in enumerate(all_reads(plan)):
        boxes = plan.boxes_of(process)
        got: list[list[Box]] = [[] for _ in boxes]
        for read in reads:
            block = chunks[read.chunk].block
            for start, stop in read.ranges:
                assert 0 <= start < stop <= sizes[read.chunk]
                assert start % block == 0
                assert stop % block == 0 or stop == sizes[read.chunk]
            for target, box in read.boxes:
                assert intersection(chunks[read.chunk].box, box) == box
                got[target].append(box)
        for box, parts in zip(boxes, got, strict=True):
            corner = [start for start, _ in box]
            moved = [tuple((a - c, b - c) for (a, b), c in zip(part, corner, strict=True)) for part in parts]
            lengths = tuple(stop - start for start, stop in box)
            assert find_cover_error(lengths, moved) is None if size_of(box) else not parts
    if plan.parts is not None:
        # Each item is read by one process, and few blocks by more than one.
        everything = [box for process in range(len(wanted)) for box in plan.boxes_of(process)]
        assert find_cover_error(shape, everything) is None
        assert total(plan) <= 1.05 * sum(sizes)
    return plan


@st.composite
def reshardings(draw: st.DrawFn) -> tuple[Shape, int, list[StoredChunk], Wanted, Grid]:
    shape = draw(st.lists(AWKWARD, max_size=3).map(tuple))
    splits = tuple(draw(st.sampled_from([1, 1, 2, 3, 8])) for _ in shape)
    devices = draw(st.sampled_from([1, 2, 4]))
    mesh = draw(st.sampled_from([(1,), (2,), (2, 4), (3, 5), (4, 4), (64,), (16, 64)]))
    mesh = (mesh[0] * devices, *mesh[1:])
    spec = tuple(draw(st.permutations([*range(len(mesh)), *([None] * len(shape))]))[: len(shape)])
    itemsize = draw(ITEMSIZES)
    wanted, grid = wanted_by(shape, mesh, spec, devices), grid_of(mesh, spec, devices)
    return shape, itemsize, stored(shape, itemsize, splits), wanted, grid


@quick(60)
@given(reshardings())
def test_any_resharding(case: tuple[Shape, int, list[StoredChunk], Wanted, Grid]) -> None:
    shape, itemsize, chunks, wanted, grid = case
    plan = check(shape, itemsize, chunks, wanted, grid)
    unique = math.prod(shape) * itemsize
    if plan.parts is not None:
        return
    if unique <= SMALLEST_BLOCK:
        assert total(plan) <= len(wanted) * unique
        return
    meetings = [
        (common, chunk.box)
        for chunk, box in itertools.product(chunks, set(itertools.chain.from_iterable(wanted)))
        if (common := intersection(chunk.box, box)) is not None
    ]
    in_many_runs = any(runs(relative(common, outer), shape_of(outer))[0] > 1 for common, outer in meetings)
    assert total(plan) <= 1.05 * (unique if in_many_runs else max(unique, wanted_bytes(wanted, itemsize)))


# The leaves of a transformer of 1 GiB, and some whose sides are prime.
WEIGHTS = [(1536, 1536, 2), (1536, 512, 2), (1536, 4096, 2), (4096, 1536, 2), (32000, 1536, 2), (1536, 32000, 4)]
PRIMES = [(4099, 4093, 4), (16381, 1021, 2), (1021, 16381, 2)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("processes", [2, 4, 8])
@pytest.mark.parametrize("leaf", WEIGHTS + PRIMES)
def test_a_part_of_rows_reads_little_more_than_itself(leaf: tuple[int, int, int], processes: int) -> None:
    """Saved by one process, or by rows over another number of them; wanted by rows."""
    *lengths, itemsize = leaf
    shape = tuple(lengths)
    for splits in [(1, 1), (8, 1), (3, 1)]:
        chunks = stored(shape, itemsize, splits)
        wanted = wanted_by(shape, (processes,), (0, None))
        plan = check(shape, itemsize, chunks, wanted, grid_of((processes,), (0, None)))
        assert total(plan) <= 1.05 * wanted_bytes(wanted, itemsize)
        # Neighbours may share a block, which is at most 1 part in 128 of a chunk that is not small.
        if leaf in WEIGHTS or splits == (1, 1):
            assert plan.parts is None


@pytest.mark.sampled(5)
@pytest.mark.parametrize("processes", [97, 1024])
@pytest.mark.parametrize("leaf", WEIGHTS + PRIMES)
def test_parts_smaller_than_a_block_are_exchanged(leaf: tuple[int, int, int], processes: int) -> None:
    """Else 1,024 processes would read the same block of 1 MiB four times over."""
    *lengths, itemsize = leaf
    shape = tuple(lengths)
    wanted = wanted_by(shape, (processes,), (0, None))
    plan = check(shape, itemsize, stored(shape, itemsize, (1, 1)), wanted, grid_of((processes,), (0, None)))
    assert total(plan) <= 1.05 * math.prod(shape) * itemsize


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_a_transformer_by_rows_on_any_number_of_processes(processes: int) -> None:
    read = needed = 0
    for *lengths, itemsize in WEIGHTS * 16 + [(1536, 4)] * 33:
        shape = tuple(lengths)
        for saved_over in (1, 2, 8):
            chunks = stored(shape, itemsize, (saved_over, *(1 for _ in shape[1:])))
            spec = (0, *(None for _ in shape[1:]))
            wanted = wanted_by(shape, (processes,), spec)
            read += total(check(shape, itemsize, chunks, wanted, grid_of((processes,), spec)))
            needed += wanted_bytes(wanted, itemsize)
    assert read <= 1.01 * needed


@pytest.mark.sampled(7)
@pytest.mark.parametrize("processes", [2, 4, 8, 97, 1024])
@pytest.mark.parametrize("leaf", WEIGHTS + PRIMES)
def test_a_turned_mesh_reads_each_byte_once(leaf: tuple[int, int, int], processes: int) -> None:
    *lengths, itemsize = leaf
    shape = tuple(lengths)
    for splits in [(1, 1), (8, 1)]:
        chunks = stored(shape, itemsize, splits)
        wanted = wanted_by(shape, (processes,), (None, 0))
        plan = check(shape, itemsize, chunks, wanted, grid_of((processes,), (None, 0)))
        assert total(plan) <= 1.05 * shape[0] * shape[1] * itemsize


def test_columns_wider_than_blocks_need_no_exchange() -> None:
    shape = (64, 1 << 20)
    grid = grid_of((2,), (None, 0))
    plan = check(shape, 4, stored(shape, 4, (1, 1)), wanted_by(shape, (2,), (None, 0)), grid)
    assert plan.parts is None
    assert total(plan) == 64 << 22


def test_partly_replicated_columns_are_exchanged() -> None:
    shape = (4096, 4096)
    grid = grid_of((2, 2), (None, 1))
    plan = check(shape, 4, stored(shape, 4, (4, 1)), wanted_by(shape, (2, 2), (None, 1)), grid)
    assert plan.parts is not None
    assert total(plan) == 4096 * 4096 * 4


def test_replicas_read_what_they_want() -> None:
    """All of it, in one run each: an exchange would save reading, but nobody reads more than it gets."""
    shape = (4096, 4096)
    grid = grid_of((4,), (None, None))
    plan = check(shape, 4, stored(shape, 4, (1, 1)), wanted_by(shape, (4,), (None, None)), grid)
    assert plan.parts is None


def test_one_small_block_is_read_by_whoever_wants_some_of_it() -> None:
    wanted, grid = wanted_by((128, 128), (8,), (None, 0)), grid_of((8,), (None, 0))
    plan = check((128, 128), 4, stored((128, 128), 4, (1, 1)), wanted, grid)
    assert plan.parts is None
    assert total(plan) == 8 * 65536


def test_one_process_reads_directly() -> None:
    shape = (1000, 1000)
    wanted: Wanted = [[box for _, box in grid_boxes(shape, (1, 8))]]
    plan = check(shape, 8, stored(shape, 8, (4, 1)), wanted, grid_of((8,), (None, 0), devices=8))
    assert plan.parts is None
    assert total(plan) == 8_000_000


def test_where_some_items_are_wanted_by_nobody_nothing_is_exchanged() -> None:
    """Each of eight processes wants a column of the upper half: no sharding says so."""
    shape = (4096, 4096)
    wanted: Wanted = [[((0, 2048), (start, start + 512))] for start in range(0, 4096, 512)]
    plan = check(shape, 4, stored(shape, 4, (4, 1)), wanted, grid_of((8,), (None, 0)))
    assert plan.parts is None
    assert {read.chunk for reads in all_reads(plan) for read in reads} == {0, 1}


def test_devices_that_cannot_exchange_read_what_they_want() -> None:
    shape = (4096, 4096)
    plan = check(shape, 4, stored(shape, 4, (4, 1)), wanted_by(shape, (4,), (None, 0)))
    assert plan.parts is None


def test_what_cannot_be_read_in_part_is_read_directly() -> None:
    shape = (4096, 4096)
    plan = planned(shape, 4, [], wanted_by(shape, (4,), (None, 0)), grid_of((4,), (None, 0)))
    assert plan.parts is None


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0,)])
def test_nothing_stored_is_nothing_read(shape: Shape) -> None:
    chunk = StoredChunk(box=whole(shape), block=65536)
    plan = planned(shape, 4, [chunk], [[whole(shape)], [whole(shape)]], grid_of((2,), (None,) * len(shape)))
    assert all_reads(plan) == [[], []]


def test_no_axes() -> None:
    plan = check((), 8, [StoredChunk(box=(), block=65536)], [[()], [()], []])
    assert [len(reads) for reads in all_reads(plan)] == [1, 1, 0]


def test_a_thousand_processes_and_chunks_cost_one_look_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 1,024 chunks to rows of 1,024 processes: each meets its own; turned, a few looks say enough."""
    from treering._plan import load as room

    counted: list[object] = []
    faults.before(monkeypatch, room, "intersection", lambda *boxes: counted.append(boxes))
    shape = (8192, 8192)
    chunks = stored(shape, 4, (1024, 1))
    plan = planned(shape, 4, chunks, wanted_by(shape, (1024,), (0, None)), grid_of((1024,), (0, None)))
    assert plan.parts is None
    assert len(counted) <= 1024
    plan = planned(shape, 4, chunks, wanted_by(shape, (1024,), (None, 0)), grid_of((1024,), (None, 0)))
    assert plan.parts is not None
    assert len(counted) <= 8 * 1024
    assert sum(read.nbytes for read in plan.reads_of(1023)) == 8192 * 8192 * 4 // 1024


def test_leaves_that_are_stored_and_wanted_alike_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 leaves x 1,024 processes: the work grows with the kinds of leaves."""
    from treering._plan import load as room

    made: list[object] = []
    faults.before(monkeypatch, room, "plan_load", lambda *_: made.append(None))
    kinds = [((4096, length), itemsize) for length in (4096, 11008, 1) for itemsize in (2, 4)]
    chunks = [stored(shape, itemsize, (8, 1)) for shape, itemsize in kinds]
    wanted = [wanted_by(shape, (1024,), (0, None)) for shape, _ in kinds]
    leaves = [
        StoredLeaf(shape=shape, itemsize=itemsize, chunks=tuple(chunks[number % 6]), wanted=wanted[number % 6])
        for number in range(10_000)
        for shape, itemsize in [kinds[number % 6]]
    ]
    plans = plan_loads(leaves, 1024)
    assert len(made) == 6
    assert len(plans) == 10_000
    assert plans[:6] == list(map(plan_load, leaves[:6]))


@st.composite
def boxes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    starts = [draw(st.integers(0, length)) for length in shape]
    return tuple((start, draw(st.integers(start, length))) for start, length in zip(starts, shape, strict=True))


Case = tuple[Box, list[Box], tuple[int, ...] | None]


@st.composite
def chunks_and_wanted(draw: st.DrawFn) -> Case:
    shape = draw(st.lists(st.integers(0, 12), max_size=4).map(tuple))
    steps = draw(st.none() | st.tuples(*(st.integers(1, 9) for _ in shape)))
    return draw(boxes_of(shape)), draw(st.lists(boxes_of(shape), max_size=3)), steps


@given(chunks_and_wanted(), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 8, 16, 64, 1024]))
def test_exactly_the_blocks_with_a_wanted_byte(case: Case, itemsize: int, block: int) -> None:
    chunk, wanted, steps = case
    everything = np.zeros((*(stop for _, stop in chunk), itemsize), bool)
    for box in wanted:
        within = tuple((start, min(stop, end)) for (start, stop), (_, end) in zip(box, chunk, strict=True))
        everything[slices(within, steps)] = True
    touched = everything[slices(chunk)]
    nbytes = touched.size
    blocks = {place // block for place in np.flatnonzero(touched.ravel())}
    ranges = covering_ranges(chunk, wanted, itemsize, block, steps)
    assert all(start < stop for start, stop in ranges)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges)), "neighbours are joined"
    assert all(start % block == 0 and (stop % block == 0 or stop == nbytes) for start, stop in ranges)
    assert {place // block for start, stop in ranges for place in range(start, stop)} == blocks


def test_the_whole_chunk_is_one_range() -> None:
    chunk = ((2, 4), (0, 1000))
    assert covering_ranges(chunk, [chunk], 4, 64) == [(0, 8000)]
    assert covering_ranges(chunk, [((0, 9), (0, 1000))], 4, 64) == [(0, 8000)]
    assert covering_ranges((), [()], 8, 65536) == [(0, 8)]


def test_nothing_wanted_is_nothing_read() -> None:
    assert covering_ranges(((0, 0), (0, 3)), [((0, 0), (0, 3))], 4, 64) == []
    assert covering_ranges(((0, 4),), [], 4, 64) == []
    assert covering_ranges(((0, 4),), [((4, 8),), ((2, 2),)], 4, 64) == []


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((1 << 20, 1 << 8), ((0, 1 << 20), (0, 1))),  # a million runs in a million rows
        ((1 << 10, 1 << 10, 1 << 8), ((0, 1 << 10), (0, 1 << 10), (3, 5))),
        ((2,) * 28, ((0, 2),) * 27 + ((1, 2),)),
        ((1 << 40, 1 << 10), ((0, 1 << 20), (0, 1))),  # of a leaf that no machine holds
    ],
)
def test_a_million_small_runs_cost_no_list(shape: tuple[int, ...], wanted: Box) -> None:
    tracemalloc.start()
    ranges = covering_ranges(whole(shape), [wanted], 4, 1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(ranges) == 1
    assert peak < 1 << 16


def test_runs_far_apart_cost_at_most_the_blocks() -> None:
    shape, itemsize, block = (64, 4, 512, 128), 4, 65536
    wanted = ((0, 64), (0, 4), (0, 2), (0, 128))  # 1 KiB of each 256 KiB
    ranges = covering_ranges(whole(shape), [wanted], itemsize, block)
    assert len(ranges) == 64 * 4
    assert sum(stop - start for start, stop in ranges) == math.prod(shape) * itemsize // 4
