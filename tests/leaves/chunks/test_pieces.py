"""Chunks of a leaf in memory, made of shards and fetched once; and their files, few open at a time and none left."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import treering
from tests import faults, limits
from tests.leaves.chunks.test_arrays import list_foreign, write_foreign
from tests.properties.strategies import quick
from treering._arrays import chunk_grid, host
from treering._arrays.host import BoxedArray
from treering._arrays.incoming import ReadRequest
from treering._arrays.jobs import aligned_empty
from treering._arrays.outgoing import HeldBox
from treering._checkpoint.forms import read_source
from treering._codec.zarr import ZarrArray, chunk_box, chunk_count
from treering._leaves import source as leaves_source
from treering._leaves.chunks import write
from treering._leaves.chunks.files import OpenChunks
from treering._leaves.chunks.write import LeafPieces, to_stored
from treering._store.posix.reading import LocalFile
from treering._values.boxes import shape_of, slices, whole
from treering.errors import CorruptError
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
    limits.lower(monkeypatch, chunks_held_open=3)
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
    limits.lower(monkeypatch, chunks_held_open=1)
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
            assert isinstance(file, LocalFile)
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
        return host.to_host(data)

    monkeypatch.setattr(write, "to_host", to_host)
    tree_serialize_leaves(tmp_path, {"w": jnp.ones((64, 1024))}, chunk_bytes=16 << 10)
    assert len(list((tmp_path / "w").iterdir())) == 17
    assert fetched == [256 << 10]


def test_small_is_what_it_says() -> None:
    assert write._SMALL_BYTES == host._SMALL_BYTES


# ---------------------------------------------------------------------------------------------------- what a load takes


@pytest.mark.parametrize("codec", [{"id": "zstd", "level": 1}, {"id": "blosc", "cname": "lz4"}], ids=["zstd", "blosc"])
def test_a_chunk_that_is_wanted_whole_is_undone_in_place(
    tmp_path: Path, codec: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the leaf nor the runs that devices want of it pass through memory of their own."""
    rooms: list[int] = []
    unset = aligned_empty

    def counted(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        array = unset(shape, dtype)
        rooms.append(array.nbytes)
        return array

    monkeypatch.setattr(chunk_grid, "aligned_empty", counted)
    array = np.random.default_rng(0).integers(0, 9, (64, 512)).astype("f4")
    tree_serialize_leaves(tmp_path, {"w": array}, compressor=codec)
    with treering.open(tmp_path) as opened:
        assert np.array_equal(opened["w"][...], array)
    assert rooms == [array.nbytes]
    rooms.clear()
    rows = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec("x"))
    found: Any = treering.load(tmp_path, {"w": jax.ShapeDtypeStruct(array.shape, "f4", sharding=rows)})["w"]
    assert rooms == [array.nbytes]
    assert len(found.addressable_shards) == 8
    assert np.array_equal(found, array)


def test_small_leaves_share_memory_and_each_is_aligned(tmp_path: Path) -> None:
    tree = {f"n{n}": np.random.default_rng(n).integers(0, 250, (n, 3), dtype="u1") for n in range(1, 40)}
    for codec in (None, {"id": "zstd", "level": 1}):
        tree_serialize_leaves(tmp_path, tree, compressor=codec)
        with read_source(tmp_path, mapped=False) as source:
            requests = [ReadRequest(leaf, [whole(array.shape)]) for leaf, array in enumerate(tree.values())]
            source.arrays.read(requests)
        for request, wanted in zip(requests, tree.values(), strict=True):
            assert np.array_equal(request.arrays[0], wanted)
            assert request.arrays[0].ctypes.data % 64 == 0
        assert len({id(request.arrays[0].base) for request in requests}) == 1


def test_thousands_of_large_leaves_need_few_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits.lower(monkeypatch, small_leaf=100, careful_leaf=1, small_read=100)
    tree = {f"n{n}": np.full(100, n) for n in range(90)}
    tree_serialize_leaves(tmp_path, tree)
    opener = os.open
    counts: list[int] = []

    def files() -> int:
        found = 0
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # it is closed by now
                place = descriptor.readlink()
                found += place.name in {"0", ".zarray"} and tmp_path in place.parents
        return found

    def counted(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        descriptor = opener(path, flags, *arguments, **options)
        if path in {"0", ".zarray"}:
            counts.append(files())
        return descriptor

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", counted)
        found = treering.load(tmp_path)
    assert all(np.array_equal(found[key], array) for key, array in tree.items())
    assert len(counts) >= 180
    assert 0 < max(counts) < 40
    assert files() == 0


def test_compressed_bytes_are_checked_before_they_are_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[bytes] = []

    def decoded(array: Any, take: Any, nbytes: int, into: np.ndarray) -> None:
        fed.append(take(nbytes))

    monkeypatch.setattr(leaves_source, "decode", decoded)
    array = np.random.default_rng(0).integers(0, 1 << 30, 500_000)
    tree_serialize_leaves(tmp_path, {"w": array}, compressor={"id": "zstd", "level": 1})
    file = tmp_path / "w" / "0"
    content = file.read_bytes()
    with treering.open(tmp_path) as opened:
        opened["w"][...]
        assert fed == [content]
        file.write_bytes(content[:1_000_000] + bytes([content[1_000_000] ^ 1]) + content[1_000_001:])
        with pytest.raises(CorruptError, match=r"bytes 983040 to 1048576 have the checksum"):
            opened["w"][...]
    assert len(fed) == 1


def test_chunks_in_folders_of_their_own_are_counted_before_they_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_foreign(tmp_path / "w", np.zeros((3, 3, 3), "u1"), chunks=[1, 1, 1], dimension_separator="/")
    list_foreign(tmp_path, ["w"])
    for first, second in itertools.product(range(3), range(3)):
        if first and second:
            for path in (tmp_path / "w" / str(first) / str(second)).iterdir():
                path.unlink()
    faults.fail(monkeypatch, leaves_source, "find_chunks", AssertionError("a table of all chunks that are claimed"))
    with treering.open(tmp_path) as opened:
        view = opened["w"]
        with pytest.raises(CorruptError, match=r"leaf 'w' is damaged: w/1/1/0 is missing"):
            view[...]
