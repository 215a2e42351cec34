"""Chunk files: TensorStore reads what we write and the other way round; damage never comes back as data."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import threading
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import limits
from tests.drawn import drawn
from tests.memory import memory_of_this_process
from treering._codec.zarr import ZarrArray, chunk_bytes, zarray_bytes
from treering._codec.zarr_chunks import check_chunk_file, decode, encode
from treering._values.dtypes import lookup, numpy_dtype
from treering.errors import CorruptError, TreeringError, UnsupportedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

CODECS: dict[str, str | None] = {
    "raw": None,
    "zstd": '{"id":"zstd","level":1}',
    "zstd -5": '{"id":"zstd","level":-5}',
    "zstd 22": '{"id":"zstd","level":22}',
    "gzip": '{"id":"gzip","level":1}',
    "zlib": '{"id":"zlib","level":0}',
    "bz2": '{"id":"bz2","level":9}',
    "blosc": '{"blocksize":0,"clevel":5,"cname":"lz4","id":"blosc","shuffle":-1}',
    "blosc zstd": '{"blocksize":0,"clevel":1,"cname":"zstd","id":"blosc","shuffle":2}',
}
# Those whose files hold a check of their content.
CHECKED = ("zstd", "gzip", "zlib", "bz2")
DTYPES = ["bool", "int8", "int4", "int16", "uint32", "int64", "float8_e4m3fn", "float16", "bfloat16", "float32"]
DTYPES += ["float64", "complex64", "complex128"]


def folder_in_memory(array: ZarrArray) -> tuple[Any, Any]:
    context = tensorstore.Context()
    folder = tensorstore.KvStore.open("memory://", context=context).result()
    folder[".zarray"] = zarray_bytes(array)
    return folder, context


def read_by_tensorstore(array: ZarrArray, chunk: bytes) -> NDArray[Any]:
    """Return what TensorStore reads of an array of one chunk."""
    folder, context = folder_in_memory(array)
    folder["0" if len(array.shape) < 2 else array.separator.join("0" * len(array.shape))] = chunk
    store: Any = tensorstore.open({"driver": "zarr", "kvstore": "memory://"}, context=context).result()
    return store.read().result()


def written_by_tensorstore(array: ZarrArray, items: NDArray[Any]) -> bytes:
    """Return the chunk file that TensorStore makes of an array of one chunk."""
    folder, context = folder_in_memory(array)
    store: Any = tensorstore.open({"driver": "zarr", "kvstore": "memory://"}, context=context).result()
    store.write(items).result()
    return folder["0" if len(array.shape) < 2 else array.separator.join("0" * len(array.shape))]


def array_of(shape: tuple[int, ...], dtype: str, codec: str, **more: Any) -> ZarrArray:
    return ZarrArray(shape=shape, chunks=shape, dtype=dtype, compressor=CODECS[codec], **more)


def items_of(array: ZarrArray, seed: int = 0) -> NDArray[Any]:
    """Return any bits as a chunk of the array, NaNs with payloads among them."""
    dtype = lookup(array.dtype)
    assert dtype is not None
    most = {"bool": 2, "int4": 8}.get(array.dtype, 256)
    raw = np.random.default_rng(seed).integers(0, most, chunk_bytes(array), np.uint8)
    return raw.view(numpy_dtype(dtype)).reshape(array.chunks)


def decoded(array: ZarrArray, data: bytes) -> NDArray[Any]:
    """Decode into memory with something behind it that must stay as it is, and see that the whole file was read."""
    dtype = lookup(array.dtype)
    assert dtype is not None
    memory = np.full(chunk_bytes(array) + 64, 0xA5, np.uint8)
    into = memory[: chunk_bytes(array)].view(numpy_dtype(dtype)).reshape(array.chunks)
    file = io.BytesIO(data)
    try:
        decode(array, file.read, len(data), into)
    finally:
        assert (memory[chunk_bytes(array) :] == 0xA5).all()
    assert file.tell() == len(data)
    return into


def same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS)
def test_tensorstore_reads_it_and_we_read_tensorstore(codec: str, dtype: str) -> None:
    array = array_of((3, 5), dtype, codec)
    items = items_of(array)
    data = encode(array, items)
    assert same(decoded(array, data), items)
    assert same(read_by_tensorstore(array, data), items)
    assert same(decoded(array, written_by_tensorstore(array, items)), items)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("big_endian", [False, True])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["bool", "int16", "float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("codec", ["raw", "zstd", "blosc"])
def test_other_orders(codec: str, dtype: str, order: str, big_endian: bool) -> None:
    if dtype == "bool" and big_endian:
        big_endian = False
    array = array_of((2, 3, 4), dtype, codec, order=order, big_endian=big_endian)
    items = items_of(array)
    before = items.copy()
    data = encode(array, items)
    assert same(items, before)
    assert same(decoded(array, data), items)
    assert same(read_by_tensorstore(array, data).astype(items.dtype), items)
    assert same(decoded(array, written_by_tensorstore(array, items)), items)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("codec", CODECS)
def test_shapes(codec: str, shape: tuple[int, ...]) -> None:
    array = array_of(shape, "float32", codec, order="F" if len(shape) > 1 else "C")
    items = items_of(array)
    assert same(decoded(array, encode(array, items)), items)
    assert same(read_by_tensorstore(array, encode(array, items)), items)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", ["zeros", "noise", "both"])
def test_large_chunks(codec: str, kind: str) -> None:
    """More than one piece of every codec, and more than one block of zstd."""
    array = array_of((3, 1 << 19), "uint8", codec)
    items = np.zeros(array.shape, np.uint8) if kind == "zeros" else items_of(array)
    if kind == "both":
        items[1] = 0
    data = encode(array, items)
    assert same(decoded(array, data), items)
    assert same(read_by_tensorstore(array, data), items)


@settings(max_examples=drawn(25))
@given(st.sampled_from(list(CODECS)), st.lists(st.integers(1, 5), max_size=3), st.sampled_from(DTYPES), st.integers(0))
def test_any_chunk_comes_back(codec: str, shape: list[int], dtype: str, seed: int) -> None:
    array = array_of(tuple(shape), dtype, codec)
    items = items_of(array, seed)
    assert same(decoded(array, encode(array, items)), items)


def test_real_dtypes_lie_under_the_ints_that_stand_for_them() -> None:
    import ml_dtypes

    array = array_of((4,), "uint8", "zstd")
    items = np.array([1, 2, 3, 15], ml_dtypes.uint4)
    into = np.empty_like(items)
    data = encode(array, items)
    decode(array, io.BytesIO(data).read, len(data), into)
    assert same(into, items)


def test_true_is_one() -> None:
    array = array_of((3,), "bool", "zstd")
    data = encode(array, np.array([0, 2, 255], np.uint8).view(np.bool))
    assert read_by_tensorstore(array, data).tolist() == [False, True, True]
    assert decoded(array, data).view(np.uint8).tolist() == [0, 1, 1]
    with pytest.raises(CorruptError, match="neither 0 nor 1"):
        decoded(array, zstandard.compress(b"\0\2\1"))


# -------------------------------------------------------------------------------------------------------------- damage


def every_codec_path(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    limits.lower(monkeypatch, zstd_in_one_go=1 << 20 if way == "at once" else -1)
    if way == "by windows":
        limits.lower(monkeypatch, zstd_whole=-1, zstd_window=20)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("way", ["at once", "in place", "by windows"])
@pytest.mark.parametrize("codec", CODECS)
def test_a_file_of_any_other_length_is_refused(codec: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    every_codec_path(monkeypatch, way)
    array = array_of((40,), "float32", codec)
    data = encode(array, items_of(array))
    assert same(decoded(array, data), items_of(array))
    for size in range(len(data)):
        with pytest.raises(CorruptError):
            decoded(array, data[:size])
    for more in (b"\0", b"x" * 40, data):
        with pytest.raises(CorruptError):
            decoded(array, data + more)


@pytest.mark.parametrize("way", ["at once", "in place", "by windows"])
@pytest.mark.parametrize("codec", CHECKED)
def test_a_flipped_byte_never_comes_back_as_data(codec: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    every_codec_path(monkeypatch, way)
    array = array_of((25, 4), "uint8", codec)
    items = items_of(array) % 7
    data = encode(array, items)
    refused = 0
    for place in range(len(data)):
        for mask in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[place] ^= mask
            try:
                found = decoded(array, bytes(damaged))
            except TreeringError as error:
                assert isinstance(error, CorruptError)  # noqa: PT017
                refused += 1
            else:
                assert same(found, items), place  # a time in a header, for instance
    assert refused > 2 * len(data)


@pytest.mark.parametrize("way", ["at once", "in place", "by windows"])
@pytest.mark.parametrize("pieces", [[0, 100], [100, 0], [50, 50], [99], [101]], ids=str)
@pytest.mark.parametrize(
    ("codec", "pack"),
    [("zstd", zstandard.compress), ("gzip", gzip.compress), ("zlib", zlib.compress), ("bz2", bz2.compress)],
)
def test_several_streams_and_other_sizes_are_refused(
    codec: str, pack: Callable[[bytes], bytes], pieces: list[int], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_codec_path(monkeypatch, way)
    array = array_of((100,), "uint8", codec)
    with pytest.raises(CorruptError):
        decoded(array, b"".join(pack(b"x" * size) for size in pieces))


@pytest.mark.parametrize("way", ["at once", "in place", "by windows"])
@pytest.mark.parametrize("size", [99, 100, 101])
def test_zstd_frames_that_do_not_say_their_size(size: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    every_codec_path(monkeypatch, way)
    array = array_of((100,), "uint8", "zstd")
    packer = zstandard.ZstdCompressor().compressobj()
    data = b"".join((packer.compress(b"x" * 30), packer.flush(1), packer.compress(b"x" * (size - 30)), packer.flush()))
    assert zstandard.frame_content_size(data) == -1
    if size == 100:
        assert decoded(array, data).tobytes() == b"x" * 100
        assert read_by_tensorstore(array, data).tobytes() == b"x" * 100
    else:
        with pytest.raises(CorruptError):
            decoded(array, data)


@pytest.mark.parametrize("way", ["at once", "in place", "by windows"])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x" * 50,
        b"\x50\x2a\x4d\x18\4\0\0\0abcd" + zstandard.compress(b"x" * 100),  # a frame to be skipped
        b"\x28\xb5\x2f\xfd",
        b"\x28\xb5\x2f\xfd\x20\x64" + b"\xff" * 40,  # a block of the unknown kind
        b"\x28\xb5\x2f\xfd\x20\x64" + (1 << 20 | 1).to_bytes(3, "little") + b"x" * 100,  # a block larger than any
        b"\x28\xb5\x2f\xfd\x21\x07\x64" + (100 << 3 | 1).to_bytes(3, "little") + b"x" * 100,  # with a dictionary
        b"\x28\xb5\x2f\xfd\x00\xf8" + (100 << 3 | 1).to_bytes(3, "little") + b"x" * 100,  # a window of 2 TiB
    ],
    ids=lambda data: data[:20].hex(),
)
def test_what_is_no_zstd(data: bytes, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    every_codec_path(monkeypatch, way)
    with pytest.raises(CorruptError):
        decoded(array_of((100,), "uint8", "zstd"), data)


def test_a_raw_block_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows above are what they are because of what they say, not because nothing made by hand is taken."""
    every_codec_path(monkeypatch, "in place")
    data = b"\x28\xb5\x2f\xfd\x20\x64" + (100 << 3 | 1).to_bytes(3, "little") + b"x" * 100
    assert decoded(array_of((100,), "uint8", "zstd"), data).tobytes() == b"x" * 100
    repeated = b"\x28\xb5\x2f\xfd\x20\x64" + (100 << 3 | 2 | 1).to_bytes(3, "little") + b"x"
    assert decoded(array_of((100,), "uint8", "zstd"), repeated).tobytes() == b"x" * 100


