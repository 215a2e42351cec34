"""What "the same tree" means in these tests: kinds, container types, key order, dtypes, shapes and bits."""

from __future__ import annotations

import collections
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

__all__ = [
    "Pair", "Point", "assert_same", "assert_same_arrays", "assert_same_structure", "assert_unchanged", "fingerprint",
    "is_typed_key", "leaves_by_path", "native",
]  # fmt: skip


class Pair(NamedTuple):
    """A container with two fields."""

    left: Any
    right: Any


class Point(NamedTuple):
    """Another one."""

    x: Any
    y: Any


def is_typed_key(leaf: Any) -> bool:
    """Say whether ``leaf`` is an array of typed PRNG keys."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def native(array: np.ndarray) -> np.ndarray:
    """The same values in the byte order of the wire."""
    return array.astype(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array


def _array_print(kind: str, array: np.ndarray) -> tuple[Any, ...]:
    array = native(array)
    items = bytearray(array.tobytes("C"))
    if array.dtype.type in (np.longdouble, np.clongdouble) and items:
        # An x87 value fills 10 of its 16 bytes; numpy leaves anything in the rest of a scalar.
        np.frombuffer(items, np.uint8).reshape(-1, 16)[:, 10:] = 0
    return (kind, array.dtype.name, array.shape, bytes(items))


def _float_bits(value: float) -> bytes:
    return struct.pack("<d", value)


def _scalar_print(leaf: Any) -> tuple[Any, ...] | None:
    """The fingerprint of a Python leaf, or None where ``leaf`` is something else."""
    match leaf:
        case None | bool() | int() | str() | bytes():
            return (type(leaf).__name__, leaf)
        case float():
            return ("float", _float_bits(leaf))
        case complex():
            return ("complex", _float_bits(leaf.real), _float_bits(leaf.imag))
        case _:
            return None


def _array_leaf_print(leaf: Any, *, restored: bool) -> tuple[Any, ...] | None:
    if is_typed_key(leaf):
        return ("key", str(jax.random.key_impl(leaf)), *_array_print("ndarray", np.asarray(jax.random.key_data(leaf))))
    if isinstance(leaf, jax.Array):
        return _array_print("ndarray" if restored else "jax", np.asarray(leaf))
    if isinstance(leaf, np.generic):
        return _array_print("npscalar", np.asarray(leaf))
    if isinstance(leaf, np.ndarray):
        return _array_print("ndarray", leaf)
    return None


def _children(node: Any) -> Iterator[tuple[Any, Any]]:
    """One level of a registered pytree node, in jax's order."""
    children, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda inner: inner is not node)
    for path, child in children:
        if len(path) == 1:
            yield jax.tree_util.keystr(path), child


def fingerprint(tree: Any, *, restored: bool = False) -> Any:
    """A nested tuple that is equal for two trees when, and only when, they are the same to the last bit.

    With ``restored=True`` the tree is described as a reader gives it back: jax arrays as numpy arrays.
    Big-endian arrays are described in the byte order of the wire in any case.
    """
    leaf = _array_leaf_print(tree, restored=restored) or (None if isinstance(tree, np.generic) else _scalar_print(tree))
    if leaf is not None:
        return leaf
    name = f"{type(tree).__module__}.{type(tree).__qualname__}"
    if isinstance(tree, collections.defaultdict):
        name = f"{name}({tree.default_factory})"
    if isinstance(tree, Mapping):
        # An nnx.State sorts its keys whenever jax takes it apart, so their order is not its own.
        items = sorted(tree.items()) if isinstance(tree, nnx.State) else tree.items()
        return (name, tuple((fingerprint(key), fingerprint(value, restored=restored)) for key, value in items))
    if isinstance(tree, list | tuple):
        return (name, tuple(fingerprint(value, restored=restored) for value in tree))
    children = tuple((key, fingerprint(child, restored=restored)) for key, child in _children(tree))
    if children or not jax.tree_util.all_leaves([tree]):
        return (name, children)
    return ("object", name, id(tree) if callable(tree) else repr(tree))


def assert_same(got: Any, want: Any, *, restored: bool = True) -> None:
    """Fail unless ``got`` is ``want``, or with ``restored`` what a reader makes of ``want``."""
    assert fingerprint(got) == fingerprint(want, restored=restored)


def assert_unchanged(got: Any, want: Any) -> None:
    """Fail unless ``got`` is ``want``, jax arrays as jax arrays."""
    assert_same(got, want, restored=False)


def assert_same_structure(got: Any, want: Any) -> None:
    """Fail unless jax sees the same structure: node types, keys and static fields."""
    structures: list[Any] = [jax.tree_util.tree_structure(got), jax.tree_util.tree_structure(want)]
    assert structures[0] == structures[1]


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """The leaves by their key paths, with ``/`` between; a list's items by their numbers."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in paths}


def assert_same_arrays(found: Any, wanted: Any, *, structure: bool = True) -> None:
    """Fail unless the leaves have the same dtypes, shapes and bits, whoever's arrays they are.

    With ``structure=False`` only their key paths are the same: a list is as good as a dict with numbers for keys.
    """
    if structure:
        assert_same_structure(found, wanted)
    leaves, others = leaves_by_path(found), leaves_by_path(wanted)
    assert leaves.keys() == others.keys()
    for path, other in others.items():
        assert _array_bits(leaves[path]) == _array_bits(other), path


def _array_bits(leaf: Any) -> tuple[Any, ...]:
    if is_typed_key(leaf):
        return str(jax.random.key_impl(leaf)), *_array_bits(jax.random.key_data(leaf))
    array = np.asarray(leaf)
    return array.dtype, array.shape, array.tobytes()
