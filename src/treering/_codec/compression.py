"""gzip and zstd: bytes are packed reproducibly, and unpacking them is bounded and refuses what is damaged.

Members of gzip carry no time stamp, so the same bytes give the same file. A frame of zstd is unpacked straight into the
caller's memory.

Source: RFC 1952; RFC 8878, section 3.1.
"""

from __future__ import annotations

import gzip
import io
import threading
import zlib
from collections.abc import Callable, Iterable
from typing import IO, TYPE_CHECKING, Final, cast

from treering._values.human import pluralize
from treering.errors import CorruptError

if TYPE_CHECKING:
    import zstandard

DAMAGED = "use another copy of the file"


class ChunkReader:
    """The bytes of one chunk file, taken from its beginning.

    Example:
        >>> import io
        >>> file = ChunkReader(io.BytesIO(b"abc").read, 3)
        >>> file.take(2), file.left
        (b'ab', 1)
        >>> file.take(2)
        Traceback (most recent call last):
        ...
        treering.errors.CorruptError: a chunk file is damaged: it is cut short; use another copy of the file
    """

    __slots__ = ("_read", "left")

    left: int
    """Bytes that were not taken yet."""

    def __init__(self, read: Callable[[int], bytes], nbytes: int) -> None:
        self._read = read
        self.left = nbytes

    def take(self, count: int) -> bytes:
        """Return the next ``count`` bytes. Raises ``CorruptError`` where there are fewer."""
        data = self._read(count) if count <= self.left else b""
        if len(data) != count:
            raise damaged_error("it is cut short")
        self.left -= count
        return data

    def take_some(self, most: int) -> bytes:
        """Return the next ``most`` bytes, fewer at the end, none behind it."""
        return self.take(min(most, self.left)) if self.left else b""


def fill(target: memoryview, pieces: Iterable[bytes]) -> None:
    """Copy pieces into memory, which they must fill exactly. Raises ``CorruptError`` where they do not.

    Example:
        >>> memory = bytearray(3)
        >>> fill(memoryview(memory), [b"ab", b"", b"c"])
        >>> memory
        bytearray(b'abc')
    """
    at = 0
    for piece in pieces:
        if len(piece) > len(target) - at:
            raise wrong_size_error("more", target)
        target[at : at + len(piece)] = piece
        at += len(piece)
    if at < len(target):
        raise wrong_size_error(str(at), target)


def damaged_error(reason: object) -> CorruptError:
    """Return the error for a file that its codec cannot undo."""
    return CorruptError(f"a chunk file is damaged: {reason}", hint=DAMAGED)


def wrong_size_error(found: str, target: memoryview) -> CorruptError:
    """Return the error for compressed data that holds something else than one chunk."""
    return CorruptError(f"a chunk file decompresses to {found} bytes, a chunk has {len(target)}", hint=DAMAGED)


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


def gzip_compress(data: bytes | memoryview) -> bytes:
    """Return ``data`` as one gzip member of level 6, without a time stamp.

    Data that would shrink to less than a fiftieth (and is large) is packed less tightly, so that ``gzip_decompress``
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
        >>> unzip_first(gzip_compress(b"tree")[:20])
        b'tree'
    """
    try:
        return zlib.decompressobj(_GZIP_WINDOW).decompress(beginning, 16)
    except zlib.error:
        return b""


def gzip_decompress(data: bytes | memoryview, max_bytes: int | None) -> bytes:
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
                raise DamagedGzipError(f"the gzip data is damaged: {error}", hint=DAMAGED) from None
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
        raise ShortGzipError("the gzip data is cut short", offset=len(view), hint=DAMAGED)
    return b"".join(pieces)


_IN_ONE_GO: Final = 1 << 20
# Of a frame that is in memory zstd writes straight into the target; a longer one comes by windows.
_WHOLE: Final = 16 << 20
_WINDOW: Final = 1 << 20
_LARGEST_BLOCK: Final = 128 << 10
_BLOCK_HEADER: Final = 3
_REPEATED_BYTE: Final = 1
_NO_KIND: Final = 3

_own = threading.local()  # compressors and decompressors serve one thread at a time


def zstd_compress(data: memoryview, level: int) -> bytes:
    """Return data as one frame with its size and a checksum of its content, which every reader of zstd checks.

    Example:
        >>> len(zstd_compress(memoryview(bytes(100_000)), 1)) < 100
        True
    """
    compressors: dict[int, zstandard.ZstdCompressor] = _own.__dict__.setdefault("compressors", {})
    if level not in compressors:
        import zstandard

        compressors[level] = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)
    return compressors[level].compress(data)


def zstd_decompress(file: ChunkReader, target: memoryview) -> None:
    """Fill ``target`` with what the one frame in a file holds.

    Raises:
        CorruptError: it is damaged, cut short, followed by other bytes, or holds less or more than ``target``.

    Example:
        >>> import io
        >>> data = zstd_compress(memoryview(b"tree"), 1)
        >>> memory = bytearray(4)
        >>> zstd_decompress(ChunkReader(io.BytesIO(data).read, len(data)), memoryview(memory))
        >>> memory
        bytearray(b'tree')
    """
    import zstandard

    try:
        if len(target) <= _IN_ONE_GO and file.left <= 2 * _IN_ONE_GO:
            _at_once(file, target)
        else:
            _in_place(file, target)
    except zstandard.ZstdError as error:
        raise damaged_error(error) from None


