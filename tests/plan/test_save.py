"""Who writes what: every item once, by somebody who holds it, in files of a limited size, and loads that are level."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.drawn import drawn
from treering._plan.save import (
    LeafLayout,
    PlannedPart,
    SavePlan,
    file_counts,
    files_by_position,
    level_loads,
    plan_save,
    pour,
)
from treering._values.boxes import Box, boxes_of_range, contains, find_cover_error, size_of, whole
from treering.errors import UnsupportedError

plans = settings(derandomize=True, max_examples=drawn(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Pieces of fewer than 256 bytes are not cut off, so what is written may be less than twice that too long.
CRUMBS = 512
# Those of layouts as meshes make them, and others.
AWKWARD = st.sampled_from([0, 1, 2, 3, 5, 7, 8, 13, 31, 64, 97, 128, 257, 1009])
ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16])


def grid_boxes(shape: tuple[int, ...], splits: tuple[int, ...]) -> list[tuple[tuple[int, ...], Box]]:
    """Cut each axis into equal steps, as XLA does: the last ones are shorter, or empty."""
    cells = itertools.product(*(range(split) for split in splits))
    boxes = []
    for cell in cells:
        steps = [-(-length // split) for length, split in zip(shape, splits, strict=True)]
        box = tuple(
            (min(place * step, length), min(place * step + step, length))
            for place, step, length in zip(cell, steps, shape, strict=True)
        )
        boxes.append((cell, box))
    return boxes


def all_parts(plan: SavePlan[Box]) -> tuple[tuple[PlannedPart[Box], ...], ...]:
    return tuple(map(plan.parts_of, range(len(plan.loads))))


def replicated(shape: tuple[int, ...], itemsize: int, processes: int) -> LeafLayout:
    return LeafLayout(nbytes_per_item=itemsize, shape=shape, boxes=((whole(shape), tuple(range(processes))),))


def mesh_layout(
    shape: tuple[int, ...], itemsize: int, mesh: tuple[int, ...], spec: tuple[int | None, ...], devices: int = 1
) -> LeafLayout:
    """Shard axis n over mesh axis ``spec[n]``; the mesh is of devices, numbered in C order, so many to a process."""
    splits = tuple(1 if axis is None else mesh[axis] for axis in spec)
    owners: dict[Box, set[int]] = {}
    cells = dict(grid_boxes(shape, splits))
    for number, place in enumerate(itertools.product(*map(range, mesh))):
        cell = tuple(0 if axis is None else place[axis] for axis in spec)
        owners.setdefault(cells[cell], set()).add(number // devices)
    boxes = tuple((box, tuple(sorted(found))) for box, found in owners.items())
    return LeafLayout(nbytes_per_item=itemsize, shape=shape, boxes=boxes)


@st.composite
def mesh_layouts(draw: st.DrawFn, largest: int = 1024) -> tuple[int, list[LeafLayout]]:
    """Leaves that are replicated, sharded, or both, over one mesh of one or more devices a process."""
    devices = draw(st.sampled_from([1, 1, 2, 4]))
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (7,), (2, 4), (4, 4), (3, 5), (2, 2, 4), (8, 16), (257,), (1024,)]))
    mesh = tuple(size for size in sizes if math.prod(sizes) <= largest) or (largest,)
    mesh = (*mesh, devices) if draw(st.booleans()) else (devices * mesh[0], *mesh[1:])
    layouts = []
    for _ in range(draw(st.integers(0, 6))):
        shape = draw(st.lists(AWKWARD, max_size=3).map(tuple))
        free = [*range(len(mesh)), *([None] * len(shape))]
        spec = tuple(draw(st.permutations(free))[: len(shape)])
        layouts.append(mesh_layout(shape, draw(ITEMSIZES), mesh, spec, devices))
    return math.prod(mesh) // devices, layouts


@st.composite
def any_layouts(draw: st.DrawFn, largest: int = 7) -> tuple[int, list[LeafLayout]]:
    """Leaves whose boxes lie with any processes at all, as no mesh would place them."""
    processes = draw(st.integers(1, largest))
    layouts = []
    for _ in range(draw(st.integers(0, 5))):
        shape = draw(st.lists(AWKWARD, max_size=2).map(tuple))
        splits = tuple(draw(st.integers(1, max(1, min(length, 4)))) for length in shape)
        holders = st.sets(st.integers(0, processes - 1), min_size=1)
        boxes = {box: tuple(draw(holders)) for _, box in grid_boxes(shape, splits)}
        layouts.append(LeafLayout(nbytes_per_item=draw(ITEMSIZES), shape=shape, boxes=tuple(boxes.items())))
    return processes, layouts


def least_possible(layouts: Sequence[LeafLayout], loads: Sequence[int]) -> float:
    """Return the least load of the busiest process, were bytes divided at will.

    What only some processes hold, these must write among them: for no set of processes can it be less than that for
    each, and for one set (max-flow min-cut) it is that. Few processes: all sets are looked at. Many: the busiest of
    the plan at hand, however many those are, as the set that proves a good plan to be one is found among them.
    """
    held: dict[frozenset[int], int] = {}
    for layout in layouts:
        for box, owners in layout.boxes:
            key = frozenset(owners)
            held[key] = held.get(key, 0) + size_of(box) * layout.nbytes_per_item
    processes = len(loads)
    if processes <= 8:
        counts = range(1, processes + 1)
        sets = [set(some) for count in counts for some in itertools.combinations(range(processes), count)]
        return max(sum(nbytes for holders, nbytes in held.items() if holders <= some) / len(some) for some in sets)
    busiest_first = sorted(range(processes), key=lambda process: -loads[process])
    rank = {process: place for place, process in enumerate(busiest_first)}
    inside = [0] * processes
    for some, nbytes in held.items():
        inside[max(rank[owner] for owner in some)] += nbytes
    return max(total / count for count, total in enumerate(itertools.accumulate(inside), 1))


def check(layouts: Sequence[LeafLayout], processes: int) -> SavePlan[Box]:
    plan = plan_save(layouts, processes)
    written: list[list[tuple[tuple[int, int], ...]]] = [[] for _ in layouts]
    held: dict[tuple[int, int], list[Box]] = {}
    for layout in layouts:
        for box, owners in layout.boxes:
            for owner in owners:
                held.setdefault((id(layout), owner), []).append(box)
    for process, parts in enumerate(all_parts(plan)):
        assert list(parts) == sorted(parts, key=lambda part: (part.leaf, part.part))
        for part in parts:
            written[part.leaf].append(part.part)
            if size_of(part.part):
                own = held[id(layouts[part.leaf]), process]
                assert any(contains(box, part.part) for box in own), "a process writes what it does not hold"
        nbytes = sum(size_of(part.part) * layouts[part.leaf].nbytes_per_item for part in parts)
        assert nbytes == plan.loads[process]
    for layout, boxes in zip(layouts, written, strict=True):
        assert find_cover_error(layout.shape, boxes) is None
    share = least_possible(layouts, plan.loads)
    assert max(plan.loads) <= max(1.10 * share, share + CRUMBS)
    return plan


@plans
@given(any_layouts())
def test_any_owners(case: tuple[int, list[LeafLayout]]) -> None:
    processes, layouts = case
    check(layouts, processes)


@plans
@given(mesh_layouts())
def test_meshes(case: tuple[int, list[LeafLayout]]) -> None:
    processes, layouts = case
    check(layouts, processes)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("processes", [1, 2, 3, 8, 97, 1024])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 0), (7, 1 << 20), (1 << 20,), (97, 89, 83), (1, 1, 4096, 3)])
def test_replicated(processes: int, shape: tuple[int, ...]) -> None:
    """Prime lengths, no items, one item, fewer rows than replicas."""
    check([replicated(shape, 4, processes)], processes)


@pytest.mark.parametrize("processes", [2, 4, 8, 1024])
def test_a_transformer_replicated_and_sharded(processes: int) -> None:
    """Weights sharded over all, norms replicated, embeddings over half of the mesh: mixed."""
    mesh = (2, processes // 2)
    both_axes = mesh_layout((4096, 4096), 4, mesh, (0, 1))
    one_axis = mesh_layout((4096, 11008), 4, mesh, (1, None))
    norm = mesh_layout((4096,), 4, mesh, (None,))
    layouts = [both_axes, one_axis, norm] * 24
    layouts.append(mesh_layout((50257, 4096), 4, mesh, (None, 0)))
    plan = check(layouts, processes)
    assert max(plan.loads) <= 1.03 * sum(plan.loads) / processes


def test_replicas_make_up_for_what_lies_with_one() -> None:
    alone = LeafLayout(nbytes_per_item=4, shape=(1 << 20,), boxes=((((0, 1 << 20),), (2,)),))
    plan = check([alone, replicated((3 << 20,), 4, 4)], 4)
    assert max(plan.loads) <= 1.01 * (4 << 20)
    assert {part.leaf for part in plan.parts_of(2)} == {0}


def test_neighbours_that_overlap_pass_load_along() -> None:
    """Three processes, two boxes, each with two of them: a third each needs both boxes cut off the middle."""
    halves = [(((0, 3000), (0, 1000)), (0, 1)), (((3000, 6000), (0, 1000)), (1, 2))]
    plan = check([LeafLayout(nbytes_per_item=4, shape=(6000, 1000), boxes=tuple(halves))], 3)
    assert max(plan.loads) <= 1.01 * 8_000_000


def test_one_process_writes_the_boxes_as_they_are() -> None:
    boxes = [box for _, box in grid_boxes((13, 7), (4, 2))]
    sharded = LeafLayout(nbytes_per_item=4, shape=(13, 7), boxes=tuple((box, (0,)) for box in boxes))
    plan = plan_save([sharded, replicated((), 8, 1)], 1)
    assert all_parts(plan) == ((*(PlannedPart(0, box) for box in boxes), PlannedPart(1, ())),)


def test_cuts_fall_between_rows() -> None:
    plan = check([replicated((1000, 128), 4, 3)], 3)
    boxes = [part.part for parts in all_parts(plan) for part in parts]
    assert len(boxes) == 3
    assert all(box[1] == (0, 128) for box in boxes)


def test_rows_longer_than_a_share_are_cut_too() -> None:
    plan = check([replicated((2, 1 << 20), 4, 5)], 5)
    assert all(len(parts) <= 2 for parts in all_parts(plan))


def test_small_leaves_are_not_cut() -> None:
    layouts = [replicated((64,), 4, 8) for _ in range(1000)]
    plan = check(layouts, 8)
    assert sum(map(len, all_parts(plan))) == 1000
    assert max(plan.loads) == 125 * 256


def test_no_crumbs() -> None:
    """1,024 processes and one KiB: four write a quarter each; 1,024 files of a byte would help nobody."""
    plan = check([replicated((1024,), 1, 1024)], 1024)
    assert sorted(plan.loads, reverse=True)[:5] == [256] * 4 + [0]


def test_the_plan_is_the_same_for_everybody() -> None:
    def layouts() -> list[LeafLayout]:
        return [mesh_layout((97, 89), 4, (4, 4), spec, 2) for spec in [(0, None), (None, 1), (None, None), (0, 1)]] * 3

    assert all_parts(plan_save(layouts(), 8)) == all_parts(plan_save(layouts(), 8))


def test_leaves_that_lie_alike_are_planned_together() -> None:
    """10,000 leaves x 1,024 processes: the work grows with the kinds of leaves and with one process's own parts."""
    counted = 0

    class Counted(tuple):
        __slots__ = ()

        def __iter__(self) -> object:  # type: ignore[override]
            nonlocal counted
            counted += 1
            return super().__iter__()

    processes = 1024
    everybody = tuple(range(processes))
    kinds = [
        LeafLayout(
            nbytes_per_item=4,
            shape=(1024, 4096),
            boxes=tuple((Counted(box), (cell[0],)) for cell, box in grid_boxes((1024, 4096), (1024, 1))),
        ),
        LeafLayout(nbytes_per_item=4, shape=(257, 1031), boxes=((Counted(whole((257, 1031))), everybody),)),
        mesh_layout((4096, 4096), 2, (32, 32), (0, None)),
        mesh_layout((4096, 4096), 2, (32, 32), (None, 1)),
    ]
    plan = plan_save([kinds[leaf % 4] for leaf in range(10_000)], processes)
    assert counted < 20 * processes
    assert max(plan.loads) <= 1.01 * sum(plan.loads) / processes
    parts = plan.parts_of(17)
    assert len([part for part in parts if part.leaf % 4 == 0]) == 2500
    assert len(parts) < 2500 + 3 * 2500 / 16


