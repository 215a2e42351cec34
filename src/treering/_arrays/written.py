"""A laid out save -> its data files: every array taken when its turn comes, checked while hot, written once."""

from __future__ import annotations

import bisect
import dataclasses
from array import array
from collections.abc import Iterable, Iterator, Sequence

from treering._arrays.jobs import Progress
from treering._arrays.outgoing import Outgoing, checked_bytes
from treering._format.blocks import first_blocks
from treering._format.index import Chunks


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where everything will lie."""

    leaves: Outgoing
    """What is saved."""
    chunks: Chunks
    """Which box lies where."""
    headers: Sequence[bytes]
    """The bytes of each file before its data."""

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


class Written:
    """What is known of a save while it is written.

    Attributes:
        checksums: those of all blocks, chunk after chunk; complete when every file's content was taken.
    """

    def __init__(self, layout: Layout, progress: Progress | None) -> None:
        self._layout = layout
        self._starts = first_blocks(layout.chunks)
        self._progress = progress
        self._done = 0
        self.checksums = array("Q", bytes(8 * self._starts[-1]))

    def data_of(self, file: int, *, kept: bool = True) -> Iterator[bytes | memoryview]:
        """Yield the data of one file, in the order of the file; with ``kept=False`` only to note the checksums."""
        chunks = self._layout.chunks
        total = self._layout.data_bytes
        for chunk in chunks.of_file(file):
            data = self._layout.leaves.data_of(chunks.leaf[chunk], chunks.box[chunk])
            for piece in checked_bytes(data, chunks.block[chunk], self.checksums, self._starts[chunk], kept=kept):
                yield piece
                self._done += len(piece)
                if self._progress is not None:
                    self._progress(self._done, total)

    def first_other(self, other: Written) -> int | None:
        """Return the first leaf whose blocks have other checksums in ``other``, None where all are the same."""
        block = next((n for n, (a, b) in enumerate(zip(self.checksums, other.checksums, strict=True)) if a != b), None)
        return None if block is None else self._layout.chunks.leaf[bisect.bisect_right(self._starts, block) - 1]


def content(header: bytes, data: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield a whole file."""
    yield header
    yield from data
