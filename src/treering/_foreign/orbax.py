"""Orbax's checkpoints: an item, a step of several, one of its v1 API, or the root of a CheckpointManager.

A root stands for its latest step. A step with one tree is that tree, one with several is a dict of them by item; JSON
items and metrics are its metadata, by item too. What was not committed is refused.

Source: https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpoint_format.html, and files of its releases.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from treering._codec.documents import decode_text, member, members, parse_json, show
from treering._codec.msgpack.scan import WINDOW_BYTES
from treering._foreign.foreign_tree import (
    ANOTHER_COPY,
    EMPTY,
    PARTLY,
    ByteRange,
    Containers,
    Entry,
    FolderFiles,
    ForeignLeaf,
    ForeignStep,
    ForeignTree,
    Step,
    build_tree,
    folder_tree,
    keys_of,
    leaf_of_record,
    most_steps,
    nested_leaves,
)
from treering._foreign.ocdbt import MANIFEST, read_database
from treering._foreign.zarr_leaves import find_array, finder
from treering._format.index import LARGE_VALUE, MAX_LEVELS, Container, LeafType
from treering._format.leaf_values import decode_type, from_base64
from treering._format.listing import LeafRecord, list_msgpack
from treering._printable import kind_of
from treering._store.resolve import has_renames
from treering._values.human import pluralize
from treering.errors import CorruptError, TreeringError, UnsupportedError


def grain_entries(state: Any) -> list[Entry]:
    """Return what ``set_state`` takes, by paths.

    Example:
        >>> [(path, leaf.value) for path, leaf in grain_entries({"next": [7]})]
        [((('next', False), ('0', True)), 7)]
        >>> type(grain_entries({"last_seen_indices": {"0": 3}})[0][1].value)
        <class 'bytes'>
    """
    if type(state) is dict and "last_seen_indices" in state:
        state = json.dumps(state, indent=4).encode()
    entries: list[Entry] = []
    for path, value in nested_leaves(state, what=GRAIN)[0]:
        kind = "none" if value is None else type(value).__name__
        entries.append((path, EMPTY.get(kind.title(), ForeignLeaf(LeafType(kind=kind), value))))
    return entries


METADATA: Final = "_METADATA"
"""The file that makes a folder an item with a tree."""
MSGPACK: Final = "checkpoint"
"""The file of an old item: a tree on flax's wire, in which texts stand for arrays that lie beside it."""
STEP_METADATA: Final = "_CHECKPOINT_METADATA"
"""The file with what is known of a step or of a checkpoint as a whole."""

_V1: Final = "orbax.checkpoint"
COMMITTED: Final = "commit_success.txt"
"""The file that says that a folder is whole, where it has no rename to say so."""
_ROOT_METADATA: Final = "metadata/_ROOT_METADATA"
_UNCOMMITTED: Final = re.compile(r".*\.orbax-checkpoint-tmp(-[0-9]+)?")
_STEP: Final = re.compile(r"(?:.*[^0-9])?([0-9]{1,18})")
# Steps of flax may be any numbers, which Orbax's are not.
_NOT_WHOLE: Final = re.compile(r".*[0-9](\.|e[-+]?)[0-9]+|.*_-[0-9]+")
METRICS: Final = "metrics"
"""The item with what was measured at a step."""
GRAIN: Final = "process_0-of-1.json"
"""Where the state of an iterator of grain is, in a job of one process."""
_JSON_FILES: Final = ("metadata", METRICS, GRAIN)
_GRAIN_OF_MANY: Final = re.compile(r"process_[0-9]+-of-([0-9]+)\.json")
_RANDOM_KEYS: Final = ("jax_random_key/", "np_random_key/")
_TAIL: Final = 4096
_SHOWN_STEPS: Final = 20
# What lies in an item beside items, whose looks would each be a request in a bucket.
_NO_ITEMS: Final = frozenset({STEP_METADATA, COMMITTED, _V1, "d", "array_metadatas"})
_MARKS: Final = frozenset({METADATA, MSGPACK, STEP_METADATA, COMMITTED, _V1, "default"})
_STEP_MARKS: Final = frozenset({STEP_METADATA, COMMITTED})
_TIMES: Final = ("init_timestamp_nsecs", "commit_timestamp_nsecs")
_LARGEST_INT: Final = 1 << 1023


