"""Numbers in another dtype, by one rule for arrays and Python numbers: a cast rounds floats and changes nothing else.

Integers, bools and times stay what they are, finite floats stay finite, and infinities and NaNs stay those.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np

from treering._values.dtypes import is_float, lookup
from treering.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

_BLOCK_ITEMS: Final = 1 << 16
# Types without infinities and NaNs: what is too large for them becomes their largest number.
_CLIPPING: Final = frozenset({"float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"})
_LONG_DOUBLES: Final = (np.longdouble, np.clongdouble)
# What numpy says in `isbuiltin`; 0 is a dtype that is swapped or has fields.
_BUILT_IN, _OF_A_LIBRARY = 1, 2
_SHOWN_BITS: Final = 256


class NotKept(Exception):
    """A value that a cast would change.

    Args:
        value: it.
        index: where it is in its array; None where it is a Python number.
    """

    def __init__(self, value: Any, index: tuple[int, ...] | None = None) -> None:
        super().__init__(value, index)
        self.value = value
        self.index = index

    def __str__(self) -> str:
        long = isinstance(self.value, int) and self.value.bit_length() > _SHOWN_BITS
        text = f"an int of {self.value.bit_length()} bits" if long else f"the value {showable(self.value)!s}"
        return f"{text} at index {list(self.index)}" if self.index else text


def float_name(dtype: Any) -> str:
    """Return the name of a dtype of floats, given it or what numpy takes for one.

    Raises:
        UnsupportedError: it is not a dtype of floats.

    Example:
        >>> float_name("bfloat16"), float_name(np.float32)
        ('bfloat16', 'float32')
    """
    with contextlib.suppress(TypeError):
        dtype = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if not isinstance(dtype, str) or lookup(dtype) is None or not is_float(dtype):
        raise UnsupportedError(f"dtype={dtype!r:.100} is not a dtype of floats", hint="for example bfloat16 or float32")
    return dtype


def float_dtypes(dtype: object) -> tuple[tuple[str | None, str | None], ...]:
    """Return a ``dtype=`` as pairs of a glob, None for every leaf, and the name of a dtype of floats, None for its own.

    Raises:
        UnsupportedError: a name is not one of floats, or a glob is no text.
    """
    if dtype is None:
        return ()
    if not isinstance(dtype, Mapping):
        return ((None, float_name(dtype)),)
    if odd := [glob for glob in dtype if not isinstance(glob, str)]:
        raise UnsupportedError(f"dtype= is a dtype, or a dict of globs and dtypes, found {odd[0]!r:.100}")
    return tuple((glob, None if one is None else float_name(one)) for glob, one in dtype.items())


def cast_array(
    array: NDArray[Any],
    dtype: np.dtype[Any],
    empty: Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]] = np.empty,
) -> NDArray[Any]:
    """Return an array in another dtype; beside the result, memory for a block is taken.

    Args:
        array: the numbers.
        dtype: the other dtype.
        empty: makes the result, which is then filled.

    Raises:
        NotKept: the cast would change a value by more than rounding; it is the first one.

    Example:
        >>> cast_array(np.array([0.1]), np.dtype("float32"))
        array([0.1], dtype=float32)
        >>> cast_array(np.array([1, 2**24 + 1]), np.dtype("float32"))
        Traceback (most recent call last):
            ...
        treering._values.casts.NotKept: the value 16777217 at index [1]
    """
    result = empty(array.shape, dtype)
    if _always_keeps(array.dtype, dtype):
        result[...] = array
        return result
    items, result = array.reshape(-1), result.reshape(-1)
    with np.errstate(all="ignore"):
        for start in range(0, items.size, _BLOCK_ITEMS):
            before = items[start : start + _BLOCK_ITEMS]
            after = result[start : start + _BLOCK_ITEMS]
            try:
                after[...] = before if before.dtype.kind != "c" or dtype.kind == "c" else before.real
            except TypeError:
                # Two of ml_dtypes' narrow types that do not know each other; a float32 holds every value of theirs.
                after[...] = before.astype(np.float32)
            except (OverflowError, ValueError):
                after[...] = _convert_times(before, dtype)
            changed = _find_changes(before, after)
            if changed.any():
                first = int(changed.argmax())
                raise NotKept(before[first], tuple(map(int, np.unravel_index(start + first, array.shape))))
    return result.reshape(array.shape)


def cast_number(value: complex, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a Python number as an array without axes.

    Raises:
        NotKept: the cast would change it by more than rounding.

    Example:
        >>> cast_number(2**60, np.dtype("float32")).item() == 2**60
        True
    """
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return _cast_long(value, dtype)
    try:
        return cast_array(np.asarray(value), dtype)
    except NotKept:
        raise NotKept(value) from None


