"""Chunk files seen as the data files of a checkpoint: each one holds one chunk, and is open only while it is read."""

from __future__ import annotations

import bisect
import contextlib
import functools
import mmap
from collections.abc import Mapping, Sequence
from typing import overload

from treering._format.index import Index
from treering._leaves.chunks.files import BranchFiles, naming
from treering._leaves.chunks.open_chunks import OpenChunks
from treering._store.posix.reading import LocalFile


class ChunkFile:
    """One chunk file.

    Args:
        files: those of its branch.
        held: keeps it open between the parts of a reading.
        place: number of its leaf among the stored ones of the branch.
        chunk: its number in the grid.
    """

    __slots__ = ("_chunk", "_files", "_held", "_place")

    def __init__(self, files: BranchFiles, held: OpenChunks, place: int, chunk: int) -> None:
        self._files = files
        self._held = held
        self._place = place
        self._chunk = chunk

    def using(self) -> contextlib.AbstractContextManager[LocalFile]:
        """Give the open file for as long as the block runs.

        Raises:
            Corrupt: it is missing, or not of its size.
        """
        key = (id(self._files), self._place, self._chunk)
        return self._held.using(key, functools.partial(self._files.open_chunk, self._place, self._chunk))

    def read_into(self, jobs: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer with the bytes from its offset on."""
        with self.using() as file, self._named():
            file.read_into(jobs)

    def map(self) -> mmap.mmap:
        """Map the whole file."""
        with self.using() as file, self._named():
            return file.map()

    def _named(self) -> contextlib.AbstractContextManager[None]:
        return naming(self._files.keys[self._place], self._files.shown_chunk(self._place, self._chunk))


class ChunkFiles(Sequence[ChunkFile]):
    """The chunk files that an index has rows for; each one is made when it is asked for.

    Args:
        index: of the whole directory; only rows of one branch are asked for.
        places: number of a leaf in it -> number among the stored ones of the branch.
        files: those of the branch.
        held: keeps files open between the parts of a reading.
    """

    def __init__(self, index: Index, places: Mapping[int, int], files: BranchFiles, held: OpenChunks) -> None:
        self._leaves = index.chunks.leaf
        self._places = places
        self._files = files
        self._held = held

    def __len__(self) -> int:
        return len(self._leaves)

    @overload
    def __getitem__(self, row: int) -> ChunkFile: ...
    @overload
    def __getitem__(self, row: slice) -> list[ChunkFile]: ...
    def __getitem__(self, row: int | slice) -> ChunkFile | list[ChunkFile]:
        if isinstance(row, slice):
            return [self[number] for number in range(len(self))[row]]
        leaf = self._leaves[row]
        chunk = row - bisect.bisect_left(self._leaves, leaf)
        return ChunkFile(self._files, self._held, self._places[leaf], chunk)