class _Checkpoint(NamedTuple):
    """Where the parts of one checkpoint are, in a folder."""

    folder: str
    """Empty, or the folder's name with a ``/`` at its end."""
    trees: dict[str, str]
    """The names of its items with a tree -> their folders, as ``folder``; an empty name is the folder itself."""
    documents: dict[str, str]
    """The names of its JSON items -> the files."""
    steps: list[str]
    """The steps beside it; none where it is no step of a root."""


def recognise(place: Path) -> str | None:
    """Detect an Orbax checkpoint: return its version, or None."""
    if _UNCOMMITTED.fullmatch(place.name):
        return "Orbax, uncommitted"
    with contextlib.ExitStack() as stack:
        files = FolderFiles(place, stack)
        if (found := _look(files)) is None:
            return None
        api = "v1" if files.has(found.folder + _V1) else "v0"
        kind = "checkpoint" if api == "v1" else "item" if "" in found.trees else "step"
        ways = {_storage(files, at) for at in found.trees.values()}
        what = f"Orbax {api} {kind}, {' and '.join(sorted(ways))}" if ways else f"Orbax {api} {kind} without trees"
        return f"{what}, the latest of a root's steps" if found.steps else what


def open_foreign(place: Path, files: contextlib.ExitStack) -> ForeignTree:
    """Open the tree of a checkpoint, of a root that of its latest step.

    Raises:
        CorruptError: it is damaged, or was not committed.
        UnsupportedError: it holds what has no form here.
        StoreError: the store refuses.
    """
    if _UNCOMMITTED.fullmatch(place.name):
        hint = "Orbax gives it its name once all is written; a crash leaves it behind"
        raise CorruptError(f"{place.name!r} is a save by Orbax that was not committed", hint=hint)
    folder = FolderFiles(place, files)
    if (found := _look(folder)) is None:
        raise CorruptError("there is no item of Orbax in it", hint=ANOTHER_COPY)
    items = {name: read_item(folder, at) for name, at in found.trees.items()}
    notes = [note for item in items.values() for note in item.notes]
    notes += [f"{name} is the data of a random key" for name, at in found.trees.items() if at.endswith(_RANDOM_KEYS)]
    if found.steps:
        shown = found.steps[-_SHOWN_STEPS:]
        listed = ", ".join([*(["..."] if len(shown) < len(found.steps) else []), *shown])
        notes.insert(0, f"a root with the steps {listed}; this is {found.folder.rstrip('/')}")
    if not has_renames(place) and not folder.has(found.folder + COMMITTED):
        notes.append(f"it has no {COMMITTED}: Orbax itself takes it for uncommitted in a bucket")
    # A run has a place for them, beside its trees; elsewhere they are metadata, and change the path of no leaf.
    grain = {name: path for name, path in found.documents.items() if path.endswith(GRAIN) and PARTLY.get()}
    others = {name: path for name, path in found.documents.items() if name not in grain}
    metadata = _read_metadata(folder, found._replace(documents=others), items, notes)
    alone = len(items) + len(grain) == 1
    parts = {name: item.entries for name, item in items.items()}
    parts |= {name: grain_entries(folder.document(path)) for name, path in grain.items()}
    entries = [(path if alone else [(name, False), *path], leaf) for name, part in parts.items() for path, leaf in part]
    heads = [(name, path, head) for name, item in items.items() for path, head in item.containers.items()]
    tree = build_tree(entries, {path if alone else (name, *path): head for name, path, head in heads})
    return folder_tree(folder, *tree, metadata=metadata, notes=notes, unread=_find_unknown(folder, found))


