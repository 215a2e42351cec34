"""Zarr arrays of either version as leaves: in an OCDBT database, or in folders of files."""

from __future__ import annotations

import functools
import io
import json
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from treering._codec import zstd
from treering._codec.documents import decode_text, parse_json
from treering._codec.zarr import ZarrArray, chunk_box, chunk_bytes, chunk_count, chunk_name, is_whole, parse_zarray
from treering._codec.zstd import ChunkReader
from treering._foreign.folder_files import ByteRange, Fetch, FolderFiles
from treering._foreign.foreign_tree import ForeignLeaf
from treering._foreign.ocdbt import Value
from treering._foreign.zarr3 import DOCUMENT, Find, check_stored, parse_zarr_json
from treering._format.index import LeafType
from treering._values.boxes import Box
from treering._values.human import pluralize
from treering.errors import CorruptError

if TYPE_CHECKING:
    from treering._foreign.grid_arrays import GridLeaf

ZARR2: Final = ".zarray"
"""The file that makes a folder a zarr 2 array."""

_LARGEST_DOCUMENT: Final = 1 << 20
_NUMBERS: Final = {"int64": ("int", "<q"), "float64": ("float", "<d"), "bool": ("bool", "<?")}


class ZarrLeaf(NamedTuple):
    """An array as its document describes it."""

    layout: ZarrArray
    fetch: Fetch
    """Returns the bytes of a chunk by its number, or where they are; None where there is none."""
    fill_is_zero: bool
    """Whether what was never written is zero."""
    is_apart: bool = True
    """Whether a file holds one chunk and nothing else."""
    located: bool = False
    """Whether it is known where its chunks lie, without a look at any file."""

    def leaf(self, kind: LeafType, *, absent_is_zero: bool, data: FolderFiles | None = None) -> ForeignLeaf:
        """Return it as a leaf of a kind.

        Args:
            kind: the kind.
            absent_is_zero: whether what has the fill value was not written.
            data: where raw chunks lie; None: they are read as all others are.
        """
        if data is not None and (pieces := self._pieces(data)):
            return ForeignLeaf(kind, pieces=pieces)
        zero = absent_is_zero and self.fill_is_zero
        return ForeignLeaf(kind, grid=functools.partial(_grid, self.layout, self.fetch, zero, self.located))

    def _pieces(self, data: FolderFiles) -> list[tuple[Box | None, int, int]]:
        """Return where the chunks lie as they are in memory; nothing where one does not."""
        layout = self.layout
        pieces: list[tuple[Box | None, int, int]] = []
        if not (self.is_apart and layout.plain) or layout.dtype == "bool":
            return []
        for number in range(chunk_count(layout)):
            found = self.fetch(number) if is_whole(layout, number) else None
            if not isinstance(found, ByteRange) or found.file is None or found.size != chunk_bytes(layout):
                return []
            pieces.append((chunk_box(layout, number), data.number_of(found), found.offset))
        return pieces

    def number(self) -> ForeignLeaf | None:
        """Return a Python number that is stored as an array without axes; None where it is none of those."""
        layout = self.layout
        packed = layout.compressor is not None
        if layout.dtype not in _NUMBERS or layout.shape or layout.big_endian:
            return None
        if (found := self.fetch(0)) is None or (packed and json.loads(layout.compressor or "{}")["id"] != "zstd"):
            return None
        data = found if isinstance(found, bytes) else found.read(0, found.size)
        kind, form = _NUMBERS[layout.dtype]
        items = bytearray(struct.calcsize(form))
        if packed:
            zstd.decompress(ChunkReader(io.BytesIO(data).read, len(data)), memoryview(items))
        elif len(data) == len(items):
            items[:] = data
        else:
            raise CorruptError(f"a number is stored as {pluralize(len(data), 'bytes')}")
        if kind == "bool" and items[0] > 1:
            raise CorruptError("a bool is neither 0 nor 1")
        return ForeignLeaf(LeafType(kind=kind), struct.unpack(form, items)[0])


def find_array(find: Find, *, zarr3: bool) -> ZarrLeaf | None:
    """Return an array of a version of zarr; None where its document is not there.

    Args:
        find: returns the bytes of a file of the array by its name.
        zarr3: whether it is of version 3, not 2.

    Raises:
        CorruptError, FormatError, UnsupportedError: as the document's reader says.
        StoreError: the store refuses.
    """
    if (document := find(DOCUMENT if zarr3 else ZARR2)) is None:
        return None
    data = document.read(0, min(document.size, _LARGEST_DOCUMENT + 1))
    if zarr3:
        array = parse_zarr_json(data)
        return ZarrLeaf(array.layout, array.reader(find), array.fill_is_zero, array.shard is None and not array.checked)
    layout, fill_is_zero = _parse_zarr2(data)
    return ZarrLeaf(layout, functools.partial(_fetch, layout, find), fill_is_zero)


@functools.lru_cache(maxsize=1024)
def _parse_zarr2(data: bytes) -> tuple[ZarrArray, bool]:
    layout = parse_zarray(data)
    fill = parse_json(decode_text(data, ZARR2), ZARR2).get("fill_value")
    return layout, fill is None or fill in (0, False)


def find_jax_array(files: FolderFiles, find: Find, *, zarr3: bool) -> ForeignLeaf:
    """Return an array as jax writes it, which stores no chunk of zeros; ``zarr3`` is the version to look for first.

    Raises:
        CorruptError, FormatError, UnsupportedError, StoreError: as `find_array`; ``CorruptError`` also where there is
            none.
    """
    if (found := find_array(find, zarr3=zarr3) or find_array(find, zarr3=not zarr3)) is None:
        raise CorruptError("its array is missing", hint="use another copy of the checkpoint")
    kind = LeafType(kind="jax", dtype=found.layout.dtype, shape=found.layout.shape)
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
        raise CorruptError("a value ends too early", hint="use another copy of the checkpoint")
    return data[offset : offset + count]


def _fetch(layout: ZarrArray, find: Find, number: int) -> ByteRange | None:
    found = find(chunk_name(layout, number))
    return None if found is None else check_stored(layout, found)


def _grid(layout: ZarrArray, fetch: Fetch, zero: bool, located: bool) -> GridLeaf:
    from treering._foreign.grid_arrays import GridLeaf

    return GridLeaf(layout, fetch, absent_is_zero=zero, located=located)
