"""Which chunk files of a leaves directory each process of a job writes, and their checksums put together again.

Everything here follows from shapes and shardings, so each process comes to the same shares by itself and hands in no
more than sizes and checksums.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import Final

from treering._codec.zarr import ZarrArray, chunk_bytes, chunk_count, chunk_name
from treering._leaves.chunks.leaf_writers import plan_writers
from treering._leaves.chunks.write import Share
from treering._leaves.plan import PlannedLeaves, held_together
from treering._plan.save import LeafLayout
from treering._values.boxes import whole
from treering._values.checksums import block_bytes, block_count, packed, unpacked
from treering._values.processes import named
from treering.errors import ProcessFailed

_COUNTS: Final = struct.Struct("<QQ")


class LeafShares:
    """Who writes what.

    Args:
        plan: the save.
        arrays: the array of each stored leaf.
        processes: how many there are.

    Raises:
        Unsupported: nobody holds a whole chunk of some leaf.
    """

    def __init__(self, plan: PlannedLeaves, arrays: Sequence[ZarrArray], processes: int) -> None:
        leaves = plan.leaves
        self._arrays = dict(zip(leaves.sources, arrays, strict=True))
        self._numbers = list(self._arrays)
        self._folders = dict(zip(leaves.sources, plan.folders, strict=True))
        self._together = {number: held for number in leaves.sources if (held := held_together(leaves, number))}
        layouts, chunks = [], []
        for number, found in self._arrays.items():
            layout = leaves.layout_of(number)
            if number not in self._together:
                # The same everywhere, though processes may have other things in its place.
                layout = LeafLayout(
                    nbytes_per_item=layout.nbytes_per_item, shape=layout.shape, boxes=((whole(layout.shape), (0,)),)
                )
            layouts.append(layout)
            chunks.append(found.chunks if number in self._together else tuple(max(size, 1) for size in layout.shape))
        keys = [plan.flat.keys[number] for number in self._arrays]
        self._writers = plan_writers(layouts, chunks, processes, keys)

    def of(self, process: int) -> Share:
        """Return what one process writes."""
        planned = self._writers.chunks_of(process)
        chunks: dict[int, Sequence[int]] = {self._numbers[place]: found for place, found in planned.items()}
        if not process:
            whole_leaves = {
                number: range(chunk_count(zarr))
                for number, zarr in self._arrays.items()
                if number not in self._together
            }
            chunks = dict(sorted({**chunks, **whole_leaves}.items()))
        return Share(chunks=chunks, headed=not process)

    def nbytes(self, share: Share) -> int:
        """Return how many bytes a share is, before any compressor."""
        return sum(len(numbers) * chunk_bytes(self._arrays[number]) for number, numbers in share.chunks.items())

    def left_to_others(self, share: Share) -> Iterator[tuple[str, list[str]]]:
        """Yield the folders of leaves of which others write some chunk files, and the names of those files."""
        for number, zarr in self._arrays.items():
            count, own = chunk_count(zarr), share.chunks.get(number, ())
            if len(own) < count:
                theirs = sorted(set(range(count)).difference(own))
                yield self._folders[number], [chunk_name(zarr, other) for other in theirs]

    def merged(self, parts: Sequence[tuple[Sequence[int], array[int]]]) -> tuple[list[int], array[int]]:
        """Return the sizes and checksums of all chunk files, in the order of a record.

        Args:
            parts: for each process, sizes of its compressed chunk files and the checksums of its blocks.

        Raises:
            ProcessFailed: a process handed in another number of them than its share has.
        """
        found: dict[int, list[tuple[int, int, array[int]]]] = {number: [] for number in self._arrays}
        for process, (sizes, checksums) in enumerate(parts):
            sized, at = 0, 0
            for number, numbers in self.of(process).chunks.items():
                zarr = self._arrays[number]
                size, is_packed = chunk_bytes(zarr), zarr.compressor is not None
                for chunk in numbers:
                    if is_packed:
                        size = sizes[sized] if sized < len(sizes) else 0
                        sized += 1
                    count = block_count(size, block_bytes(size))
                    found[number].append((chunk, size, checksums[at : at + count]))
                    at += count
            if (sized, at) != (len(sizes), len(checksums)):
                error = ProcessFailed(f"{named([process])} did not write what it was to write by the plan of process 0")
                error.processes = (process,)
                raise error
        every: list[int] = []
        table = array("Q")
        for number, pieces in found.items():
            pieces.sort(key=lambda piece: piece[0])
            for _, size, run in pieces:
                table += run
                if self._arrays[number].compressor is not None:
                    every.append(size)
        return every, table


def part_of(sizes: Sequence[int], checksums: array[int], digests: bytes) -> bytes:
    """Return what a process hands in, as bytes.

    Example:
        >>> read_part(part_of([7], array("Q", [1, 2]), b"12345678"))
        (array('Q', [7]), array('Q', [1, 2]), b'12345678')
    """
    return _COUNTS.pack(len(sizes), len(checksums)) + packed(array("Q", sizes)) + packed(checksums) + digests


def read_part(part: bytes) -> tuple[array[int], array[int], bytes]:
    """Return sizes, checksums and digests of what a process handed in."""
    sizes, checksums = _COUNTS.unpack_from(part)
    middle = _COUNTS.size + 8 * sizes
    stop = middle + 8 * checksums
    return unpacked(part[_COUNTS.size : middle]), unpacked(part[middle:stop]), part[stop:]
