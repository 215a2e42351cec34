"""Zarr arrays of either version: their documents, their chunks, also inside of shards, and what both are as leaves.

What a chunk of zarr 3 goes through is said in the terms of zarr 2, whose decoders then read it; shards are taken apart
here.

Source: https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html, and the pages of its codecs.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import struct
import sys
from array import array
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from treering._codec.compression import DAMAGED, zstd_decompress_unsized
from treering._codec.documents import add_hint, decode_text, member, parse_json, show
from treering._codec.zarr import (
    LONGEST_DOCUMENT,
    ZarrArray,
    check_padding,
    chunk_box,
    chunk_bytes,
    chunk_count,
    chunk_name,
    grid_of,
    is_stored,
    is_whole,
    parse_zarr,
    parse_zarray,
    place_of,
)
from treering._foreign.foreign_tree import ANOTHER_COPY, ByteRange, Fetch, FolderFiles, ForeignLeaf, GridLeaf
from treering._foreign.ocdbt import Value
from treering._format.index import LeafType
from treering._format.leaf_values import check_shape
from treering._values.boxes import Box
from treering._values.checksums import crc32c
from treering._values.human import pluralize
from treering.errors import CorruptError, UnsupportedError

ZARR3: Final = "zarr.json"
"""The file that makes a folder a zarr 3 array."""

ZARR2: Final = ".zarray"
"""The file that makes a folder a zarr 2 array."""

Find: TypeAlias = Callable[[str], ByteRange | None]
"""Returns the bytes of a file of the array by its name; None where there is none."""

_ABSENT: Final = (1 << 64) - 1
_CHECKSUM: Final = 4
_ENTRY: Final = 16
_SLACK: Final = 64 << 10
_COMPRESSORS: Final = frozenset({"zstd", "gzip", "blosc"})
_AGAIN: Final = "write the array again without it"


class _Shard(NamedTuple):
    """How the chunks lie in a file."""

    files: ZarrArray
    """The array as if each file were one chunk."""
    big_endian: bool
    """Whether its index is."""
    checked: bool
    """Whether a CRC-32C follows its index."""
    at_end: bool


class ZarrDocument(NamedTuple):
    """What the document of an array says.

    Example:
        >>> document = {
        ...     "zarr_format": 3, "node_type": "array", "shape": [4], "data_type": "int8", "fill_value": 0,
        ...     "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2]}},
        ...     "chunk_key_encoding": {"name": "default"}, "codecs": [{"name": "bytes"}],
        ... }
        >>> found = parse_zarr_json(json.dumps(document).encode())
        >>> found.layout.chunks, found.file_name(1), found.fill_is_zero
        ((2,), 'c/1', True)
    """

    layout: ZarrArray
    """Its shape and how its chunks are encoded; of a sharded one the chunks inside of the shards."""
    fill_is_zero: bool
    """Whether what was never written is zero."""
    prefix: str = ""
    """What the names of its files begin with."""
    checked: bool = False
    """Whether a CRC-32C follows each chunk."""
    shard: _Shard | None = None

    @property
    def is_apart(self) -> bool:
        """Whether a file holds one chunk and nothing else."""
        return self.shard is None and not self.checked

    def file_name(self, number: int) -> str:
        """Return the name of the file with a chunk, or with a shard, by its number in C order."""
        if not self.layout.shape:
            return self.prefix[:-1] or "0"
        return self.prefix + chunk_name(self.layout if self.shard is None else self.shard.files, number)

    def reader(self, find: Find) -> Fetch:
        """Return what gives the bytes of a chunk by its number."""
        if self.shard is not None:
            return _ShardReader(self, self.shard, find).read
        return functools.partial(_read_chunk, self, find)


@functools.lru_cache(maxsize=1024)
@add_hint(ANOTHER_COPY)
def parse_zarr_json(data: bytes) -> ZarrDocument:
    """Return what a ``zarr.json`` says.

    Raises:
        CorruptError: it is no JSON, lacks a member, or says what cannot be.
        FormatError: it is of another version of zarr.
        UnsupportedError: a codec, a grid or a dtype that has no reader here.
    """
    node = parse_zarr(data, ZARR3, 3)
    if (kind := member(node, "node_type", str, ZARR3)) != "array":
        raise CorruptError(f"{ZARR3} is of a {show(kind)}, not of an array")
    if node.get("storage_transformers"):
        raise UnsupportedError(f"{ZARR3} names storage transformers", hint=_AGAIN)
    dtype = _dtype(node)
    shape = check_shape(member(node, "shape", list, ZARR3), dtype, ZARR3)
    name, settings = _named(node.get("chunk_grid"), "chunk_grid")
    if name != "regular":
        raise UnsupportedError(f"{ZARR3}: the grid {show(name)} is not supported", hint=_AGAIN)
    outer = _chunk_shape(settings, shape)
    codecs = member(node, "codecs", list, ZARR3)
    prefix, separator = _key_encoding(node)
    layout = ZarrArray(shape=shape, chunks=outer, dtype=dtype, separator=separator)
    shard = None
    name, settings = _named(codecs[0], "codecs") if len(codecs) == 1 else ("", {})
    if name == "sharding_indexed":
        chunks = _chunk_shape(settings, shape)
        if any(whole % part for whole, part in zip(outer, chunks, strict=True)):
            raise CorruptError(f"{ZARR3}: shards of {outer} do not hold whole chunks of {chunks}")
        shard = _shard(settings, layout)
        codecs = member(settings, "codecs", list, ZARR3)
        layout = dataclasses.replace(layout, chunks=chunks)
    layout, checked = _encoded(layout, codecs)
    check_padding(layout)
    return ZarrDocument(layout, _is_zero(node.get("fill_value", 0)), prefix, checked, shard)


def _dtype(node: Any) -> str:
    text: Any = node.get("data_type")
    if not is_stored(text):
        raise UnsupportedError(f"{ZARR3}: the dtype {show(text)} is not supported")
    return str(text)


def _named(node: Any, what: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the settings of a codec or another extension."""
    if type(node) is str:
        return node, {}
    where = f"{ZARR3}: {what!r}"
    settings = member(node, "configuration", dict, where) if type(node) is dict and "configuration" in node else {}
    return member(node, "name", str, where), settings


