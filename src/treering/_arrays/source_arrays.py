"""Leaves of an opened tree on their way into files: each is read piece by piece when its turn comes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import xxhash

from treering._arrays.incoming import ReadRequest
from treering._arrays.mapped_source import largest_block
from treering._arrays.outgoing import DescribedLeaves, HeldBox
from treering._arrays.parted import BoxedArray
from treering._arrays.source import Source
from treering._codec.array_bytes import wire_blocks
from treering._format.index import LeafType
from treering._format.selection import Selection
from treering._values.boxes import Box, boxes_of_range, size_of, whole

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
        self.size = size_of(whole(self.shape))
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
    leaf_types = [types.setdefault(index.type_of(leaf), len(types)) for leaf in part.leaves]
    return DescribedLeaves(
        types=tuple(types),
        leaf_types=leaf_types,
        values={number: index.values[leaf] for number, leaf in enumerate(part.leaves) if leaf in index.values},
        sources={
            number: (HeldBox(whole(index.type_of(leaf).shape or ()), SourceArray(source, leaf)),)
            for number, leaf in enumerate(part.leaves)
            if index.type_of(leaf).stored
        },
        meshes=index.meshes,
    )
