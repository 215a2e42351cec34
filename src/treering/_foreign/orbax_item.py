"""One pytree as Orbax writes it: a folder with ``_METADATA`` and arrays of zarr 2 or 3, in OCDBT or in folders.

Old items have a file ``checkpoint`` instead, a tree on flax's wire, in which texts stand for arrays that lie beside it.

Source: https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpoint_format.html, and files of its releases.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from treering._codec.documents import decode_text, member, parse_json, show
from treering._codec.msgpack.scan import WINDOW_BYTES
from treering._foreign.folder_files import ANOTHER_COPY, ByteRange, FolderFiles, ForeignLeaf
from treering._foreign.foreign_tree import (
    EMPTY,
    Containers,
    Entry,
    Step,
    keys_of,
    leaf_of_record,
    most_steps,
    nested_leaves,
)
from treering._foreign.ocdbt import MANIFEST, Value, read_database
from treering._foreign.zarr_leaves import ZarrLeaf, find_array, finder
from treering._format.index import LARGE_VALUE, MAX_LEVELS, Container, LeafType
from treering._format.leaf_values import decode_type, from_base64
from treering._format.listing import LeafRecord, list_msgpack
from treering._printable import kind_of
from treering.errors import CorruptError, TreeringError, UnsupportedError

MSGPACK: Final = "checkpoint"
"""The file of an old item."""

# TensorFlow has a text of that name; this is a map.
_MAPS: Final = frozenset([*range(0x80, 0x90), 0xDE, 0xDF])
_ELSEWHERE: Final = re.compile(r"(?:PLACEHOLDER|AGGREGATED)://(.+)", re.DOTALL)
_PYTHON: Final = {type(None): "none"} | {kind: kind.__name__ for kind in (bool, int, float, complex, str, bytes)}


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


def _leaf_of_msgpack(node: Any, files: FolderFiles, found: ByteRange) -> ForeignLeaf | Container | str:
    """Return a leaf of the file of an old item; a text is the name of an array that lies beside the file."""
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
    if node.parts:
        raise UnsupportedError(
            f"{found.file} holds an array in several parts", hint="load it with Orbax, and save it again"
        )
    return leaf_of_record(node, "numpy" if node.kind == "array" else node.kind, files.number_of(found))


METADATA: Final = "_METADATA"
"""The file that makes a folder an item with a tree."""

_SEQUENCE: Final = 1
_KEY_TYPES: Final = (_SEQUENCE, 2)
_WITHOUT_ARRAY: Final = frozenset({*EMPTY, "None", "string"})
_KINDS: Final = {"jax.Array": "jax", "np.ndarray": "numpy", "scalar": "numpy scalar"}


class OrbaxItem(NamedTuple):
    """What an item holds."""

    entries: list[Entry]
    """Its leaves and empty containers by their paths."""
    containers: Containers
    """Its tuples and namedtuples by their paths, where they are recorded."""
    custom_metadata: Any
    """What the user wrote beside it."""
    notes: list[str]
    """What could not be read, and is not needed."""


class _Row(NamedTuple):
    """What is said of a leaf."""

    path: Sequence[Step]
    name: str
    kind: str
    skipped: Any = None


class _Arrays(NamedTuple):
    """What is said of all arrays of an item."""

    files: FolderFiles
    folder: str
    values: Mapping[str, Value] | None
    zarr3: bool | None
    absent_is_zero: bool
    shardings: Mapping[str, str]
    impls: Mapping[str, str]
    strings: Mapping[str, Any]

    def array(self, name: str) -> ZarrLeaf:
        find = finder(self.files, self.folder, self.values, name)
        for zarr3 in (False, True) if self.zarr3 is None else (self.zarr3,):
            if (found := find_array(find, zarr3=zarr3)) is not None:
                return found._replace(located=self.values is not None and found.is_apart)
        raise CorruptError(f"the array {name!r:.200} is missing", hint=ANOTHER_COPY)


def read_item(files: FolderFiles, folder: str = "") -> OrbaxItem:
    """Return what the item in a folder holds.

    Args:
        files: the files of what it belongs to.
        folder: empty, or the folder's name below that, with a ``/`` at its end.

    Raises:
        CorruptError: it is damaged.
        UnsupportedError: it has what has no form here.
        StoreError: the store refuses.
    """
    node = files.document(folder + METADATA)
    old: list[tuple[Sequence[Step], ForeignLeaf | Container | str]] = []
    containers: Containers = {}
    if (found := find_msgpack(files, folder)) is not None:
        root = list_msgpack(found.read(0, min(found.size, WINDOW_BYTES)), found.size, found.read).root
        leaves, containers = nested_leaves(root, most_steps(found.size), found.file)
        old = [(path, _leaf_of_msgpack(leaf, files, found)) for path, leaf in leaves]
    is_old = node is None and found is not None
    node = {"tree_metadata": {}} if is_old else node
    tree = member(node, "tree_metadata", dict, METADATA)
    in_database = node.get("use_ocdbt")
    if in_database is None:
        in_database = files.has(folder + MANIFEST)
    notes: list[str] = []
    arrays = _Arrays(
        files=files,
        folder=folder,
        # An item without arrays has no database.
        values=(read_database(files, folder) if files.has(folder + MANIFEST) else {}) if in_database else None,
        zarr3=None if is_old else bool(node.get("use_zarr3")),
        absent_is_zero=node.get("store_array_data_equal_to_fill_value") is not True,
        shardings=_read_shardings(files, folder, notes),
        impls=_read_key_impls(files, folder),
        strings=files.document(folder + "_strings.json") or {},
    )
    beside = {keys_of(path): leaf for path, leaf in old if not isinstance(leaf, str)}
    rows = [_Row(path, leaf if isinstance(leaf, str) else "", "np.ndarray") for path, leaf in old]
    if not is_old:
        rows = list(map(_row_of, tree.values()))
        text = node.get("value_metadata_tree")
        containers = read_containers(text) if type(text) is str else {}
    return OrbaxItem(_list_entries(arrays, rows, beside), containers, node.get("custom_metadata"), notes)


def _list_entries(
    arrays: _Arrays, rows: Sequence[_Row], beside: Mapping[tuple[str, ...], ForeignLeaf | Container]
) -> list[Entry]:
    """Return the leaves; values that lie in the file of an old item are taken from there."""
    entries: list[Entry] = []
    arrays_by_name = collections.Counter(name for _, name, kind, _ in rows if kind not in _WITHOUT_ARRAY)
    shared = {name for name, count in arrays_by_name.items() if count > 1}
    path: Sequence[Step] = ()
    try:
        for path, name, kind, skipped in rows:
            leaf = beside.get(keys_of(path)) if beside else None
            entries.append((path, leaf or _leaf(arrays, name, kind, skipped=skipped, shared=name in shared)))
    except TreeringError as error:
        error.path = keys_of(path)
        raise
    return entries


def _row_of(entry: Any) -> _Row:
    path = []
    for part in member(entry, "key_metadata", list, METADATA):
        kind = member(part, "key_type", int, METADATA)
        if kind not in _KEY_TYPES:
            raise UnsupportedError(f"{METADATA}: the key type {show(kind)} is unknown", hint="use a newer treering")
        path.append((str(member(part, "key", str, METADATA)), kind == _SEQUENCE))
    what = member(entry, "value_metadata", dict, METADATA)
    name = ".".join([key for key, _ in path])
    return _Row(path, name, member(what, "value_type", str, METADATA), what.get("skip_deserialize"))


def _leaf(arrays: _Arrays, name: str, kind: str, *, skipped: Any, shared: bool) -> ForeignLeaf | Container:
    if kind in EMPTY:
        return EMPTY[kind]
    if kind == "None":
        return ForeignLeaf(LeafType(kind="none"))
    if kind == "string":
        # Orbax takes the name for a JSON pointer, so that "/" in it leads into an object.
        node: Any = arrays.strings
        *outer, last = name.split("/")
        for part in outer:
            node = member(node, part, dict, "_strings.json")
        return ForeignLeaf(LeafType(kind="str"), member(node, last, str, "_strings.json"))
    if skipped:
        raise UnsupportedError(f"a leaf of the type {show(kind)} has no data", hint="use a newer treering")
    array = arrays.array(name)
    if shared:
        array = array._replace(fetch=functools.partial(_refuse, name))
    elif kind == "scalar" and (number := array.number()) is not None:
        return number
    layout = array.layout
    impl = arrays.impls.get(name)
    kind = "numpy" if kind == "scalar" and layout.shape else _KINDS.get(kind, "numpy")
    found = _type_of(kind if impl is None else "key", layout.dtype, layout.shape, arrays.shardings.get(name), impl)
    data = None if shared else arrays.files
    return array.leaf(found, absent_is_zero=arrays.absent_is_zero, data=data)


@functools.lru_cache(maxsize=1024)
def _type_of(kind: str, dtype: str, shape: tuple[int, ...], sharding: str | None, impl: str | None) -> LeafType:
    members = {"kind": kind, "dtype": dtype, "shape": list(shape), "sharding": sharding, "impl": impl}
    return decode_type({name: value for name, value in members.items() if value is not None}, 0)


def _refuse(name: str, _: int) -> bytes:
    problem = f"two leaves have the name {name!r:.200}, and Orbax stored one array for both"
    raise CorruptError(problem, hint="load the others with only=; this one cannot be told apart")


def _read_key_impls(files: FolderFiles, folder: str) -> dict[str, str]:
    """Return the implementations of the typed PRNG keys by name: each process noted them for what it wrote."""
    found: dict[str, str] = {}
    place = f"{folder}array_metadatas"
    for file in files.names(place):
        node = files.document(f"{place}/{file}")
        for entry in member(node, "array_metadatas", list, file):
            array = member(entry, "array_metadata", dict, file)
            if type(extended := array.get("ext_metadata")) is dict and "random_key_impl" in extended:
                found[member(array, "param_name", str, file)] = member(extended, "random_key_impl", str, file)
    return found


def _read_shardings(files: FolderFiles, folder: str, notes: list[str]) -> dict[str, str]:
    """Return how arrays lay on devices, as text for people; nothing depends on it."""
    try:
        return dict(_show_shardings(files.document(folder + "_sharding") or {}))
    except CorruptError as error:
        notes.append(f"the shardings that were recorded cannot be read: {error.message}")
        return {}


def _show_shardings(node: Any) -> Iterator[tuple[str, str]]:
    if type(node) is not dict:
        raise CorruptError("_sharding is no object")
    known: dict[str, str | None] = {}  # thousands of leaves have few between them
    for key, text in node.items():
        if type(text) is not str:
            raise CorruptError("_sharding holds what is no text")
        if text not in known:
            known[text] = _show_sharding(parse_json(text, "a sharding"))
        if (shown := known[text]) is not None:
            yield from_base64(key, "a name").decode("utf-8", "replace"), shown


def _show_sharding(node: Any) -> str | None:
    if type(node) is not dict or node.get("sharding_type") != "NamedSharding":
        return None
    what = "a sharding"
    axes = zip(member(node, "axis_names", list, what), member(node, "shape", list, what), strict=False)
    parts = (repr(tuple(part) if type(part) is list else part) for part in member(node, "partition_spec", list, what))
    return f"P({', '.join(parts)}) over {', '.join(f'{axis}={size}' for axis, size in axes)}"[:400]


_WHAT: Final = "value_metadata_tree"


def read_containers(text: str) -> Containers:
    """Return the tuples and namedtuples of a tree by their paths.

    Args:
        text: the tree, as JSON inside of JSON.

    Raises:
        CorruptError: it is no such tree.
        UnsupportedError: containers are nested too deep.

    Example:
        >>> leaf = '{"category": "custom", "clazz": "ValueMetadataEntry", "data": {}}'
        >>> pair = f'{{"category": "custom", "clazz": "tuple", "entries": [{leaf}, {leaf}]}}'
        >>> read_containers(f'{{"a": {pair}}}')[("a",)].node
        'tuple'
    """
    found: Containers = {}
    waiting: list[tuple[tuple[str, ...], Any]] = [((), parse_json(text, _WHAT))]
    left = most_steps(len(text))
    while waiting:
        path, node = waiting.pop()
        left -= len(path)
        if len(path) > MAX_LEVELS or left < 0:
            raise UnsupportedError(f"{_WHAT}: containers are nested too deep")
        if type(node) is list:
            children = [(str(number), child) for number, child in enumerate(node)]
        elif type(node) is not dict:
            raise CorruptError(f"{_WHAT} holds what is neither a container nor a leaf")
        elif node.get("category") == "namedtuple":
            entries = member(node, "entries", list, _WHAT)
            children = [(member(entry, "key", str, _WHAT), entry.get("value")) for entry in entries]
            name = f"{member(node, 'module', str, _WHAT)}.{member(node, 'clazz', str, _WHAT)}"
            keys = tuple(key for key, _ in children)
            found[path] = Container(node="namedtuple", keys=keys, class_name=name)
        elif node.get("category") != "custom":
            children = list(node.items())
        elif node.get("clazz") == "tuple":
            children = [(str(n), child) for n, child in enumerate(member(node, "entries", list, _WHAT))]
            found[path] = Container(node="tuple", keys=tuple(range(len(children))))
        else:
            children = []
        waiting.extend(((*path, key), child) for key, child in children)
    return found
