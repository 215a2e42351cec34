"""Levanter's checkpoints: a zarr array for each leaf at its path, and ``metadata.json``, which marks them as committed.

Old ones have a folder for each array, newer ones an OCDBT database, the newest also a ``manifest.json`` that lists the
arrays. A folder of ``step-N`` stands for its latest committed step. The parts of the paths are all that is known of
the containers, so that each is a dict. Chunks of zeros are not stored.

Source: ``checkpoint.py``, ``tensorstore_serialization.py`` and ``checkpoint_manifest.py`` of Levanter.
"""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from treering._checkpoint.detect import holds_arrays
from treering._codec.documents import member, show
from treering._foreign.foreign_tree import (
    ANOTHER_COPY,
    FolderFiles,
    ForeignLeaf,
    ForeignStep,
    ForeignTree,
    Step,
    build_tree,
    folder_tree,
)
from treering._foreign.ocdbt import MANIFEST, Value, read_database
from treering._foreign.zarr_leaves import ZARR2, ZARR3, find_jax_array, finder
from treering._format.index import LIMIT, Container
from treering._values.keys import join_key, naming_leaf
from treering.errors import CorruptError, UnsupportedError

_METADATA: Final = "metadata.json"
_INVENTORY: Final = "manifest.json"
_VERSION: Final = 1
_STEP: Final = re.compile(r"(step|epoch)-([0-9]{1,18})")
_DOCUMENTS: Final = frozenset({ZARR3, ZARR2})
# Names of other programs that write the same document: Orbax, through which Levanter saved for a while, and eformer.
_OTHERS: Final = frozenset({"_METADATA", "tensorstore_index.json"})
_MOST_FOLDERS: Final = 1 << 20


def recognise(place: Path) -> str | None:
    """Detect a Levanter checkpoint: return its version, or None."""
    with contextlib.ExitStack() as stack:
        files = FolderFiles(place, stack)
        try:
            found = _look(files)
        except CorruptError:
            return "Levanter, damaged" if files.has(MANIFEST) or any(map(_STEP.fullmatch, files.names())) else None
        if found is None:
            return None
        base, _, notes = found
        storage = "OCDBT, zarr 3" if files.has(base + MANIFEST) else "plain, zarr 2"
        return f"Levanter, {storage}{', the latest of a root' if notes else ''}"


def open_foreign(place: Path, files: contextlib.ExitStack) -> ForeignTree:
    """Open the tree of a checkpoint, of a root that of its latest step.

    Raises:
        CorruptError: it is damaged, or lacks an array.
        UnsupportedError: it is of a newer version, or holds what has no form here.
        StoreError: the store refuses.
    """
    folder = FolderFiles(place, files)
    if (found := _look(folder)) is None:
        raise CorruptError("there is no committed checkpoint of Levanter in it", hint=ANOTHER_COPY)
    base, metadata, notes = found
    values = read_database(folder, base) if folder.has(base + MANIFEST) else None
    listed: Mapping[str, Any] | None = _read_inventory(folder, base)
    if listed is None:
        paths = ((name, file) for name, _, file in (key.rpartition("/") for key in values or ()))
        found_in = (name for name, file in paths if file in _DOCUMENTS)
        listed = dict.fromkeys(_walk(folder, base) if values is None else found_in)
    entries: list[tuple[Sequence[Step], ForeignLeaf | Container]] = []
    for name, entry in listed.items():
        path = name.split("/") if name else []
        with naming_leaf(join_key(path)):
            entries.append(([(part, False) for part in path], _leaf(folder, base, values, name, entry)))
    if not entries:
        raise CorruptError("there is no array in it", hint=ANOTHER_COPY)
    return folder_tree(folder, *build_tree(entries), metadata=metadata, notes=notes)


def list_steps(place: Path) -> dict[int, str]:
    """Return the committed steps of a root by the numbers in their documents, ascending; nothing where it is no root.

    Raises:
        UnsupportedError: two steps have one number.
        StoreError: the store refuses.
    """
    found: dict[int, str] = {}
    with contextlib.ExitStack() as stack:
        files = FolderFiles(place, stack)
        for match in filter(None, map(_STEP.fullmatch, [] if files.has(_METADATA) else files.names())):
            try:
                metadata = _read_metadata(files, f"{match[0]}/")
            except CorruptError:
                metadata = {"step": int(match[2])}  # `describe_step` says what is wrong with it
            if metadata is not None and found.setdefault(metadata["step"], match[0]) != match[0]:
                problem = f"{found[metadata['step']]!r} and {match[0]!r} are of the same step"
                raise UnsupportedError(problem, hint="move one of them out of the folder")
    return dict(sorted(found.items()))


