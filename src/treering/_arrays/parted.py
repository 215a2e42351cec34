"""An array that lies on several devices, seen as one run of bytes; it is never put together as a whole."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np

from treering._codec.array_bytes import wire_blocks
from treering._values.boxes import Box, box_of_slices, boxes_of_range, intersection, relative, shape_of, slices

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SLAB_BYTES: Final = 4 << 20
_SMALL_BYTES: Final = 64 << 10

# jax holds these in fewer bits than a byte, or unpacks them: numpy gets a copy also on CPU.
_NARROW: Final = frozenset(
    {"int1", "int2", "int4", "uint1", "uint2", "uint4", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"}
)


def to_host(array: Any) -> NDArray[Any]:
    """Return an array as numpy; on CPU a view, unless it lies in parts.

    jax keeps a copy that it once made for numpy as long as the array lives. Large arrays of one part are therefore
    fetched through a second handle that nobody keeps, so that the copy is the caller's alone.
    """
    parted = isinstance(array, jax.Array) and not array.is_fully_replicated
    if not isinstance(array, jax.Array) or (is_view(array) and not parted):
        seen: NDArray[Any] = np.asarray(array)
        return seen
    if array.nbytes > _SMALL_BYTES and not parted:
        gc.collect(0)  # jax lets go of the copy before this one only when the collector runs
        held = array.addressable_shards[0].data
        array = jax.make_array_from_single_device_arrays(held.shape, held.sharding, [held])
    # The user's guard is against copies that nobody asked for; this one was.
    with jax.transfer_guard_device_to_host("allow"):
        host: NDArray[Any] = np.asarray(array)
    return host


def is_view(array: jax.Array) -> bool:
    """Tell whether numpy sees an array's own memory, and gets no copy of it.

    Example:
        >>> is_view(jax.numpy.zeros(3)), is_view(jax.numpy.zeros(3, "int4"))
        (True, False)
    """
    device: Any = next(iter(array.sharding.device_set))
    return device.platform == "cpu" and not _is_narrow(array.dtype)


@functools.cache
def _is_narrow(dtype: Any) -> bool:
    """Look the name up once: numpy makes it anew each time, which takes longer than the view."""
    return dtype.name in _NARROW


def parts_of(array: jax.Array) -> list[tuple[Box, jax.Array]]:
    """Return the distinct boxes of an array that its devices hold, in C order, each with an array of just it."""
    distinct: dict[Box, jax.Array] = {}
    for shard in array.addressable_shards:
        distinct.setdefault(box_of_slices(shard.index, array.shape), shard.data)
    return [(box, distinct[box]) for box in sorted(distinct)]


def cut_box(array: Any, held: Box, box: Box) -> Any:
    """Return a box of an array that holds ``held``: on CPU a view, elsewhere just that is fetched from its device.

    Example:
        >>> cut_box(np.arange(10, 16), ((10, 16),), ((12, 14),))
        array([12, 13])
    """
    part = relative(box, held)
    if isinstance(array, jax.Array) and not is_view(array):
        return jax.lax.slice(array, [start for start, _ in part], [stop for _, stop in part])
    return to_host(array)[slices(part)]


def host_blocks(array: Any, start: int, stop: int) -> Iterator[memoryview]:
    """Yield the bytes of items ``start`` to ``stop`` of an array on any devices, in C order, little endian."""
    if isinstance(array, jax.Array) and not array.is_fully_replicated:
        array = BoxedArray(array.shape, parts_of(array))
    if isinstance(array, BoxedArray):
        yield from array.blocks(start, stop)
    else:
        yield from wire_blocks(to_host(array), start, stop)


class BoxedArray:
    """Boxes that make up one array.

    Args:
        shape: shape of the whole.
        parts: its boxes, each with the array that holds it.
    """

    def __init__(self, shape: tuple[int, ...], parts: Sequence[tuple[Box, Any]]) -> None:
        self.shape = shape
        self._parts = parts
        self.dtype = np.dtype(parts[0][1].dtype)
        self.size = int(np.prod(shape, dtype=np.int64))
        self.nbytes = self.size * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Put the boxes together; only numpy calls it, for small arrays."""
        del dtype, copy
        data = b"".join(self.blocks(0, self.size))
        return np.frombuffer(data, self.dtype.newbyteorder("<")).reshape(self.shape)

    def blocks(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes of items ``start`` to ``stop`` in C order, little endian, a slab at a time.

        Example:
            >>> left, right = np.array([[1], [3]], "u1"), np.array([[2], [4]], "u1")
            >>> halves = [(((0, 2), (0, 1)), left), (((0, 2), (1, 2)), right)]
            >>> list(b"".join(BoxedArray((2, 2), halves).blocks(1, 4)))
            [2, 3, 4]
        """
        hosts = [(box, to_host(data)) for box, data in self._parts]
        step = max(1, _SLAB_BYTES // self.dtype.itemsize)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            slab = np.empty(last - first, self.dtype)
            at = 0
            for box in boxes_of_range(self.shape, first, last):
                shape = shape_of(box)
                count = int(np.prod(shape, dtype=np.int64))
                _fill(slab[at : at + count].reshape(shape), box, hosts)
                at += count
            yield from wire_blocks(slab, 0, len(slab))


def _fill(into: NDArray[Any], box: Box, hosts: Sequence[tuple[Box, NDArray[Any]]]) -> None:
    for held, host in hosts:
        if (common := intersection(box, held)) is not None:
            into[slices(relative(common, box))] = host[slices(relative(common, held))]
