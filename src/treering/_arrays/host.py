"""jax arrays -> host memory: what may be written from this process, and its bytes.

An array that lies on several devices is seen as one run of bytes; it is never put together as a whole. For a save that
goes on in the background there are copies that neither donation nor mutation changes afterwards.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
import warnings
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np
import xxhash

from treering._codec.array_bytes import holds_wire_bytes, wire_blocks
from treering._codec.documents import MAX_NESTING
from treering._codec.msgpack.write import ArrayLike, Encoder, Piece
from treering._format.index import LeafType, leaf_bytes
from treering._store.crew import work_together
from treering._store.memory_pool import PIECE_BYTES, MemoryPool
from treering._values.boxes import Box, box_of_slices, boxes_of_range, intersection, relative, shape_of, slices
from treering._values.casts import NotKept, cast_array
from treering._values.checksums import block_checksums
from treering._values.keys import split_key
from treering._values.processes import Processes
from treering.errors import MismatchError, UnsupportedError

if TYPE_CHECKING:
    from numpy.typing import NDArray


TOGETHER: Final = 'only all processes of the job together can save it: to a folder, with processes="all"'
"""What to do with an array that lies over processes."""

_LONG_DOUBLES: Final = (np.longdouble, np.clongdouble)
_SCALARS: Final = (np.generic, np.ndarray, jax.Array)
# Truth values, ints, floats; V: those of ml_dtypes, bfloat16 for instance.
_KINDS: Final = "biufV"
_RUN_BYTES: Final = 256 << 10

# Held by who asks jax for the shards of an array; by a signal handler or a finalizer in between once more.
_SHARDS: Final = threading.RLock()


def adopt(value: object) -> ArrayLike | None:
    """Return ``value`` if it is a jax array that this process holds whole, None if it is no array.

    Raises:
        UnsupportedError: some of its shards belong to other processes, or it was deleted (donated).
    """
    if not isinstance(value, jax.Array):
        return None
    require_alive(value)
    if not value.is_fully_addressable:
        raise UnsupportedError(
            "the array is not fully addressable: other processes hold some of its shards", hint=TOGETHER
        )
    return value


def require_alive(value: jax.Array) -> None:
    """Refuse an array that has no bytes, or has them no more.

    Raises:
        UnsupportedError: it is a tracer, is unreduced, or was deleted (donated).
    """
    if isinstance(value, jax.core.Tracer):
        raise UnsupportedError("a traced value has no bytes yet", hint="save outside of jit, grad and vmap")
    if getattr(getattr(value.sharding, "spec", None), "unreduced", None):
        raise UnsupportedError("the array is unreduced: its devices hold partial sums", hint="reshard it before")
    if value.is_deleted():
        what = "the array has been deleted, probably because it was donated to a jitted function"
        raise UnsupportedError(what, hint="save it before")


def jax_holds(dtype: np.dtype[Any]) -> bool:
    """Tell whether jax, as it is configured now, keeps this dtype.

    Example:
        >>> jax_holds(np.dtype("float32")), jax_holds(np.dtype("datetime64[s]"))
        (True, False)
    """
    numbers = jax.numpy.issubdtype(dtype, np.number) or dtype == np.bool_
    # numpy calls a timedelta64 an integer.
    if not numbers or dtype.kind == "m" or dtype.type in _LONG_DOUBLES:
        return False
    return bool(jax.dtypes.canonicalize_dtype(dtype) == dtype) and _runtime_holds(dtype)


@functools.cache
def _runtime_holds(dtype: np.dtype[Any]) -> bool:
    """Tell whether jax's runtime takes a dtype that jax lists; that of jax 0.10 has no six-bit floats."""
    if dtype.isbuiltin == 1 or dtype.itemsize > 1:
        return True
    try:
        with jax.transfer_guard_host_to_device("allow"):
            jax.device_put(np.zeros((), dtype))
    except RuntimeError:
        return False
    return True


def encode_state(state: Any, *, chunk_size: int, sort_keys: bool = False) -> list[Piece]:
    """Return the pieces of the msgpack form of a tree of dicts and lists."""
    return Encoder(adopt, to_host, max(0, chunk_size), sort_keys).encode(state)


