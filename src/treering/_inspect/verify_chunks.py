"""The files of stored leaves in a leaves directory, compared with what their record says; every difference is told."""

from __future__ import annotations

import dataclasses
import functools
import threading
from array import array
from collections.abc import Iterator, Sequence
from typing import Final

from treering._codec.zarr import ZarrArray, chunk_name, zarray_bytes
from treering._format.findings import Finding
from treering._store.failures import DataFileMissing, LinkRefused
from treering._store.leaves_folder.leaves_folder import LeavesFolder
from treering._store.posix.reading import LocalFile
from treering._values.checksums import SMALLEST_BLOCK, block_bytes, block_checksums, block_count
from treering._values.human import pluralize
from treering.errors import Corrupt, StoreFailed

_PIECE_BYTES: Final = 8 << 20
_ZARRAY: Final = ".zarray"
# Stands for the .zarray where findings are put in order: before every chunk.
_BEFORE: Final = -1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeafFiles:
    """One stored leaf, and what its files have to be."""

    leaf: int
    """Its number in the whole tree."""
    key: str
    """Its key text there."""
    folder: str
    """Its folder."""
    zarr: ZarrArray
    """What its ``.zarray`` says."""
    attempt: str | None
    """Whose staged files are looked at first."""
    verified: bool
    """Whether a record says what follows; else it is empty."""
    sizes: Sequence[int]
    """Bytes of each chunk file."""
    checksums: array[int]
    """Of the whole record."""
    first: int
    """Where in ``checksums`` those of this leaf begin."""

    @property
    def is_small(self) -> bool:
        """Whether it is one file of one block."""
        return len(self.sizes) == 1 and self.sizes[0] <= SMALLEST_BLOCK

    def file(self, number: int) -> str:
        """Return the name of a chunk file, below the directory; that of the ``.zarray`` for a negative number."""
        name = chunk_name(self.zarr, number) if number >= 0 else _ZARRAY
        # Another program may have put an array into the directory itself.
        return f"{self.folder}/{name}" if self.folder else name


