"""Zarr v2's ``.zarray`` documents: what lies in an array's folder, and which chunk is which file.

Nothing here allocates by shape or counts chunks one by one: a document may be that of a hostile directory.

Source: https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html, "Arrays"; the names of dtypes beyond numpy's are those
of TensorStore.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from treering._codec.documents import add_hint, check_json, decode_text, member, parse_json, show
from treering._values.boxes import Box, shape_of, whole
from treering._values.dtypes import NUMPY_SIZES, Dtype, lookup
from treering._values.human import pluralize
from treering._values.leaves_names import is_attempt
from treering.errors import CorruptError, FormatError, TreeringError, UnsupportedError

_MOST_AXES: Final = 32
_SIZE_LIMIT: Final = 1 << 63
LONGEST_DOCUMENT: Final = 1 << 20
"""No document of an array has more bytes than this."""

_LONGEST_CACHED: Final = 1 << 10
_LONGEST_COMPRESSOR: Final = 1 << 12
_FREE_ITEMS: Final = 1 << 22
# A raw chunk takes as much of the disk as of memory; a packed one may be a thousandth of what it unpacks to.
_MOST_PADDING: Final = 8
_MOST_PACKED_PADDING: Final = 2

# Zarr's codes, without the byte order; one byte an item has none.
_CODES: Final = {name: f"{name[0]}{size}" for name, size in NUMPY_SIZES.items()}
# Dtypes that TensorStore stores under their bare names, little endian: beyond zarr v2 proper.
_FLOAT8: Final = ("e3m4", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
_NAMED: Final = ("bfloat16", "float4_e2m1fn", "int2", "int4", *(f"float8_{layout}" for layout in _FLOAT8))
_LITTLE_ENDIAN: Final = {name: ("|" if code[1:] == "1" else "<") + code for name, code in _CODES.items()}
_WRITTEN: Final = _LITTLE_ENDIAN | {name: name for name in _NAMED}
_BIG_ENDIAN: Final = {name: f">{code}" for name, code in _CODES.items() if code[1:] != "1"}
_READ: Final = {
    **{order + code: (name, False) for name, code in _CODES.items() for order in "<>" if code[1:] == "1"},
    **{text: (name, False) for name, text in _WRITTEN.items()},
    **{text: (name, True) for name, text in _BIG_ENDIAN.items()},
}

_EXAMPLE: Final = 'for example {"id": "zstd", "level": 1}'
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,18}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ZarrArray:
    """What a ``.zarray`` says.

    Example:
        >>> array = ZarrArray(shape=(5, 4), chunks=(2, 4), dtype="float32")
        >>> grid_of(array), list(chunk_names(array)), chunk_box(array, 2), chunk_bytes(array)
        ((3, 1), ['0.0', '1.0', '2.0'], ((4, 5), (0, 4)), 32)
        >>> array.plain
        True
    """

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    """Shape of a chunk; the last one of an axis is filled up to it."""
    dtype: str
    """Of what lies in the chunks, by its house name, such as "float32" or "bfloat16"."""
    big_endian: bool = False
    compressor: str | None = None
    """The compressor's configuration as JSON, as `check_compressor` writes it; None: the chunks are raw."""
    order: str = "C"
    separator: str = "."
    marker: str | None = None
    """The attempt of the save that wrote it; None where another program did."""

    @property
    def plain(self) -> bool:
        """Whether a chunk file has the bytes of the array, that is raw, in C order and little endian."""
        return self.compressor is None and self.order == "C" and not self.big_endian


# -------------------------------------------------------------------------------------------------------------- reading


def parse_zarray(data: bytes) -> ZarrArray:
    """Return what a ``.zarray`` says; members that zarr does not know are passed over.

    Raises:
        CorruptError: it is no JSON, lacks a member, or says what cannot be.
        FormatError: it is of another version of zarr.
        UnsupportedError: a dtype or a filter that has no form here, or more than 32 axes.

    Example:
        >>> parse_zarray(zarray_bytes(ZarrArray(shape=(4,), chunks=(2,), dtype="bfloat16"))).chunks
        (2,)
    """
    # Thousands of leaves have few texts between them.
    return _parse_again(data) if len(data) <= _LONGEST_CACHED else _parse(data)


