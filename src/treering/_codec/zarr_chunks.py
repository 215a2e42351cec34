"""The chunk files of zarr v2 arrays: items <-> bytes, through any compressor that TensorStore knows.

zstd, gzip, zlib and bz2 are undone piece by piece straight into the caller's memory, so that no file makes this take
more than it should hold. Blosc, whose pieces cannot be had one by one, goes through TensorStore, in memory.

Source: https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html, "Chunks"; RFC 8878, section 3.1, for zstd's frames;
https://github.com/Blosc/c-blosc/blob/main/README_CHUNK_FORMAT.rst for the header of blosc.
"""

from __future__ import annotations

import bz2
import functools
import json
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any, Final, cast

import numpy as np

from treering._codec.documents import shown
from treering._codec.zarr import ZarrArray, check_compressor, chunk_bytes
from treering.errors import Corrupt, TreeringError, Unsupported

if TYPE_CHECKING:
    import zstandard
    from numpy.typing import NDArray

__all__ = ["check_chunk_file", "decode", "encode", "known_compressor"]

_Read = Callable[[int], bytes]

_PIECE: Final = 1 << 20
_FEED: Final = 64 << 10
_IN_ONE_GO: Final = 1 << 20
_GZIP_WINDOW: Final = 31  # zlib's word for "a window of 32 KiB, in a gzip wrapper"
_ZLIB_WINDOW: Final = 15
_LARGEST_ZSTD_BLOCK: Final = 128 << 10
_BLOSC_HEADER: Final = 16
_DAMAGED: Final = "use another copy of the file"

# The level that TensorStore takes where none is said, the least, and the greatest.
_LEVELS: Final = {"zstd": (1, -131072, 22), "gzip": (1, 0, 9), "zlib": (1, 0, 9), "bz2": (1, 1, 9)}

# No file holds more than so many times its bytes: a zstd block of 4 bytes repeats one over 128 KiB, deflate writes 258
# bytes with two bits, and bz2 fits 45,899,235 equal bytes in 45.
_RATIOS: Final = {"zstd": 1 << 15, "gzip": 1032, "zlib": 1032, "bz2": 1 << 20, "blosc": 1 << 15}

_own = threading.local()  # compressors and decompressors serve one thread at a time


def known_compressor(config: Mapping[str, Any]) -> str:
    """Return the configuration of a compressor as ``.zarray`` holds it, with what it left open filled in.

    Raises:
        Unsupported: TensorStore, and so whoever reads the array with it, does not know this codec or this setting.

    Example:
        >>> known_compressor({"id": "zstd"})
        '{"id":"zstd","level":1}'
        >>> known_compressor({"id": "lz4"})
        Traceback (most recent call last):
        ...
        treering.errors.Unsupported: the compressor {"id":"lz4"} is none that TensorStore knows: "lz4" is not registered
    """
    return _known(check_compressor(config))


@functools.lru_cache(maxsize=64)
def _known(text: str) -> str:
    config = json.loads(text)
    if config["id"] not in _LEVELS:
        return _asked(text)
    usual, least, greatest = _LEVELS[config["id"]]
    level = config.get("level", usual)
    if not config.keys() <= {"id", "level"} or type(level) is not int or not least <= level <= greatest:
        raise Unsupported(
            f"the compressor {shown(text)} is none that TensorStore knows",
            hint=f"{config['id']} takes a 'level' from {least} to {greatest}, and nothing else",
        )
    return check_compressor({"id": config["id"], "level": level})


def _asked(text: str) -> str:
    """Return what TensorStore makes of a compressor's configuration."""
    try:
        store = _in_memory(_document(text, "|u1", 1))
    except ValueError as error:
        reason = str(error).split(" [", 1)[0].rsplit("member ", 1)[-1].split(": ", 1)[-1]
        raise Unsupported(f"the compressor {text[:200]} is none that TensorStore knows: {reason}") from None
    return check_compressor(json.loads(store.kvstore[".zarray"])["compressor"])


