"""An opened tree -> what Orbax restores: an item of its v0 API, with arrays of zarr 2 in one OCDBT database.

TensorStore writes the database. Arrays go into it a chunk at a time; what is small is committed together. The folder
has the name that Orbax gives to unfinished ones until all of it is durable.

Source: https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpoint_format.html, and files of its releases.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from treering._arrays.jobs import Tally
from treering._arrays.outgoing import DescribedLeaves
from treering._arrays.source import Source
from treering._arrays.source_arrays import SourceArray, describe_source
from treering._background.writer import Watch
from treering._checkpoint.detect import refuse_other_form
from treering._checkpoint.forms import Loss, key_texts, lost_containers, lost_leaves, lost_names, refuse_others
from treering._checkpoint.save_options import SaveOptions
from treering._codec.documents import decode_text, members, parse_json
from treering._codec.zarr import ZarrArray, chunk_bytes, chunk_name, is_stored, zarray_bytes
from treering._foreign.foreign_tree import EMPTY, PARTLY, FolderFiles, ForeignLeaf, Step, keys_of
from treering._foreign.ocdbt import DatabaseWriter
from treering._foreign.orbax import COMMITTED, GRAIN, METRICS, STEP_METADATA, grain_entries, list_steps, recognise
from treering._format.index import Container, LeafType, Token, leaf_bytes
from treering._format.run_document import Conversion, find_note, remove_note
from treering._format.selection import Selection, select
from treering._format.structure import build, key_text, walk
from treering._plan.chunks import chunk_shape
from treering._store.api import StagedFolder
from treering._store.resolve import is_folder, new_folder, require_paths, require_space, resolved
from treering._values.dtypes import itemsize_of
from treering._values.human import pluralize
from treering._values.keys import join_key, quoted_key, split_key
from treering.errors import CorruptError, ExistsError, UnsupportedError

_UNCOMMITTED: Final = ".orbax-checkpoint-tmp"
"""What follows the name of a folder that is not whole yet."""

_HANDLERS: Final = "orbax.checkpoint._src.handlers."
_PYTREE: Final = f"{_HANDLERS}standard_checkpoint_handler.StandardCheckpointHandler"
"""What restores a tree."""
_MARK: Final = b"Checkpoint commit was successful"
"""What is in it."""
_COPIES: Final = {"s3": "aws s3 cp --recursive", "gs": "gcloud storage cp -r", "az": "azcopy copy --recursive"}
_CHUNK_BYTES: Final = 16 << 20
_MOST_AXES: Final = 32
_NUMBERS: Final = {"bool": "|b1", "int": "<i8", "float": "<f8"}
_VALUE_TYPES: Final = {
    "jax": "jax.Array", "key": "jax.Array", "numpy": "np.ndarray", "numpy scalar": "np.ndarray",
    "str": "string", "none": "None", **dict.fromkeys(_NUMBERS, "scalar"),
}  # fmt: skip
_EMPTY: Final = {container.node: name for name, container in EMPTY.items()}
_SEQUENCES: Final = frozenset({"list", "tuple"})
_KEY_TYPES: Final = {True: 1, False: 2}
# TensorStore takes names for paths, without a slash too many.
_ODD: Final = re.compile("[\ud800-\udfff]|^/|//|/$")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
# A key of OCDBT has at most 65,535 bytes, and the end of one says which chunk it is.
_LONGEST_NAME: Final = 64_000
# The texts of all leaves are one JSON document, which is as deep as a name has slashes.
_MOST_SLASHES: Final = 100
_LIMITS: Final = range(-(1 << 63), 1 << 63)


def find_losses(
    source: Source, part: Selection, metadata: Mapping[str, Any], above: Sequence[str] = ()
) -> Iterator[Loss]:
    """Yield what Orbax cannot hold: other leaves than arrays, numbers, texts and None, and names that are not alone."""
    yield from lost_overlaps(metadata)
    yield from lost_containers(part.structure, empty=False, above=above)
    yield from lost_leaves(source, part, _refuse)
    names = [".".join(split_key(key)) for key in key_texts(part.structure)]
    yield from lost_names(part.keys, names, _is_odd)
    rows = list(zip(part.keys, names, part.leaves, strict=True))
    texts = {name for _, name, leaf in rows if source.index.type_of(leaf).kind == "str"}
    described = describe_source(source, part) if texts else None
    for number, (key, name, leaf) in enumerate(rows):
        value = source.index.values.get(leaf)
        if type(value) is int and value not in _LIMITS:
            yield Loss("scalars", key, f"leaf {quoted_key(key)}: an int of more than 64 bits")
        elif described and name in texts and _SURROGATE.search(leaf_value(described, number)):
            yield Loss(
                "strings", key, f"leaf {quoted_key(key)}: a str with half of a surrogate pair, which is no UTF-8"
            )
        elif name in texts and _is_no_pointer(name, texts):
            yield Loss(
                "names", key, f"leaf {quoted_key(key)}: {name!r:.200} is no name of a text, which are a tree by '/'"
            )


def lost_overlaps(metadata: Mapping[str, Any]) -> Iterator[Loss]:
    """Yield the members of the metadata in whose place others of the same name would be."""
    kept = custom_metadata(metadata)
    for name, value in metadata.items():
        if name in kept and kept[name] is not value and repr(kept[name]) != repr(value):
            yield Loss("metadata", name, f"the member {name!r:.200} of the metadata: custom_metadata have it too")


def _is_odd(name: str) -> bool:
    return _ODD.search(name) is not None or len(name.encode()) > _LONGEST_NAME


def _is_no_pointer(name: str, texts: AbstractSet[str]) -> bool:
    """Tell whether a text cannot be found by its name, a pointer into JSON."""
    parts = name.split("/")
    above = ("/".join(parts[:count]) for count in range(1, len(parts)))
    return "~" in name or len(parts) > _MOST_SLASHES + 1 or not texts.isdisjoint(above)


def _refuse(kind: LeafType) -> str | None:
    """Say what a leaf is that Orbax has no form for; None where it has one."""
    if kind.kind not in _VALUE_TYPES:
        return refuse_others(kind, ())
    if not kind.stored or kind.kind == "str":
        return None
    if not is_stored(kind.dtype):
        return f"an array of {kind.dtype}"
    axes = len(kind.shape or ())
    return f"an array of {pluralize(axes, 'axes')}" if axes > _MOST_AXES else None


def write(source: Source, part: Selection, save: SaveOptions, watch: Watch) -> dict[str, Any]:
    """Write the folder; return what is in it by its keys."""
    require_place(save)
    metadata = save.json_metadata()
    began = time.time_ns()
    with new_folder(save.path, _UNCOMMITTED) as folder:
        written = write_item(folder, "", source, part, save=save, watch=watch)
        write_facts(folder, _PYTREE, (began, time.time_ns()), custom_metadata(metadata))
        watch.claim()
    return written


def custom_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata as Orbax has the user's: what it had of them already is among the rest again.

    Example:
        >>> custom_metadata({"git": "abc", "custom_metadata": {"by": "me"}})
        {'git': 'abc', 'by': 'me'}
    """
    own = metadata.get("custom_metadata")
    if type(own) is not dict:
        return dict(metadata)
    return {name: value for name, value in metadata.items() if name != "custom_metadata"} | own