def list_steps(place: Path) -> dict[int, str]:
    """Return the committed steps of a root by their numbers, ascending; nothing where it is no root.

    Raises:
        UnsupportedError: two steps have one number, or one is not a whole number.
    """
    with contextlib.ExitStack() as stack:
        files = FolderFiles(place, stack)
        names = files.names()
        found: dict[int, str] = {}
        for number, name in _numbered(files, names) if _look_at(files, "", names) is None else ():
            # What is a link out of it may be a step, and `describe_step` says what is wrong with it.
            with contextlib.suppress(CorruptError):
                if _MARKS.isdisjoint(files.list_names(name)):
                    continue
            if found.setdefault(number, name) != name:
                problem = f"the steps {found[number]!r} and {name!r} have one number"
                raise UnsupportedError(problem, hint="move one of them out of the folder")
        _require_whole(files, found.values())
    return found


def describe_step(place: Path, name: str) -> ForeignStep:
    """Return what is known of a step of a root beside its tree.

    Raises:
        CorruptError: it is damaged.
        StoreError: the store refuses.
    """
    folder = f"{name}/"
    with contextlib.ExitStack() as stack:
        files = FolderFiles(place, stack)
        names = files.list_names(name)
        if (found := _look_at(files, folder, names)) is None:
            raise CorruptError("it has no item that treering reads", hint="use another copy of the step")
        losses = {item: _name_unknown(item, files.names(folder + item)) for item in _find_unknown(files, found)}
        read: dict[str, Any] = {}
        for item, path in found.documents.items():
            try:
                read[item] = files.document(path, finite=item != METRICS)
            except CorruptError as error:
                losses[item] = f"the item {item!r} cannot be read: {error.message}"
        noted, root = files.document(folder + STEP_METADATA), files.document(_ROOT_METADATA)
        times: list[Any] = [noted.get(time) if type(noted) is dict else None for time in _TIMES]
        is_known = type(times[0]) is int and 0 < times[0] < 1 << 63
        saved = times[0] / 1e9 if is_known else files.modified(folder + names[0])
    metrics, others = _divide_metrics(read.get(METRICS))
    metadata = {METRICS: others} if others else {}
    metadata |= {"custom_metadata": custom} if (custom := _custom_of(root)) is not None else {}
    return ForeignStep(saved, repr((times, saved)), metrics, metadata, losses)


def _custom_of(node: Any) -> dict[str, Any] | None:
    """Return what the user wrote beside a checkpoint, of a document about it."""
    custom = node.get("custom_metadata") if type(node) is dict else None
    return custom if type(custom) is dict else None


def _divide_metrics(measured: Any) -> tuple[dict[str, float], Any]:
    """Return what of an item with metrics is a number, by its name, and the rest."""
    if type(measured) is not dict:
        return {}, measured
    numbers = {
        name: float(value)
        for name, value in measured.items()
        if name and (type(value) is float or (type(value) is int and abs(value) < _LARGEST_INT))
    }
    return numbers, {name: value for name, value in measured.items() if name not in numbers}


def _look(files: FolderFiles) -> _Checkpoint | None:
    """Return the checkpoint in a folder, or the latest of the committed steps in it."""
    names = files.names()
    if (found := _look_at(files, "", names)) is not None:
        return found
    steps = _numbered(files, names)
    refused: CorruptError | None = None
    for _, name in reversed(steps):
        try:
            inside = files.names(name)
            found = _look_at(files, f"{name}/", inside)
        except CorruptError as error:
            # A link out of it: of no matter in a folder of anything else, and never a reason to take an older step.
            refused = refused or error
            continue
        if found is not None and refused is None:
            _require_whole(files, [step for _, step in steps])
            return found._replace(steps=[step for _, step in steps])
        if refused is None and not _MARKS.isdisjoint(inside):
            hint = "pass the path of another step, or use another copy of it"
            refused = CorruptError(f"the latest step {name!r:.200} has no item that treering reads", hint=hint)
        if refused is not None and (found is not None or not _STEP_MARKS.isdisjoint(inside)):
            raise refused
    return None


def _numbered(files: FolderFiles, names: list[str]) -> list[tuple[int, str]]:
    """Return what may be committed steps, ascending, by the names alone; in a bucket by the mark of the commit too."""
    steps = sorted(
        (int(match[1]), name)
        for name in names
        if not _UNCOMMITTED.fullmatch(name) and (match := _STEP.fullmatch(name)) is not None
    )
    if has_renames(files.place):
        return steps
    return [(number, name) for number, name in steps if files.has(f"{name}/{COMMITTED}")]