def piece_buffers(parts: Iterable[Piece]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of the pieces in order; small ones together, a device array fetched when its turn comes."""
    run: list[bytes] = []
    waiting = 0
    for part in parts:
        if isinstance(part, bytes):
            run.append(part)
            waiting += len(part)
            if waiting < _RUN_BYTES:
                continue
        if run:
            yield b"".join(run)
            run, waiting = [], 0
        if not isinstance(part, bytes):
            yield from host_blocks(part.array, part.start, part.stop)
    if run:
        yield b"".join(run)


def with_python_numbers(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a user's metadata in which scalars of numpy and jax are Python's bool, int or float.

    What is no number stays as it is, for ``check_json`` to name.

    Example:
        >>> with_python_numbers({"step": np.int64(3), "losses": [np.float32(0.5), jax.numpy.float32(2)]})
        {'step': 3, 'losses': [0.5, 2.0]}
    """
    return {name: _plain(value, ()) for name, value in metadata.items()}


def _plain(value: Any, above: tuple[int, ...]) -> Any:
    if isinstance(value, _SCALARS):
        return _number(value)
    if type(value) not in (dict, list) or len(above) > MAX_NESTING or id(value) in above:
        return value
    above = (*above, id(value))
    if type(value) is dict:
        return {name: _plain(item, above) for name, item in value.items()}
    return [_plain(item, above) for item in value]


def _number(value: Any) -> Any:
    """Return the number that a scalar holds, or the scalar itself where it is none, or lies elsewhere."""
    try:
        with jax.transfer_guard_device_to_host("allow"):
            number = value.item() if not value.shape and value.dtype.kind in _KINDS else value
    except (TypeError, ValueError, RuntimeError):  # a tracer, a deleted array, or one of other processes
        return value
    return number if type(number) in (bool, int, float) else value


def job_processes() -> Processes:
    """Return which process of the job this is, and how many there are; asked where jax is sure to run."""
    return Processes(this=jax.process_index(), count=jax.process_count())


def this_processes(leaves: Iterable[Any]) -> Processes:
    """Return which process of the job this is, and how many there are.

    jax is asked only where it is sure to run already: ``jax.distributed`` is initialised, or a leaf is an array of
    jax's. A tree of numpy arrays starts no backend.

    Example:
        >>> import numpy as np
        >>> this_processes([np.zeros(2), 3])
        Processes(this=0, count=1)
    """
    # By class: there are few of them, and thousands of leaves.
    if jax.distributed.is_initialized() or any(issubclass(kind, jax.Array) for kind in set(map(type, leaves))):
        return job_processes()
    return Processes(this=0, count=1)


_DONATED_ITEMS: Final = 4096
_SLAB_BYTES: Final = 4 << 20
_SMALL_BYTES: Final = 64 << 10
# A snapshot copies arrays up to this size: a view of one takes as long, and objects that the collector looks at.
_COPIED_BYTES: Final = 4 << 10

# jax holds these in fewer bits than a byte, or unpacks them: numpy gets a copy also on CPU.
_NARROW: Final = frozenset(
    {"int1", "int2", "int4", "uint1", "uint2", "uint4", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"}
)


OTHER_WRITERS: Final[Mapping[str, tuple[str, ...]]] = {
    "tpu": (),
    "gpu": (
        "cuda.core", "cudf", "cupy", "mxnet", "numba", "nvidia.dali", "paddle", "pycuda", "rmm", "tensorflow", "torch",
        "triton", "tvm", "warp",
    ),
}  # fmt: skip
"""Platform -> the modules of others that may own memory of its devices; of other platforms nothing is certain."""


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
        held = shards_of(array)[0].data
        array = jax.make_array_from_single_device_arrays(held.shape, held.sharding, [held])
    if parted:
        shards_of(array)  # numpy asks for them too
    # The user's guard is against copies that nobody asked for; this one was.
    with jax.transfer_guard_device_to_host("allow"):
        host: NDArray[Any] = np.asarray(array)
    return host


def has_own_memory() -> bool:
    """Tell whether the devices that jax uses by default are such that `only_jax_writes` may be true of their arrays.

    Example:
        >>> has_own_memory()
        False
    """
    return jax.default_backend() in OTHER_WRITERS


def only_jax_writes(array: jax.Array) -> bool:
    """Tell whether it is certain that nobody but jax can write into the memory of an array.

    On CPU an array may be a view of memory that numpy writes into, and nothing public tells such an array from another.
    On a GPU the memory may be that of another library which handed it over by dlpack, if one is loaded.

    Example:
        >>> only_jax_writes(jax.numpy.zeros(3))
        False
    """
    device: Any = next(iter(array.sharding.device_set))
    others = OTHER_WRITERS.get(device.platform)
    in_device_memory = array.sharding.memory_kind in (None, "device")
    return others is not None and in_device_memory and not any(name in sys.modules for name in others)


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


def shards_of(array: jax.Array) -> list[Any]:
    """Return the shards of an array that the devices of this process hold, one of each device.

    jax before 0.12 makes them when they are asked for, and where several threads do so at once it lists some twice, or
    for good too few. So threads of treering ask one after another.

    Raises:
        UnsupportedError: a thread of another program asked at the same time, and some are missing since then.

    Example:
        >>> [shard.data.shape for shard in shards_of(jax.numpy.zeros(3))]
        [(3,)]
    """
    with _SHARDS:
        found = {shard.device: shard for shard in array.addressable_shards}
    if (there := len(array.sharding.addressable_devices)) > len(found):
        what = f"jax lists {len(found)} of the {there} shards of the array, which several threads looked at at once"
        raise UnsupportedError(what, hint="save a copy of the array, or use jax 0.12 or newer")
    return list(found.values())


def parts_of(array: jax.Array) -> list[tuple[Box, jax.Array]]:
    """Return the distinct boxes of an array that its devices hold, in C order, each with an array of just it."""
    distinct: dict[Box, jax.Array] = {}
    for shard in shards_of(array):
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
        starts = [start for start, _ in part]
        if max(array.shape, default=0) > _MOST_PLACES:
            return jax.lax.slice(array, starts, [stop for _, stop in part])
        with jax.transfer_guard_host_to_device("allow"):
            return _cut(array, list(map(np.int32, starts)), shape_of(part))
    return to_host(array)[slices(part)]


# One program for all places: with places in it, each process of a job would compile programs of its own at once.
_cut: Final = jax.jit(jax.lax.dynamic_slice, static_argnums=2)
_MOST_PLACES: Final = 2**31 - 1


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
                into = slab[at : at + count].reshape(shape)
                for held, host in hosts:
                    if (common := intersection(box, held)) is not None:
                        into[slices(relative(common, box))] = host[slices(relative(common, held))]
                at += count
            yield from wire_blocks(slab, 0, len(slab))


class CastArray(BoxedArray):
    """An array whose floats become those of another dtype when they are read, a slab at a time.

    Args:
        data: an array of jax or numpy, on any devices.
        dtype: the other dtype.
        key: the key of its leaf, for errors.
        start: where it begins in its leaf.
    """

    def __init__(self, data: Any, dtype: np.dtype[Any], key: str, start: Sequence[int] = ()) -> None:
        self.shape = tuple(data.shape)
        self.dtype = dtype
        self.size = int(np.prod(self.shape, dtype=np.int64))
        self.nbytes = self.size * dtype.itemsize
        self._data = data
        self._key = key
        self._start = start or (0,) * len(self.shape)

    def blocks(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes of items ``start`` to ``stop`` in C order, little endian.

        Raises:
            MismatchError: the cast would change a number by more than rounding.

        Example:
            >>> array = CastArray(np.array([1.0, 2.0]), np.dtype("float16"), "w")
            >>> b"".join(array.blocks(0, 2)) == np.array([1, 2], "float16").tobytes()
            True
        """
        stored = np.dtype(self._data.dtype).newbyteorder("<")
        step, at = max(1, _SLAB_BYTES // stored.itemsize), start
        for piece in host_blocks(self._data, start, stop):
            items = np.frombuffer(piece, stored)
            for first in range(0, len(items), step):
                before = items[first : first + step]
                try:
                    after = cast_array(before, self.dtype)
                except NotKept as error:
                    raise self._not_kept(error, at) from None
                at += len(before)
                yield from wire_blocks(after, 0, len(after))

    def _not_kept(self, error: NotKept, at: int) -> MismatchError:
        number = at + (error.index or (0,))[0]
        within = map(int, np.unravel_index(number, self.shape)) if self.shape else ()
        place = tuple(start + index for start, index in zip(self._start, within, strict=True))
        what = f"{NotKept(error.value, place)} does not fit {self.dtype.name}"
        hint = "dtype= rounds floats, and changes no other number; globs in it can leave a leaf as it is"
        return MismatchError(what, path=split_key(self._key), hint=hint)


def read_checked(
    data: Any, block: int, checksums: array[int], first: int, pool: MemoryPool | None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of an array in C order, little endian, and note the checksum of each block as it comes by.

    The owner of the memory may write into it meanwhile, also into that of a jax array which was made of it without a
    copy. So the memory is read once, into a small piece of the pool: the checksum and the file see the same bytes, and
    the piece is still in the processor's cache. A piece that is not `Lasting` holds until the next one is asked for.

    Args:
        data: an array of jax or numpy.
        block: bytes of a block.
        checksums: where the checksums go.
        first: the place of the first one.
        pool: lends memory to what is yielded; without one only the checksums count, and nothing is copied.
    """
    if isinstance(data, BoxedArray):
        yield from _check_stream(data.blocks(0, data.size), block, checksums, first)
        return
    host = to_host(data)
    plain = holds_wire_bytes(host.dtype)
    if plain and host.nbytes <= _SMALL_BYTES:
        small = host.tobytes()  # in C order, whatever the array's own is
        if small:
            checksums[first] = xxhash.xxh3_64_intdigest(small)
            yield small
    elif plain and host.flags.c_contiguous:
        flat = host.reshape(-1).view(np.uint8)
        for start in range(0, len(flat), PIECE_BYTES):
            part = flat[start : start + PIECE_BYTES]
            piece = part.data if pool is None else pool.copy(part)
            found = block_checksums(piece, block)
            checksums[first : first + len(found)] = found
            first += len(found)
            yield piece
            del piece  # its memory is free for the next one
    else:
        yield from _check_stream(wire_blocks(host, 0, host.size), block, checksums, first)


def _check_stream(pieces: Iterator[memoryview], block: int, checksums: array[int], first: int) -> Iterator[memoryview]:
    """Pass pieces on whose ends are not those of the blocks."""
    state, held = xxhash.xxh3_64(), 0
    for piece in pieces:
        at = 0
        while at < len(piece):
            part = piece[at : at + block - held]
            state.update(part)
            held += len(part)
            at += len(part)
            if held == block:
                checksums[first] = state.intdigest()
                first += 1
                state.reset()
                held = 0
        yield piece
    if held:
        checksums[first] = state.intdigest()


def join_arrays(arrays: Sequence[Any], nbytes: int) -> bytes | None:
    r"""Return the bytes of small arrays end to end, each read once; None where that takes more than copying memory.

    Args:
        arrays: arrays of jax or numpy.
        nbytes: how many bytes they have together in a file.

    Example:
        >>> join_arrays([np.arange(2, dtype="u1"), jax.numpy.zeros(2, "u1")], 4)
        b'\x00\x01\x00\x00'
        >>> join_arrays([np.zeros((2, 2)).T], 32) is None, join_arrays([np.zeros(2, ">f4")], 8) is None
        (True, True)
    """
    try:
        joined = b"".join(arrays) if _lie_as_in_files(arrays) else b""
    except _NO_BUFFER:
        return None
    return joined if len(joined) == nbytes else None


def digest_arrays(arrays: Sequence[Any]) -> list[bytes] | None:
    """Return the 128-bit digest of each of some arrays of jax or numpy; None where one lies otherwise than in a file.

    Example:
        >>> found = digest_arrays([np.arange(2, dtype="u1"), jax.numpy.arange(2, dtype="u1")])
        >>> found == [xxhash.xxh3_128_digest(bytes([0, 1]))] * 2, digest_arrays([np.zeros(2, ">f4")])
        (True, None)
    """
    try:
        return list(map(xxhash.xxh3_128_digest, arrays)) if _lie_as_in_files(arrays) else None
    except _NO_BUFFER:
        return None


_NO_BUFFER: Final = (TypeError, ValueError, BufferError)
"""What an array raises that lies on another device, in several parts, or has a dtype without a buffer."""


def _lie_as_in_files(arrays: Sequence[Any]) -> bool:
    """Tell whether the arrays among these that have a buffer have the bytes in it that a file has."""
    dtypes = {array.dtype for array in arrays if isinstance(array, np.ndarray)}
    return sys.byteorder == "little" and all(map(holds_wire_bytes, dtypes))


class HostCopies:
    """Host copies of one snapshot, and what it found out of arrays that are alike.

    On CPU a numpy view of a jax array is enough: the runtime does not hand a donated buffer on while somebody holds a
    view of it. Elsewhere the bytes come to the host, all copies begun before the first is waited for. What is numpy's
    own is copied, since anybody may write into it. Small arrays are copied too: that is faster than a view is made.

    Args:
        types: the types of the leaves.
        leaf_types: number of the type of each leaf.
    """

    def __init__(self, types: Sequence[LeafType], leaf_types: Sequence[int]) -> None:
        self._types = types
        self._leaf_types = leaf_types
        # The memory of a text is nobody else's: it was copied, or lies in a ``bytes``.
        self._texts = [kind.kind in ("str", "bytes", "bytearray") for kind in types]
        self._views: dict[tuple[int, Any], bool] = {}
        self._coming: dict[int, jax.Array] = {}

    def begin(self, data: Any, kind: int) -> None:
        """Begin to fetch an array, where that takes a copy from its device."""
        if isinstance(data, jax.Array) and not self._is_view(data, kind) and id(data) not in self._coming:
            held: jax.Array = shards_of(data)[0].data
            if data.nbytes > _SMALL_BYTES:
                # Of a new array: the copy that jax keeps of this one would stay as long as the caller's array.
                held = jax.make_array_from_single_device_arrays(held.shape, held.sharding, [held])
            with jax.transfer_guard_device_to_host("allow"):
                held.copy_to_host_async()
            self._coming[id(data)] = held

    def hold(self, data: Any, kind: int) -> NDArray[Any] | None:
        """Return a host array that nobody else writes into, of what was begun."""
        if data is None:
            return None
        if (coming := self._coming.get(id(data))) is not None:
            with jax.transfer_guard_device_to_host("allow"):
                copy: NDArray[Any] = np.asarray(coming)
            return copy
        if isinstance(data, jax.Array):
            return np.asarray(data) if views_survive() else np.asarray(data).copy()
        host: NDArray[Any] = data if self._texts[kind] else np.array(data, order="C")
        return host

    def hold_all(self, arrays: Mapping[int, Any]) -> dict[int, NDArray[Any] | None]:
        """Return host arrays of leaves that lie in one piece; what has to be fetched for them is begun first."""
        alike: dict[int, list[int]] = {}
        for number in arrays:
            alike.setdefault(self._leaf_types[number], []).append(number)
        together: list[list[int]] = []
        alone: list[int] = []
        for kind, numbers in alike.items():
            nbytes, first = leaf_bytes(self._types[kind]), arrays[numbers[0]]
            if 0 < nbytes <= _COPIED_BYTES and not (isinstance(first, jax.Array) and not self._is_view(first, kind)):
                step = _RUN_BYTES // nbytes
                together += [numbers[start : start + step] for start in range(0, len(numbers), step)]
            else:
                alone += numbers
        for number in alone:
            self.begin(arrays[number], self._leaf_types[number])
        held: dict[int, NDArray[Any] | None] = dict.fromkeys(arrays)
        for numbers in together:
            if copies := self._copy([arrays[number] for number in numbers], self._leaf_types[numbers[0]]):
                held.update(zip(numbers, copies, strict=True))
            else:
                alone += numbers
        for number in alone:
            self.begin(arrays[number], self._leaf_types[number])
            held[number] = self.hold(arrays[number], self._leaf_types[number])
        return held

    def _copy(self, arrays: Sequence[Any], kind: int) -> list[NDArray[Any]]:
        """Return copies of small arrays of one type in one memory; none where that cannot be."""
        joined = join_arrays(arrays, len(arrays) * leaf_bytes(self._types[kind]))
        if joined is None:
            return []
        block = np.frombuffer(joined, arrays[0].dtype).reshape(len(arrays), *(self._types[kind].shape or ()))
        return list(block) if block.ndim > 1 else [block[at, ...] for at in range(len(arrays))]  # no numpy scalars

    def _is_view(self, data: jax.Array, kind: int) -> bool:
        # Leaves of one type have one dtype; shardings are as many objects as there are arrays.
        key = (kind, next(iter(data.sharding.device_set)))
        if (known := self._views.get(key)) is None:
            known = self._views[key] = is_view(data)
        return known


@functools.cache
def views_survive() -> bool:
    """Tell whether views of arrays on CPU outlive their donation; found out once, by donating a small array.

    jax's runtime gives a donated buffer away only if nobody else holds on to it, and a live view does. That is how it
    is and nothing that it promises; where it is not so, a snapshot has to copy.

    Example:
        >>> views_survive()
        True
    """
    found: list[bool] = []
    # The caller may be inside of a mesh, or of a trace, in which jax runs nothing on one device; another thread is not.
    work_together(lambda: found.append(_survives_donation()), 1, lambda: None)
    return found == [True]


def _survives_donation() -> bool:
    cpu = jax.local_devices(backend="cpu")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a runtime that does not donate says so
        with jax.transfer_guard("allow"), jax.disable_jit(False):
            numbers = [np.arange(_DONATED_ITEMS).astype(jax.numpy.dtype(name)) for name in ("float32", "bfloat16")]
            return all(_outlives(jax.device_put(array, cpu)) for array in numbers)


def _outlives(array: jax.Array) -> bool:
    """Donate an array that jax made itself, so that its memory is the runtime's to give away."""
    own = jax.jit(lambda x: x + 1)(array)
    view = np.asarray(own)
    before = view.copy()
    jax.jit(lambda x: x * 2 + 1, donate_argnums=0)(own).block_until_ready()
    return bool((view == before).all())