ZEROS = bytes(1 << 24)
BOMBS = {
    "zstd": zstandard.compress(ZEROS),
    "zstd of unknown size": zstandard.ZstdCompressor(write_content_size=False).compress(ZEROS),
    "zstd that lies": b"\x28\xb5\x2f\xfd\x20\x64" + zstandard.compress(ZEROS)[9:],
    "gzip": gzip.compress(ZEROS),
    "zlib": zlib.compress(ZEROS),
    "bz2": bz2.compress(ZEROS),
    "blosc": encode(array_of((1 << 24,), "uint8", "blosc"), np.zeros(1 << 24, np.uint8)),
}


@pytest.mark.parametrize("way", ["at once", "in place", "by windows"])
@pytest.mark.parametrize("name", BOMBS)
def test_bombs_take_no_memory(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    every_codec_path(monkeypatch, way)
    array = array_of((100,), "uint8", name.partition(" ")[0])
    data = BOMBS[name]
    decoder = np.empty(100, np.uint8)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError):
            decode(array, io.BytesIO(data).read, len(data), decoder)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("codec", ["zstd", "gzip", "bz2", "blosc"])
def test_what_a_file_cannot_hold_is_refused_before_memory_is_asked_for(codec: str) -> None:
    array = array_of((1 << 40,), "uint8", codec)
    with pytest.raises(CorruptError, match="holds"):
        check_chunk_file(array, 1 << 15)
    with pytest.raises(CorruptError, match="holds"):
        check_chunk_file(array, 0)


