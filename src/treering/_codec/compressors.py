"""Which compressors the chunks of zarr v2 arrays may have, and what can be known of a file before it is unpacked."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any, Final

from treering._codec.chunk_reader import DAMAGED
from treering._codec.documents import show
from treering._codec.in_tensorstore import fill_in_compressor
from treering._codec.zarr import ZarrArray, check_compressor, chunk_bytes
from treering._values.human import pluralize
from treering.errors import Corrupt, Unsupported

# The level that TensorStore takes where none is said, the least, and the greatest.
_LEVELS: Final = {"zstd": (1, -131072, 22), "gzip": (1, 0, 9), "zlib": (1, 0, 9), "bz2": (1, 1, 9)}

# No file holds more than so many times its bytes: a zstd block of 4 bytes repeats one over 128 KiB, deflate writes 258
# bytes with two bits, bz2 fits 45,899,235 equal bytes into a block of 32, and blosc may have zstd inside.
_RATIOS: Final = {"zstd": 1 << 15, "gzip": 1032, "zlib": 1032, "bz2": 1 << 21, "blosc": 1 << 15}


def require_known_compressor(config: Mapping[str, Any]) -> str:
    """Return the configuration of a compressor as ``.zarray`` holds it, with what it left open filled in.

    Raises:
        Unsupported: TensorStore, and so whoever reads the array with it, does not know this codec or this setting.

    Example:
        >>> require_known_compressor({"id": "zstd"})
        '{"id":"zstd","level":1}'
        >>> require_known_compressor({"id": "lz4"})
        Traceback (most recent call last):
        ...
        treering.errors.Unsupported: the compressor {"id":"lz4"} is unknown to TensorStore: "lz4" is not registered
    """
    return complete(check_compressor(config))


@functools.lru_cache(maxsize=64)
def complete(text: str) -> str:
    """Return the text of a configuration with what it left open filled in.

    Raises:
        Unsupported: TensorStore does not know this codec or this setting.
    """
    config = json.loads(text)
    if config["id"] not in _LEVELS:
        return check_compressor(fill_in_compressor(text))
    usual, least, greatest = _LEVELS[config["id"]]
    level = config.get("level", usual)
    if not config.keys() <= {"id", "level"} or type(level) is not int or not least <= level <= greatest:
        raise Unsupported(
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
        Unsupported: TensorStore does not know this setting.
    """
    return int(json.loads(complete(compressor))["level"])


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
            raise Corrupt(f"a chunk has {pluralize(wanted, 'bytes')}, the file has {nbytes}", hint=DAMAGED)
        return
    if (codec := codec_of(array.compressor)) not in _RATIOS:
        raise Unsupported(f"the chunks are compressed with {show(codec)}, which treering cannot decompress")
    if nbytes * _RATIOS[codec] < wanted:
        packed = pluralize(nbytes, "bytes")
        raise Corrupt(f"a chunk has {pluralize(wanted, 'bytes')}, which no {codec} of {packed} holds", hint=DAMAGED)
