"""Checksums of blocks and digests of documents: xxh3, 64 bits for a block, 128 for a document.

They find damage, not forgery: whoever can change a file can change its checksum too.

Source: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Final

import xxhash

from treering.errors import CorruptError

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
