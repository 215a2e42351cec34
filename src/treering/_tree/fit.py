"""Does a stored leaf fit what ``like`` holds at its place? And what has to be done to it?"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import jax
import numpy as np

from treering._format.index import ARRAY_KINDS, LeafType
from treering._tree.registry import is_typed_key, key_dtype, key_impl
from treering._values.dtypes import is_kind_kept, lookup, number_rank, numpy_dtype

_PYTHON: Final[dict[str, type]] = {"bool": bool, "int": int, "float": float, "complex": complex}
_PYTHON_DTYPES: Final = {"float128": np.dtype(float), "complex256": np.dtype(complex)}
_NUMBERS: Final = ("bool", "int", "float", "complex")


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """What a stored leaf becomes."""

    kind: str
    """Kind of the leaf in the result."""
    dtype: np.dtype[Any] | None = None
    """What an array is cast to; None to leave it."""
    python: type | None = None
    """Python number that an array of no axes or another number is turned into; None to leave it."""
    impl: Any = None
    """The PRNG implementation of a key: its name, or that of the target, which may have none."""


def fit_leaf(kind: LeafType, like: Any, like_kind: str, *, cast: bool, raw_keys: bool) -> Fit | None:
    """Return how the leaf becomes one for ``like``'s place, None where it does not fit.

    Args:
        kind: what is stored.
        like: the leaf of the target.
        like_kind: its kind; "abstract" for a ``jax.ShapeDtypeStruct``.
        cast: whether numbers may change their dtype, within their category or to a wider one.
        raw_keys: the form knows no typed keys: their uint32 data stands for them.
    """
    if is_typed_key(like):
        return _fit_key(kind, like, raw_keys=raw_keys)
    if like_kind == "abstract" and kind.kind == _weak_number(like):
        return Fit(kind.kind)
    if like_kind in ("jax", "numpy", "numpy scalar", "abstract"):
        return _fit_array(kind, like, like_kind, cast=cast)
    if kind.kind in ARRAY_KINDS:
        return _fit_number(kind, like_kind, cast=cast)
    if like_kind == kind.kind or {kind.kind, like_kind} == {"bytes", "bytearray"}:
        return Fit(kind.kind)
    if cast and kind.kind in _NUMBERS and like_kind in _NUMBERS[_NUMBERS.index(kind.kind) :]:
        return Fit(like_kind, python=type(like))
    return None


def _fit_key(kind: LeafType, like: Any, *, raw_keys: bool) -> Fit | None:
    data = jax.eval_shape(jax.random.key_data, like)
    if kind.shape != data.shape or kind.dtype != data.dtype.name:
        return None
    impl = kind.impl if kind.kind == "key" else key_impl(like) if raw_keys else None
    return Fit("key", impl=impl) if impl is not None and key_dtype(impl) == like.dtype else None


def _weak_number(like: Any) -> str | None:
    """Name the Python number that ``jax.eval_shape`` made an abstract leaf of; None for any other leaf.

    Such leaves are weakly typed, but for bool, which has no weak type.
    """
    if like.shape or not (getattr(like, "weak_type", False) or like.dtype == np.bool_):
        return None
    return _category(np.dtype(like.dtype).name)


def _fit_array(kind: LeafType, like: Any, like_kind: str, *, cast: bool) -> Fit | None:
    result = "jax" if like_kind in ("jax", "abstract") else like_kind
    dtype = np.dtype(like.dtype)
    number = np.dtype(_PYTHON.get(kind.kind, object)).name
    if kind.kind in _NUMBERS and cast and like.shape == () and is_kind_kept(number, dtype.name):
        return Fit(result, dtype=dtype)
    if kind.kind not in ARRAY_KINDS or kind.kind == "key" or tuple(like.shape) != kind.shape:
        return None
    if kind.dtype == dtype.name:
        # A name says nothing of the byte order, which is the target's.
        return Fit(result, dtype=None if dtype.isnative else dtype)
    return Fit(result, dtype=dtype) if cast and is_kind_kept(kind.dtype or "", dtype.name) else None


def _fit_number(kind: LeafType, like_kind: str, *, cast: bool) -> Fit | None:
    """Let a stored number of no axes stand where the target has a Python number of its category."""
    if kind.shape != () or kind.kind == "key" or like_kind not in _NUMBERS:
        return None
    if (category := _category(kind.dtype)) == like_kind:
        # Rounded as any other cast, and not made infinite by Python.
        wide = _PYTHON_DTYPES.get(kind.dtype or "") if cast else None
        return Fit(kind.kind, dtype=wide, python=_PYTHON[category] if cast else None)
    return None


def _category(dtype: str | None) -> str:
    """Return the Python type of numbers of a dtype; no text for times and unknown dtypes."""
    rank = number_rank(_named(dtype).name)
    return "" if rank is None else ("bool", "int", "int", "float", "complex")[rank]


def _named(dtype: str | None) -> np.dtype[Any]:
    known = lookup(dtype or "")
    return numpy_dtype(known) if known is not None else np.dtype(object)


def stored_dtype(kind: LeafType) -> np.dtype[Any] | None:
    """Return the dtype of what lies in the files of a leaf; None where nothing does."""
    return _named(kind.dtype) if kind.stored else None


def found_text(kind: LeafType) -> str:
    """Describe a stored leaf: its dtype and shape, or its Python type."""
    if kind.kind == "key":
        return f"key<{kind.impl}>{list((kind.shape or ())[:-1])}"
    if kind.kind in ARRAY_KINDS:
        return f"{kind.dtype}{list(kind.shape or ())}"
    return "None" if kind.kind == "none" else "a function or setting" if kind.kind == "opaque" else kind.kind


def wanted_text(like: Any, like_kind: str) -> str:
    """Describe a leaf of the target in the same words."""
    if is_typed_key(like):
        return f"key<{key_impl(like)}>{list(like.shape)}"
    if like_kind in ("jax", "numpy", "numpy scalar", "abstract"):
        return f"{np.dtype(like.dtype).name}{list(like.shape)}"
    return "None" if like_kind == "none" else "a function or setting" if like_kind == "opaque" else like_kind