@pytest.mark.parametrize(
    ("boxes", "said"),
    [
        ((), "lie in no box"),
        (((((0, 3),), (0,)),), "1 item lies in no box, of 4"),
        (((((0, 3),), (0,)), (((2, 4),), (0,))), "overlap"),
        (((((0, 4),), ()),), "there are 2 processes"),
        (((((0, 4),), (0, 2)),), "there are 2 processes"),
        (((((0, 4),), (-1, 0)),), "there are 2 processes"),
    ],
)
def test_layouts_that_make_no_sense_are_refused(
    boxes: tuple[tuple[tuple[tuple[int, int], ...], tuple[int, ...]], ...], said: str
) -> None:
    with pytest.raises(UnsupportedError, match=said):
        plan_save([LeafLayout(nbytes_per_item=4, shape=(4,), boxes=boxes)], 2)


def test_empty_boxes_of_a_sharding_are_nobodys() -> None:
    """Five items over four devices: XLA gives the last one none."""
    plan = check([mesh_layout((5,), 4, (4,), (0,))], 4)
    assert plan.loads == (8, 8, 4, 0)
    no_items = mesh_layout((0, 8), 4, (4,), (None, 0))
    assert all_parts(plan_save([no_items], 4)) == ((PlannedPart(0, whole((0, 8))),), (), (), ())


