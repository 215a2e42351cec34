"""Leaves as read-only views of the bytes that were scanned: no array is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from treering._values.dtypes import Dtype, numpy_dtype

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from numpy.typing import NDArray


class Views:
    """Makes every array a view of ``buffer``; only chunked arrays are put together in fresh memory.

    Args:
        buffer: what was scanned, readable for as long as any array lives; nobody may write to it.
    """

    def __init__(self, buffer: ReadableBuffer) -> None:
        self._buffer = buffer

    def prepare(self, dtype: Dtype) -> np.dtype[Any]:
        """Return the numpy dtype."""
        return numpy_dtype(dtype)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int, _data: bytes, _at: int) -> NDArray[Any]:
        """Return the array at ``offset``, read-only."""
        return np.ndarray(shape, dtype, self._buffer, offset)

    def scalar(self, shape: tuple[int, ...], dtype: np.dtype[Any], _offset: int, data: bytes) -> object:
        """Return the numpy scalar of these bytes."""
        return np.ndarray(shape, dtype, data)[()]

    def join_chunks(self, shape: tuple[int, ...], parts: list[Any]) -> NDArray[Any]:
        """Return the pieces joined, in fresh writable memory."""
        return np.concatenate(parts).reshape(shape)

    def blob(self, read: Callable[[], bytes], _offset: int, _nbytes: int, is_text: bool) -> object:
        """Return the str or bytes."""
        return read().decode() if is_text else read()
