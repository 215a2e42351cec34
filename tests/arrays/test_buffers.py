"""Memory that arrays are read into."""

from __future__ import annotations

import numpy as np
import pytest

from treering._arrays.jobs import aligned_bytes, aligned_together


@pytest.mark.parametrize(
    ("nbytes", "alignment"),
    [(1, 64), ((4 << 20) - 1, 64), (4 << 20, 2 << 20), ((4 << 20) + 1, 2 << 20), (33 << 20, 2 << 20)],
)
def test_large_memory_begins_where_a_large_page_does(nbytes: int, alignment: int) -> None:
    for _ in range(3):
        room = aligned_bytes(nbytes)
        assert room.nbytes == nbytes
        assert room.ctypes.data % alignment == 0
        room[:] = 1  # all of it is there


def test_arrays_that_share_memory_do_not_overlap() -> None:
    dtype = np.dtype(np.int32)
    arrays = aligned_together([((size,), dtype) for size in (1, 0, 1 << 20, 17, 3)])
    for number, array in enumerate(arrays):
        array[:] = number
    assert [set(array.tolist()) for array in arrays] == [{0}, set(), {2}, {3}, {4}]
    assert all(array.ctypes.data % 64 == 0 for array in arrays)
