"""The kinds of leaves: which one an object is, and why some cannot be saved."""

from __future__ import annotations

import array
import collections
import contextlib
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import re
import types
import uuid
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, Final

import jax
import numpy as np
from jax import sharding

from treering._format.index import OpaqueLeaf
from treering._format.structure import class_name
from treering._printable import kind_of, way_to_save
from treering._tree.registry import has_shape_and_dtype, is_code, is_typed_key, key_dtype
from treering._values.dtypes import check_writable
from treering.errors import UnsupportedError

_PLAIN: Final = (str, int, float, complex, bytes, bytearray)
KINDS: Final[dict[type, str]] = {kind: kind.__name__ for kind in (bool, *_PLAIN)}
"""Types whose instances are leaves of one kind. Grows by jax's array types as they are met."""
KINDS.update({type(None): "none", np.ndarray: "numpy", OpaqueLeaf: "opaque"})

WRITABLE: Final[set[np.dtype[Any]]] = set()
"""Dtypes of numpy arrays that were met and that a file can hold."""


KindOf = Callable[[Any], str]
"""Returns the kind of a leaf, or raises ``UnsupportedError``."""

# Settings: a program that makes ``like`` makes them too, and their text is all that they are.
_PLACES: Final = (jax.Device, sharding.AbstractMesh, sharding.Mesh, sharding.PartitionSpec, sharding.Sharding)
SETTINGS: Final = (enum.Enum, np.dtype, types.ModuleType, type(jax.tree.structure(0)), *_PLACES)
"""Classes of settings."""

_REGISTER: Final = (
    "register its class with jax.tree_util.register_dataclass or register_pytree_node, "
    "or with treering.serialization.register_serialization_state"
)
_LEAVE_OUT: Final = f"omit it, or put its content into the tree; for your own class, {_REGISTER}"
_STATE: Final = (
    "treering.Run saves its state where only dicts lead to it, as {'loaders': {'train': iterator}}; elsewhere put "
    "get_state() in its place"
)
_PARTIAL: Final = "pass them as arguments: a jax.tree_util.Partial(function, arrays) holds them visibly"
_MOST_SEEN: Final = 1000

# Code that may hold arrays: what a function closes over, whose method it is, what is bound to it.
_OPEN_CODE: Final = (types.FunctionType, types.MethodType, functools.partial)

_HINTS: Final[tuple[tuple[tuple[type, ...], str], ...]] = (
    ((set, frozenset), "it has no order to save its items in: make it a sorted list"),
    ((collections.deque, list, tuple), "make it a list or a tuple"),
    ((memoryview,), "make it bytes or an array"),
    ((array.array,), "make it a numpy array"),
    ((Mapping,), "make it a dict"),
    (_PLAIN, "make it the plain Python type that it is derived from"),
    ((datetime.date, datetime.time), "save x.isoformat(), and read it with fromisoformat()"),
    ((datetime.timedelta,), "save x.total_seconds()"),
    ((pathlib.PurePath, decimal.Decimal, fractions.Fraction, uuid.UUID, datetime.tzinfo), "save str(x)"),
    ((range,), "save list(x)"),
    ((slice,), "save [x.start, x.stop, x.step]"),
    ((re.Pattern,), "save x.pattern"),
)


def kind_to_save(x: Any) -> str:
    """Return the kind of a leaf that is to be saved.

    Raises:
        UnsupportedError: it could not be given back as it is, not even with the help of ``like``.

    Example:
        >>> kind_to_save(np.float32(1)), kind_to_save(abs)
        ('numpy scalar', 'opaque')
        >>> kind_to_save({1, 2})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        treering.errors.UnsupportedError: a set cannot be saved; it has no order to save its items in: ...
    """
    if isinstance(x, np.generic | np.ndarray):
        return _numpy_kind(x)
    if isinstance(x, jax.core.Tracer):
        raise UnsupportedError("a traced value has no bytes yet", hint="save outside of jit, grad and vmap")
    if isinstance(x, jax.Array):
        if (kind := _jax_kind(x)) == "key" and not _is_named(jax.random.key_impl(x), x.dtype):
            what = f"keys of the dtype {x.dtype} cannot be given back: jax does not know the implementation by its name"
            raise UnsupportedError(what, hint="save jax.random.key_data(x), and make keys of it with wrap_key_data")
        return kind
    if isinstance(x, jax.ShapeDtypeStruct):
        raise UnsupportedError("a jax.ShapeDtypeStruct holds no data", hint="save the array itself")
    if isinstance(x, SETTINGS):
        return "opaque"
    for kinds, hint in _HINTS:
        if isinstance(x, kinds):
            raise UnsupportedError(f"{kind_of(x)} cannot be saved", hint=hint)
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
    return "numpy scalar" if isinstance(x, np.generic) else "numpy" if isinstance(x, np.ndarray) else "opaque"


def _jax_kind(x: jax.Array) -> str:
    kind = "key" if is_typed_key(x) else "jax"
    if kind == "jax" and not isinstance(x, jax.core.Tracer):
        KINDS[type(x)] = kind
    return kind


