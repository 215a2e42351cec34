"""The chunk files of zarr v2 arrays: items <-> bytes, through any compressor that TensorStore knows.

Source: https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html, "Chunks".
"""

from __future__ import annotations

import bz2
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from treering._codec import zstd
from treering._codec.chunk_reader import DAMAGED, ChunkReader, cut_short_error, damaged_error, fill, overlong_error
from treering._codec.compressors import check_chunk_file, codec_of, complete, level_of
from treering._codec.gzip import pack
from treering._codec.in_tensorstore import decode_blosc, encode_by_tensorstore
from treering._codec.zarr import ZarrArray, chunk_bytes
from treering.errors import Corrupt

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PIECE: Final = 1 << 20
_FEED: Final = 64 << 10
_WINDOWS: Final = {"gzip": 31, "zlib": 15}
"""zlib's words for a window of 32 KiB, in either wrapper."""


def encode(array: ZarrArray, chunk: NDArray[Any]) -> bytes:
    """Return the bytes of a chunk file.

    Args:
        array: what the file is a chunk of.
        chunk: a full chunk, C-contiguous, of items in the machine's byte order and of the size of ``array.dtype``.

    Raises:
        Unsupported: the compressor is none that TensorStore knows, or takes no chunk of this size.

    Example:
        >>> encode(ZarrArray(shape=(2,), chunks=(2,), dtype="int16", big_endian=True), np.array([1, 2], np.int16)).hex()
        '00010002'
    """
    _check_memory(array, chunk)
    if array.order == "F":
        chunk = np.ascontiguousarray(chunk.T)
    items = chunk.reshape(-1)
    if _other_byte_order(array):
        items = items.copy()
        _turn_bytes(array, items)
    if array.dtype == "bool":
        # True is 1 to every reader of zarr; what numpy takes for True in memory may be more.
        items = items.view(np.uint8) != 0
    data = items.view(np.uint8).data
    if array.compressor is None:
        return data.tobytes()
    match codec_of(array.compressor):
        case "zstd":
            return zstd.compress(data, level_of(array.compressor))
        case "gzip" | "zlib" as wrapper:
            return pack(data, level_of(array.compressor), _WINDOWS[wrapper])
        case "bz2":
            return bz2.compress(data, level_of(array.compressor))
        case _:
            return encode_by_tensorstore(complete(array.compressor), items)


def decode(array: ZarrArray, read: Callable[[int], bytes], nbytes: int, into: NDArray[Any]) -> None:
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
    items = into.reshape(-1).view(np.uint8)
    target = items if array.order == "C" else np.empty_like(items)
    _unpack(array.compressor, ChunkReader(read, nbytes), target.data)
    if array.order == "F":
        into[...] = target.view(into.dtype).reshape(into.shape[::-1]).T
    if _other_byte_order(array):
        _turn_bytes(array, into.reshape(-1))
    if array.dtype == "bool" and items.max() > 1:
        raise Corrupt("a chunk of bools holds bytes that are neither 0 nor 1", hint=DAMAGED)


def _unpack(compressor: str | None, file: ChunkReader, target: memoryview) -> None:
    match compressor and codec_of(compressor):
        case None:
            fill(target, iter(lambda: file.take_some(_PIECE), b""))
        case "zstd":
            zstd.decompress(file, target)
        case "gzip" | "zlib" as wrapper:
            fill(target, _undo(file, zlib.decompressobj(_WINDOWS[wrapper])))
        case "bz2":
            fill(target, _undo(file, bz2.BZ2Decompressor()))
        case _:
            decode_blosc(file, target)


def _check_memory(array: ZarrArray, chunk: NDArray[Any]) -> None:
    if chunk.shape != array.chunks or chunk.nbytes != chunk_bytes(array) or not chunk.flags.c_contiguous:
        raise ValueError(f"{chunk.dtype} {chunk.shape} is not a full chunk of {array.dtype} {array.chunks}")


def _other_byte_order(array: ZarrArray) -> bool:
    return array.big_endian != (sys.byteorder == "big")


def _turn_bytes(array: ZarrArray, flat: NDArray[Any]) -> None:
    """Turn the bytes of each number round, where it stands."""
    size = flat.itemsize // 2 if array.dtype.startswith("complex") else flat.itemsize
    if size > 1:
        flat.view(f"u{size}").byteswap(inplace=True)


def _undo(file: ChunkReader, reader: Any) -> Iterator[bytes]:
    """Yield what the one stream in a file holds; ``reader`` is a decompressor of zlib or bz2."""
    while not reader.eof:
        waiting = getattr(reader, "unconsumed_tail", b"")  # zlib gives back what it did not take, bz2 keeps it
        if not waiting and getattr(reader, "needs_input", True):
            waiting = file.take_some(_FEED)
        try:
            piece = reader.decompress(waiting, _PIECE)
        except (zlib.error, OSError) as error:
            raise damaged_error(error) from None
        if not (waiting or piece or reader.eof or file.left):
            raise cut_short_error()
        yield piece
    if file.left or reader.unused_data:
        raise overlong_error()
