"""The gzip form: any gzip reads it, the same input gives the same bytes, and our reader takes what our writer makes."""

from __future__ import annotations

import gzip
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests import clocks
from tests.trees import assert_same
from treering import serialization
from treering.errors import UnsupportedError

TREE = {"w": np.arange(5000, dtype=np.float32), "step": 3}


@pytest.mark.parametrize(
    "data", [b"", b"a", bytes(100_000), np.random.default_rng(0).bytes(100_000)], ids=["empty", "one", "zeros", "noise"]
)
def test_bytes_go_round_and_any_gzip_reads_them(data: bytes) -> None:
    packed = serialization.compress_bytes(data)
    assert gzip.decompress(packed) == data
    assert serialization.decompress_bytes(packed) == data
    assert serialization.decompress_bytes(gzip.compress(data)) == data


def test_the_same_input_gives_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:

    first = serialization.to_compressed_bytes(TREE)
    clocks.stop_clock(monkeypatch, 1e9)
    assert serialization.to_compressed_bytes(TREE) == first
    assert first[4:8] == bytes(4)


def test_it_compresses() -> None:
    assert len(serialization.compress_bytes(bytes(10**6))) < 20_000


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_is_taken(kind: type) -> None:
    packed = serialization.compress_bytes(kind(b"abc"))
    assert serialization.decompress_bytes(kind(packed)) == b"abc"


@pytest.mark.parametrize("flags", [0x20, 0x40, 0x80, 0x02], ids=["reserved 5", "reserved 6", "reserved 7", "checksum"])
def test_a_header_that_is_damaged_is_damage(flags: int) -> None:
    packed = gzip.compress(b"tree", mtime=0)
    checksum = bytes(2) if flags == 0x02 else b""  # a wrong one of the header, behind it
    with pytest.raises(gzip.BadGzipFile, match="header"):
        serialization.decompress_bytes(packed[:3] + bytes([flags]) + packed[4:10] + checksum + packed[10:])


def test_a_buffer_is_not_copied_to_be_read() -> None:
    packed = memoryview(gzip.compress(np.random.default_rng(0).bytes(4 << 20), 1))
    tracemalloc.start()
    try:
        assert len(serialization.decompress_bytes(packed)) == 4 << 20
        # The pieces, and what they are joined to.
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_what_we_compress_is_never_refused_by_our_own_default() -> None:
    data = bytes(80 * 2**20)
    packed = serialization.compress_bytes(data)
    assert serialization.decompress_bytes(packed) == data


def test_trees_take_the_options_of_from_bytes() -> None:
    packed = serialization.to_compressed_bytes(TREE)
    assert_same(serialization.from_compressed_bytes(TREE, packed, strict=True), TREE)
    with pytest.raises(ValueError, match="step"):
        serialization.from_compressed_bytes({"w": TREE["w"], "step": "text"}, packed, strict=True)
    with pytest.raises(ValueError, match="max_bytes"):
        serialization.from_compressed_bytes(TREE, packed, max_bytes=100)


def test_what_is_no_bytes_is_refused_by_the_name_of_the_argument() -> None:
    tree: Any = {"step": 3}
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: serialization.from_bytes(serialization.to_bytes(tree), tree), "encoded_bytes is a dict.*comes first"),
        (lambda: serialization.from_compressed_bytes(b"", tree), "compressed_data is a dict.*comes first"),
        (lambda: serialization.msgpack_restore(tree), "encoded_pytree is a dict, but must be bytes"),
        (lambda: serialization.compress_bytes(tree), "data is a dict, but must be bytes"),
        (lambda: serialization.decompress_bytes(tree), "data is a dict, but must be bytes"),
    ]
    for call, said in calls:
        with pytest.raises(UnsupportedError, match=said):
            call()
