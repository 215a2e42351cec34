"""numpy leaves -> jax arrays on devices, without a copy where jax takes our aligned memory as it is."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from treering.errors import Mismatch, Unsupported

__all__ = ["placed"]


def placed(tree: Any, shardings: Any) -> Any:
    """Return ``tree`` with every numpy array put on devices; other leaves stay.

    Args:
        tree: a pytree; its arrays must be nobody else's, since jax may alias them.
        shardings: None for the default device, one Sharding or Device, or a prefix tree of them (None = default).

    Raises:
        Unsupported: a 64-bit array while jax has x64 off, or a dtype that jax does not have; nothing is cast.
        Mismatch: ``shardings`` is no prefix of the tree, or does not divide an array.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is None)
    wanted = _broadcast(shardings, tree)
    leaves = [leaf for _, leaf in paths]
    names = [tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path) for path, _ in paths]
    # Each numpy array is let go as soon as it is on its devices.
    del tree, paths
    for index, name in enumerate(names):
        leaf, leaves[index] = leaves[index], None
        leaves[index] = _put(leaf, wanted[index], name) if isinstance(leaf, np.ndarray) else leaf
    return jax.tree_util.tree_unflatten(treedef, leaves)


def _broadcast(shardings: Any, tree: Any) -> list[Any]:
    def is_leaf(x: Any) -> bool:
        return x is None

    try:
        full = jax.tree.broadcast(shardings, tree, is_leaf=is_leaf)
    except ValueError as error:
        raise Mismatch(f"shardings is not a prefix of the tree: {error}") from error
    return jax.tree.leaves(full, is_leaf=is_leaf)


def _put(array: np.ndarray[Any, Any], sharding: Any, path: tuple[str, ...]) -> jax.Array:
    try:
        fits = jax.dtypes.canonicalize_dtype(array.dtype) == array.dtype
    except TypeError:
        fits = False
    if not fits:
        raise Unsupported(
            f"jax cannot hold {array.dtype.name} as it is configured, and nothing is cast",
            path=path,
            hint="set jax_enable_x64 for 64-bit numbers, or load without to_jax and convert",
        )
    try:
        on_devices: jax.Array = jax.device_put(array, sharding)
    except (ValueError, TypeError) as error:
        raise Mismatch(f"an array of shape {array.shape} cannot be placed on {sharding}: {error}", path=path) from error
    return on_devices
