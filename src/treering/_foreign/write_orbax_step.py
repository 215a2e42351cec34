"""Several items in one folder, as Orbax's ``CheckpointManager`` has them in a step, and what a root of steps is.

An item is a tree, the state of an iterator of grain, or JSON. A note beside the items says what a step was made of.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from treering._arrays.source import Source
from treering._arrays.source_arrays import describe_source
from treering._background.writer import Watch
from treering._checkpoint.detect import refuse_other_form
from treering._checkpoint.forms import Loss, lost_containers
from treering._checkpoint.save_options import SaveOptions
from treering._codec.documents import decode_text, member, parse_json
from treering._foreign import write_orbax
from treering._foreign.folder_files import FolderFiles, ForeignLeaf
from treering._foreign.foreign_tree import PARTLY, keys_of
from treering._foreign.orbax import GRAIN, grain_entries, list_steps, recognise
from treering._foreign.write_orbax import (
    COMMITTED,
    MARK,
    PYTREE,
    UNCOMMITTED,
    empty_paths,
    leaf_value,
    require_disk,
    write_facts,
    write_item,
)
from treering._format.index import Container
from treering._format.run_document import Conversion, find_note, remove_note
from treering._format.selection import Selection, select
from treering._format.structure import build
from treering._store.api import StagedFolder
from treering._store.resolve import is_folder, new_folder
from treering._values.keys import join_key, split_key
from treering.errors import CorruptError, ExistsError, UnsupportedError

_NOTE: Final = "treering_conversion.json"
_JSON: Final = "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler"
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,99}")
_METRICS: Final = "metrics"
_RESERVED: Final = frozenset({_METRICS, _NOTE, COMMITTED, "array_metadatas", "d", "manifest.ocdbt"})
"""What has another meaning in a folder of Orbax."""
_KINDS: Final = ("grain", "json")


class _Item(NamedTuple):
    """An item that is asked for."""

    name: str
    kind: str
    """Empty for a tree, ``grain`` or ``json``."""
    key: str
    """Of the subtree, or of the member of the metadata."""


def parse_items(items: Mapping[str, str]) -> list[_Item]:
    """Return the items that a caller names.

    Raises:
        UnsupportedError: a name is none of an item, or there is none.

    Example:
        >>> [tuple(item) for item in parse_items({"state": "opt", "data": "grain:data", "config": "json:config"})]
        [('state', '', 'opt'), ('data', 'grain', 'data'), ('config', 'json', 'config')]
    """
    found = []
    for name, text in items.items():
        if not _NAME.fullmatch(name) or name in _RESERVED or UNCOMMITTED in name:
            hint = f"letters, digits, '_', '-' and '.', and none of {', '.join(sorted(_RESERVED))}"
            raise UnsupportedError(f"{name!r:.100} is no name of an item", hint=hint)
        kind, colon, key = text.partition(":")
        found.append(_Item(name, kind, key) if colon and kind in _KINDS else _Item(name, "", text))
    if not found:
        raise UnsupportedError("items= names no item", hint="omit it, or pass {'params': 'params'}")
    if all(item.kind for item in found):
        raise UnsupportedError("items= names no tree", hint="add one, such as 'params': 'params'")
    return found


class StepWriter:
    """Writes a tree as the items of one folder; ``items`` says which subtree is which."""

    def __init__(self, items: Mapping[str, str]) -> None:
        self._items = parse_items(items)

    def find_losses(self, source: Source, part: Selection, metadata: Mapping[str, Any]) -> Iterator[Loss]:
        """Yield what no item holds, and what an item cannot hold."""
        keys = dict(zip(part.leaves, part.keys, strict=True))
        left = dict(keys)
        for item in self._items:
            if item.kind == "json":
                if item.key not in metadata:
                    raise UnsupportedError(f"the metadata have no member {item.key!r:.100} for the item {item.name!r}")
                continue
            inner = _below(part, item.key)
            for leaf in inner.leaves:
                left.pop(leaf, None)
            if not item.kind:
                # By the keys that they have in the whole tree, which globs are compared with.
                named = dataclasses.replace(inner, keys=[keys[leaf] for leaf in inner.leaves])
                yield from write_orbax.find_losses(source, named, {}, split_key(item.key))
                continue
            if (why := _why_no_state(source, inner)) is not None:
                for key in (keys[leaf] for leaf in inner.leaves):
                    yield Loss("items", key, f"leaf {key!r:.200} of the item {item.name!r}: {why}")
            yield from lost_containers(inner.structure, empty=False, above=split_key(item.key))
        yield from self._lost_members(metadata)
        listed = ", ".join(item.name for item in self._items)
        for key in left.values():
            yield Loss("items", key, f"leaf {key!r:.200}: it is in none of the items {listed}")
        # What has no leaf is left behind by no leaf's name.
        for path in empty_paths(part.structure):
            if not any(
                path[: len(at)] == at for at in (split_key(item.key) for item in self._items if item.kind != "json")
            ):
                key = join_key(path)
                yield Loss("structure", key, f"the empty container {key!r:.200}: it is in none of the items {listed}")

    def write(self, source: Source, part: Selection, save: SaveOptions, watch: Watch) -> dict[str, Any]:
        """Write the folder; return what treering reads as its tree by its keys."""
        require_disk(save)
        refuse_other_form(save.path, "orbax")
        metadata = save.json_metadata()
        note = find_note(metadata)
        began = time.time_ns() if note is None else 1000 * round(note.saved * 1_000_000)
        metrics, custom = self._divide(metadata)
        documents = {f"{item.name}/metadata": metadata[item.key] for item in self._items if item.kind == "json"}
        if metrics:
            documents[f"{_METRICS}/{_METRICS}"] = metrics
        if note is not None and note.converted is not None:
            documents[_NOTE] = dataclasses.asdict(note.converted)
        handlers = {item.name: PYTREE for item in self._items if not item.kind}
        handlers |= {name.partition("/")[0]: _JSON for name in documents if "/" in name}
        with new_folder(save.path, UNCOMMITTED) as folder:
            for name, document in documents.items():
                folder.write(name, json.dumps(document).encode())
            written = {
                item.name: self._write_item(folder, item, source, part, save=save, watch=watch) for item in self._items
            }
            for name in {**handlers, **written}:  # as Orbax does, for copies to where no rename is
                folder.write(f"{name}/{COMMITTED}", MARK)
            write_facts(folder, handlers, (began, began if note is not None else time.time_ns()), custom)
            watch.claim()
        trees = {name: leaves for name, leaves in written.items() if leaves is not None}
        if len(trees) == 1:
            return next(iter(trees.values()))
        rows = ((name, key, leaf) for name, leaves in trees.items() for key, leaf in leaves.items())
        return {join_key([name, *split_key(key)]): leaf for name, key, leaf in rows}

    def _lost_members(self, metadata: Mapping[str, Any]) -> Iterator[Loss]:
        """Yield the members of the metadata in whose place others of the same name would be."""
        items = {item.key for item in self._items if item.kind == "json"}
        rest = {name: value for name, value in remove_note(metadata).items() if name not in items}
        note = find_note(metadata)
        metrics = {} if note is None else note.metrics
        own = rest.pop(_METRICS, {}) if metrics else {}
        if type(own) is not dict or any(name in own and repr(own[name]) != repr(metrics[name]) for name in metrics):
            yield Loss("metadata", _METRICS, "the member 'metrics' of the metadata: the step has such metrics too")
        yield from write_orbax.lost_overlaps(rest)

    def _divide(self, metadata: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what was measured at a step, and what the user wrote that is in no item."""
        note = find_note(metadata)
        measured = {} if note is None else metadata.get(_METRICS, {})
        metrics = (measured if type(measured) is dict else {}) | dict({} if note is None else note.metrics)
        items = {item.key for item in self._items if item.kind == "json"} | ({_METRICS} if metrics else set())
        return metrics, write_orbax.custom_metadata({k: v for k, v in remove_note(metadata).items() if k not in items})

    def _write_item(
        self, folder: StagedFolder, item: _Item, source: Source, part: Selection, *, save: SaveOptions, watch: Watch
    ) -> dict[str, Any] | None:
        """Write an item; return its leaves by their keys, and None where treering reads it as metadata."""
        if item.kind == "json":
            return None
        inner = _below(part, item.key)
        if not item.kind:
            return write_item(folder, f"{item.name}/", source, inner, save=save, watch=watch)
        text = _state_text(source, inner)
        folder.write(f"{item.name}/{GRAIN}", text)
        if not PARTLY.get():
            return None
        rows = grain_entries(json.loads(text))
        return {join_key(keys_of(path)): leaf.value for path, leaf in rows if isinstance(leaf, ForeignLeaf)}


