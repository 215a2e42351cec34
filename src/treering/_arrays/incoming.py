"""Stored leaves -> arrays in host memory: each wanted box is read, checked while hot, and nothing more is read.

Three ways lead from a file into an array. A chunk that is one run of one wanted box goes straight into its memory;
neighbouring small chunks share memory; anything else (another mesh, a slice) passes through memory that is let go,
slab by slab. What lies together in a file is read with one call, whichever way it goes.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import xxhash

from treering._arrays.jobs import (
    ALIGNMENT,
    Job,
    Progress,
    Tally,
    Work,
    aligned_bytes,
    aligned_together,
    group_near,
    run_all,
)
from treering._format.index import Index, damage_error
from treering._plan.load import StoredChunk, covering_ranges
from treering._values import boxes as box_sums
from treering._values.boxes import Box
from treering._values.checksums import block_checksums
from treering._values.dtypes import lookup, numpy_dtype
from treering._values.keys import naming_leaf
from treering.errors import FormatError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from numpy.typing import NDArray

_SMALL_BYTES: Final = 64 << 10
# So much memory small arrays share: one that is kept keeps all of it.
_TOGETHER_BYTES: Final = 256 << 10
# Small enough to stay in the processor's cache from the read to the checksum.
_SLAB_BYTES: Final = 2 << 20
# Where each read waits for an answer, which costs as much as the bytes of such a gap.
_FAR_TOGETHER_BYTES: Final = 1 << 20
_FAR_GAP_BYTES: Final = 1 << 20
_FAR_GROUP_BYTES: Final = (8 << 20) + _SLAB_BYTES
_FEW_THREADS: Final = 2
# Arrays of up to so many bytes share an allocation, which comes in large pages. One that is kept keeps all of it.
_ROOM_BYTES: Final = 32 << 20
# So many ways in which leaves lie are remembered: few enough, whatever a hostile file makes of their hashes.
_MOST_ALIKE: Final = 256
# The same of places in chunks: each of a leaf's chunks is another one.
_MOST_PLACES: Final = 1024
# What is only checked is touched once.
_MAPPED_BYTES: Final = 16 << 20


class DataReader(Protocol):
    """What gives the bytes of one data file, as an open ``Reader`` does."""

    def read_into(self, jobs: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer with the bytes from its offset on."""

    def refetch(self, jobs: Sequence[tuple[int, memoryview]]) -> bool:
        """Fill the buffers anew; False where the same bytes would come."""

    def map(self) -> ReadableBuffer:
        """Map the whole file, read-only."""


@dataclasses.dataclass(slots=True)
class ReadRequest:
    """Boxes of one leaf that somebody wants."""

    leaf: int
    """Number of the leaf."""
    boxes: Sequence[Box]
    """Which boxes of it, no two alike."""
    arrays: list[NDArray[Any]] = dataclasses.field(default_factory=list)
    """What ``StoredArrays.read`` brings: one array for each box."""
    steps: Sequence[int] | None = None
    """The stride along each axis of a box; None: every item is wanted."""


@dataclasses.dataclass(slots=True)
class SmallChunks:
    """Leaves that are wanted whole, each of one small chunk, in columns: there may be thousands of them."""

    found: list[Any]
    """Where the array of each goes."""
    places: list[int] = dataclasses.field(default_factory=list)
    """Its place there."""
    chunks: list[int] = dataclasses.field(default_factory=list)
    """Number of its chunk."""

    def give(self, numbers: Sequence[int], arrays: Sequence[NDArray[Any]]) -> None:
        """Take the arrays of some of them, which are known by their numbers in the columns."""
        for number, array in zip(numbers, arrays, strict=True):
            self.found[self.places[number]] = array


_Give: TypeAlias = Callable[[Sequence[int], Sequence["NDArray[Any]"]], None]


def _give(requests: Sequence[ReadRequest], numbers: Sequence[int], arrays: Sequence[NDArray[Any]]) -> None:
    for number, array in zip(numbers, arrays, strict=True):
        requests[number].arrays = [array]


class _Run(NamedTuple):
    """A whole chunk, or a stretch of whole blocks of it, and where its bytes go."""

    chunk: int
    start: int
    into: NDArray[np.uint8]


class _Piece(NamedTuple):
    """Bytes of a file, where they go, and what is done with them there."""

    file: int
    offset: int
    nbytes: int
    into: NDArray[np.uint8] | None
    """None: memory that is let go when it is done."""
    finish: Callable[[memoryview], None]