def _require_whole(files: FolderFiles, steps: Iterable[str]) -> None:
    for step in filter(_NOT_WHOLE.fullmatch, steps):
        with contextlib.suppress(CorruptError):  # a link out of the folder
            if METADATA in files.names(step):
                what = f"the step {step!r} is not a whole number, so that the latest one is not known"
                raise UnsupportedError(what, hint="pass the path of a step")


def _look_at(files: FolderFiles, folder: str, names: list[str]) -> _Checkpoint | None:
    if METADATA in names or (MSGPACK in names and find_msgpack(files, folder) is not None):
        return _Checkpoint(folder, {"": folder}, {}, [])
    if _MARKS.isdisjoint(names):
        return None
    items = [name for name in names if name not in _NO_ITEMS and not _UNCOMMITTED.fullmatch(name)]
    trees: dict[str, str] = {}
    for name in items:
        within = [f"{folder}{name}/", *(f"{folder}{name}/{key}" for key in _RANDOM_KEYS)]
        for at in within:
            if files.has(at + METADATA) or find_msgpack(files, at) is not None:
                trees.setdefault(name, at)
    documents = {
        name: path
        for name in items
        if name not in trees
        for path in (f"{folder}{name}/{file}" for file in _JSON_FILES)
        if files.has(path)
    }
    return _Checkpoint(folder, trees, documents, []) if trees or documents else None


def _find_unknown(files: FolderFiles, found: _Checkpoint) -> list[str]:
    """Return the items of a checkpoint that are not read: of another kind, or lost, or without their metadata."""
    if "" in found.trees:
        return []
    saved: dict[str, Any] = {}
    # It has none, or is damaged, which is noted where its other members are read.
    with contextlib.suppress(CorruptError):
        saved = member(files.document(found.folder + STEP_METADATA), "item_handlers", dict, STEP_METADATA)
    names = {*saved, *files.names(found.folder.rstrip("/"))} - {*found.trees, *found.documents, *_NO_ITEMS}
    return [
        name
        for name in sorted(names)
        if not _UNCOMMITTED.fullmatch(name) and (name in saved or files.names(found.folder + name))
    ]


def _name_unknown(item: str, names: Iterable[str]) -> str:
    counts = [int(match[1]) for name in names if (match := _GRAIN_OF_MANY.fullmatch(name))]
    if counts:
        count = pluralize(counts[0], "processes")
        return f"the item {item!r} has the states of iterators of {count}, and a step has room for one"
    return f"the item {item!r} is lost, or its metadata are, or it is of an unknown kind"


def _storage(files: FolderFiles, folder: str) -> str:
    """Say how the arrays of an item are stored, by the names in it and the end of its document."""
    ways = ["OCDBT" if files.has(folder + MANIFEST) else "plain"]
    if (document := files.find(folder + METADATA)) is not None:
        size = min(document.size, _TAIL)
        end = decode_text(document.read(document.size - size, size), METADATA, "latin-1")
        if (version := re.search(r'"use_zarr3": ?(true|false)', end)) is not None:
            ways.append("zarr 3" if version[1] == "true" else "zarr 2")
    else:
        ways.append("msgpack")
    return ", ".join(ways)


def _read_metadata(
    files: FolderFiles, found: _Checkpoint, items: dict[str, OrbaxItem], notes: list[str]
) -> dict[str, Any]:
    """Return the JSON items by name, and under ``custom_metadata`` what the user wrote of the whole."""
    metadata: dict[str, Any] = {}
    for name, path in found.documents.items():
        with _noting(name, notes):
            metadata[name] = files.document(path)
    custom: dict[str, Any] = {}
    for path in (*([_ROOT_METADATA] if found.steps else []), found.folder + STEP_METADATA):
        with _noting(path, notes):
            custom |= _custom_of(files.document(path)) or {}
    for item in items.values():
        custom |= item.custom_metadata
    return metadata | ({"custom_metadata": custom} if custom else {})


