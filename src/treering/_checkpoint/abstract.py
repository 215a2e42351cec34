"""What stands at a path -> its tree of shapes and dtypes, from headers alone."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from treering._arrays.mapped_source import map_index
from treering._background.saves import settle
from treering._checkpoint.forms import read_index
from treering._format.index import ARRAY_KINDS, Index, OpaqueLeaf
from treering._format.selection import select
from treering._format.structure import build
from treering._keymap.key_map import KeyMap, check_key_map
from treering._store.resolve import require_path
from treering._tree.fit import stored_dtype
from treering._tree.registry import key_dtype
from treering._values.human import pluralize
from treering._values.keys import split_key
from treering.errors import Unsupported

_SHARDING: Final = re.compile(r"\w*\((.*)\) over (.*)")
_AXIS: Final = re.compile(r"([\w.-]+)=([1-9][0-9]{0,8})")
_ENTRY: Final = re.compile(r"None|'[\w.-]+'|\([^()]*\)")
_NAME: Final = re.compile(r"'([\w.-]+)'")


def abstract_tree(
    path: str | os.PathLike[str], *, at: str | None, only: str | Sequence[str] | None, key_map: KeyMap | None
) -> Any:
    """Return the tree at ``path`` without its arrays; ``treering.abstract`` says more."""
    require_path(path)
    check_key_map(key_map)
    settle(path)
    index = read_index(path)
    index = index if key_map is None else map_index(index, key_map)
    part = select(index.structure, index.keys, at=at, only=only)
    # Thousands of arrays are of a few types.
    known: dict[int, Any] = {}
    meshes: dict[str, Mesh | None] = {}
    leaves: list[Any] = []
    for leaf in part.leaves:
        if not index.type_of(leaf).stored:
            leaves.append(index.values[leaf])
            continue
        if (number := index.leaf_types[leaf]) not in known:
            known[number] = _abstract_leaf(index, leaf, meshes)
        leaves.append(known[number])
    return build(part.structure, leaves)


def _abstract_leaf(index: Index, leaf: int, meshes: dict[str, Mesh | None]) -> Any:
    kind = index.type_of(leaf)
    shape = kind.shape or ()
    if kind.kind not in ARRAY_KINDS:
        return OpaqueLeaf(kind.kind, f"{pluralize(math.prod(shape), 'bytes')}, in a data file")
    if kind.kind == "key":
        if (dtype := key_dtype(kind.impl or "")) is None:
            error = Unsupported(f"this jax knows no PRNG keys of the implementation {kind.impl!r:.100}")
            error.path = split_key(index.keys[leaf])
            raise error
        shape = shape[:-1]
    else:
        dtype = stored_dtype(kind)
    sharding = _read_sharding(kind.sharding or "", shape, meshes)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def _read_sharding(text: str, shape: tuple[int, ...], meshes: dict[str, Mesh | None]) -> NamedSharding | None:
    """Return a recorded sharding on the devices of this job; None where it says none, or they cannot hold it so."""
    if (found := _SHARDING.fullmatch(text)) is None or _ENTRY.sub("", found[1]).strip(", "):
        return None
    if found[2] not in meshes:
        meshes[found[2]] = _make_mesh(found[2])
    if (mesh := meshes[found[2]]) is None:
        return None
    entries: list[Any] = [
        None if entry == "None" else tuple(_NAME.findall(entry)) if entry.startswith("(") else entry.strip("'")
        for entry in _ENTRY.findall(found[1])
    ]
    # That of a key is of its data, which have one axis more.
    while len(entries) > len(shape) and entries[-1] is None:
        entries.pop()
    try:
        sharding = NamedSharding(mesh, PartitionSpec(*entries))  # type: ignore[no-untyped-call]
        sharding.shard_shape(shape)
    except (ValueError, TypeError):  # an axis that the mesh does not have, twice, or that does not divide the shape
        return None
    return sharding


def _make_mesh(text: str) -> Mesh | None:
    axes = [found for found in map(_AXIS.fullmatch, text.split(", ")) if found is not None]
    sizes = [int(found[2]) for found in axes]
    count, there = math.prod(sizes), jax.devices()
    # In a job of several processes each of them has to take part.
    if text.count(", ") + 1 != len(axes) or (count != len(there) if jax.process_count() > 1 else count > len(there)):
        return None
    return Mesh(np.array(there[:count]).reshape(sizes), tuple(found[1] for found in axes))
