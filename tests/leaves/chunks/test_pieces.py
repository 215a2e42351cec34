"""Chunks of a leaf in memory: the shard itself, a view of it, or what several shards make up."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.strategies import quick
from treering._arrays.outgoing import HeldBox
from treering._arrays.parted import BoxedArray
from treering._codec.zarr import ZarrArray, chunk_box, chunk_count
from treering._leaves.chunks.pieces import LeafPieces, to_stored
from treering._values.boxes import shape_of, slices

SHAPE = (12, 10)
ARRAY = np.arange(120, dtype="i2").reshape(SHAPE)


def sources(rows: int, columns: int) -> list[HeldBox]:
    return [
        HeldBox(box, ARRAY[slices(box)])
        for box in (
            ((a, min(a + rows, 12)), (b, min(b + columns, 10)))
            for a, b in itertools.product(range(0, 12, rows), range(0, 10, columns))
        )
    ]


@quick(80)
@given(st.tuples(*[st.integers(1, 12), st.integers(1, 10)] * 2))
def test_any_chunks_of_any_shards(sides: tuple[int, int, int, int]) -> None:
    zarr = ZarrArray(shape=SHAPE, chunks=sides[:2], dtype="int16")
    pieces = LeafPieces(zarr, sources(*sides[2:]))
    for number in range(chunk_count(zarr)):
        box = chunk_box(zarr, number)
        wanted = np.zeros(zarr.chunks, "i2")
        wanted[slices(tuple((0, length) for length in shape_of(box)))] = ARRAY[slices(box)]
        assert np.array_equal(to_stored(pieces.chunk(number), zarr), wanted)


def test_a_shard_that_is_a_chunk_is_not_copied() -> None:
    zarr = ZarrArray(shape=SHAPE, chunks=(6, 10), dtype="int16")
    mine = sources(6, 10)
    pieces = LeafPieces(zarr, mine)
    assert pieces.chunk(1) is mine[1].data
    assert np.shares_memory(to_stored(pieces.chunk(1), zarr), ARRAY)


def test_a_part_of_a_shard_is_a_view_of_it() -> None:
    zarr = ZarrArray(shape=SHAPE, chunks=(3, 10), dtype="int16")
    chunk = LeafPieces(zarr, sources(12, 10)).chunk(2)
    assert not isinstance(chunk, BoxedArray)
    assert np.shares_memory(chunk, ARRAY)
    assert np.array_equal(chunk, ARRAY[6:9])


def test_padding_takes_no_memory() -> None:
    zarr = ZarrArray(shape=(1, 1), chunks=(1 << 40, 1 << 10), dtype="int8")
    chunk = LeafPieces(zarr, [HeldBox(((0, 1), (0, 1)), np.ones((1, 1), np.int8))]).chunk(0)
    first = next(chunk.blocks(0, 3000))
    assert list(first[:2]) == [1, 0]
    assert sum(first) == 1
