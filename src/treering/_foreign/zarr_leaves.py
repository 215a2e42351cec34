"""Zarr arrays of either version as leaves: in an OCDBT database, or in folders of files."""

from __future__ import annotations

import functools
import io
import json
import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from treering._codec import zstd
from treering._codec.chunk_reader import ChunkReader
from treering._codec.documents import decode_text, parse_json
from treering._codec.zarr import ZarrArray, chunk_name, parse_zarray
from treering._foreign.folder_files import ByteRange, FolderFiles
from treering._foreign.foreign_tree import ForeignLeaf
from treering._foreign.ocdbt import Value
from treering._foreign.zarr3 import DOCUMENT, Find, parse_zarr_json, read_stored
from treering._format.index import LeafType
from treering._values.human import pluralize
from treering.errors import Corrupt

if TYPE_CHECKING:
    from treering._foreign.grid_arrays import GridLeaf

ZARR2: Final = ".zarray"
"""The file that makes a folder a zarr 2 array."""

_LARGEST_DOCUMENT: Final = 1 << 20
_NUMBERS: Final = {"int64": ("int", "<q"), "float64": ("float", "<d"), "bool": ("bool", "<?")}


class ZarrLeaf(NamedTuple):
    """An array as its document describes it."""

    layout: ZarrArray
    fetch: Callable[[int], bytes | None]
    """Returns the bytes of a chunk by its number, None where there is none."""
    fill_is_zero: bool
    """Whether what was never written is zero."""

    def leaf(self, kind: LeafType, *, absent_is_zero: bool) -> ForeignLeaf:
        """Return it as a leaf of a kind."""
        zero = absent_is_zero and self.fill_is_zero
        return ForeignLeaf(kind, grid=functools.partial(_grid, self.layout, self.fetch, zero))

    def number(self) -> ForeignLeaf | None:
        """Return a Python number that is stored as an array without axes; None where it is none of those."""
        layout = self.layout
        packed = layout.compressor is not None
        if layout.dtype not in _NUMBERS or layout.shape or layout.big_endian:
            return None
        if (data := self.fetch(0)) is None or (packed and json.loads(layout.compressor or "{}")["id"] != "zstd"):
            return None
        kind, form = _NUMBERS[layout.dtype]
        items = bytearray(struct.calcsize(form))
        if packed:
            zstd.decompress(ChunkReader(io.BytesIO(data).read, len(data)), memoryview(items))
        elif len(data) == len(items):
            items[:] = data
        else:
            raise Corrupt(f"a number is stored as {pluralize(len(data), 'bytes')}")
        if kind == "bool" and items[0] > 1:
            raise Corrupt("a bool is neither 0 nor 1")
        return ForeignLeaf(LeafType(kind=kind), struct.unpack(form, items)[0])


def find_array(find: Find, *, zarr3: bool) -> ZarrLeaf | None:
    """Return an array of a version of zarr; None where its document is not there.

    Args:
        find: returns the bytes of a file of the array by its name.
        zarr3: whether it is of version 3, not 2.

    Raises:
        Corrupt, Format, Unsupported: as the document's reader says.
        StoreFailed: the store refuses.
    """
    if (document := find(DOCUMENT if zarr3 else ZARR2)) is None:
        return None
    data = document.read(0, min(document.size, _LARGEST_DOCUMENT + 1))
    if zarr3:
        array = parse_zarr_json(data)
        return ZarrLeaf(array.layout, array.reader(find), array.fill_is_zero)
    layout = parse_zarray(data)
    fill = parse_json(decode_text(data, ZARR2), ZARR2).get("fill_value")
    return ZarrLeaf(layout, functools.partial(_fetch, layout, find), fill is None or fill in (0, False))


def finder(files: FolderFiles, folder: str, values: Mapping[str, Value] | None, name: str) -> Find:
    """Return what finds the files of an array.

    Args:
        files: the files of all.
        folder: empty, or the folder in it with the arrays, with a ``/`` at its end.
        values: the keys of the database there; None where each array is a folder.
        name: what the names of its files, or its keys, begin with.
    """
    if values is None:
        return lambda file: files.find(f"{folder}{name}/{file}")
    return functools.partial(_find_value, files, values, name)


def _find_value(files: FolderFiles, values: Mapping[str, Value], name: str, file: str) -> ByteRange | None:
    if (value := values.get(f"{name}/{file}")) is None:
        return None
    if isinstance(value, bytes):
        return ByteRange(len(value), functools.partial(_cut, value))
    return ByteRange(value.length, lambda start, count: files.read(value.file, value.offset + start, count))


def _cut(data: bytes, offset: int, count: int) -> bytes:
    if offset + count > len(data):
        raise Corrupt("a value ends too early", hint="use another copy of the checkpoint")
    return data[offset : offset + count]


def _fetch(layout: ZarrArray, find: Find, number: int) -> bytes | None:
    found = find(chunk_name(layout, number))
    return None if found is None else read_stored(layout, found)


def _grid(layout: ZarrArray, fetch: Callable[[int], bytes | None], zero: bool) -> GridLeaf:
    from treering._foreign.grid_arrays import GridLeaf

    return GridLeaf(layout, fetch, absent_is_zero=zero)