# -------------------------------------------------------------------------------------------------------------- writing


def encode(array: ZarrArray, chunk: NDArray[Any]) -> bytes:
    """Return the bytes of a chunk file.

    A zstd frame carries a checksum of its content, which every reader of zstd checks.

    Args:
        array: what the file is a chunk of.
        chunk: a full chunk, C-contiguous, of items in the machine's byte order and of the size of ``array.dtype``.

    Raises:
        Unsupported: the compressor is none that TensorStore knows, or takes no chunk of this size.

    Example:
        >>> array = ZarrArray(shape=(4,), chunks=(4,), dtype="uint8", compressor='{"id":"zlib","level":1}')
        >>> zlib.decompress(encode(array, np.array([1, 2, 3, 4], np.uint8)).hex()
        '01020304'
    """
    _check_memory(array, chunk)
    if array.order == "F":
        chunk = np.ascontiguousarray(chunk.T)
    wire = chunk.reshape(-1)
    if _swapped(array):
        wire = wire.copy()
        _swap(array, wire)
    if array.dtype == "bool":
        wire = wire.view(np.uint8) != 0  # True is 1 to every reader of zarr; memory that numpy calls True may be more
    data = wire.view(np.uint8).data
    if array.compressor is None:
        return data.tobytes()
    config = json.loads(_known(array.compressor))
    match config["id"]:
        case "zstd":
            return _zstd_compressor(config["level"]).compress(data)
        case "gzip":
            packer = zlib.compressobj(config["level"], zlib.DEFLATED, _GZIP_WINDOW)
            return packer.compress(data) + packer.flush()
        case "zlib":
            return zlib.compress(data, config["level"])
        case "bz2":
            return bz2.compress(data, config["level"])
        case _:
            return _through_tensorstore(array.compressor, wire)


def _zstd_compressor(level: int) -> zstandard.ZstdCompressor:
    compressors: dict[int, zstandard.ZstdCompressor] = _own.__dict__.setdefault("compressors", {})
    if level not in compressors:
        import zstandard

        compressors[level] = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)
    return compressors[level]


def _through_tensorstore(compressor: str, wire: NDArray[Any]) -> bytes:
    items = wire.view(_TYPES[wire.itemsize])
    store = _in_memory(_document(compressor, _ZARR_TYPES[wire.itemsize], len(items)))
    try:
        store.write(items).result()
    except ValueError as error:
        reason = str(error).split(" [", 1)[0]
        raise Unsupported(
            f"the compressor {compressor[:200]} takes no chunk of {wire.nbytes} bytes: {reason}",
            hint="make the chunks smaller",
        ) from None
    data: bytes = store.kvstore["0"]
    return data


# -------------------------------------------------------------------------------------------------------------- reading


def check_chunk_file(array: ZarrArray, nbytes: int) -> None:
    """Require that a chunk file of ``nbytes`` can hold a chunk; asked before memory for the chunk is.

    Raises:
        Corrupt: a raw chunk has another size; no compressor shrinks a chunk to so little.
        Unsupported: the compressor is none that can be undone here.

    Example:
        >>> check_chunk_file(ZarrArray(shape=(4,), chunks=(4,), dtype="uint8"), 3)
        Traceback (most recent call last):
        ...
        treering.errors.Corrupt: a chunk has 4 bytes, the file has 3; use another copy of the file
    """
    wanted = chunk_bytes(array)
    if array.compressor is None:
        if nbytes != wanted:
            raise Corrupt(f"a chunk has {wanted} bytes, the file has {nbytes}", hint=_DAMAGED)
        return
    codec = _codec(array.compressor)
    if codec not in _RATIOS:
        raise Unsupported(f"the chunks are compressed with {shown(codec)}, which cannot be undone here")
    if nbytes * _RATIOS[codec] < wanted:
        raise Corrupt(f"a chunk has {wanted} bytes, which no {codec} of {nbytes} bytes holds", hint=_DAMAGED)