class Findings:
    """What was found so far, from any thread; handed out in the order of the leaves and their files."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: list[tuple[tuple[int, int, int], Finding]] = []

    def add(self, leaf: LeafFiles, number: int, span: tuple[int, int], problem: str) -> None:
        """Add one about bytes of a chunk file, or of the ``.zarray`` where the number is negative."""
        finding = Finding(key=leaf.key, file=leaf.file(number), start=span[0], stop=span[1], problem=problem)
        with self._lock:
            self._found.append(((leaf.leaf, number, span[0]), finding))

    def leaves(self) -> set[int]:
        """Return the numbers of the leaves with which something is wrong."""
        return {place[0] for place, _ in self._found}

    def __iter__(self) -> Iterator[Finding]:
        return (finding for _, finding in sorted(self._found, key=lambda pair: pair[0]))


def cannot_be_read(error: Corrupt | LinkRefused | StoreFailed) -> str:
    """Say of a chunk file why it cannot be read, as the end of a sentence.

    Example:
        >>> cannot_be_read(Corrupt("the file is cut short"))
        'has a chunk file that cannot be read (the file is cut short)'
    """
    return f"has a chunk file that cannot be read ({error if isinstance(error, LinkRefused) else error.message})"


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkCheck:
    """Compares the files of leaves with their record."""

    folder: LeavesFolder
    """The directory."""
    findings: Findings
    """Where what is wrong is told."""

    def check_small(self, leaf: LeafFiles) -> int:
        """Check a leaf of one small chunk file at once; return how many bytes that were."""
        (size,) = leaf.sizes
        wanted = zarray_bytes(leaf.zarr)
        names = [(_ZARRAY, len(wanted)), (chunk_name(leaf.zarr, 0), size)]
        try:
            zarray, data = self.folder.read_small(leaf.folder, names, leaf.attempt)
        except (DataFileMissing, Corrupt, LinkRefused, StoreFailed):
            zarray = data = b""
        checksum = leaf.checksums[leaf.first : leaf.first + 1]
        if zarray != wanted or len(data) != size or block_checksums(memoryview(data), size) != checksum:
            for job in self.jobs(leaf):
                job()
        return size

    def jobs(self, leaf: LeafFiles) -> Iterator[functools.partial[int]]:
        """Yield what there is to do for one leaf, a few MiB at a time; each returns how many bytes it compared."""
        yield functools.partial(self._check_zarray, leaf)
        checksum = leaf.first
        for number, size in enumerate(leaf.sizes):
            block = block_bytes(size)
            step = max(_PIECE_BYTES, block)
            for start in range(0, size, step):
                piece = _Piece(
                    number=number, size=size, start=start, stop=min(start + step, size),
                    block=block, checksum=checksum + start // block,
                )  # fmt: skip
                yield functools.partial(self._check_piece, leaf, piece)
            checksum += block_count(size, block)

    def _check_zarray(self, leaf: LeafFiles) -> int:
        wanted = zarray_bytes(leaf.zarr)
        try:
            with self.folder.open(leaf.folder, _ZARRAY, leaf.attempt) as file:
                found = file.read(0, min(file.size, 2 * len(wanted)))
        except DataFileMissing:
            self.findings.add(leaf, _BEFORE, (0, len(wanted)), f"has lost its {_ZARRAY}")
            return 0
        except (Corrupt, LinkRefused, StoreFailed) as error:
            why = error if isinstance(error, LinkRefused) else error.message
            self.findings.add(leaf, _BEFORE, (0, len(wanted)), f"has a {_ZARRAY} that cannot be read ({why})")
            return 0
        if found != wanted:
            self.findings.add(leaf, _BEFORE, _differing(found, wanted), f"has a damaged {_ZARRAY}")
        return 0

    def _check_piece(self, leaf: LeafFiles, piece: _Piece) -> int:
        try:
            with self.folder.open(leaf.folder, chunk_name(leaf.zarr, piece.number), leaf.attempt) as file:
                if not piece.start:
                    self._check_size(leaf, piece, file)
                self._check_blocks(leaf, piece, file)
        except DataFileMissing:
            if not piece.start:
                self.findings.add(leaf, piece.number, (0, piece.size), "lacks a chunk file")
        except (Corrupt, LinkRefused, StoreFailed) as error:
            self.findings.add(leaf, piece.number, (piece.start, piece.stop), cannot_be_read(error))
        return piece.stop - piece.start

    def _check_size(self, leaf: LeafFiles, piece: _Piece, file: LocalFile) -> None:
        if file.size != piece.size:
            how = "cut short" if file.size < piece.size else "too long"
            problem = (
                f"has a chunk file that is {how}: {pluralize(piece.size, 'bytes were')} written, {file.size} are there"
            )
            self.findings.add(leaf, piece.number, (min(file.size, piece.size), max(file.size, piece.size)), problem)

    def _check_blocks(self, leaf: LeafFiles, piece: _Piece, file: LocalFile) -> None:
        """Compare what is there; a block of which a part is missing was told with the size."""
        stop = piece.stop
        if file.size < stop:
            stop = piece.start + max(file.size - piece.start, 0) // piece.block * piece.block
        if stop <= piece.start:
            return
        found = block_checksums(memoryview(file.read(piece.start, stop - piece.start)), piece.block)
        wanted = leaf.checksums[piece.checksum : piece.checksum + len(found)]
        if found == wanted:
            return
        marks = [one != other for one, other in zip(found, wanted, strict=True)]
        for first, last in _runs(marks):
            span = (piece.start + first * piece.block, min(piece.start + last * piece.block, stop))
            self.findings.add(leaf, piece.number, span, "is damaged")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A run of whole blocks of a chunk file."""

    number: int
    """Number of the chunk."""
    size: int
    """Bytes of the whole file."""
    start: int
    stop: int
    block: int
    """Bytes of a block."""
    checksum: int
    """Number of the checksum of its first block."""


def _runs(marks: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield where runs of True begin and end."""
    start: int | None = None
    for place, mark in enumerate([*marks, False]):
        if mark and start is None:
            start = place
        elif not mark and start is not None:
            yield start, place
            start = None


def _differing(found: bytes, wanted: bytes) -> tuple[int, int]:
    """Return the range in which two texts differ; all of it where they are not of one length."""
    if len(found) != len(wanted):
        return 0, max(len(found), len(wanted))
    places = [place for place, (one, other) in enumerate(zip(found, wanted, strict=True)) if one != other]
    return places[0], places[-1] + 1