def marker_of(zarray: bytes) -> str | None:
    """Return the attempt that a ``.zarray`` names; None for another program's, or a damaged one."""
    try:
        return parse_zarray(zarray).marker
    except TreeringError:
        return None


def parse_zarr(data: bytes, name: str, version: int) -> dict[str, Any]:
    """Return the members of the document of an array, which is in a file of this name and of this version of zarr.

    Raises:
        CorruptError: it is no JSON object, has no version, or is too long.
        FormatError: it is of another version.
    """
    if len(data) > LONGEST_DOCUMENT:
        raise CorruptError(f"{name} has {pluralize(len(data), 'bytes')}, more than any array needs")
    node: dict[str, Any] = parse_json(decode_text(data, name), name)
    if (found := member(node, "zarr_format", int, name)) != version:
        raise FormatError(f"{name} is of zarr version {show(found)}, this reads version {version}")
    return node


@add_hint("use another copy of the directory")
def _parse(data: bytes) -> ZarrArray:
    node = parse_zarr(data, ".zarray", 2)
    shape = _sizes(node, "shape", 0)
    chunks = _sizes(node, "chunks", 1)
    if len(shape) != len(chunks):
        raise CorruptError(f".zarray: the shape has {pluralize(len(shape), 'axes')} and a chunk has {len(chunks)}")
    dtype, big_endian = _dtype(node)
    if node.get("filters") not in (None, []):
        hint = "write the array again without filters"
        raise UnsupportedError(".zarray names filters, which treering cannot decode", hint=hint)
    compressor = _compressor(node)
    array = ZarrArray(
        shape=shape,
        chunks=chunks,
        dtype=dtype,
        big_endian=big_endian,
        compressor=compressor,
        order=_choice(node, "order", ("C", "F")),
        separator=_choice(node, "dimension_separator", (".", "/")) if "dimension_separator" in node else ".",
        marker=_marker(node),
    )
    check_padding(array)
    return array


_parse_again: Final = functools.lru_cache(maxsize=2048)(_parse)


def _sizes(node: dict[str, Any], name: str, least: int) -> tuple[int, ...]:
    sizes = member(node, name, list, ".zarray")
    if len(sizes) > _MOST_AXES:
        count = pluralize(len(sizes), "axes are")
        raise UnsupportedError(f".zarray: {count} more than {_MOST_AXES}, the maximum of numpy and jax")
    for size in sizes:
        if type(size) is not int or not least <= size < _SIZE_LIMIT:
            raise CorruptError(f".zarray: {show(size)} in {name!r} is not a size")
    return tuple(sizes)


def check_padding(array: ZarrArray) -> None:
    """Refuse chunks that are nearly all padding: they would take memory that no item needs.

    Raises:
        UnsupportedError: they are.
    """
    shape, chunks = array.shape, array.chunks
    most = _MOST_PADDING if array.compressor is None else _MOST_PACKED_PADDING
    used = math.prod(map(min, shape, chunks))
    if used and math.prod(chunks) > max(_FREE_ITEMS, most * used):
        problem = f"chunks of shape {chunks} for an array of shape {shape} are nearly all padding"
        raise UnsupportedError(problem, hint="write the array again with smaller chunks")


def _dtype(node: dict[str, Any]) -> tuple[str, bool]:
    if type(node.get("dtype")) is list:
        raise UnsupportedError(".zarray: its items are records of several fields, which jax cannot hold")
    text = member(node, "dtype", str, ".zarray")
    if (found := _READ.get(text)) is None:
        raise UnsupportedError(f".zarray: the dtype {show(text)} is not supported")
    return found


