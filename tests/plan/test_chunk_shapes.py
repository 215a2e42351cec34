"""How leaves are cut into chunks: as shardings cut them, within a limit, with little padding."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests import meshes
from treering._plan.chunks import chunk_shape, shared_chunk_shape
from treering._values.boxes import Box, held_boxes, whole


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
