"""Chunk files of leaves: how arrays are cut into them, and who writes each one, once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests import faults, meshes
from tests.drawn import drawn
from tests.plan.test_save import any_layouts, mesh_layout, mesh_layouts, replicated
from treering._plan import chunks as chunks_module
from treering._plan.chunks import balanced_chunk, chunk_shape, plan_writers, shared_chunk_shape
from treering._plan.save import LeafLayout, SavePlan, level_loads
from treering._values.boxes import Box, held_boxes, intersection, size_of, whole
from treering.errors import UnsupportedError


def grid(shape: tuple[int, ...], chunks: tuple[int, ...]) -> list[Box]:
    """Return all the chunks of an array, clipped to it."""
    axes = [
        [(start, min(start + chunk, size)) for start in range(0, size, chunk)]
        for size, chunk in zip(shape, chunks, strict=True)
    ]
    return list(itertools.product(*axes))


@pytest.mark.parametrize(
    ("shape", "spec", "chunks"),
    [
        ((8, 8), P("dp", "tp"), (4, 2)),
        ((8, 8), P(None, "tp"), (8, 2)),
        ((8, 8), P(("dp", "tp"), None), (1, 8)),
        ((8, 8), P(), (8, 8)),
        ((16,), P("tp"), (4,)),
        ((), P(), ()),
        ((0, 3), P(), (1, 3)),
        ((0, 8), P(None, "tp"), (1, 8)),
    ],
)
def test_chunks_are_shards(shape: tuple[int, ...], spec: P, chunks: tuple[int, ...]) -> None:
    """On the mesh and with the shapes of files that eformer wrote; an array without items has no chunk to be cut."""
    mesh = meshes.grid(2, 4, axes=("dp", "tp"))
    held = held_boxes(NamedSharding(mesh, spec).devices_indices_map(shape), shape, lambda _: 0)
    assert chunk_shape(shape, [box for box, _ in held], 4, None) == chunks


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=3), st.randoms())
def test_any_grid_is_found_in_any_order(axes: list[tuple[int, int]], random: Any) -> None:
    shape = tuple(size for size, _ in axes)
    chunks = tuple(min(axis) for axis in axes)
    boxes = grid(shape, chunks)
    random.shuffle(boxes)
    assert chunk_shape(shape, [*boxes, boxes[0]], 4, None) == chunks


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 2),), ((2, 6),)],
        [((0, 3),), ((3, 4),), ((4, 6),)],
        [((0, 2),), ((4, 6),)],
        [((1, 3),)],
        [((0, 4),), ((2, 6),)],
        [],
        [((0, 0),), ((0, 6),)],
        [((0, 0),)],
    ],
    ids=str,
)
def test_what_is_no_grid_is_one_chunk(boxes: list[Box]) -> None:
    assert chunk_shape((6,), boxes, 4, None) == (6,)


def test_a_grid_with_a_hole_is_one_chunk() -> None:
    assert chunk_shape((4, 4), grid((4, 4), (2, 2))[1:], 4, None) == (4, 4)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), max_size=3),
    st.sampled_from([1, 2, 4, 16]),
    st.integers(1, 4000),
)
def test_a_limit_holds(axes: list[tuple[int, int]], itemsize: int, limit: int) -> None:
    shape = tuple(size for size, _ in axes)
    shards = tuple(max(min(axis), 1) for axis in axes)
    chunks = chunk_shape(shape, grid(shape, shards), itemsize, limit)
    assert all(1 <= chunk <= max(size, 1) for chunk, size in zip(chunks, shape, strict=True))
    if 0 not in shape:
        assert math.prod(chunks) * itemsize <= max(limit, itemsize)
        if math.prod(shards) * itemsize <= limit:
            assert chunks == shards


@pytest.mark.parametrize(
    ("shape", "shards", "limit", "chunks"),
    [
        ((100, 8), (100, 8), 400, (50, 8)),
        ((101, 8), (101, 8), 400, (34, 8)),  # three of about the same length, not two of 50 and one of 1
        ((96, 8), (24, 8), 100, (12, 8)),  # 12 divides a shard of 24: no chunk lies in two
        ((92, 8), (23, 8), 80, (10, 8)),  # 23 is prime: chunks of one row would be too many
        ((8, 1000), (4, 1000), 500, (1, 500)),
        ((2, 2, 6), (1, 2, 6), 3, (1, 1, 3)),
        ((3,), (3,), 1, (1,)),
    ],
    ids=str,
)
def test_how_limits_cut(shape: tuple[int, ...], shards: tuple[int, ...], limit: int, chunks: tuple[int, ...]) -> None:
    assert chunk_shape(shape, grid(shape, shards), 1, limit) == chunks


def test_huge_shapes_cost_nothing() -> None:
    shape = (1 << 40, 1 << 20)
    assert chunk_shape(shape, [whole(shape)], 4, None) == shape
    assert chunk_shape(shape, [whole(shape)], 4, 1 << 20) == (1, 1 << 18)
    assert chunk_shape((1 << 62,), [((0, 1 << 61),), ((1 << 61, 1 << 62),)], 1, 1 << 30) == (1 << 30,)
    assert chunk_shape((2 * (2**61 - 1),), [((0, 2**61 - 1),), ((2**61 - 1, 2 * (2**61 - 1)),)], 1, 1 << 30)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), max_size=3),
    st.sampled_from([1, 2, 4, 16]),
    st.one_of(st.none(), st.integers(1, 4000)),
)
def test_no_shared_chunk_reaches_over_a_box(axes: list[tuple[int, int]], itemsize: int, limit: int | None) -> None:
    """Each chunk lies in one shard, so whoever holds the shard can write it; and the limit holds for such lengths."""
    shape = tuple(size for size, _ in axes)
    shards = tuple(max(min(axis), 1) for axis in axes)
    chunks = shared_chunk_shape(shape, grid(shape, shards), itemsize, limit)
    assert all(1 <= chunk <= max(size, 1) for chunk, size in zip(chunks, shape, strict=True))
    if 0 in shape:
        return
    assert all(shard >= size or shard % chunk == 0 for shard, chunk, size in zip(shards, chunks, shape, strict=True))
    if limit is not None:
        assert math.prod(chunks) * itemsize <= max(limit, itemsize)
    if limit is None or math.prod(shards) * itemsize <= limit:
        assert chunks == shards


@pytest.mark.parametrize(
    ("shape", "shards", "limit", "chunks"),
    [
        ((96, 8), (24, 8), 100, (12, 8)),
        ((101, 8), (101, 8), 400, (34, 8)),
        ((46, 8), (23, 8), 80, (23, 3)),  # 23 is prime: the next axis is cut
        ((46, 8), (23, 4), 20, (1, 4)),  # and one row is less than half of what is allowed, where nothing else is
        ((2 * (2**61 - 1),), (2**61 - 1,), 1 << 30, (2**61 - 1,)),  # too large a prime
    ],
    ids=str,
)
def test_how_limits_cut_shared(
    shape: tuple[int, ...], shards: tuple[int, ...], limit: int, chunks: tuple[int, ...]
) -> None:
    assert shared_chunk_shape(shape, grid(shape, shards), 1, limit) == chunks


plans = settings(derandomize=True, max_examples=drawn(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])


def chunk_boxes(shape: tuple[int, ...], chunk: tuple[int, ...]) -> list[Box]:
    """The part of each chunk that lies inside the shape, in the order of the grid."""
    axes = [
        [(start, min(start + length, size)) for start in range(0, size, length)]
        for size, length in zip(shape, chunk, strict=True)
    ]
    return list(itertools.product(*axes))


def owners_of(layout: LeafLayout, box: Box) -> frozenset[int]:
    """Those who hold all of a box, found the slow way."""
    held: dict[int, int] = {}
    for other, owners in layout.boxes:
        common = intersection(box, other)
        for owner in set(owners) if common is not None else ():
            held[owner] = held.get(owner, 0) + size_of(common or ())
    return frozenset(owner for owner, items in held.items() if items == size_of(box))


def check(layouts: Sequence[LeafLayout], processes: int, limit: int | None) -> SavePlan[int]:
    """Plan, and look at every chunk of every process."""
    chunks = [
        shared_chunk_shape(layout.shape, [box for box, _ in layout.boxes], layout.nbytes_per_item, limit)
        for layout in layouts
    ]
    plan = plan_writers(layouts, chunks, processes, [str(leaf) for leaf in range(len(layouts))])
    boxes = [chunk_boxes(layout.shape, chunk) for layout, chunk in zip(layouts, chunks, strict=True)]
    sizes = [math.prod(chunk) * layout.nbytes_per_item for layout, chunk in zip(layouts, chunks, strict=True)]
    owners = [
        [owners_of(layout, box) for box in inside] for layout, inside in zip(layouts, boxes, strict=True)
    ]  # fmt: skip
    written: list[tuple[int, int]] = []
    for process in range(processes):
        mine = plan.parts_of(process)
        assert list(mine) == sorted(mine)
        assert all(process in owners[leaf][number] for leaf, number in mine), "a process writes what it does not hold"
        written += mine
        assert plan.loads[process] == sum(sizes[leaf] for leaf, _ in mine)
    assert sorted(written) == [(leaf, number) for leaf, inside in enumerate(boxes) for number in range(len(inside))]
    largest = max((sizes[leaf] for leaf, those in enumerate(owners) for some in those if len(some) > 1), default=0)
    assert max(plan.loads) <= least_busiest(sizes, owners, processes) * 1.01 + largest + 1
    return plan


def least_busiest(sizes: Sequence[int], owners: Sequence[Sequence[frozenset[int]]], processes: int) -> int:
    """The least that the busiest could have, were bytes divided at will."""
    pools: dict[frozenset[int], int] = {}
    for size, those in zip(sizes, owners, strict=True):
        for some in those:
            pools[some] = pools.get(some, 0) + size
    loads = [0] * processes
    level_loads(loads, [(tuple(sorted(some)), amount) for some, amount in pools.items()])
    return max(loads)


@plans
@given(mesh_layouts(largest=16), st.sampled_from([None, 1 << 10, 1 << 14]))
def test_every_chunk_once_by_a_holder(case: tuple[int, list[LeafLayout]], limit: int | None) -> None:
    processes, layouts = case
    check(layouts, processes, limit)


@plans
@given(st.integers(2, 40), st.lists(st.integers(0, 1 << 19), max_size=40), st.integers(0, 3))
def test_replicated_leaves_are_balanced(processes: int, sizes: list[int], large: int) -> None:
    layouts = [replicated((size,), 4, processes) for size in [*sizes, *[1 << 24] * large]]
    plan = check(layouts, processes, limit := balanced_chunk(layouts, processes))
    share = math.ceil(sum(plan.loads) / processes)
    assert max(plan.loads) <= max(1.10 * share, share + limit)


def test_leaves_that_only_some_hold_are_made_up_for_by_others() -> None:
    """Two halves of the mesh hold leaves of their own, unevenly; what all hold levels it."""
    rows = 1 << 20
    layouts = [
        LeafLayout(nbytes_per_item=4, shape=(rows,), boxes=((((0, rows),), (0,)),)),
        LeafLayout(nbytes_per_item=4, shape=(rows,), boxes=((((0, rows),), (0, 1)),)),
        *[replicated((rows // 8, 8), 4, 4)] * 8,
    ]
    plan = check(layouts, 4, balanced_chunk(layouts, 4))
    assert max(plan.loads) <= 1.10 * sum(plan.loads) / 4


def test_a_mesh_of_replicas_writes_each_shard_once() -> None:
    """Data parallel over eight, sharded over four: each shard by one of its eight holders, all about equally."""
    layouts = [mesh_layout((4096, 64 * (1 + leaf % 3)), 4, (8, 4), (1, None)) for leaf in range(40)]
    plan = check(layouts, 32, balanced_chunk(layouts, 32))
    assert max(plan.loads) <= 1.10 * sum(plan.loads) / 32


def test_leaves_that_lie_alike_are_planned_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand leaves over 1,024 processes: as much work as for the few ways in which they lie."""
    looked_at = 0

    def counted(layout: LeafLayout, chunk: tuple[int, ...]) -> None:
        nonlocal looked_at
        looked_at += 1

    faults.before(monkeypatch, chunks_module, "_holders", counted)
    ways = [
        mesh_layout((8192, 512), 2, (64, 16), (0, None)),
        mesh_layout((8192, 512), 2, (64, 16), (0, 1)),
        mesh_layout((1024,), 4, (64, 16), (None,)),
        replicated((64, 1024), 4, 1024),
    ]
    layouts = [ways[leaf % 4] for leaf in range(10_000)]
    chunks = [shared_chunk_shape(way.shape, [box for box, _ in way.boxes], way.nbytes_per_item, None) for way in ways]
    keys = [str(leaf) for leaf in range(10_000)]
    plan = plan_writers(layouts, [chunks[leaf % 4] for leaf in range(10_000)], 1024, keys)
    assert looked_at == 4
    # Each of the 1,024 boxes of the second way is held by one process.
    assert {leaf for leaf, _ in plan.parts_of(5)} >= set(range(1, 10_000, 4))
    assert max(plan.loads) <= 1.10 * sum(plan.loads) / 1024