def _compressor(node: dict[str, Any]) -> str | None:
    if "compressor" not in node:
        raise CorruptError(".zarray has no member 'compressor'")
    if (config := node["compressor"]) is None:
        return None
    if type(config) is not dict or type(config.get("id")) is not str:
        raise CorruptError(".zarray: its compressor is not an object with an 'id'")
    return check_compressor(config)


def _choice(node: dict[str, Any], name: str, choices: tuple[str, ...]) -> str:
    if (text := member(node, name, str, ".zarray")) not in choices:
        raise CorruptError(f".zarray: {name!r} is {show(text)}, but must be one of {', '.join(choices)}")
    return text


def _marker(node: dict[str, Any]) -> str | None:
    if "treering" not in node:
        return None
    text = member(node, "treering", str, ".zarray")
    if not is_attempt(text):
        raise CorruptError(f".zarray: the marker {show(text)} is unknown")
    return text


# -------------------------------------------------------------------------------------------------------------- writing


@functools.lru_cache(maxsize=2048)
def zarray_bytes(array: ZarrArray) -> bytes:
    """Return the ``.zarray`` of an array: one line, members sorted, as TensorStore writes it, with our marker.

    Example:
        >>> zarray_bytes(ZarrArray(shape=(), chunks=(), dtype="int32"))[:60]
        b'{"chunks":[],"compressor":null,"dimension_separator":".","dt'
    """
    marker = f'"treering":"{array.marker}",' if array.marker else ""
    dtype = (_BIG_ENDIAN if array.big_endian else _WRITTEN)[array.dtype]
    return (
        f'{{"chunks":[{_listed(array.chunks)}],"compressor":{array.compressor or "null"},'
        f'"dimension_separator":"{array.separator}","dtype":"{dtype}","fill_value":null,"filters":null,'
        f'"order":"{array.order}","shape":[{_listed(array.shape)}],{marker}"zarr_format":2}}'
    ).encode("ascii")


def _listed(sizes: tuple[int, ...]) -> str:
    return ",".join(map(str, sizes))


def is_stored(name: object) -> bool:
    """Tell whether arrays of a dtype are stored as what they are.

    Example:
        >>> is_stored("bfloat16"), is_stored("uint4"), is_stored(None)
        (True, False, False)
    """
    return isinstance(name, str) and name in _WRITTEN


@functools.lru_cache(maxsize=256)
def stored_dtype(name: str) -> str:
    """Return the dtype under which items of a dtype are stored: itself, or the unsigned int of its size.

    Raises:
        UnsupportedError: no file may hold the dtype, or there is no int of its size.

    Example:
        >>> stored_dtype("bfloat16"), stored_dtype("uint4"), stored_dtype("datetime64[ns]")
        ('bfloat16', 'uint8', 'uint64')
    """
    if name in _WRITTEN:
        return name
    if (dtype := lookup(name)) is None or dtype.itemsize > 8:
        raise UnsupportedError(
            f"zarr v2 cannot represent the dtype {name[:60]}", hint="convert it to float64 or complex128"
        )
    return f"uint{8 * dtype.itemsize}"


def check_compressor(config: Mapping[str, Any]) -> str:
    """Return the configuration of a compressor as the text that stands in ``.zarray``.

    Raises:
        UnsupportedError: it is no JSON, has no text ``id``, or is longer than any configuration is.

    Example:
        >>> check_compressor({"level": 3, "id": "zstd"})
        '{"id":"zstd","level":3}'
    """
    if not isinstance(config, Mapping):
        raise UnsupportedError(f"compressor is {show(config)}, but must be a mapping", hint=_EXAMPLE)
    node = dict(config)
    check_json(node, "compressor")
    if type(node.get("id")) is not str or not node["id"]:
        raise UnsupportedError("compressor has no 'id', the name of a codec", hint=_EXAMPLE)
    text = json.dumps(node, sort_keys=True, separators=(",", ":"))
    if len(text) > _LONGEST_COMPRESSOR:
        raise UnsupportedError(f"compressor takes {pluralize(len(text), 'bytes')} as JSON, more than any codec needs")
    return text