def _chunk_shape(settings: dict[str, Any], shape: tuple[int, ...]) -> tuple[int, ...]:
    chunks = check_shape(member(settings, "chunk_shape", list, ZARR3), "bool", ZARR3)
    if len(chunks) != len(shape) or 0 in chunks:
        raise CorruptError(f"{ZARR3}: chunks of {chunks} are none of an array of {shape}")
    return chunks


def _shard(settings: dict[str, Any], files: ZarrArray) -> _Shard:
    index = ZarrArray(shape=(1,), chunks=(1,), dtype="uint64")
    index, checked = _encoded(index, member(settings, "index_codecs", list, ZARR3))
    if index.compressor is not None:
        raise UnsupportedError(f"{ZARR3}: the index of its shards is compressed", hint=_AGAIN)
    if (place := settings.get("index_location", "end")) not in ("start", "end"):
        raise CorruptError(f"{ZARR3}: an index of shards at {show(place)}")
    return _Shard(files, index.big_endian, checked, place == "end")


def _encoded(layout: ZarrArray, codecs: list[Any]) -> tuple[ZarrArray, bool]:
    """Return how its chunks are encoded by codecs, and whether a CRC-32C follows each; these stand in this order."""
    left = [_named(codec, "codecs") for codec in codecs]
    axes, order = [*range(len(layout.shape))], "C"
    while left and left[0][0] == "transpose":
        given = left.pop(0)[1].get("order")
        if order == "C" and given in ("F", axes[::-1]):
            order = "F" if len(axes) > 1 else "C"
        elif given not in ("C", axes):
            raise UnsupportedError(f"{ZARR3}: its axes are stored in the order {show(given)}", hint=_AGAIN)
    if not left or left[0][0] != "bytes":
        found = left[0][0] if left else None
        raise UnsupportedError(f"{ZARR3}: the codec {show(found)} is not supported", hint=_AGAIN)
    if (endian := left.pop(0)[1].get("endian", "little")) not in ("little", "big"):
        raise CorruptError(f"{ZARR3}: bytes in the order {show(endian)}")
    compressor = json.dumps({"id": left.pop(0)[0]}) if left and left[0][0] in _COMPRESSORS else None
    checked = bool(left) and left[0][0] == "crc32c"
    if left[checked:]:
        raise UnsupportedError(
            f"{ZARR3}: the codec {show(left[checked][0])} is not supported in this place", hint=_AGAIN
        )
    encoded = dataclasses.replace(layout, big_endian=endian == "big", compressor=compressor, order=order)
    return encoded, checked


def _key_encoding(node: dict[str, Any]) -> tuple[str, str]:
    """Return what the names of files begin with, and what stands between their numbers."""
    name, settings = _named(node.get("chunk_key_encoding"), "chunk_key_encoding")
    if name not in ("default", "v2"):
        raise UnsupportedError(f"{ZARR3}: the key encoding {show(name)} is not supported", hint=_AGAIN)
    separator = settings.get("separator", "/" if name == "default" else ".")
    if separator not in ("/", "."):
        raise CorruptError(f"{ZARR3}: names with the separator {show(separator)}")
    return f"c{separator}" if name == "default" else "", separator