def test_nothing_to_save() -> None:
    assert all_parts(plan_save([], 3)) == ((), (), ())


@given(st.integers(0, 1000), st.lists(st.integers(0, 100), min_size=1, max_size=8))
def test_water_lies_level(amount: int, levels: list[int]) -> None:
    result = pour(amount, levels)
    assert sum(result) == amount
    assert min(result) >= 0
    surfaces = [level + water for level, water in zip(levels, result, strict=True) if water]
    if surfaces:
        assert max(surfaces) - min(surfaces) <= 1
        dry = [level for level, water in zip(levels, result, strict=True) if not water]
        assert all(level >= min(surfaces) - 1 for level in dry)


@pytest.mark.parametrize("count", [2, 10, 100, 1023])
def test_a_chain_of_pools_is_leveled(count: int) -> None:
    loads = [0] * (count + 1)
    amounts = level_loads(loads, [((place, place + 1), 1_000_000) for place in range(count)])
    assert max(loads) <= 1.01 * 1_000_000
    assert max(loads) <= 1.05 * count * 1_000_000 / (count + 1)
    assert [sum(parts) for parts in amounts] == [1_000_000] * count


def test_ranges_of_the_parts_are_what_was_cut() -> None:
    """A stretch that begins and ends inside rows becomes as few boxes as can be."""
    plan = check([replicated((5, 1 << 18), 4, 3)], 3)
    row = 1 << 18
    begin = 0
    for parts in all_parts(plan):
        items = sum(size_of(part.part) for part in parts)
        assert [part.part for part in parts] == boxes_of_range((5, row), begin, begin + items)
        begin += items
    assert begin == math.prod((5, row))


