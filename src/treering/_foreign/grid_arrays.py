"""Arrays of foreign formats: those that lie raw in files go the way of our own, the others are decoded by chunk."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from treering._arrays.chunk_grid import find_chunks, plan_decoding, view_as_stored
from treering._arrays.incoming import DataReader, ReadRequest, StoredArrays, allocate_rooms, dtype_in, stored_chunks
from treering._arrays.jobs import Job, Tally, Work, group_near, run_all, split_by_bytes
from treering._arrays.source import Source
from treering._checkpoint.detect import ForeignForm
from treering._codec.zarr import ZarrArray, chunk_box, chunk_count
from treering._codec.zarr_chunks import decode
from treering._foreign.foreign_tree import ByteRange, ForeignLeaf, ForeignTree, compare_hashes, open_tree
from treering._format.findings import Finding, Verification
from treering._format.index import leaf_bytes
from treering._plan.load import StoredChunk
from treering._printable import show_path
from treering._store.api import Reader
from treering._store.open_folder import OpenedFiles
from treering._values.boxes import Box, find_cover_error, intersection, relative, shape_of, size_of, slices, whole
from treering._values.checksums import require_crc
from treering._values.human import pluralize
from treering._values.keys import join_key, naming_leaf
from treering._view.progress import Progress
from treering.errors import CorruptError, UnsupportedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from treering._format.index import Index

_MOST_CHUNKS: Final = 1 << 20
_FEW_THREADS: Final = 2
# Chunks up to this size are decoded faster by one thread than by two.
_SMALL_BYTES: Final = 64 << 10
# Where each read waits for an answer.
_FAR_WINDOW: Final = 8 << 20
_FAR_GAP: Final = 1 << 20
_CRC_BYTES: Final = 4 << 20
# About so many bytes of arrays are checked at once.
_TOGETHER: Final = 32 << 20


class _Encoded(NamedTuple):
    """Bytes of a file that are a chunk, and the job that decodes them."""

    file: int
    offset: int
    nbytes: int
    found: ByteRange
    place: tuple[int, int]
    """Leaf and chunk."""
    decoded: int
    """What the job counts."""
    job: Job


class ForeignArrays:
    """Gives boxes of leaves; the index has rows for those that lie raw in files, the others have a grid.

    Args:
        index: what is in it.
        files: the data files of the index, open.
        leaves: those of the index. The checksum of one is compared when anything of it is read, unless it is mapped.
        mapped: take memory from maps of the files where a wanted box lies there in one piece.
        threads: how many threads read faster than fewer.
    """

    def __init__(
        self,
        index: Index,
        files: Sequence[DataReader | None],
        leaves: Sequence[ForeignLeaf],
        *,
        mapped: bool,
        threads: int,
    ) -> None:
        given = [] if mapped else leaves
        self._crcs = {number: leaf.crc for number, leaf in enumerate(given) if leaf.crc is not None}
        self._grids = {number: leaf.grid for number, leaf in enumerate(leaves) if leaf.grid is not None}
        self._files = files
        self._compared: set[int] = set()
        self._comparing = threading.Lock()
        self._index = index
        self._threads = threads
        self._is_far = threads > _FEW_THREADS
        self._fetched: dict[tuple[int, int], bytes] = {}
        self._stored = StoredArrays(index, files, lambda _: None, mapped=mapped, threads=threads)

    def check_files(self) -> None:
        """Do nothing: their headers were read when they were opened."""

    def dtype_of(self, leaf: int) -> np.dtype[Any]:
        """Return the dtype of what is stored of a leaf."""
        return dtype_in(self._index, leaf)

    def stored_chunks(self, leaf: int) -> tuple[StoredChunk, ...]:
        """Return how a leaf lies; a chunk that has to be decoded is one block, since it is read whole."""
        if leaf not in self._grids:
            return stored_chunks(self._index, leaf)
        layout, itemsize = self._layout(leaf), self.dtype_of(leaf).itemsize
        boxes = [chunk_box(layout, chunk) for chunk in range(chunk_count(layout))]
        return tuple([StoredChunk(box=box, block=max(1, size_of(box) * itemsize)) for box in boxes])

    def read(self, requests: Sequence[ReadRequest], progress: Progress | None = None) -> None:
        """Fill ``arrays`` of every request.

        Raises:
            CorruptError: a chunk is missing, or its bytes are none.
            StoreError: the store refuses.
        """
        raw = [request for request in requests if request.leaf not in self._grids]
        work, own = self._stored.plan_reads(raw) if raw else Work(), Work()
        jobs: list[tuple[int, Job]] = []
        near: list[_Encoded] = []
        files: dict[str | None, int] = {}
        encoded = [(request, self.dtype_of(request.leaf)) for request in requests if request.leaf in self._grids]
        # One box shares an allocation with others only where it is large: a small one would keep too much.
        alone = [(request, dtype) for request, dtype in encoded if len(request.boxes) == 1]
        if large := [(one, dtype) for one, dtype in alone if size_of(one.boxes[0]) * dtype.itemsize > _SMALL_BYTES]:
            allocate_rooms(large, self._index.keys)
        for request, dtype in encoded:
            layout, read = self._layout(request.leaf), functools.partial(self._fill, request.leaf)
            covering, grid = find_chunks(layout, request), self._grids[request.leaf]
            planned = plan_decoding(layout, request, covering, dtype, read)
            if not (self._is_far and grid.located):
                jobs += planned
                continue
            with naming_leaf(self._index.keys[request.leaf]):
                for chunk, pair in zip(covering, planned, strict=True):
                    found = grid.fetch(chunk)
                    if isinstance(found, ByteRange) and found.size <= _FAR_WINDOW:
                        number = files.setdefault(found.file, len(files))
                        near.append(_Encoded(number, found.offset, found.size, found, (request.leaf, chunk), *pair))
                    else:
                        jobs.append(pair)
        for group in group_near(near, gap=_FAR_GAP, most=_FAR_WINDOW):
            work.jobs.append(functools.partial(self._decode_group, group))
            work.nbytes += sum(piece.decoded for piece in group)
        jobs.sort(key=lambda pair: -pair[0])  # the longest first, so that two threads end together
        for nbytes, job in jobs:
            here = work if self._is_far or nbytes > _SMALL_BYTES else own
            here.jobs.append(job)
            here.nbytes += nbytes
        run_all(work, Tally(work.nbytes + own.nbytes, progress), own, threads=self._threads)
        for request in raw:
            if request.leaf in self._crcs:
                self._compare(request, *self._crcs[request.leaf])

    def _compare(self, request: ReadRequest, before: int, wanted: int) -> None:
        """Compare a leaf with its checksum, by what was read if that is all of it, else by another read of it, once."""
        with self._comparing:
            if request.leaf in self._compared:
                return
            shape = self._index.type_of(request.leaf).shape or ()
            if request.steps is not None or find_cover_error(shape, request.boxes) is not None:
                crc = self._crc_of(request.leaf, before)
            else:
                crc = _crc_of_boxes(request, whole(shape), before)
            with naming_leaf(self._index.keys[request.leaf]):
                require_crc(crc, wanted, "the array")
            self._compared.add(request.leaf)

    def _crc_of(self, leaf: int, crc: int) -> int:
        """Return what a CRC-32 becomes with the bytes of a leaf that lies in one piece."""
        chunks = self._index.chunks
        row = chunks.leaf.index(leaf)
        start = chunks.offset[row]
        if (file := self._files[chunks.file[row]]) is None:
            return crc
        window = memoryview(bytearray(min(_FAR_WINDOW, chunks.nbytes[row])))
        for at in range(start, start + chunks.nbytes[row], _FAR_WINDOW):
            data = window[: start + chunks.nbytes[row] - at]
            file.read_into([(at, data)])
            crc = zlib.crc32(data, crc)
        return crc

    def _layout(self, leaf: int) -> ZarrArray:
        layout = self._grids[leaf].layout
        if layout.chunks != layout.shape and (count := chunk_count(layout)) > _MOST_CHUNKS:
            with naming_leaf(self._index.keys[leaf]):
                what = f"it lies in {pluralize(count, 'chunks')}, more than {_MOST_CHUNKS}"
                raise UnsupportedError(what, hint="write larger chunks")
        return layout

    def _decode_group(self, group: Sequence[_Encoded]) -> int:
        """Read the bytes of chunks that are near each other with one call, and decode them."""
        first, last = group[0], group[-1]
        data = first.found.read(0, last.offset + last.nbytes - first.offset)
        for piece in group:
            start = piece.offset - first.offset
            self._fetched[piece.place] = data[start : start + piece.nbytes]
        return sum(piece.job() for piece in group)

    def _fill(self, leaf: int, chunk: int, into: NDArray[Any]) -> None:
        grid = self._grids[leaf]
        with naming_leaf(self._index.keys[leaf]):
            found = self._fetched.pop((leaf, chunk), None) or grid.fetch(chunk)
            if found is not None:
                data = _Sequence(found, _FAR_WINDOW if self._is_far else 0)
                decode(grid.layout, data.read, data.size, view_as_stored(grid.layout, into))
            elif grid.absent_is_zero:
                into[...] = np.zeros((), into.dtype)
            else:
                hint = "use another copy; the others can be read with only="
                raise CorruptError(f"chunk {chunk} of {chunk_count(grid.layout)} is missing", hint=hint)


class _Sequence:
    """The bytes of a chunk from its beginning on; those that lie in a file are read as they are wanted."""

    def __init__(self, found: bytes | ByteRange, window: int) -> None:
        self._found = found
        self._window = window
        self._held, self._at, self._next = (found, 0, len(found)) if isinstance(found, bytes) else (b"", 0, 0)
        self.size = len(found) if isinstance(found, bytes) else found.size

    def read(self, count: int) -> bytes:
        """Return the next bytes, of which there are so many."""
        if self._at + count > len(self._held) and isinstance(self._found, ByteRange):
            rest = self._held[self._at :]
            more = min(max(count - len(rest), self._window), self.size - self._next)
            self._held, self._at = rest + self._found.read(self._next, more), 0
            self._next += more
        self._at += count
        return self._held[self._at - count : self._at]


def _crc_of_boxes(request: ReadRequest, sides: Box, crc: int) -> int:
    """Return what a CRC-32 becomes with the bytes of a leaf that was read in boxes; a few rows are put together."""
    row = size_of(sides[1:]) * request.arrays[0].itemsize if request.arrays else 0
    step, rows = max(1, _CRC_BYTES // max(1, row)), sides[0][1] if sides else 1
    for start in range(0, rows, step):
        slab = ((start, min(start + step, rows)), *sides[1:]) if sides else ()
        data = np.empty(shape_of(slab), request.arrays[0].dtype)
        for box, array in zip(request.boxes, request.arrays, strict=True):
            if (cut := intersection(box, slab)) is not None:
                data[slices(relative(cut, slab))] = array[slices(relative(cut, box))]
        crc = zlib.crc32(data.reshape(-1).view(np.uint8), crc)
    return crc


def open_source(
    form: ForeignForm, path: str | os.PathLike[str], files: contextlib.ExitStack, *, mapped: bool
) -> Source:
    """Open a foreign tree to read leaves; raises as `open_tree` does."""
    return make_source(open_tree(form, path, files), mapped=mapped)


def make_source(tree: ForeignTree, *, mapped: bool) -> Source:
    """Return a foreign tree to read leaves of."""
    arrays = ForeignArrays(tree.index, tree.files, tree.leaves, mapped=mapped, threads=tree.threads)
    opened = tree.opened or OpenedFiles(*(file for file in tree.files if isinstance(file, Reader)))
    return Source(tree.index, arrays, structured=tree.structured, raw_keys=True, mapped=mapped, opened=opened)


def verify_tree(form: ForeignForm, path: str | os.PathLike[str], progress: Progress | None) -> Verification:
    """Read every array of a foreign tree: damage that can be seen is a finding. Raises as `open_tree` does."""
    shown = os.fspath(path)
    findings: list[Finding] = []
    done = 0
    with contextlib.ExitStack() as files:
        try:
            tree = open_tree(form, path, files)
            source = make_source(tree, mapped=False)
        except CorruptError as error:
            key = join_key(error.path) if error.path else None
            problem = f"is damaged: {str(error).removeprefix(f'{show_path(shown)!r}: ')}"
            finding = Finding(key=key, file=shown, start=error.offset, stop=None, problem=problem)
            return Verification(path=shown, findings=(finding,), leaves=0, nbytes=0, checked=True)
        index = source.index
        stored = index.stored_leaves()
        for some, nbytes in split_by_bytes(stored, lambda leaf: leaf_bytes(index.type_of(leaf)), _TOGETHER):
            findings.extend(_read_together(source, some, shown))
            done += nbytes
            if progress is not None:
                progress(done, done)
        hashed = compare_hashes(tree.files, findings)
    found, leaves, checked = tuple(findings), len(index.keys), index.verified
    nbytes, note = (done, None) if checked else (0, "; ".join((hashed or tree.checks, *tree.notes)))
    return Verification(path=shown, findings=found, leaves=leaves, nbytes=nbytes, checked=checked, note=note)


def _read_together(source: Source, leaves: Sequence[int], shown: str) -> Iterator[Finding]:
    """Read some leaves, those of a damaged group once more by themselves; yield what is wrong with which."""
    try:
        source.arrays.read([ReadRequest(leaf, [whole(source.index.type_of(leaf).shape or ())]) for leaf in leaves])
    except CorruptError as error:
        if len(leaves) == 1:
            key, problem = source.index.keys[leaves[0]], f"is damaged: {error}"
            yield Finding(key=key, file=shown, start=None, stop=None, problem=problem)
        for leaf in leaves if len(leaves) > 1 else ():
            yield from _read_together(source, [leaf], shown)
