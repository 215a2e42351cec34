"""The dtype names that may stand in a file, and the numpy dtypes behind them.

A file says ``bfloat16`` as text. Numpy's parser takes far more (``object``, ``>f4``, ``i4,f8``), so a name is looked up
here and never handed to ``numpy.dtype`` unseen. Item sizes are known without numpy: a listing needs no array library.

Source: the names are ``numpy.dtype(...).name``, those of ml_dtypes included.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from typing import TYPE_CHECKING, Any

from treering.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np

_WIDTHS = {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64), "complex": (64, 128)}
NUMPY_SIZES = {"bool": 1} | {f"{kind}{bits}": bits // 8 for kind, widths in _WIDTHS.items() for bits in widths}
"""The dtypes of numpy that every machine has -> bytes an item."""

# The x86-64 long double: 10 bytes of value in 16. Other machines use these names for other layouts.
_LONG_DOUBLES = {"float128": 16, "complex256": 32}

# Bytes an item, and bits of its mantissa.
_X87_LAYOUT = (16, 63)

# One byte an item, also where the type has fewer bits.
_FLOAT8 = ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
SUB_BYTE = ("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "int1", "int2", "int4", "uint1", "uint2", "uint4")
"""Types of fewer than 8 bits."""

_EXTENDED_SIZES = {"bfloat16": 2} | dict.fromkeys((*SUB_BYTE, *(f"float8_{kind}" for kind in _FLOAT8)), 1)
_SIZES = NUMPY_SIZES | _EXTENDED_SIZES | _LONG_DOUBLES

_TIME_NAME = re.compile(r"(datetime64|timedelta64)(\[([1-9][0-9]{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")
_LONGEST_NAME = 64
_AS_LEAVES = "store text as str leaves and other values as numbers"


@dataclasses.dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype by name: enough to size an array without numpy.

    Example:
        >>> lookup("bfloat16")
        Dtype(name='bfloat16', itemsize=2)
        >>> lookup("object") is None
        True
    """

    name: str
    """As ``numpy.dtype(...).name`` says it."""

    itemsize: int
    """Bytes an item takes in a file; sub-byte types take a whole one."""


@functools.lru_cache(maxsize=256)
def lookup(name: str) -> Dtype | None:
    """Return the dtype called ``name``, or None where no file may hold it."""
    size = _SIZES.get(name, 8 if len(name) <= _LONGEST_NAME and _TIME_NAME.fullmatch(name) else None)
    return None if size is None else Dtype(name, size)


def itemsize_of(name: str | None) -> int:
    """Return the bytes that an item of a dtype takes in a file, 0 for no dtype and for an unknown one.

    Example:
        >>> itemsize_of("bfloat16"), itemsize_of(None)
        (2, 0)
    """
    known = lookup(name or "")
    return 0 if known is None else known.itemsize


def is_numpy(name: str | None) -> bool:
    """Tell whether a dtype is one of numpy's own that every machine has: of numbers, or of times.

    Example:
        >>> is_numpy("int8"), is_numpy("datetime64[s]"), is_numpy("bfloat16"), is_numpy(None)
        (True, True, False, False)
    """
    return name in NUMPY_SIZES or ((name or "")[:8] in ("datetime", "timedelt") and lookup(name or "") is not None)


@functools.lru_cache(maxsize=256)
def is_float(name: str | None) -> bool:
    """Tell whether the name is that of a dtype of floats.

    Example:
        >>> is_float("bfloat16"), is_float("complex64"), is_float(None)
        (True, False, False)
    """
    return (name or "").startswith(("float", "bfloat"))


def number_rank(name: str) -> int | None:
    """Return the place of a dtype among kinds of numbers, each of which holds those before; None for no numbers.

    Example:
        >>> [number_rank(name) for name in ("bool", "uint4", "int8", "bfloat16", "complex64", "datetime64[s]")]
        [0, 1, 2, 3, 4, None]
    """
    kinds = (("bool",), ("uint",), ("int",), ("float", "bfloat"), ("complex",))
    return next((rank for rank, kind in enumerate(kinds) if name.startswith(kind)), None)


def is_kind_kept(before: str, after: str) -> bool:
    """Tell whether a cast stays within a kind of numbers or of times, or goes to a wider kind of numbers.

    numpy's own rule takes bfloat16 for anything, and integers for times.

    Example:
        >>> is_kind_kept("int8", "float32"), is_kind_kept("float32", "int8"), is_kind_kept("int64", "datetime64[s]")
        (True, False, False)
        >>> is_kind_kept("datetime64[s]", "datetime64[D]"), is_kind_kept("timedelta64[Y]", "timedelta64[D]")
        (True, False)
    """
    ranks = number_rank(before), number_rank(after)
    if ranks[0] is not None and ranks[1] is not None:
        return ranks[0] <= ranks[1]
    if before == after or before[:8] != after[:8] or lookup(before) is None or lookup(after) is None:
        return before == after
    import numpy as np

    return np.can_cast(before, after, "same_kind")


def numpy_dtype(dtype: Dtype) -> np.dtype[Any]:
    """Return the little-endian numpy dtype for ``dtype``.

    Raises:
        UnsupportedError: this machine or this ml_dtypes version has no such type.
    """
    import numpy as np

    if dtype.name in _EXTENDED_SIZES:
        import ml_dtypes

        if (scalar_type := getattr(ml_dtypes, dtype.name, None)) is None:
            text = f"dtype {dtype.name} is unknown to ml_dtypes {ml_dtypes.__version__}"
            raise UnsupportedError(text, hint="install a newer ml_dtypes")
        extended: np.dtype[Any] = np.dtype(scalar_type)
        return extended
    if dtype.name in _LONG_DOUBLES:
        layout = (np.dtype(np.longdouble).itemsize, int(np.finfo(np.longdouble).nmant))
        if layout != _X87_LAYOUT:
            text = f"dtype {dtype.name} in a file is the x86-64 long double, which this machine does not have"
            raise UnsupportedError(text, hint="convert it to float64 on the machine that wrote it")
    try:
        found = np.dtype(dtype.name)
    except (TypeError, ValueError, OverflowError) as error:  # a time unit that this numpy refuses
        raise UnsupportedError(f"numpy {np.__version__} does not know the dtype {dtype.name}") from error
    return found.newbyteorder("<") if sys.byteorder == "big" else found


def _hint_for(dtype: np.dtype[Any]) -> str:
    if dtype.names == ("float0",):  # what jax gives for the gradient of an int or a bool
        return "it is the gradient of what is no float and has no values: make it None, or differentiate floats only"
    return _AS_LEAVES if dtype.hasobject and dtype.names is None else "store each field as an array of its own"


@functools.lru_cache(maxsize=256)
def check_writable(dtype: np.dtype[Any]) -> Dtype:
    """Return the ``Dtype`` that a file will name for ``dtype``, whatever its byte order.

    Raises:
        UnsupportedError: object, structured, string or void dtypes, and any whose name would not lead back to it.
    """
    if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None:
        text = f"Object and structured dtypes not supported for serialization of ndarrays, found {dtype}"
        raise UnsupportedError(text, hint=_hint_for(dtype))
    if (known := lookup(dtype.name)) is None or known.itemsize != dtype.itemsize:
        text = f"dtype {dtype} ({dtype.name}) could be written but not read back"
        raise UnsupportedError(text, hint=_AS_LEAVES)
    if numpy_dtype(known) != dtype.newbyteorder("="):
        raise UnsupportedError(f"dtype {dtype} would come back as {numpy_dtype(known)}")
    return known
