"""Every place on the file systems of this machine, by its path."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath

from treering._store.api import Entry
from treering._store.pieces import Buffer
from treering._store.posix.reading import LocalFile
from treering._store.posix.store import PosixStore, entry_of
from treering._store.posix.writing import replace_file
from treering._store.root import Root
from treering.errors import StoreFailed


class PosixRoot(Root):
    """Local paths."""

    on_disk = True

    def place(self, path: PurePath) -> PosixStore:
        """Return the store at a path."""
        return PosixStore(path)

    def open_file(self, path: PurePath) -> LocalFile:
        """Open a single file; a link is followed."""
        return LocalFile(Path(path))

    def write_file(
        self, path: PurePath, buffers: Iterable[Buffer], size: int, *, new: bool = False, unique: bool = False
    ) -> None:
        """Make a single file, or replace it as a whole, durably."""
        replace_file(Path(path), buffers, size, new=new)

    def find(self, path: PurePath, *, follow: bool = True) -> Entry | None:
        """Return what is at a path; None for nothing, and where there can be nothing.

        Raises:
            StoreFailed: the system refuses to say.
        """
        try:
            return entry_of(path.name, os.stat(path, follow_symlinks=follow))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        except OSError as error:
            raise StoreFailed.of(error, path, "read") from error

    def names(self, path: PurePath) -> Iterator[str]:
        """Walk through the names in a folder, if there is one that can be read."""
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            for entry in entries:
                yield entry.name

    def places(self, path: PurePath, most: int | None = None) -> list[str]:
        """Return the folders among the first names in a folder; a link to one is none."""
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            return [entry.name for entry in itertools.islice(entries, most) if _is_folder(entry)]
        return []

    def absolute(self, path: PurePath) -> Path:
        """Return a path that holds when the program changes its current folder.

        Raises:
            StoreFailed: the path is relative, and the current folder was removed.
        """
        try:
            return Path(path).absolute()
        except OSError as error:
            gone = OSError(error.errno or errno.ENOENT, "it is relative, and the current folder was removed")
            raise StoreFailed.of(gone, path, "find", hint="change to another folder, or pass the whole path") from error

    def settled(self, path: PurePath) -> Path:
        """Return the path without links; itself where the system cannot say."""
        try:
            return Path(os.path.realpath(path))
        except (OSError, ValueError):  # the current folder is gone, or it can be no name
            return Path(path)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False
