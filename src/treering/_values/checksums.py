"""Checksums: xxh3, 64 bits for a block and 128 for a document of ours; and CRC-32C, which other formats have.

Source: RFC 3720, appendix B.4, for CRC-32C.
"""

from __future__ import annotations

import functools
import sys
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import xxhash

from treering.errors import CorruptError

if TYPE_CHECKING:
    from numpy.typing import NDArray

LARGEST_BLOCK: Final = 1 << 20
SMALLEST_BLOCK: Final = 64 << 10

# A part of an array costs its covering blocks: with this many blocks an eighth costs at most 1/16 more than itself.
_BLOCKS_A_CHUNK: Final = 256


def block_bytes(nbytes: int) -> int:
    """Return how large the blocks of a chunk of ``nbytes`` are: a power of two from 64 KiB to 1 MiB.

    Example:
        >>> block_bytes(100), block_bytes(100 << 20), block_bytes(1 << 40)
        (65536, 262144, 1048576)
    """
    if (wished := nbytes // _BLOCKS_A_CHUNK) >= LARGEST_BLOCK:
        return LARGEST_BLOCK
    return max(SMALLEST_BLOCK, 1 << wished.bit_length() - 1) if wished else SMALLEST_BLOCK


def block_count(nbytes: int, block: int | None = None) -> int:
    """Return how many blocks cover ``nbytes``, those of a chunk that large by default; the last one may be shorter.

    Example:
        >>> block_count(0, 65536), block_count(65537, 65536)
        (0, 2)
    """
    return -(-nbytes // (block or block_bytes(nbytes)))


def block_checksums(data: memoryview, block: int | None = None) -> array[int]:
    """Return the checksum of each block of flat bytes, by default of the blocks of a chunk that large.

    Example:
        >>> [hex(value) for value in block_checksums(memoryview(b"treering"), 65536)]
        ['0x9560bb1d811817bc']
    """
    checksum = xxhash.xxh3_64_intdigest
    block = block or block_bytes(len(data))
    if len(data) <= block:
        return array("Q", (checksum(data),) if len(data) else ())
    return array("Q", [checksum(data[start : start + block]) for start in range(0, len(data), block)])


def pack_checksums(checksums: array[int]) -> bytes:
    """Return checksums as they lie in files: 8 bytes each, little endian."""
    if sys.byteorder == "big":
        checksums = array("Q", checksums)
        checksums.byteswap()
    return checksums.tobytes()


def unpack_checksums(data: bytes) -> array[int]:
    """Return the checksums that `pack_checksums` made bytes of.

    Example:
        >>> unpack_checksums(pack_checksums(array("Q", [1, 2**63])))
        array('Q', [1, 9223372036854775808])
    """
    checksums = array("Q", data)
    if sys.byteorder == "big":
        checksums.byteswap()
    return checksums


def digest(parts: Iterable[bytes | memoryview]) -> str:
    """Return the digest of the concatenation of ``parts``.

    Example:
        >>> digest([b"tree", b"ring"]) == digest([b"treering"])
        True
    """
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return f"xxh3-128:{state.hexdigest()}"


def require_crc(found: int, wanted: int, what: str) -> None:
    """Require bytes to have the CRC-32 that they were written with.

    Raises:
        CorruptError: they have another one.
    """
    if found != wanted:
        raise CorruptError(f"{what} has another checksum than it was written with", hint="use another copy of the file")


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
