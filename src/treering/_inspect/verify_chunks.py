"""The files of stored leaves in a leaves directory, compared with what their record says; every difference is told."""

from __future__ import annotations

import dataclasses
import errno
import functools
import itertools
from array import array
from collections.abc import Iterator, Sequence
from operator import itemgetter, ne
from typing import Final

from treering._codec.zarr import ZarrArray, chunk_name, zarray_bytes
from treering._format.findings import Finding, describe_size
from treering._leaves.documents.record import OpenBranch
from treering._store.failures import DataFileMissing, LinkRefused
from treering._store.leaves_folder.open_leaves import OpenLeaves
from treering._values.checksums import block_bytes, block_checksums, block_count
from treering._values.leaves_names import ZARRAY
from treering.errors import Corrupt, StoreFailed

_PIECE_BYTES: Final = 8 << 20
# Stands for the .zarray where findings are put in order: before every chunk.
_BEFORE: Final = -1
_NO_DAMAGE: Final = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM),
        *(errno.EAGAIN, errno.EHOSTUNREACH, errno.ETIMEDOUT),
    }
)


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
    branch: OpenBranch
    """The branch that it is in."""
    sizes: Sequence[int]
    """Bytes of each chunk file; empty where no record says them."""
    first: int
    """Where in the checksums of the record those of this leaf begin."""

    def file(self, number: int) -> str:
        """Return the name of a chunk file, below the directory; that of the ``.zarray`` for a negative number."""
        name = chunk_name(self.zarr, number) if number >= 0 else ZARRAY
        # Another program may have put an array into the directory itself.
        return f"{self.folder}/{name}" if self.folder else name


class Findings:
    """What was found so far, from any thread; handed out in the order of the leaves and their files."""

    def __init__(self) -> None:
        self._found: list[tuple[tuple[int, int, int], Finding]] = []

    def add(self, leaf: LeafFiles, number: int, span: tuple[int, int], problem: str) -> None:
        """Add one about bytes of a chunk file, or of the ``.zarray`` where the number is negative."""
        finding = Finding(key=leaf.key, file=leaf.file(number), start=span[0], stop=span[1], problem=problem)
        self._found.append(((leaf.leaf, number, span[0]), finding))

    def leaves(self) -> set[int]:
        """Return the numbers of the leaves with which something is wrong."""
        return {place[0] for place, _ in self._found}

    def __iter__(self) -> Iterator[Finding]:
        return (finding for _, finding in sorted(self._found, key=lambda pair: pair[0]))


def cannot_be_read(error: Corrupt | LinkRefused | StoreFailed, file: str = "chunk file") -> str:
    """Say of a file of a leaf why it cannot be read, as the end of a sentence.

    Example:
        >>> cannot_be_read(Corrupt("the file is cut short"))
        'has a chunk file that cannot be read (the file is cut short)'
    """
    return f"has a {file} that cannot be read ({error if isinstance(error, LinkRefused) else error.message})"


