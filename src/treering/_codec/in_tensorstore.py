"""Chunks that go through TensorStore, in memory: blosc, and what it says about any other compressor.

Source: https://github.com/Blosc/c-blosc/blob/main/README_CHUNK_FORMAT.rst for the header of blosc.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from treering._codec.zarr import ZarrArray, zarray_bytes
from treering._codec.zstd import ChunkReader, damaged_error, overlong_error, wrong_size_error
from treering._values.human import pluralize
from treering.errors import UnsupportedError

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
        raise overlong_error()
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
