"""One test for each row of flax's wire format: leaves, dtypes, big arrays, containers, the low-level calls."""

from __future__ import annotations

import collections
import datetime
import enum
import struct
from pathlib import PurePosixPath
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import optax
import pytest
from flax.core import freeze
from jax.tree_util import Partial

from tests import limits
from tests.compat.wire import array_ext, chunked, ext, keyed, packed
from tests.properties.strategies import Pair, Point
from tests.trees import assert_same
from treering import serialization
from treering.errors import TreeringError

MARKER = "__msgpack_chunked_array__"

# --------------------------------------------------------------------------------------------------------------- leaves


@pytest.mark.parametrize(
    ("leaf", "wire"),
    [
        (None, "c0"),
        (True, "c3"),
        (False, "c2"),
        (0, "00"),
        (127, "7f"),
        (128, "cc80"),
        (256, "cd0100"),
        (65536, "ce00010000"),
        (2**32, "cf0000000100000000"),
        (2**64 - 1, "cfffffffffffffffff"),
        (-1, "ff"),
        (-32, "e0"),
        (-33, "d0df"),
        (-129, "d1ff7f"),
        (-32769, "d2ffff7fff"),
        (-(2**63), "d38000000000000000"),
        (1.5, "cb3ff8000000000000"),
        ("h\u00e9", "a368c3a9"),
        (b"\x00\xff", "c40200ff"),
        (bytearray(b"a"), "c40161"),
        (1 - 2j, "c7130292cb3ff0000000000000cbc000000000000000"),
        (np.array([[1, 2]], np.float32), "c7160193920102a7666c6f61743332c4080000803f00000040"),
        (np.float32(1), "d8039390a7666c6f61743332c4040000803f"),
        (jnp.array([True]), "c70b01939101a4626f6f6cc40101"),
        (np.array(7, np.uint8), "c70b019390a575696e7438c40107"),
    ],
    ids=str,
)
def test_a_leaf_is_written_in_its_form(leaf: Any, wire: str) -> None:
    assert serialization.to_bytes(leaf).hex() == wire
    assert flax.serialization.to_bytes(leaf).hex() == wire


def test_fixext16_is_written_for_a_payload_of_16() -> None:
    data = serialization.to_bytes(np.arange(5, dtype=np.uint8))
    assert data[:2] == b"\xd8\x01"
    assert_same(serialization.msgpack_restore(data), np.arange(5, dtype=np.uint8))


@pytest.mark.parametrize("leaf", [2**64, -(2**63) - 1, 10**30])
def test_an_int_over_64_bits_is_an_overflow_error_with_its_path(leaf: int) -> None:
    with pytest.raises(OverflowError) as caught:
        serialization.to_bytes({"a": [0, leaf]})
    assert isinstance(caught.value, TreeringError)
    assert caught.value.path == ("a", "1")


@pytest.mark.parametrize("leaf", [bytearray(b"ab"), memoryview(b"ab")], ids=["bytearray", "memoryview"])
def test_byte_buffers_are_written_as_bin_and_come_back_as_bytes(leaf: Any) -> None:
    data = serialization.to_bytes({"a": leaf})
    assert data == flax.serialization.to_bytes({"a": leaf})
    assert serialization.msgpack_restore(data) == {"a": b"ab"}


def test_arrays_come_back_as_read_only_numpy_arrays() -> None:
    restored = serialization.from_bytes(None, serialization.to_bytes([np.ones(3), jnp.ones(3)]))
    for array in restored.values():
        assert type(array) is np.ndarray
        assert not array.flags.writeable


def test_a_timestamp_goes_round() -> None:
    stamp = msgpack.Timestamp(5, 7)
    assert serialization.msgpack_restore(serialization.msgpack_serialize({"a": stamp})) == {"a": stamp}


def test_an_unknown_ext_value_is_refused_when_writing() -> None:
    with pytest.raises(TreeringError) as caught:
        serialization.msgpack_serialize({"a": msgpack.ExtType(9, b"ab")})
    assert caught.value.path == ("a",)


class Name(str):
    __slots__ = ()


class Raw(bytes):
    __slots__ = ()


class Row(list):
    __slots__ = ()


class Table(dict):
    __slots__ = ()


class Color(enum.Enum):
    RED = 1


class Small(enum.IntEnum):
    ONE = 1


