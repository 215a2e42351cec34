"""Rows for each device: all of the leaf, each once, few blocks twice; and small leaves go round."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.drawn import drawn
from tests.plan.test_load import boxes_of_process
from tests.plan.test_save import grid_boxes
from treering._plan.load import Grid, Parts, StoredChunk, StoredLeaf, Turns, covering_ranges, plan_loads, plan_parts
from treering._values.boxes import Box, find_cover_error, shape_of, size_of
from treering._values.checksums import block_bytes

Shape = tuple[int, ...]


def stored(shape: Shape, itemsize: int, splits: Shape, *, whole_chunks: bool = False) -> list[StoredChunk]:
    boxes = [box for _, box in grid_boxes(shape, splits) if size_of(box)]
    nbytes = [size_of(box) * itemsize for box in boxes]
    return [
        StoredChunk(box=box, block=size if whole_chunks else block_bytes(size))
        for box, size in zip(boxes, nbytes, strict=True)
    ]


def grid_over(mesh: Shape, spec: Sequence[tuple[int, ...]], devices: int = 1, seed: int | None = None) -> Grid:
    numbers = list(range(math.prod(mesh)))
    if seed is not None:
        random.Random(seed).shuffle(numbers)
    return Grid(shape=mesh, owners=tuple(number // devices for number in numbers), spec=tuple(spec))


def read_by(boxes: Sequence[Box], chunks: Sequence[StoredChunk], itemsize: int) -> int:
    return sum(
        stop - start for chunk in chunks for start, stop in covering_ranges(chunk.box, boxes, itemsize, chunk.block)
    )


def check(shape: Shape, itemsize: int, chunks: Sequence[StoredChunk], grid: Grid) -> tuple[Parts, list[int]]:
    """Return the parts, and how much each process reads."""
    parts = plan_parts(shape, itemsize, chunks, grid)
    boxes = [boxes_of_process(parts, process, shape) for process in range(max(grid.owners) + 1)]
    assert find_cover_error(shape, list(itertools.chain.from_iterable(boxes))) is None
    assert parts.first + parts.used <= len(grid.owners)
    assert parts.owners == grid.owners_along(parts.axis)
    read = [read_by(own, chunks, itemsize) for own in boxes]
    assert sum(read) <= 1.05 * math.prod(shape) * itemsize
    return parts, read


LEAVES = [(1536, 4096, 2), (32000, 1536, 2), (4099, 4093, 4), (1021, 16381, 2), (7, 2_000_003, 4)]
SPECS = [((), (0,)), ((), (0, 1)), ((1,), (0,)), ((), (1,)), ((1, 0), ()), ((0,), ())]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("leaf", LEAVES)
def test_every_item_is_read_by_one_and_few_bytes_by_two(
    leaf: tuple[int, int, int], spec: tuple[tuple[int, ...], ...], seed: int | None
) -> None:
    *lengths, itemsize = leaf
    shape = tuple(lengths)
    for mesh, devices in [((2, 2), 1), ((3, 2), 2), ((4, 8), 4), ((16, 4), 1)]:
        grid = grid_over(mesh, spec, devices, seed)
        for splits in [(1, 1), (8, 1), (1, 8), (3, 2)]:
            check(shape, itemsize, stored(shape, itemsize, splits), grid)


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_thousand_processes_of_eight_devices(leaf: tuple[int, int, int]) -> None:
    *lengths, itemsize = leaf
    shape = tuple(lengths)
    grid = grid_over((1024, 8), ((), (0,)), 8)
    parts = plan_parts(shape, itemsize, stored(shape, itemsize, (8, 1)), grid)
    boxes = [boxes_of_process(parts, process, shape) for process in range(1024)]
    assert find_cover_error(shape, list(itertools.chain.from_iterable(boxes))) is None
    read = sum(read_by(own, stored(shape, itemsize, (8, 1)), itemsize) for own in boxes if own)
    assert read <= 1.05 * math.prod(shape) * itemsize


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_the_busiest_reads_little_more_than_its_share(processes: int) -> None:
    """The weights of a transformer, and some of prime sides, over processes of four devices."""
    for *lengths, itemsize in LEAVES[:4]:
        shape = tuple(lengths)
        grid = grid_over((processes, 4), ((), (0, 1)), 4)
        for splits in [(1, 1), (8, 1)]:
            _, read = check(shape, itemsize, stored(shape, itemsize, splits), grid)
            assert max(read) <= 1.10 * math.prod(shape) * itemsize / processes


def test_rows_of_whole_blocks_are_read_once() -> None:
    for processes in (8, 64, 1024):
        shape = (8192, 8192)
        _, read = check(shape, 4, stored(shape, 4, (1, 1)), grid_over((processes,), ((), (0,))))
        assert sum(read) == 8192 * 8192 * 4


@pytest.mark.parametrize("processes", [12, 97, 1024])
def test_rows_of_no_whole_blocks_are_read_by_as_many_as_five_percent_allow(processes: int) -> None:
    """512 blocks: 25 of them may be read twice, so there are 26 readers at most."""
    shape = (4099, 4093)
    _, read = check(shape, 4, stored(shape, 4, (1, 1)), grid_over((processes,), ((), (0,))))
    assert min(processes, 24) <= sum(map(bool, read)) <= 26


def test_chunks_that_are_undone_whole_are_never_read_twice_for_nothing() -> None:
    shape = (4096, 1024)
    chunks = stored(shape, 4, (16, 1), whole_chunks=True)
    parts, read = check(shape, 4, chunks, grid_over((8,), ((), (0,))))
    assert parts.rows % 256 == 0
    assert sum(read) == 4096 * 1024 * 4
    parts, read = check(shape, 4, stored(shape, 4, (1, 1), whole_chunks=True), grid_over((8,), ((), (0,))))
    assert parts.used == 1
    assert sum(map(bool, read)) == 1


def test_the_axis_that_more_can_share_is_cut() -> None:
    """Two rows cannot be read by eight; their columns can."""
    shape = (2, 1 << 22)
    parts, read = check(shape, 4, stored(shape, 4, (1, 1)), grid_over((8,), ((0,), ())))
    assert parts.axis == 1
    assert all(read)


@settings(derandomize=True, max_examples=drawn(60), deadline=None)
@given(st.data())
def test_any_leaf_on_any_mesh(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 7, 16, 97, 257]), min_size=1, max_size=3).map(tuple))
    mesh = data.draw(st.sampled_from([(1,), (5,), (2, 3), (4, 4), (2, 2, 3)]))
    cut = data.draw(st.permutations(range(len(mesh))))
    spec: list[tuple[int, ...]] = [() for _ in shape]
    for number in cut:
        axis = data.draw(st.integers(-1, len(shape) - 1))
        if axis >= 0:
            spec[axis] = (*spec[axis], number)
    itemsize = data.draw(st.sampled_from([1, 4, 16]))
    splits = tuple(data.draw(st.sampled_from([1, 2, 3])) for _ in shape)
    chunks = [StoredChunk(box=chunk.box, block=64) for chunk in stored(shape, itemsize, splits)]
    check(shape, itemsize, chunks, grid_over(mesh, spec, seed=data.draw(st.sampled_from([None, 0, 1]))))


def test_those_that_cut_the_axis_come_first_and_those_that_cut_others_last() -> None:
    grid = Grid(shape=(2, 2, 2), owners=tuple(range(8)), spec=((2,), (0,)))
    assert grid.order(0) == (2, 1, 0)
    assert grid.order(1) == (0, 1, 2)
    assert grid.owners_along(0) == (0, 4, 2, 6, 1, 5, 3, 7)


# ------------------------------------------------------------------------------------------------------- going round


def small_leaves(processes: int, count: int, kinds: Sequence[Shape], devices: int = 1) -> list[StoredLeaf]:
    grid = grid_over((processes * devices,), ((), (0,)), devices)
    alike: list[StoredLeaf] = []
    for shape in kinds:
        boxes = [box for _, box in grid_boxes(shape, (1, processes * devices))]
        wanted = [boxes[n * devices : (n + 1) * devices] for n in range(processes)]
        chunks = tuple(stored(shape, 4, (1, 1)))
        alike.append(StoredLeaf(shape=shape, itemsize=4, chunks=chunks, wanted=wanted, grid=grid))
    return list(itertools.islice(itertools.cycle(alike), count))


@pytest.mark.parametrize("devices", [1, 4])
def test_small_leaves_go_round(devices: int) -> None:
    """Each is read by one or two processes, all together by all, about evenly."""
    leaves = small_leaves(8, 400, [(256, 512), (512, 768), (400, 100)], devices)
    plans = plan_loads(leaves, 8)
    loads = [0] * 8
    for leaf, parts in zip(leaves, plans, strict=True):
        assert parts is not None
        boxes = [boxes_of_process(parts, process, leaf.shape) for process in range(8)]
        read = [read_by(own, leaf.chunks, 4) for own in boxes]
        assert sum(read) <= 1.05 * math.prod(leaf.shape) * 4
        loads = [load + own for load, own in zip(loads, read, strict=True)]
    assert max(loads) <= 1.10 * sum(loads) / 8


def test_items_that_cannot_be_exchanged_are_not_like_those_that_can() -> None:
    (leaf,) = small_leaves(8, 1, [(256, 512)])
    bound = dataclasses.replace(leaf, grid=None)
    for leaves in ([leaf, bound, leaf], [bound, leaf, bound]):
        plans = plan_loads(leaves, 8)
        assert [parts is None for parts in plans] == [one.grid is None for one in leaves]


def test_ten_thousand_small_leaves_for_a_thousand_processes_are_spread_over_all() -> None:
    leaves = small_leaves(1024, 10_000, [(256, 1024), (512, 1024)])
    plans = plan_loads(leaves, 1024)
    readers = {process for parts in plans if parts is not None for process in _readers(parts)}
    assert readers == set(range(1024))


def _readers(parts: Parts) -> set[int]:
    return set(parts.owners[parts.first : parts.first + parts.used])


def test_where_other_places_tear_other_blocks_the_first_ones_are_kept() -> None:
    parts = Parts(axis=0, length=8, rows=4, owners=(0, 0, 1, 2))
    turns = Turns(3)
    assert [turns.assign(parts, 8).first for _ in range(4)] == [0, 0, 0, 0]


def test_parts_of_every_place_tile_the_leaf() -> None:
    for length, rows, places, first in [(10, 3, 5, 1), (8, 8, 4, 3), (7, 1, 9, 2)]:
        parts = Parts(axis=1, length=length, rows=rows, first=first, owners=(0,) * places)
        assert parts.padded == rows * places
        boxes = [box for place in range(places) if (box := parts.box_of(place, (2, length))) is not None]
        assert len(boxes) == parts.used
        assert find_cover_error((2, length), boxes) is None
        assert {shape_of(box)[0] for box in boxes} == {2}


def test_who_is_passed_over_is_the_next_one_for_a_leaf_that_it_has() -> None:
    turns = Turns(3)
    of_two = Parts(axis=0, length=4, rows=4, owners=(1, 2))
    of_all = Parts(axis=0, length=4, rows=4, owners=(0, 1, 2))
    assert [turns.assign(parts, 16).first for parts in (of_two, of_all, of_two, of_all)] == [0, 0, 1, 0]