@functools.lru_cache(maxsize=64)
def _codec(compressor: str) -> str:
    return str(json.loads(compressor)["id"])


def decode(array: ZarrArray, read: _Read, nbytes: int, into: NDArray[Any]) -> None:
    """Read a chunk file into an array.

    Args:
        array: what the file is a chunk of.
        read: ``read(n)`` gives the next ``n`` bytes of the file; each byte is read once, and all of them are.
        nbytes: bytes of the file.
        into: a C-contiguous array of a full chunk's shape, of items in the machine's byte order and of the size of
            ``array.dtype``. Where this raises, it holds anything.

    Raises:
        Corrupt: the file is damaged, cut short, or holds less or more than a chunk.
        Unsupported: the compressor is none that can be undone here.

    Example:
        >>> import io
        >>> array = ZarrArray(shape=(3,), chunks=(2,), dtype="int16", compressor='{"id":"zstd","level":1}')
        >>> data = encode(array, np.array([7, 8], np.int16))
        >>> found = np.empty(2, np.int16)
        >>> decode(array, io.BytesIO(data).read, len(data), found)
        >>> found.tolist()
        [7, 8]
    """
    _check_memory(array, into)
    check_chunk_file(array, nbytes)
    flat = into.reshape(-1).view(np.uint8)
    target = flat if array.order == "C" else np.empty_like(flat)
    _decode_bytes(array.compressor, read, nbytes, target.data)
    if array.order == "F":
        into[...] = target.view(into.dtype).reshape(into.shape[::-1]).T
    if _swapped(array):
        _swap(array, into.reshape(-1))
    if array.dtype == "bool" and flat.max() > 1:
        raise Corrupt("a chunk of bools holds bytes that are neither 0 nor 1", hint=_DAMAGED)


def _decode_bytes(compressor: str | None, read: _Read, nbytes: int, target: memoryview) -> None:
    codec = None if compressor is None else _codec(compressor)
    match codec:
        case None:
            for at in range(0, nbytes, _PIECE):
                target[at : at + _PIECE] = _exactly(read, min(_PIECE, nbytes - at))
        case "zstd":
            if len(target) <= _IN_ONE_GO and nbytes <= 2 * _IN_ONE_GO:
                _undo_zstd_at_once(read, nbytes, target)
            else:
                _undo_zstd(_Frame(read, nbytes), target)
        case "gzip":
            _fill(target, _inflated(_GZIP_WINDOW, read, nbytes))
        case "zlib":
            _fill(target, _inflated(_ZLIB_WINDOW, read, nbytes))
        case "bz2":
            _fill(target, _undone_bz2(read, nbytes))
        case _:
            _undo_blosc(read, nbytes, target)


def _exactly(read: _Read, count: int) -> bytes:
    data = read(count)
    if len(data) != count:
        raise _cut_short("file")
    return data


def _cut_short(what: str) -> Corrupt:
    return Corrupt(f"the {what} is cut short", hint=_DAMAGED)


def _overlong(what: str) -> Corrupt:
    return Corrupt(f"the {what} goes on behind its end", hint=_DAMAGED)


def _wrong_size(codec: str, found: str, wanted: int) -> Corrupt:
    return Corrupt(f"the {codec} data holds {found} bytes, a chunk has {wanted}", hint=_DAMAGED)


def _fill(target: memoryview, pieces: Iterator[bytes]) -> None:
    """Copy pieces into memory; they must fill it exactly."""
    at = 0
    for piece in pieces:
        if len(piece) > len(target) - at:
            raise _wrong_size("compressed", "more", len(target))
        target[at : at + len(piece)] = piece
        at += len(piece)
    if at < len(target):
        raise _wrong_size("compressed", str(at), len(target))


