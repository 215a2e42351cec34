"""Which chunk files of a leaves directory each process of a job writes, and their checksums put together again.

Everything here follows from shapes and shardings, so each process comes to the same shares by itself and hands in no
more than sizes and checksums.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from treering._codec.zarr import ZarrArray, chunk_bytes, chunk_count
from treering._leaves.plan import PlannedLeaves, shared_boxes
from treering._plan.save import AlikeLeaves, LeafLayout, SavePlan, Stretch, divide, group_alike
from treering._values.boxes import intersection, shape_of, size_of, whole
from treering._values.checksums import block_count, pack_checksums, unpack_checksums
from treering._values.keys import split_key
from treering._values.processes import format_processes
from treering.errors import ProcessFailedError, UnsupportedError

_COUNTS: Final = struct.Struct("<QQ")


class LeafShares:
    """Who writes what.

    Args:
        plan: the save.
        arrays: the array of each stored leaf.
        processes: how many there are.

    Raises:
        UnsupportedError: nobody holds a whole chunk of some leaf.
    """

    def __init__(self, plan: PlannedLeaves, arrays: Sequence[ZarrArray], processes: int) -> None:
        leaves = plan.leaves
        self._arrays = dict(zip(leaves.sources, arrays, strict=True))
        self._numbers = list(self._arrays)
        self._together = {number: held for number in leaves.sources if (held := shared_boxes(leaves, number))}
        layouts, chunks = [], []
        for number, found in self._arrays.items():
            layout, chunk = leaves.layout_of(number), found.chunks
            if number not in self._together:
                # The same everywhere, though processes may have other things in its place.
                layout = dataclasses.replace(layout, boxes=((whole(layout.shape), (0,)),))
                chunk = tuple(max(size, 1) for size in layout.shape)
            layouts.append(layout)
            chunks.append(chunk)
        keys = [plan.flat.keys[number] for number in self._arrays]
        self._writers = plan_writers(layouts, chunks, processes, keys)

    def of(self, process: int) -> dict[int, Sequence[int]]:
        """Return what one process writes: leaf number -> which of its chunks, ascending."""
        chunks: dict[int, Any] = {}
        for place, chunk in self._writers.parts_of(process):
            chunks.setdefault(self._numbers[place], []).append(chunk)
        if not process:
            whole_leaves = {
                number: range(chunk_count(zarr))
                for number, zarr in self._arrays.items()
                if number not in self._together
            }
            chunks = dict(sorted((chunks | whole_leaves).items()))
        return chunks

    def nbytes(self, share: Mapping[int, Sequence[int]]) -> int:
        """Return how many bytes a share is, before any compressor."""
        return sum(len(numbers) * chunk_bytes(self._arrays[number]) for number, numbers in share.items())

    def merge(self, parts: Sequence[tuple[Sequence[int], array[int]]]) -> tuple[list[int], array[int]]:
        """Return the sizes and checksums of all chunk files, in the order of a record.

        Args:
            parts: for each process, sizes of its compressed chunk files and the checksums of its blocks.

        Raises:
            ProcessFailedError: a process handed in another number of them than its share has.
        """
        found: dict[int, list[tuple[int, int, array[int]]]] = {number: [] for number in self._arrays}
        for process, (sizes, checksums) in enumerate(parts):
            sized, at = 0, 0
            for number, numbers in self.of(process).items():
                zarr = self._arrays[number]
                size, is_packed = chunk_bytes(zarr), zarr.compressor is not None
                for chunk in numbers:
                    if is_packed:
                        size = sizes[sized] if sized < len(sizes) else 0
                        sized += 1
                    count = block_count(size)
                    found[number].append((chunk, size, checksums[at : at + count]))
                    at += count
            if (sized, at) != (len(sizes), len(checksums)):
                what = "did not write what the plan of process 0 assigned to it"
                error = ProcessFailedError(f"{format_processes([process])} {what}")
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
    return _COUNTS.pack(len(sizes), len(checksums)) + pack_checksums(array("Q", sizes) + checksums) + digests


def read_part(part: bytes) -> tuple[array[int], array[int], bytes]:
    """Return sizes, checksums and digests of what a process handed in."""
    sizes, checksums = _COUNTS.unpack_from(part)
    stop = _COUNTS.size + 8 * (sizes + checksums)
    numbers = unpack_checksums(part[_COUNTS.size : stop])
    return numbers[:sizes], numbers[sizes:], part[stop:]


def plan_writers(
    layouts: Sequence[LeafLayout], chunks: Sequence[tuple[int, ...]], processes: int, keys: Sequence[str]
) -> SavePlan[int]:
    """Divide the chunk files of leaves among the processes.

    Each is written once, by a process that holds all of its part inside the leaf. Call the share the least load that
    the busiest process could have if bytes could be divided at will; then it has at most a share and one chunk more.

    Args:
        layouts: where each leaf lies.
        chunks: the shape of each leaf's chunks.
        processes: how many there are.
        keys: key texts of the leaves, for errors.

    Raises:
        UnsupportedError: no process holds a chunk of some leaf alone.

    Example:
        >>> both = LeafLayout(nbytes_per_item=4, shape=(1024,), boxes=((((0, 1024),), (0, 1)),))
        >>> plan = plan_writers([both, both], [(512,), (1024,)], 2, ["a", "b"])
        >>> list(map(tuple, plan.parts_of(0))), list(map(tuple, plan.parts_of(1))), plan.loads
        ([(0, 0), (0, 1)], [(1, 0)], (4096, 4096))
    """
    kinds = group_alike(layouts, processes, lambda leaf: _held_chunks(layouts[leaf], chunks[leaf], keys[leaf]), chunks)

    def nbytes(kind: AlikeLeaves[int], numbers: Sequence[int]) -> int:
        return math.prod(chunks[kind.leaves[0]]) * kind.layout.nbytes_per_item * len(numbers)

    def stretches(kind: AlikeLeaves[int], numbers: Sequence[int]) -> Iterator[Stretch[int]]:
        size = nbytes(kind, numbers[:1])
        yield Stretch(kind=kind, parts=numbers, nbytes=size, step=size, rank=size.bit_length())

    return divide(kinds, processes, nbytes, stretches)


def _held_chunks(layout: LeafLayout, chunk: tuple[int, ...], key: str) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the chunks of a leaf, each with the processes that hold it."""
    for number, owners in enumerate(_holders(layout, chunk)):
        if not owners:
            raise UnsupportedError(
                f"an array of shape {layout.shape} lies with several processes in parts that form no grid, so that none"
                " of them holds a whole chunk",
                path=split_key(key),
                hint="use a sharding that forms a grid, or save with treering.save",
            )
        yield number, owners


