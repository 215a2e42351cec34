"""Boxes of an array that lies in chunks of a grid, each of which is decoded as a whole.

A chunk that is a wanted box is decoded straight into its memory; any other passes through memory of its own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from treering._arrays.incoming import ReadRequest
from treering._arrays.jobs import ALIGNMENT, Job, aligned_empty
from treering._codec.zarr import ZarrArray, chunk_box, grid_of, is_whole, item_dtype
from treering._values.boxes import flat_range, pick_overlap, picked_shape, size_of, slices, whole
from treering._values.dtypes import numpy_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

ReadChunk: TypeAlias = "Callable[[int, NDArray[Any]], object]"
"""Fills contiguous memory of the shape of a full chunk with the items of the chunk of that number."""


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
    layout: ZarrArray, request: ReadRequest, covering: dict[int, list[int]], dtype: np.dtype[Any], read: ReadChunk
) -> list[tuple[int, Job]]:
    """Allocate the arrays of a request that has none; return a job for each chunk, with the bytes that it counts.

    Args:
        layout: shape and chunks of the array.
        request: what is wanted.
        covering: what `find_chunks` gave.
        dtype: of the arrays.
        read: reads a chunk.
    """
    one_room = _allocate_whole(layout, request, dtype)
    if one_room is not None:
        return [(one_room.nbytes, functools.partial(_read_whole, read, 0, one_room))]
    if not request.arrays:
        request.arrays = [aligned_empty(picked_shape(box, request.steps), dtype) for box in request.boxes]
    jobs: list[tuple[int, Job]] = []
    for chunk, boxes in covering.items():
        box = chunk_box(layout, chunk)
        common = [pick_overlap(box, request.boxes[number], request.steps) for number in boxes]
        nbytes = sum(size_of(found[0]) for found in common if found is not None) * dtype.itemsize
        whole_box = len(boxes) == 1 and is_whole(layout, chunk) and request.boxes[boxes[0]] == box
        if whole_box and request.steps is None:
            jobs.append((nbytes, functools.partial(_read_whole, read, chunk, request.arrays[boxes[0]])))
        else:
            jobs.append((nbytes, functools.partial(_cut_out, layout, chunk, request, boxes, read)))
    return jobs


def _allocate_whole(layout: ZarrArray, request: ReadRequest, dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """Return memory for a leaf that is one chunk, of which several boxes are runs: they become views of it."""
    if layout.chunks != layout.shape or len(request.boxes) == 1:
        return None
    runs = [flat_range(box, layout.shape) for box in request.boxes]
    found = sorted(run for run in runs if run is not None)
    if len(found) < len(runs) or sum(stop - start for start, stop in found) != size_of(whole(layout.shape)):
        return None
    if any(a[1] != b[0] or b[0] * dtype.itemsize % ALIGNMENT for a, b in itertools.pairwise(found)):
        return None
    room = aligned_empty(layout.shape, dtype)
    request.arrays = [room[slices(box)] for box in request.boxes]
    return room


def _read_whole(read: ReadChunk, chunk: int, into: NDArray[Any]) -> int:
    read(chunk, into)
    return into.nbytes


def _cut_out(layout: ZarrArray, chunk: int, request: ReadRequest, boxes: Sequence[int], read: ReadChunk) -> int:
    """Read a chunk beside the arrays and copy from it what they want."""
    full = aligned_empty(layout.chunks, request.arrays[boxes[0]].dtype)
    read(chunk, full)
    here = chunk_box(layout, chunk)
    nbytes = 0
    for number in boxes:
        found = pick_overlap(here, request.boxes[number], request.steps)
        if found is not None:
            part = full[found[1]]
            request.arrays[number][slices(found[0])] = part
            nbytes += part.nbytes
    return nbytes


def view_as_stored(zarr: ZarrArray, array: NDArray[Any]) -> NDArray[Any]:
    """Return a contiguous array as items of the dtype that its chunk files have."""
    dtype = numpy_dtype(item_dtype(zarr))
    return array if array.dtype == dtype else array.reshape(-1).view(dtype).reshape(array.shape)