def _inflated(window: int, read: _Read, nbytes: int) -> Iterator[bytes]:
    """Yield what one gzip or zlib stream holds, in small pieces."""
    reader = zlib.decompressobj(window)
    left = nbytes
    try:
        while not reader.eof:
            waiting: bytes = reader.unconsumed_tail
            if not waiting and left:
                waiting = _exactly(read, min(left, _FEED))
                left -= len(waiting)
            piece = reader.decompress(waiting, _PIECE)
            if not (piece or waiting or reader.eof):
                raise _cut_short("deflate data")
            yield piece
    except zlib.error as error:
        raise Corrupt(f"the deflate data is damaged: {error}", hint=_DAMAGED) from None
    if left or reader.unused_data:
        raise _overlong("deflate data")


def _undone_bz2(read: _Read, nbytes: int) -> Iterator[bytes]:
    """Yield what one bz2 stream holds, in small pieces."""
    reader = bz2.BZ2Decompressor()
    left = nbytes
    try:
        while not reader.eof:
            waiting = b""
            if reader.needs_input:
                if not left:
                    raise _cut_short("bz2 data")
                waiting = _exactly(read, min(left, _FEED))
                left -= len(waiting)
            yield reader.decompress(waiting, _PIECE)
    except OSError as error:
        if isinstance(error, TreeringError):
            raise
        raise Corrupt(f"the bz2 data is damaged: {error}", hint=_DAMAGED) from None
    if left or reader.unused_data:
        raise _overlong("bz2 data")


def _zstd_decompressor() -> zstandard.ZstdDecompressor:
    found: zstandard.ZstdDecompressor | None = _own.__dict__.get("decompressor")
    if found is None:
        import zstandard

        found = _own.decompressor = zstandard.ZstdDecompressor()
    return found