@contextlib.contextmanager
def _noting(what: str, notes: list[str]) -> Any:
    """Note what of the metadata is no JSON, such as a metric that is NaN: the tree does not depend on it."""
    try:
        yield
    except TreeringError as error:
        notes.append(f"{what} is left out: {error.message}")


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
        hint = "load it with Orbax, and save it again"
        raise UnsupportedError(f"{found.file} holds an array in several parts", hint=hint)
    return leaf_of_record(node, "numpy" if node.kind == "array" else node.kind, files.number_of(found))


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
    custom_metadata: dict[str, Any]
    """What the user wrote beside it."""
    notes: list[str]
    """What could not be read, and is not needed."""


_Row: TypeAlias = tuple[Sequence[Step], str, str, Any]
"""The path of a leaf, its name, its type, and whether it has no data."""


def read_item(files: FolderFiles, folder: str) -> OrbaxItem:
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
    rows: list[_Row] = []
    beside: dict[tuple[str, ...], ForeignLeaf | Container] = {}
    containers: Containers = {}
    if (found := find_msgpack(files, folder)) is not None:
        root = list_msgpack(found.read(0, min(found.size, WINDOW_BYTES)), found.size, found.read).root
        leaves, containers = nested_leaves(root, most_steps(found.size), found.file)
        for where, value in leaves:
            leaf = _leaf_of_msgpack(value, files, found)
            rows.append((where, leaf if isinstance(leaf, str) else "", "np.ndarray", None))
            if not isinstance(leaf, str):
                beside[keys_of(where)] = leaf
    is_old = node is None and found is not None
    node = {"tree_metadata": {}} if is_old else node
    tree = member(node, "tree_metadata", dict, METADATA)
    notes: list[str] = []
    arrays = _Arrays(files, folder, node, notes, is_old=is_old)
    if not is_old:
        rows = [_row_of(entry) for entry in tree.values()]
        text = node.get("value_metadata_tree")
        containers = read_containers(text) if type(text) is str else {}
    arrays_by_name = collections.Counter([name for _, name, kind, _ in rows if kind not in _WITHOUT_ARRAY])
    shared = {name for name, count in arrays_by_name.items() if count > 1}
    entries: list[Entry] = []
    for path, name, kind, skipped in rows:
        try:
            known = beside.get(keys_of(path)) if beside else None
            entries.append((path, known or arrays.leaf(name, kind, skipped=skipped, shared=name in shared)))
        except TreeringError as error:
            error.path = keys_of(path)
            raise
    return OrbaxItem(entries, containers, _custom_of(node) or {}, notes)


def _row_of(entry: Any) -> _Row:
    parts, what = members(entry, METADATA, key_metadata=list, value_metadata=dict)
    path: list[Step] = []
    for part in parts:
        kind, key = members(part, METADATA, key_type=int, key=str)
        if kind not in _KEY_TYPES:
            raise UnsupportedError(f"{METADATA}: the key type {show(kind)} is unknown", hint="use a newer treering")
        path.append((key, kind == _SEQUENCE))
    name = ".".join([key for key, _ in path])
    return path, name, member(what, "value_type", str, METADATA), what.get("skip_deserialize")


