"""Arrays in host memory -> one device, many at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import jax

if TYPE_CHECKING:
    from numpy.typing import NDArray

# device_put costs some 45 us an array whatever its size. The arguments of a jitted function are put there in 5 us each,
# but a first call with new shapes compiles for 20 ms: worth it from some five hundred arrays alike.
_CALL: Final = 64
_ALIKE: Final = 512
_SMALL_BYTES: Final = 64 << 10

# One call of device_put for many arrays costs half of a call for each.
_TOGETHER: Final = 256


_Passer: TypeAlias = Callable[[list[Any]], list[jax.Array]]


@functools.lru_cache(maxsize=64)
def _passer(sharding: jax.sharding.Sharding | None) -> _Passer:
    """Return a jitted function that returns its arguments, on the device of a sharding."""
    passer: _Passer = jax.jit(list) if sharding is None else jax.jit(list, out_shardings=sharding)
    return passer


def put_all(arrays: Sequence[NDArray[Any]], sharding: jax.sharding.Sharding | None = None) -> list[jax.Array]:
    """Return the arrays on one device, bit for bit.

    Args:
        arrays: of dtypes that jax holds, in memory that nobody writes to any more: jax may take it as it is.
        sharding: of one device, which every result then has; None is the default device, from which jax may move them
            freely.

    Example:
        >>> import numpy as np
        >>> put_all([np.arange(3, dtype=np.int32)])[0].committed
        False
    """
    result: list[Any] = [None] * len(arrays)
    rest: list[int] = []
    if len(arrays) >= _ALIKE and _may_jit():
        alike: dict[Any, list[int]] = {}
        for number, array in enumerate(arrays):
            key = (array.dtype, array.shape) if array.nbytes <= _SMALL_BYTES else None
            alike.setdefault(key, []).append(number)
        for key, numbers in alike.items():
            cut = len(numbers) // _CALL * _CALL if key is not None and len(numbers) >= _ALIKE else 0
            rest += numbers[cut:]
            _pass(arrays, numbers[:cut], sharding, result)
    else:
        rest = list(range(len(arrays)))
    for start in range(0, len(rest), _TOGETHER):
        numbers = rest[start : start + _TOGETHER]
        for number, array in zip(numbers, jax.device_put([arrays[n] for n in numbers], sharding), strict=True):
            result[number] = array
    return result


def _pass(arrays: Sequence[NDArray[Any]], numbers: Sequence[int], sharding: Any, result: list[Any]) -> None:
    """Put arrays of one dtype and shape there, as arguments that come back as results."""
    passer = _passer(sharding)
    # The user's guard is against copies that nobody asked for; this one was.
    with jax.transfer_guard_host_to_device("allow"):
        for start in range(0, len(numbers), _CALL):
            some = numbers[start : start + _CALL]
            for number, array in zip(some, passer([arrays[n] for n in some]), strict=True):
                result[number] = array


def _may_jit() -> bool:
    """Tell whether a jitted function now does just what device_put does: no mesh is set, nothing looks at values."""
    config = jax.config
    looks = config.jax_disable_jit or config.jax_debug_nans or config.jax_debug_infs
    return not looks and bool(jax.sharding.get_abstract_mesh().empty)
