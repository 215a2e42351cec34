"""The kinds of leaves: which one an object is, and why some cannot be saved."""

from __future__ import annotations

import array
import collections
import enum
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import numpy as np

from treering._format.index import OpaqueLeaf
from treering._format.structure import class_name
from treering._tree.registry import has_shape_and_dtype, is_code, is_typed_key
from treering._tree.static_text import has_address
from treering._values.dtypes import check_writable
from treering.errors import Unsupported

__all__ = ["KINDS", "WRITABLE", "KindOf", "kind_in_target", "kind_to_save"]

KINDS: Final[dict[type, str]] = {
    type(None): "none",
    bool: "bool",
    int: "int",
    float: "float",
    complex: "complex",
    str: "str",
    bytes: "bytes",
    bytearray: "bytearray",
    np.ndarray: "numpy",
    OpaqueLeaf: "opaque",
}
"""Types whose instances are leaves of one kind. Grows by jax's array types as they are met."""

WRITABLE: Final[set[np.dtype[Any]]] = set()
"""Dtypes of numpy arrays that were met and that a file can hold."""

KindOf = Callable[[Any], str]
"""Returns the kind of a leaf, or raises ``Unsupported``."""

# Their text is all that they are.
_NAMED: Final = (
    enum.Enum,
    np.dtype,
    pathlib.PurePath,
    jax.Device,
    jax.sharding.Mesh,
    jax.sharding.PartitionSpec,
    jax.sharding.Sharding,
)

_PLAIN: Final = (str, int, float, complex, bytes, bytearray)
_HINTS: Final[tuple[tuple[tuple[type, ...], str], ...]] = (
    ((set, frozenset), "it has no order to save its items in: make it a sorted list"),
    ((collections.deque, list, tuple), "make it a list or a tuple"),
    ((memoryview,), "make it bytes or an array"),
    ((array.array,), "make it a numpy array"),
    ((Mapping,), "make it a dict"),
    (_PLAIN, "make it the plain Python type that it is derived from"),
)


def kind_to_save(x: Any) -> str:
    """Return the kind of a leaf that is to be saved.

    Raises:
        Unsupported: it could not be given back as it is, not even with the help of ``like``.

    Example:
        >>> kind_to_save(np.float32(1)), kind_to_save(abs)
        ('numpy scalar', 'opaque')
        >>> kind_to_save({1, 2})
        Traceback (most recent call last):
            ...
        treering.errors.Unsupported: a set cannot be saved; it has no order to save its items in: make it a sorted list
    """
    if isinstance(x, np.generic | np.ndarray):
        return _numpy_kind(x)
    if isinstance(x, jax.core.Tracer):
        raise Unsupported("a traced value has no bytes yet", hint="save outside of jit, grad and vmap")
    if isinstance(x, jax.Array):
        return _jax_kind(x)
    if isinstance(x, jax.ShapeDtypeStruct):
        raise Unsupported("a jax.ShapeDtypeStruct holds no data", hint="save the array itself")
    if is_code(x) or isinstance(x, _NAMED):
        return "opaque"
    for types, hint in _HINTS:
        if isinstance(x, types):
            raise Unsupported(f"a {type(x).__name__} cannot be saved", hint=hint)
    _check_opaque(x)
    return "opaque"


def kind_in_target(x: Any) -> str:
    """Return the kind of a leaf of ``like``: "abstract" for what has shape and dtype only, "opaque" for the rest.

    Example:
        >>> kind_in_target(jax.ShapeDtypeStruct((2,), np.float32)), kind_in_target({1, 2})
        ('abstract', 'opaque')
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        return "abstract"
    if isinstance(x, jax.Array):
        return _jax_kind(x)
    if isinstance(x, np.generic):
        return "numpy scalar"
    return "numpy" if isinstance(x, np.ndarray) else "opaque"


def _jax_kind(x: jax.Array) -> str:
    kind = "key" if is_typed_key(x) else "jax"
    if not isinstance(x, jax.core.Tracer):
        KINDS[type(x)] = kind
    return kind


def _numpy_kind(x: Any) -> str:
    check_writable(x.dtype)
    if isinstance(x, np.generic):
        return "numpy scalar"
    if type(x) not in (np.ndarray, np.memmap):
        raise Unsupported(
            f"a {class_name(type(x))} is more than its numbers and would come back as a plain array",
            hint="save np.asarray(x), and beside it what is more",
        )
    WRITABLE.add(x.dtype)
    return "numpy"


def _check_opaque(x: Any) -> None:
    """Refuse an object that is more than a name or a setting: its state would be lost.

    Raises:
        Unsupported: it holds arrays, or nothing is known of it but its address.
    """
    kind = class_name(type(x))
    if has_shape_and_dtype(x) or hasattr(x, "__array__"):
        raise Unsupported(f"a {kind} is an array of another library", hint="save np.asarray(x)")
    held = _attributes(x)
    arrays = [name for name, value in held.items() if _holds_array(value)]
    if arrays:
        raise Unsupported(
            f"a {kind} holds arrays where jax cannot see them, in {', '.join(map(repr, arrays[:5]))}",
            hint="register its class as a pytree node, or give it a state-dict handler",
        )
    default: Any = object.__repr__
    stateless = type(x).__repr__ is default and not held
    if not (stateless or callable(x)) and has_address(repr(x)):
        raise Unsupported(
            f"a {kind} is not known to jax, and its repr tells nothing of its state",
            hint="register its class as a pytree node, or give it a state-dict handler",
        )


def _attributes(x: Any) -> dict[str, Any]:
    """Return what lies in the object's own dict and slots."""
    found = dict(getattr(x, "__dict__", {}))
    for cls in type(x).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(x, name):
                found[name] = getattr(x, name)
    return found


def _holds_array(value: Any) -> bool:
    try:
        leaves = jax.tree.leaves(value)
    except (TypeError, ValueError, RecursionError):  # dict keys that jax cannot sort: it is a leaf, then
        leaves = [value]
    return any(isinstance(leaf, np.ndarray | jax.Array) for leaf in leaves)
