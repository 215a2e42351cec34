"""gzip, zlib and bz2: one stream a chunk, undone in small pieces.

Source: RFC 1952, RFC 1950; https://sourceware.org/bzip2/.
"""

from __future__ import annotations

import bz2
import zlib
from collections.abc import Iterator
from typing import Final

from treering._codec.chunk_reader import ChunkFile, cut_short, damaged, filled, overlong
from treering.errors import TreeringError

_PIECE: Final = 1 << 20
_FEED: Final = 64 << 10

_WINDOWS: Final = {"gzip": 31, "zlib": 15}
"""zlib's words for a window of 32 KiB, in either wrapper."""


def deflated(data: memoryview, wrapper: str, level: int) -> bytes:
    """Return data as one stream of gzip (without a time stamp) or zlib.

    Example:
        >>> zlib.decompress(deflated(memoryview(b"tree"), "zlib", 1))
        b'tree'
    """
    packer = zlib.compressobj(level, zlib.DEFLATED, _WINDOWS[wrapper])
    return packer.compress(data) + packer.flush()


def inflated(file: ChunkFile, wrapper: str, target: memoryview) -> None:
    """Fill ``target`` with what the one stream of gzip or zlib in a file holds.

    Raises:
        Corrupt: it is damaged, cut short, followed by other bytes, or holds less or more than ``target``.

    Example:
        >>> import io
        >>> data = zlib.compress(b"tree")
        >>> memory = bytearray(4)
        >>> inflated(ChunkFile(io.BytesIO(data).read, len(data)), "zlib", memoryview(memory))
        >>> memory
        bytearray(b'tree')
    """
    filled(target, _inflated(file, _WINDOWS[wrapper]))


def _inflated(file: ChunkFile, window: int) -> Iterator[bytes]:
    reader = zlib.decompressobj(window)
    while not reader.eof:
        waiting = reader.unconsumed_tail or file.take_some(_FEED)
        try:
            piece = reader.decompress(waiting, _PIECE)
        except zlib.error as error:
            raise damaged(error) from None
        if not (waiting or piece or reader.eof):
            raise cut_short()
        yield piece
    if file.left or reader.unused_data:
        raise overlong()


def bzipped(data: memoryview, level: int) -> bytes:
    """Return data as one stream of bz2."""
    return bz2.compress(data, level)


def bunzipped(file: ChunkFile, target: memoryview) -> None:
    """Fill ``target`` with what the one stream of bz2 in a file holds.

    Raises:
        Corrupt: it is damaged, cut short, followed by other bytes, or holds less or more than ``target``.
    """
    filled(target, _bunzipped(file))


def _bunzipped(file: ChunkFile) -> Iterator[bytes]:
    reader = bz2.BZ2Decompressor()
    while not reader.eof:
        waiting = file.take_some(_FEED) if reader.needs_input else b""
        if reader.needs_input and not waiting:
            raise cut_short()
        try:
            yield reader.decompress(waiting, _PIECE)
        except OSError as error:
            if isinstance(error, TreeringError):
                raise
            raise damaged(error) from None
    if file.left or reader.unused_data:
        raise overlong()
