"""Reading one local file by position: small reads, bulk reads into the caller's memory, mappings."""

from __future__ import annotations

import dataclasses
import errno
import mmap
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from treering._store.api import Reader, require_range
from treering._store.crew import map_together
from treering._store.posix.descriptors import OpenDescriptor
from treering._store.posix.folder import READ, Folder, require_file
from treering._values.human import bytes_text, pluralize
from treering.errors import CorruptError, LinkRefusedError, NoMemoryError, StoreError

# How the cache of the Hugging Face hub stores a snapshot's files: content by hash, beside the snapshots.
# https://huggingface.co/docs/huggingface_hub/guides/manage-cache
_HUB_LINK = re.compile(r"((?:\.\./){2,}|/(?:.*/)?)blobs/([0-9a-f]{40}(?:[0-9a-f]{24})?)", re.DOTALL)

# One system call fills at most this much, so that two threads finish together.
_PIECE_BYTES = 8 << 20
# Linux and macOS take no more buffers at once (IOV_MAX).
_MOST_VIEWS = 1024
READING = READ | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""How a file is opened to be read by its path, which may be a link."""
# From here on a second thread pays for itself.
_TWO_THREADS_FROM = 4 << 20


@dataclasses.dataclass(slots=True, eq=False)  # not frozen: one is made for each name that is looked at
class FileVersion:
    """Which file it is, and when it was written; equal as long as nobody has replaced it or written to it."""

    found: os.stat_result
    """What the system knows of it, rights too."""
    data: bytes | None = None
    """What was read: a new file may get the number of an old one within one tick of the clock."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FileVersion):
            return NotImplemented
        mine, others = self.found, other.found
        same = os.path.samestat(mine, others) and mine.st_mtime_ns == others.st_mtime_ns
        return same and (self.data is None or other.data is None or self.data == other.data)

    def __hash__(self) -> int:
        return hash((self.found.st_dev, self.found.st_ino))


