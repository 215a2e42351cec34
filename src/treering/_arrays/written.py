"""A laid out save -> its data files: every array taken when its turn comes, checked while hot, written once."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence

from treering._arrays.jobs import Progress
from treering._arrays.outgoing import DescribedLeaves, read_checked
from treering._format.document import data_name
from treering._format.headers import Row, lay_out_files
from treering._format.index import Chunks, leaf_bytes
from treering._plan.save import FILE_BYTES, SavePlan, file_counts, files_by_position, plan_save
from treering._store.memory_pool import MemoryPool
from treering._values.boxes import size_of, whole
from treering._values.checksums import block_count
from treering._values.processes import format_processes
from treering.errors import ProcessFailed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveLayout:
    """Where everything will lie."""

    leaves: DescribedLeaves
    """What is saved."""
    chunks: Chunks
    """Which box lies where."""
    headers: Sequence[bytes]
    """The bytes of each file before its data."""
    names: Sequence[str]
    """The names of the files."""
    writers: Sequence[int]
    """Which process writes each file."""

    @property
    def data_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(self.chunks.nbytes)

    def sizes(self) -> list[int]:
        """Return the bytes of each file."""
        sizes = list(map(len, self.headers))
        for file, nbytes in zip(self.chunks.file, self.chunks.nbytes, strict=True):
            sizes[file] += nbytes
        return sizes


class SaveData:
    """What is known of a save while it is written.

    Attributes:
        checksums: those of all blocks, chunk after chunk; complete when every file's content was taken.
    """

    def __init__(self, layout: SaveLayout, progress: Progress | None) -> None:
        self._layout = layout
        self._starts = layout.chunks.first_blocks()
        self._progress = progress
        self._pool = MemoryPool()
        self._done = 0
        self.checksums = array("Q", bytes(8 * self._starts[-1]))

    def data_of(self, file: int, *, kept: bool = True) -> Iterator[bytes | memoryview]:
        """Yield the data of one file, in the order of the file; with ``kept=False`` only to note the checksums."""
        chunks = self._layout.chunks
        total = self._layout.data_bytes
        pool = self._pool if kept else None
        for chunk in chunks.of_file(file):
            data = self._layout.leaves.data_of(chunks.leaf[chunk], chunks.box[chunk])
            for piece in read_checked(data, chunks.block[chunk], self.checksums, self._starts[chunk], pool):
                yield piece
                self._done += len(piece)
                if self._progress is not None:
                    self._progress(self._done, total)
                del piece  # its memory is free for the next one

    def first_other(self, other: SaveData) -> int | None:
        """Return the first leaf whose blocks have other checksums in ``other``, None where all are the same."""
        block = next((n for n, (a, b) in enumerate(zip(self.checksums, other.checksums, strict=True)) if a != b), None)
        return None if block is None else self._layout.chunks.leaf[bisect.bisect_right(self._starts, block) - 1]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DividedSave:
    """Who writes what."""

    keys: Sequence[str]
    """Key text of each leaf."""
    leaves: DescribedLeaves
    """The leaves as this process sees them."""
    stored: Sequence[int]
    """The leaves that lie in files; the plan counts these."""
    plan: SavePlan
    """The plan of all."""

    def files(self, attempt: str, processes: Iterable[int]) -> SaveLayout:
        """Lay out the files of some processes.

        Args:
            attempt: the attempt.
            processes: whose, ascending.
        """
        leaves = self.leaves
        shapes = [kind.shape or () for kind in leaves.types]
        itemsizes = [leaf_bytes(kind) // (math.prod(kind.shape or ()) or 1) for kind in leaves.types]
        counts = file_counts(self.plan, FILE_BYTES)
        firsts = list(itertools.accumulate(counts, initial=0))
        rows: list[list[Row]] = []
        names: list[str] = []
        writers: list[int] = []
        for process in processes:
            found: dict[int, list[Row]] = {}
            mine: list[Row] = []
            sizes: list[int] = []
            for part in self.plan.parts_of(process):
                leaf = self.stored[part.leaf]
                kind = leaves.leaf_types[leaf]
                mine.append((leaf, None if part.box == whole(shapes[kind]) else part.box))
                sizes.append(itemsizes[kind] * size_of(part.box))
            for row, file in zip(mine, files_by_position(sizes, counts[process], FILE_BYTES), strict=True):
                found.setdefault(file, []).append(row)
            rows += found.values()
            names += [data_name(attempt, firsts[process] + file, firsts[-1]) for file in found]
            writers += [process] * len(found)
        chunks, headers = lay_out_files(attempt, self.keys, leaves.types, leaves.leaf_types, rows)
        return SaveLayout(leaves=leaves, chunks=chunks, headers=headers, names=names, writers=writers)


def divide_save(
    keys: Sequence[str], leaves: DescribedLeaves, processes: int, plan: SavePlan | None = None
) -> DividedSave:
    """Divide leaves among processes, by a ``plan`` that was made for leaves that are alike.

    Example:
        >>> import numpy as np
        >>> from treering._arrays.outgoing import describe_leaves
        >>> from treering._tree.flatten import flatten
        >>> flat = flatten({"w": np.zeros(6, "f4")})
        >>> plan = divide_save(flat.keys, describe_leaves(flat), 2)
        >>> plan.files("0" * 16, [0, 1]).names  # process 1 has nothing to write
        ['data-0000000000000000-00000-of-00001.safetensors']
    """
    stored = list(leaves.sources)
    plan = plan or plan_save([leaves.layout_of(leaf) for leaf in stored], processes)
    return DividedSave(keys=keys, leaves=leaves, stored=stored, plan=plan)


def merge_checksums(layout: SaveLayout, parts: Sequence[array[int]]) -> array[int]:
    """Return the checksums of all chunks, given those that each process found, in the order of its own chunks.

    Raises:
        ProcessFailed: a process handed in another number of checksums than its part has blocks.
    """
    chunks = layout.chunks
    table = array("Q")
    taken = [0] * len(parts)
    for file, nbytes, block in zip(chunks.file, chunks.nbytes, chunks.block, strict=True):
        process = layout.writers[file]
        start = taken[process]
        taken[process] = stop = start + block_count(nbytes, block)
        table += parts[process][start:stop]
    if wrong := [process for process, part in enumerate(parts) if len(part) != taken[process]]:
        hint = "run the same version of treering on all processes, with the same tree"
        error = ProcessFailed(f"{format_processes(wrong)} sent checksums for other chunks than planned here", hint=hint)
        error.processes = tuple(wrong)
        raise error
    return table