UNWRITABLE = [
    Name("a"),
    Raw(b"a"),
    Row([1]),
    Table(a=1),
    {1, 2},
    frozenset(),
    Color.RED,
    Small.ONE,
    PurePosixPath("a"),
    np.dtype("int8"),
    object(),
    datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),
    range(3),
    ...,
    len,
    lambda: 0,
    int,
]


@pytest.mark.parametrize("leaf", UNWRITABLE, ids=lambda leaf: type(leaf).__name__)
def test_a_leaf_that_msgpack_does_not_know_is_a_type_error_with_its_path(leaf: Any) -> None:
    with pytest.raises(TypeError):
        flax.serialization.to_bytes({"a": [0, leaf]})
    with pytest.raises(TypeError) as caught:
        serialization.to_bytes({"a": [0, leaf]})
    assert isinstance(caught.value, TreeringError)
    assert caught.value.path == ("a", "1")
    assert type(leaf).__name__ in str(caught.value)


# ----------------------------------------------------------------------------------------------- unusual forms, reading


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("wire", "value"),
    [
        ("ca3fc00000", 1.5),
        ("cc01", 1),
        ("cd0001", 1),
        ("ce00000001", 1),
        ("cf0000000000000001", 1),
        ("d001", 1),
        ("d10001", 1),
        ("d200000001", 1),
        ("d30000000000000001", 1),
        ("d0ff", -1),
        ("d90161", "a"),
        ("da000161", "a"),
        ("db0000000161", "a"),
        ("c5000161", b"a"),
        ("c60000000161", b"a"),
        ("dc000101", [1]),
        ("dd0000000101", [1]),
        ("de0001a16101", {"a": 1}),
        ("df00000001a16101", {"a": 1}),
        ("de0000", {}),
        ("dc0000", []),
        ("81d9016101", {"a": 1}),
        ("81c4016101", {b"a": 1}),
        ("8101a162", {1: "b"}),
        ("81c0a162", {None: "b"}),
        ("81cb3ff8000000000000a162", {1.5: "b"}),
    ],
)
def test_a_longer_form_than_needed_is_read_as_flax_reads_it(wire: str, value: Any) -> None:
    data = bytes.fromhex(wire)
    assert_same(serialization.msgpack_restore(data), value)
    assert_same(flax.serialization.msgpack_restore(data), value)


@pytest.mark.parametrize("form", ["ext8", "ext16", "ext32"])
@pytest.mark.parametrize("size", [0, 1, 5])
def test_every_ext_form_of_an_array_is_read(form: str, size: int) -> None:
    payload = packed([[size], "uint8", bytes(range(size))])
    head = {"ext8": (b"\xc7", ">Bb"), "ext16": (b"\xc8", ">Hb"), "ext32": (b"\xc9", ">Ib")}[form]
    data = head[0] + struct.pack(head[1], len(payload), 1) + payload
    assert_same(serialization.msgpack_restore(data), np.arange(size, dtype=np.uint8))


def same_as_flax_or_refused(data: bytes) -> None:
    """Flax accepts this in silence although no writer makes it: read it the same, or say what is wrong."""
    try:
        got = serialization.msgpack_restore(data)
    except TreeringError:
        return
    assert_same(got, flax.serialization.msgpack_restore(data))


@pytest.mark.parametrize(
    "data",
    [
        array_ext([2], "int8", b"ab", code=3),
        ext(2, packed([1.0, 2.0, 3.0])),
        array_ext([1], b"int8", b"a"),
        chunked({"0": 2}, [array_ext([2], "int8", b"ab")], flag=False),
        chunked({"0": 2}, [array_ext([1], "int8", b"a"), array_ext([1], "int16", b"ab")]),
        chunked({"0": 2}, [array_ext([2, 1], "int8", b"ab")]),
        ext(1, bytes.fromhex("dd00000003dc0001cd0002da000575696e7438c6000000020102")),
        ext(2, packed([1, 2])),
    ],
    ids=[
        "a scalar of rank 1",
        "a complex of three parts",
        "a dtype name as bin",
        "a chunk flag that says false",
        "chunks of mixed dtypes",
        "chunks of rank 2",
        "longer forms than needed inside an array",
        "a complex of ints",
    ],
)
def test_what_no_writer_makes_is_read_as_flax_reads_it_or_refused(data: bytes) -> None:
    same_as_flax_or_refused(data)


def test_a_tuple_of_orbax_is_read() -> None:
    data = keyed("t", ext(4, packed([1, "a"]) + b""))
    assert serialization.msgpack_restore(data) == {"t": (1, "a")}


# ------------------------------------------------------------------------------------------------------- dtypes, layout


