"""Chunks of a leaf in memory, made of shards and fetched once; and their files, few open at a time and none left."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.strategies import quick
from treering._arrays import outgoing, parted
from treering._arrays.outgoing import HeldBox
from treering._arrays.parted import BoxedArray
from treering._codec.zarr import ZarrArray, chunk_box, chunk_count
from treering._leaves.chunks import files as chunk_files
from treering._leaves.chunks import pieces, write
from treering._leaves.chunks.files import OpenChunks
from treering._leaves.chunks.pieces import LeafPieces, to_stored
from treering._store.posix.reading import LocalFile
from treering._values.boxes import shape_of, slices
from treering.leaves import tree_serialize_leaves

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


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / str(number) for number in range(10)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]))
    return paths


def test_the_last_ones_stay_open_and_all_are_closed_at_the_end(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_files, "_MOST", 3)
    opened: list[LocalFile] = []

    def opener(number: int) -> LocalFile:
        opened.append(LocalFile(files[number]))
        return opened[-1]

    chunks = OpenChunks()
    with chunks:
        for number in (0, 1, 2, 0, 3, 0, 1):
            with chunks.using(number, functools.partial(opener, number)) as file:
                assert file.read(0, 1) == bytes([number])
                assert sum(one._descriptor >= 0 for one in opened) <= 3
        # 1 was the one that had to go when 3 came.
        assert [file.path.name for file in opened] == ["0", "1", "2", "3", "1"]
    assert all(file._descriptor < 0 for file in opened)


def test_a_file_in_use_is_not_closed(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_files, "_MOST", 1)
    chunks = OpenChunks()
    with chunks, chunks.using(0, lambda: LocalFile(files[0])) as first:
        for number in range(1, 5):
            with chunks.using(number, functools.partial(LocalFile, files[number])):
                pass
        assert first.read(0, 1) == b"\0"


def test_another_reading_keeps_them_open(files: list[Path]) -> None:
    chunks = OpenChunks()
    with chunks:
        with chunks, chunks.using(0, lambda: LocalFile(files[0])) as file:
            pass
        assert file._descriptor >= 0
    assert file._descriptor < 0


def test_what_cannot_be_opened_is_not_kept(files: list[Path]) -> None:
    chunks = OpenChunks()

    def refuse() -> LocalFile:
        raise FileNotFoundError

    with chunks:
        with pytest.raises(FileNotFoundError), chunks.using(0, refuse):
            pass
        with chunks.using(0, lambda: LocalFile(files[0])) as file:
            assert file.size == 1


# ------------------------------------------------------------------------------------------------ what a save fetches


def test_a_shard_that_is_cut_into_chunks_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[int] = []

    def to_host(data: Any) -> np.ndarray:
        if isinstance(data, jax.Array):
            fetched.append(data.nbytes)
        return parted.to_host(data)

    monkeypatch.setattr(pieces, "to_host", to_host)
    monkeypatch.setattr(write, "to_host", to_host)
    tree_serialize_leaves(tmp_path, {"w": jnp.ones((64, 1024))}, chunk_bytes=16 << 10)
    assert len(list((tmp_path / "w").iterdir())) == 17
    assert fetched == [256 << 10]


def test_small_is_what_it_says() -> None:
    assert write._SMALL_BYTES == outgoing._SMALL_BYTES
