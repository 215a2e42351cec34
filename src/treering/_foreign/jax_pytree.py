"""Checkpoints of ``jax.experimental.array_serialization.pytree_serialization``.

``pytreedef.json`` has the tree, as a flatbuffer, and says what each leaf is; ``array_store`` is an OCDBT database with
one zarr array for each of them, by its number. jax marks no save as complete, and stores no chunk of zeros.

Source: ``pytree_serialization.py`` and ``_src/export/serialization.py`` of jax; https://flatbuffers.dev/internals.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from treering._codec.documents import add_hint, decode_text, member, parse_json, show
from treering._foreign.foreign_tree import ANOTHER_COPY, FolderFiles, ForeignLeaf, ForeignTree, folder_tree
from treering._foreign.ocdbt import MANIFEST, Value, memory_limit, read_database
from treering._foreign.zarr_leaves import find_jax_array, finder
from treering._format.index import Container, LeafType, Token
from treering._format.leaf_values import from_base64
from treering._format.packed import key_texts
from treering._format.structure import ORDERED_DICT, flatten_nodes
from treering._values.human import pluralize
from treering._values.keys import naming_leaf
from treering.errors import CorruptError, UnsupportedError

_DOCUMENT: Final = "pytreedef.json"
_TREE: Final = "__jax_pytreedef_repr"
_LEAVES: Final = "__jax_leaf_ids"
_STORE: Final = "array_store/"

# The kinds of nodes, and the fields of the table of a node.
_LEAF, _NONE, _TUPLE, _LIST, _DICT, _CUSTOM = range(6)
_KIND, _CHILDREN, _NAMES, _CLASS, _AUX = range(5)
_SEQUENCES: Final = {_TUPLE: "tuple", _LIST: "list"}
_NOTHING: Final = ForeignLeaf(LeafType(kind="none"))


def recognise(place: Path) -> str | None:
    """Detect a checkpoint of jax by its own document, in which nothing has a version."""
    with contextlib.ExitStack() as stack:
        return "jax.experimental.array_serialization" if FolderFiles(place, stack).has(_DOCUMENT) else None


def open_foreign(place: Path, files: contextlib.ExitStack) -> ForeignTree:
    """Open the tree of a checkpoint.

    Raises:
        CorruptError: it is damaged, or lacks an array.
        UnsupportedError: it holds what has no form here.
        StoreError: the store refuses.
    """
    folder = FolderFiles(place, files)
    node = folder.document(_DOCUMENT)
    described = member(node, _LEAVES, list, _DOCUMENT)
    data = from_base64(member(node, _TREE, str, _DOCUMENT), f"{_DOCUMENT}: the tree")
    structure, kinds = _TreeBuffer(data).read()
    if (count := kinds.count(_LEAF)) != len(described):
        problem = f"the tree has {pluralize(count, 'leaves')}, {len(described)} are described"
        raise CorruptError(f"{_DOCUMENT}: {problem}", hint=ANOTHER_COPY)
    with add_hint(ANOTHER_COPY):
        problem = f"{_DOCUMENT}: its keys take far more memory than it has bytes"
        keys = key_texts(structure, memory_limit(len(data)), problem)
    values = read_database(folder, _STORE) if folder.has(_STORE + MANIFEST) else {}
    given = iter(enumerate(described))
    leaves = [
        _leaf(folder, values, key, *next(given)) if kind == _LEAF else _NOTHING
        for key, kind in zip(keys, kinds, strict=True)
    ]
    stored = collections.Counter(key.partition("/")[0] for key in values)
    empty = sum(what is not None and stored[str(number)] == 1 for number, what in enumerate(described))
    why = "they are empty or zeros, which jax does not store, or the save was not finished"
    note = f"{empty} of {pluralize(len(described) - described.count(None), 'arrays')} have no data: {why}"
    return folder_tree(folder, structure, keys, leaves, notes=[note] if empty else [], structured=True)


def _leaf(files: FolderFiles, values: Mapping[str, Value], key: str, number: int, described: Any) -> ForeignLeaf:
    if described is None:
        return _NOTHING
    with naming_leaf(key):
        # jax writes zarr 3; the TensorStore specifications that its caller passes may say 2.
        leaf = find_jax_array(files, finder(files, _STORE, values, str(number)), zarr3=True)
        stored = f"Array({leaf.type.dtype}[{', '.join(map(str, leaf.type.shape or ()))}])"
        if described != stored:
            raise CorruptError(f"{_DOCUMENT} describes {show(described)}, the array is {stored}", hint=ANOTHER_COPY)
    return leaf


class _TreeBuffer:
    """The flatbuffer of a tree: a table for each node, with its kind, its children and their names, its class.

    Every offset is checked, no table is reached twice, and texts together are no longer than the buffer.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._left = len(data)
        self._seen: set[int] = set()

    def read(self) -> tuple[list[Token], list[int]]:
        """Return the containers in pre-order, and the kind of each leaf."""
        structure, leaves = flatten_nodes([self._follow(0)], self._open_node)
        return structure, list(map(self._kind, leaves))

    def _kind(self, table: int) -> int:
        at = self._field(table, _KIND)
        return self._number(at, 1) if at else _LEAF

    def _open_node(self, table: int) -> tuple[Container, list[int]] | None:
        if (kind := self._kind(table)) in (_LEAF, _NONE):
            return None
        children = [self._follow(at) for at in self._items(table, _CHILDREN)]
        if len(set(children)) < len(children) or not self._seen.isdisjoint(children):
            raise self._error("two nodes refer to one")
        self._seen.update(children)
        return self._container(table, kind, len(children)), children

    def _container(self, table: int, kind: int, count: int) -> Container:
        if kind in _SEQUENCES:
            return Container(node=_SEQUENCES[kind], keys=tuple(range(count)))
        if kind == _DICT:
            names = [decode_text(self._take(at), f"{_DOCUMENT}: a key") for at in self._items(table, _NAMES)]
            if not count == len(names) == len(set(names)):
                raise self._error(f"a dict of {pluralize(count, 'children')} has the keys {names!r:.200}")
            return Container(node="dict", keys=tuple(names))
        if kind != _CUSTOM:
            raise UnsupportedError(f"{_DOCUMENT}: nodes of the kind {kind} are unknown", hint="use a newer treering")
        name, aux = (self._take(at) if (at := self._field(table, field)) else b"" for field in (_CLASS, _AUX))
        return _container_of_class(decode_text(name, f"{_DOCUMENT}: the name of a class"), aux, count)

    def _number(self, at: int, size: int, *, signed: bool = False) -> int:
        if not 0 <= at <= len(self._data) - size:
            raise self._error(f"it refers to byte {at} of {len(self._data)}")
        return int.from_bytes(self._data[at : at + size], "little", signed=signed)

    def _follow(self, at: int) -> int:
        return at + self._number(at, 4)

    def _field(self, table: int, field: int) -> int:
        """Return where a field of a table lies; 0 where it is left out."""
        entries = table - self._number(table, 4, signed=True)
        place = 4 + 2 * field
        offset = self._number(entries + place, 2) if place < self._number(entries, 2) else 0
        return table + offset if offset else 0

    def _items(self, table: int, field: int) -> range:
        """Return where the items of a vector of offsets lie."""
        if not (at := self._field(table, field)):
            return range(0)
        start = self._follow(at)
        return range(start + 4, start + 4 + 4 * self._number(start, 4), 4)

    def _take(self, at: int) -> bytes:
        """Return the bytes that an offset leads to."""
        start = self._follow(at)
        count = self._number(start, 4)
        self._left -= count
        if self._left < 0 or start + 4 + count > len(self._data):
            raise self._error(f"the text at byte {start} is longer than it can be")
        return self._data[start + 4 : start + 4 + count]

    def _error(self, problem: str) -> CorruptError:
        return CorruptError(f"{_DOCUMENT}: the tree is damaged: {problem}", hint=ANOTHER_COPY)


def _container_of_class(name: str, aux: bytes, count: int) -> Container:
    """Return a node of a class that the program registered with jax.

    Of a namedtuple and an ``OrderedDict`` jax itself writes the names of the children, as a JSON list; what it has of
    other classes is the program's own, and is kept as it is.
    """
    fields: Any = None
    with contextlib.suppress(CorruptError):
        fields = parse_json(decode_text(aux, name), name)
    is_ordered = name == ORDERED_DICT
    named = type(fields) is list and set(map(type, fields)) <= {str} and count == len(fields) == len(set(fields))
    if named and (is_ordered or all(map(str.isidentifier, fields))):
        return Container(node="other" if is_ordered else "namedtuple", keys=tuple(fields), class_name=name)
    static = (("aux", aux),) if aux else ()
    return Container(node="other", keys=tuple(map(str, range(count))), class_name=name, static=static)
