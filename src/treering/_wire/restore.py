"""A state dict that was read -> the structure of its target; numpy leaves onto devices, without a copy if possible."""

from __future__ import annotations

from typing import Any, Final

import jax
import numpy as np

from treering._arrays.delivered import device_put
from treering._arrays.host import jax_holds
from treering._tree.placement import aval_of, is_concrete, resolve_shardings
from treering._tree.restore import from_state_dict
from treering._tree.state_dict import require_match, to_state_dict
from treering._values.keys import Trail, join_key, unwind
from treering.errors import MismatchError, UnsupportedError

# An array in a container: the container, its key there, where it goes, and its key path.
_Slot = tuple[Any, Any, Any, Trail]

_SMALL_BYTES: Final = 1024 * 1024
_TOGETHER: Final = 256
_NO_PREFIX: Final = "shardings is not a prefix of the tree"


def place(state: Any, target: Any, shardings: Any) -> Any:
    """Put every numpy array in ``state`` on devices and return it; other leaves stay.

    The containers of ``state`` are changed in place, so that each array is let go as soon as it is on its devices.

    Args:
        state: a state dict that nobody else holds, and whose arrays nobody can write to: jax may alias them.
        target: the pytree that the state is for, or None; tells which keys ``shardings`` must cover.
        shardings: None for the default device, one Sharding or Device, or a prefix tree of them (None = default).

    Raises:
        UnsupportedError: a 64-bit array while jax has x64 off, or a dtype that jax does not have; nothing is cast.
        MismatchError: ``shardings`` is no prefix of the tree, or does not divide an array.
    """
    prefix = to_state_dict(shardings)
    wanted = to_state_dict(target) if isinstance(prefix, dict) and target is not None else state
    root = [state]
    small: list[_Slot] = []
    tuples: list[tuple[Any, Any]] = []
    pending: list[tuple[Any, Any, Any, Any, Trail]] = [(root, 0, prefix, wanted, None)]
    while pending:
        holder, slot, prefix, wanted, trail = pending.pop()
        value = holder[slot]
        if isinstance(value, np.ndarray):
            small.append((holder, slot, prefix, trail))
            if value.nbytes > _SMALL_BYTES or len(small) == _TOGETHER:
                _put_all(small)
                small.clear()
        elif isinstance(value, dict | list | tuple):
            if isinstance(value, tuple):
                value = holder[slot] = list(value)
                tuples.append((holder, slot))
            _require_wanted(prefix, wanted, trail)
            keys = value if isinstance(value, dict) else range(len(value))
            for key in keys:
                below: Trail = (trail, str(key))
                if (part := _part_of(prefix, wanted, str(key), below)) is not None:
                    pending.append((value, key, part[0], part[1], below))
    if small:
        _put_all(small)
    for holder, slot in reversed(tuples):
        holder[slot] = tuple(holder[slot])
    return root[0]


def _require_wanted(prefix: Any, wanted: Any, trail: Trail) -> None:
    """Refuse a sharding for what is not there: a mistyped key must not leave an array on the default device."""
    if isinstance(prefix, dict) and isinstance(wanted, dict):
        stray = [key for key in prefix if key not in wanted]
        if stray:
            raise MismatchError(
                f"shardings has {stray[0]!r:.200}, which the tree does not have", path=unwind(trail) or None
            )


def _part_of(prefix: Any, wanted: Any, key: str, trail: Trail) -> tuple[Any, Any] | None:
    """Return what the prefix and the target have for ``key``; None where the target takes no such key."""
    below = wanted.get(key) if isinstance(wanted, dict) else None
    if not isinstance(prefix, dict):
        return prefix, below
    if key in prefix:
        return prefix[key], below
    if isinstance(wanted, dict) and key not in wanted:
        return None
    hint = "None there means the default device"
    raise MismatchError(f"{_NO_PREFIX}: it has no entry for this leaf", path=unwind(trail), hint=hint)


def _put_all(slots: list[_Slot]) -> None:
    """Put the arrays in these slots on their devices with one call, which costs half of a call for each."""
    arrays = [holder[slot] for holder, slot, _, _ in slots]
    shardings = []
    for array, (_, _, sharding, trail) in zip(arrays, slots, strict=True):
        if isinstance(sharding, dict):
            raise MismatchError(f"{_NO_PREFIX}: it continues below this array", path=unwind(trail))
        if not jax_holds(array.dtype):
            what = f"jax cannot hold {array.dtype.name} as configured, and treering casts nothing"
            hint = "set jax_enable_x64 for 64-bit numbers, or load without to_jax and convert"
            raise UnsupportedError(what, path=unwind(trail), hint=hint)
        shardings.append(_with_devices(array, sharding, trail))
    try:
        # None inside a list of shardings would be no leaf for jax, so equal ones are given once.
        if all(sharding is shardings[0] for sharding in shardings):
            placed = device_put(arrays, shardings[0])
        else:
            placed = [device_put(*pair) for pair in zip(arrays, shardings, strict=True)]
    except (ValueError, TypeError, NotImplementedError):
        placed = [_put(array, place, slot[3]) for array, place, slot in zip(arrays, shardings, slots, strict=True)]
    for array, (holder, slot, _, _) in zip(placed, slots, strict=True):
        holder[slot] = array


def _with_devices(array: np.ndarray[Any, Any], sharding: Any, trail: Trail) -> Any:
    """Return the sharding; one of an abstract mesh on the current mesh of devices.

    Raises:
        MismatchError, UnsupportedError: there is none, or an array cannot be laid out so.
    """
    if not isinstance(sharding, jax.sharding.NamedSharding) or is_concrete(sharding):
        return sharding
    key = join_key(unwind(trail))
    return resolve_shardings(sharding, None, {key: aval_of(array.shape, array.dtype)}, [key])[key]


def _put(array: np.ndarray[Any, Any], sharding: Any, trail: Trail) -> Any:
    """Put one array, and name it where jax refuses it."""
    try:
        return device_put(array, sharding)
    except (ValueError, TypeError, NotImplementedError) as error:
        what = f"an array of shape {array.shape} cannot be placed on {sharding}: {error}"
        raise MismatchError(what, path=unwind(trail)) from error


def restore_into(target: Any, state: Any, *, strict: bool, to_jax: bool, shardings: Any) -> Any:
    """Return ``target``'s structure with the leaves of ``state``, whose containers may change on the way.

    ``shardings`` implies ``to_jax``.
    """
    if strict:
        require_match(target, state)
    if to_jax or shardings is not None:
        state = place(state, target, shardings)
    return from_state_dict(target, state)