def require_place(save: SaveOptions) -> None:
    """Refuse a bucket, to which nothing is renamed when it is whole, and a folder of another form.

    Raises:
        UnsupportedError: the path leads to a bucket, or is no UTF-8, as all paths of TensorStore's are.
        ExistsError, FormatError, LinkRefusedError, StoreError: as `refuse_other_form`.
    """
    commands = ["treering convert SOURCE folder --to orbax"]
    if (copy := _COPIES.get(save.shown.partition(":")[0])) is not None:
        commands.append(f"{copy} folder {save.shown}")
    hint = f"write it to a folder on disk, and copy that into the bucket: {'; '.join(commands)}"
    require_paths(save.path, f"{save.shown!r} is in a bucket, and the form orbax is written to disk alone", hint)
    try:
        os.fspath(resolved(save.path)).encode()
    except UnicodeEncodeError as error:
        what = f"{save.shown!r} leads to a path that is no UTF-8, as it has to be for TensorStore, which writes it"
        raise UnsupportedError(what, hint="choose another path") from error
    refuse_other_form(save.path, "orbax")


def write_facts(folder: StagedFolder, handlers: Any, times: tuple[int, int], custom: Mapping[str, Any]) -> None:
    """Write what is known of a checkpoint as a whole, and the mark that it is one.

    Args:
        folder: the folder.
        handlers: what restores it, or each of its items by name.
        times: when it was begun and ended, in nanoseconds.
        custom: what the user wrote beside it.
    """
    facts = {
        "item_handlers": handlers, "metrics": {}, "performance_metrics": {},
        "init_timestamp_nsecs": times[0], "commit_timestamp_nsecs": times[1], "custom_metadata": dict(custom),
    }  # fmt: skip
    folder.write(STEP_METADATA, json.dumps(facts).encode())
    folder.write(COMMITTED, _MARK)


