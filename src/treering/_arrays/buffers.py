"""Memory that jax can take as it is: our own, 64-byte aligned, known to nobody else.

jax on CPU takes a numpy array without a copy when it starts at a multiple of 64 bytes (measured; ``numpy.empty`` alone
promises 16).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from treering._values.human import bytes_text
from treering.errors import CorruptError, NoMemoryError

if TYPE_CHECKING:
    from numpy.typing import NDArray


ALIGNMENT: Final = 64

# Large memory starts where a large page does: else that page comes as 512 small ones, each with a fault of its own.
_PAGE_BYTES: Final = 2 << 20
_PAGES_FROM: Final = 4 << 20

SMALL_BYTES: Final = 8 * 1024
"""Arrays up to this size share allocations."""

# One array that is kept keeps this much.
_ROOM_BYTES: Final = 64 * 1024
_SMALL_BYTES: Final = 64 << 10


def aligned_bytes(nbytes: int) -> NDArray[np.uint8]:
    """Return ``nbytes`` of unset memory that starts at a multiple of 64 bytes, from 4 MiB on at one of 2 MiB.

    Raises:
        UnsupportedError: the system has no such memory; also a ``MemoryError``.

    Example:
        >>> aligned_bytes(3).ctypes.data % 64
        0
    """
    alignment = ALIGNMENT if nbytes < _PAGES_FROM else _PAGE_BYTES
    try:
        room = np.empty(nbytes + alignment, np.uint8)
    except (MemoryError, ValueError) as error:  # ValueError: more than an address has bits
        hint = "load a part with only=, or slices of it with open"
        raise NoMemoryError(f"there is not enough memory for {bytes_text(nbytes)}", hint=hint) from error
    skip = -room.ctypes.data % alignment
    return room[skip : skip + nbytes]


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an unset array in `aligned_bytes`.

    Example:
        >>> aligned_empty((2, 3), np.dtype("u1")).shape
        (2, 3)
    """
    return np.ndarray(shape, dtype, aligned_bytes(math.prod(shape) * dtype.itemsize))


def aligned_together(wanted: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> list[NDArray[Any]]:
    """Return unset arrays of some shapes and dtypes in one `aligned_bytes`: large memory comes in large pages.

    Example:
        >>> [array.shape for array in aligned_together([((2, 3), np.dtype("i4")), ((5,), np.dtype("u1"))])]
        [(2, 3), (5,)]
    """
    sizes = [-(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for shape, dtype in wanted]
    room, ends = aligned_bytes(sum(sizes)), itertools.accumulate(sizes)
    places = zip(wanted, sizes, ends, strict=True)
    return [np.ndarray(shape, dtype, room, end - size) for (shape, dtype), size, end in places]


class SmallRoom:
    """Keeps small runs of bytes at multiples of 64 bytes, many in one allocation, read-only once they are there.

    Example:
        >>> buffer, start = SmallRoom().keep(b"abc")
        >>> bytes(buffer[start : start + 3]), buffer.readonly
        (b'abc', True)
    """

    def __init__(self) -> None:
        self._start_over()

    def _start_over(self) -> None:
        self._room = aligned_bytes(_ROOM_BYTES).data
        self._shown = self._room.toreadonly()
        self._used = 0

    def keep(self, data: bytes) -> tuple[memoryview, int]:
        """Copy up to ``SMALL_BYTES`` bytes; return a read-only buffer and where in it they start."""
        start = self._used
        if (end := start + len(data)) > _ROOM_BYTES:
            self._start_over()
            start, end = 0, len(data)
        self._room[start:end] = data
        self._used = -(-end // ALIGNMENT) * ALIGNMENT
        return self._shown, start


def on_host(array: NDArray[Any], kind: str, *, own: bool = True) -> Any:
    """Return the leaf of a kind whose stored items are ``array``.

    Args:
        array: the items.
        kind: a kind of leaf whose bytes lie in files.
        own: copy a small array: those were read together, and one that is kept shall not keep its neighbours.

    Raises:
        CorruptError: a text is no UTF-8.

    Example:
        >>> import numpy as np
        >>> on_host(np.frombuffer(b"ring", np.uint8), "str")
        'ring'
    """
    if kind == "str":
        try:
            return array.tobytes().decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise CorruptError(f"a text is not UTF-8: {error.reason}", offset=error.start) from error
    if kind == "bytes":
        return array.tobytes()
    if kind == "bytearray":
        return bytearray(array.data)
    return array[()] if kind == "numpy scalar" else array.copy() if own and array.nbytes <= _SMALL_BYTES else array
