"""zstd: one frame a chunk, undone straight into the caller's memory.

Source: RFC 8878, section 3.1.
"""

from __future__ import annotations

import io
import threading
from typing import IO, TYPE_CHECKING, Final, cast

from treering._codec.chunk_reader import ChunkReader, damaged_error, overlong_error, wrong_size_error
from treering._values.human import pluralize

if TYPE_CHECKING:
    import zstandard

_IN_ONE_GO: Final = 1 << 20
_PIECE: Final = 1 << 20
_FEED: Final = 64 << 10
_LARGEST_BLOCK: Final = 128 << 10
_SHORTEST_START: Final = 5  # what says how long the frame's header is
_BLOCK_HEADER: Final = 3
_REPEATED_BYTE: Final = 1
_NO_KIND: Final = 3

_own = threading.local()  # compressors and decompressors serve one thread at a time


def compress(data: memoryview, level: int) -> bytes:
    """Return data as one frame with its size and a checksum of its content, which every reader of zstd checks.

    Example:
        >>> len(compress(memoryview(bytes(100_000)), 1)) < 100
        True
    """
    compressors: dict[int, zstandard.ZstdCompressor] = _own.__dict__.setdefault("compressors", {})
    if level not in compressors:
        import zstandard

        compressors[level] = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)
    return compressors[level].compress(data)


def decompress(file: ChunkReader, target: memoryview) -> None:
    """Fill ``target`` with what the one frame in a file holds.

    Raises:
        Corrupt: it is damaged, cut short, followed by other bytes, or holds less or more than ``target``.

    Example:
        >>> import io
        >>> data = compress(memoryview(b"tree"), 1)
        >>> memory = bytearray(4)
        >>> decompress(ChunkReader(io.BytesIO(data).read, len(data)), memoryview(memory))
        >>> memory
        bytearray(b'tree')
    """
    import zstandard

    try:
        if len(target) <= _IN_ONE_GO and file.left <= 2 * _IN_ONE_GO:
            _at_once(file, target)
        else:
            _by_blocks(_ZstdFrame(file), target)
    except zstandard.ZstdError as error:
        raise damaged_error(error) from None


def decompress_unsized(data: bytes, most: int) -> bytes:
    """Return what the one frame in ``data`` holds, whatever its size.

    Raises:
        Corrupt: it is damaged, cut short, followed by other bytes, or holds more than ``most`` bytes.

    Example:
        >>> decompress_unsized(compress(memoryview(b"tree"), 1), 4)
        b'tree'
    """
    import zstandard

    pieces: list[bytes] = []
    left = most
    try:
        frame = _ZstdFrame(ChunkReader(io.BytesIO(data).read, len(data)))
        reader = zstandard.ZstdDecompressor().stream_reader(cast("IO[bytes]", frame), read_size=_FEED)
        while piece := reader.read(_PIECE):
            pieces.append(piece)
            if (left := left - len(piece)) < 0:
                raise damaged_error(f"it decompresses to more than {pluralize(most, 'bytes')}")
    except zstandard.ZstdError as error:
        raise damaged_error(error) from None
    if not frame.is_given or frame.size not in (most - left, None):
        raise damaged_error("it holds another number of bytes than it says")
    return b"".join(pieces)


def _at_once(file: ChunkReader, target: memoryview) -> None:
    import zstandard

    data = file.take(file.left)
    size = zstandard.frame_content_size(data)
    if size not in (len(target), -1):  # -1: the frame does not say
        raise wrong_size_error(str(size), target)
    decompressor: zstandard.ZstdDecompressor | None = _own.__dict__.get("decompressor")
    if decompressor is None:
        decompressor = _own.decompressor = zstandard.ZstdDecompressor()
    items = decompressor.decompress(data, max_output_size=len(target), allow_extra_data=False)
    if len(items) != len(target):
        raise wrong_size_error(str(len(items)), target)
    target[:] = items


def _by_blocks(frame: _ZstdFrame, target: memoryview) -> None:
    import zstandard

    if frame.size not in (len(target), None):
        raise wrong_size_error(str(frame.size), target)
    reader = zstandard.ZstdDecompressor().stream_reader(cast("IO[bytes]", frame), read_size=_FEED)
    at = 0
    while at < len(target):
        if not (count := reader.readinto(target[at : at + _PIECE])):
            raise wrong_size_error(str(at), target)
        at += count
    if reader.read(1):
        raise wrong_size_error("more", target)
    if not frame.is_given:
        raise overlong_error()


class _ZstdFrame:
    """The frame in a file, given out block by block.

    The headers of the blocks say where the frame ends: zstandard's reader says neither that a frame is cut short nor
    that bytes follow it.
    """

    def __init__(self, file: ChunkReader) -> None:
        import zstandard

        self._file = file
        start = file.take(_SHORTEST_START)
        head = start + file.take(zstandard.frame_header_size(start) - len(start))
        parameters = zstandard.get_frame_parameters(head)
        known = parameters.content_size != zstandard.CONTENTSIZE_UNKNOWN
        self.size = parameters.content_size if known else None
        self._checksum = 4 if parameters.has_checksum else 0
        self._waiting = head + file.take(_BLOCK_HEADER)
        self._next = self._next_size(self._waiting)

    @property
    def is_given(self) -> bool:
        """Whether all of the frame was given out."""
        return not (self._waiting or self._next)

    def read(self, size: int) -> bytes:
        """Return the next bytes of the frame, none behind its end: what zstandard asks a file for."""
        if not self._waiting and self._next:
            taken, self._next = self._file.take(self._next), 0
            if not self._last:
                self._next = self._next_size(taken)
            elif self._file.left:
                raise overlong_error()
            self._waiting = taken
        is_given, self._waiting = self._waiting[:size], self._waiting[size:]
        return is_given

    def _next_size(self, taken: bytes) -> int:
        """Return how many bytes the block takes whose header was taken last, with the header or checksum behind it."""
        header = int.from_bytes(taken[-_BLOCK_HEADER:], "little")
        self._last = bool(header & 1)
        kind, size = header >> 1 & 3, header >> 3
        if kind == _NO_KIND or size > _LARGEST_BLOCK:
            raise damaged_error("a block of zstd data is of an unknown kind, or too large")
        behind = self._checksum if self._last else _BLOCK_HEADER
        return (1 if kind == _REPEATED_BYTE else size) + behind
