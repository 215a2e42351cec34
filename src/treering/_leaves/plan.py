"""A tree -> what a save into a leaves directory will write: leaves, folders, layouts, and which process writes what.

Everything here follows from shapes and shardings, so each process of a job comes to the same shares by itself and hands
in no more than sizes and checksums. Nothing is written here.
"""

from __future__ import annotations

import dataclasses
import datetime
from array import array
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, Literal

import xxhash

from treering._arrays.jobs import Progress
from treering._arrays.outgoing import DescribedLeaves, LeafSources
from treering._checkpoint.save_options import HostLocal, versions
from treering._codec.zarr import ZarrArray, chunk_bytes, chunk_count, stored_dtype
from treering._codec.zarr_chunks import require_known_compressor
from treering._leaves.documents.record import MOST_AXES, ChunkLayout, LeavesRecord, folder_of, prefix_folder
from treering._plan.chunks import balanced_chunk, chunk_shape, plan_writers, shared_chunk_shape
from treering._printable import kind_of
from treering._tree.flatten import Flattened
from treering._values.boxes import whole
from treering._values.checksums import block_count
from treering._values.dtypes import itemsize_of
from treering._values.human import pluralize
from treering._values.keys import naming_leaf
from treering._values.processes import failure_of
from treering.errors import UnsupportedError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeavesSaveOptions:
    """What a save goes by; ``treering.leaves.tree_serialize_leaves`` says what each option means."""

    prefix: str | None = None
    """Name of the tree."""
    write_index: bool = True
    """Whether the index is to name it."""
    compressor: Mapping[str, Any] | None = None
    """The compressor of the chunks."""
    chunk_bytes: int | None = None
    """The largest chunk."""
    host_local: HostLocal = "first"
    """Where leaves come from that each process holds alone."""
    commit_callback: Callable[[], object] | None = None
    """Called by process 0."""
    progress: Progress | None = None
    """Called with the bytes that this process has written."""
    manager: Any = None
    """What writes jax arrays, if it is not treering, such as jax's ``GlobalAsyncCheckpointManager``: its
    ``serialize_with_paths(arrays, paths, on_commit_callback=...)`` begins to write arrays, each into the folder of its
    path, and calls back when they are there; its ``wait_until_finished()`` waits for that."""
    processes: Literal["all", "this"] = "all"
    """Which processes of a job save the tree."""
    timeout: float = 600.0
    """Seconds to wait at one point for other processes."""

    def digest(self) -> bytes:
        """Return a few bytes that are the same on all processes that are given the same arguments."""
        codec = None if self.compressor is None else sorted(self.compressor.items(), key=repr)
        asked = (self.prefix or None, self.write_index, codec, self.chunk_bytes, self.host_local, self.manager is None)
        return xxhash.xxh3_64_digest(repr(asked).encode("utf-8", "surrogatepass"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLeaves:
    """What a save will write, before it has a name and checksums."""

    flat: Flattened
    """The tree."""
    leaves: DescribedLeaves
    """Its leaves."""
    folders: Sequence[str]
    """Folder of each stored leaf, in the order of the leaves."""
    draft: LeavesRecord
    """The record of all leaves, without attempt, time, sizes and checksums."""

    @property
    def nbytes(self) -> int:
        """Bytes of all stored leaves, before any compressor."""
        return sum(source.data.nbytes for sources in self.leaves.sources.values() for source in sources)

    def without(self, numbers: Container[int], arrays: Sequence[ZarrArray]) -> tuple[PlannedLeaves, list[ZarrArray]]:
        """Return the plan of all other leaves, and their arrays out of those of all stored leaves."""
        rows = zip(self.leaves.sources.items(), self.folders, arrays, strict=True)
        kept = [row for row in rows if row[0][0] not in numbers]
        leaves = dataclasses.replace(self.leaves, sources=LeafSources({}, dict(row[0] for row in kept)))
        return dataclasses.replace(self, leaves=leaves, folders=[row[1] for row in kept]), [row[2] for row in kept]

    def record(self, attempt: str) -> LeavesRecord:
        """Return the record of this save; sizes and checksums come when the leaves are written."""
        # Saves are put in the order of their times, so seconds would be too coarse.
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
        written = {**versions(), "at": now, **self.draft.written}
        return dataclasses.replace(self.draft, attempt=attempt, written=written)


def plan_leaves(
    flat: Flattened, leaves: DescribedLeaves, options: LeavesSaveOptions, *, processes: int = 1
) -> PlannedLeaves:
    """Describe what will be written; whatever cannot be is refused here.

    Args:
        flat: the tree.
        leaves: its leaves.
        options: the options of the save.
        processes: how many processes save it together.

    Raises:
        UnsupportedError: a leaf, a key, the prefix, the compressor or the limit of chunks.
    """
    prefix = options.prefix
    if not isinstance(prefix, str | None):
        raise UnsupportedError(f"a prefix is a str, found {kind_of(prefix)}")
    if prefix:
        prefix_folder(prefix)
    numbers: dict[ChunkLayout, int] = {}
    found = _plan_layouts(leaves, flat.keys, options, processes)
    leaf_layouts = [numbers.setdefault(layout, len(numbers)) for layout in found]
    folders = [folder_of(prefix, flat.keys[number]) for number in leaves.sources]
    draft = LeavesRecord(
        prefix=prefix or None,
        written={"processes": processes} if processes > 1 else {},
        meshes=leaves.meshes,
        structure=flat.tokens,
        keys=flat.keys,
        types=leaves.types,
        leaf_types=leaves.leaf_types,
        values=leaves.values,
        folders=folders,
        layouts=tuple(numbers),
        leaf_layouts=leaf_layouts,
        structured=flat.structured,
    )
    return PlannedLeaves(flat=flat, leaves=leaves, folders=folders, draft=draft)


def _plan_layouts(
    leaves: DescribedLeaves, keys: Sequence[str], options: LeavesSaveOptions, processes: int
) -> Iterator[ChunkLayout]:
    """Yield the layout of each stored leaf; leaves of one type that are cut alike have the same one."""
    limit = options.chunk_bytes
    if limit is not None and (type(limit) is not int or limit < 1):
        raise UnsupportedError(f"chunk_bytes is {limit!r:.100}, but must be a number of bytes of at least 1")
    codec = None if options.compressor is None else require_known_compressor(options.compressor)
    # Chunks that several processes could write are small enough for them to share the work.
    balanced = limit
    if processes > 1:
        least = balanced_chunk([leaves.layout_of(number) for number in leaves.sources], processes)
        balanced = least if limit is None else min(least, limit)
    known: dict[tuple[int, object], ChunkLayout] = {}
    for number, sources in leaves.sources.items():
        kind, held = leaves.leaf_types[number], leaves.shared_by(number)
        boxes = tuple(source.box for source in sources)
        key = (kind, boxes if held is None else id(held))
        if key not in known:
            shape = leaves.types[kind].shape or ()
            with naming_leaf(keys[number]):
                itemsize = itemsize_of(stored_dtype(leaves.types[kind].dtype or ""))
                if len(shape) > MOST_AXES:
                    axes = pluralize(len(shape), "axes")
                    raise UnsupportedError(f"an array of {axes}; those of zarr v2 have at most {MOST_AXES}")
            if held is None:
                chunks = chunk_shape(shape, boxes, itemsize, limit)
            else:
                most = balanced if any(len(owners) > 1 for _, owners in held) else limit
                chunks = shared_chunk_shape(shape, [box for box, _ in held], itemsize, most)
            known[key] = ChunkLayout(chunks=chunks, compressor=codec)
        yield known[key]


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
        self._together = {number: held for number in leaves.sources if (held := leaves.shared_by(number))}
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

    def merge(self, parts: Sequence[Sequence[array[int]]]) -> tuple[list[int], array[int]]:
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
                raise failure_of([process], "did not write what the plan of process 0 assigned to it")
        every: list[int] = []
        table = array("Q")
        for number, pieces in found.items():
            pieces.sort(key=lambda piece: piece[0])
            for _, size, run in pieces:
                table += run
                if self._arrays[number].compressor is not None:
                    every.append(size)
        return every, table