def _is_named(impl: Any, dtype: Any) -> bool:
    """Tell whether the name of an implementation leads to it; one that is not registered may have that of another."""
    return isinstance(impl, str) and key_dtype(impl) == dtype


def _numpy_kind(x: Any) -> str:
    check_writable(x.dtype)
    if isinstance(x, np.generic):
        return "numpy scalar"
    if type(x) not in (np.ndarray, np.memmap):
        text = f"a {class_name(type(x))} holds more than its numbers and would come back as a plain array"
        raise UnsupportedError(text, hint="save np.asarray(x), and the rest beside it")
    WRITABLE.add(x.dtype)
    return "numpy"


def _check_opaque(x: Any) -> None:
    """Refuse an object that is more than code: its state would be lost.

    Raises:
        UnsupportedError: it holds arrays, or it is nothing that can be called.
    """
    kind = class_name(type(x))
    if isinstance(x, type):
        return
    if _is_array(x):
        raise UnsupportedError(f"a {kind} is not an array of numpy or jax", hint="save np.asarray(x)")
    if hasattr(x, "get_state") and hasattr(x, "set_state"):
        raise UnsupportedError(f"a {kind} keeps its state to itself", hint=_STATE)
    # jit and the like are C, and hold the function that they were made of.
    if (place := hidden_array(getattr(x, "__wrapped__", None) if _is_closed(x) else x)) is not None:
        hint = _PARTIAL if isinstance(x, _OPEN_CODE) else way_to_save(x, _REGISTER)
        raise UnsupportedError(f"a {kind} holds arrays where jax cannot see them, in {place!r}", hint=hint)
    # The dtype of typed PRNG keys is no numpy dtype.
    if is_code(x) or callable(x) or isinstance(x, type(jax.eval_shape(jax.random.key, 0).dtype)) or _is_placeholder(x):
        return
    article = "an" if kind[:1].lower() in "aeio" else "a"
    what = f"{article} {kind} is not an array, number or text, and a file cannot hold it"
    raise UnsupportedError(what, hint=way_to_save(x, _LEAVE_OUT))


class _Placeholder:
    """As large as an instance of any class of Python's without slots; one written in C may hide something."""


def _is_placeholder(x: Any) -> bool:
    """Tell whether an object has no state, so that the class says all: equinox puts such ones where leaves are shared.

    Example:
        >>> _is_placeholder(object())
        False
    """
    cls = type(x)
    is_plain = cls.__mro__ == (cls, object) and cls.__basicsize__ == _Placeholder.__basicsize__
    return is_plain and getattr(x, "__dict__", None) == {}


def hidden_array(x: Any, fields: Container[str] = ()) -> str | None:
    """Return the first attribute in or below ``x`` that holds an array, None where there is none.

    Args:
        x: any object.
        fields: attributes of ``x`` itself that do not count.
    """
    pending = [(name, value) for name, value in _attributes(x).items() if name not in fields]
    seen = {id(x): x}  # the objects themselves too, so that no id is given anew
    while pending and len(seen) < _MOST_SEEN:
        place, value = pending.pop()
        for leaf in _leaves(value):
            if _is_array(leaf):
                return place
            if not (type(leaf) in KINDS or _is_closed(leaf) or isinstance(leaf, SETTINGS) or id(leaf) in seen):
                seen[id(leaf)] = leaf
                pending += [(f"{place}.{name}", inner) for name, inner in _attributes(leaf).items()]
    return None


def _is_array(x: Any) -> bool:
    return not isinstance(x, type) and (has_shape_and_dtype(x) or hasattr(x, "__array__"))


def _is_closed(x: Any) -> bool:
    """Tell whether ``x`` is code that nothing is known to lie in: all but Python's own functions and their kin."""
    return is_code(x) and not isinstance(x, _OPEN_CODE)


def _attributes(x: Any) -> dict[str, Any]:
    """Return what lies in the object's own dict and slots; of a function also its closure and defaults (``name=``)."""
    if isinstance(x, types.ModuleType | type):
        return {}
    if isinstance(x, types.FunctionType):
        return _closure(x) | _defaults(x) | {f".{name}": value for name, value in vars(x).items()}
    if isinstance(x, types.MethodType):
        return {"__self__": x.__self__, "__func__": x.__func__}
    if isinstance(x, functools.partial):
        return {"args": x.args, "keywords": x.keywords, "func": x.func}
    found = dict(getattr(x, "__dict__", {}))
    for cls in type(x).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(x, name):
                found[name] = getattr(x, name)
    return found


def _closure(function: types.FunctionType) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # nothing was assigned to it yet
            found[name] = cell.cell_contents
    return found


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    values = function.__defaults__ or ()
    code = function.__code__
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    found = dict(zip(names, values, strict=True)) | (function.__kwdefaults__ or {})
    return {f"{name}=": value for name, value in found.items()}


def _leaves(value: Any) -> list[Any]:
    try:
        return jax.tree.leaves(value, is_leaf=lambda inner: isinstance(inner, Iterator))  # jax would warn of those
    except (TypeError, ValueError, RecursionError):  # dict keys that jax cannot sort, or more levels than it takes
        return [value]