class LocalFile(Reader):
    """A local file open for reading, a context manager.

    Reads may come from several threads. Each returns exactly what was asked for or raises; a file that others cut
    short while it is open is ``CorruptError`` at the byte where it ends.

    Attributes:
        path: the path as given.
        size: bytes in the file when it was opened.
        found: what the system knew of it then.

    Raises:
        NotFoundError: nothing is there.
        StoreError: it is a folder or no file at all, or the system refuses.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "a.bin")
        >>> _ = path.write_bytes(b"treering")
        >>> with LocalFile(path) as file:
        ...     file.size, file.read(4, 4)
        (8, b'ring')
    """

    def __init__(self, path: Path, opener: Callable[[int], OpenDescriptor] | None = None) -> None:
        """Open ``path``, or what ``opener(flags)`` opens in its place."""
        self.path = path
        self._position_lock = threading.Lock()
        self._opened: OpenDescriptor | None = None
        try:
            self._opened = OpenDescriptor(os.open, path, READING) if opener is None else opener(READING)
            found = os.fstat(self._opened.number)
            require_file(found)
        except OSError as error:
            self.close()
            raise StoreError.of(error, path, "read") from error
        except ValueError as error:  # a NUL, or half a surrogate pair
            cause = OSError(errno.EINVAL, f"this cannot be the name of a file ({error})")
            raise StoreError.of(cause, path, "read") from error
        self.size: int = found.st_size
        self.found = found

    @property
    def version(self) -> FileVersion:  # type: ignore[override]
        """Which file it is."""
        return FileVersion(self.found)

    @property
    def identity(self) -> FileVersion | None:  # type: ignore[override]
        """Which file it is, under whatever name; None for one that has no other name."""
        return self.version if self.found.st_nlink > 1 else None

    def is_whole(self) -> bool:
        """Tell whether nobody has written into it since it was opened."""
        return self.version == FileVersion(os.fstat(self._descriptor))

    def close(self) -> None:
        """Close the file; mappings made from it stay valid."""
        if self._opened is not None:
            self._opened.close()

    @property
    def _descriptor(self) -> int:
        return -1 if self._opened is None else self._opened.number

    def read(self, offset: int, count: int) -> bytes:
        """Return the ``count`` bytes from ``offset`` on.

        Raises:
            CorruptError: the file does not have them.
            NoMemoryError: the memory is too small for them.
            StoreError: the system refuses.
        """
        require_range(self, offset, count)
        part = self._read_some(offset, count)
        if len(part) == count:
            return part
        data = bytearray(count)
        data[: len(part)] = part
        self._fill(offset + len(part), [memoryview(data)[len(part) :]])
        return bytes(data)

    def read_into(self, jobs: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each writable buffer with the bytes from its offset on; large totals with two threads.

        Args:
            jobs: offsets in the file, each with a C-contiguous, writable buffer.

        Raises:
            CorruptError: the file does not have them; the buffers' content is then undefined.
            StoreError: the system refuses.
        """
        for offset, buffer in jobs:
            require_range(self, offset, buffer.nbytes)
        if sum(buffer.nbytes for _, buffer in jobs) < _TWO_THREADS_FROM:
            for offset, views in _split(jobs):
                self._fill(offset, views)
            return
        map_together(lambda job: self._fill(*job), list(_split(jobs)), 2)

    def map(self) -> mmap.mmap:
        """Map the whole file, read-only. Whoever cuts the file short afterwards ends this process at the next touch.

        Raises:
            CorruptError: the file is empty, or shorter than it was when it was opened.
            StoreError: the system refuses.
        """
        if not self.size:
            raise CorruptError(f"{os.fspath(self.path)!r} is empty", offset=0)
        try:
            return mmap.mmap(self._descriptor, self.size, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise self._cut_short(os.fstat(self._descriptor).st_size) from error
        except OSError as error:
            raise StoreError.of(error, self.path, "map") from error

    def _fill(self, offset: int, views: list[memoryview]) -> None:
        while views:
            if not (count := self._read_some_into(offset, views)):
                raise self._cut_short(offset)
            offset += count
            full = 0
            while full < len(views) and count >= len(views[full]):
                count -= len(views[full])
                full += 1
            views = views[full:]
            if count:
                views[0] = views[0][count:]

    def _read_some(self, offset: int, count: int) -> bytes:
        try:
            if hasattr(os, "pread"):
                return os.pread(self._descriptor, count, offset)
            with self._position_lock:
                os.lseek(self._descriptor, offset, os.SEEK_SET)
                return os.read(self._descriptor, count)
        except OSError as error:
            raise StoreError.of(error, self.path, "read") from error
        except MemoryError as error:
            what = f"there is not enough memory for {bytes_text(count)} of {os.fspath(self.path)!r}"
            raise NoMemoryError(what) from error

    def _read_some_into(self, offset: int, views: list[memoryview]) -> int:
        if not hasattr(os, "preadv"):
            part = self._read_some(offset, len(views[0]))
            views[0][: len(part)] = part
            return len(part)
        try:
            return os.preadv(self._descriptor, views, offset)
        except OSError as error:
            raise StoreError.of(error, self.path, "read") from error

    def _cut_short(self, offset: int) -> CorruptError:
        return CorruptError(
            f"{os.fspath(self.path)!r} is cut short: it had {pluralize(self.size, 'bytes')} when opened", offset=offset
        )


def _split(jobs: Sequence[tuple[int, memoryview]]) -> Iterator[tuple[int, list[memoryview]]]:
    """Yield what one system call reads: buffers whose bytes follow each other in the file, large ones in pieces."""
    start, held = 0, 0
    views: list[memoryview] = []
    for offset, buffer in jobs:
        view = buffer.cast("B") if buffer.nbytes else buffer
        for at in range(0, buffer.nbytes, _PIECE_BYTES):
            part = view[at : at + _PIECE_BYTES]
            if views and (offset + at != start + held or held + len(part) > _PIECE_BYTES or len(views) == _MOST_VIEWS):
                yield start, views
                views = []
            if not views:
                start, held = offset + at, 0
            views.append(part)
            held += len(part)
    if views:
        yield start, views


def open_in(folder: Folder, name: str, path: Path) -> LocalFile:
    """Open a file of an open folder for reading.

    Raises:
        NotFoundError: it is not there.
        LinkRefusedError: it is a link that leads anywhere else than into the blobs of a hub snapshot.
        StoreError: the system refuses.
    """

    def opener(flags: int) -> OpenDescriptor:
        try:
            return folder.open(name, flags)
        except OSError as error:
            if (found := folder.find(name)) is None or not stat.S_ISLNK(found.st_mode):
                raise
            blobs, blob = _find_blob(folder, name, error)
            with Folder(blobs) as below:
                return below.open(blob, flags)

    try:
        return LocalFile(path, opener)
    except StoreError as error:
        if error.errno == errno.ELOOP:
            hint = "copy the files themselves there (cp -L)"
            raise LinkRefusedError(f"{os.fspath(path)!r} is a link, which may lead anywhere", hint=hint) from error
        raise


def _find_blob(folder: Folder, name: str, refused: OSError) -> tuple[str, str]:
    """Return the folder and the name of what a link of the hub's cache leads to.

    From ``snapshots/<revision>/``, or deeper below it, it is ``../../blobs/<hash>``, or an absolute link to the same.
    """
    if (found := _HUB_LINK.fullmatch(folder.link_text(name).replace(os.sep, "/"))) is None:
        raise refused
    parts = Path(folder.path).parts
    levels = found[1].count("/") if found[1].startswith(".") else ([*parts[::-1], "snapshots"].index("snapshots") + 1)
    if len(parts) <= levels or parts[-levels] != "snapshots":
        raise refused
    blobs = os.path.join(*parts[:-levels], "blobs")
    leads_there = found[1].startswith(".") or os.path.realpath(f"{found[1]}blobs") == os.path.realpath(blobs)
    if os.path.islink(blobs) or not leads_there:
        raise refused
    return blobs, found[2]
