"""Memory that jax can take as it is: our own, 64-byte aligned, known to nobody else.

jax on CPU takes a numpy array without a copy when it starts at a multiple of 64 bytes (measured; ``numpy.empty`` alone
promises 16).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Pool", "aligned_bytes"]

ALIGNMENT: Final = 64
_POOL_BYTES: Final = 1024 * 1024


def aligned_bytes(nbytes: int) -> NDArray[np.uint8]:
    """Return ``nbytes`` of unset memory that starts at a multiple of 64 bytes.

    Example:
        >>> aligned_bytes(3).ctypes.data % 64
        0
    """
    room = np.empty(nbytes + ALIGNMENT, np.uint8)
    skip = -room.ctypes.data % ALIGNMENT
    return room[skip : skip + nbytes]


class Pool:
    """Hands out small aligned pieces of larger allocations, so that small arrays cost no allocation each."""

    def __init__(self) -> None:
        self._room: NDArray[Any] = aligned_bytes(0)
        self._used = 0

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """Return ``nbytes`` of unset memory at a multiple of 64 bytes; large ones are allocated alone."""
        if nbytes > _POOL_BYTES // 8:
            return aligned_bytes(nbytes)
        if self._used + nbytes > len(self._room):
            self._room, self._used = aligned_bytes(_POOL_BYTES), 0
        start = self._used
        self._used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return self._room[start : start + nbytes]
