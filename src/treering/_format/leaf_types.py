"""The types of leaves as JSON and back: kind, dtype, shape, and what was known of their place on devices."""

from __future__ import annotations

import math
from typing import Any, Final

from treering._codec.documents import member
from treering._format.index import ARRAY_KINDS, PYTHON_KINDS, LeafType
from treering._values.dtypes import lookup
from treering._values.human import counted
from treering.errors import Corrupt, Format, Unsupported

_MOST_AXES: Final = 64
_LIMIT: Final = 1 << 63
_LARGE: Final = frozenset({"str", "bytes", "bytearray"})
_KEY_DTYPES: Final = frozenset({"uint8", "uint16", "uint32", "uint64"})
# Items of a key of each implementation that jax brings along; each is a uint32.
_KEY_ITEMS: Final = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}


def encoded_type(kind: LeafType) -> dict[str, Any]:
    """Return a type as JSON; what it does not have is left out.

    Example:
        >>> encoded_type(LeafType(kind="jax", dtype="float32", shape=(2, 3)))
        {'kind': 'jax', 'dtype': 'float32', 'shape': [2, 3]}
    """
    node: dict[str, Any] = {"kind": kind.kind}
    if kind.dtype is not None:
        node |= {"dtype": kind.dtype, "shape": list(kind.shape or ())}
    if kind.sharding is not None:
        node["sharding"] = kind.sharding
    if kind.impl is not None:
        node["impl"] = kind.impl
    return node


def decoded_type(node: Any, number: int) -> LeafType:
    """Return the type that `encoded_type` wrote.

    Raises:
        Corrupt: its members do not fit each other, or the shape is absurd.
        Format: a kind of leaf that this version does not know.
        Unsupported: a dtype that this version does not know.

    Example:
        >>> decoded_type({"kind": "none"}, 0).stored
        False
    """
    what = f"type {number} of the leaves"
    kind = member(node, "kind", str, what)
    if kind not in ARRAY_KINDS and kind not in PYTHON_KINDS:
        raise Format(f"{what} is of the unknown kind {kind[:60]!r}", hint="use a newer treering")
    if "dtype" not in node and "shape" not in node and kind not in ARRAY_KINDS:
        return LeafType(kind=kind)
    dtype = member(node, "dtype", str, what)
    shape = check_shape(member(node, "shape", list, what), dtype, what)
    if kind in PYTHON_KINDS and (kind not in _LARGE or dtype != "uint8" or len(shape) != 1):
        raise Corrupt(f"{what}, {kind}, cannot lie in a file as {dtype} {list(shape)}")
    if kind == "numpy scalar" and shape:
        raise Corrupt(f"{what}, a numpy scalar, has the shape {list(shape)}")
    impl = member(node, "impl", str, what) if kind == "key" else None
    if impl is not None:
        _check_key_data(impl, dtype, shape, what)
    sharding = member(node, "sharding", str, what) if "sharding" in node else None
    return LeafType(kind=kind, dtype=dtype, shape=shape, sharding=sharding, impl=impl)


def _check_key_data(impl: str, dtype: str, shape: tuple[int, ...], what: str) -> None:
    """Refuse what no program makes a PRNG key of; implementations that are not jax's own may have any unsigned ints."""
    items = _KEY_ITEMS.get(impl)
    if dtype not in _KEY_DTYPES or (items is not None and (dtype != "uint32" or shape[-1:] != (items,))):
        raise Corrupt(f"{what}, keys of {impl[:60]!r}, cannot lie in a file as {dtype} {list(shape)}")


def check_shape(lengths: list[Any], dtype: str, what: str) -> tuple[int, ...]:
    """Return a shape as a tuple, if an array of it could be.

    Raises:
        Corrupt: a length is no whole number from 0 on, there are more than 64, or the array would take 2**63 bytes.
        Unsupported: the dtype is unknown.

    Example:
        >>> check_shape([2, 3], "float32", "the array")
        (2, 3)
    """
    known = lookup(dtype)
    if known is None:
        raise Unsupported(
            f"{what} has the dtype {dtype[:60]!r}, which this version does not know", hint="use a newer treering"
        )
    if len(lengths) > _MOST_AXES:
        raise Corrupt(f"{what} has {counted(len(lengths), 'axes')}, an array has at most {_MOST_AXES}")
    if not set(map(type, lengths)) <= {int} or min(lengths, default=0) < 0:
        raise Corrupt(f"{what} has a length of an axis that is no whole number from 0 on")
    # numpy asks this of an array without items too, with the axes of length 0 left out.
    if known.itemsize * math.prod(filter(None, lengths)) >= _LIMIT:
        raise Corrupt(f"{what} has the shape {str(lengths)[:200]}, larger than any memory")
    return tuple(lengths)