# --------------------------------------------------------------------------------------------------------------- chunks


def grid_of(array: ZarrArray) -> tuple[int, ...]:
    """Return how many chunks there are along each axis: none along one of size zero."""
    if array.shape == array.chunks:
        return (1,) * len(array.shape)  # most leaves lie in one chunk
    return tuple(-(-size // chunk) for size, chunk in zip(array.shape, array.chunks, strict=True))


def chunk_count(array: ZarrArray) -> int:
    """Return how many chunks there are: one where there are no axes, none where an axis has size zero."""
    return math.prod(grid_of(array))


def chunk_names(array: ZarrArray) -> Iterator[str]:
    """Yield the names of the chunk files in C order; with "/" between the numbers they are paths."""
    if (count := chunk_count(array)) == 1:
        return iter((array.separator.join("0" * len(array.shape)) or "0",))
    return map(functools.partial(chunk_name, array), range(count))


def chunk_name(array: ZarrArray, number: int) -> str:
    """Return the name of one chunk file, by its number in C order.

    Example:
        >>> chunk_name(ZarrArray(shape=(4, 4), chunks=(2, 2), dtype="int8", separator="/"), 2)
        '1/0'
    """
    return array.separator.join(map(str, place_of(grid_of(array), number))) or "0"


def number_of_chunk(array: ZarrArray, name: str) -> int | None:
    """Return the number of the chunk that a file of that name holds; None where it is no chunk of this grid.

    Example:
        >>> array = ZarrArray(shape=(4, 4), chunks=(2, 2), dtype="int8")
        >>> number_of_chunk(array, "1.0"), number_of_chunk(array, "2.0"), number_of_chunk(array, "01.0")
        (2, None, None)
    """
    grid, parts = grid_of(array) or (1,), name.split(array.separator)
    if len(parts) != len(grid) or not all(map(_INDEX.fullmatch, parts)):
        return None
    places = tuple(map(int, parts))
    number = functools.reduce(lambda above, axis: above * axis[0] + axis[1], zip(grid, places, strict=True), 0)
    return number if all(map(operator.lt, places, grid)) else None


def chunk_box(array: ZarrArray, number: int) -> Box:
    """Return the part of the array that a chunk holds, by its number in C order."""
    if array.shape == array.chunks:
        return whole(array.shape)
    places = place_of(grid_of(array), number)
    return tuple(
        (place * chunk, min((place + 1) * chunk, size))
        for place, chunk, size in zip(places, array.chunks, array.shape, strict=True)
    )


def is_whole(array: ZarrArray, number: int) -> bool:
    """Tell whether a chunk is full of items: it does not reach beyond the end of the array.

    Example:
        >>> array = ZarrArray(shape=(5,), chunks=(2,), dtype="int8")
        >>> is_whole(array, 1), is_whole(array, 2)
        (True, False)
    """
    return shape_of(chunk_box(array, number)) == array.chunks


def chunk_bytes(array: ZarrArray) -> int:
    """Return how many bytes the items of a full chunk take, before any compressor."""
    return math.prod(array.chunks) * item_dtype(array).itemsize


def item_dtype(array: ZarrArray) -> Dtype:
    """Return the dtype of what lies in the chunks.

    Raises:
        UnsupportedError: no file may hold it.
    """
    if (dtype := lookup(array.dtype)) is None:
        raise UnsupportedError(f"zarr v2 cannot represent the dtype {array.dtype[:60]}")
    return dtype


def place_of(grid: tuple[int, ...], number: int) -> list[int]:
    """Return where the chunk of a number stands in a grid.

    Example:
        >>> place_of((2, 3), 4)
        [1, 1]
    """
    places = []
    for count in reversed(grid):
        number, place = divmod(number, count)
        places.append(place)
    return places[::-1]
