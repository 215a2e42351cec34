"""Numbers of numpy and jax in what is written as JSON: they become Python's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import jax
import numpy as np

from treering._codec.documents import MAX_NESTING

_SCALARS: Final = (np.generic, np.ndarray, jax.Array)
# Truth values, ints, floats; V: those of ml_dtypes, bfloat16 for instance.
_KINDS: Final = "biufV"


def with_python_numbers(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a user's metadata in which scalars of numpy and jax are Python's bool, int or float.

    What is no number stays as it is, for ``check_json`` to name.

    Example:
        >>> with_python_numbers({"step": np.int64(3), "losses": [np.float32(0.5), jax.numpy.float32(2)]})
        {'step': 3, 'losses': [0.5, 2.0]}
    """
    return {name: _plain(value, ()) for name, value in metadata.items()}


def _plain(value: Any, above: tuple[int, ...]) -> Any:
    if isinstance(value, _SCALARS):
        return _number(value)
    if type(value) not in (dict, list) or len(above) > MAX_NESTING or id(value) in above:
        return value
    above = (*above, id(value))
    if type(value) is dict:
        return {name: _plain(item, above) for name, item in value.items()}
    return [_plain(item, above) for item in value]


def _number(value: Any) -> Any:
    """Return the number that a scalar holds, or the scalar itself where it is none, or lies elsewhere."""
    try:
        number = value.item() if not value.shape and value.dtype.kind in _KINDS else value
    except (TypeError, ValueError, RuntimeError):  # a tracer, a deleted array, or one of other processes
        return value
    return number if type(number) in (bool, int, float) else value