def test_who_has_only_a_leaf_without_items_has_a_file_too() -> None:
    empty = LeafLayout(nbytes_per_item=1, shape=(0, 4), boxes=((((0, 0), (0, 4)), (2, 1)),))
    plan = plan_save([empty], 4)
    assert plan.writers == (1,)
    assert file_counts(plan) == [0, 1, 0, 0]


@given(any_layouts(), st.sampled_from([1, 100, 1 << 20]))
def test_the_writers_are_those_with_parts(found: tuple[int, list[LeafLayout]], limit: int) -> None:
    processes, layouts = found
    plan = plan_save(layouts, processes)
    assert plan.writers == tuple(process for process in range(processes) if plan.parts_of(process))
    counts = file_counts(plan, limit)
    for load, count, process in zip(plan.loads, counts, range(processes), strict=True):
        assert (count > 0) == (process in plan.writers)
        assert load <= limit * count


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 40))
def test_boxes_go_where_they_begin(sizes: list[int], limit: int) -> None:
    count = max(1, -(-sum(sizes) // limit))
    files = files_by_position(sizes, count, limit)
    assert len(files) == len(sizes)
    assert list(files) == sorted(files)
    assert all(0 <= file < count for file in files)
    for file in set(files):
        mine = [size for size, found in zip(sizes, files, strict=True) if found == file]
        assert sum(mine[:-1]) <= limit