def _below(part: Selection, key: str) -> Selection:
    if not key:
        return part
    inner = select(part.structure, part.keys, at=key, only=None)
    return dataclasses.replace(inner, leaves=[part.leaves[leaf] for leaf in inner.leaves])


def _why_no_state(source: Source, part: Selection) -> str | None:
    """Say why a subtree is no state of an iterator of grain; None where it is one."""
    kinds = {source.index.type_of(leaf).kind for leaf in part.leaves}
    if kinds == {"bytes"} and len(part.leaves) == 1 and part.keys[0] == "":
        return _why_no_json(_state_text(source, part))
    odd = kinds - {"none", "bool", "int", "float", "str"}
    odd |= {token.node for token in part.structure if isinstance(token, Container)} - {"dict", "list"}
    if odd:
        return f"a state of grain is JSON, or bytes alone, and has no {min(odd)}"
    return _why_no_json(_state_text(source, part))


def _why_no_json(text: bytes) -> str | None:
    try:
        parse_json(decode_text(text, "the text"), "the text")
    except CorruptError as error:
        return f"a state of grain is JSON: {error.message}"
    return None


def _state_text(source: Source, part: Selection) -> bytes:
    """Return a subtree as the text that grain writes."""
    leaves = describe_source(source, part)
    state = build(part.structure, [leaf_value(leaves, number) for number in range(len(part.leaves))])
    return state if isinstance(state, bytes) else json.dumps(state, indent=4).encode()


def find_conversions(save: SaveOptions) -> dict[int, Conversion | None]:
    """Return the steps of the root at a path by their numbers, each with what it was converted from, if it was.

    Raises:
        UnsupportedError: it would be in a bucket.
        ExistsError: it is no such root.
        CorruptError, UnsupportedError, StoreError: as `list_steps`.
    """
    require_disk(save)
    if not is_folder(place := save.path):
        return {}
    refuse_other_form(place, "orbax")
    if not (steps := list_steps(place)) and (seen := recognise(place)) is not None:
        raise ExistsError(f"{os.fspath(place)!r} is {seen}, and no root of steps", hint="convert to another path")
    found: dict[int, Conversion | None] = {}
    with contextlib.ExitStack() as stack:
        files = FolderFiles(place, stack)
        for number, name in steps.items():
            node = files.document(f"{name}/{_NOTE}")
            found[number] = None if node is None else _conversion(node)
    return found


def _conversion(node: Any) -> Conversion:
    path, digest = (str(member(node, name, str, _NOTE)) for name in ("path", "digest"))
    return Conversion(path, int(member(node, "step", int, _NOTE)), digest)
