"""``.zarray`` documents and compressors: as TensorStore has them, and strict on the way in."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from typing import Any

import pytest
import tensorstore
from hypothesis import given
from hypothesis import strategies as st

from treering._codec.zarr import (
    ZarrArray,
    check_compressor,
    chunk_box,
    chunk_bytes,
    chunk_count,
    chunk_name,
    chunk_names,
    grid_of,
    is_whole,
    number_of_chunk,
    parse_zarray,
    stored_dtype,
    zarray_bytes,
)
from treering._codec.zarr_chunks import require_known_compressor
from treering._values.boxes import find_cover_error, shape_of
from treering._values.dtypes import lookup
from treering.errors import CorruptError, FormatError, UnsupportedError

ZSTD = '{"id":"zstd","level":1}'

# Every dtype that a file of the house may hold, and what TensorStore's zarr v2 says for it: None where it says nothing.
DTYPES = {
    "bool": "|b1",
    "int8": "|i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "uint8": "|u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "complex64": "<c8",
    "complex128": "<c16",
    "bfloat16": "bfloat16",
    "float4_e2m1fn": "float4_e2m1fn",
    "float6_e2m3fn": None,
    "float6_e3m2fn": None,
    "float8_e3m4": "float8_e3m4",
    "float8_e4m3": None,
    "float8_e4m3b11fnuz": "float8_e4m3b11fnuz",
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e4m3fnuz": "float8_e4m3fnuz",
    "float8_e5m2": "float8_e5m2",
    "float8_e5m2fnuz": "float8_e5m2fnuz",
    "float8_e8m0fnu": "float8_e8m0fnu",
    "int1": None,
    "int2": "int2",
    "int4": "int4",
    "uint1": None,
    "uint2": None,
    "uint4": None,
    "datetime64[ns]": None,
    "timedelta64[s]": None,
}

sizes = st.integers(0, 7)
arrays = st.lists(st.tuples(sizes, st.integers(1, 7)), max_size=3).flatmap(
    # TensorStore says "C" where there is but one order.
    lambda axes: st.builds(
        ZarrArray,
        shape=st.just(tuple(size for size, _ in axes)),
        chunks=st.just(tuple(chunk for _, chunk in axes)),
        dtype=st.sampled_from([name for name, text in DTYPES.items() if text]),
        compressor=st.sampled_from([None, ZSTD]),
        order=st.sampled_from("CF" if len(axes) > 1 else "C"),
        separator=st.sampled_from("./"),
        marker=st.sampled_from([None, "0123456789abcdef"]),
    )
)


def created(**members: Any) -> Any:
    """Return a TensorStore in memory, made with these members of ``.zarray``."""
    metadata = {"zarr_format": 2, "fill_value": None, "filters": None, "order": "C", "compressor": None, **members}
    return tensorstore.open(
        {"driver": "zarr", "kvstore": "memory://", "metadata": metadata}, create=True, context=tensorstore.Context()
    ).result()


@pytest.mark.parametrize("name", DTYPES)
def test_the_table_of_dtypes_is_tensorstores(name: str) -> None:
    try:
        schema = {"domain": {"shape": [3]}}
        store: Any = tensorstore.open(
            {"driver": "zarr", "kvstore": "memory://", "dtype": name, "schema": schema}, create=True
        ).result()
    except ValueError:
        assert DTYPES[name] is None
        dtype = lookup(name)
        assert dtype is not None
        assert stored_dtype(name) == f"uint{8 * dtype.itemsize}"
    else:
        written = json.loads(store.kvstore[".zarray"])["dtype"]
        assert written == DTYPES[name]
        assert stored_dtype(name) == name
        assert json.loads(zarray_bytes(ZarrArray(shape=(3,), chunks=(3,), dtype=name)))["dtype"] == written
        assert store.dtype.numpy_dtype.itemsize == chunk_bytes(ZarrArray(shape=(1,), chunks=(1,), dtype=name))


@pytest.mark.parametrize("name", ["float128", "complex256", "object", "str", "nonsense"])
def test_dtypes_without_a_form_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        stored_dtype(name)


@given(arrays)
def test_documents_are_tensorstores_to_the_byte(array: ZarrArray) -> None:
    bare = dataclasses.replace(array, marker=None)
    node = json.loads(zarray_bytes(bare))
    assert created(**node).kvstore[".zarray"] == zarray_bytes(bare)
    assert parse_zarray(zarray_bytes(array)) == array
    with_marker = json.loads(zarray_bytes(array))
    assert with_marker.pop("treering", None) == array.marker
    assert with_marker == node
    assert list(json.loads(zarray_bytes(array))) == sorted(json.loads(zarray_bytes(array)))


def test_tensorstore_opens_what_carries_a_marker() -> None:
    array = ZarrArray(shape=(2,), chunks=(2,), dtype="float32", marker="0123456789abcdef")
    context = tensorstore.Context()
    folder = tensorstore.KvStore.open("memory://", context=context).result()
    folder[".zarray"] = zarray_bytes(array)
    folder["0"] = bytes.fromhex("0000803f00000040")
    store = tensorstore.open({"driver": "zarr", "kvstore": "memory://"}, context=context).result()
    assert store.read().result().tolist() == [1.0, 2.0]


# Texts that eformer 0.0.101 wrote, by jax's manager of arrays.
EFORMER = {
    b'{"chunks":[4,2],"compressor":{"id":"zstd","level":1},"dimension_separator":".","dtype":"bfloat16",'
    b'"fill_value":null,"filters":null,"order":"C","shape":[4,8],"zarr_format":2}': ZarrArray(
        shape=(4, 8), chunks=(4, 2), dtype="bfloat16", compressor=ZSTD
    ),
    b'{"chunks":[],"compressor":{"id":"zstd","level":1},"dimension_separator":".","dtype":"|b1","fill_value":null,'
    b'"filters":null,"order":"C","shape":[],"zarr_format":2}': ZarrArray(
        shape=(), chunks=(), dtype="bool", compressor=ZSTD
    ),
    b'{"chunks":[1,3],"compressor":{"id":"zstd","level":1},"dimension_separator":".","dtype":"<f4",'
    b'"fill_value":null,"filters":null,"order":"C","shape":[0,3],"zarr_format":2}': ZarrArray(
        shape=(0, 3), chunks=(1, 3), dtype="float32", compressor=ZSTD
    ),
    b'{"chunks":[2,3],"compressor":{"id":"zstd","level":1},"dimension_separator":".","dtype":"int4",'
    b'"fill_value":null,"filters":null,"order":"C","shape":[2,3],"zarr_format":2}': ZarrArray(
        shape=(2, 3), chunks=(2, 3), dtype="int4", compressor=ZSTD
    ),
    b'{"chunks":[1],"compressor":{"id":"zstd","level":1},"dimension_separator":".","dtype":"<c16","fill_value":null,'
    b'"filters":null,"order":"C","shape":[1],"zarr_format":2}': ZarrArray(
        shape=(1,), chunks=(1,), dtype="complex128", compressor=ZSTD
    ),
}


@pytest.mark.parametrize("text", EFORMER, ids=lambda text: json.loads(text)["dtype"])
def test_what_eformer_writes(text: bytes) -> None:
    assert parse_zarray(text) == EFORMER[text]
    assert zarray_bytes(EFORMER[text]) == text


# ------------------------------------------------------------------------------------------------------- on the way in

PLAIN: dict[str, Any] = {
    "chunks": [2, 3],
    "compressor": None,
    "dtype": "<f4",
    "fill_value": None,
    "filters": None,
    "order": "C",
    "shape": [4, 6],
    "zarr_format": 2,
}


def text_with(**members: Any) -> bytes:
    return json.dumps(PLAIN | members).encode()


def text_without(member: str) -> bytes:
    return json.dumps({name: value for name, value in PLAIN.items() if name != member}).encode()


def test_what_may_be_left_out_or_added() -> None:
    wanted = ZarrArray(shape=(4, 6), chunks=(2, 3), dtype="float32")
    for text in (
        text_with(),
        text_with(attributes={"a": [1]}),
        text_with(filters=[]),
        text_with(fill_value=0.0),
        text_with(fill_value="NaN"),
        text_without("filters"),
        text_without("fill_value"),
        json.dumps(PLAIN, indent=4).encode(),
    ):
        assert parse_zarray(text) == wanted


@pytest.mark.parametrize(
    ("text", "name", "big_endian"),
    [("|i1", "int8", False), ("<i1", "int8", False), (">b1", "bool", False), (">c8", "complex64", True)],
)
def test_byte_orders(text: str, name: str, big_endian: bool) -> None:
    array = parse_zarray(text_with(dtype=text))
    assert (array.dtype, array.big_endian) == (name, big_endian)
    assert array.plain is not big_endian
    assert parse_zarray(zarray_bytes(array)) == array


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"2",
        b"\xff",
        b'{"zarr_format":2,"zarr_format":2}',
        b"[" * 100_000,
        b" " * (1 << 20) + text_with(),
        *(text_without(member) for member in ("chunks", "compressor", "dtype", "order", "shape", "zarr_format")),
        text_with(zarr_format="2"),
        text_with(zarr_format=2.0),
        text_with(shape=4),
        text_with(shape=[4]),
        text_with(shape=[4, -1]),
        text_with(shape=[4, 1.0]),
        text_with(shape=[4, True]),
        text_with(shape=[4, 1 << 63]),
        text_with(shape=[4, 10**300]),
        text_with(shape=[4, None]),
        text_with(chunks=[0, 3]),
        text_with(chunks=[2, 3, 4]),
        text_with(order="A"),
        text_with(order=None),
        text_with(dimension_separator=""),
        text_with(dimension_separator=None),
        text_with(compressor={}),
        text_with(compressor={"id": 1}),
        text_with(compressor="zstd"),
        text_with(compressor=[]),
        text_with(dtype=None),
        text_with(treering=None),
        text_with(treering="0123456789ABCDEF"),
        text_with(treering="0123456789abcde"),
        text_with(treering="0123456789abcdef\n"),
    ],
    ids=lambda text: ascii(text[:150]),
)
def test_damaged_documents(text: bytes) -> None:
    with pytest.raises(CorruptError, match=r"\.zarray"):
        parse_zarray(text)


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        (text_with(zarr_format=3), FormatError, "version 3"),
        (text_with(filters=[{"id": "delta"}]), UnsupportedError, "filters"),
        (text_with(dtype="|S4"), UnsupportedError, "S4"),
        (text_with(dtype="|V4"), UnsupportedError, "V4"),
        (text_with(dtype="<U4"), UnsupportedError, "U4"),
        (text_with(dtype="|O"), UnsupportedError, "O"),
        (text_with(dtype="<M8[ns]"), UnsupportedError, "M8"),
        (text_with(dtype="i4"), UnsupportedError, "i4"),
        (text_with(dtype="|i4"), UnsupportedError, "i4"),
        (text_with(dtype=">bfloat16"), UnsupportedError, "bfloat16"),
        (text_with(dtype="float32"), UnsupportedError, "float32"),
        (text_with(dtype=[["x", "<i4"], ["y", "<f4"]]), UnsupportedError, "fields"),
        (text_with(shape=[1] * 33, chunks=[1] * 33), UnsupportedError, "33 axes"),
        (text_with(shape=[1, 1], chunks=[1 << 20, 1 << 20]), UnsupportedError, "padding"),
        (text_with(shape=[3, 1 << 40], chunks=[1 << 40, 1]), UnsupportedError, "padding"),
        (text_with(compressor={"id": "x", "y": ["z" * 5000]}), UnsupportedError, "any codec needs"),
    ],
    ids=lambda value: ascii(value)[:150],
)
def test_what_has_no_form_here(text: bytes, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        parse_zarray(text)


def test_a_chunk_may_be_larger_than_a_small_array() -> None:
    assert chunk_bytes(parse_zarray(text_with(shape=[1, 1], chunks=[1000, 1000]))) == 4_000_000
    assert chunk_count(parse_zarray(text_with(shape=[0, 1], chunks=[1 << 60, 1]))) == 0


@pytest.mark.parametrize("codec", [None, "zlib", "gzip", "zstd", "bz2", "blosc"])
def test_a_packed_chunk_unpacks_to_little_more_than_the_shape_holds(codec: str | None) -> None:
    compressor = codec and {"id": codec}
    for times in (1, 2, 3, 8, 9):
        text = text_with(shape=[1 << 22, 2], chunks=[times << 22, 2], compressor=compressor)
        if times <= (2 if codec else 8):
            assert parse_zarray(text).shape == (1 << 22, 2)
        else:
            with pytest.raises(UnsupportedError, match="padding"):
                parse_zarray(text)


@pytest.mark.parametrize("config", [None, "zstd", {}, {"id": ""}, {"id": 1}, {"id": "a", 1: 2}, {"id": "a", "b": (1,)}])
def test_compressors_that_are_no_configuration(config: Any) -> None:
    with pytest.raises(UnsupportedError, match="compressor"):
        check_compressor(config)


def test_the_text_of_a_compressor_is_canonical() -> None:
    assert check_compressor({"shuffle": 1, "id": "blosc"}) == '{"id":"blosc","shuffle":1}'
    assert check_compressor({"id": "x", "b": {"d": 1, "c": [None]}}) == '{"b":{"c":[null],"d":1},"id":"x"}'


# -------------------------------------------------------------------------------------------------------------- chunks


@given(arrays)
def test_chunks_cover_the_array_once(array: ZarrArray) -> None:
    count = chunk_count(array)
    names = list(chunk_names(array))
    boxes = [chunk_box(array, number) for number in range(count)]
    assert len(names) == len(set(names)) == count
    assert boxes == sorted(boxes)
    if count:
        assert find_cover_error(array.shape, boxes) is None
    else:
        assert 0 in array.shape
    for number, name in enumerate(names):
        assert chunk_name(array, number) == name
        assert number_of_chunk(array, name) == number
        assert is_whole(array, number) == (shape_of(boxes[number]) == array.chunks)
    places = itertools.product(*map(range, grid_of(array)))
    assert names == [array.separator.join(map(str, place)) or "0" for place in places]


@given(arrays.filter(lambda array: 0 not in array.shape))
def test_chunk_files_are_named_as_tensorstore_names_them(array: ZarrArray) -> None:
    raw = dataclasses.replace(array, compressor=None, dtype="uint8", marker=None)
    store = created(**json.loads(zarray_bytes(raw)))
    store.write(1).result()
    written = {name.decode() for name in store.kvstore.list().result()} - {".zarray"}
    assert written == set(chunk_names(array))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "0",
        "0.0.0",
        "2.0",
        "0.2",
        "00.0",
        "-1.0",
        "+1.0",
        " 1.0",
        "1.0\n",
        "\u0661.0",
        "0/0",
        ".zarray",
        "0.",
        "1_0.0",
    ],
    ids=ascii,
)
def test_names_that_are_no_chunk(name: str) -> None:
    assert number_of_chunk(ZarrArray(shape=(4, 6), chunks=(2, 3), dtype="int8"), name) is None


@pytest.mark.parametrize("name", ["", "1", "00", "0.0"])
def test_an_array_without_axes_has_one_chunk(name: str) -> None:
    array = ZarrArray(shape=(), chunks=(), dtype="int8")
    assert number_of_chunk(array, name) is None
    assert number_of_chunk(array, "0") == 0


def test_an_array_without_items_has_no_chunk() -> None:
    array = ZarrArray(shape=(0, 3), chunks=(1, 3), dtype="int8")
    assert number_of_chunk(array, "0.0") is None
    assert list(chunk_names(array)) == []


def test_huge_grids_cost_nothing() -> None:
    began = time.perf_counter()
    array = parse_zarray(text_with(shape=[(1 << 63) - 1] * 32, chunks=[1] * 32))
    assert chunk_count(array) == ((1 << 63) - 1) ** 32
    assert list(itertools.islice(chunk_names(array), 2)) == [".".join(["0"] * 32), ".".join([*["0"] * 31, "1"])]
    assert number_of_chunk(array, chunk_name(array, chunk_count(array) - 1)) == chunk_count(array) - 1
    assert chunk_bytes(array) == 4
    assert time.perf_counter() - began < 5


# ---------------------------------------------------------------------------------------- configurations of compressors

CONFIGS: list[dict[str, Any]] = [
    {"id": "blosc", "cname": "zstd", "clevel": 9, "shuffle": 0, "blocksize": 256},
    {"id": "blosc", "cname": "nonsense"},
    {"id": "lzma", "preset": 1},
    *({"id": codec} for codec in ("zstd", "gzip", "zlib", "bz2", "blosc", "lz4", "nonsense")),
    *({"id": codec, "more": 1} for codec in ("zstd", "gzip", "zlib", "bz2")),
    *(
        {"id": codec, "level": level}
        for codec in ("zstd", "gzip", "zlib", "bz2")
        for level in (-131073, -131072, -1, 0, 1, 9, 10, 22, 23, "1")
    ),
]


@pytest.mark.parametrize("config", CONFIGS, ids=json.dumps)
def test_tensorstore_agrees_about_compressors(config: dict[str, Any]) -> None:
    array = ZarrArray(shape=(4,), chunks=(4,), dtype="uint8")
    metadata = json.loads(zarray_bytes(array)) | {"compressor": config}
    spec = {"driver": "zarr", "kvstore": "memory://", "metadata": metadata}
    try:
        store: Any = tensorstore.open(spec, create=True, context=tensorstore.Context()).result()
    except ValueError:
        with pytest.raises(UnsupportedError, match=config["id"]):
            require_known_compressor(config)
    else:
        known = require_known_compressor(config)
        assert json.loads(known) == json.loads(store.kvstore[".zarray"])["compressor"]
        assert require_known_compressor(json.loads(known)) == known


def test_levels_are_whole_numbers() -> None:
    for level in (True, 1.0, None):
        with pytest.raises(UnsupportedError, match="level"):
            require_known_compressor({"id": "zstd", "level": level})


def test_the_message_about_a_compressor_is_short() -> None:
    with pytest.raises(UnsupportedError) as caught:
        require_known_compressor({"id": "none"})
    assert str(caught.value) == 'the compressor {"id":"none"} is unknown to TensorStore: "none" is not registered'
