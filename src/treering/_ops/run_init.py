"""A checkpoint and a function that makes a fresh tree -> the tree: loaded where it is stored, initialised where not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["loaded_or_initialised"]


def loaded_or_initialised(
    path: Path | None, init_fn: Callable[[], Any], *, shardings: Any, mesh: Any, timeout: float | None
) -> tuple[Any, tuple[str, ...]]:
    """Return the tree, and the key texts of the leaves that were initialised.

    Of the leaves that are loaded no array is ever made by ``init_fn``; the others come out of one jitted call, each on
    its sharding. What ``init_fn`` returns beside arrays of jax is taken as it is: numpy arrays, Python values, functions.

    Args:
        path: the checkpoint; None initialises everything.
        init_fn: a function without arguments. It is traced, as ``jax.jit`` does, once or twice.
        shardings: where arrays go, as for ``treering.load``.
        mesh: the mesh of partition specs.
        timeout: seconds to wait for other processes where arrays lie over several.

    Raises:
        Mismatch: stored leaves have other shapes or dtypes, or ``init_fn`` does not have them; all are named.
        Unsupported: ``init_fn`` cannot be traced, or something is no sharding.
        TreeringError: as ``treering.load``.
    """
    raise NotImplementedError((path, init_fn, shardings, mesh, timeout))
