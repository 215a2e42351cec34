"""CRC-32C, the checksum of OCDBT's nodes and of zarr 3's codec of that name.

Source: RFC 3720, appendix B.4.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from numpy.typing import NDArray

_POLYNOMIAL: Final = 0x82F63B78
_ONES: Final = 0xFFFFFFFF
# Below it a loop in Python is as fast. A lane has the checksum of this many bytes.
_LANES_FROM: Final = 16 << 10
_LANE: Final = 256
_PIECE: Final = 4 << 20


def crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C of data.

    Example:
        >>> hex(crc32c(b"123456789")), crc32c(bytes(20_000)) == crc32c(memoryview(bytes(20_000)))
        ('0xe3069283', True)
    """
    view = memoryview(data).cast("B")
    state, at = _ONES, 0
    while len(view) - at >= _LANES_FROM:
        count = min(len(view) - at, _PIECE) // _LANE
        state = _join_lanes(state, view[at : at + count * _LANE], count)
        at += count * _LANE
    table = _table()
    for byte in view[at:]:
        state = table[state & 255 ^ byte] ^ state >> 8
    return state ^ _ONES


@functools.cache
def _table() -> tuple[int, ...]:
    def shift(state: int) -> int:
        for _ in range(8):
            state = state >> 1 ^ (_POLYNOMIAL if state & 1 else 0)
        return state

    return tuple(map(shift, range(256)))


def _join_lanes(state: int, view: memoryview, count: int) -> int:
    """Take in ``count`` lanes, whose own checksums are found side by side."""
    import numpy as np

    lanes = np.ascontiguousarray(np.frombuffer(view, np.uint8).reshape(count, _LANE).T)
    first, second, third, fourth = _lane_tables()
    for lane in _pass_bytes(np.zeros(count, np.uint32), lanes).tolist():
        moved = first[state & 255] ^ second[state >> 8 & 255] ^ third[state >> 16 & 255] ^ fourth[state >> 24]
        state = moved ^ lane
    return state


@functools.cache
def _lane_tables() -> tuple[list[int], ...]:
    """Return what each byte of a state becomes when a lane of zeros passes."""
    import numpy as np

    states = np.arange(256, dtype=np.uint32) << np.arange(0, 32, 8, dtype=np.uint32)[:, None]
    zeros = np.zeros((_LANE, 1), np.uint8)
    return tuple(_pass_bytes(row, zeros).tolist() for row in states)


def _pass_bytes(states: NDArray[Any], rows: NDArray[Any]) -> NDArray[Any]:
    import numpy as np

    table = np.array(_table(), np.uint32)
    for row in rows:
        states = table[(states ^ row) & np.uint32(255)] ^ states >> np.uint32(8)
    return states