# ---------------------------------------------------------------------------------------------------------------- items


class _Leaf(NamedTuple):
    """A leaf as Orbax stores it."""

    name: str
    """Its name in the database."""
    kind: LeafType
    value: Any
    """A `SourceArray`, or a Python value."""
    array: ZarrArray | None
    """How it lies in the database, if it does."""


def write_item(
    folder: StagedFolder, below: str, source: Source, part: Selection, *, save: SaveOptions, watch: Watch
) -> dict[str, Any]:
    """Write a tree into a staged folder; return what is in it by its keys.

    Args:
        folder: the folder.
        below: empty, or the name of the folder in it, with a ``/`` at its end.
        source: the tree.
        part: which part of it.
        save: how it is saved.
        watch: watches the save.
    """
    described = describe_source(source, part)
    entries: dict[str, Any] = {}
    leaves: list[_Leaf] = []
    for path, container in _walk_paths(part.structure):
        if container is None:
            leaf = _leaf(described, len(leaves), ".".join([key for key, _ in path]))
            leaves.append(leaf)
            entries |= _entry(path, _VALUE_TYPES[leaf.kind.kind], leaf.array)
        else:
            entries |= _entry(path, _EMPTY.get(container.node, "Dict"))
    _write_arrays(folder, below, leaves, save, watch)
    of_jax = [leaf for leaf in leaves if leaf.kind.kind in ("jax", "key")]
    documents: dict[str, Any] = {
        "_METADATA": {
            "tree_metadata": entries, "use_ocdbt": True, "use_zarr3": False,
            "store_array_data_equal_to_fill_value": True, "custom_metadata": None,
        },
        "_sharding": {base64.b64encode(leaf.name.encode()).decode(): _sharding() for leaf in of_jax},
        "array_metadatas/process_0": {"array_metadatas": list(map(_describe_array, of_jax))},
        "_strings.json": _nest({leaf.name: leaf.value for leaf in leaves if leaf.kind.kind == "str"}),
    }  # fmt: skip
    for name, document in documents.items():
        if document:
            folder.write(below + name, json.dumps(document).encode())
    return dict(zip(key_texts(part.structure), [leaf.value for leaf in leaves], strict=True))


