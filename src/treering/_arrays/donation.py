"""Whether a numpy view keeps what an array held, after the array was donated to a jitted function."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import numpy as np

from treering._store.crew import work_together

_ITEMS = 4096


@functools.cache
def views_survive() -> bool:
    """Tell whether views of arrays on CPU outlive their donation; found out once, by donating a small array.

    jax's runtime gives a donated buffer away only if nobody else holds on to it, and a live view does. That is how it
    is and nothing that it promises; where it is not so, a snapshot has to copy.

    Example:
        >>> views_survive()
        True
    """
    found: list[bool] = []
    # The caller may be inside of a mesh, or of a trace, in which jax runs nothing on one device; another thread is not.
    work_together(lambda: found.append(_donated()), 1, lambda: None)
    return found == [True]


def _donated() -> bool:
    cpu = jax.local_devices(backend="cpu")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a runtime that does not donate says so
        with jax.transfer_guard("allow"), jax.disable_jit(False):
            return all(_outlives(jax.device_put(_numbers(dtype), cpu)) for dtype in ("float32", "bfloat16"))


def _numbers(dtype: str) -> Any:
    return np.arange(_ITEMS).astype(jax.numpy.dtype(dtype))


def _outlives(array: jax.Array) -> bool:
    """Donate an array that jax made itself, so that its memory is the runtime's to give away."""
    own = jax.jit(lambda x: x + 1)(array)
    view = np.asarray(own)
    before = view.copy()
    _donate(own)
    return bool((view == before).all())


def _donate(array: jax.Array) -> None:
    jax.jit(lambda x: x * 2 + 1, donate_argnums=0)(array).block_until_ready()
