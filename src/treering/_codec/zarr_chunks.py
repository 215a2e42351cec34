"""The chunk files of zarr v2 arrays: items <-> bytes, through any compressor that TensorStore knows.

Which compressors the chunks may have, and what can be known of a file before it is unpacked, is said here too.
Blosc goes through TensorStore, in memory, and so does what there is to say about any other compressor.

Source: https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html, "Chunks";
https://github.com/Blosc/c-blosc/blob/main/README_CHUNK_FORMAT.rst for the header of blosc.
"""

from __future__ import annotations

import bz2
import functools
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from treering._codec.compression import (
    DAMAGED,
    ChunkReader,
    damaged_error,
    fill,
    pack,
    wrong_size_error,
    zstd_compress,
    zstd_decompress,
)
from treering._codec.documents import show
from treering._codec.zarr import ZarrArray, check_compressor, chunk_bytes, zarray_bytes
from treering._values.human import pluralize
from treering.errors import CorruptError, UnsupportedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLOSC_HEADER: Final = 16


def fill_in_compressor(compressor: str) -> dict[str, Any]:
    """Return a compressor's configuration with what it left open filled in.

    Args:
        compressor: the configuration as JSON.

    Raises:
        UnsupportedError: TensorStore does not know this codec or this setting.

    Example:
        >>> fill_in_compressor('{"id":"blosc","cname":"zstd"}')["clevel"]
        5
    """
    try:
        store = _in_memory(compressor, "uint8", 1)
    except ValueError as error:
        reason = _reason(error).rsplit("object member ", 1)[-1].split(": ", 1)[-1]
        raise UnsupportedError(f"the compressor {compressor[:200]} is unknown to TensorStore: {reason}") from None
    full: dict[str, Any] = json.loads(store.kvstore[".zarray"])["compressor"]
    return full


def encode_by_tensorstore(compressor: str, items: NDArray[Any]) -> bytes:
    """Return the bytes of a chunk of flat items that lie in memory as they are to lie in the file.

    Raises:
        UnsupportedError: the compressor takes no chunk of this size.
    """
    # Items of the right size, which is all that a shuffle looks at; nothing uses them as numbers.
    dtype = "complex128" if items.itemsize == 16 else f"uint{8 * items.itemsize}"
    items = items.view(dtype)
    store = _in_memory(compressor, dtype, len(items))
    try:
        store.write(items).result()
    except ValueError as error:
        raise UnsupportedError(
            f"the compressor {compressor[:200]} takes no chunk of {pluralize(items.nbytes, 'bytes')}: {_reason(error)}",
            hint="make the chunks smaller",
        ) from None
    data: bytes = store.kvstore["0"]
    return data


def decode_blosc(file: ChunkReader, target: memoryview) -> None:
    """Fill ``target`` with what the blosc data in a file holds.

    Raises:
        CorruptError: it is damaged, or holds less or more than ``target``.
    """
    if not _BLOSC_HEADER < file.left <= len(target) + _BLOSC_HEADER:
        raise damaged_error(f"no blosc data of {pluralize(len(target), 'bytes')} takes {file.left}")
    import tensorstore

    data = file.take(file.left)
    if (held := int.from_bytes(data[4:8], "little")) != len(target):
        raise wrong_size_error(str(held), target)
    if int.from_bytes(data[12:16], "little") != len(data):
        raise damaged_error("extra bytes follow its compressed data")
    store = _in_memory('{"id":"blosc"}', "uint8", held)
    store.kvstore["0"] = data
    try:
        # Not by `read`, which takes memory for the chunk once more.
        tensorstore.array(np.frombuffer(target, np.uint8)).write(store).result()
    except ValueError as error:
        raise damaged_error(_reason(error)) from None


def _in_memory(compressor: str, dtype: str, items: int) -> Any:
    """Return a TensorStore of one chunk that is in no file."""
    import tensorstore

    document = zarray_bytes(ZarrArray(shape=(items,), chunks=(items,), dtype=dtype, compressor=compressor))
    spec = {"driver": "zarr", "kvstore": "memory://", "metadata": json.loads(document)}
    return tensorstore.open(spec, create=True, open=True, context=tensorstore.Context()).result()


def _reason(error: ValueError) -> str:
    """Return what TensorStore says, without the specification that it dumps behind it."""
    return str(error).split(" [", 1)[0]


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
        UnsupportedError: the compressor is none that TensorStore knows, or takes no chunk of this size.

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
            return zstd_compress(data, level_of(array.compressor))
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
        CorruptError: the file is damaged, cut short, or holds less or more than a chunk.
        UnsupportedError: the compressor is none that can be undone here.

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
        raise CorruptError("a chunk of bools holds bytes that are neither 0 nor 1", hint=DAMAGED)


