"""numpy leaves of a state dict -> jax arrays on devices, without a copy where jax takes our aligned memory as it is."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from treering._tree.state_dict import to_state_dict
from treering._values.trail import Trail, unwound
from treering.errors import Mismatch, Unsupported

__all__ = ["place"]


def place(state: Any, target: Any, shardings: Any) -> Any:
    """Put every numpy array in ``state`` on devices and return it; other leaves stay.

    The containers of ``state`` are changed in place, so that each array is let go as soon as it is on its devices.

    Args:
        state: a state dict that nobody else holds, and whose arrays nobody can write to: jax may alias them.
        target: the pytree that the state is for, or None; tells which keys ``shardings`` must cover.
        shardings: None for the default device, one Sharding or Device, or a prefix tree of them (None = default).

    Raises:
        Unsupported: a 64-bit array while jax has x64 off, or a dtype that jax does not have; nothing is cast.
        Mismatch: ``shardings`` is no prefix of the tree, or does not divide an array.
    """
    prefix = to_state_dict(shardings)
    wanted = to_state_dict(target) if isinstance(prefix, dict) and target is not None else state
    root = [state]
    tuples: list[tuple[Any, Any]] = []
    pending: list[tuple[Any, Any, Any, Any, Trail]] = [(root, 0, prefix, wanted, None)]
    while pending:
        holder, slot, prefix, wanted, trail = pending.pop()
        value = holder[slot]
        if isinstance(value, np.ndarray):
            holder[slot] = _put(value, prefix, trail)
        elif isinstance(value, dict | list | tuple):
            if isinstance(value, tuple):
                value = holder[slot] = list(value)
                tuples.append((holder, slot))
            keys = value if isinstance(value, dict) else range(len(value))
            for key in keys:
                below: Trail = (trail, str(key))
                part = _part_of(prefix, wanted, str(key), below)
                if part is not None:
                    pending.append((value, key, part[0], part[1], below))
    for holder, slot in reversed(tuples):
        holder[slot] = tuple(holder[slot])
    return root[0]


def _part_of(prefix: Any, wanted: Any, key: str, trail: Trail) -> tuple[Any, Any] | None:
    """Return what the prefix and the target have for ``key``; None where the target takes no such key."""
    below = wanted.get(key) if isinstance(wanted, dict) else None
    if not isinstance(prefix, dict):
        return prefix, below
    if key in prefix:
        return prefix[key], below
    if isinstance(wanted, dict) and key not in wanted:
        return None
    raise Mismatch(
        "shardings is not a prefix of the tree: it has nothing for this leaf",
        path=unwound(trail),
        hint="None there means the default device",
    )


def _put(array: np.ndarray[Any, Any], sharding: Any, trail: Trail) -> jax.Array:
    path = unwound(trail)
    if isinstance(sharding, dict):
        raise Mismatch("shardings is not a prefix of the tree: it goes on below this array", path=path)
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
