"""Large leaves -> chunk files, each one a job for whichever thread is free: streamed and checked, or packed."""

from __future__ import annotations

import abc
import functools
import threading
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from treering._arrays.jobs import Tally, Work
from treering._arrays.outgoing import checked_bytes
from treering._codec.zarr import chunk_name
from treering._codec.zarr_chunks import encode
from treering._leaves.chunks.pieces import LeafPieces, as_stored
from treering._leaves.chunks.written_leaf import WrittenLeaf
from treering._values.checksums import block_bytes, block_checksums, block_count

if TYPE_CHECKING:
    from treering._leaves.folder.staged_files import StagedFiles


def large_work(staged: StagedFiles, leaves: Sequence[WrittenLeaf], tally: Tally) -> Work:
    """Return a job for each chunk file, those of the largest leaves first; their ``.zarray`` are written now."""
    work = Work()
    for leaf in leaves:
        if leaf.head:
            staged.write_small(leaf.folder, leaf.head)
        chunks = _Packed(staged, leaf, tally) if leaf.form.array.compressor is not None else _Raw(staged, leaf, tally)
        work.jobs.extend(functools.partial(chunks.job, place) for place in range(len(leaf.numbers)))
        work.nbytes += leaf.nbytes
    return work


class _Large(abc.ABC):
    """Writes the chunk files of one leaf, each one when a thread takes it."""

    def __init__(self, staged: StagedFiles, leaf: WrittenLeaf, tally: Tally) -> None:
        self._staged = staged
        self._leaf = leaf
        self._form = leaf.form
        self._tally = tally
        self._pieces = LeafPieces(leaf.form.array, leaf.sources)
        self._left = len(leaf.numbers)
        self._lock = threading.Lock()

    def job(self, place: int) -> int:
        """Write one chunk file; what it counts was counted on the way."""
        number = self._leaf.numbers[place]
        self.write(place, number, chunk_name(self._form.array, number))
        with self._lock:
            self._left -= 1
            if not self._left:
                self._pieces.let_go()
                self.finish()
        return 0

    @abc.abstractmethod
    def write(self, place: int, number: int, name: str) -> None:
        """Write one chunk file, the one at ``place`` of those that this process writes."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Note what is known of all files."""


class _Raw(_Large):
    """Chunks that lie in their files as they are."""

    def __init__(self, staged: StagedFiles, leaf: WrittenLeaf, tally: Tally) -> None:
        super().__init__(staged, leaf, tally)
        self._blocks = block_count(leaf.form.chunk, leaf.form.block)
        self._checksums = leaf.checksums = array("Q", bytes(8 * self._blocks * len(leaf.numbers)))

    def write(self, place: int, number: int, name: str) -> None:
        self._staged.write_file(self._leaf.folder, name, self._content(place, number), self._form.chunk)

    def finish(self) -> None:
        """Nothing: the checksums were noted as the bytes came by."""

    def _content(self, place: int, number: int) -> Iterator[bytes | memoryview]:
        data = self._pieces.chunk(number)
        for piece in checked_bytes(data, self._form.block, self._checksums, place * self._blocks):
            yield piece
            self._tally.add(len(piece))


class _Packed(_Large):
    """Chunks that a compressor makes smaller."""

    def __init__(self, staged: StagedFiles, leaf: WrittenLeaf, tally: Tally) -> None:
        super().__init__(staged, leaf, tally)
        self._found: list[tuple[int, array[int]]] = [(0, array("Q"))] * len(leaf.numbers)

    def write(self, place: int, number: int, name: str) -> None:
        form = self._form
        content = encode(form.array, as_stored(self._pieces.chunk(number), form.array))
        size = len(content)
        self._found[place] = (size, block_checksums(memoryview(content), block_bytes(size)))
        self._staged.write_file(self._leaf.folder, name, (content,), size)
        self._tally.add(form.chunk)

    def finish(self) -> None:
        checksums = array("Q")
        for _, found in self._found:
            checksums += found
        self._leaf.checksums = checksums
        self._leaf.sizes = [size for size, _ in self._found]
