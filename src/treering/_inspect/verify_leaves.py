"""Every byte of a leaves directory and of its chunk files compared with its records; jax is not needed for it."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Final

from treering._arrays.incoming import ReadRequest
from treering._arrays.jobs import Progress, Tally, Work, aligned_empty, run_all
from treering._codec.zarr import ZarrArray, chunk_bytes, chunk_count, chunk_name, zarray_bytes
from treering._format.findings import (
    Finding,
    Verification,
    describe_broken,
    differing_runs,
    differing_span,
    require_damage,
)
from treering._format.index import describe_size
from treering._leaves.branches import TRIES, describe_state, is_unchanged, judge_branch, replaced_too_often
from treering._leaves.chunks.files import BranchFiles
from treering._leaves.documents.index import LEAVES_INDEX, IndexBranch, parse_leaves_index
from treering._leaves.documents.record import OpenBranch
from treering._leaves.source import LeavesSource, read_chunk
from treering._store.leaves_api import OpenLeaves
from treering._store.resolve import open_leaves
from treering._values import boxes as box_sums
from treering._values.checksums import SMALLEST_BLOCK, block_bytes, block_checksums, block_count
from treering._values.human import join_first
from treering._values.leaves_names import ZARRAY
from treering.errors import CorruptError, DataFileMissingError, LinkRefusedError, StoreError

_PIECE_BYTES: Final = 8 << 20
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
    files: BranchFiles
    """The files of its branch."""
    place: int
    """Its number among the stored leaves of the branch."""
    sizes: Sequence[int]
    """Bytes of each chunk file; empty where no record says them."""
    first: int
    """Where in the checksums of the record those of this leaf begin."""

    @property
    def branch(self) -> OpenBranch:
        """The branch that it is in."""
        return self.files.branch

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


def cannot_be_read(error: CorruptError | LinkRefusedError | StoreError, file: str = "chunk file") -> str:
    """Say of a file of a leaf why it cannot be read, as the end of a sentence.

    Example:
        >>> cannot_be_read(CorruptError("the file is cut short"))
        'has a chunk file that cannot be read (the file is cut short)'
    """
    return f"has a {file} that cannot be read ({error if isinstance(error, LinkRefusedError) else error.message})"


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
            (found,) = self.folder.read_each([(leaf.folder, names, leaf.branch.attempt)])
        except (CorruptError, LinkRefusedError, StoreError):
            found = None
        zarray, data = found or (b"", b"")
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
        except (CorruptError, LinkRefusedError, StoreError) as error:
            require_damage(error)
            problem = cannot_be_read(error, ZARRAY)
        except DataFileMissingError:
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
        except DataFileMissingError:
            if not start:
                self.findings.add(leaf, number, (0, size), "lacks a chunk file")
        except (CorruptError, LinkRefusedError, StoreError) as error:
            require_damage(error)
            self.findings.add(leaf, number, (start, stop), cannot_be_read(error))
        return stop - start


_SHOWN: Final = 8
_UNCHECKED: Final = "was written by another program and has no checksums, so its arrays were not checked"
# A hostile .zarray of a few bytes may name more chunk files than anybody can count.
_MOST_FINDINGS: Final = 100


def verify_leaves(path: str | os.PathLike[str], progress: Progress | None) -> Verification:
    """Check the index, every record, ``.zarray`` and chunk file; `treering.verify` says more.

    Raises:
        NotFoundError: there is no index.
        FormatError, UnsupportedError: the index or a record is of another format, a newer version, or has an unknown
            dtype.
        BusyError: the directory was saved anew again and again.
        StoreError: the system refuses to read the directory or the index.
    """
    shown = os.fspath(path)
    with open_leaves(path) as folder:
        for _ in range(TRIES):
            try:
                read = list(parse_leaves_index(folder.read_index()).branches.values())
            except (CorruptError, LinkRefusedError) as error:
                return _broken(folder, shown, error)
            found = _checked(folder, shown, read, progress)
            # What is missing or has other bytes may be what a save replaced meanwhile.
            if (found.ok and found.checked) or is_unchanged(folder, read):
                return found
        raise replaced_too_often(folder)


def _broken(folder: OpenLeaves, path: str, error: CorruptError | LinkRefusedError) -> Verification:
    return Verification(path=path, findings=(_index_finding(folder, error),), leaves=0, nbytes=0, checked=True)


def _index_finding(folder: OpenLeaves, error: CorruptError | LinkRefusedError) -> Finding:
    """Say what is wrong with the index, without its name, which the finding has."""
    shown = repr(os.fspath(folder.path / LEAVES_INDEX))
    return describe_broken(LEAVES_INDEX, error, f"{shown}: ", f"{shown} is damaged: ")


def _checked(folder: OpenLeaves, path: str, read: Sequence[IndexBranch], progress: Progress | None) -> Verification:
    """Check one state of the index and everything that it names."""
    broken: list[Finding] = []
    branches: list[OpenBranch] = []
    for branch in read:
        try:
            branches.append(judge_branch(folder, branch))
        except CorruptError as error:
            if error.path is None:
                broken.append(_index_finding(folder, error))
            else:  # a ``.zarray`` of another program
                file, problem = "/".join((*error.path, ZARRAY)), f"is damaged ({error.message})"
                broken.append(Finding(key=None, file=file, start=error.offset, stop=None, problem=problem))
    try:
        source = LeavesSource(folder, branches, read)
    except CorruptError as error:
        return _broken(folder, path, error)
    findings = Findings()
    leaves = list(_stored(source))
    nbytes = _check_files(ChunkCheck(folder, findings), leaves, progress)
    _read_others(source, leaves, findings)
    unchecked = [branch.record.prefix for branch in branches if not branch.verified]
    notes = describe_state(folder, read)
    if len(unchecked) == len(read) > 0:
        notes.insert(0, f"it {_UNCHECKED}")
    elif unchecked:
        shown = join_first(["no prefix" if prefix is None else repr(prefix) for prefix in unchecked], _SHOWN)
        notes.insert(0, f"what is under {shown} {_UNCHECKED}; everything else was checked")
    count, note = len(source.index.keys), "; ".join(notes) or None
    return Verification(
        path=path, findings=(*broken, *findings), leaves=count, nbytes=nbytes, checked=not unchecked, note=note
    )


def _stored(source: LeavesSource) -> Iterator[LeafFiles]:
    """Walk through the stored leaves of all branches, which follow each other in the source's index."""
    numbers = source.index.stored_leaves()
    for branch in source.branches:
        some, numbers = numbers[: len(branch.arrays)], numbers[len(branch.arrays) :]
        files = BranchFiles(branch, [source.index.keys[leaf] for leaf in some], source.folder)
        rows = zip(some, branch.record.folders, branch.arrays, branch.chunk_sizes(), strict=True)
        for place, (leaf, folder, zarr, sizes) in enumerate(rows):
            yield LeafFiles(
                leaf=leaf, key=files.keys[place], folder=folder, zarr=zarr, files=files, place=place, sizes=sizes,
                first=files.first_checksums[place],
            )  # fmt: skip


