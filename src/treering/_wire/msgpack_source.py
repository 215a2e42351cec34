"""A msgpack file as a source of leaves: its state dict, whose arrays are in memory once it is read. No jax."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, Final

from treering._arrays.incoming import StoredArrays
from treering._arrays.source import Source, held_index
from treering._codec.gzip import GZIP_MAGIC, decompress
from treering._codec.msgpack.scan import Scanner
from treering._codec.msgpack.views import Views
from treering._codec.msgpack.window import WINDOW_BYTES
from treering._format.index import Chunks, Container, DataFile, Index, LeafType, Token
from treering._format.listing import list_msgpack
from treering._format.records import LeafRecord
from treering._printable import show_path
from treering._store.api import Reader
from treering._store.opened_files import OpenedFiles
from treering._store.resolve import open_file
from treering._values.boxes import Box, boxes_of_range, size_of
from treering._values.checksums import block_bytes
from treering._values.dtypes import itemsize_of
from treering._values.keys import Trail, join_key, unwind
from treering._wire.planned_arrays import read_state
from treering.errors import Corrupt, Format

_SAME: Final = ("bool", "int", "float", "complex", "str", "bytes")
_KINDS: Final = {"NoneType": "none", "ndarray": "numpy"} | dict(zip(_SAME, _SAME, strict=True))


def open_msgpack(path: str | os.PathLike[str], files: contextlib.ExitStack, *, mapped: bool) -> Source:
    """Read a msgpack file, or one in gzip form.

    Raises:
        Corrupt, Format, StoreFailed: it is damaged; the system refuses.
    """
    file = files.enter_context(open_file(path))
    try:
        state = _read(file, mapped=mapped)
    except (Corrupt, Format) as error:
        error.message = f"{show_path(os.fspath(path))!r}: {error.message}"
        raise
    structure, keys, leaves = _flatten(state)
    kinds = [_KINDS.get(type(leaf).__name__, "numpy scalar" if hasattr(leaf, "dtype") else "opaque") for leaf in leaves]
    index, arrays = held_index(structure, keys, kinds, leaves)
    opened = OpenedFiles(file)
    return Source(index, arrays, structured=False, raw_keys=True, mapped=mapped, held=True, opened=opened)


def stream_msgpack(path: str | os.PathLike[str], files: contextlib.ExitStack) -> Source:
    """Open a msgpack file to read its arrays by range; ``files`` closes it.

    Raises:
        Corrupt, Format, StoreFailed: it is damaged; the system refuses.
    """
    file = files.enter_context(open_file(path))
    try:
        root = list_msgpack(file.read(0, min(file.size, WINDOW_BYTES)), file.size, file.read).root
    except (Corrupt, Format) as error:
        error.message = f"{show_path(os.fspath(path))!r}: {error.message}"
        raise
    index = index_records(root)
    arrays = StoredArrays(index, [file], lambda _: None, threads=file.threads)
    return Source(index, arrays, structured=False, raw_keys=True, opened=OpenedFiles(file))


def index_records(root: Any) -> Index:
    """Return the index of a state dict that has a record in place of every leaf that takes room.

    Example:
        >>> record = LeafRecord(kind="array", dtype="int8", shape=(3,), nbytes=3, offset=7)
        >>> index = index_records({"w": record, "step": 1})
        >>> index.keys, index.type_of(0).shape, index.values
        (['w', 'step'], (3,), {1: 1})
    """
    structure, keys, leaves = _flatten(root)
    types: dict[LeafType, int] = {}
    leaf_types: list[int] = []
    values: dict[int, Any] = {}
    rows: list[tuple[int, Box | None, int, int]] = []
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, LeafRecord):
            kind = "numpy" if leaf.is_array else leaf.kind
            shape = (leaf.nbytes,) if leaf.shape is None else leaf.shape
            found = LeafType(kind=kind, dtype=leaf.dtype or "uint8", shape=shape)
            rows += [(number, *row) for row in _rows_of(leaf, shape)]
        else:
            found, values[number] = LeafType(kind=_KINDS.get(type(leaf).__name__, "opaque")), leaf
        leaf_types.append(types.setdefault(found, len(types)))
    owners, boxes, offsets, sizes = map(list, zip(*rows, strict=True)) if rows else ([], [], [], [])
    files = [0] * len(rows)
    chunks = Chunks(
        leaf=owners, box=boxes, file=files, offset=offsets, nbytes=sizes, block=list(map(block_bytes, sizes))
    )
    return Index(
        attempt="", structure=structure, keys=keys, types=tuple(types), leaf_types=leaf_types, values=values,
        chunks=chunks, files=[DataFile(name="", nbytes=0, header=0, digest=None)], verified=False,
    )  # fmt: skip


def _rows_of(record: LeafRecord, shape: tuple[int, ...]) -> Iterator[tuple[Box | None, int, int]]:
    """Yield where the boxes of a leaf lie: box, offset and bytes; a flat piece of an array is several boxes."""
    if not record.parts:
        yield None, record.offset or 0, record.nbytes
    itemsize, done = itemsize_of(record.dtype), 0
    for offset, nbytes in record.parts:
        at = offset
        for box in boxes_of_range(shape, done, done + nbytes // itemsize):
            size = size_of(box) * itemsize
            yield box, at, size
            at += size
        done += nbytes // itemsize


def _read(file: Reader, *, mapped: bool) -> Any:
    first = file.read(0, min(file.size, WINDOW_BYTES))
    if first.startswith(GZIP_MAGIC):
        data = decompress(file.read(0, file.size), None)
        return Scanner(data[:WINDOW_BYTES], len(data), lambda at, n: data[at : at + n], Views(data)).run()
    return read_state(file, first, mapped=mapped)


def _flatten(state: Any) -> tuple[list[Token], list[str], list[Any]]:
    """Return the containers, keys and leaves of nested dicts, lists and tuples, in order."""
    structure: list[Token] = []
    keys: list[str] = []
    leaves: list[Any] = []
    pending: list[tuple[Trail, Any]] = [(None, state)]
    while pending:
        trail, value = pending.pop()
        if isinstance(value, dict | list | tuple):
            names = tuple(value) if isinstance(value, dict) else tuple(range(len(value)))
            children = value.values() if isinstance(value, dict) else value
            structure.append(Container(node=type(value).__name__, keys=names))
            below = [((trail, str(name)), child) for name, child in zip(names, children, strict=True)]
            pending.extend(reversed(below))
            continue
        keys.append(join_key(unwind(trail)))
        leaves.append(value)
        if structure and isinstance(structure[-1], int):
            structure[-1] += 1
        else:
            structure.append(1)
    return structure, keys, leaves