def require_damage(error: Exception) -> None:
    """Raise what says that reading was refused or not possible now, and nothing of the bytes.

    Raises:
        StoreFailed: there is no permission or connection, or too much is open.

    Example:
        >>> require_damage(Corrupt("the file is cut short"))
    """
    if isinstance(error, StoreFailed) and error.errno in _NO_DAMAGE:
        raise error


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkCheck:
    """Compares the files of leaves with their record."""

    folder: OpenLeaves
    """The directory."""
    findings: Findings
    """Where what is wrong is told."""

    def check_small(self, leaf: LeafFiles) -> int:
        """Check a leaf of one small chunk file at once; return how many bytes that were."""
        (size,) = leaf.sizes
        wanted = zarray_bytes(leaf.zarr)
        names = [(ZARRAY, len(wanted)), (chunk_name(leaf.zarr, 0), size)]
        try:
            zarray, data = self.folder.read_small(leaf.folder, names, leaf.branch.attempt)
        except (DataFileMissing, Corrupt, LinkRefused, StoreFailed):
            zarray = data = b""
        checksum = leaf.branch.record.checksums[leaf.first : leaf.first + 1]
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
                stop = min(start + step, size)
                yield functools.partial(self._check_piece, leaf, number, start, stop, checksum + start // block)
            checksum += block_count(size, block)

    def _check_zarray(self, leaf: LeafFiles) -> int:
        wanted = zarray_bytes(leaf.zarr)
        span, problem = (0, len(wanted)), f"has lost its {ZARRAY}"
        try:
            with self.folder.open(leaf.folder, ZARRAY, leaf.branch.attempt) as file:
                found = file.read(0, min(file.size, 2 * len(wanted)))
            if found == wanted:
                return 0
            span, problem = differing_span(found, wanted), f"has a damaged {ZARRAY}"
        except (Corrupt, LinkRefused, StoreFailed) as error:
            require_damage(error)
            problem = cannot_be_read(error, ZARRAY)
        except DataFileMissing:
            pass
        self.findings.add(leaf, _BEFORE, span, problem)
        return 0

    def _check_piece(self, leaf: LeafFiles, number: int, start: int, stop: int, checksum: int) -> int:
        """Check a run of whole blocks of a chunk file, the first of which has this checksum; return their bytes."""
        size, block = leaf.sizes[number], block_bytes(leaf.sizes[number])
        checksums = leaf.branch.record.checksums
        try:
            with self.folder.open(leaf.folder, chunk_name(leaf.zarr, number), leaf.branch.attempt) as file:
                wrong = None if start else describe_size(file.size, size)
                if wrong is not None:
                    self.findings.add(leaf, number, wrong[0], f"has a chunk file that {wrong[1]}")
                # A block of which a part is missing was told with the size.
                end = stop if file.size >= stop else start + max(file.size - start, 0) // block * block
                data = file.read(start, end - start) if end > start else b""
            found = block_checksums(memoryview(data), block)
            for first, last in differing_runs(found, checksums[checksum : checksum + len(found)]):
                span = (start + first * block, min(start + last * block, end))
                self.findings.add(leaf, number, span, "is damaged")
        except DataFileMissing:
            if not start:
                self.findings.add(leaf, number, (0, size), "lacks a chunk file")
        except (Corrupt, LinkRefused, StoreFailed) as error:
            require_damage(error)
            self.findings.add(leaf, number, (start, stop), cannot_be_read(error))
        return stop - start


def describe_broken(file: str, error: Corrupt | LinkRefused, *prefixes: str) -> Finding:
    """Say what is wrong with a file as a whole; its name, which the finding has, and the prefixes are left out."""
    reason = error.message
    for known in (*prefixes, f"{file} is damaged: "):
        reason = reason.removeprefix(known)
    problem = f"is damaged ({reason})" if isinstance(error, Corrupt) else f"cannot be read ({error})"
    return Finding(key=None, file=file, start=error.offset, stop=None, problem=problem)


def differing_runs(found: array[int], wanted: array[int]) -> Iterator[tuple[int, int]]:
    """Yield where runs of numbers that differ begin and end.

    Example:
        >>> list(differing_runs(array("Q", [1, 2, 3, 4, 5]), array("Q", [1, 7, 7, 4, 7])))
        [(1, 3), (4, 5)]
    """
    if found != wanted:
        for differ, run in itertools.groupby(enumerate(map(ne, found, wanted)), itemgetter(1)):
            places = [place for place, _ in run]
            if differ:
                yield places[0], places[-1] + 1


def differing_span(found: bytes, wanted: bytes) -> tuple[int, int]:
    """Return the range in which two texts differ; all of it where they are not of one length, or do not differ."""
    if len(found) != len(wanted) or found == wanted:
        return 0, max(len(found), len(wanted))
    places = [place for place, (one, other) in enumerate(zip(found, wanted, strict=True)) if one != other]
    return places[0], places[-1] + 1
