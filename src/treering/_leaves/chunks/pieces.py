"""A leaf that is saved, chunk by chunk: the shard itself where a chunk is one, else what is cut out of the shards."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from treering._arrays.buffers import aligned_bytes
from treering._arrays.outgoing import HeldBox
from treering._arrays.parted import BoxedArray, to_host
from treering._codec.array_bytes import holds_wire_bytes, wire_blocks
from treering._codec.zarr import ZarrArray, chunk_box, item_dtype
from treering._values.boxes import Box, contains, intersection, relative, shape_of, slices
from treering._values.dtypes import numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray


class LeafPieces:
    """The chunks of one leaf. Any thread may ask.

    Args:
        array: how the leaf is cut.
        sources: the boxes in which it lies in memory.

    Example:
        >>> layout = ZarrArray(shape=(3,), chunks=(2,), dtype="int8")
        >>> pieces = LeafPieces(layout, [HeldBox(((0, 3),), np.array([1, 2, 3], np.int8))])
        >>> pieces.chunk(0), list(b"".join(pieces.chunk(1).blocks(0, 2)))
        (array([1, 2], dtype=int8), [3, 0])
    """

    def __init__(self, array: ZarrArray, sources: Sequence[HeldBox]) -> None:
        self._array = array
        self._sources = sources
        self._by_box = {source.box: source for source in sources}
        self._hosts: dict[Box, NDArray[Any]] = {}
        self._lock = threading.Lock()

    def chunk(self, number: int) -> Any:
        """Return an array of the shape of a full chunk, filled with zeros where it reaches beyond the leaf."""
        box = chunk_box(self._array, number)
        whole_chunk = shape_of(box) == self._array.chunks
        owner = self._by_box.get(box)
        if owner is not None and whole_chunk:
            return owner.data
        if whole_chunk:
            for source in self._sources:
                if contains(source.box, box):
                    return self._host(source)[slices(relative(box, source.box))]
        parts = [
            (relative(source.box, box), self._host(source))
            for source in self._sources
            if intersection(source.box, box) is not None
        ]
        dtype = parts[0][1].dtype
        return BoxedArray(self._array.chunks, [*parts, *_padding(shape_of(box), self._array.chunks, dtype)])

    def _host(self, source: HeldBox) -> NDArray[Any]:
        """Fetch a shard once for all chunks that are cut out of it; on CPU it is a view."""
        with self._lock:
            host = self._hosts.get(source.box)
            if host is None:
                host = self._hosts[source.box] = to_host(source.data)
            return host

    def forget(self) -> None:
        """Forget what was fetched."""
        with self._lock:
            self._hosts.clear()


def _padding(filled: tuple[int, ...], shape: tuple[int, ...], dtype: np.dtype[Any]) -> Iterator[tuple[Box, Any]]:
    """Yield zeros, in boxes that take no memory, for what a box at the first corner leaves of ``shape``."""
    nothing = np.zeros((), dtype)
    for axis, (length, full) in enumerate(zip(filled, shape, strict=True)):
        if length < full:
            before = tuple((0, other) for other in filled[:axis])
            behind = tuple((0, other) for other in shape[axis + 1 :])
            box = (*before, (length, full), *behind)
            yield box, np.broadcast_to(nothing, shape_of(box))


def to_stored(chunk: Any, array: ZarrArray) -> NDArray[Any]:
    """Return a chunk as one run of memory of the dtype that its file has: the memory it is in, where that is one.

    A compressor gets a copy: it reads its input several times, and the owner of the memory may write into it meanwhile.

    Example:
        >>> to_stored(np.arange(4, dtype=">i2").reshape(2, 2).T, ZarrArray(shape=(2, 2), chunks=(2, 2), dtype="int16"))
        array([[0, 2],
               [1, 3]], dtype=int16)
    """
    dtype = numpy_dtype(item_dtype(array))
    host = chunk if isinstance(chunk, BoxedArray) else to_host(chunk)
    if (
        isinstance(host, np.ndarray)
        and array.compressor is None
        and host.flags.c_contiguous
        and holds_wire_bytes(host.dtype)
    ):
        return host.reshape(-1).view(dtype).reshape(array.chunks)
    room = aligned_bytes(host.nbytes)
    at = 0
    for piece in host.blocks(0, host.size) if isinstance(host, BoxedArray) else wire_blocks(host, 0, host.size):
        room[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)
    return room.view(dtype).reshape(array.chunks)
