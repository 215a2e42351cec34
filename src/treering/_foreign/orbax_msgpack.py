"""The file ``checkpoint`` of Orbax's old items: a tree on flax's wire; texts stand for arrays that lie beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from treering._codec.documents import decode_text
from treering._codec.msgpack.window import WINDOW_BYTES
from treering._foreign.folder_files import ByteRange, FolderFiles
from treering._foreign.foreign_tree import ForeignLeaf
from treering._foreign.leaf_paths import EMPTY, Containers, Step, most_steps
from treering._format.index import LARGE_VALUE, MAX_LEVELS, Container, LeafType
from treering._format.listing import list_msgpack
from treering._format.records import LeafRecord
from treering._printable import kind_of
from treering._values.boxes import Box, boxes_of_range, size_of
from treering._values.dtypes import itemsize_of
from treering.errors import Unsupported

MSGPACK: Final = "checkpoint"
"""The file."""

# TensorFlow has a text of that name; this is a map.
_MAPS: Final = frozenset([*range(0x80, 0x90), 0xDE, 0xDF])
_ELSEWHERE: Final = re.compile(r"(?:PLACEHOLDER|AGGREGATED)://(.+)", re.DOTALL)
_PYTHON: Final = {type(None): "none"} | {kind: kind.__name__ for kind in (bool, int, float, complex, str, bytes)}


class Elsewhere(NamedTuple):
    """Stands for an array that lies beside the file."""

    name: str
    """Its name."""


class MsgpackTree(NamedTuple):
    """What the file holds."""

    entries: list[tuple[tuple[Step, ...], ForeignLeaf | Container | Elsewhere]]
    """Its leaves and empty containers by their paths."""
    containers: Containers
    """Its tuples by their paths."""


def find_msgpack(files: FolderFiles, folder: str) -> ByteRange | None:
    """Return the file of an item, by its first byte; None where there is none.

    Raises:
        Corrupt: it is a link that leads out of the folder.
        StoreFailed: the store refuses.
    """
    try:
        found = files.find(folder + MSGPACK)
    except (IsADirectoryError, NotADirectoryError):
        return None
    return found if found is not None and found.size and found.read(0, 1)[0] in _MAPS else None


def read_msgpack_tree(files: FolderFiles, found: ByteRange) -> MsgpackTree:
    """Return what the file holds; its arrays are not read.

    Raises:
        Corrupt, Format: it is damaged.
        Unsupported: it holds what has no form here.
        StoreFailed: the store refuses.
    """
    root = list_msgpack(found.read(0, min(found.size, WINDOW_BYTES)), found.size, found.read).root
    tree = MsgpackTree([], {})
    waiting: list[tuple[tuple[Step, ...], Any]] = [((), root)]
    left = most_steps(found.size)
    while waiting:
        path, node = waiting.pop()
        left -= len(path)
        if len(path) > MAX_LEVELS or left < 0:
            raise Unsupported(f"{found.file}: containers are nested too deep")
        if not node or not isinstance(node, dict | list | tuple):
            tree.entries.append((path, _leaf(node, files, found)))
            continue
        if isinstance(node, tuple):
            places = tuple(range(len(node)))
            tree.containers[tuple(name for name, _ in path)] = Container(node="tuple", keys=places)
        items = node.items() if isinstance(node, dict) else enumerate(node)
        listed = not isinstance(node, dict)
        waiting.extend(reversed([((*path, (str(key), listed)), child) for key, child in items]))
    return tree


def _leaf(node: Any, files: FolderFiles, found: ByteRange) -> ForeignLeaf | Container | Elsewhere:
    if isinstance(node, dict | list | tuple):
        return EMPTY[type(node).__name__.title()]
    text = node if type(node) is str else ""
    if isinstance(node, LeafRecord) and node.kind == "str" and node.nbytes <= LARGE_VALUE:
        text = decode_text(found.read(node.offset or 0, node.nbytes), f"{found.file}: a text")
    if (match := _ELSEWHERE.fullmatch(text)) is not None:
        return Elsewhere(match[1])
    if not isinstance(node, LeafRecord):
        if (kind := _PYTHON.get(type(node))) is None:
            raise Unsupported(f"{found.file} holds {kind_of(node)}, which has no form here")
        return ForeignLeaf(LeafType(kind=kind), node)
    shape = (node.nbytes,) if node.shape is None else node.shape
    kind = "numpy" if node.kind == "array" else node.kind
    leaf = LeafType(kind=kind, dtype=node.dtype or "uint8", shape=shape)
    number = files.number_of(found)
    return ForeignLeaf(leaf, pieces=[(box, number, offset) for box, offset in _pieces(node, shape)])


def _pieces(record: LeafRecord, shape: tuple[int, ...]) -> Iterator[tuple[Box | None, int]]:
    """Yield the boxes of an array in their order, and where they lie; a large one has several parts."""
    if not record.parts:
        yield None, record.offset or 0
    itemsize, first = itemsize_of(record.dtype), 0
    for offset, nbytes in record.parts:
        at = offset
        for box in boxes_of_range(shape, first, first + nbytes // itemsize):
            yield box, at
            at += size_of(box) * itemsize
        first += nbytes // itemsize
