"""Folders below an open one, reached part by part, so that no link is ever followed.

Each folder is opened from its parent's descriptor. The last ones used stay open, so that ten thousand leaves in one
folder cost no more than one walk to it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from treering._store.api import LARGEST_DOCUMENT, Closable, Kind
from treering._store.crew import map_together
from treering._store.failures import link_error
from treering._store.pieces import Buffer, write_all
from treering._store.posix import descriptors, folder
from treering._store.posix.descriptors import OpenDescriptor
from treering._store.posix.folder import Folder
from treering._store.posix.reading import LocalFile
from treering._values.human import pluralize
from treering.errors import FormatError

Parts = tuple[str, ...]
"""The way to a folder below the open one; none for itself."""
AS_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
"""Flags with which a folder is opened."""

_KEPT_OPEN = 64
_THREADS = 5  # that of the caller is one of them
_ONE_BY_ONE = 32
_CONTENT = (os.O_RDWR if os.name == "nt" else os.O_RDONLY) | getattr(os, "O_NONBLOCK", 0)
_OPEN_TOGETHER = 8
_IN_THE_WAY = frozenset({errno.ENOTDIR, errno.ELOOP, errno.EMLINK})
_FULL = frozenset({errno.ENOTEMPTY, errno.EEXIST})


class FolderTree(Closable):
    """What lies below an open folder. Any thread may ask; every method may raise ``OSError``.

    A folder on the way that is a link raises ``LinkRefusedError``, one that is a file ``NotADirectoryError``.

    Attributes:
        root: the open folder.
    """

    def __init__(self, root: Folder, shown: str) -> None:
        """Look below ``root``, which the caller calls ``shown`` and which is closed with this."""
        self.root = root
        self._shown = shown
        self._open: dict[Parts, Folder] = {}  # the last one used is the last one
        self._latest: Parts = ()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the folders that stayed open, and the root."""
        self.forget(())
        self.root.close()

    def forget(self, parts: Parts) -> None:
        """Close that folder, and those below it: they may not be what is there now."""
        with self._lock:
            self._forget(parts)

    def shown(self, parts: Parts, name: str = "") -> str:
        """Return the path as the caller would call it."""
        return os.sep.join((self._shown, *parts, name) if name else (self._shown, *parts))

    def open(self, parts: Parts, name: str, flags: int) -> OpenDescriptor:
        """Open a file, or a folder if the flags say so.

        Raises:
            LinkRefusedError: it is a link.
        """
        with self._lock:
            above = self._at(parts)
            try:
                return above.open(name, flags)
            except OSError as error:
                if error.errno in _IN_THE_WAY:
                    self._refuse_link(above, (*parts, name))
                raise

    def create(self, parts: Parts, name: str) -> OpenDescriptor:
        """Make a file that must not be there and return it open for writing."""
        with self._lock:
            return self._at(parts).create(name)

    def fill(self, parts: Parts, files: Sequence[tuple[str, Iterable[Buffer], int]]) -> None:
        """Make a folder below folders that are there, and small files in it: names, contents, sizes.

        For folders that this process has to itself: the new files are reached through the folder's name, and no other
        thread looks anything up meanwhile.
        """
        with self._lock:
            above = self._at(parts[:-1])
            leaf, start = above.place(parts[-1])
            try:
                os.mkdir(leaf, dir_fd=start)
            except FileExistsError:
                self._refuse_link(above, parts)
            opener = functools.partial(os.open, dir_fd=start)
            for first in range(0, len(files), _OPEN_TOGETHER):
                some = files[first : first + _OPEN_TOGETHER]
                paths = [f"{leaf}/{name}" for name, _, _ in some]
                with OpenDescriptor() as opened:
                    flags, mode = itertools.repeat(folder.NEW | folder.CAREFUL), itertools.repeat(0o666)
                    numbers = opened.open_each(opener, paths, flags, mode)
                    for number, (_, buffers, size) in zip(numbers, some, strict=True):
                        _fill_file(number, buffers, size)

    def make(self, parts: Parts) -> None:
        """Make a folder and all that is missing on the way to it."""
        missing: list[str] = []
        while parts:
            try:
                self._make_last(parts)
                break
            except FileNotFoundError:
                missing.append(parts[-1])
                parts = parts[:-1]
        while missing:
            parts = (*parts, missing.pop())
            self._make_last(parts)

    def _make_last(self, parts: Parts) -> None:
        with self._lock, contextlib.suppress(FileExistsError):
            path, start = self._at(parts[:-1]).place(parts[-1])
            os.mkdir(path, dir_fd=start)

    def find(self, parts: Parts, name: str) -> os.stat_result | None:
        """Return what is known of a name in a folder, itself perhaps a link; None when it is not there."""
        with self._lock, contextlib.suppress(FileNotFoundError):
            return self._at(parts).find(name)
        return None

    def refuse_link(self, parts: Parts) -> None:
        """Refuse a file or folder that is a link.

        Raises:
            LinkRefusedError: it is.
        """
        with self._lock:
            self._refuse_link(self._at(parts[:-1]), parts)

    def scan(self, parts: Parts) -> dict[str, Kind]:
        """Return all names in a folder, and what they stand for."""
        with self._lock:
            return self._at(parts).scan()

    def replace(self, parts: Parts, name: str, to: Parts, new: str) -> None:
        """Rename a file or a folder, in the place of a file or an empty folder that is there."""
        with self._lock:
            target, end = self._at(to).place(new)
            source, start = self._at(parts, kept=to).place(name)
            os.replace(source, target, src_dir_fd=start, dst_dir_fd=end)
            self._forget((*parts, name))
            self._forget((*to, new))

    def remove(self, parts: Parts, *names: str) -> None:
        """Remove files; one that is gone already is as well."""
        with self._lock, contextlib.suppress(FileNotFoundError):
            above = self._at(parts)
            for name in names:
                above.remove(name)

    def remove_empty(self, parts: Parts) -> bool:
        """Remove a folder if nothing is in it; False when something is."""
        with self._lock:
            self._close(parts)
            try:
                self._at(parts[:-1]).remove_folder(parts[-1])
            except FileNotFoundError:
                return True
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                return False
            return True

    def remove_all(self, parts: Parts) -> None:
        """Remove a folder of ours and everything in it; links in it are removed, not followed."""
        emptied = list[Parts]()
        for here, found in self.walk(parts):
            emptied.append(here)
            self.remove(here, *(name for name, kind in found.items() if kind is not Kind.PLACE))
        for here in reversed(emptied):
            self.remove_empty(here)

    def walk(self, parts: Parts) -> Iterator[tuple[Parts, dict[str, Kind]]]:
        """Yield a folder and those below it, each before what is in it, with what `scan` says of it."""
        waiting = [parts]
        while waiting:
            here = waiting.pop()
            with contextlib.suppress(FileNotFoundError):
                found = self.scan(here)
                yield here, found
                waiting += [(*here, name) for name, kind in found.items() if kind is Kind.PLACE]

    def sync(self, parts: Parts) -> None:
        """Make the names in a folder durable."""
        with self._lock:
            self._at(parts).sync()

    def open_file(self, parts: Parts, name: str) -> LocalFile:
        """Open a file to read it; the caller closes it.

        Raises:
            LinkRefusedError: it, or a folder on the way, is a link.
            FileNotFoundError: it is not there.
            NotADirectoryError: a file is on the way.
            StoreError: it is no file.
            OSError: the system refuses.
        """
        opened = self.open(parts, name, folder.READ)
        return LocalFile(Path(self.shown(parts, name)), lambda _: opened)

    def read_index(self, name: str) -> bytes | None:
        """Return the bytes of an index, None when there is none.

        Raises:
            LinkRefusedError: it is a link.
            FormatError: it is larger than any index.
            OSError: the system refuses.
        """
        try:
            file = self.open_file((), name)
        except FileNotFoundError:
            return None
        with file:
            if file.size > LARGEST_DOCUMENT:
                shown = repr(os.fspath(file.path))
                raise FormatError(f"{shown} has {pluralize(file.size, 'bytes')}: no index is that large")
            return file.read(0, file.size)

    def read_small(self, parts: Parts, name: str, most: int) -> bytes:
        """Return what is in a file, at most one byte more than is wanted; raises as `open_file` does."""
        with self.open(parts, name, folder.READ) as opened:
            return first_bytes(opened.number, most)

    def sync_written(self, parts: Parts, written: Iterable[tuple[Parts, Iterable[str]]]) -> None:
        """Make some files in a folder durable, and the names of that folder and of all folders on the way to them.

        The system is not asked again when it has refused.

        Args:
            parts: the folder; this has been open since before anything was written.
            written: folders below it, each with names of files; not asked for where one call makes all durable.
        """
        if self.root.sync_file_system():
            return
        jobs: list[tuple[Parts, str | None]] = []
        folders: dict[Parts, None] = {parts[:count]: None for count in range(len(parts), -1, -1)}
        for below, names in written:
            here = (*parts, *below)
            jobs.extend((here, name) for name in names)
            folders.update((here[:count], None) for count in range(len(here), -1, -1))
        self._sync([*jobs, *((here, None) for here in folders)])

    def sync_folders(self, folders: Iterable[Parts]) -> None:
        """Make the names in those folders durable; the system is not asked again when it has refused."""
        jobs = [(parts, None) for parts in folders]
        if len(jobs) <= _ONE_BY_ONE or not self.root.sync_file_system():
            self._sync(jobs)

    def _sync(self, jobs: Sequence[tuple[Parts, str | None]]) -> None:
        def sync(job: tuple[Parts, str | None]) -> None:
            parts, name = job
            if name is None:
                self.sync(parts)
                return
            with self.open(parts, name, _CONTENT) as opened:
                descriptors.sync(opened.number)

        map_together(sync, jobs, _THREADS if len(jobs) > _ONE_BY_ONE else 1)

    def _at(self, parts: Parts, kept: Parts = ()) -> Folder:
        """Return a folder, opened from the nearest one that is open; the one that is ``kept`` stays open on the way."""
        if parts == self._latest and parts in self._open:
            return self._open[parts]
        self._latest = parts
        known = len(parts)
        while known and parts[:known] not in self._open:
            known -= 1
        here = self.root
        if known:
            here = self._open[parts[:known]] = self._open.pop(parts[:known])  # the last one used
        for count in range(known + 1, len(parts) + 1):
            try:
                below = here.below(parts[count - 1])
            except OSError as error:
                if error.errno in _IN_THE_WAY:
                    self._refuse_link(here, parts[:count])
                raise
            here = below
            if folder.FROM_DESCRIPTOR:  # else only the path tells where it is, and has to be looked at again
                self._open[parts[:count]] = here
                if len(self._open) > _KEPT_OPEN:
                    self._close(next(known for known in self._open if known != kept))
        return here

    def _forget(self, parts: Parts) -> None:
        for known in [known for known in self._open if known[: len(parts)] == parts]:
            self._close(known)

    def _close(self, parts: Parts) -> None:
        if (opened := self._open.pop(parts, None)) is not None:
            opened.close()

    def _refuse_link(self, above: Folder, parts: Parts) -> None:
        if (found := above.find(parts[-1])) is not None and stat.S_ISLNK(found.st_mode):
            raise link_error(self.shown(parts))


def _fill_file(number: int, buffers: Iterable[Buffer], size: int) -> None:
    # A function of its own: where a loop ends with a condition, Python 3.13 lets an interrupt past a `with` around it,
    # so that its lock would stay locked.
    left = size
    for buffer in buffers:
        data = buffer if type(buffer) is bytes else memoryview(buffer).cast("B")
        left -= len(data)
        if (written := os.write(number, data)) < len(data):
            write_all(number, memoryview(data)[written:])
    if left:
        found = pluralize(size - left, "bytes")
        raise OSError(errno.EINVAL, f"the buffers hold {found}, {size} were announced")


def first_bytes(number: int, most: int) -> bytes:
    """Return the first bytes of an open file, one more than wanted if it has more."""
    data = os.read(number, most + 1)
    while len(data) < most and (more := os.read(number, most + 1 - len(data))):
        data += more
    return data