def zstd_decompress_unsized(data: bytes, most: int) -> bytes:
    """Return what the one frame in ``data`` holds, whatever its size.

    Raises:
        CorruptError: it is damaged, cut short, followed by other bytes, or holds more than ``most`` bytes.

    Example:
        >>> zstd_decompress_unsized(zstd_compress(memoryview(b"tree"), 1), 4)
        b'tree'
    """
    import zstandard

    pieces: list[bytes] = []
    left = most
    try:
        frame = _ZstdFrame(ChunkReader(io.BytesIO(data).read, len(data)), len(data))
        reader = _decompressor().stream_reader(frame.read(len(data)))
        while piece := reader.read(_WINDOW):
            pieces.append(piece)
            if (left := left - len(piece)) < 0:
                raise damaged_error(f"it decompresses to more than {pluralize(most, 'bytes')}")
    except zstandard.ZstdError as error:
        raise damaged_error(error) from None
    if frame.size not in (most - left, None):
        raise damaged_error("it holds another number of bytes than it says")
    return b"".join(pieces)


def _at_once(file: ChunkReader, target: memoryview) -> None:
    import zstandard

    data = file.take(file.left)
    size = zstandard.frame_content_size(data)
    if size not in (len(target), -1):  # -1: the frame does not say
        raise wrong_size_error(str(size), target)
    items = _decompressor().decompress(data, max_output_size=len(target), allow_extra_data=False)
    if len(items) != len(target):
        raise wrong_size_error(str(len(items)), target)
    target[:] = items


def _in_place(file: ChunkReader, target: memoryview) -> None:
    is_short = file.left <= _WHOLE
    frame = _ZstdFrame(file, file.left if is_short else _WINDOW)
    if frame.size not in (len(target), None):
        raise wrong_size_error(str(frame.size), target)
    source = frame.read(_WHOLE) if is_short else cast("IO[bytes]", frame)
    reader = _decompressor().stream_reader(source, read_size=_WINDOW)
    at = 0
    while at < len(target):
        if not (count := reader.readinto(target[at:])):
            raise wrong_size_error(str(at), target)
        at += count
    if reader.read(1):
        raise wrong_size_error("more", target)
    if not frame.is_given:
        raise damaged_error("extra bytes follow its compressed data")


def _decompressor() -> zstandard.ZstdDecompressor:
    found: zstandard.ZstdDecompressor | None = _own.__dict__.get("decompressor")
    if found is None:
        import zstandard

        found = _own.decompressor = zstandard.ZstdDecompressor()
    return found


class _ZstdFrame:
    """The frame in a file, given out as it is read.

    The headers of the blocks say where the frame ends: zstandard's reader says neither that a frame is cut short nor
    that bytes follow it.
    """

    def __init__(self, file: ChunkReader, window: int) -> None:
        import zstandard

        self._file = file
        self._waiting = file.take_some(window)
        parameters = zstandard.get_frame_parameters(self._waiting)
        known = parameters.content_size != zstandard.CONTENTSIZE_UNKNOWN
        self.size = parameters.content_size if known else None
        self._checksum = 4 if parameters.has_checksum else 0
        self._is_last = False
        self._part = b""  # of a header that goes on in the next window
        self._left = zstandard.frame_header_size(self._waiting)  # to the next header, or to the end
        self._follow(self._waiting)

    @property
    def is_given(self) -> bool:
        """Whether all of the frame was given out."""
        return self._is_last and not (self._waiting or self._left)

    def read(self, size: int) -> bytes:
        """Return the next bytes of the frame, none behind its end: what zstandard asks a file for."""
        if self._waiting:
            taken, self._waiting = self._waiting, b""
        else:
            taken = self._file.take_some(size)
            self._follow(taken)
        return taken

    def _follow(self, data: bytes) -> None:
        """Go from header to header through the bytes that come next; the frame must end where the file does."""
        data = self._part + data
        at = self._left
        while not self._is_last and at + _BLOCK_HEADER <= len(data):
            header = int.from_bytes(data[at : at + _BLOCK_HEADER], "little")
            kind, size = header >> 1 & 3, header >> 3
            if kind == _NO_KIND or size > _LARGEST_BLOCK:
                raise damaged_error("a block of zstd data is of an unknown kind, or too large")
            self._is_last = bool(header & 1)
            at += _BLOCK_HEADER + (1 if kind == _REPEATED_BYTE else size) + self._checksum * self._is_last
        self._part = data[at:]
        self._left = max(0, at - len(data))
        if self._is_last and self._left < self._file.left + len(self._part):
            raise damaged_error("extra bytes follow its compressed data")
        if not self._file.left and (self._left or not self._is_last):
            raise damaged_error("it is cut short")