def _is_zero(fill: Any) -> bool:
    parts = fill if type(fill) is list else [fill]
    return all(part is None or (type(part) in (bool, int, float) and not part) for part in parts)


# --------------------------------------------------------------------------------------------------------------- chunks


def _read_chunk(zarr: ZarrDocument, find: Find, number: int) -> bytes | ByteRange | None:
    found = find(zarr.file_name(number))
    return None if found is None else _check_chunk(zarr, found, "a chunk")


def _check_chunk(zarr: ZarrDocument, found: ByteRange, what: str) -> bytes | ByteRange:
    """Return the bytes of a chunk, unless they are far more than it can be, or have another checksum."""
    if found.size > 2 * chunk_bytes(zarr.layout) + _SLACK:
        wanted = pluralize(chunk_bytes(zarr.layout), "bytes")
        raise CorruptError(f"a chunk of {wanted} is stored as {found.size}", hint=DAMAGED)
    return _without_checksum(found.read(0, found.size), what) if zarr.checked else found


def _without_checksum(data: bytes, what: str) -> bytes:
    """Return what a CRC-32C follows, if it is that of the bytes."""
    body = data[:-_CHECKSUM]
    if len(data) < _CHECKSUM or crc32c(body) != int.from_bytes(data[-_CHECKSUM:], "little"):
        raise CorruptError(f"{what} has another checksum than it was written with", hint=DAMAGED)
    return body