@pytest.mark.parametrize("name", ["datetime64", "timedelta64", "datetime64[25s]", "timedelta64[us]", "datetime64[M]"])
@pytest.mark.filterwarnings("ignore:The 'generic' unit:DeprecationWarning")
def test_dates_and_durations_go_round(name: str) -> None:
    array = np.array([0, 1, -(2**63), 2**62], np.int64).view(name)
    data = serialization.to_bytes({"a": array, "s": array[1]})
    assert data == flax.serialization.to_bytes({"a": array, "s": array[1]})
    assert_same(serialization.msgpack_restore(data), {"a": array, "s": array[1]})


@pytest.mark.parametrize("name", ["longdouble", "clongdouble"])
def test_long_doubles_go_round_by_value(name: str) -> None:
    array = np.array([0, 1, -2.5, 1e300]).astype(name) / 3
    restored = serialization.msgpack_restore(serialization.to_bytes(array))
    assert restored.dtype == array.dtype
    np.testing.assert_array_equal(restored, array)


UNREADABLE = {
    "bytes": np.array([b"abc"]),
    "text": np.array(["abc"]),
    "a numpy string scalar": np.str_("a"),
    "a numpy bytes scalar": np.bytes_(b"a"),
    "void": np.zeros(2, "V8"),
    "a void scalar": np.zeros(2, "V8")[0],
    "structured": np.zeros(2, "i4,f4"),
    "structured and aligned": np.zeros(2, np.dtype("i1,f4", align=True)),
    "records": np.zeros(2, "i4,f4").view(np.recarray),
    "objects": np.array([None, 1], object),
    "StringDType": np.array(["a"], np.dtypes.StringDType()),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_dtype_that_could_not_be_read_back_is_refused_when_writing(kind: str) -> None:
    for write in (serialization.to_bytes, serialization.msgpack_serialize):
        with pytest.raises(TreeringError) as caught:
            write({"a": {"b": UNREADABLE[kind]}})
        assert isinstance(caught.value, TypeError)
        assert isinstance(caught.value, ValueError)
        assert caught.value.path == ("a", "b")


@pytest.mark.parametrize("dtype", [">i2", ">u4", ">f8", ">c8", ">f2", ">M8[s]", ">m8[D]"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_big_endian_arrays_are_converted_never_mislabelled(dtype: str, shape: tuple[int, ...]) -> None:
    array = (np.arange(np.prod(shape), dtype=np.int64).reshape(shape) + 258).astype(dtype)
    little = array.astype(array.dtype.newbyteorder("<"))
    data = serialization.to_bytes({"a": array})
    assert data == flax.serialization.to_bytes({"a": little})
    np.testing.assert_array_equal(serialization.msgpack_restore(data)["a"], array)


def test_big_endian_arrays_are_converted_in_chunks_and_lists_too(monkeypatch: pytest.MonkeyPatch) -> None:
    limits.lower(monkeypatch, chunk_of_state_dicts=4)
    array = np.arange(9, dtype=">i2")
    np.testing.assert_array_equal(serialization.msgpack_restore(serialization.to_bytes([array]))["0"], array)
    np.testing.assert_array_equal(serialization.msgpack_restore(serialization.msgpack_serialize([array]))[0], array)


LAYOUTS = {
    "fortran": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
    "strided": np.arange(10, dtype=np.uint8)[::3],
    "reversed": np.arange(6, dtype=np.int16).reshape(2, 3)[::-1, ::-1],
    "broadcast": np.broadcast_to(np.float32(1.5), (2, 2)),
    "0-d": np.array(3, np.int8),
    "empty": np.zeros((3, 0, 2), np.int16),
    "transposed bfloat16": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3).T,
    "read-only": np.frombuffer(b"abcd", np.uint8),
    "memory map": np.memmap,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_written_in_c_order_and_keeps_its_shape(layout: str, tmp_path: Any) -> None:
    array = LAYOUTS[layout]
    if array is np.memmap:
        array = np.memmap(tmp_path / "a", np.int16, "w+", shape=(2, 3))
        array[:] = 7
    data = serialization.to_bytes(array)
    assert data == flax.serialization.to_bytes(array)
    restored = serialization.msgpack_restore(data)
    assert_same(restored, np.asarray(array))
    assert restored.flags.c_contiguous


# ----------------------------------------------------------------------------------------------------------- big arrays


def test_an_array_strictly_above_the_limit_becomes_a_marker_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    limits.lower(monkeypatch, chunk_of_state_dicts=16)
    array = np.arange(10, dtype=np.int16).reshape(2, 5)
    raw = msgpack.unpackb(serialization.to_bytes({"a": array, "at": array[0][:4]}), ext_hook=lambda code, data: (code,))
    assert list(raw["a"]) == [MARKER, "shape", "chunks"]
    assert raw["a"][MARKER] is True
    assert raw["a"]["shape"] == {"0": 2, "1": 5}
    assert raw["a"]["chunks"] == {"0": (1,), "1": (1,)}
    assert raw["at"] == (1,)


def test_chunked_arrays_come_back_whole_and_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    limits.lower(monkeypatch, chunk_of_state_dicts=16)
    array = np.arange(50, dtype=np.float32).reshape(5, 10)
    restored = serialization.from_bytes([array], serialization.to_bytes([array]))[0]
    assert_same(restored, array)
    assert restored.flags.writeable


def test_numpy_scalars_are_never_chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    limits.lower(monkeypatch, chunk_of_state_dicts=1)
    assert serialization.to_bytes(np.complex128(1j))[2] == 3


def test_the_limit_is_read_at_call_time(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = serialization.to_bytes(np.zeros(9))
    limits.lower(monkeypatch, chunk_of_state_dicts=8)
    assert len(serialization.to_bytes(np.zeros(9))) > len(whole)


@pytest.mark.parametrize("write", [serialization.to_bytes, serialization.msgpack_serialize])
@pytest.mark.parametrize("tree", [{MARKER: 1}, {"a": {MARKER: True, "b": 1}}], ids=["top", "below"])
def test_a_user_dict_with_the_chunk_marker_is_refused_when_writing(write: Any, tree: dict[str, Any]) -> None:
    with pytest.raises(TreeringError, match=MARKER):
        write(tree)


@pytest.mark.parametrize(
    "data",
    [
        chunked({"0": 3}, [array_ext([2], "int8", b"ab")]),
        chunked({"0": -1}, [array_ext([2], "int8", b"ab")]),
        chunked({"1": 2}, [array_ext([2], "int8", b"ab")]),
        chunked({"0": 2}, []),
        chunked({"0": "2"}, [array_ext([2], "int8", b"ab")]),
        chunked({"0": 2.0}, [array_ext([2], "int8", b"ab")]),
        chunked({"0": 2}, [packed(5)]),
        chunked({"0": 2**62, "1": 2**62}, [array_ext([2], "int8", b"ab")]),
        packed({MARKER: True}),
        packed({MARKER: True, "shape": {}, "chunks": 7}),
        packed({MARKER: True, "shape": 7, "chunks": {}}),
    ],
    ids=[
        "too few items",
        "a negative dim",
        "shape keys that do not count",
        "no chunks",
        "a dim of text",
        "a dim of float",
        "a chunk that is not an array",
        "a shape over all memory",
        "nothing but the flag",
        "chunks that are no map",
        "a shape that is no map",
    ],
)
def test_a_broken_chunked_array_is_an_error_of_ours(data: bytes) -> None:
    for wrapped in (data, keyed("k", data)):
        with pytest.raises(TreeringError) as caught:
            serialization.msgpack_restore(wrapped)
        assert isinstance(caught.value, ValueError)


def test_a_missing_part_of_a_chunked_array_is_also_flax_s_key_error() -> None:
    with pytest.raises(KeyError):
        flax.serialization.msgpack_restore(packed({MARKER: True}))
    with pytest.raises(KeyError) as caught:
        serialization.msgpack_restore(packed({MARKER: True}))
    assert isinstance(caught.value, TreeringError)


# ----------------------------------------------------------------------------------------------------------- containers


@pytest.mark.parametrize(
    ("tree", "state"),
    [
        ({3: {4: 1}, "z": 2, "a": 3}, {"3": {"4": 1}, "z": 2, "a": 3}),
        (freeze({"b": {1: 2}, "a": 0}), {"b": {"1": 2}, "a": 0}),
        ([1, [2, (3,)]], {"0": 1, "1": {"0": 2, "1": {"0": 3}}}),
        (Pair([1], None), {"first": {"0": 1}, "second": None}),
        (optax.EmptyState(), {}),
        (Partial(max, 1, key=2), {"args": {"0": 1}, "keywords": {"key": 2}}),
        (Point(1, [2], "not stored"), {"x": 1, "y": {"0": 2}}),
        ({}, {}),
        ([], {}),
        ((), {}),
    ],
    ids=["dict", "FrozenDict", "list", "namedtuple", "EmptyState", "Partial", "struct", "{}", "[]", "()"],
)
def test_a_container_becomes_its_state_dict(tree: Any, state: dict[str, Any]) -> None:
    assert_same(serialization.to_state_dict(tree), state)
    assert serialization.to_bytes(tree) == flax.serialization.to_bytes(state)
    assert_same(serialization.from_state_dict(tree, state), tree)


@pytest.mark.parametrize("tree", [{}, [], (), optax.EmptyState(), freeze({}), collections.OrderedDict()])
def test_every_empty_container_is_the_single_byte_80(tree: Any) -> None:
    assert serialization.to_bytes(tree) == b"\x80"
    assert_same(serialization.from_bytes(tree, b"\x80"), tree)


def test_keys_of_an_ordered_dict_that_collide_as_text_are_refused() -> None:
    with pytest.raises(TreeringError) as caught:
        serialization.to_bytes({"a": collections.OrderedDict({1: 0, "1": 0})})
    assert caught.value.path == ("a",)


@pytest.mark.parametrize("wrap", [dict, freeze])
def test_keys_that_collide_as_text_are_a_value_error(wrap: Any) -> None:
    with pytest.raises(ValueError, match="Dict keys do not have a unique string representation") as caught:
        serialization.to_bytes({"a": wrap({1: 0, "1": 0})})
    assert isinstance(caught.value, TreeringError)


def test_colliding_keys_are_reported_with_their_path() -> None:
    with pytest.raises(TreeringError) as caught:
        serialization.to_bytes({"a": [{1: 0, "1": 0}]})
    assert caught.value.path is not None
    assert caught.value.path[:2] == ("a", "0")


# -------------------------------------------------------------------------------------------------------- the low level


def test_the_low_level_keeps_lists_and_key_types() -> None:
    tree = {"l": [1, [2]], 7: 1, b"k": 2, None: 3, 1.5: 4, True: 5}
    data = serialization.msgpack_serialize(tree, in_place=True)
    assert data == packed(tree)
    assert_same(serialization.msgpack_restore(data), tree)


@pytest.mark.parametrize(
    "tree", [(1, 2), Pair(1, 2), freeze({"a": 1}), Point(1, 2)], ids=lambda tree: type(tree).__name__
)
def test_the_low_level_refuses_other_containers_as_a_type_error(tree: Any) -> None:
    for in_place in (False, True):
        with pytest.raises(TypeError):
            flax.serialization.msgpack_serialize({"a": tree}, in_place=in_place)
        with pytest.raises(TypeError) as caught:
            serialization.msgpack_serialize({"a": tree}, in_place=in_place)
        assert isinstance(caught.value, TreeringError)
        assert caught.value.path == ("a",)


def test_in_place_says_whether_keys_keep_their_order() -> None:
    assert serialization.msgpack_serialize({"b": 1, "a": 2}, in_place=True) == packed({"b": 1, "a": 2})
    assert serialization.msgpack_serialize({"b": 1, "a": 2}, in_place=False) == packed({"a": 2, "b": 1})
    assert serialization.msgpack_serialize({"b": 1, "a": 2}) == packed({"a": 2, "b": 1})


def test_keys_that_cannot_be_sorted_are_flax_s_value_error() -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        serialization.msgpack_serialize({"a": 1, 2: 3})
    assert isinstance(caught.value, TreeringError)


def test_in_place_never_changes_the_callers_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    limits.lower(monkeypatch, chunk_of_state_dicts=16)
    big, placed = np.arange(9), jnp.ones(2)
    tree = {"big": big, "inner": {"placed": placed}}
    serialization.msgpack_serialize(tree, in_place=True)
    assert tree["big"] is big
    assert tree["inner"] == {"placed": placed}


def test_a_failure_half_way_leaves_the_callers_tree_alone() -> None:
    placed = jnp.ones(2)
    tree = {"a": placed, "b": object()}
    with pytest.raises(TypeError):
        serialization.msgpack_serialize(tree, in_place=True)
    assert tree["a"] is placed


def test_jax_arrays_below_a_raw_list_are_written_as_flax_does() -> None:
    data = serialization.msgpack_serialize([jnp.arange(3), [jnp.ones(1)]])
    assert data == flax.serialization.msgpack_serialize([jnp.arange(3), [jnp.ones(1)]])
    assert isinstance(jax.tree.leaves(serialization.msgpack_restore(data))[0], np.ndarray)