def _cast_long(value: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Cast an int of more than 64 bits, of which floats hold a few."""
    if _is_integer(dtype):
        raise NotKept(value)
    with np.errstate(all="ignore"):
        try:
            result = np.asarray(float(value)).astype(dtype)
        except OverflowError:
            raise NotKept(value) from None
    if result.real.astype(np.float64).item() != value:
        raise NotKept(value)
    return result


def _always_keeps(before: np.dtype[Any], after: np.dtype[Any]) -> bool:
    """Tell whether every value of one dtype is one of the other."""
    if after.isbuiltin != _BUILT_IN or after.kind not in "iufc":
        return False
    if before.isbuiltin == _OF_A_LIBRARY:
        return after.kind in "fc" and after.itemsize >= (4 if after.kind == "f" else 8)
    return before.kind == after.kind and before.itemsize <= after.itemsize


def showable(x: Any) -> Any:
    """Return an array or an item of one; where numpy has no text for a date in it, the numbers of all.

    Example:
        >>> dates = np.array([5], "int64").view("datetime64")  # five of no unit
        >>> str(showable(dates)), str(showable(dates[0])), str(showable(dates.view("datetime64[Y]")))
        ('[5]', '5', "['1975']")
    """
    if getattr(getattr(x, "dtype", None), "kind", "") == "M":
        try:
            np.datetime_as_string(x)
        except (ValueError, OverflowError):
            return x.view(np.int64)
    return x


def _convert_times(times: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return times in another unit; NaT where one has no number in it."""
    try:
        return times.astype(dtype)
    except (OverflowError, ValueError):
        return np.array([None if _overflows(item, dtype) else item for item in times], dtype)


def _overflows(item: Any, dtype: np.dtype[Any]) -> bool:
    try:
        np.asarray(item).astype(dtype)
    except (OverflowError, ValueError):
        return True
    return False


def _find_changes(before: NDArray[Any], after: NDArray[Any]) -> NDArray[np.bool_]:
    """Tell of each item whether it became another by more than rounding."""
    if before.dtype.kind in "mM":
        back = _convert_times(after, before.dtype)
        return np.asarray((back != before) & ~(np.isnat(before) & np.isnat(after)))
    if after.dtype.kind == "c":
        imaginary = _find_changes(before.imag, after.imag) if before.dtype.kind == "c" else np.False_
        return np.asarray(_find_changes(before.real, after.real) | imaginary)
    if before.dtype.kind == "c":
        return np.asarray(_find_changes(before.real, after) | (before.imag != 0))
    if not _is_integer(before.dtype):
        find = _find_fractions if _is_integer(after.dtype) else _find_float_changes
        return find(before, after)
    whole = before if before.dtype.itemsize == np.dtype(np.int64).itemsize else before.astype(np.int64)
    if _is_integer(after.dtype):
        return np.asarray((after if after.dtype.itemsize == whole.dtype.itemsize else after.astype(np.int64)) != whole)
    floats = after if after.dtype.type in _LONG_DOUBLES else after.astype(np.float64)
    # The largest int64 becomes 2**63 as a float64, which is no int64.
    limit = 2.0**64 if whole.dtype.kind == "u" else 2.0**63
    within = (floats >= -limit) & (floats < limit)
    return np.asarray(~within | (np.where(within, floats, 0).astype(whole.dtype) != whole))


def _find_fractions(before: NDArray[Any], after: NDArray[Any]) -> NDArray[np.bool_]:
    """Tell of each float whether an integer became another number."""
    floats = before if before.dtype.type in _LONG_DOUBLES else before.astype(np.float64)
    # What lies outside may become the largest integer, which as a float64 is the limit.
    within = floats < 2.0 ** (64 if after.dtype.kind == "u" else 63)
    whole = after if after.dtype.itemsize == np.dtype(np.int64).itemsize else after.astype(np.int64)
    return np.asarray(~within | (whole.astype(floats.dtype) != floats))


def _find_float_changes(before: NDArray[Any], after: NDArray[Any]) -> NDArray[np.bool_]:
    stays = np.isfinite(before)
    changed = stays != np.isfinite(after)
    if not stays.all():
        changed |= np.isnan(before) != np.isnan(after)
    if after.dtype.name in _CLIPPING:
        changed |= np.abs(before.astype(np.float64)) > float(ml_dtypes.finfo(after.dtype).max)  # type: ignore[no-untyped-call]
    return np.asarray(changed)


def _is_integer(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biu" or dtype.name.startswith(("int", "uint"))