def _undo_zstd_at_once(read: _Read, nbytes: int, target: memoryview) -> None:
    import zstandard

    data = _exactly(read, nbytes)
    try:
        size = zstandard.frame_content_size(data)
        if size not in (len(target), -1):
            raise _wrong_size("zstd", str(size), len(target))
        items = _zstd_decompressor().decompress(data, max_output_size=len(target), allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Corrupt(f"the zstd data is damaged: {error}", hint=_DAMAGED) from None
    if len(items) != len(target):
        raise _wrong_size("zstd", str(len(items)), len(target))
    target[:] = items


class _Frame:
    """The bytes of a file that is one zstd frame, given out block by block.

    The blocks' own headers say where the frame ends: zstandard's reader says neither that a frame is cut short nor
    that bytes follow it.
    """

    def __init__(self, read: _Read, nbytes: int) -> None:
        import zstandard

        self._read = read
        self._left = nbytes
        start = self._take(5)
        try:
            rest = zstandard.frame_header_size(start) - len(start)
            head = start + self._take(rest)
            parameters = zstandard.get_frame_parameters(head)
        except zstandard.ZstdError as error:
            raise Corrupt(f"the zstd data is damaged: {error}", hint=_DAMAGED) from None
        self.size: int | None = None
        if parameters.content_size != zstandard.CONTENTSIZE_UNKNOWN:
            self.size = parameters.content_size
        self._checksum = 4 if parameters.has_checksum else 0
        self._waiting = head + self._take(3)
        self._next = self._following(self._waiting)

    @property
    def given(self) -> bool:
        """Whether all of the frame was given out."""
        return not (self._waiting or self._next)

    def read(self, size: int) -> bytes:
        """Return the next bytes of the frame, b"" behind its end: what zstandard asks a file for."""
        if not self._waiting and self._next:
            taken, self._next = self._take(self._next), 0
            if not self._last:
                self._next = self._following(taken)
            elif self._left:
                raise _overlong("zstd data")
            self._waiting = taken
        given, self._waiting = self._waiting[:size], self._waiting[size:]
        return given

    def _following(self, taken: bytes) -> int:
        """Return how many bytes belong to the block whose header was taken last, with the header behind it."""
        header = int.from_bytes(taken[-3:], "little")
        self._last = bool(header & 1)
        kind, size = header >> 1 & 3, header >> 3
        if kind == 3 or size > _LARGEST_ZSTD_BLOCK:
            raise Corrupt("the zstd data is damaged: a block is of no known kind, or too large", hint=_DAMAGED)
        # A block of the second kind is one byte, to be repeated.
        return (1 if kind == 1 else size) + (self._checksum if self._last else 3)

    def _take(self, count: int) -> bytes:
        if count > self._left:
            raise _cut_short("zstd data")
        self._left -= count
        return _exactly(self._read, count)


def _undo_zstd(frame: _Frame, target: memoryview) -> None:
    import zstandard

    if frame.size not in (None, len(target)):
        raise _wrong_size("zstd", str(frame.size), len(target))
    # A reader of its own: an error inside one leaves the decompressor in the middle of a frame.
    reader = zstandard.ZstdDecompressor().stream_reader(cast("IO[bytes]", frame), read_size=_FEED)
    try:
        at = 0
        while at < len(target):
            count = reader.readinto(target[at : at + _PIECE])
            if not count:
                raise _wrong_size("zstd", str(at), len(target))
            at += count
        if reader.read(1):
            raise _wrong_size("zstd", "more", len(target))
    except zstandard.ZstdError as error:
        raise Corrupt(f"the zstd data is damaged: {error}", hint=_DAMAGED) from None
    if not frame.given:
        raise _overlong("zstd data")


def _undo_blosc(read: _Read, nbytes: int, target: memoryview) -> None:
    if not _BLOSC_HEADER < nbytes <= len(target) + _BLOSC_HEADER:
        raise Corrupt(f"no chunk of {len(target)} bytes is blosc data of {nbytes}", hint=_DAMAGED)
    data = _exactly(read, nbytes)
    if int.from_bytes(data[12:16], "little") != nbytes:
        raise Corrupt("the blosc data is cut short, or goes on behind its end", hint=_DAMAGED)
    held = int.from_bytes(data[4:8], "little")
    if held != len(target):
        raise _wrong_size("blosc", str(held), len(target))
    store = _in_memory(_document('{"id":"blosc"}', "|u1", held))
    store.kvstore["0"] = data
    try:
        target[:] = store.read().result().data
    except ValueError as error:
        reason = str(error).split(" [", 1)[0]
        raise Corrupt(f"the blosc data is damaged: {reason}", hint=_DAMAGED) from None


# ---------------------------------------------------------------------------------------------------------------- parts


# Items as TensorStore gets them: of the right size, which is all that a shuffle looks at, and never touched as numbers.
_TYPES: Final = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
_ZARR_TYPES: Final = {1: "|u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}


def _document(compressor: str, dtype: str, items: int) -> dict[str, Any]:
    return {
        "zarr_format": 2,
        "shape": [items],
        "chunks": [items],
        "dtype": dtype,
        "compressor": json.loads(compressor),
        "fill_value": None,
        "filters": None,
        "order": "C",
    }


def _in_memory(document: dict[str, Any]) -> Any:
    """Return a TensorStore of one chunk that is in no file."""
    import tensorstore

    spec = {"driver": "zarr", "kvstore": "memory://", "metadata": document}
    return tensorstore.open(spec, create=True, open=True, context=tensorstore.Context()).result()


def _check_memory(array: ZarrArray, chunk: NDArray[Any]) -> None:
    if chunk.shape != array.chunks or chunk.nbytes != chunk_bytes(array) or not chunk.flags.c_contiguous:
        raise ValueError(f"{chunk.dtype} {chunk.shape} is no full chunk of {array.dtype} {array.chunks}")


def _swapped(array: ZarrArray) -> bool:
    return array.big_endian != (sys.byteorder == "big")


def _swap(array: ZarrArray, flat: NDArray[Any]) -> None:
    """Turn the bytes of each number round, where it stands."""
    size = flat.itemsize // 2 if array.dtype.startswith("complex") else flat.itemsize
    if size > 1:
        flat.view(f"u{size}").byteswap(inplace=True)