def describe_step(place: Path, name: str) -> ForeignStep:
    """Return what is known of a step of a root beside its tree.

    Raises:
        CorruptError: it is damaged.
        StoreError: the store refuses.
    """
    with contextlib.ExitStack() as stack:
        metadata = _read_metadata(FolderFiles(place, stack), f"{name}/")
    try:
        saved = datetime.datetime.fromisoformat((metadata or {})["timestamp"]).timestamp()
    except (KeyError, ValueError, OverflowError):
        raise CorruptError(f"{name}/{_METADATA} has no step or no time", hint=ANOTHER_COPY) from None
    return ForeignStep(saved, repr(metadata), {}, {}, {})


def _look(files: FolderFiles) -> tuple[str, dict[str, Any], list[str]] | None:
    """Return the checkpoint in a folder, or the latest of the committed steps in it.

    Returns:
        Its folder, empty or with a ``/`` at its end; what its ``metadata.json`` says; what a listing says of a root.
    """
    if (metadata := _find_metadata(files, "")) is not None:
        return "", metadata, []
    steps = [match for name in files.names() if (match := _STEP.fullmatch(name)) is not None]
    steps.sort(key=lambda match: (match[1], int(match[2])), reverse=True)
    found: dict[str, tuple[int, str, dict[str, Any]]] = {}
    notes = [f"a root with {', '.join(match[0] for match in reversed(steps))}"]
    for match in steps:
        if match[1] in found:
            continue
        if (metadata := _find_metadata(files, f"{match[0]}/")) is not None:
            found[match[1]] = metadata["step"], match[0], metadata
        elif not _OTHERS.isdisjoint(files.names(match[0])):
            return None  # it may be committed, and is not older than what would be found
        else:
            notes.append(f"{match[0]} is passed over, for there is no {_METADATA} that commits it")
    if not found:
        return None
    # Steps and epochs count something else: their documents tell which was trained longer.
    _, name, metadata = max(found.values(), key=lambda one: one[0])
    return f"{name}/", metadata, [f"{notes[0]}; this is {name}", *notes[1:]]


def _find_metadata(files: FolderFiles, folder: str) -> dict[str, Any] | None:
    """Return what says that the checkpoint in a folder is committed; None where none of Levanter's is."""
    names = files.names(folder[:-1])
    if _METADATA not in names or not _OTHERS.isdisjoint(names):
        return None
    place = files.place / folder[:-1] if folder else files.place
    has_arrays = {MANIFEST, ZARR2}.intersection(names) or holds_arrays(place)
    return _read_metadata(files, folder) if has_arrays else None


def _read_metadata(files: FolderFiles, folder: str) -> dict[str, Any] | None:
    node = files.document(folder + _METADATA)
    is_ours = type(node) is dict and type(node.get("step")) is int and type(node.get("timestamp")) is str
    return node if is_ours and 0 <= node["step"] < LIMIT else None


def _read_inventory(files: FolderFiles, folder: str) -> dict[str, Any] | None:
    """Return the arrays that a checkpoint lists, by name; None where it has no list."""
    if (node := files.document(folder + _INVENTORY)) is None:
        return None
    if (version := member(node, "format_version", int, _INVENTORY)) > _VERSION:
        problem = f"{_INVENTORY} is of the version {show(version)}, this reads {_VERSION}"
        raise UnsupportedError(problem, hint="use a newer treering")
    entries = member(node, "arrays", list, _INVENTORY)
    return {member(entry, "path", str, _INVENTORY).rstrip("/"): entry for entry in entries}


def _walk(files: FolderFiles, folder: str) -> Iterator[str]:
    waiting, seen = [""], 0
    while waiting:
        here = waiting.pop()
        names = files.list_names((folder + here)[:-1])
        if not _DOCUMENTS.isdisjoint(names):
            yield here[:-1]
            continue
        waiting.extend(f"{here}{name}/" for name in reversed(names))
        seen += 1
        if seen + len(waiting) > _MOST_FOLDERS:
            raise UnsupportedError(f"it has more than {_MOST_FOLDERS} folders")


def _leaf(files: FolderFiles, folder: str, values: Mapping[str, Value] | None, name: str, entry: Any) -> ForeignLeaf:
    """Return an array as a leaf; ``entry`` is what the checkpoint's list says of it."""
    leaf = find_jax_array(files, finder(files, folder, values, name), zarr3=values is not None)
    dtype, shape = leaf.type.dtype, list(leaf.type.shape or ())
    if entry is not None and (entry.get("dtype"), entry.get("shape")) != (dtype, shape):
        problem = f"{_INVENTORY} says another dtype or shape than its array has, {dtype} {shape}"
        raise CorruptError(problem, hint=ANOTHER_COPY)
    return leaf
