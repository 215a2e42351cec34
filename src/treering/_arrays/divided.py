"""A save that several processes divide among them, laid out: each by its own files, process 0 by those of all.

Everything here follows from the leaves' shapes, from who holds which box, and from the attempt. So each process comes
to the same names, headers and order of chunks by itself, and needs to hand in nothing but checksums.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from array import array
from collections.abc import Iterable, Sequence

from treering._arrays.outgoing import Outgoing
from treering._arrays.written import Layout
from treering._format.blocks import leaf_bytes
from treering._format.document import data_name
from treering._format.headers import Row, laid_out
from treering._plan.save import SavePlan, plan_save
from treering._plan.save_files import FILE_BYTES, file_counts, files_by_position
from treering._values.boxes import size_of, whole
from treering._values.checksums import block_count
from treering._values.processes import named
from treering.errors import ProcessFailed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FilesOfProcesses:
    """Data files of some or all processes."""

    layout: Layout
    """What lies in them."""
    names: Sequence[str]
    """Their names."""
    writers: Sequence[int]
    """Which process writes each."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
    """Who writes what."""

    keys: Sequence[str]
    """Key text of each leaf."""
    leaves: Outgoing
    """The leaves as this process sees them."""
    stored: Sequence[int]
    """The leaves that lie in files; the plan counts these."""
    plan: SavePlan
    """The plan of all."""

    def files(self, attempt: str, processes: Iterable[int], limit: int = FILE_BYTES) -> FilesOfProcesses:
        """Lay out the files of some processes.

        Args:
            attempt: the attempt.
            processes: whose, ascending.
            limit: bytes beyond which no file is begun.
        """
        counts = file_counts(self.plan, limit)
        firsts = list(itertools.accumulate(counts, initial=0))
        rows: list[list[Row]] = []
        names: list[str] = []
        writers: list[int] = []
        for process in processes:
            found: dict[int, list[Row]] = {}
            mine, sizes = self._rows_of(process)
            for row, file in zip(mine, files_by_position(sizes, counts[process], limit), strict=True):
                found.setdefault(file, []).append(row)
            rows += found.values()
            names += [data_name(attempt, firsts[process] + file, firsts[-1]) for file in found]
            writers += [process] * len(found)
        leaves = self.leaves
        chunks, headers = laid_out(attempt, self.keys, leaves.types, leaves.leaf_types, rows)
        return FilesOfProcesses(
            layout=Layout(leaves=leaves, chunks=chunks, headers=headers), names=names, writers=writers
        )

    def _rows_of(self, process: int) -> tuple[list[Row], list[int]]:
        """Return what a process writes, and the bytes of each box."""
        types = self.leaves.types
        shapes = [kind.shape or () for kind in types]
        itemsizes = [leaf_bytes(kind) // (math.prod(kind.shape or ()) or 1) for kind in types]
        rows: list[Row] = []
        sizes: list[int] = []
        for part in self.plan.parts_of(process):
            leaf = self.stored[part.leaf]
            kind = self.leaves.leaf_types[leaf]
            rows.append((leaf, None if part.box == whole(shapes[kind]) else part.box))
            sizes.append(itemsizes[kind] * size_of(part.box))
        return rows, sizes


def divided(keys: Sequence[str], leaves: Outgoing, processes: int) -> Divided:
    """Divide leaves among processes.

    Example:
        >>> import numpy as np
        >>> from treering._arrays.outgoing import outgoing
        >>> from treering._tree.flatten import flatten
        >>> flat = flatten({"w": np.zeros(6, "f4")})
        >>> plan = divided(flat.keys, outgoing(flat), 2)
        >>> plan.files("0" * 16, [0, 1]).names  # process 1 has nothing to write
        ['data-0000000000000000-00000-of-00001.safetensors']
    """
    stored = list(leaves.sources)
    plan = plan_save([leaves.layout_of(leaf) for leaf in stored], processes)
    return Divided(keys=keys, leaves=leaves, stored=stored, plan=plan)


def merged(files: FilesOfProcesses, parts: Sequence[array[int]]) -> array[int]:
    """Return the checksums of all chunks, given those that each process found, in the order of its own chunks.

    Raises:
        ProcessFailed: a process handed in another number of checksums than its part has blocks.
    """
    chunks = files.layout.chunks
    table = array("Q")
    taken = [0] * len(parts)
    for file, nbytes, block in zip(chunks.file, chunks.nbytes, chunks.block, strict=True):
        process = files.writers[file]
        start = taken[process]
        taken[process] = stop = start + block_count(nbytes, block)
        table += parts[process][start:stop]
    wrong = [process for process, part in enumerate(parts) if len(part) != taken[process]]
    if wrong:
        error = ProcessFailed(
            f"{named(wrong)} handed in the checksums of other chunks than were planned here",
            hint="let all processes run the same version of treering, on the same tree",
        )
        error.processes = tuple(wrong)
        raise error
    return table