def _nest(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return texts as Orbax finds them, which takes their names for JSON pointers.

    Example:
        >>> _nest({"a/b": "x", "c": "y"})
        {'a': {'b': 'x'}, 'c': 'y'}
    """
    root: dict[str, Any] = {}
    for name, text in texts.items():
        *above, last = name.split("/")
        functools.reduce(lambda node, key: node.setdefault(key, {}), above, root)[last] = text
    return root


def _walk_paths(structure: Sequence[Token]) -> Iterator[tuple[list[Step], Container | None]]:
    """Yield the path of each leaf, and of each empty container together with it."""
    above: list[Step] = []
    levels: list[list[Step]] = []
    for depth, place, token in walk(structure):
        del levels[depth:], above[max(depth - 1, 0) :]
        heads = levels[-1] if depth else []
        if isinstance(token, Container):
            above += heads[place : place + 1]
            # A list that lost items is a dict from then on: Orbax and we refuse one with gaps.
            listed = token.node in _SEQUENCES and not token.thinned
            levels.append([(key_text(key), listed) for key in token.keys])
            if not token.keys:
                yield list(above), token
        else:
            for step in heads[place : place + token] if depth else [None]:
                yield [*above, *([] if step is None else [step])], None


def _entry(path: Sequence[Step], kind: str, array: ZarrArray | None = None) -> dict[str, Any]:
    """Return what the metadata say of a leaf."""
    value: dict[str, Any] = {"value_type": kind, "skip_deserialize": kind in EMPTY or kind == "None"}
    if array is not None and kind != "scalar":
        value["write_shape"] = array.chunks
    keys = [{"key": key, "key_type": _KEY_TYPES[listed]} for key, listed in path]
    return {str(tuple([key for key, _ in path])): {"key_metadata": keys, "value_metadata": value}}


def _leaf(described: DescribedLeaves, number: int, name: str) -> _Leaf:
    kind = described.types[described.leaf_types[number]]
    value = leaf_value(described, number)
    dtype, shape = {"bool": "bool", "int": "int64", "float": "float64"}.get(kind.kind, kind.dtype), kind.shape or ()
    return _Leaf(name, kind, value, None if kind.kind in ("str", "none") or dtype is None else _layout(dtype, shape))


def leaf_value(described: DescribedLeaves, number: int) -> Any:
    """Return a leaf: an array to read, or a Python value, which is read now where it is a long one."""
    if number not in described.sources:
        return described.values[number]
    value, kind = described.whole_of(number), described.types[described.leaf_types[number]].kind
    if kind not in ("str", "bytes"):
        return value
    data = b"".join(value.blocks(0, value.size))
    return data if kind == "bytes" else data.decode("utf-8", "surrogatepass")


@functools.lru_cache(maxsize=1024)
def _layout(dtype: str, shape: tuple[int, ...]) -> ZarrArray:
    chunks = chunk_shape(shape, (), itemsize_of(dtype), _CHUNK_BYTES)
    if (axis := _cut_axis(shape, chunks)) is not None:
        # Raw chunks are as long as all others at the end of an axis too: of few rows, a part may be much of the whole.
        most = chunks[axis]
        even = next((part for part in range(most, most // 8, -1) if not shape[axis] % part), most)
        chunks = (*chunks[:axis], even, *chunks[axis + 1 :])
    return ZarrArray(shape=shape, chunks=chunks, dtype=dtype)


def _cut_axis(shape: Sequence[int], chunks: Sequence[int]) -> int | None:
    """Return the last axis along which there are several chunks; along those before, each is one item."""
    cut = [axis for axis, (whole, part) in enumerate(zip(shape, chunks, strict=True)) if part < whole]
    return cut[-1] if cut else None


@functools.cache
def _sharding() -> str:
    """Return where arrays are restored that no target has: the device where this process has them."""
    return json.dumps({"sharding_type": "SingleDeviceSharding", "device_str": str(jax.local_devices()[0])})


def _describe_array(leaf: _Leaf) -> dict[str, Any]:
    chunks = None if leaf.array is None else leaf.array.chunks
    extended = None if leaf.kind.impl is None else {"random_key_impl": leaf.kind.impl}
    shapes = {"write_shape": chunks, "chunk_shape": chunks}
    return {"array_metadata": {"param_name": leaf.name, **shapes, "ext_metadata": extended}}


# ------------------------------------------------------------------------------------------------------------- database


def _write_arrays(folder: StagedFolder, below: str, leaves: Sequence[_Leaf], save: SaveOptions, watch: Watch) -> None:
    """Write the arrays and numbers into a database.

    Raises:
        StoreError: TensorStore could not write.
    """
    total = sum(leaf_bytes(leaf.kind) for leaf in leaves if leaf.kind.kind != "str")
    require_space(folder.path, total)
    tally = Tally(total, save.progress)
    with DatabaseWriter(f"{folder.path}/{below}", save.shown) as database:
        for leaf in leaves:
            if leaf.array is None:
                continue
            start = f"{leaf.name}/" if leaf.name else ""
            database.put(f"{start}.zarray", zarray_bytes(leaf.array))
            if not isinstance(leaf.value, SourceArray):
                database.put(f"{start}0", np.array(leaf.value, _NUMBERS[leaf.kind.kind]).tobytes())
                continue
            for number, chunk in enumerate(_chunks(leaf.value, leaf.array)):
                watch.move()
                database.put(start + chunk_name(leaf.array, number), chunk)
                tally.add(min(len(chunk), leaf.value.nbytes))


def _chunks(value: SourceArray, array: ZarrArray) -> Iterator[bytes]:
    """Yield the chunks of an array, each of which is a stretch of its items, the last of a row filled with zeros."""
    row = left = math.prod(array.shape[_cut_axis(array.shape, array.chunks) or 0 :]) * value.dtype.itemsize
    size = chunk_bytes(array)
    held = bytearray()
    for block in value.blocks(0, value.size):
        at = 0
        while at < len(block):
            taken = min(size - len(held), left, len(block) - at)
            piece = block[at : at + taken]
            at, left = at + taken, left - taken
            if taken == size:
                yield bytes(piece)  # all of a chunk, copied once
            else:
                held += piece
                if len(held) == size or not left:
                    yield bytes(held.ljust(size, b"\0"))
                    held.clear()
            left = left or row


# ------------------------------------------------------------------------------------------------------ items of a step
# Several items in one folder, as Orbax's ``CheckpointManager`` has them: each a tree, a state of grain, or JSON.

_NOTE: Final = "treering_conversion.json"
_JSON: Final = "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler"
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,99}")
_RESERVED: Final = frozenset({METRICS, _NOTE, COMMITTED, "array_metadatas", "d", "manifest.ocdbt"})
"""What has another meaning in a folder of Orbax."""


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
    found: list[_Item] = []
    for name, text in items.items():
        if not _NAME.fullmatch(name) or name in _RESERVED or _UNCOMMITTED in name:
            hint = f"letters, digits, '_', '-' and '.', and none of {', '.join(sorted(_RESERVED))}"
            raise UnsupportedError(f"{name!r:.100} is no name of an item", hint=hint)
        kind, colon, key = text.partition(":")
        found.append(_Item(name, kind, key) if colon and kind in ("grain", "json") else _Item(name, "", text))
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
                yield from find_losses(source, named, {}, split_key(item.key))
                continue
            if (why := _why_no_state(source, inner)) is not None:
                for key in (keys[leaf] for leaf in inner.leaves):
                    yield Loss("items", key, f"leaf {quoted_key(key)} of the item {item.name!r}: {why}")
            yield from lost_containers(inner.structure, empty=False, above=split_key(item.key))
        yield from self._lost_members(metadata)
        listed = ", ".join(item.name for item in self._items)
        for key in left.values():
            yield Loss("items", key, f"leaf {quoted_key(key)}: it is in none of the items {listed}")
        # What has no leaf is left behind by no leaf's name.
        roots = [split_key(item.key) for item in self._items if item.kind != "json"]
        for path in [keys_of(path) for path, container in _walk_paths(part.structure) if container is not None]:
            if all(path[: len(root)] != root for root in roots):
                key = join_key(path)
                yield Loss("structure", key, f"the empty container {key!r:.200}: it is in none of the items {listed}")

    def write(self, source: Source, part: Selection, save: SaveOptions, watch: Watch) -> dict[str, Any]:
        """Write the folder; return what treering reads as its tree by its keys."""
        require_place(save)
        metadata = save.json_metadata()
        note = find_note(metadata)
        began = time.time_ns() if note is None else 1000 * round(note.saved * 1_000_000)
        metrics, custom = self._divide(metadata)
        documents = {f"{item.name}/metadata": metadata[item.key] for item in self._items if item.kind == "json"}
        if metrics:
            documents[f"{METRICS}/{METRICS}"] = metrics
        if note is not None and note.converted is not None:
            documents[_NOTE] = dataclasses.asdict(note.converted)
        handlers = {item.name: _PYTREE for item in self._items if not item.kind}
        handlers |= {name.partition("/")[0]: _JSON for name in documents if "/" in name}
        with new_folder(save.path, _UNCOMMITTED) as folder:
            for name, document in documents.items():
                folder.write(name, json.dumps(document).encode())
            written: dict[str, dict[str, Any] | None] = {}
            for item in self._items:
                written[item.name] = self._write_item(folder, item, source, part, save=save, watch=watch)
            for name in {**handlers, **written}:  # as Orbax does, for copies to where no rename is
                folder.write(f"{name}/{COMMITTED}", _MARK)
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
        own = rest.pop(METRICS, {}) if metrics else {}
        if type(own) is not dict or any(name in own and repr(own[name]) != repr(metrics[name]) for name in metrics):
            yield Loss("metadata", METRICS, "the member 'metrics' of the metadata: the step has such metrics too")
        yield from lost_overlaps(rest)

    def _divide(self, metadata: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what was measured at a step, and what the user wrote that is in no item."""
        note = find_note(metadata)
        measured = {} if note is None else metadata.get(METRICS, {})
        metrics = (measured if type(measured) is dict else {}) | dict({} if note is None else note.metrics)
        items = {item.key for item in self._items if item.kind == "json"} | ({METRICS} if metrics else set())
        return metrics, custom_metadata({k: v for k, v in remove_note(metadata).items() if k not in items})

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
    odd = kinds - {"none", "bool", "int", "float", "str"}
    odd |= {token.node for token in part.structure if isinstance(token, Container)} - {"dict", "list"}
    if odd and (kinds != {"bytes"} or list(part.keys) != [""]):
        return f"a state of grain is JSON, or bytes alone, and has no {min(odd)}"
    try:
        parse_json(decode_text(_state_text(source, part), "the text"), "the text")
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
    require_place(save)
    if not is_folder(place := save.path):
        return {}
    if not (steps := list_steps(place)) and (seen := recognise(place)) is not None:
        raise ExistsError(f"{os.fspath(place)!r} is {seen}, and no root of steps", hint="convert to another path")
    found: dict[int, Conversion | None] = {}
    with contextlib.ExitStack() as stack:
        files = FolderFiles(place, stack)
        for number, name in steps.items():
            node, found[number] = files.document(f"{name}/{_NOTE}"), None
            if node is not None:
                found[number] = Conversion(*members(node, _NOTE, path=str, step=int, digest=str))
    return found
