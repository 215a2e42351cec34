"""Chunks that do not lie in their files as they are wanted: compressed, padded, in order F, big endian.

A chunk that is a wanted box is undone straight into its memory; any other passes through memory of its own.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from treering._arrays.buffers import ALIGNMENT, aligned_empty
from treering._arrays.incoming import ReadRequest
from treering._arrays.jobs import Job
from treering._codec.zarr import ZarrArray, chunk_box, grid_of, is_whole, item_dtype
from treering._codec.zarr_chunks import decode
from treering._leaves.chunks.files import BranchFiles, name_leaf
from treering._store.api import Reader
from treering._values.boxes import flat_range, pick_overlap, picked_shape, size_of, slices, whole
from treering._values.checksums import block_bytes, block_checksums
from treering._values.dtypes import numpy_dtype
from treering.errors import Corrupt

if TYPE_CHECKING:
    from numpy.typing import NDArray


# Read at once, in whole blocks; small enough to be in the processor's cache when it is undone.
_PIECE_BYTES: Final = 256 << 10


def find_chunks(zarr: ZarrArray, request: ReadRequest) -> dict[int, list[int]]:
    """Return the chunks that hold wanted items, in their order, each with the numbers of the boxes that want some.

    Example:
        >>> layout = ZarrArray(shape=(4, 6), chunks=(2, 3), dtype="int8")
        >>> find_chunks(layout, ReadRequest(0, [((1, 3), (0, 2)), ((0, 1), (0, 6))]))
        {0: [0, 1], 1: [1], 2: [0]}
    """
    grid = grid_of(zarr)
    found: dict[int, list[int]] = {}
    for number, box in enumerate(request.boxes):
        if not size_of(box):
            continue
        sides = [
            range(start // chunk, (stop - 1) // chunk + 1)
            if step <= chunk
            else [place // chunk for place in range(start, stop, step)]
            for (start, stop), chunk, step in zip(box, zarr.chunks, request.steps or (1,) * len(box), strict=True)
        ]
        for place in itertools.product(*sides):
            chunk = 0
            for here, count in zip(place, grid, strict=True):
                chunk = chunk * count + here
            found.setdefault(chunk, []).append(number)
    return dict(sorted(found.items()))


def plan_decoding(
    files: BranchFiles, leaf: int, request: ReadRequest, covering: dict[int, list[int]], dtype: np.dtype[Any]
) -> list[tuple[int, Job]]:
    """Allocate the arrays of a request; return a job for each chunk that it takes, with the bytes that it counts.

    Args:
        files: of the leaf's branch.
        leaf: its number among the stored leaves of the branch.
        request: what is wanted.
        covering: what `find_chunks` gave.
        dtype: of the arrays.
    """
    zarr = files.branch.arrays[leaf]
    one_room = _allocate_whole(zarr, request, dtype)
    if one_room is not None:
        return [(one_room.nbytes, functools.partial(read_chunk, files, leaf, 0, one_room))]
    request.arrays = [aligned_empty(picked_shape(box, request.steps), dtype) for box in request.boxes]
    jobs: list[tuple[int, Job]] = []
    for chunk, boxes in covering.items():
        box = chunk_box(zarr, chunk)
        common = [pick_overlap(box, request.boxes[number], request.steps) for number in boxes]
        nbytes = sum(size_of(found[0]) for found in common if found is not None) * dtype.itemsize
        whole_box = len(boxes) == 1 and is_whole(zarr, chunk) and request.boxes[boxes[0]] == box
        if whole_box and request.steps is None:
            jobs.append((nbytes, functools.partial(read_chunk, files, leaf, chunk, request.arrays[boxes[0]])))
        else:
            jobs.append((nbytes, functools.partial(_cut_out, files, leaf, chunk, request, boxes)))
    return jobs


def _allocate_whole(zarr: ZarrArray, request: ReadRequest, dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """Return memory for a leaf that is one chunk, of which the boxes are runs: they become views of it."""
    if zarr.chunks != zarr.shape or len(request.boxes) == 1:
        return None
    runs = [flat_range(box, zarr.shape) for box in request.boxes]
    found = sorted(run for run in runs if run is not None)
    if len(found) < len(runs) or sum(stop - start for start, stop in found) != size_of(whole(zarr.shape)):
        return None
    if any(a[1] != b[0] or b[0] * dtype.itemsize % ALIGNMENT for a, b in itertools.pairwise(found)):
        return None
    room = aligned_empty(zarr.shape, dtype)
    request.arrays = [room[slices(box)] for box in request.boxes]
    return room


def _cut_out(files: BranchFiles, leaf: int, chunk: int, request: ReadRequest, boxes: Sequence[int]) -> int:
    """Read a chunk beside the arrays and copy from it what they want."""
    zarr = files.branch.arrays[leaf]
    full = aligned_empty(zarr.chunks, request.arrays[boxes[0]].dtype)
    read_chunk(files, leaf, chunk, full)
    here = chunk_box(zarr, chunk)
    nbytes = 0
    for number in boxes:
        found = pick_overlap(here, request.boxes[number], request.steps)
        if found is not None:
            part = full[found[1]]
            request.arrays[number][slices(found[0])] = part
            nbytes += part.nbytes
    return nbytes


def read_chunk(files: BranchFiles, leaf: int, chunk: int, into: NDArray[Any]) -> int:
    """Read a whole chunk and return its bytes.

    Args:
        files: of the leaf's branch.
        leaf: its number among the stored leaves of the branch.
        chunk: its number in the grid.
        into: contiguous memory of the shape of a full chunk.

    Raises:
        Corrupt: the file is missing, or its bytes are not those that were saved, or no chunk.
        Unsupported: a compressor that cannot be undone here.
    """
    zarr = files.branch.arrays[leaf]
    with files.open_chunk(leaf, chunk) as file, name_leaf(files.keys[leaf], files.shown_chunk(leaf, chunk)):
        content = _Content(file, files.checksums_of(leaf, chunk))
        decode(zarr, content.read, file.size, view_as_stored(zarr, into))
    return into.nbytes


class _Content:
    """The bytes of a file one after the other, each one checked before it is given out."""

    def __init__(self, file: Reader, checksums: array[int] | None) -> None:
        self._file = file
        self._checksums = checksums
        self._block = block_bytes(file.size)
        self._step = -(-_PIECE_BYTES // self._block) * self._block
        self._at = 0
        self._waiting = memoryview(b"")

    def read(self, count: int) -> bytes:
        """Return the next ``count`` bytes, or what is left of them."""
        if count <= len(self._waiting):
            given, self._waiting = bytes(self._waiting[:count]), self._waiting[count:]
            return given
        parts = [self._waiting]
        left = count - len(self._waiting)
        while left and self._at < self._file.size:
            piece = self._next()
            parts.append(piece[:left])
            self._waiting = piece[left:]
            left -= len(parts[-1])
        return b"".join(parts)

    def _next(self) -> memoryview:
        size = min(self._step, self._file.size - self._at)
        piece = memoryview(self._file.read(self._at, size))
        if self._checksums is not None:
            first = self._at // self._block
            found = block_checksums(piece, self._block)
            wanted = self._checksums[first : first + len(found)]
            if found != wanted:
                wrong = next(n for n, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)
                start = (first + wrong) * self._block
                where = f"bytes {start} to {min(start + self._block, self._file.size)}"
                raise Corrupt(f"{where} have the checksum {found[wrong]:016x} instead of {wanted[wrong]:016x}")
        self._at += size
        return piece


def view_as_stored(zarr: ZarrArray, array: NDArray[Any]) -> NDArray[Any]:
    """Return a contiguous array as items of the dtype that its chunk files have."""
    dtype = numpy_dtype(item_dtype(zarr))
    return array if array.dtype == dtype else array.reshape(-1).view(dtype).reshape(array.shape)
