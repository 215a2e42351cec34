"""Leaves of a file as arrays in our own aligned memory: planned while the headers are read, filled afterwards.

Between the two the tree can be compared with its target, so a mismatch costs no reading. Where nobody compares it, and
each read waits for an answer, the file is read through large windows instead, of which arrays take what is theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from treering._arrays.buffers import SMALL_BYTES, SmallRoom, aligned_bytes
from treering._codec.msgpack.scan import Scanner
from treering._codec.msgpack.views import Views
from treering._store.api import Reader
from treering._values.dtypes import Dtype, numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Read by several requests at once.
_WINDOW_BYTES: Final = 32 << 20


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
    arrays = Views(file.map() if file.size else b"") if mapped else PlannedArrays()
    at_once = file.threads > Reader.threads and not mapped and check is None
    state = Scanner(first, file.size, file.read, arrays, step=_WINDOW_BYTES if at_once else None).run()
    if isinstance(arrays, PlannedArrays):
        if check is not None:
            check(state)
        file.read_into(arrays.reads())
        for array in arrays.results if sealed else ():
            array.flags.writeable = False
    return state


class PlannedArrays:
    """Allocates an array for each array in the file and remembers which bytes it wants.

    Attributes:
        results: the arrays.
    """

    def __init__(self) -> None:
        self._small = SmallRoom()
        self._jobs: dict[int, tuple[int, NDArray[np.uint8]]] = {}
        self.results: list[NDArray[Any]] = []

    def reads(self) -> list[tuple[int, memoryview]]:
        """Return (file offset, where to) for all bytes that are still wanted, in file order."""
        return [(offset, raw.data) for offset, raw in self._jobs.values() if raw.size]

    def prepare(self, dtype: Dtype) -> np.dtype[Any]:
        """Return the numpy dtype."""
        return numpy_dtype(dtype)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int, data: bytes, at: int) -> NDArray[Any]:
        """Return an array with what the window has of it; what follows is still to be read."""
        if (nbytes := math.prod(shape) * dtype.itemsize) <= SMALL_BYTES and at + nbytes <= len(data):
            return np.ndarray(shape, dtype, *self._small.keep(data[at : at + nbytes]))
        raw = aligned_bytes(nbytes)
        result = np.ndarray(shape, dtype, raw)
        known = min(nbytes, len(data) - at)
        raw[:known] = np.frombuffer(data, np.uint8, known, at)
        self._jobs[id(result)] = (offset + known, raw[known:])
        self.results.append(result)
        return result

    def scalar(self, shape: tuple[int, ...], dtype: np.dtype[Any], _offset: int, data: bytes) -> object:
        """Return the numpy scalar of these bytes."""
        return np.ndarray(shape, dtype, data)[()]

    def join_chunks(self, shape: tuple[int, ...], parts: list[Any]) -> NDArray[Any]:
        """Return one array whose pieces are read straight into their places."""
        first: NDArray[Any] = parts[0]
        raw = aligned_bytes(sum(part.size for part in parts) * first.dtype.itemsize)
        at = 0
        for part in parts:
            offset, rest = self._jobs.get(id(part), (0, raw[:0]))
            known, place = part.nbytes - rest.nbytes, raw[at : at + part.nbytes]
            place[:known] = part.view(np.uint8)[:known]
            self._jobs[id(part)] = (offset, place[known:])
            at += part.nbytes
        result = np.ndarray(shape, first.dtype, raw)
        self.results.append(result)
        return result

    def blob(self, read: Callable[[], bytes], _offset: int, _nbytes: int, is_text: bool) -> object:
        """Return the str or bytes, read now."""
        return read().decode() if is_text else read()