def _unpack(compressor: str | None, file: ChunkReader, target: memoryview) -> None:
    match compressor and codec_of(compressor):
        case None:
            fill(target, iter(lambda: file.take_some(_PIECE), b""))
        case "zstd":
            zstd_decompress(file, target)
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
            raise damaged_error("it is cut short")
        yield piece
    if file.left or reader.unused_data:
        raise damaged_error("extra bytes follow its compressed data")


# The level that TensorStore takes where none is said, the least, and the greatest.
_LEVELS: Final = {"zstd": (1, -131072, 22), "gzip": (1, 0, 9), "zlib": (1, 0, 9), "bz2": (1, 1, 9)}

# No file holds more than so many times its bytes: a zstd block of 4 bytes repeats one over 128 KiB, deflate writes 258
# bytes with two bits, bz2 fits 45,899,235 equal bytes into a block of 32, and blosc may have zstd inside.
_RATIOS: Final = {"zstd": 1 << 15, "gzip": 1032, "zlib": 1032, "bz2": 1 << 21, "blosc": 1 << 15}


def require_known_compressor(config: Mapping[str, Any]) -> str:
    """Return the configuration of a compressor as ``.zarray`` holds it, with what it left open filled in.

    Raises:
        UnsupportedError: TensorStore, and so whoever reads the array with it, does not know this codec or this setting.

    Example:
        >>> require_known_compressor({"id": "zstd"})
        '{"id":"zstd","level":1}'
        >>> require_known_compressor({"id": "lz4"})
        Traceback (most recent call last):
        ...
        treering.errors.UnsupportedError: the compressor {"id":"lz4"} is unknown to TensorStore: "lz4" is not registered
    """
    return complete(check_compressor(config))


@functools.lru_cache(maxsize=64)
def complete(text: str) -> str:
    """Return the text of a configuration with what it left open filled in.

    Raises:
        UnsupportedError: TensorStore does not know this codec or this setting.
    """
    config = json.loads(text)
    if config["id"] not in _LEVELS:
        return check_compressor(fill_in_compressor(text))
    usual, least, greatest = _LEVELS[config["id"]]
    level = config.get("level", usual)
    if not config.keys() <= {"id", "level"} or type(level) is not int or not least <= level <= greatest:
        raise UnsupportedError(
            f"the compressor {text[:200]} is unknown to TensorStore",
            hint=f"{config['id']} takes a 'level' from {least} to {greatest}, and nothing else",
        )
    return check_compressor({"id": config["id"], "level": level})


@functools.lru_cache(maxsize=64)
def codec_of(compressor: str) -> str:
    """Return the name of the codec in a compressor's configuration.

    Example:
        >>> codec_of('{"id":"zstd","level":1}')
        'zstd'
    """
    return str(json.loads(compressor)["id"])


@functools.lru_cache(maxsize=64)
def level_of(compressor: str) -> int:
    """Return the level of a codec that has one; the usual one where the configuration leaves it open.

    Raises:
        UnsupportedError: TensorStore does not know this setting.
    """
    return int(json.loads(complete(compressor))["level"])


def check_chunk_file(array: ZarrArray, nbytes: int) -> None:
    """Require that a chunk file of ``nbytes`` can hold a chunk; asked before memory for the chunk is.

    Raises:
        CorruptError: a raw chunk has another size; no compressor shrinks a chunk to so little.
        UnsupportedError: the compressor is none that can be undone here.

    Example:
        >>> check_chunk_file(ZarrArray(shape=(4,), chunks=(4,), dtype="uint8"), 3)
        Traceback (most recent call last):
        ...
        treering.errors.CorruptError: a chunk has 4 bytes, the file has 3; use another copy of the file
    """
    wanted = chunk_bytes(array)
    if array.compressor is None:
        if nbytes != wanted:
            raise CorruptError(f"a chunk has {pluralize(wanted, 'bytes')}, the file has {nbytes}", hint=DAMAGED)
        return
    if (codec := codec_of(array.compressor)) not in _RATIOS:
        raise UnsupportedError(f"the chunks are compressed with {show(codec)}, which treering cannot decompress")
    if nbytes * _RATIOS[codec] < wanted:
        packed = pluralize(nbytes, "bytes")
        raise CorruptError(
            f"a chunk has {pluralize(wanted, 'bytes')}, which no {codec} of {packed} holds", hint=DAMAGED
        )
