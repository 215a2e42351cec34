"""A msgpack file as a source of leaves: its state dict, whose arrays are in memory once it is read. No jax."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Final

from treering._arrays.source import Source, held_index
from treering._codec.gzip import GZIP_MAGIC, decompress
from treering._codec.msgpack.scan import Scanner
from treering._codec.msgpack.views import Views
from treering._codec.msgpack.window import WINDOW_BYTES
from treering._format.index import Chunks, Container, Index, LeafType, Token
from treering._format.records import LeafRecord
from treering._store.api import Reader
from treering._store.resolve import open_file
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
    del files  # nothing stays open
    try:
        with open_file(path) as file:
            state = _read(file, mapped=mapped)
    except (Corrupt, Format) as error:
        error.message = f"{os.fspath(path)!r}: {error.message}"
        raise
    structure, keys, leaves = _flatten(state)
    kinds = [_KINDS.get(type(leaf).__name__, "numpy scalar" if hasattr(leaf, "dtype") else "opaque") for leaf in leaves]
    index, arrays = held_index(structure, keys, kinds, leaves)
    return Source(index, arrays, structured=False, raw_keys=True, mapped=mapped, held=True)


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
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, LeafRecord):
            kind = "numpy" if leaf.is_array else leaf.kind
            found = LeafType(
                kind=kind, dtype=leaf.dtype or "uint8", shape=(leaf.nbytes,) if leaf.shape is None else leaf.shape
            )
        else:
            found, values[number] = LeafType(kind=_KINDS.get(type(leaf).__name__, "opaque")), leaf
        leaf_types.append(types.setdefault(found, len(types)))
    chunks = Chunks(leaf=(), box=(), file=(), offset=(), nbytes=(), block=())
    return Index(
        attempt="", structure=structure, keys=keys, types=tuple(types), leaf_types=leaf_types, values=values,
        chunks=chunks, verified=False,
    )  # fmt: skip


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
