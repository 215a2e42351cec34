"""The bytes of a numpy array as files hold them: C order, little endian, in bounded pieces.

A contiguous little-endian array gives one view of its own memory. Anything else (strided, Fortran, big endian) is
converted slab by slab, so that writing a huge transposed array needs only a few MiB beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

SLAB_BYTES: Final = 4 * 1024 * 1024

_LONG_DOUBLES: Final = (np.longdouble, np.clongdouble)
_LONG_DOUBLE_VALUE_BYTES: Final = 10


def holds_wire_bytes(dtype: np.dtype[Any]) -> bool:
    """Tell whether items of ``dtype`` lie in memory just as they lie in a file.

    Example:
        >>> holds_wire_bytes(np.dtype("<f4")), holds_wire_bytes(np.dtype(">f4"))
        (True, False)
    """
    return dtype == dtype.newbyteorder("<") and dtype.type not in _LONG_DOUBLES


def wire_blocks(array: NDArray[Any], start: int, stop: int) -> Iterator[memoryview]:
    """Yield the bytes of items ``start`` to ``stop`` of ``array`` in C order, little endian.

    Example:
        >>> b"".join(wire_blocks(np.array([[1, 2], [3, 4]], ">i2").T, 0, 4)).hex(" ", 2)
        '0100 0300 0200 0400'
    """
    plain = holds_wire_bytes(array.dtype)
    if plain and array.flags.c_contiguous:
        yield _bytes_of(array.reshape(-1)[start:stop])
        return
    slabs = _slabs(array) if (start, stop) == (0, array.size) else _flat_pieces(array, start, stop)
    for slab in slabs:
        yield _bytes_of(slab if plain else _convert(slab))


def _bytes_of(flat: NDArray[Any]) -> memoryview:
    return flat.view(np.uint8).data


def _convert(flat: NDArray[Any]) -> NDArray[Any]:
    little = flat.astype(flat.dtype.newbyteorder("<"))
    if flat.dtype.type not in _LONG_DOUBLES:
        return little
    # An x87 value fills 10 of its 16 bytes; the rest is stray memory, which must not reach a file.
    items = little.view(np.uint8).reshape(-1, 16)
    items[:, _LONG_DOUBLE_VALUE_BYTES:] = 0
    return items.reshape(-1)


def _slabs(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield flat C-order copies of runs of leading rows, each about ``SLAB_BYTES``; never the array's own memory."""
    if array.nbytes <= SLAB_BYTES or array.ndim == 0:
        yield np.array(array, order="C").reshape(-1)
        return
    row_bytes = array.nbytes // len(array)
    if row_bytes > SLAB_BYTES:
        for row in array:
            yield from _slabs(row)
        return
    step = SLAB_BYTES // row_bytes
    for first in range(0, len(array), step):
        yield np.array(array[first : first + step], order="C").reshape(-1)


def _flat_pieces(array: NDArray[Any], start: int, stop: int) -> Iterator[NDArray[Any]]:
    step = max(1, SLAB_BYTES // array.dtype.itemsize)
    for first in range(start, stop, step):
        yield array.flat[first : min(first + step, stop)]
