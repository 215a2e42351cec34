"""eformer's functions, imported with its warnings kept to itself, and trees that it can hold."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from eformer import escale, serialization
    from eformer.serialization import serialization as leaves

__all__ = ["DTYPES", "MESHES", "escale", "flat", "leaves", "load", "one_device", "placed", "same", "save", "trees"]

DTYPES = [
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "float16",
    "bfloat16",
    "float32",
    "complex64",
    "int4",
    "float8_e4m3fn",
    "float8_e5m2",
]
"""Dtypes that eformer stores."""


def _grids() -> list[Mesh]:
    devices = np.array(jax.devices())
    return [
        Mesh(devices[:1], ("x",)),
        Mesh(devices, ("x",)),
        Mesh(devices.reshape(2, 4), ("x", "y")),
        Mesh(devices.reshape(4, 2), ("x", "y")),
    ]


MESHES = _grids()
"""Meshes of one and eight devices, with one axis and two."""


def one_device() -> Mesh:
    """A mesh of the first device."""
    return MESHES[0]


def save(path: Path, tree: Any, **options: Any) -> None:
    """Let eformer save."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        serialization.tree_serialize_leaves(path, tree, **options)


def load(path: Path, mesh: Mesh | None = None, **options: Any) -> Any:
    """Let eformer load."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return serialization.tree_deserialize_leaves(path, mesh or one_device(), **options)


def trees() -> st.SearchStrategy[Any]:
    """Nested dicts and lists of jax arrays with ordinary keys: what eformer stores and gives back."""
    names = st.text("abcdefgh_XYZ0123456789-", min_size=1, max_size=4).filter(lambda name: not name.isdigit())
    array = st.builds(
        _array, st.sampled_from(DTYPES), st.sampled_from([(), (3,), (8,), (8, 4), (16, 8), (0, 4)]), st.integers(0, 9)
    )
    inner = st.recursive(
        array,
        lambda below: st.dictionaries(names, below, min_size=1, max_size=3) | st.lists(below, min_size=1, max_size=3),
        max_leaves=6,
    )
    return st.dictionaries(names, inner, min_size=1, max_size=3)


def _array(dtype: str, shape: tuple[int, ...], seed: int) -> jax.Array:
    values = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 7, shape)
    return jax.numpy.asarray(values).astype(dtype)


def placed(tree: Any, mesh: Mesh) -> Any:
    """Spread every array over the mesh as far as its shape can be divided."""

    def place(leaf: jax.Array) -> jax.Array:
        return jax.device_put(leaf, sharding(leaf, mesh))

    return jax.tree.map(place, tree)


def sharding(leaf: Any, mesh: Mesh) -> NamedSharding:
    """Its axes over the mesh's, in order, where they can be divided."""
    pairs = zip(leaf.shape, mesh.axis_names, strict=False)
    spec = [name if length and length % mesh.shape[name] == 0 else None for length, name in pairs]
    return NamedSharding(mesh, PartitionSpec(*spec))


def flat(tree: Any) -> dict[str, Any]:
    """The leaves by dotted key; a list's items by their numbers."""
    items = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        ".".join(str(getattr(part, "key", getattr(part, "idx", part))) for part in path): leaf for path, leaf in items
    }


def same(found: Any, wanted: Any) -> None:
    """Require the same keys, dtypes, shapes and bits."""
    found, wanted = flat(found), flat(wanted)
    assert found.keys() == wanted.keys()
    for key, leaf in wanted.items():
        other = found[key]
        assert (other.dtype, other.shape) == (leaf.dtype, leaf.shape), key
        assert np.asarray(other).tobytes() == np.asarray(leaf).tobytes(), key
