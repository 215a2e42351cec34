"""Chunk files that do not hold what is wanted as it is: compressed, padded, in order F, big endian."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Final

from treering._arrays.chunk_grid import view_as_stored
from treering._codec.zarr_chunks import decode
from treering._leaves.chunks.files import BranchFiles, name_leaf
from treering._store.api import Reader
from treering._values.checksums import block_bytes, block_checksums
from treering.errors import Corrupt

if TYPE_CHECKING:
    from numpy.typing import NDArray


# Read at once, in whole blocks; small enough to be in the processor's cache when it is undone.
_PIECE_BYTES: Final = 256 << 10


def read_chunk(files: BranchFiles, leaf: int, chunk: int, into: NDArray[Any]) -> None:
    """Read a whole chunk.

    Args:
        files: of the leaf's branch.
        leaf: its number among the stored leaves of the branch.
        chunk: its number in the grid.
        into: contiguous memory of the shape of a full chunk.

    Raises:
        Corrupt: the file is missing, or its bytes are not those that were saved, or no chunk.
        Unsupported: a compressor that cannot be undone here.
    """
    zarr = files.branch.arrays[leaf]
    with files.open_chunk(leaf, chunk) as file, name_leaf(files.keys[leaf], files.shown_chunk(leaf, chunk)):
        content = _Content(file, files.checksums_of(leaf, chunk))
        decode(zarr, content.read, file.size, view_as_stored(zarr, into))


class _Content:
    """The bytes of a file one after the other, each one checked before it is given out."""

    def __init__(self, file: Reader, checksums: array[int] | None) -> None:
        self._file = file
        self._checksums = checksums
        self._block = block_bytes(file.size)
        self._step = -(-_PIECE_BYTES // self._block) * self._block
        self._at = 0
        self._waiting = memoryview(b"")

    def read(self, count: int) -> bytes:
        """Return the next ``count`` bytes, or what is left of them."""
        if count <= len(self._waiting):
            given, self._waiting = bytes(self._waiting[:count]), self._waiting[count:]
            return given
        parts = [self._waiting]
        left = count - len(self._waiting)
        while left and self._at < self._file.size:
            piece = self._next()
            parts.append(piece[:left])
            self._waiting = piece[left:]
            left -= len(parts[-1])
        return b"".join(parts)

    def _next(self) -> memoryview:
        size = min(self._step, self._file.size - self._at)
        piece = memoryview(self._file.read(self._at, size))
        if self._checksums is not None:
            first = self._at // self._block
            found = block_checksums(piece, self._block)
            wanted = self._checksums[first : first + len(found)]
            if found != wanted:
                wrong = next(n for n, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)
                start = (first + wrong) * self._block
                where = f"bytes {start} to {min(start + self._block, self._file.size)}"
                raise Corrupt(f"{where} have the checksum {found[wrong]:016x} instead of {wanted[wrong]:016x}")
        self._at += size
        return piece
