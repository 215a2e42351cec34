"""Who writes which chunk file: each once, by a process that holds it, and nobody much more than must be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import faults
from tests.plan.layouts import any_layouts, mesh_layout, mesh_layouts, replicated
from treering._plan import chunks as chunks_module
from treering._plan.chunks import balanced_chunk, plan_writers, shared_chunk_shape
from treering._plan.save import LeafLayout, SavePlan, level_loads
from treering._values.boxes import Box, intersection, size_of
from treering.errors import UnsupportedError

plans = settings(derandomize=True, max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


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
    assert len(plan.parts_of(0)) + len(plan.parts_of(1)) == 1


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
