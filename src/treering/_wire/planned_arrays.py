"""Leaves of a file as arrays in our own aligned memory: planned while the headers are read, filled afterwards.

Between the two the tree can be compared with its target, so a mismatch costs no reading.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from treering._arrays.buffers import SMALL_BYTES, SmallRoom, aligned_bytes
from treering._codec.msgpack.scan import Scanner
from treering._codec.msgpack.views import Views
from treering._store.api import Reader
from treering._values.dtypes import Dtype, numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray


def read_state(
    file: Reader, first: bytes, *, mapped: bool, check: Callable[[Any], object] | None = None, sealed: bool = False
) -> Any:
    """Return the state dict of a msgpack file.

    Headers are always read, which costs less than touching a map here and there.

    Args:
        file: the file.
        first: its first bytes.
        mapped: whether arrays are views of a map.
        check: looks at the state dict before its arrays are read.
        sealed: whether arrays that are read become read-only, as flax's are.
    """
    arrays = Views(file.map() if file.size else b"") if mapped else PlannedArrays(file.read)
    state = Scanner(first, file.size, file.read, arrays).run()
    if isinstance(arrays, PlannedArrays):
        if check is not None:
            check(state)
        file.read_into(arrays.reads())
        for array in arrays.results if sealed else ():
            array.flags.writeable = False
    return state


class PlannedArrays:
    """Allocates an array for each array in the file and remembers which bytes it wants.

    Args:
        read: ``read(offset, n)`` returns exactly ``n`` bytes of the file; used for numpy scalars.

    Attributes:
        results: the arrays.
    """

    def __init__(self, read: Callable[[int, int], bytes]) -> None:
        self._read = read
        self._small = SmallRoom()
        self._jobs: dict[int, tuple[int, NDArray[np.uint8]]] = {}
        self.results: list[NDArray[Any]] = []

    def reads(self) -> list[tuple[int, memoryview]]:
        """Return (file offset, where to) for all bytes that are wanted, in file order."""
        return [(offset, raw.data) for offset, raw in self._jobs.values()]

    def prepare(self, dtype: Dtype) -> np.dtype[Any]:
        """Return the numpy dtype."""
        return numpy_dtype(dtype)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int, data: bytes, at: int) -> NDArray[Any]:
        """Return an array whose bytes are still to be read from ``offset``; a small one is copied from the window."""
        if (nbytes := math.prod(shape) * dtype.itemsize) <= SMALL_BYTES and at + nbytes <= len(data):
            return np.ndarray(shape, dtype, *self._small.keep(data[at : at + nbytes]))
        raw = aligned_bytes(nbytes)
        result = np.ndarray(shape, dtype, raw)
        self._jobs[id(result)] = (offset, raw)
        self.results.append(result)
        return result

    def scalar(self, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int) -> object:
        """Return the numpy scalar at ``offset``, read now."""
        return np.ndarray(shape, dtype, self._read(offset, dtype.itemsize))[()]

    def join_chunks(self, shape: tuple[int, ...], parts: list[Any]) -> NDArray[Any]:
        """Return one array whose pieces are read straight into their places."""
        first: NDArray[Any] = parts[0]
        raw = aligned_bytes(sum(part.size for part in parts) * first.dtype.itemsize)
        at = 0
        for part in parts:
            place = raw[at : at + part.nbytes]
            if id(part) in self._jobs:
                self._jobs[id(part)] = (self._jobs[id(part)][0], place)
            else:
                place[:] = part.view(np.uint8)
            at += part.nbytes
        result = np.ndarray(shape, first.dtype, raw)
        self.results.append(result)
        return result

    def blob(self, read: Callable[[], bytes], _offset: int, _nbytes: int, is_text: bool) -> object:
        """Return the str or bytes, read now."""
        return read().decode() if is_text else read()