def _check_files(check: ChunkCheck, leaves: Sequence[LeafFiles], progress: Progress | None) -> int:
    """Compare the files of all leaves that a record describes, large ones in two threads; return how many bytes."""
    small, large = Work(), Work()
    for leaf in leaves:
        if len(leaf.sizes) == 1 and leaf.sizes[0] <= SMALLEST_BLOCK:
            small.jobs.append(functools.partial(check.check_small, leaf))
            small.nbytes += leaf.sizes[0]
        elif leaf.branch.verified:
            large.jobs.extend(check.jobs(leaf))
            large.nbytes += sum(leaf.sizes)
    total = small.nbytes + large.nbytes
    run_all(large, Tally(total, progress), small)
    return total


# ------------------------------------------------------------------------------------------- leaves read as a load does


def _read_others(source: LeavesSource, leaves: Sequence[LeafFiles], findings: Findings) -> None:
    """Read what is compressed, a text, or another program's; of the others every byte has its checksum.

    Args:
        source: what a load would read it from.
        leaves: all leaves; those with which something is wrong already are left out.
        findings: what is wrong is added here.

    Raises:
        UnsupportedError: a compressor that cannot be undone here.
    """
    known = findings.leaves()
    work = Work()
    for leaf in leaves:
        if leaf.leaf in known or (leaf.branch.verified and leaf.zarr.plain):
            continue
        read, chunks = functools.partial(_read_chunk, source, leaf, findings), range(chunk_count(leaf.zarr))
        try:
            leaf.files.require_names(leaf.place)
            work.jobs.extend(functools.partial(read, each) for each in chunks)
            work.nbytes += len(chunks) * chunk_bytes(leaf.zarr)
        except (CorruptError, LinkRefusedError, StoreError) as error:
            require_damage(error)
            bad = 0
            for each in chunks:  # more than there are files; some are enough
                bad += read(each, more=", and there may be more like it" if bad == _MOST_FINDINGS - 1 else "")
                if bad == _MOST_FINDINGS:
                    break
    run_all(work, Tally(0, None))
    known = findings.leaves()
    for leaf in leaves:
        if leaf.leaf not in known and source.index.type_of(leaf.leaf).kind == "str":
            _read_text(source, leaf, findings)


def _read_chunk(source: LeavesSource, leaf: LeafFiles, findings: Findings, number: int, more: str = "") -> int:
    """Read one chunk, and unpack it where its bytes are not those of the array; return how many findings that gave."""
    try:
        if leaf.zarr.plain:
            with leaf.files.open_chunk(leaf.place, number) as file:
                for start in range(0, file.size, _PIECE_BYTES):
                    file.read(start, min(_PIECE_BYTES, file.size - start))
        else:
            if chunk_bytes(leaf.zarr) >= _PIECE_BYTES:  # sizes in documents may be any: memory is taken after this
                leaf.files.open_chunk(leaf.place, number).close()
            room = aligned_empty(leaf.zarr.chunks, source.arrays.dtype_of(leaf.leaf))
            read_chunk(leaf.files, leaf.place, number, room)
    except (CorruptError, LinkRefusedError, StoreError) as error:
        require_damage(error)
        lost = isinstance(error.__cause__, DataFileMissingError)
        problem = "lacks a chunk file" if lost else cannot_be_read(error)
        findings.add(leaf, number, (0, _size_of(source, leaf, number)), problem + more)
        return 1
    return 0


def _size_of(source: LeavesSource, leaf: LeafFiles, number: int) -> int:
    if leaf.branch.verified:
        return leaf.sizes[number]
    try:
        with source.folder.open(leaf.folder, chunk_name(leaf.zarr, number), leaf.branch.attempt) as file:
            return file.size
    except (DataFileMissingError, CorruptError, LinkRefusedError, StoreError):
        return 0


def _read_text(source: LeavesSource, leaf: LeafFiles, findings: Findings) -> None:
    """Decode a text: its bytes may be those that were written, and yet be no UTF-8."""
    request = ReadRequest(leaf.leaf, (box_sums.whole(source.index.type_of(leaf.leaf).shape or ()),))
    source.arrays.read([request], None)
    try:
        bytes(request.arrays[0]).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        number, place = divmod(error.start, leaf.zarr.chunks[0])
        span = (place, place + 1) if leaf.zarr.plain else (0, leaf.sizes[number])
        findings.add(leaf, number, span, "is not UTF-8, as text must be")
