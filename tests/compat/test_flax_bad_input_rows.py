"""One test for each row of "bad input": damaged, dishonest and hostile files, and what flax makes of them."""

from __future__ import annotations

import contextlib
import gzip
import struct
from typing import Any

import flax.serialization
import msgpack
import numpy as np
import pytest

from tests.compat.golden_files import flax_file, flax_names
from tests.compat.wire import array_ext, ext, keyed, packed
from tests.trees import assert_same
from treering import serialization
from treering.errors import CorruptError, FormatError, TreeringError

SMALL = flax.serialization.to_bytes({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "n": 3, "t": [True, "x"]})


def refused(data: bytes, kind: type = ValueError) -> TreeringError:
    """The error of ours that ``data`` raises, which is also a ``kind``."""
    with pytest.raises(TreeringError) as caught:
        serialization.msgpack_restore(data)
    assert isinstance(caught.value, kind)
    return caught.value


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["containers", "python_leaves", "chunked", "raw_list", "train_state", "npscalars"])
def test_cut_short_at_any_byte_is_corrupt_with_an_offset(name: str) -> None:
    data = flax_file(name).data
    for size in range(len(data)):
        error = refused(data[:size])
        assert isinstance(error, CorruptError)
        assert error.offset is not None
        assert 0 <= error.offset <= size


def test_empty_input_is_corrupt() -> None:
    with pytest.raises(ValueError, match="incomplete input"):
        flax.serialization.msgpack_restore(b"")
    assert isinstance(refused(b""), CorruptError)