class _ShardReader:
    """Gives the chunks of a sharded array; the indices of the last few shards are kept."""

    def __init__(self, zarr: ZarrDocument, shard: _Shard, find: Find) -> None:
        self._zarr = zarr
        self._shard = shard
        self._find = find
        self._counts = [whole // part for whole, part in zip(shard.files.chunks, zarr.layout.chunks, strict=True)]
        self._index_bytes = _ENTRY * math.prod(self._counts) + _CHECKSUM * shard.checked
        self._files = grid_of(shard.files)
        self._grid = grid_of(zarr.layout)
        self._open = functools.lru_cache(maxsize=16)(self._open_shard)

    def read(self, number: int) -> bytes | ByteRange | None:
        """Return the bytes of a chunk, or where they are; None where it is not there."""
        file = inside = 0
        for place, count, files in zip(place_of(self._grid, number), self._counts, self._files, strict=True):
            file = file * files + place // count
            inside = inside * count + place % count
        if (shard := self._open(file)) is None:
            return None
        found, index = shard
        offset, nbytes = index[2 * inside : 2 * inside + 2]
        if offset == nbytes == _ABSENT:
            return None
        if offset + nbytes > found.size:
            raise CorruptError(f"a chunk of the shard {self._zarr.file_name(file)!r} lies behind its end", hint=DAMAGED)
        part = ByteRange(nbytes, lambda start, count: found.read(offset + start, count))
        return _check_chunk(self._zarr, part, "a chunk of a shard")

    def _open_shard(self, file: int) -> tuple[ByteRange, array[int]] | None:
        name = self._zarr.file_name(file)
        if (found := self._find(name)) is None:
            return None
        if (size := self._index_bytes) > found.size:
            raise CorruptError(f"the shard {name!r} is shorter than its index", hint=DAMAGED)
        data = found.read(found.size - size if self._shard.at_end else 0, size)
        if self._shard.checked:
            data = _without_checksum(data, f"the index of the shard {name!r}")
        index = array("Q", data)
        if self._shard.big_endian != (sys.byteorder == "big"):
            index.byteswap()
        return found, index


_NUMBERS: Final = {"int64": ("int", "<q"), "float64": ("float", "<d"), "bool": ("bool", "<?")}


class ZarrLeaf(NamedTuple):
    """An array as its document describes it."""

    document: ZarrDocument
    fetch: Fetch
    """Returns the bytes of a chunk by its number, or where they are; None where there is none."""
    located: bool
    """Whether it is known where its chunks lie, without a look at any file."""

    def leaf(self, kind: LeafType, *, absent_is_zero: bool, data: FolderFiles | None = None) -> ForeignLeaf:
        """Return it as a leaf of a kind.

        Args:
            kind: the kind.
            absent_is_zero: whether what has the fill value was not written.
            data: where raw chunks lie; None: they are read as all others are.
        """
        layout = self.document.layout
        is_raw = self.document.is_apart and layout.plain and layout.dtype != "bool"
        if data is not None and is_raw and (pieces := self._pieces(data, layout)):
            return ForeignLeaf(kind, pieces=pieces)
        zero = absent_is_zero and self.document.fill_is_zero
        return ForeignLeaf(kind, grid=GridLeaf(layout, self.fetch, zero, self.located))

    def _pieces(self, data: FolderFiles, layout: ZarrArray) -> list[tuple[Box | None, int, int]]:
        """Return where the chunks lie as they are in memory; nothing where one does not."""
        pieces: list[tuple[Box | None, int, int]] = []
        for number in range(chunk_count(layout)):
            found = self.fetch(number) if is_whole(layout, number) else None
            if not isinstance(found, ByteRange) or found.file is None or found.size != chunk_bytes(layout):
                return []
            pieces.append((chunk_box(layout, number), data.number_of(found), found.offset))
        return pieces

    def number(self) -> ForeignLeaf | None:
        """Return a Python number that is stored as an array without axes; None where it is none of those."""
        layout = self.document.layout
        packed = layout.compressor is not None
        if layout.dtype not in _NUMBERS or layout.shape or layout.big_endian:
            return None
        if (found := self.fetch(0)) is None or (packed and json.loads(layout.compressor or "{}")["id"] != "zstd"):
            return None
        data = found if isinstance(found, bytes) else found.read(0, found.size)
        kind, form = _NUMBERS[layout.dtype]
        items = zstd_decompress_unsized(data, struct.calcsize(form)) if packed else data
        if len(items) != struct.calcsize(form):
            raise CorruptError(f"a number is stored as {pluralize(len(items), 'bytes')}")
        if kind == "bool" and items[0] > 1:
            raise CorruptError("a bool is neither 0 nor 1")
        return ForeignLeaf(LeafType(kind=kind), struct.unpack(form, items)[0])


def find_array(find: Find, *, zarr3: bool, located: bool = False) -> ZarrLeaf | None:
    """Return an array of a version of zarr; None where its document is not there.

    Args:
        find: returns the bytes of a file of the array by its name.
        zarr3: whether it is of version 3, not 2.
        located: whether that needs a look at no file.

    Raises:
        CorruptError, FormatError, UnsupportedError: as the document's reader says.
        StoreError: the store refuses.
    """
    if (document := find(ZARR3 if zarr3 else ZARR2)) is None:
        return None
    data = document.read(0, min(document.size, LONGEST_DOCUMENT + 1))
    array = parse_zarr_json(data) if zarr3 else _parse_zarr2(data)
    return ZarrLeaf(array, array.reader(find), located and array.is_apart)


@functools.lru_cache(maxsize=1024)
def _parse_zarr2(data: bytes) -> ZarrDocument:
    layout = parse_zarray(data)
    fill = parse_json(decode_text(data, ZARR2), ZARR2).get("fill_value")
    return ZarrDocument(layout, fill is None or fill in (0, False))


def find_jax_array(files: FolderFiles, find: Find, *, zarr3: bool) -> ForeignLeaf:
    """Return an array as jax writes it, which stores no chunk of zeros; ``zarr3`` is the version to look for first.

    Raises:
        CorruptError, FormatError, UnsupportedError, StoreError: as `find_array`; ``CorruptError`` also where there is
            none.
    """
    if (found := find_array(find, zarr3=zarr3) or find_array(find, zarr3=not zarr3)) is None:
        raise CorruptError("its array is missing", hint=ANOTHER_COPY)
    kind = LeafType(kind="jax", dtype=found.document.layout.dtype, shape=found.document.layout.shape)
    return found.leaf(kind, absent_is_zero=True, data=files)


def finder(files: FolderFiles, folder: str, values: Mapping[str, Value] | None, name: str) -> Find:
    """Return what finds the files of an array.

    Args:
        files: the files of all.
        folder: empty, or the folder in it with the arrays, with a ``/`` at its end.
        values: the keys of the database there; None where each array is a folder.
        name: what the names of its files, or its keys, begin with; empty for an array that is the whole tree.
    """
    prefix = f"{name}/" if name else ""
    if values is None:
        return lambda file: files.find(f"{folder}{prefix}{file}")
    return functools.partial(_find_value, files, values, prefix)


def _find_value(files: FolderFiles, values: Mapping[str, Value], prefix: str, file: str) -> ByteRange | None:
    if (value := values.get(prefix + file)) is None:
        return None
    if isinstance(value, bytes):
        return ByteRange(len(value), functools.partial(_cut, value))
    return ByteRange(value.length, lambda at, n: files.read(value.file, value.offset + at, n), value.file, value.offset)


def _cut(data: bytes, offset: int, count: int) -> bytes:
    if offset + count > len(data):
        raise CorruptError("a value ends too early", hint=ANOTHER_COPY)
    return data[offset : offset + count]
