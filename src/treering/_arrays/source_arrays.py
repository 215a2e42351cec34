"""Leaves of an opened tree on their way into files: each is read piece by piece when its turn comes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import xxhash

from treering._arrays.derived_source import largest_block
from treering._arrays.host import BoxedArray, cut_box, to_host
from treering._arrays.incoming import ReadRequest, dtype_in
from treering._arrays.jobs import Progress, aligned_empty
from treering._arrays.outgoing import DescribedLeaves, LeafSources, describe_leaves
from treering._arrays.source import Source
from treering._codec.array_bytes import wire_blocks
from treering._format.index import Index, LeafType
from treering._format.selection import Selection
from treering._plan.load import StoredChunk
from treering._tree.flatten import Flattened
from treering._values.boxes import Box, boxes_of_range, intersection, relative, shape_of, size_of, slices, whole

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_PIECE_BYTES: Final = 32 << 20


class SourceArray(BoxedArray):
    """A leaf of an opened tree.

    Args:
        source: the tree.
        leaf: number of the leaf.

    Attributes:
        checksum: that of the bytes that were read since the first item was.
    """

    def __init__(self, source: Source, leaf: int) -> None:
        self._arrays = source.arrays
        self._leaf = leaf
        self.shape = source.index.type_of(leaf).shape or ()
        self.dtype = source.arrays.dtype_of(leaf)
        self.size = math.prod(self.shape)
        self.nbytes = self.size * self.dtype.itemsize
        self.checksum = xxhash.xxh3_64()

    def blocks(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes of items ``start`` to ``stop`` in C order, little endian."""
        step = self._step()
        if not start:
            self.checksum.reset()
        for first in range(start, stop, step):
            for piece in self._read(boxes_of_range(self.shape, first, min(first + step, stop))):
                self.checksum.update(piece)
                yield piece
                del piece  # its memory is free for the next one

    def _step(self) -> int:
        """Return how many items are read at once: of chunks that are read as a whole, whole rows of chunks."""
        if self.nbytes <= _PIECE_BYTES:
            return max(self.size, 1)
        few: int = _PIECE_BYTES // self.dtype.itemsize
        chunks = self._arrays.stored_chunks(self._leaf) if self.shape else ()
        if not chunks:
            block = largest_block(self._arrays, self._leaf)
            return max(self.size, 1) if block is None or block > _PIECE_BYTES else few
        sides = [chunk.box[0] for chunk in chunks if chunk.block >= size_of(chunk.box) * self.dtype.itemsize]
        tallest = max((stop - start for start, stop in sides), default=0)
        band: int = max(1, tallest * math.prod(self.shape[1:]))
        return max(band, few // band * band)

    def _read(self, boxes: list[Box]) -> Iterator[memoryview]:
        request = ReadRequest(self._leaf, boxes)
        self._arrays.read([request])
        for array in request.arrays:
            yield from wire_blocks(array, 0, array.size)


def describe_source(source: Source, part: Selection) -> DescribedLeaves:
    """Return a part of an opened tree as leaves that are to be saved; nothing is read yet."""
    index = source.index
    types: dict[LeafType, int] = {}
    leaf_types = [types.setdefault(index.types[index.leaf_types[leaf]], len(types)) for leaf in part.leaves]
    return DescribedLeaves(
        types=tuple(types),
        leaf_types=leaf_types,
        values={number: index.values[leaf] for number, leaf in enumerate(part.leaves) if leaf in index.values},
        sources=LeafSources(
            {n: SourceArray(source, leaf) for n, leaf in enumerate(part.leaves) if leaf not in index.values}
        ),
        meshes=index.meshes,
    )


def tree_source(flat: Flattened) -> Source:
    """Return a tree in memory, of which this process holds every array, as one that is open; nothing is copied yet.

    Raises:
        UnsupportedError: a leaf cannot be stored: deleted, traced, of a dtype that no file has, held by other
            processes.
    """
    leaves = describe_leaves(flat)
    index = Index(
        attempt="", structure=flat.tokens, keys=flat.keys, types=leaves.types, leaf_types=leaves.leaf_types,
        values=leaves.values, meshes=leaves.meshes,
    )  # fmt: skip
    return Source(index, TreeArrays(index, leaves))


class TreeArrays:
    """Gives boxes of the arrays of a tree in memory: themselves, or copies where several shards have parts of one.

    Args:
        index: what is in it.
        leaves: its leaves.
    """

    def __init__(self, index: Index, leaves: DescribedLeaves) -> None:
        self._index = index
        self._leaves = leaves

    def check_files(self) -> None:
        """Do nothing: there are none."""

    def dtype_of(self, leaf: int) -> np.dtype[Any]:
        """Return the dtype of a leaf, little endian."""
        return dtype_in(self._index, leaf)

    def stored_chunks(self, leaf: int) -> tuple[StoredChunk, ...]:
        """Return all of a leaf, of which any part can be had without the rest."""
        return (StoredChunk(box=whole(self._index.type_of(leaf).shape or ()), block=1),)

    def read(self, requests: Sequence[ReadRequest], progress: Progress | None = None) -> None:
        """Fill ``arrays`` of every request."""
        del progress
        for request in requests:
            request.arrays = [self._copy(request.leaf, box) for box in request.boxes]
            if request.steps is not None:
                request.arrays = [array[slices(whole(array.shape), request.steps)] for array in request.arrays]

    def _copy(self, leaf: int, box: Box) -> NDArray[Any]:
        into = aligned_empty(shape_of(box), self.dtype_of(leaf))
        for held, data in self._leaves.sources[leaf]:
            if (common := intersection(box, held)) is not None:
                found = to_host(data if common == held else cut_box(data, held, common))
                if common == box and found.dtype == into.dtype:
                    return found
                into[slices(relative(common, box))] = found
        return into