def test_a_flipped_bit_gives_a_result_or_an_error_of_ours() -> None:
    for place in range(len(SMALL) * 8):
        damaged = bytearray(SMALL)
        damaged[place // 8] ^= 1 << place % 8
        with contextlib.suppress(TreeringError):
            serialization.msgpack_restore(bytes(damaged))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", flax_names())
def test_a_byte_set_to_anything_gives_a_result_or_an_error_of_ours(name: str) -> None:
    data = flax_file(name).data[:1200]
    for place in range(0, len(data), max(1, len(data) // 60)):
        for octet in (0x00, 0x81, 0x91, 0xC1, 0xC9, 0xD8, 0xDD, 0xDF, 0xFF):
            with contextlib.suppress(TreeringError):
                serialization.msgpack_restore(data[:place] + bytes([octet]) + data[place + 1 :])


def test_trailing_bytes_are_an_error_at_their_offset() -> None:
    with pytest.raises(msgpack.ExtraData):
        flax.serialization.msgpack_restore(SMALL + b"\x00")
    error = refused(SMALL + b"\x00")
    assert error.offset == len(SMALL)


def test_the_byte_that_msgpack_never_uses_is_an_error() -> None:
    with pytest.raises(msgpack.FormatError):
        flax.serialization.msgpack_restore(b"\xc1")
    assert refused(keyed("a", b"\xc1")).offset == 3


def test_text_that_is_no_utf8_is_an_error_at_its_leaf() -> None:
    with pytest.raises(UnicodeDecodeError):
        flax.serialization.msgpack_restore(keyed("a", b"\xa2\xff\xfe"))
    assert refused(keyed("a", b"\xa2\xff\xfe")).path == ("a",)
    refused(b"\x81\xa2\xff\xfe\x01")


# -------------------------------------------------------------------------------------------------------------- nesting


def nested_maps(depth: int) -> bytes:
    return b"\x81\xa1a" * depth + b"\x07"


def nested_lists(depth: int) -> bytes:
    return b"\x91" * depth + b"\x07"


def depth_of(tree: Any) -> int:
    depth = 0
    while isinstance(tree, dict | list):
        tree = tree["a"] if isinstance(tree, dict) else tree[0]
        depth += 1
    assert tree == 7
    return depth


@pytest.mark.sampled(3)
@pytest.mark.parametrize("nest", [nested_maps, nested_lists])
@pytest.mark.parametrize("depth", [900, 1100, 5000, 100_000])
def test_nesting_that_is_too_deep_for_flax_is_read(nest: Any, depth: int) -> None:
    if depth > 1024:
        with pytest.raises((RecursionError, msgpack.StackError)):
            flax.serialization.msgpack_restore(nest(depth))
    assert depth_of(serialization.msgpack_restore(nest(depth))) == depth


@pytest.mark.parametrize("nest", [nested_maps, nested_lists])
def test_nesting_beyond_the_bound_is_an_error(nest: Any) -> None:
    refused(nest(2_000_000))


@pytest.mark.parametrize("depth", [500, 5000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_writing_deeper_than_flax_can(depth: int) -> None:
    tree: Any = 7
    for _ in range(depth):
        tree = {"a": tree}
    if depth > 1000:
        with pytest.raises(RecursionError):
            flax.serialization.to_bytes(tree)
    assert serialization.to_bytes(tree) == nested_maps(depth)
    for in_place in (False, True):
        assert serialization.msgpack_serialize(tree, in_place=in_place) == nested_maps(depth)
    assert depth_of(serialization.from_bytes(tree, nested_maps(depth))) == depth


@pytest.mark.slow
def test_a_tree_that_holds_itself_is_refused_when_writing() -> None:
    looped: dict[str, Any] = {}
    looped["a"] = looped
    listed: list[Any] = []
    listed.append(listed)
    for tree in (looped, listed):
        for write in (serialization.to_bytes, serialization.msgpack_serialize):
            with pytest.raises(TreeringError):
                write(tree)
        assert not serialization.validate_serializable(tree)[0]


def test_a_mismatch_far_down_has_a_message_of_readable_length() -> None:
    target: Any = [1]
    for _ in range(5000):
        target = {"a": target}
    with pytest.raises(TreeringError) as caught:
        serialization.from_bytes(target, nested_maps(5000))
    assert len(str(caught.value)) < 20_000
    assert caught.value.path == ("a",) * 5000


# --------------------------------------------------------------------------------------------------------------- arrays

EIGHT = bytes(range(8))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("shape", "dtype", "buffer"),
    [
        ([3], "int32", EIGHT),
        ([1], "int32", EIGHT),
        ([2, 2], "int32", EIGHT),
        ([], "int32", EIGHT),
        ([3], "int16", b"12345"),
        ([0, 2**62], "int8", b"a"),
        ([2**32, 2**32], "int8", b""),
        ([2**40], "int8", b"a"),
        ([2**63], "int8", b""),
        ([2**64 - 1, 0], "int8", b""),
        ([-1], "int32", EIGHT),
        ([-2], "int32", EIGHT),
        ([2, -1], "int32", EIGHT),
        ([-1, 0], "int32", b""),
        ([-1, -2], "int32", EIGHT),
        (2, "int32", EIGHT),
        (None, "int32", EIGHT),
        ("2", "int32", EIGHT),
        ({"0": 2}, "int32", EIGHT),
        ([2.0], "int32", EIGHT),
        ([True], "int8", b"a"),
        ([[2]], "int32", EIGHT),
        ([1] * 65, "int8", b"a"),
        ([1] * 5000, "int8", b"a"),
        ([8], "int8", "text8888"),
        ([2], "int32", [1, 2]),
        ([2], "int32", None),
        ([2], "int32", 8),
    ],
    ids=[
        "shape larger than the buffer",
        "shape smaller than the buffer",
        "product larger than the buffer",
        "0-d with more than one item",
        "a broken item",
        "zero size with a huge dim and a byte",
        "a product over 64 bits",
        "a claim of a terabyte",
        "a dim of 2**63",
        "a dim of 2**64-1 beside 0",
        "dim -1",
        "dim -2",
        "one dim -1",
        "dim -1 beside 0",
        "two negative dims",
        "an int as shape",
        "nil as shape",
        "text as shape",
        "a map as shape",
        "a dim of float",
        "a dim of bool",
        "a dim of list",
        "rank 65",
        "rank 5000",
        "a buffer of text",
        "a buffer of list",
        "a buffer of nil",
        "a buffer of int",
    ],
)
def test_an_array_whose_parts_disagree_is_an_error_with_its_path(shape: Any, dtype: str, buffer: Any) -> None:
    for code in (1, 3):
        error = refused(keyed("k", array_ext(shape, dtype, buffer, code=code)))
        assert error.path == ("k",)
        assert error.offset is not None


def test_a_zero_size_array_with_one_huge_dim_is_read_as_flax_reads_it_or_refused() -> None:
    data = array_ext([0, 2**40], "int8", b"")
    try:
        got = serialization.msgpack_restore(data)
    except TreeringError:
        return
    assert_same(got, flax.serialization.msgpack_restore(data))


@pytest.mark.parametrize(
    "dtype",
    [
        "object",
        "O",
        "O,f8",
        ">f4",
        ">i2",
        "i4,f4",
        "U2",
        "S8",
        "V8",
        "|V4",
        "void",
        "str",
        "bytes",
        None,
        5,
        "",
        "a" * 300,
        "(2,)f4",
        "float32\x00",
        "datetime64[99999999999999999999s]",
        "M8[xx]",
        "é",
        b"\xff\xfe",
        ["int8"],
    ],
    ids=repr,
)
def test_a_dtype_that_no_writer_names_is_an_error_with_its_path(dtype: Any) -> None:
    error = refused(keyed("k", array_ext([0], dtype, b"")))
    assert error.path == ("k",)


def test_an_unknown_dtype_name_is_also_flax_s_type_error() -> None:
    data = keyed("k", array_ext([1], "float7", b"a"))
    with pytest.raises(TypeError):
        flax.serialization.msgpack_restore(data)
    error = refused(data, TypeError)
    assert isinstance(error, FormatError)
    assert "float7" in str(error)


@pytest.mark.parametrize(
    "payload", [b"", b"\xc0", b"\x93", b"\x90", b"\x92\x90\xa1a", b"garbage", b"\xc1", b"\x80"], ids=repr
)
@pytest.mark.parametrize("code", [1, 2, 3])
def test_an_extension_whose_inside_is_garbage_is_an_error_with_its_path(code: int, payload: bytes) -> None:
    assert refused(keyed("k", ext(code, payload))).path == ("k",)


@pytest.mark.parametrize(
    "data",
    [array_ext([1], "int8", b"a", tail=b"\x00"), ext(2, packed([1.0, 2.0]) + b"\x00"), ext(4, packed([1]) + b"\x00")],
    ids=["array", "complex", "tuple"],
)
def test_trailing_bytes_inside_an_extension_are_an_error(data: bytes) -> None:
    path = refused(keyed("k", data)).path
    assert path is not None
    assert path[0] == "k"


@pytest.mark.parametrize("inside", [packed([1.0]), packed(1.0), packed([1.0, "2"]), packed([None, 1.0])], ids=bytes.hex)
def test_a_complex_without_two_numbers_is_an_error(inside: bytes) -> None:
    assert refused(keyed("k", ext(2, inside))).path == ("k",)


@pytest.mark.parametrize("code", [0, 5, 9, 127, -2, -128])
def test_an_unknown_ext_code_is_an_error_naming_it(code: int) -> None:
    data = keyed("k", ext(code, b"ab"))
    if code >= 0:
        assert isinstance(flax.serialization.msgpack_restore(data)["k"], msgpack.ExtType)
    error = refused(data)
    assert error.path == ("k",)
    assert str(code) in str(error)


@pytest.mark.parametrize("payload", [b"", b"abc", b"\xff" * 12, b"\x00" * 13], ids=len)
def test_a_timestamp_of_no_known_form_is_an_error(payload: bytes) -> None:
    assert refused(keyed("k", ext(-1, payload))).path == ("k",)


# ----------------------------------------------------------------------------------------------------------------- maps


@pytest.mark.parametrize(
    "data",
    [
        b"\x82\xa1a\x01\xa1a\x02",
        b"\x82\x01\x01\x01\x02",
        b"\x82\xa1a\x01\xd9\x01a\x02",
        b"\x82\xc0\x01\xc0\x02",
        keyed("k", b"\x82\xa1a\x01\xa1a\x02"),
    ],
    ids=["text", "int", "two forms of one text", "nil", "below"],
)
def test_duplicate_keys_are_an_error_never_last_wins(data: bytes) -> None:
    flax.serialization.msgpack_restore(data)
    assert "a" in str(refused(data)) or data[1:2] != b"\xa1"


@pytest.mark.parametrize("key", [b"\x90", b"\x91\x01", b"\x80", b"\x81\x01\x02"], ids=bytes.hex)
def test_a_container_as_a_key_is_flax_s_type_error(key: bytes) -> None:
    with pytest.raises(TypeError, match="unhashable"):
        flax.serialization.msgpack_restore(b"\x81" + key + b"\x01")
    refused(b"\x81" + key + b"\x01", TypeError)


def test_an_array_as_a_key_is_an_error() -> None:
    refused(b"\x81" + array_ext([1], "int8", b"a") + b"\x01", TypeError)


@pytest.mark.parametrize("key", [ext(4, packed([1])), ext(2, packed([1.0, 2.0])), array_ext([], "int8", b"a", code=3)])
def test_an_extension_as_a_key_is_a_result_or_an_error_of_ours(key: bytes) -> None:
    with contextlib.suppress(TreeringError):
        serialization.msgpack_restore(b"\x81" + key + b"\x01")


# --------------------------------------------------------------------------------------------------------------- claims


@pytest.mark.parametrize("head", ["dc", "dd", "de", "df"])
@pytest.mark.parametrize("claim", [0xFFFF, 0xFFFFFFFF])
def test_a_container_header_that_claims_more_than_there_is_is_corrupt(head: str, claim: int) -> None:
    size = struct.pack(">H", 0xFFFF) if head in {"dc", "de"} else struct.pack(">I", claim)
    error = refused(keyed("k", bytes.fromhex(head) + size + b"\x01" * 10))
    assert isinstance(error, CorruptError)
    assert error.path is not None
    assert error.path[0] == "k"


@pytest.mark.parametrize("head", ["c6", "db", "c9", "c5", "da", "c8"])
def test_a_text_bin_or_ext_header_that_claims_more_than_there_is_is_corrupt(head: str) -> None:
    size = b"\xff\xff\xff\xff" if head in {"c6", "db", "c9"} else b"\xff\xff"
    error = refused(keyed("k", bytes.fromhex(head) + size + b"\x01" * 10))
    assert isinstance(error, CorruptError)
    assert error.path == ("k",)


def test_a_claim_inside_an_extension_is_checked_against_the_extension() -> None:
    inside = b"\x93\x91\x02\xa4int8\xc6\x00\x00\x00\x02"
    assert refused(b"\x92" + ext(1, inside) + b"\xa2ab").path == ("0",)


# -------------------------------------------------------------------------------------------------- what flax lets pass


@pytest.mark.parametrize(
    ("target", "saved", "word"),
    [
        (np.zeros(3, np.float32), "text", "str"),
        (np.zeros(3, np.float32), {"a": 1}, ""),
        (np.zeros(3, np.float32), np.zeros((4, 4), np.float32), "[4, 4]"),
        (np.zeros(3, np.float32), np.zeros(3, np.int8), "int8"),
        (np.zeros(3, np.float32), None, ""),
        ({"b": 1}, np.zeros(3), ""),
    ],
    ids=[
        "text for an array",
        "a dict for an array",
        "another shape",
        "another dtype",
        "None for an array",
        "array for a dict",
    ],
)
def test_strict_refuses_what_the_loose_default_accepts(target: Any, saved: Any, word: str) -> None:
    data = flax.serialization.to_bytes({"k": saved})
    if not isinstance(target, dict):
        assert_same(serialization.from_bytes({"k": target}, data), flax.serialization.from_bytes({"k": target}, data))
    with pytest.raises(ValueError, match="k") as caught:
        serialization.from_bytes({"k": target}, data, strict=True)
    assert isinstance(caught.value, TreeringError)
    assert word in str(caught.value)


@pytest.mark.parametrize("data", [5, "text", None, ["a"], 1.5], ids=repr)
def test_input_that_is_no_bytes_is_flax_s_type_error(data: Any) -> None:
    with pytest.raises(TypeError):
        flax.serialization.msgpack_restore(data)
    with pytest.raises(TypeError):
        serialization.msgpack_restore(data)


# ----------------------------------------------------------------------------------------------------------------- gzip


def test_gzip_that_is_cut_short_is_corrupt_and_an_eof_error() -> None:
    whole = gzip.compress(SMALL)
    for size in range(1, len(whole)):
        with pytest.raises(CorruptError) as caught:
            serialization.decompress_bytes(whole[:size])
        assert isinstance(caught.value, EOFError | gzip.BadGzipFile)
    with pytest.raises(EOFError):
        serialization.decompress_bytes(whole[:-9])


def test_gzip_with_a_damaged_byte_is_corrupt_and_bad_gzip_or_still_the_same() -> None:
    whole = gzip.compress(SMALL, mtime=0)
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 0x40
        try:
            assert serialization.decompress_bytes(bytes(damaged)) == SMALL
        except CorruptError as error:
            assert isinstance(error, gzip.BadGzipFile | EOFError)  # noqa: PT017


@pytest.mark.parametrize("data", [b"PK\x03\x04", SMALL], ids=["zip", "msgpack"])
def test_what_is_no_gzip_is_an_error_of_ours(data: bytes) -> None:
    with pytest.raises(TreeringError) as caught:
        serialization.decompress_bytes(data)
    assert isinstance(caught.value, gzip.BadGzipFile | EOFError)


def test_an_empty_gzip_file_is_no_tree() -> None:
    with pytest.raises(TreeringError):
        serialization.from_compressed_bytes(None, b"")


def test_a_gzip_bomb_is_refused_unless_asked_for() -> None:
    bomb = gzip.compress(bytes(200 * 2**20), compresslevel=9)
    with pytest.raises(TreeringError, match="max_bytes"):
        serialization.decompress_bytes(bomb)
    with pytest.raises(TreeringError):
        serialization.from_compressed_bytes(None, bomb)
    assert len(serialization.decompress_bytes(bomb, max_bytes=200 * 2**20)) == 200 * 2**20


def test_max_bytes_bounds_what_comes_out() -> None:
    packed_zeros = gzip.compress(bytes(1000))
    assert serialization.decompress_bytes(packed_zeros, max_bytes=1000) == bytes(1000)
    with pytest.raises(TreeringError):
        serialization.decompress_bytes(packed_zeros, max_bytes=999)


def test_gzip_of_several_members_is_read_as_gzip_reads_it() -> None:
    assert serialization.decompress_bytes(gzip.compress(b"ab") + gzip.compress(b"cd")) == b"abcd"
