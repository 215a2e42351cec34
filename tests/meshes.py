"""Meshes of this process's devices: eight pretended ones, as `tests/conftest.py` asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh


def line(count: int | None = None, axis: str = "x") -> Mesh:
    """The first devices in a line; None: all of them."""
    return Mesh(np.array(jax.devices()[:count]), (axis,))


def grid(*shape: int, axes: Sequence[str] = "xyz") -> Mesh:
    """The first devices in that shape."""
    return Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), tuple(axes[: len(shape)]))
