"""The files of stored leaves: opened when they are touched, held to their size and ``.zarray``, and closed again."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import threading
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from mmap import mmap
from typing import Final, Self

import xxhash

from treering._codec.zarr import chunk_bytes, chunk_count, chunk_name, chunk_names, grid_of, zarray_bytes
from treering._codec.zarr_chunks import check_chunk_file
from treering._format.index import DAMAGE_HINT
from treering._leaves.documents.record import OpenBranch, first_checksums
from treering._store.api import Reader
from treering._store.failures import naming
from treering._store.leaves_api import OpenLeaves, SmallFiles, opened_at
from treering._values.boxes import Box
from treering._values.checksums import SMALLEST_BLOCK, block_checksums, block_count
from treering._values.human import pluralize
from treering._values.keys import split_key
from treering._values.leaves_names import ZARRAY, parts_of
from treering.errors import CorruptError, DataFileMissingError, TreeringError


@dataclasses.dataclass(frozen=True, slots=True)
class SmallFile:
    """What small leaves of one layout have in common, each of them one chunk file."""

    document: bytes
    """Their ``.zarray``."""
    name: str
    """Name of the chunk file."""
    nbytes: int
    """Bytes of the chunk."""
    raw: bool
    """Whether the file has just these bytes."""
    most: int
    """Bytes that the file has at most, as far as the layout tells."""
    box: Box
    """The whole of a leaf."""


class BranchFiles:
    """The files of one branch. Leaves are counted among the stored ones of the branch; any thread may ask.

    Args:
        branch: the branch.
        keys: key text of each stored leaf, for messages.
        folder: the open directory.
    """

    def __init__(self, branch: OpenBranch, keys: Sequence[str], folder: OpenLeaves) -> None:
        self.branch = branch
        self.keys = keys
        self._folder = folder
        self._described = bytearray(len(branch.arrays))
        self._counted = bytearray(len(branch.arrays))

    def require_described(self, leaf: int) -> None:
        """Compare a leaf's ``.zarray`` with what the record says, once.

        Raises:
            CorruptError: it is missing, or another.
        """
        # That of another writer was read to know the array at all.
        if self._described[leaf] or not self.branch.verified:
            return
        wanted = zarray_bytes(self.branch.arrays[leaf])
        with self._open(leaf, ZARRAY) as file:
            if file.size != len(wanted) or file.read(0, file.size) != wanted:
                raise damaged_error(self.keys[leaf], f"{self._shown(leaf, ZARRAY)} is not the one that was saved")
        self._described[leaf] = 1

    def require_names(self, leaf: int) -> None:
        """Require that another writer's array has as many files as its ``.zarray`` has chunks, before they are counted.

        Looked at once: later on, a file that is gone is found when it is read.

        Raises:
            CorruptError: it has fewer.
        """
        zarr = self.branch.arrays[leaf]
        if self.branch.verified or self._counted[leaf] or chunk_count(zarr) <= 1:
            return
        # As many files as chunks, wherever they lie: what a directory claims to hold then costs no more than it holds.
        *above, last = grid_of(zarr) if zarr.separator == "/" else (chunk_count(zarr),)
        for place in itertools.product(*map(range, above)):
            folder = "/".join((self.branch.record.folders[leaf], *map(str, place)))
            found = self._names_in(folder)
            if len(found) < last:
                names = map(str, itertools.count()) if zarr.separator == "/" else chunk_names(zarr)
                lost = next(name for name in names if name not in found)
                raise damaged_error(
                    self.keys[leaf], f"{folder}/{lost} is missing, and perhaps more of {pluralize(last, 'chunks')}"
                )
        self._counted[leaf] = 1

    def _names_in(self, folder: str) -> set[str]:
        """Return all names in a folder of another writer, which has nothing staged; none where it is not there."""
        shown = os.fspath(self._folder.path)
        with (
            naming(shown, "read"),
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            opened_at(self._folder.store, parts_of(folder)) as place,
        ):
            return set(place.names())
        return set()

    def small_contents(self, leaves: Sequence[tuple[int, SmallFile]]) -> list[bytes | None]:
        """Return the bytes of the only chunk file of each leaf, if all is as it should be, its ``.zarray`` too.

        None where it is not, or where that cannot be told so fast: whoever then opens the files finds out.
        """
        found = self._folder.read_each([self._files_of_small(leaf, small) for leaf, small in leaves])
        # Checked together: a turn to the system and back for each leaf costs the processor's caches.
        return [
            None if files is None else self._check_small(leaf, small, files)
            for (leaf, small), files in zip(leaves, found, strict=True)
        ]

    def _files_of_small(self, leaf: int, small: SmallFile) -> SmallFiles:
        branch = self.branch
        wanted = [] if self._described[leaf] or not branch.verified else [(ZARRAY, len(small.document))]
        size = self.size_of(leaf, 0) if branch.verified and not small.raw else None
        wanted.append((small.name, min(small.most, size or small.most)))
        return branch.record.folders[leaf], wanted, branch.attempt

    def _check_small(self, leaf: int, small: SmallFile, found: Sequence[bytes]) -> bytes | None:
        data = found[-1]
        if not self.branch.verified:
            return data if len(data) <= small.most else None
        size = small.nbytes if small.raw else self.size_of(leaf, 0)
        if len(data) != size or not self._matches(leaf, data):
            return None
        if len(found) > 1:
            if found[0] != small.document:
                return None
            self._described[leaf] = 1
        return data

    def _matches(self, leaf: int, data: bytes) -> bool:
        first = self.first_checksums[leaf]
        # Most small leaves are one block.
        if 0 < len(data) <= SMALLEST_BLOCK and self.first_checksums[leaf + 1] - first == 1:
            return xxhash.xxh3_64_intdigest(data) == self.branch.record.checksums[first]
        return block_checksums(memoryview(data)) == self.all_checksums_of(leaf)

    def all_checksums_of(self, leaf: int) -> array[int]:
        """Return the checksums of all files of a leaf, none for a branch that has none."""
        if not self.branch.verified:
            return array("Q")
        return self.branch.record.checksums[self.first_checksums[leaf] : self.first_checksums[leaf + 1]]

    def open_chunk(self, leaf: int, chunk: int) -> Reader:
        """Open a chunk file; the caller closes it.

        Raises:
            CorruptError: it is missing, or not of its size.
        """
        name = chunk_name(self.branch.arrays[leaf], chunk)
        file = self._open(leaf, name)
        try:
            with name_leaf(self.keys[leaf], self._shown(leaf, name)):
                self._check_size(leaf, chunk, file.size)
        except BaseException:  # an interrupt too; raised again below
            file.close()
            raise
        return file

    def _check_size(self, leaf: int, chunk: int, found: int) -> None:
        wanted = self.size_of(leaf, chunk)
        if wanted is not None and found != wanted:
            how = "cut short" if found < wanted else "too long"
            raise CorruptError(f"it is {how}: {pluralize(wanted, 'bytes were')} written, {found} are there")
        check_chunk_file(self.branch.arrays[leaf], found)

    def shown_chunk(self, leaf: int, chunk: int) -> str:
        """Return the path of a chunk file for people."""
        return self._shown(leaf, chunk_name(self.branch.arrays[leaf], chunk))

    def size_of(self, leaf: int, chunk: int) -> int | None:
        """Return how many bytes a chunk file has to have; None where nothing says it."""
        zarr = self.branch.arrays[leaf]
        if zarr.compressor is None:
            return chunk_bytes(zarr)
        return self.branch.record.sizes[self._first_sizes[leaf] + chunk] if self.branch.verified else None

    def checksums_of(self, leaf: int, chunk: int) -> array[int] | None:
        """Return the checksums of the blocks of a chunk file; None for a branch that has none."""
        if not self.branch.verified:
            return None
        first = self.first_checksums[leaf]
        if self.branch.arrays[leaf].compressor is None:
            first += chunk * block_count(self.size_of(leaf, chunk) or 0)
        else:
            sizes = self._first_sizes[leaf]
            first += self._packed_blocks[sizes + chunk] - self._packed_blocks[sizes]
        return self.branch.record.checksums[first : first + block_count(self.size_of(leaf, chunk) or 0)]

    @functools.cached_property
    def first_checksums(self) -> list[int]:
        """Where the checksums of each leaf begin."""
        return first_checksums(self.branch.record)

    @functools.cached_property
    def _first_sizes(self) -> list[int]:
        counts = (0 if zarr.compressor is None else chunk_count(zarr) for zarr in self.branch.arrays)
        return list(itertools.accumulate(counts, initial=0))

    @functools.cached_property
    def _packed_blocks(self) -> list[int]:
        return list(itertools.accumulate(map(block_count, self.branch.record.sizes), initial=0))

    def _open(self, leaf: int, name: str) -> Reader:
        try:
            return self._folder.open(self.branch.record.folders[leaf], name, self.branch.attempt)
        except DataFileMissingError as error:
            raise damaged_error(self.keys[leaf], f"{self._shown(leaf, name)} is missing") from error

    def _shown(self, leaf: int, name: str) -> str:
        return f"{self.branch.record.folders[leaf]}/{name}"


def damaged_error(key: str, what: str) -> CorruptError:
    """Return the error for a leaf whose files are not what they have to be."""
    return CorruptError(f"leaf {key!r} is damaged: {what}", hint=DAMAGE_HINT)


@contextlib.contextmanager
def name_leaf(key: str, file: str) -> Iterator[None]:
    """Say which leaf, and which file of it, an error is about."""
    try:
        yield
    except CorruptError as error:
        raise damaged_error(key, f"{file}: {error.message}") from error
    except TreeringError as error:
        error.path = split_key(key)
        raise


_MOST: Final = 32


@dataclasses.dataclass(slots=True)
class _KeptFile:
    file: Reader
    users: int = 0


class OpenChunks:
    """Opens files when they are used and keeps the last ones open; a context manager around each reading.

    Any thread may use it, also for several readings at a time. When the last one ends, all files are closed.

    Example:
        >>> import pathlib, tempfile
        >>> from treering._store.posix.reading import LocalFile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "0")
        >>> _ = path.write_bytes(b"ring")
        >>> chunks = OpenChunks()
        >>> with chunks, chunks.using("w/0", lambda: LocalFile(path)) as file:
        ...     file.read(0, 4)
        b'ring'
    """

    def __init__(self) -> None:
        self._held: dict[Hashable, _KeptFile] = {}
        self._readings = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        with self._lock:
            self._readings += 1
        return self

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._readings -= 1
            if not self._readings:
                self._close_down_to(0)

    @contextlib.contextmanager
    def using(self, key: Hashable, opener: Callable[[], Reader]) -> Iterator[Reader]:
        """Give a file for as long as the block runs.

        Args:
            key: which file it is.
            opener: opens it where it is not open.
        """
        with self._lock:
            held = self._held.pop(key, None)
            if held is None:
                held = _KeptFile(opener())
            self._held[key] = held  # the one that was used last stands last
            held.users += 1
            self._close_down_to(_MOST)
        try:
            yield held.file
        finally:
            with self._lock:
                held.users -= 1

    def _close_down_to(self, most: int) -> None:
        """Close those that nobody uses, the one that was used longest ago first."""
        for key in list(self._held)[: max(len(self._held) - most, 0)]:
            if not self._held[key].users:
                self._held.pop(key).file.close()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFile:
    """One chunk file."""

    files: BranchFiles
    """Those of its branch."""
    held: OpenChunks
    """Keeps it open between the parts of a reading."""
    place: int
    """Number of its leaf among the stored ones of the branch."""
    chunk: int
    """Its number in the grid."""

    def using(self) -> contextlib.AbstractContextManager[Reader]:
        """Give the open file for as long as the block runs.

        Raises:
            CorruptError: it is missing, or not of its size.
        """
        key = (id(self.files), self.place, self.chunk)
        return self.held.using(key, functools.partial(self.files.open_chunk, self.place, self.chunk))

    def read_into(self, jobs: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer with the bytes from its offset on."""
        with self.using() as file, self._named():
            file.read_into(jobs)

    def refetch(self, jobs: Sequence[tuple[int, memoryview]]) -> bool:  # noqa: ARG002 - as a `DataReader`
        """Return False: what a disk gave it would give again."""
        return False

    def map(self) -> mmap | bytes:
        """Map the whole file."""
        with self.using() as file, self._named():
            return file.map()

    def _named(self) -> contextlib.AbstractContextManager[None]:
        return name_leaf(self.files.keys[self.place], self.files.shown_chunk(self.place, self.chunk))
