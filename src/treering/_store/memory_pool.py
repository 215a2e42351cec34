"""Pooled buffers, used again once nothing refers to them: fresh memory would cost more than a copy."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from treering._store.pieces import Buffer, Lasting, is_lasting, pieces

if TYPE_CHECKING:
    from numpy.typing import NDArray

PIECE_BYTES: Final = 2 << 20
"""The size of a pooled buffer: what was copied is still in the processor's cache for its checksums."""

_ALONE: Final = 4
_TOGETHER: Final = 8


class _PooledBytes(np.ndarray[Any, np.dtype[np.uint8]], Lasting):
    """The owner of a pooled buffer in use: every view of its memory keeps it."""


class MemoryPool:
    """Pooled buffers, for several threads.

    Example:
        >>> pool = MemoryPool()
        >>> first = pool.copy(memoryview(b"tree"))
        >>> where = np.frombuffer(first, np.uint8).ctypes.data
        >>> del first
        >>> second = pool.copy(memoryview(b"ring"))
        >>> bytes(second), np.frombuffer(second, np.uint8).ctypes.data == where
        (b'ring', True)
    """

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []
        self._made = 0

    def copy(self, data: Buffer | NDArray[np.uint8]) -> memoryview:
        """Return a copy of at most 2 MiB of flat bytes, which nothing changes as long as anything refers to it."""
        try:
            room = self._free.pop()
        except IndexError:
            room = self._make_room()
        source = np.frombuffer(data, np.uint8)
        used = room[: len(source)].view(_PooledBytes)
        weakref.finalize(used, self._free.append, room).atexit = False
        used[:] = source
        return used.data

    def _make_room(self) -> NDArray[np.uint8]:
        """Return a new piece: one of several that the system gives in large pages, once many are used."""
        self._made += 1
        if self._made <= _ALONE:
            return np.empty(PIECE_BYTES, np.uint8)
        memory = np.empty((_TOGETHER + 1) * PIECE_BYTES, np.uint8)
        start = -memory.ctypes.data % PIECE_BYTES
        room, *others = memory[start : start + _TOGETHER * PIECE_BYTES].reshape(_TOGETHER, PIECE_BYTES)
        self._free.extend(others)
        return room


def lasting_pieces(buffers: Iterable[Buffer], size: int) -> Iterator[memoryview]:
    """Yield the same bytes in pieces that stay what they are; only what may change is copied.

    Raises:
        OSError: they hold another number of bytes than ``size``.

    Example:
        >>> b"".join(lasting_pieces([bytearray(b"tree"), b"ring"], 8))
        b'treering'
    """
    pool = MemoryPool()
    for piece in pieces(buffers, size):
        if is_lasting(piece.obj):
            yield piece
        else:
            for start in range(0, len(piece), PIECE_BYTES):
                yield pool.copy(piece[start : start + PIECE_BYTES])
