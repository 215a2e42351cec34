"""What tests of leaves directories share: reading back exactly, and looking at what lies there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from tests import meshes
from treering.leaves import tree_deserialize_leaves

__all__ = ["arrays_at", "index_at", "put", "stored", "visible"]

INDEX = "tensorstore_index.json"


def stored(path: Path, prefix: str | None = None) -> Any:
    """The tree at a path as it was saved: containers, kinds, bits."""
    return tree_deserialize_leaves(path, prefix=prefix, structure="exact", x64="numpy")


def index_at(path: Path) -> dict[str, Any]:
    """The index, parsed."""
    found: dict[str, Any] = json.loads((path / INDEX).read_text())
    return found


def arrays_at(path: Path, prefix: str | None = None) -> dict[str, tuple[Any, ...]]:
    """What the index lists: path -> shape and dtype."""
    index = index_at(path)
    entries = index["arrays"] if prefix is None else index["prefixes"][prefix]
    return {entry["path"]: (*entry["shape"], entry["dtype"]) for entry in entries}


def visible(path: Path) -> set[str]:
    """The files below a path that other programs see."""
    names = {str(inner.relative_to(path)) for inner in path.rglob("*") if inner.is_file()}
    return {name for name in names if not name.startswith(".treering/")}


def put(array: Any, spec: PartitionSpec, shape: tuple[int, ...] = (8,), axes: tuple[str, ...] = ("x",)) -> jax.Array:
    """An array spread over a mesh of the first devices."""
    found: jax.Array = jax.device_put(array, NamedSharding(meshes.grid(*shape, axes=axes), spec))
    return found