def _holders(layout: LeafLayout, chunk: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the processes that hold each chunk, in the order of the grid."""
    grid = [-(-size // length) for size, length in zip(layout.shape, chunk, strict=True)]
    steps = [math.prod(grid[axis + 1 :]) for axis in range(len(grid))]
    holders: list[tuple[int, ...]] = [()] * math.prod(grid)
    parts: dict[int, tuple[int, dict[int, int]]] = {}
    for box, those in layout.boxes:
        owners = tuple(sorted(set(those)))
        touched = [range(start // length, -(-stop // length)) for (start, stop), length in zip(box, chunk, strict=True)]
        inside = all(
            start % length == 0 and (stop % length == 0 or stop == size)
            for (start, stop), length, size in zip(box, chunk, layout.shape, strict=True)
        )
        for place in itertools.product(*touched) if math.prod(shape_of(box)) else ():
            number = sum(at * step for at, step in zip(place, steps, strict=True))
            if inside:  # every chunk that it touches lies in it
                holders[number] = owners
                continue
            inner = tuple((at * length, (at + 1) * length) for at, length in zip(place, chunk, strict=True))
            common = size_of(intersection(inner, box) or ())
            _, held = parts.setdefault(number, (size_of(intersection(inner, whole(layout.shape)) or ()), {}))
            for owner in owners:
                held[owner] = held.get(owner, 0) + common
    for number, (items, held) in parts.items():
        holders[number] = tuple(sorted(owner for owner, found in held.items() if found == items))
    return holders
