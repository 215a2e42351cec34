"""The file ``checkpoint`` of Orbax's old items: a tree on flax's wire; texts stand for arrays that lie beside it."""

from __future__ import annotations

import re
from typing import Any, Final, TypeAlias

from treering._codec.documents import decode_text
from treering._codec.msgpack.window import WINDOW_BYTES
from treering._foreign.folder_files import ByteRange, FolderFiles
from treering._foreign.foreign_tree import ForeignLeaf
from treering._foreign.leaf_paths import EMPTY, Containers, Step, most_steps
from treering._format.index import LARGE_VALUE, MAX_LEVELS, Container, LeafType
from treering._format.listing import LeafRecord, list_msgpack
from treering._printable import kind_of
from treering.errors import UnsupportedError

MSGPACK: Final = "checkpoint"
"""The file."""

# TensorFlow has a text of that name; this is a map.
_MAPS: Final = frozenset([*range(0x80, 0x90), 0xDE, 0xDF])
_ELSEWHERE: Final = re.compile(r"(?:PLACEHOLDER|AGGREGATED)://(.+)", re.DOTALL)
_PYTHON: Final = {type(None): "none"} | {kind: kind.__name__ for kind in (bool, int, float, complex, str, bytes)}

Path: TypeAlias = tuple[Step, ...]
_Leaf: TypeAlias = ForeignLeaf | Container | str


def find_msgpack(files: FolderFiles, folder: str) -> ByteRange | None:
    """Return the file of an item, by its first byte; None where there is none.

    Raises:
        CorruptError: it is a link that leads out of the folder.
        StoreError: the store refuses.
    """
    try:
        found = files.find(folder + MSGPACK)
    except (IsADirectoryError, NotADirectoryError):
        return None
    return found if found is not None and found.size and found.read(0, 1)[0] in _MAPS else None


def read_msgpack_tree(files: FolderFiles, found: ByteRange) -> tuple[list[tuple[Path, _Leaf]], Containers]:
    """Return the leaves in the file by their paths, and its tuples; a text is the name of an array that lies beside it.

    Raises:
        CorruptError, FormatError: it is damaged.
        UnsupportedError: it holds what has no form here.
        StoreError: the store refuses.
    """
    root = list_msgpack(found.read(0, min(found.size, WINDOW_BYTES)), found.size, found.read).root
    leaves: list[tuple[Path, _Leaf]] = []
    containers: Containers = {}
    waiting: list[tuple[Path, Any]] = [((), root)]
    left = most_steps(found.size)
    while waiting:
        path, node = waiting.pop()
        left -= len(path)
        if len(path) > MAX_LEVELS or left < 0:
            raise UnsupportedError(f"{found.file}: containers are nested too deep")
        if not node or not isinstance(node, dict | list | tuple):
            leaves.append((path, _leaf(node, files, found)))
            continue
        if isinstance(node, tuple):
            places = tuple(range(len(node)))
            containers[tuple(name for name, _ in path)] = Container(node="tuple", keys=places)
        items = node.items() if isinstance(node, dict) else enumerate(node)
        listed = not isinstance(node, dict)
        waiting.extend(reversed([((*path, (str(key), listed)), child) for key, child in items]))
    return leaves, containers


def _leaf(node: Any, files: FolderFiles, found: ByteRange) -> _Leaf:
    if isinstance(node, dict | list | tuple):
        return EMPTY[type(node).__name__.title()]
    text = node if type(node) is str else ""
    if isinstance(node, LeafRecord) and node.kind == "str" and node.nbytes <= LARGE_VALUE:
        text = decode_text(found.read(node.offset or 0, node.nbytes), f"{found.file}: a text")
    if (match := _ELSEWHERE.fullmatch(text)) is not None:
        return match[1]
    if not isinstance(node, LeafRecord):
        if (kind := _PYTHON.get(type(node))) is None:
            raise UnsupportedError(f"{found.file} holds {kind_of(node)}, which has no form here")
        return ForeignLeaf(LeafType(kind=kind), node)
    shape = (node.nbytes,) if node.shape is None else node.shape
    kind = "numpy" if node.kind == "array" else node.kind
    leaf = LeafType(kind=kind, dtype=node.dtype or "uint8", shape=shape)
    if node.parts:
        raise UnsupportedError(
            f"{found.file} holds an array in several parts", hint="load it with Orbax, and save it again"
        )
    return ForeignLeaf(leaf, pieces=[(None, files.number_of(found), node.offset or 0)])