class _Arrays:
    """The leaves of an item, as its metadata describe them.

    Args:
        files: the files of what it belongs to.
        folder: where it is, as for `read_item`.
        node: its metadata.
        notes: gets what could not be read, and is not needed.
        is_old: whether it has none, but a msgpack file.
    """

    def __init__(self, files: FolderFiles, folder: str, node: Any, notes: list[str], *, is_old: bool) -> None:
        has_manifest = files.has(folder + MANIFEST)
        in_database = has_manifest if node.get("use_ocdbt") is None else node["use_ocdbt"]
        self._files = files
        self._folder = folder
        # An item without arrays has no database.
        self._values = (read_database(files, folder) if has_manifest else {}) if in_database else None
        self._versions = (False, True) if is_old else (bool(node.get("use_zarr3")),)
        self._absent_is_zero = node.get("store_array_data_equal_to_fill_value") is not True
        self._shardings = _read_shardings(files, folder, notes)
        self._impls = _read_key_impls(files, folder)
        self._strings = files.document(folder + "_strings.json") or {}

    def leaf(self, name: str, kind: str, *, skipped: Any, shared: bool) -> ForeignLeaf | Container:
        """Return a leaf of a type; ``shared`` says that another one has its name."""
        if kind in EMPTY:
            return EMPTY[kind]
        if kind == "None":
            return ForeignLeaf(LeafType(kind="none"))
        if kind == "string":
            # Orbax takes the name for a JSON pointer, so that "/" in it leads into an object.
            node: Any = self._strings
            *outer, last = name.split("/")
            for part in outer:
                node = member(node, part, dict, "_strings.json")
            return ForeignLeaf(LeafType(kind="str"), member(node, last, str, "_strings.json"))
        if skipped:
            raise UnsupportedError(f"a leaf of the type {show(kind)} has no data", hint="use a newer treering")
        find, array = finder(self._files, self._folder, self._values, name), None
        for zarr3 in self._versions:
            array = array or find_array(find, zarr3=zarr3, located=self._values is not None)
        if array is None:
            raise CorruptError(f"the array {name!r:.200} is missing", hint=ANOTHER_COPY)
        if shared:
            array = array._replace(fetch=functools.partial(_refuse, name))
        elif kind == "scalar" and (number := array.number()) is not None:
            return number
        shape, impl = array.document.layout.shape, self._impls.get(name)
        kind = "numpy" if kind == "scalar" and shape else _KINDS.get(kind, "numpy") if impl is None else "key"
        found = _type_of(kind, array.document.layout.dtype, shape, self._shardings.get(name), impl)
        return array.leaf(found, absent_is_zero=self._absent_is_zero, data=None if shared else self._files)


@functools.lru_cache(maxsize=1024)
def _type_of(kind: str, dtype: str, shape: tuple[int, ...], sharding: str | None, impl: str | None) -> LeafType:
    node = {"kind": kind, "dtype": dtype, "shape": list(shape), "sharding": sharding, "impl": impl}
    return decode_type({name: value for name, value in node.items() if value is not None}, 0)


def _refuse(name: str, _: int) -> bytes:
    problem = f"two leaves have the name {name!r:.200}, and Orbax stored one array for both"
    raise CorruptError(problem, hint="load the others with only=; this one cannot be told apart")


def _read_key_impls(files: FolderFiles, folder: str) -> dict[str, str]:
    """Return the implementations of the typed PRNG keys by name: each process noted them for what it wrote."""
    found: dict[str, str] = {}
    place = f"{folder}array_metadatas"
    for file in files.names(place):
        for entry in member(files.document(f"{place}/{file}"), "array_metadatas", list, file):
            array = member(entry, "array_metadata", dict, file)
            if type(extended := array.get("ext_metadata")) is dict and "random_key_impl" in extended:
                found[member(array, "param_name", str, file)] = member(extended, "random_key_impl", str, file)
    return found


def _read_shardings(files: FolderFiles, folder: str, notes: list[str]) -> dict[str, str]:
    """Return how arrays lay on devices, as text for people; nothing depends on it."""
    try:
        return _show_shardings(files.document(folder + "_sharding") or {})
    except CorruptError as error:
        notes.append(f"the shardings that were recorded cannot be read: {error.message}")
        return {}


def _show_shardings(node: Any) -> dict[str, str]:
    if type(node) is not dict or not {*map(type, node.values())} <= {str}:
        raise CorruptError("_sharding is no object of texts")
    # Thousands of leaves have few between them.
    known = {text: _show_sharding(parse_json(text, "a sharding")) for text in {*node.values()}}
    names = {from_base64(key, "a name").decode("utf-8", "replace"): known[text] for key, text in node.items()}
    return {name: shown for name, shown in names.items() if shown is not None}


def _show_sharding(node: Any) -> str | None:
    if type(node) is not dict or node.get("sharding_type") != "NamedSharding":
        return None
    names, shape, spec = members(node, "a sharding", axis_names=list, shape=list, partition_spec=list)
    axes = [f"{axis}={size}" for axis, size in zip(names, shape, strict=False)]
    parts = [repr(tuple(part) if type(part) is list else part) for part in spec]
    return f"P({', '.join(parts)}) over {', '.join(axes)}"[:400]


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
            name = ".".join(members(node, _WHAT, module=str, clazz=str))
            keys = tuple([key for key, _ in children])
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
