"""A leaves directory as a source of leaves: one of its branches, or all of them as one tree. No jax."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import io
import itertools
import math
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from treering._arrays.chunk_grid import find_chunks, plan_decoding, view_as_stored
from treering._arrays.incoming import ReadRequest, StoredArrays, dtype_in, stored_chunks
from treering._arrays.jobs import ALIGNMENT, Job, Progress, Tally, Work, aligned_bytes, run_all, split_by_bytes
from treering._arrays.source import Source
from treering._codec.zarr import ZarrArray, chunk_box, chunk_bytes, chunk_count, chunk_name, zarray_bytes
from treering._codec.zarr_chunks import decode
from treering._format.index import Chunks, Index
from treering._leaves.branches import ALL, Prefix, is_unchanged, read_branches
from treering._leaves.chunks.files import BranchFiles, ChunkFile, OpenChunks, SmallFile, name_leaf
from treering._leaves.documents.index import IndexBranch
from treering._leaves.documents.join import LazySequence, add_structure, join_records
from treering._leaves.documents.record import OpenBranch
from treering._plan.load import StoredChunk
from treering._store.api import Reader, Version
from treering._store.leaves_api import OpenLeaves
from treering._store.resolve import absolute, open_leaves, opened_store
from treering._values.boxes import picked_shape, size_of, whole
from treering._values.checksums import block_bytes, block_checksums
from treering._values.keys import naming_leaf
from treering.errors import CorruptError

if TYPE_CHECKING:
    from numpy.typing import NDArray


_SMALL_BYTES: Final = 64 << 10
# Small leaves of one job share their memory; what is kept of one of them keeps this much.
_TOGETHER_BYTES: Final = 256 << 10
# Of a compressed file.
_HEADERS: Final = 4 << 10
# Before so much memory is taken, the files that shall fill it are looked at.
_CAREFUL_BYTES: Final = 4 << 20


def _describe_small(zarr: ZarrArray) -> SmallFile | None:
    """Describe the file of leaves of a layout, where each of them is one small chunk."""
    nbytes = chunk_bytes(zarr)
    name = chunk_name(zarr, 0) if zarr.chunks == zarr.shape and nbytes <= _SMALL_BYTES else "/"
    if "/" in name:
        return None
    # What no compressor makes smaller it makes a little larger.
    most = nbytes if zarr.compressor is None else 2 * nbytes + _HEADERS
    return SmallFile(zarray_bytes(zarr), name, nbytes, zarr.compressor is None, most, whole(zarr.shape))


class BranchArrays:
    """Plans the reading of leaves of one branch.

    Args:
        index: of the whole directory.
        leaves: numbers of the branch's stored leaves in it.
        files: their files.
        held: keeps files open between the parts of a reading.
        mapped: take memory from maps of files where that can be.
    """

    def __init__(
        self, index: Index, leaves: Sequence[int], files: BranchFiles, held: OpenChunks, *, mapped: bool
    ) -> None:
        self.leaves = leaves
        self._index = index
        self._files = files
        self._held = held
        self._mapped = mapped
        self._places = {leaf: place for place, leaf in enumerate(leaves)}
        self._small: dict[int, SmallFile | None] = {}
        self._dtypes: dict[int, np.dtype[Any]] = {}

    def stored_chunks(self, leaf: int) -> tuple[StoredChunk, ...]:
        """Return how a leaf lies; a chunk that has to be undone is one block, since it is read whole."""
        if self._has_rows(leaf):
            return stored_chunks(self._index, leaf)
        zarr = self._files.branch.arrays[self._places[leaf]]
        # An array that claims more chunks than its folder has names is refused before anybody counts them.
        self._files.require_names(self._places[leaf])
        boxes = (chunk_box(zarr, chunk) for chunk in range(chunk_count(zarr)))
        itemsize = self._dtype(leaf).itemsize
        return tuple(StoredChunk(box=box, block=max(1, size_of(box) * itemsize)) for box in boxes)

    def plan(self, requests: Sequence[ReadRequest], own: Work, shared: Work) -> None:
        """Add what is to be done for the requests: reading small leaves to ``own``, the rest to ``shared``.

        Raises:
            CorruptError: a ``.zarray``, or a large file, is missing or not the one that was saved.
        """
        small: list[tuple[int, SmallFile, ReadRequest]] = []
        as_they_lie: list[ReadRequest] = []
        packed: list[tuple[int, Job]] = []
        arrays = self._files.branch.arrays
        for request in requests:
            place = self._places[request.leaf]
            layout = id(arrays[place])  # thousands of leaves share a few layouts
            if layout not in self._small:
                self._small[layout] = _describe_small(arrays[place])
            file = self._small[layout]
            if file is not None and list(request.boxes) == [file.box] and request.steps is None:
                small.append((place, file, request))
                own.nbytes += file.nbytes
                continue
            self._files.require_described(place)
            self._files.require_names(place)
            covering = find_chunks(arrays[place], request)
            rows = self._has_rows(request.leaf)
            self._require_there(place, request, covering, keep=rows)
            if rows:
                as_they_lie.append(request)
            else:
                with naming_leaf(self._files.keys[place]):
                    read = functools.partial(read_chunk, self._files, place)
                    packed += plan_decoding(arrays[place], request, covering, self._dtype(request.leaf), read)
        for group, held in split_by_bytes(small, lambda one: _aligned(one[1].nbytes), _TOGETHER_BYTES):
            own.jobs.append(functools.partial(self._fill_small, group, held))
        packed.sort(key=lambda pair: -pair[0])  # the longest first, so that two threads end together
        shared.jobs.extend(job for _, job in packed)
        shared.nbytes += sum(nbytes for nbytes, _ in packed)
        if as_they_lie:
            work = self._stored.plan_reads(as_they_lie)
            shared.jobs.extend(work.jobs)
            shared.nbytes += work.nbytes

    def _dtype(self, leaf: int) -> np.dtype[Any]:
        number = self._index.leaf_types[leaf]
        dtype = self._dtypes.get(number)
        if dtype is None:
            dtype = self._dtypes[number] = dtype_in(self._index, leaf)
        return dtype

    def _require_there(self, place: int, request: ReadRequest, covering: dict[int, list[int]], *, keep: bool) -> None:
        """Look at the files that a request takes before memory is taken for it: sizes in documents may be any."""
        items = sum(math.prod(picked_shape(box, request.steps)) for box in request.boxes)
        nbytes = items * self._dtype(request.leaf).itemsize
        if nbytes < _CAREFUL_BYTES and self._files.branch.verified:
            return
        for chunk in covering:
            if keep:
                with ChunkFile(files=self._files, held=self._held, place=place, chunk=chunk).using():
                    pass
            else:
                self._files.open_chunk(place, chunk).close()

    # ---------------------------------------------------------------------------------------------------------- small

    def _fill_small(self, group: Sequence[tuple[int, SmallFile, ReadRequest]], held: int) -> int:
        arrays = self._files.branch.arrays
        contents = self._files.small_contents([(place, small) for place, small, _ in group])
        room = aligned_bytes(held).data
        at = 0
        for (place, small, request), data in zip(group, contents, strict=True):
            zarr = arrays[place]
            array = np.ndarray(zarr.shape, self._dtype(request.leaf), room, at)
            if data is None:
                self._files.require_described(place)
                read_chunk(self._files, place, 0, array)
            elif zarr.plain and len(data) == small.nbytes:
                room[at : at + small.nbytes] = data
            else:
                with name_leaf(self._files.keys[place], self._files.shown_chunk(place, 0)):
                    decode(zarr, io.BytesIO(data).read, len(data), view_as_stored(zarr, array))
            request.arrays = [array]
            at = _aligned(at + small.nbytes)
        return sum(small.nbytes for _, small, _ in group)

    # --------------------------------------------------------------------------------------------- as they lie in files

    def _has_rows(self, leaf: int) -> bool:
        """Tell whether the index has rows for the chunks of a leaf: whether they lie in their files as they are."""
        column = self._index.chunks.leaf
        at = bisect.bisect_left(column, leaf)
        return at < len(column) and column[at] == leaf

    @functools.cached_property
    def _stored(self) -> StoredArrays:
        """The chunks that lie in their files as they are, each file a data file of one chunk."""
        index, branch = self._index, self._files.branch
        if branch.verified and not index.verified:
            # Another branch has no checksums, so the index has none of this one either.
            columns = index.chunks
            first = bisect.bisect_left(columns.leaf, self.leaves[0])
            rows = slice(first, bisect.bisect_right(columns.leaf, self.leaves[-1], first))
            names = ("leaf", "box", "file", "offset", "nbytes", "block")
            chunks = Chunks(**{name: getattr(columns, name)[rows] for name in names})
            checksums = array("Q")
            for leaf in dict.fromkeys(chunks.leaf):
                checksums += self._files.all_checksums_of(self._places[leaf])
            index = dataclasses.replace(index, chunks=chunks, checksums=checksums, verified=True)
        leaves = self._index.chunks.leaf

        def make(row: int) -> ChunkFile:
            place, chunk = self._places[leaves[row]], row - bisect.bisect_left(leaves, leaves[row])
            return ChunkFile(files=self._files, held=self._held, place=place, chunk=chunk)

        return StoredArrays(index, LazySequence(len(leaves), make), lambda _: None, mapped=self._mapped)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class LeavesArrays:
    """The arrays of one opened leaves directory.

    Args:
        index: what is in it; the stored leaves of the branches follow each other in order.
        branches: its branches.
        folder: the open directory.
        mapped: take memory from maps of the files where a wanted box lies there in one piece.

    Attributes:
        bytes_read: how many bytes of arrays have been read and checked: wanted ones and those in the same blocks.
    """

    def __init__(
        self, index: Index, branches: Sequence[OpenBranch], folder: OpenLeaves, *, mapped: bool = False
    ) -> None:
        self.index = index
        self.bytes_read = 0
        self._open = OpenChunks()
        self._branches: list[BranchArrays] = []
        stored = index.stored_leaves()
        at = 0
        for branch in branches:
            some = stored[at : at + len(branch.arrays)]
            at += len(branch.arrays)
            if some:
                files = BranchFiles(branch, [index.keys[leaf] for leaf in some], folder)
                self._branches.append(BranchArrays(index, some, files, self._open, mapped=mapped))
        if at != len(stored):
            raise AssertionError(f"the index has {len(stored)} stored leaves, its branches have {at}")
        self._first_leaves = [branch.leaves[0] for branch in self._branches]

    def dtype_of(self, leaf: int) -> np.dtype[Any]:
        """Return the dtype of what is stored of a leaf."""
        return dtype_in(self.index, leaf)

    def stored_chunks(self, leaf: int) -> tuple[StoredChunk, ...]:
        """Return how a stored leaf lies."""
        return self._branches[self._number_of_branch(leaf)].stored_chunks(leaf)

    def check_files(self) -> None:
        """Nothing is left to check: reading a leaf looks at all files that it has, of which an empty one has one."""

    def read(self, requests: Sequence[ReadRequest], progress: Progress | None = None) -> None:
        """Fill ``arrays`` of every request.

        Raises:
            CorruptError: a file is missing, cut short, too long, or its bytes are not those that were saved.
            StoreError: the system refuses.
        """
        small, shared = Work(), Work()
        by_branch: dict[int, list[ReadRequest]] = {}
        for request in requests:
            by_branch.setdefault(self._number_of_branch(request.leaf), []).append(request)
        with self._open:
            for number, some in by_branch.items():
                self._branches[number].plan(some, small, shared)
            run_all(shared, Tally(small.nbytes + shared.nbytes, progress), small)
        self.bytes_read += small.nbytes + shared.nbytes

    def _number_of_branch(self, leaf: int) -> int:
        return bisect.bisect_right(self._first_leaves, leaf) - 1


# Read at once, in whole blocks; small enough to be in the processor's cache when it is undone.
_PIECE_BYTES: Final = 256 << 10


def read_chunk(files: BranchFiles, leaf: int, chunk: int, into: NDArray[Any]) -> None:
    """Read a whole chunk.

    Args:
        files: of the leaf's branch.
        leaf: its number among the stored leaves of the branch.
        chunk: its number in the grid.
        into: contiguous memory of the shape of a full chunk.

    Raises:
        CorruptError: the file is missing, or its bytes are not those that were saved, or no chunk.
        UnsupportedError: a compressor that cannot be undone here.
    """
    zarr = files.branch.arrays[leaf]
    with files.open_chunk(leaf, chunk) as file, name_leaf(files.keys[leaf], files.shown_chunk(leaf, chunk)):
        read = _reader_of(_checked_pieces(file, files.checksums_of(leaf, chunk)))
        decode(zarr, read, file.size, view_as_stored(zarr, into))


def _checked_pieces(file: Reader, checksums: array[int] | None) -> Iterator[memoryview]:
    """Yield the bytes of a file, each one checked before it is given out."""
    block = block_bytes(file.size)
    step = -(-_PIECE_BYTES // block) * block
    for at in range(0, file.size, step):
        piece = memoryview(file.read(at, min(step, file.size - at)))
        if checksums is not None:
            first = at // block
            found = block_checksums(piece, block)
            wanted = checksums[first : first + len(found)]
            if found != wanted:
                wrong = next(n for n, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)
                start = (first + wrong) * block
                where = f"bytes {start} to {min(start + block, file.size)}"
                raise CorruptError(f"{where} have the checksum {found[wrong]:016x} instead of {wanted[wrong]:016x}")
        yield piece


def _reader_of(pieces: Iterator[memoryview]) -> Callable[[int], bytes]:
    """Return what returns the next so many bytes of pieces, or what is left of them."""
    waiting = memoryview(b"")

    def read(count: int) -> bytes:
        nonlocal waiting
        parts: list[memoryview] = []
        while count and (waiting or (waiting := next(pieces, waiting))):
            parts.append(waiting[:count])
            waiting = waiting[count:]
            count -= len(parts[-1])
        return b"".join(parts)

    return read


class LeavesSource(Source):
    """A leaves directory open for reading.

    Args:
        folder: the directory.
        branches: those that make up the tree; their stored leaves follow each other in the index.
        read: what the index said of them when they were opened.
        prefix: which branch is the tree; ``ALL``: a tree without prefix alone is it, else each prefix is a branch.
        mapped: whether arrays may be maps of the files.
    """

    def __init__(
        self,
        folder: OpenLeaves,
        branches: Sequence[OpenBranch],
        read: Sequence[IndexBranch],
        *,
        prefix: Prefix = ALL,
        mapped: bool = False,
    ) -> None:
        self.folder = folder
        self.branches = branches
        records = [branch.record for branch in branches]
        if prefix is not ALL:
            # The tree of one branch, whatever it is called.
            records = [dataclasses.replace(record, prefix=None) for record in records]
        index = join_records(records, verified=all(branch.verified for branch in branches))
        super().__init__(
            index,
            LeavesArrays(index, branches, folder, mapped=mapped),
            structured=index.is_exact,
            raw_keys=not index.is_exact,
            mapped=mapped,
            is_current=self._is_current,
        )
        self._read = read
        self._place = absolute(folder.path)  # a callback may change the current folder
        self._files = _list_files(self._place, branches)

    def _is_current(self) -> bool:
        same = is_unchanged(self.folder, self._read)
        return same and self._files == _list_files(self._place, self.branches)


def open_source(
    path: str | os.PathLike[str], files: contextlib.ExitStack, *, mapped: bool = False, prefix: Prefix = ALL
) -> LeavesSource:
    """Open a leaves directory; it stays open until ``files`` closes it.

    A branch of another program is read without checksums; the source's ``structured`` and ``index.verified`` say so.
    The source's ``is_current`` tells whether a save has replaced what was opened: damage may come from that, and then
    the directory is opened again (`treering._checkpoint.joint_load`).

    Args:
        path: the directory.
        files: closes it.
        mapped: whether arrays may be maps of the files.
        prefix: which branch is the tree, as for `LeavesSource`.

    Raises:
        NotFoundError: there is no directory or no index.
        MismatchError: no branch has this prefix.
        CorruptError, FormatError, UnsupportedError: the index or a record is damaged, of another format, or newer.
        StoreError: the system refuses.
    """
    folder = files.enter_context(open_leaves(path))
    branches, read = read_branches(folder, prefix=prefix)
    if prefix is ALL:
        branches = [add_structure(folder, branch) for branch in branches]
    return LeavesSource(folder, branches, read, prefix=prefix, mapped=mapped)


def _list_files(path: Path, branches: Sequence[OpenBranch]) -> dict[str, Version] | None:
    """Return which version each file of the branches without checksums is of; None where they are just replaced.

    Another program may write other numbers into the same files, and the same index.
    """
    folders = {folder for branch in branches if not branch.verified for folder in branch.record.folders}
    if not folders:
        return {}

    @functools.cache
    def is_within(folder: str) -> bool:
        return not folders.isdisjoint(["", *itertools.accumulate(folder.split("/"), "{}/{}".format)])

    try:
        with opened_store(path, quick=True) as store:
            return {one.name: one.version for one in store.list() if is_within(one.name.rpartition("/")[0])}
    except PermissionError:
        return {}  # whoever may read may not be allowed to list
    except OSError:
        return None