def test_a_large_chunk_of_equal_bytes_is_not_refused() -> None:
    check_chunk_file(array_of((1 << 28,), "uint8", "bz2"), 208)  # what bz2 of level 9 makes of zeros


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_a_chunk_is_unpacked_in_place(codec: str) -> None:
    """Only blosc, which gives no part of its data, takes memory for a chunk beside the target; zstd 22 its window."""
    nbytes = 128 << 20
    array = array_of((nbytes,), "uint8", codec)
    data = encode(array, np.zeros(nbytes, np.uint8))
    target = np.ones(nbytes, np.uint8)
    read = io.BytesIO(data).read
    before = memory_of_this_process("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    decode(array, read, len(data), target)
    extra = memory_of_this_process("VmHWM") - before
    assert not target.any()
    assert extra < {"blosc": nbytes, "blosc zstd": nbytes, "zstd 22": 128 << 20}.get(codec, 0) + (32 << 20)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("codec", CODECS)
def test_what_shrinks_best_is_not_refused(codec: str) -> None:
    array = array_of((1 << 24,), "uint8", codec)
    check_chunk_file(array, len(encode(array, np.zeros(1 << 24, np.uint8))))


def test_blosc_that_says_another_size() -> None:
    array = array_of((100,), "uint8", "blosc")
    data = encode(array, items_of(array))
    for place in (4, 12):
        lie = bytearray(data)
        lie[place] += 1
        with pytest.raises(CorruptError):
            decoded(array, bytes(lie))
    with pytest.raises(CorruptError, match="damaged"):
        decoded(array, b"\x09" + data[1:])


def test_a_read_that_gives_less_is_damage() -> None:
    for codec in CODECS:
        array = array_of((100,), "uint8", codec)
        data = encode(array, items_of(array))
        with pytest.raises(CorruptError, match="cut short"):
            decode(array, io.BytesIO(data[:-1]).read, len(data), np.empty(100, np.uint8))


def test_errors_of_the_reading_side_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checksum that fails while the bytes come by is that error, not one of the codec's."""

    class OwnError(Exception):
        pass

    def read(count: int) -> bytes:
        raise OwnError

    for way in ("at once", "in place"):
        every_codec_path(monkeypatch, way)
        for codec in CODECS:
            with pytest.raises(OwnError):
                decode(array_of((100,), "uint8", codec), read, 100, np.empty(100, np.uint8))


def test_a_failed_chunk_leaves_nothing_behind_for_the_next_one() -> None:
    array = array_of((100,), "uint8", "zstd")
    items = items_of(array)
    data = encode(array, items)
    for _ in range(3):
        with pytest.raises(CorruptError):
            decoded(array, data[:-5])
        assert same(decoded(array, data), items)


@pytest.mark.parametrize("compressor", ['{"id":"lz4"}', '{"id":"zstd","level":99}', '{"id":"blosc","cname":"none"}'])
def test_unknown_compressors_are_named(compressor: str) -> None:
    array = ZarrArray(shape=(4,), chunks=(4,), dtype="uint8", compressor=compressor)
    with pytest.raises(UnsupportedError, match=json.loads(compressor)["id"]):
        encode(array, np.zeros(4, np.uint8))


def test_a_codec_that_cannot_be_undone_is_named() -> None:
    array = ZarrArray(shape=(4,), chunks=(4,), dtype="uint8", compressor='{"id":"lzma"}')
    with pytest.raises(UnsupportedError, match="lzma"):
        decoded(array, b"1234")


def test_memory_that_is_no_chunk_is_a_mistake_of_the_caller() -> None:
    array = ZarrArray(shape=(4, 4), chunks=(2, 4), dtype="int16")
    for wrong in (
        np.zeros((4, 4), np.int16),
        np.zeros((2, 4), np.int32),
        np.zeros((4, 2), np.int16).T,
        np.zeros((2, 8), np.int16)[:, ::2],
        np.zeros(8, np.int16),
    ):
        with pytest.raises(ValueError, match="full chunk"):
            encode(array, wrong)
        with pytest.raises(ValueError, match="full chunk"):
            decode(array, io.BytesIO(bytes(16)).read, 16, wrong)


def test_threads_do_not_disturb_each_other() -> None:
    array = array_of((1000,), "uint8", "zstd")
    wrong: list[int] = []

    def work(seed: int) -> None:
        items = items_of(array, seed) % 3
        wrong.extend(seed for _ in range(100) if not same(decoded(array, encode(array, items)), items))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