@dataclasses.dataclass(frozen=True, slots=True)
class _LargeRequest:
    """A request whose arrays get memory of their own, or with a few others."""

    request: ReadRequest
    dtype: np.dtype[Any]
    chunks: Sequence[int]
    whole: bool
    """Whether the chunks are the boxes that are wanted, one by one."""


class StoredArrays:
    """The arrays of one opened checkpoint or safetensors file.

    Args:
        index: what is in it.
        files: its data files, open, in the index's order; None for a lost one.
        headers: called with a file's number before its first read; raises where it is lost, or its header is damaged.
        mapped: take memory from maps of the files where a wanted box lies there in one piece.
        threads: how many threads read faster than fewer.
        checked: which files `check_files` checks; None: all.

    Attributes:
        bytes_read: how many bytes of data files have been read and checked: wanted ones and those in the same blocks.
    """

    def __init__(
        self,
        index: Index,
        files: Sequence[DataReader | None],
        headers: Callable[[int], None],
        *,
        mapped: bool = False,
        threads: int = 2,
        checked: Iterable[int] | None = None,
    ) -> None:
        self.index = index
        self._files = files
        self._headers = headers
        self._mapped = mapped
        self._threads = threads
        far = threads > _FEW_THREADS
        self._together_bytes = _FAR_TOGETHER_BYTES if far else _TOGETHER_BYTES
        self._gap_bytes, self._group_bytes = (_FAR_GAP_BYTES, _FAR_GROUP_BYTES) if far else (0, _SLAB_BYTES)
        self._maps: dict[int, NDArray[np.uint8]] = {}
        self._alike: dict[tuple[object, ...], tuple[StoredChunk, ...]] = {}
        self._unchecked = set(range(len(files)))
        self._checked = range(len(files)) if checked is None else checked
        self.bytes_read = 0
        chunks = index.chunks
        self._first_checksum = chunks.first_blocks() if index.verified else []

    def dtype_of(self, leaf: int) -> np.dtype[Any]:
        """Return the dtype of what is stored of a leaf."""
        return dtype_in(self.index, leaf)

    def stored_chunks(self, leaf: int) -> tuple[StoredChunk, ...]:
        """Return how a stored leaf lies; of leaves that lie alike in one of the first ways, the same object."""
        chunks, some = self.index.chunks, _chunks_of(self.index, leaf)
        boxes, blocks = chunks.box[some.start : some.stop], chunks.block[some.start : some.stop]
        alike = (self.index.leaf_types[leaf], tuple(boxes), tuple(blocks))
        if (known := self._alike.get(alike)) is None:
            known = stored_chunks(self.index, leaf)
            if len(self._alike) < _MOST_ALIKE:
                self._alike[alike] = known
        return known

    def check_files(self) -> None:
        """Check that every data file is there, of its size, with an intact header; its data is checked when it is read.

        Raises:
            CorruptError: one is not.
        """
        for number in self._checked:
            self._check_header(number)

    def read(
        self, requests: Sequence[ReadRequest], progress: Progress | None = None, small: SmallChunks | None = None
    ) -> None:
        """Fill ``arrays`` of every request, and what ``small`` wants.

        Raises:
            CorruptError: bytes do not have their checksums, or are not there.
            StoreError: the system refuses.
        """
        work = self.plan_reads(requests) if small is None else self.plan_reads(requests, small)
        run_all(work, Tally(work.nbytes, progress), threads=self._threads)
        self.bytes_read += work.nbytes

    def plan_reads(self, requests: Sequence[ReadRequest], small: SmallChunks | None = None) -> Work:
        """Return what is to be done to fill ``arrays`` of every request; large ones have their memory already.

        Args:
            requests: boxes of leaves.
            small: other leaves, that are wanted whole.

        Raises:
            CorruptError: a file that it takes is lost, or its header is damaged.
        """
        work = Work()
        single: list[tuple[int, ReadRequest]] = []
        large: list[_LargeRequest] = []
        if small is not None:
            work.nbytes += sum(map(self.index.chunks.nbytes.__getitem__, small.chunks))
            for file in dict.fromkeys(map(self.index.chunks.file.__getitem__, small.chunks)):
                self._check_header(file)
        for request in requests:
            work.nbytes += self._plan(request, work.jobs, single, large)
        allocate_rooms([(one.request, one.dtype) for one in large], self.index.keys)
        pieces = [piece for one in large for piece in self._plan_large(one)]
        work.nbytes += sum(piece.nbytes for piece in pieces)
        if single:
            give = functools.partial(_give, [request for _, request in single])
            pieces += self._together([chunk for chunk, _ in single], give)
        if small is not None:
            pieces += self._together(small.chunks, small.give)
        groups = group_near(pieces, gap=self._gap_bytes, most=self._group_bytes)
        work.jobs.extend(functools.partial(self._fill, group) for group in groups)
        return work

    def _plan(
        self, request: ReadRequest, jobs: deque[Job], single: list[tuple[int, ReadRequest]], large: list[_LargeRequest]
    ) -> int:
        """Plan the reads of one request, or note that it is one small chunk, or large; return the bytes planned."""
        columns = self.index.chunks
        every = _chunks_of(self.index, request.leaf)
        chunks: Sequence[int] = every
        whole = False
        if request.steps is None:
            stored = {self.index.box_of(chunk): chunk for chunk in every}
            if whole := stored.keys() >= set(request.boxes):
                # Chunks do not overlap: of the others nothing is wanted.
                chunks = [stored[box] for box in request.boxes]
        if self._unchecked:
            for chunk in chunks:
                self._check_header(columns.file[chunk])
        if whole and len(every) == 1 and columns.nbytes[chunks[0]] <= _SMALL_BYTES:
            single.append((chunks[0], request))
            return columns.nbytes[chunks[0]]
        dtype = self.dtype_of(request.leaf)
        if self._mapped and whole and box_sums.size_of(request.boxes[0]) > 0:
            request.arrays = [self._view(chunk, dtype) for chunk in chunks]
            runs = [_Run(chunk, 0, _bytes_of(a)) for chunk, a in zip(chunks, request.arrays, strict=True)]
            jobs.extend(functools.partial(self._check_only, run) for run in self._split(runs, _MAPPED_BYTES))
            return sum(len(run.into) for run in runs)
        large.append(_LargeRequest(request, dtype, chunks, whole))
        return 0

    def _plan_large(self, large: _LargeRequest) -> Iterator[_Piece]:
        """Yield what is read for a request whose arrays have their memory."""
        if large.whole and (together := self._side_by_side(large)) is not None:
            yield together
            return
        request, columns = large.request, self.index.chunks
        straight: Iterable[_Run | None]
        if large.whole:
            straight = [_Run(chunk, 0, _bytes_of(a)) for chunk, a in zip(large.chunks, request.arrays, strict=True)]
        else:
            straight = (self._straight(chunk, request) for chunk in large.chunks)
        for chunk, whole in zip(large.chunks, straight, strict=True):
            file, offset = columns.file[chunk], columns.offset[chunk]
            for run in () if whole is None else self._split([whole], _SLAB_BYTES):
                check = functools.partial(self._check, chunk, run.start)
                yield _Piece(file, offset + run.start, len(run.into), run.into, check)
            for start, stop in self._slabs(chunk, request, large.dtype.itemsize) if whole is None else ():
                share_out = functools.partial(self._share_out, chunk, start, request, large.dtype)
                yield _Piece(file, offset + start, stop - start, None, share_out)

    def _side_by_side(self, large: _LargeRequest) -> _Piece | None:
        """Return the small chunks of a request as one piece, if they lie in the file as their arrays do in memory."""
        columns, chunks, arrays = self.index.chunks, large.chunks, large.request.arrays
        sizes = [array.nbytes for array in arrays]
        if len(chunks) == 1 or sum(sizes) > _TOGETHER_BYTES or any(size % ALIGNMENT for size in sizes[:-1]):
            return None  # memory between them, if they are no multiples
        file, start = columns.file[chunks[0]], columns.offset[chunks[0]]
        *offsets, end = itertools.accumulate(sizes, initial=start)
        if any(columns.file[chunk] != file for chunk in chunks) or [columns.offset[one] for one in chunks] != offsets:
            return None
        if (room := arrays[0].base) is None:
            raise AssertionError("arrays of a request lie in memory of many")
        at = arrays[0].ctypes.data - room.ctypes.data
        check = functools.partial(self._check_each, chunks, sizes)
        return _Piece(file, start, end - start, room[at : at + end - start], check)

    def _check_each(self, chunks: Sequence[int], sizes: Sequence[int], data: memoryview) -> None:
        """Compare chunks that lie side by side with their checksums."""
        for chunk, size, end in zip(chunks, sizes, itertools.accumulate(sizes), strict=True):
            self._check(chunk, 0, data[end - size : end])

    def _fill(self, group: Sequence[_Piece]) -> int:
        """Read neighbouring pieces with one call."""
        sizes = [-(-piece.nbytes // ALIGNMENT) * ALIGNMENT if piece.into is None else 0 for piece in group]
        room = aligned_bytes(sum(sizes)).data if any(sizes) else memoryview(b"")
        parts: list[memoryview] = []
        for piece, end, size in zip(group, itertools.accumulate(sizes), sizes, strict=True):
            start = end - size
            parts.append(room[start : start + piece.nbytes] if piece.into is None else piece.into.data)
        self._file(group[0].file).read_into([(piece.offset, data) for piece, data in zip(group, parts, strict=True)])
        for piece, data in zip(group, parts, strict=True):
            piece.finish(data)
        return sum(piece.nbytes for piece in group)

    # ------------------------------------------------------------------------------------------------ straight ways

    def _straight(self, chunk: int, request: ReadRequest) -> _Run | None:
        """Return the run that a whole chunk fills in the one box that wants any of it, if there is such a run."""
        if request.steps is not None:
            return None
        box = self.index.box_of(chunk)
        wanted = _boxes_that_want(box, tuple(request.boxes), None)
        if len(wanted) != 1:
            return None
        target = request.boxes[wanted[0]]
        if not box_sums.contains(target, box):
            return None
        if (run := box_sums.flat_range(box_sums.relative(box, target), box_sums.shape_of(target))) is None:
            return None
        array = request.arrays[wanted[0]]
        raw = _bytes_of(array)
        return _Run(chunk, 0, raw[run[0] * array.itemsize : run[1] * array.itemsize])

    def _split(self, runs: Iterable[_Run], nbytes: int) -> Iterator[_Run]:
        """Cut runs into stretches of whole blocks, of ``nbytes`` or a block each."""
        for run in runs:
            step = max(nbytes, self.index.chunks.block[run.chunk])
            for start in range(0, len(run.into), step):
                yield _Run(run.chunk, start, run.into[start : start + step])

    def _check_only(self, run: _Run) -> int:
        self._check(run.chunk, run.start, run.into.data)
        return len(run.into)

    def _check(self, chunk: int, start: int, data: memoryview) -> None:
        """Compare blocks of a chunk, from byte ``start`` of it on, with their checksums."""
        if not self.index.verified:
            return
        columns = self.index.chunks
        block = columns.block[chunk]
        found = block_checksums(data, block)
        first = self._first_checksum[chunk] + start // block
        wanted = self.index.checksums[first : first + len(found)]
        if found != wanted and not data.readonly:
            file = self._file(columns.file[chunk])
            found = block_checksums(data, block) if file.refetch([(columns.offset[chunk] + start, data)]) else found
        if found != wanted:
            number = next(n for n, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)
            raise damage_error(self.index, chunk, start // block + number, found[number])

    # ---------------------------------------------------------------------------------------------- small ones together

    def small_chunks(self, leaves: Sequence[int]) -> list[int]:
        """Return for each leaf the chunk that is all of it, where it is one small chunk; -1 for others."""
        return list(map(self._small_chunk_of.__getitem__, leaves))

    @functools.cached_property
    def _small_chunk_of(self) -> list[int]:
        columns = self.index.chunks
        leaf, nbytes = np.asarray(columns.leaf, np.int64), np.asarray(columns.nbytes, np.int64)
        nexts = np.append(leaf[1:] != leaf[:-1], True)
        alone = nexts & np.append(True, nexts[:-1]) & (nbytes <= _SMALL_BYTES)
        alone &= [box is None for box in columns.box]
        found = np.full(len(self.index.keys), -1)
        found[leaf[alone]] = np.flatnonzero(alone)
        return found.tolist()

    def _together(self, chunks: Sequence[int], give: _Give) -> Iterator[_Piece]:
        """Give small chunks that are neighbours in a file memory that they share."""
        columns = self.index.chunks
        if len(chunks) == 1:
            yield self._piece_of_small([0], columns.nbytes[chunks[0]], chunks, give)
            return
        files, offsets, sizes = (
            [column[chunk] for chunk in chunks] for column in (columns.file, columns.offset, columns.nbytes)
        )
        # Of chunks that start at one place those without bytes come first: none of them is a gap.
        order = sorted(range(len(chunks)), key=sizes.__getitem__)
        order.sort(key=offsets.__getitem__)
        order.sort(key=files.__getitem__)
        group: list[int] = []
        here = begin = end = 0
        for number in order:
            offset, nbytes = offsets[number], sizes[number]
            if group and (offset != end or files[number] != here or end + nbytes - begin > self._together_bytes):
                yield self._piece_of_small(group, end - begin, chunks, give)
                group = []
            if not group:
                here, begin = files[number], offset
            group.append(number)
            end = offset + nbytes
        if group:
            yield self._piece_of_small(group, end - begin, chunks, give)

    def _piece_of_small(self, group: list[int], nbytes: int, chunks: Sequence[int], give: _Give) -> _Piece:
        columns, first = self.index.chunks, chunks[group[0]]
        share = functools.partial(self._share_memory, group, chunks, give)
        return _Piece(columns.file[first], columns.offset[first], nbytes, aligned_bytes(nbytes), share)

    def _share_memory(self, group: list[int], chunks: Sequence[int], give: _Give, data: memoryview) -> None:
        """Check small chunks that lie side by side in memory, and give their arrays."""
        index, columns = self.index, self.index.chunks
        some = [chunks[number] for number in group]
        begin = columns.offset[some[0]]
        at = [columns.offset[chunk] - begin for chunk in some]
        at.append(len(data))
        if len(some) == 1:
            self._check(some[0], 0, data)
        elif index.verified:
            wanted = [index.checksums[self._first_checksum[chunk]] if columns.nbytes[chunk] else None for chunk in some]
            found = [xxhash.xxh3_64_intdigest(data[a:b]) if b > a else None for a, b in itertools.pairwise(at)]
            if found != wanted:
                for chunk, (a, b) in zip(some, itertools.pairwise(at), strict=True):
                    self._check(chunk, 0, data[a:b])
        arrays: list[NDArray[Any]] = []
        dtypes: dict[int, np.dtype[Any]] = {}
        for number, alike in itertools.groupby([index.leaf_types[columns.leaf[chunk]] for chunk in some]):
            count, shape = len(list(alike)), index.types[number].shape or ()
            if (dtype := dtypes.get(number)) is None:
                dtype = dtypes[number] = self.dtype_of(columns.leaf[some[len(arrays)]])
            if count == 1 or not shape:
                arrays += [np.ndarray(shape, dtype, data, start) for start in at[len(arrays) : len(arrays) + count]]
            else:  # as rows of one array, which is faster than one by one
                arrays += list(np.ndarray((count, *shape), dtype, data, at[len(arrays)]))
        give(group, arrays)

    # ------------------------------------------------------------------------------------------------- slab by slab

    def _slabs(self, chunk: int, request: ReadRequest, itemsize: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of bytes of a chunk: whole blocks that hold wanted items, a few at a time."""
        box, block = self.index.box_of(chunk), self.index.chunks.block[chunk]
        nbytes, step = box_sums.size_of(box) * itemsize, max(_SLAB_BYTES, block)
        steps = None if request.steps is None else tuple(request.steps)
        wanted = [request.boxes[number] for number in _boxes_that_want(box, tuple(request.boxes), steps)]
        one_block = [(0, nbytes)] if wanted and nbytes <= block else None
        for start, stop in one_block or covering_ranges(box, wanted, itemsize, block, steps):
            for at in range(start, stop, step):
                yield at, min(at + step, stop)

    def _share_out(self, chunk: int, start: int, request: ReadRequest, dtype: np.dtype[Any], data: memoryview) -> None:
        self._check(chunk, start, data)
        _scatter(np.frombuffer(data, dtype), start // dtype.itemsize, self.index.box_of(chunk), request)

    # --------------------------------------------------------------------------------------------------------- maps

    def _view(self, chunk: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        columns = self.index.chunks
        if (file := columns.file[chunk]) not in self._maps:
            self._maps[file] = np.frombuffer(self._file(file).map(), np.uint8)
        shape = box_sums.shape_of(self.index.box_of(chunk))
        return np.ndarray(shape, dtype, self._maps[file].data, columns.offset[chunk])

    def _file(self, number: int) -> DataReader:
        if (file := self._files[number]) is None:
            raise AssertionError("a file is asked for before anything is read from it")
        return file

    def _check_header(self, file: int) -> None:
        if file in self._unchecked:
            self._headers(file)
            self._unchecked.discard(file)


def allocate_rooms(wanted: Sequence[tuple[ReadRequest, np.dtype[Any]]], keys: Sequence[str]) -> None:
    """Give the arrays of requests their memory, those of neighbours in one allocation; ``keys`` are those of leaves."""
    rooms: list[list[tuple[ReadRequest, list[tuple[tuple[int, ...], np.dtype[Any]]]]]] = [[]]
    held = 0
    for request, dtype in wanted:
        arrays = [(box_sums.picked_shape(box, request.steps), dtype) for box in request.boxes]
        nbytes = sum([math.prod(shape) for shape, _ in arrays]) * dtype.itemsize
        if rooms[-1] and held + nbytes > _ROOM_BYTES:
            rooms.append([])
            held = 0
        rooms[-1].append((request, arrays))
        held += nbytes
    for room in filter(None, rooms):
        with naming_leaf(keys[room[0][0].leaf]):
            made = iter(aligned_together([one for _, arrays in room for one in arrays]))
        for request, _ in room:
            request.arrays = list(itertools.islice(made, len(request.boxes)))


def dtype_in(index: Index, leaf: int) -> np.dtype[Any]:
    """Return the dtype of what is stored of a leaf."""
    if (known := lookup(index.type_of(leaf).dtype or "")) is None:
        raise FormatError(f"unknown dtype {index.type_of(leaf).dtype}")
    return numpy_dtype(known)


def stored_chunks(index: Index, leaf: int) -> tuple[StoredChunk, ...]:
    """Return how a leaf lies whose chunks have rows in an index."""
    block = index.chunks.block
    return tuple(StoredChunk(box=index.box_of(chunk), block=block[chunk]) for chunk in _chunks_of(index, leaf))


def _chunks_of(index: Index, leaf: int) -> range:
    """Return the numbers of a leaf's chunks: they follow each other, in the order of the leaves."""
    column = index.chunks.leaf
    first = bisect.bisect_left(column, leaf)
    return range(first, bisect.bisect_right(column, leaf, first))


def _scatter(items: NDArray[Any], first: int, chunk_box: Box, request: ReadRequest) -> None:
    """Copy a run of a chunk's items, the first of which has this flat number, to every box that wants some of them."""
    steps = None if request.steps is None else tuple(request.steps)
    for at, shape, number, target, source in _ways_of(chunk_box, first, len(items), tuple(request.boxes), steps):
        part = items[at : at + math.prod(shape)].reshape(shape)
        request.arrays[number][target] = part[source]


# Of leaves that are alike these are the same, and take longer to find than to use.
@functools.lru_cache(maxsize=_MOST_PLACES)
def _ways_of(
    chunk_box: Box, first: int, count: int, boxes: tuple[Box, ...], steps: tuple[int, ...] | None
) -> list[tuple[int, tuple[int, ...], int, tuple[slice, ...], tuple[slice, ...]]]:
    """Return for a run of a chunk's items where parts of it begin, their shapes, who wants of them, where, and what."""
    corner = [start for start, _ in chunk_box]
    ways = []
    at = 0
    for part in box_sums.boxes_of_range(box_sums.shape_of(chunk_box), first, first + count):
        place = tuple((a + c, b + c) for (a, b), c in zip(part, corner, strict=True))
        overlaps = [(number, box_sums.pick_overlap(place, box, steps)) for number, box in enumerate(boxes)]
        shape = box_sums.shape_of(part)
        ways += [(at, shape, number, box_sums.slices(one[0]), one[1]) for number, one in overlaps if one is not None]
        at += math.prod(shape)
    return ways


@functools.lru_cache(maxsize=_MOST_PLACES)
def _boxes_that_want(place: Box, boxes: tuple[Box, ...], steps: tuple[int, ...] | None) -> list[int]:
    """Return the numbers of those boxes of which some items that are picked lie in a place."""
    found = (box_sums.pick_overlap(place, box, steps) for box in boxes)
    return [number for number, overlap in enumerate(found) if overlap is not None]


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)
