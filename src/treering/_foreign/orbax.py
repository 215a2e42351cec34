"""Orbax's checkpoints: an item, a step of several, one of its v1 API, or the root of a CheckpointManager.

A root stands for its latest step. A step with one tree is that tree, one with several is a dict of them by item; JSON
items and metrics are its metadata, by item too. What was not committed is refused.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from treering._codec.documents import decode_text, member
from treering._foreign.folder_files import ANOTHER_COPY, FolderFiles, ForeignLeaf
from treering._foreign.foreign_tree import (
    EMPTY,
    PARTLY,
    Entry,
    ForeignStep,
    ForeignTree,
    build_tree,
    folder_tree,
    nested_leaves,
)
from treering._foreign.ocdbt import MANIFEST
from treering._foreign.orbax_item import METADATA, MSGPACK, OrbaxItem, find_msgpack, read_item
from treering._format.index import LeafType
from treering._store.resolve import has_renames
from treering._values.human import pluralize
from treering.errors import CorruptError, TreeringError, UnsupportedError

_LOADER_STATE: Final = "last_seen_indices"


def grain_entries(state: Any) -> list[Entry]:
    """Return what ``set_state`` takes, by paths.

    Example:
        >>> [(path, leaf.value) for path, leaf in grain_entries({"next": [7]})]
        [((('next', False), ('0', True)), 7)]
        >>> type(grain_entries({"last_seen_indices": {"0": 3}})[0][1].value)
        <class 'bytes'>
    """
    if type(state) is dict and _LOADER_STATE in state:
        state = json.dumps(state, indent=4).encode()
    entries: list[Entry] = []
    for path, value in nested_leaves(state, what=GRAIN)[0]:
        kind = "none" if value is None else type(value).__name__
        entries.append((path, EMPTY.get(kind.title(), ForeignLeaf(LeafType(kind=kind), value))))
    return entries


STEP_METADATA: Final = "_CHECKPOINT_METADATA"
"""The file with what is known of a step or of a checkpoint as a whole."""

_V1: Final = "orbax.checkpoint"
_COMMITTED: Final = "commit_success.txt"
_ROOT_METADATA: Final = "metadata/_ROOT_METADATA"
_UNCOMMITTED: Final = re.compile(r".*\.orbax-checkpoint-tmp(-[0-9]+)?")
_STEP: Final = re.compile(r"(?:.*[^0-9])?([0-9]{1,18})")
# Steps of flax may be any numbers, which Orbax's are not.
_NOT_WHOLE: Final = re.compile(r".*[0-9](\.|e[-+]?)[0-9]+|.*_-[0-9]+")
_METRICS: Final = "metrics"
GRAIN: Final = "process_0-of-1.json"
"""Where the state of an iterator of grain is, in a job of one process."""
_JSON_FILES: Final = ("metadata", _METRICS, GRAIN)
_GRAIN_OF_MANY: Final = re.compile(r"process_[0-9]+-of-([0-9]+)\.json")
_RANDOM_KEYS: Final = ("jax_random_key/", "np_random_key/")
_TAIL: Final = 4096
_SHOWN_STEPS: Final = 20
# What lies in an item beside items, whose looks would each be a request in a bucket.
_NO_ITEMS: Final = frozenset({STEP_METADATA, _COMMITTED, _V1, "d", "array_metadatas"})
_MARKS: Final = frozenset({METADATA, MSGPACK, STEP_METADATA, _COMMITTED, _V1, "default"})
_STEP_MARKS: Final = frozenset({STEP_METADATA, _COMMITTED})
_TIMES: Final = ("init_timestamp_nsecs", "commit_timestamp_nsecs")
_LATEST_NANOSECONDS: Final = 1 << 63
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
    if not has_renames(place) and not folder.has(found.folder + _COMMITTED):
        notes.append(f"it has no {_COMMITTED}: Orbax itself takes it for uncommitted in a bucket")
    # A run has a place for them, beside its trees; elsewhere they are metadata, and change the path of no leaf.
    grain = {name: path for name, path in found.documents.items() if path.endswith(GRAIN) and PARTLY.get()}
    others = {name: path for name, path in found.documents.items() if name not in grain}
    metadata = _read_metadata(folder, found._replace(documents=others), items, notes)
    alone = len(items) + len(grain) == 1
    parts = {name: item.entries for name, item in items.items()}
    parts |= {name: grain_entries(folder.document(path)) for name, path in grain.items()}
    entries = ((path if alone else [(name, False), *path], leaf) for name, part in parts.items() for path, leaf in part)
    containers = {
        path if alone else (name, *path): head for name, item in items.items() for path, head in item.containers.items()
    }
    return folder_tree(
        folder, *build_tree(entries, containers), metadata=metadata, notes=notes, unread=_find_unknown(folder, found)
    )


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
                read[item] = files.document(path, finite=item != _METRICS)
            except CorruptError as error:
                losses[item] = f"the item {item!r} cannot be read: {error.message}"
        noted, root = files.document(folder + STEP_METADATA), files.document(_ROOT_METADATA)
        times: list[Any] = [noted.get(time) if type(noted) is dict else None for time in _TIMES]
        is_known = type(times[0]) is int and 0 < times[0] < _LATEST_NANOSECONDS
        saved = times[0] / 1e9 if is_known else files.modified(folder + names[0])
    metrics, others = _divide_metrics(read.get(_METRICS))
    custom = root.get("custom_metadata") if type(root) is dict else None
    metadata = ({_METRICS: others} if others else {}) | ({"custom_metadata": custom} if type(custom) is dict else {})
    return ForeignStep(saved, repr((times, saved)), metrics, metadata, losses)


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
        if found is None and not _MARKS.isdisjoint(inside):
            hint = "pass the path of another step, or use another copy of it"
            lost = CorruptError(f"the latest step {name!r:.200} has no item that treering reads", hint=hint)
            if not _STEP_MARKS.isdisjoint(inside):
                raise refused or lost
            refused = refused or lost
        if found is not None and refused is not None:
            raise refused
        if found is not None:
            _require_whole(files, [step for _, step in steps])
            return found._replace(steps=[step for _, step in steps])
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
    return [(number, name) for number, name in steps if files.has(f"{name}/{_COMMITTED}")]


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
    with contextlib.suppress(
        CorruptError
    ):  # it has none, or is damaged, which is noted where its other members are read
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
    wanted = dict(found.documents)
    for name, path in wanted.items():
        with _noting(name, notes):
            metadata[name] = files.document(path)
    custom: dict[str, Any] = {}
    for path in (_ROOT_METADATA if found.steps else "", found.folder + STEP_METADATA):
        with _noting(path, notes):
            node = files.document(path) if path else None
            if type(node) is dict and type(node.get("custom_metadata")) is dict:
                custom |= node["custom_metadata"]
    for item in items.values():
        custom |= item.custom_metadata if type(item.custom_metadata) is dict else {}
    return metadata | ({"custom_metadata": custom} if custom else {})


@contextlib.contextmanager
def _noting(what: str, notes: list[str]) -> Any:
    """Note what of the metadata is no JSON, such as a metric that is NaN: the tree does not depend on it."""
    try:
        yield
    except TreeringError as error:
        notes.append(f"{what} is left out: {error.message}")