def test_whoever_asks_gets_the_same_plan() -> None:
    layouts = [mesh_layout((64, 8 * (leaf + 1)), 4, (4, 2), (1, None)) for leaf in range(20)]
    plans = [check(layouts, 8, 1 << 10) for _ in range(2)]
    assert [plans[0].parts_of(process) for process in range(8)] == [plans[1].parts_of(process) for process in range(8)]


def test_parts_that_are_no_grid_are_refused_where_nobody_holds_a_chunk() -> None:
    uneven = LeafLayout(nbytes_per_item=4, shape=(6,), boxes=((((0, 2),), (0,)), (((2, 6),), (1,))))
    with pytest.raises(UnsupportedError, match=r"no grid.*leaf 'a/b'.*treering\.save") as caught:
        plan_writers([uneven], [(6,)], 2, ["a/b"])
    assert caught.value.path == ("a", "b")
    # The same with somebody who holds both.
    whole = LeafLayout(nbytes_per_item=4, shape=(6,), boxes=((((0, 2),), (0, 1)), (((2, 6),), (1,))))
    plan = plan_writers([whole], [(6,)], 2, ["a"])
    assert (plan.parts_of(0), plan.parts_of(1)) == ((), ((0, 0),))


def test_a_process_that_is_none_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="there are 2 processes"):
        plan_writers([replicated((4,), 4, 3)], [(4,)], 2, ["a"])


@plans
@given(any_layouts())
def test_any_owners(case: tuple[int, list[LeafLayout]]) -> None:
    """Boxes that are no grid: planned if somebody holds each chunk, refused if not."""
    processes, layouts = case
    chunks = [
        shared_chunk_shape(each.shape, [box for box, _ in each.boxes], each.nbytes_per_item, 256) for each in layouts
    ]
    held = all(
        owners_of(layout, box)
        for layout, chunk in zip(layouts, chunks, strict=True)
        for box in chunk_boxes(layout.shape, chunk)
    )
    if held:
        check(layouts, processes, 256)
    else:
        with pytest.raises(UnsupportedError, match="no grid"):
            plan_writers(layouts, chunks, processes, [str(leaf) for leaf in range(len(layouts))])
