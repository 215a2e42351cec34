"""A record for a branch that another program wrote: arrays in nested dicts, without checksums."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from treering._codec.documents import check_hashes
from treering._codec.zarr import ZarrArray
from treering._format.index import MAX_LEVELS, Container, LeafType, Token
from treering._format.leaf_values import check_shape
from treering._leaves.documents.index import LEAVES_INDEX, Entry
from treering._leaves.documents.paths import parts_of_folder
from treering._leaves.documents.record import ChunkLayout, LeavesRecord
from treering._values.keys import join_key
from treering.errors import Corrupt, Unsupported

_Nodes: TypeAlias = "dict[str, int | _Nodes]"


class OtherLeaf(NamedTuple):
    """A leaf of a branch that is no array."""

    path: str
    """Where its folder would be."""
    type: LeafType
    """What it is."""
    value: Any
    """Its value."""


def foreign_record(
    prefix: str | None, entries: Sequence[Entry], arrays: Sequence[ZarrArray], others: Sequence[OtherLeaf] = ()
) -> LeavesRecord:
    """Return a made up record: nested dicts of jax arrays, in the order of the entries as far as dicts allow.

    Its attempt is ``UNMARKED``, it has no checksums, and `arrays_of` gives the arrays back in the order of its leaves.

    Args:
        prefix: the branch's.
        entries: of the branch.
        arrays: what the ``.zarray`` of each entry says.
        others: leaves that are no arrays.

    Raises:
        Corrupt: two entries have one folder, or one lies in the other: a leaf was lost when they were written.
        Unsupported: an array is larger than any memory, or keys are nested too deep.

    Example:
        >>> entries = [Entry("a/w", {}), Entry("b", {}), Entry("a/x", {})]
        >>> record = foreign_record(None, entries, [ZarrArray(shape=(2,), chunks=(2,), dtype="int8")] * 3)
        >>> record.keys, record.folders
        (['a/w', 'a/x', 'b'], ['a/w', 'a/x', 'b'])
    """
    listed = [*entries, *(Entry(other.path, {}) for other in others)]
    structure, paths, found = _flatten(_tree(prefix, listed))
    check_hashes([this.shape for this in arrays], "the shapes of the arrays")
    check_hashes([this.chunks for this in arrays], "the chunks of the arrays")
    types: dict[LeafType, int] = {}
    layouts: dict[ChunkLayout, int] = {}
    leaf_types: list[int] = []
    leaf_layouts: list[int] = []
    known: dict[int, tuple[int, int]] = {}
    values: dict[int, Any] = {}
    for number, path in zip(found, paths, strict=True):
        if number >= len(arrays):
            other = others[number - len(arrays)]
            values[len(leaf_types)] = other.value
            leaf_types.append(types.setdefault(other.type, len(types)))
            continue
        this = arrays[number]
        if id(this) not in known:
            kind, layout = _describe(this, path)
            known[id(this)] = types.setdefault(kind, len(types)), layouts.setdefault(layout, len(layouts))
        leaf_types.append(known[id(this)][0])
        leaf_layouts.append(known[id(this)][1])
    return LeavesRecord(
        prefix=prefix,
        structure=structure,
        keys=list(map(join_key, paths)),
        types=list(types),
        leaf_types=leaf_types,
        values=values,
        folders=[entries[number].path for number in found if number < len(entries)],
        layouts=list(layouts),
        leaf_layouts=leaf_layouts,
    )


def _describe(this: ZarrArray, path: tuple[str, ...]) -> tuple[LeafType, ChunkLayout]:
    try:
        shape = check_shape(list(this.shape), this.dtype, "the array")
    except (Corrupt, Unsupported) as error:
        error.path = path
        raise
    layout = {field.name: getattr(this, field.name) for field in dataclasses.fields(ChunkLayout)}
    return LeafType(kind="jax", dtype=this.dtype, shape=shape), ChunkLayout(**layout)


def _tree(prefix: str | None, entries: Sequence[Entry]) -> _Nodes:
    """Return the numbers of the entries in nested dicts, inside one more dict, so that a bare array has a place."""
    root: _Nodes = {}
    for number, (path, _) in enumerate(entries):
        parts = ("", *(parts_of_folder(path, prefix) if path else ()))
        if len(parts) > MAX_LEVELS:
            raise Unsupported(f"the path {path[:200]!r} is more than {MAX_LEVELS} folders deep")
        node = root
        for part in parts[:-1]:
            inner = node.setdefault(part, {})
            if isinstance(inner, int):
                raise _clash_error(path, entries[inner].path)
            node = inner
        there = node.setdefault(parts[-1], number)
        if there != number:
            raise _clash_error(path, path if isinstance(there, dict) else entries[there].path)
    return root or {"": {}}


def _clash_error(one: str, other: str) -> Corrupt:
    return Corrupt(
        f"{LEAVES_INDEX} lists an array in {one[:200] or '.'!r} and another one in {other[:200] or '.'!r} or below",
        hint="two keys were saved to one folder, and one of the arrays is lost: save them again under other keys",
    )


def _flatten(root: _Nodes) -> tuple[list[Token], list[tuple[str, ...]], list[int]]:
    """Return the containers around the leaves, and paths and entries of these in the order of the tree."""
    structure: list[Token] = []
    paths: list[tuple[str, ...]] = []
    found: list[int] = []
    path: list[str] = []
    levels: list[Iterator[tuple[str, int | _Nodes]]] = [iter(root.items())]
    run = 0
    while levels:
        part, node = next(levels[-1], ("", None))
        if node is None:
            levels.pop()
            del path[-1:]
        elif isinstance(node, int):
            run += 1
            paths.append((*path, part)[1:])
            found.append(node)
        else:
            structure += [run] if run else []
            run = 0
            structure.append(Container(node="dict", keys=tuple(node)))
            path.append(part)
            levels.append(iter(node.items()))
    return [*structure, run] if run else structure, paths, found
