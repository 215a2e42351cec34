"""Leaves -> the chunk files of a leaves directory: small ones with few system calls, large ones by two threads.

A chunk is the shard itself where the shard is one chunk, else what is cut out of the shards.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
import threading
from array import array
from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import xxhash

from treering._arrays.host import BoxedArray, read_checked, to_host
from treering._arrays.jobs import Job, Progress, Tally, Work, aligned_bytes, run_all, split_by_bytes
from treering._arrays.outgoing import DescribedLeaves, HeldBox
from treering._codec.array_bytes import holds_wire_bytes, wire_blocks
from treering._codec.zarr import ZarrArray, chunk_box, chunk_bytes, chunk_count, chunk_name, item_dtype, zarray_bytes
from treering._codec.zarr_chunks import encode
from treering._leaves.documents.record import LeavesRecord, arrays_of
from treering._store.leaves_api import LeafFile, LeafWriter
from treering._store.memory_pool import MemoryPool
from treering._values.boxes import Box, contains, intersection, relative, shape_of, slices
from treering._values.checksums import block_bytes, block_checksums, block_count
from treering._values.dtypes import numpy_dtype
from treering._values.leaves_names import ZARRAY

if TYPE_CHECKING:
    from numpy.typing import NDArray


# All of a leaf's files are written at once, by one thread: a second one would wait for the interpreter, not the disk.
_SMALL_BYTES: Final = 64 << 10
# The leaves of one job; progress is reported after each.
_TOGETHER: Final = 64


@dataclasses.dataclass(frozen=True, slots=True)
class WriteForm:
    """What leaves of one layout have in common."""

    array: ZarrArray
    """The layout."""
    document: bytes
    """Its ``.zarray``."""
    count: int
    """Of its chunks."""
    chunk: int
    """Bytes of one, before any compressor."""
    block: int
    """Bytes of a checksummed block."""
    name: str | None
    """Of the file of a leaf that is one chunk and raw."""


@dataclasses.dataclass(slots=True, eq=False)
class WrittenLeaf:
    """A leaf, and what is known of its files when they are written."""

    folder: str
    """Its folder."""
    form: WriteForm
    """How it is cut."""
    sources: Sequence[HeldBox]
    """The boxes in which it lies in memory."""
    numbers: Sequence[int]
    """Which of its chunks this process writes, ascending."""
    nbytes: int
    """Bytes of those chunks, before any compressor."""
    head: Sequence[LeafFile]
    """Its ``.zarray`` as a file, if this process writes that."""
    sizes: Sequence[int] = ()
    """Bytes of those chunk files, if they are compressed."""
    checksums: Sequence[array[int]] = ()
    """Those of the blocks of those chunk files, file after file."""


def write_leaves(
    staged: LeafWriter,
    record: LeavesRecord,
    leaves: DescribedLeaves,
    *,
    progress: Progress | None = None,
    chunks: Mapping[int, Sequence[int]] | None = None,
    headed: bool = True,
    without: Container[int] = (),
) -> tuple[list[int], array[int]]:
    """Write every stored leaf: its ``.zarray`` and its chunk files.

    Args:
        staged: where they go.
        record: says where each leaf lies, and how it is cut.
        leaves: the leaves.
        progress: called from this thread.
        chunks: which of its chunks this process writes, by the number of a leaf; None: all.
        headed: whether it writes the ``.zarray`` of every leaf as well.
        without: numbers of leaves that are left out: another program writes them.

    Returns:
        The size of each chunk file of the compressed leaves, and the checksums of all blocks of all chunk files, of
        those that this process writes: chunk after chunk in the order of the grid, leaf after leaf.

    Raises:
        UnsupportedError: a compressor that cannot be used here.
        StoreError: the system refuses.
    """
    forms: dict[int, WriteForm] = {}
    small: list[WrittenLeaf] = []
    large: list[WrittenLeaf] = []
    every: list[WrittenLeaf] = []
    total = 0
    for (number, sources), folder, zarr in zip(leaves.sources.items(), record.folders, arrays_of(record), strict=True):
        if number in without:
            continue
        form = forms.get(id(zarr))  # thousands of leaves share a few layouts
        if form is None:
            count, chunk = chunk_count(zarr), chunk_bytes(zarr)
            name = chunk_name(zarr, 0) if zarr.compressor is None and zarr.chunks == zarr.shape else None
            form = forms[id(zarr)] = WriteForm(zarr, zarray_bytes(zarr), count, chunk, block_bytes(chunk), name)
        numbers = range(form.count) if chunks is None else chunks.get(number, ())
        if not (numbers or headed):
            continue
        head = ((ZARRAY, (form.document,), len(form.document)),) if headed else ()
        leaf = WrittenLeaf(folder, form, sources, numbers, len(numbers) * form.chunk, head)
        every.append(leaf)
        total += leaf.nbytes
        (small if leaf.nbytes <= _SMALL_BYTES else large).append(leaf)
    large.sort(key=lambda leaf: -leaf.nbytes)
    tally = Tally(total, progress)
    run_all(_plan_large(staged, large, tally), tally, _plan_small(staged, small))
    sizes: list[int] = []
    checksums = array("Q")
    for leaf in every:
        sizes += leaf.sizes
        for found in leaf.checksums:
            checksums += found
    return sizes, checksums


def _plan_small(staged: LeafWriter, leaves: Sequence[WrittenLeaf]) -> Work:
    runs = list(split_by_bytes(leaves, operator.attrgetter("nbytes"), sys.maxsize, longest=_TOGETHER))
    jobs: deque[Job] = deque(functools.partial(_write_small, staged, some) for some, _ in runs)
    return Work(jobs, sum(nbytes for _, nbytes in runs))


def _write_small(staged: LeafWriter, leaves: Sequence[WrittenLeaf]) -> int:
    single: list[tuple[WrittenLeaf, str, bytes]] = []
    for leaf in leaves:
        name = leaf.form.name
        if name is not None and leaf.numbers and len(leaf.sources) == 1:
            data = _whole_bytes(leaf.sources[0].data, leaf.form)
            leaf.checksums = (array("Q", [xxhash.xxh3_64_intdigest(data)]),)
            single.append((leaf, name, data))
        else:
            _write_small_chunks(staged, leaf)
    # Written together: a turn to the system and back for each leaf costs the processor's caches.
    for leaf, name, data in single:
        staged.write(leaf.folder, (*leaf.head, (name, (data,), len(data))))
    return sum(leaf.nbytes for leaf in leaves)


def _whole_bytes(data: Any, form: WriteForm) -> bytes:
    """Return the bytes of an array that is one chunk."""
    host = to_host(data)
    if holds_wire_bytes(host.dtype):
        return host.tobytes()
    return b"".join(read_checked(host, form.block, array("Q", bytes(8)), 0, MemoryPool()))


def _write_small_chunks(staged: LeafWriter, leaf: WrittenLeaf) -> None:
    form = leaf.form
    pieces = LeafPieces(form.array, leaf.sources)
    files: list[LeafFile] = list(leaf.head)
    checksums = []
    for number in leaf.numbers:
        data = to_stored(pieces.chunk(number), form.array)
        content = data.tobytes() if form.array.compressor is None else encode(form.array, data)
        checksums.append(block_checksums(memoryview(content)))
        files.append((chunk_name(form.array, number), (content,), len(content)))
    staged.write(leaf.folder, files)
    leaf.checksums = checksums
    if form.array.compressor is not None:
        leaf.sizes = [size for _, _, size in files[len(leaf.head) :]]


def _plan_large(staged: LeafWriter, leaves: Sequence[WrittenLeaf], tally: Tally) -> Work:
    """Return a job for each chunk file, those of the largest leaves first; their ``.zarray`` are written now."""
    work = Work()
    for leaf in leaves:
        if leaf.head:
            staged.write(leaf.folder, leaf.head)
        chunks = _LargeLeaf(staged, leaf, tally)
        work.jobs.extend(functools.partial(chunks.write, place) for place in range(len(leaf.numbers)))
        work.nbytes += leaf.nbytes
    return work


class _LargeLeaf:
    """Writes the chunk files of one leaf, each one when a thread takes it."""

    def __init__(self, staged: LeafWriter, leaf: WrittenLeaf, tally: Tally) -> None:
        self._staged = staged
        self._leaf = leaf
        self._tally = tally
        self._pieces = LeafPieces(leaf.form.array, leaf.sources)  # goes with this, when the last chunk is written
        self._pool = MemoryPool()
        leaf.checksums = self._checksums = [array("Q")] * len(leaf.numbers)
        if leaf.form.array.compressor is not None:
            leaf.sizes = self._sizes = [0] * len(leaf.numbers)

    def write(self, place: int) -> int:
        """Write one chunk file, the one at ``place`` of those that this process writes.

        Returns:
            0: the tally has counted the bytes already.
        """
        leaf, form = self._leaf, self._leaf.form
        number = leaf.numbers[place]
        chunk, name = self._pieces.chunk(number), chunk_name(form.array, number)
        if form.array.compressor is None:
            self._checksums[place] = checksums = array("Q", bytes(8 * block_count(form.chunk, form.block)))
            self._staged.write(leaf.folder, [(name, self._stream(chunk, checksums), form.chunk)])
        else:
            content = encode(form.array, to_stored(chunk, form.array))
            self._sizes[place], self._checksums[place] = len(content), block_checksums(memoryview(content))
            self._staged.write(leaf.folder, [(name, (content,), len(content))])
            self._tally.add(form.chunk)
        return 0

    def _stream(self, chunk: Any, checksums: array[int]) -> Iterator[bytes | memoryview]:
        for piece in read_checked(chunk, self._leaf.form.block, checksums, 0, self._pool):
            yield piece
            self._tally.add(len(piece))


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
