"""gzip around bytes: reproducible, and bounded on the way back.

Source: RFC 1952. The header carries no time stamp, so the same bytes give the same file.
"""

from __future__ import annotations

import gzip
import zlib
from typing import Final

from treering._values.human import pluralize
from treering.errors import CorruptError

_LEVEL: Final = 6
GZIP_MAGIC: Final = b"\x1f\x8b"
_GZIP_WINDOW: Final = 31  # zlib's word for "a window of 32 KiB, in a gzip wrapper"
_PIECE: Final = 1024 * 1024
_FEED: Final = 64 * 1024  # what zlib leaves of this is copied at the end of each member

# What a reader takes without being asked. Joining the pieces needs the result twice for a moment, so that together
# it stays below 64 MiB and 100 times the input.
_FREE_BYTES: Final = 32 * 2**20
_FREE_RATIO: Final = 50


class DamagedGzipError(CorruptError, gzip.BadGzipFile):
    """gzip.decompress raises BadGzipFile for a bad header or checksum."""


class ShortGzipError(CorruptError, EOFError):
    """gzip.decompress raises EOFError for a file that is cut short."""


def compress(data: bytes | memoryview) -> bytes:
    """Return ``data`` as one gzip member of level 6, without a time stamp.

    Data that would shrink to less than a fiftieth (and is large) is packed less tightly, so that ``decompressed``
    never refuses what this wrote.
    """
    packed = pack(data, _LEVEL, _GZIP_WINDOW)
    if memoryview(data).nbytes > default_limit(len(packed)):
        packed = pack(data, _LEVEL, _GZIP_WINDOW, zlib.Z_HUFFMAN_ONLY)
    return packed


def pack(data: bytes | memoryview, level: int, window: int, strategy: int = zlib.Z_DEFAULT_STRATEGY) -> bytes:
    """Return data as one stream of gzip (without a time stamp) or zlib, as zlib's number for the window says.

    Example:
        >>> zlib.decompress(pack(b"tree", 1, 15))
        b'tree'
    """
    packer = zlib.compressobj(level, zlib.DEFLATED, window, zlib.DEF_MEM_LEVEL, strategy)
    return packer.compress(data) + packer.flush()


def default_limit(nbytes: int) -> int:
    """Return how many bytes ``nbytes`` of gzip may become where nobody said more."""
    return _FREE_BYTES + _FREE_RATIO * nbytes


def unzip_first(beginning: bytes) -> bytes:
    """Return the first bytes, at most 16, of what begins with these bytes; b"" where they are damaged or too few.

    Example:
        >>> unzip_first(compress(b"tree")[:20])
        b'tree'
    """
    try:
        return zlib.decompressobj(_GZIP_WINDOW).decompress(beginning, 16)
    except zlib.error:
        return b""


def decompress(data: bytes | memoryview, max_bytes: int | None) -> bytes:
    """Return what ``data``, one or more gzip members, holds.

    Raises:
        CorruptError: no gzip, a wrong checksum or length (also gzip.BadGzipFile), cut short (also EOFError), or more
            than ``max_bytes`` (default: 32 MiB and 50 times the input).
    """
    limit = default_limit(len(data)) if max_bytes is None else max_bytes
    view = memoryview(data).cast("B")
    pieces: list[bytes] = []
    at = total = 0
    reader = zlib.decompressobj(_GZIP_WINDOW)
    while at < len(view):
        waiting: bytes | memoryview = view[at : at + _FEED]
        at += len(waiting)
        while waiting and not reader.eof:
            try:
                piece = reader.decompress(waiting, _PIECE)
            except zlib.error as error:
                raise DamagedGzipError(
                    f"the gzip data is damaged: {error}", hint="use another copy of the file"
                ) from None
            waiting = reader.unconsumed_tail
            total += len(piece)
            if total > limit:
                given, most = pluralize(len(view), "bytes"), pluralize(limit, "bytes")
                problem = f"the gzip data of {given} decompresses to more than {most}"
                raise CorruptError(problem, hint="pass max_bytes= if you trust it")
            pieces.append(piece)
        if reader.eof:
            # Another member may follow, after padding with zeros as tapes have it.
            at -= len(reader.unused_data)
            while at < len(view) and not view[at]:
                at += 1
            if at < len(view):
                reader = zlib.decompressobj(_GZIP_WINDOW)
    if not reader.eof:
        raise ShortGzipError("the gzip data is cut short", offset=len(view), hint="use another copy of the file")
    return b"".join(pieces)
