"""Files of a leaves directory, opened for reading below an open folder; links are refused."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from treering._store.failures import DataFileMissing
from treering._store.open_folder import LARGEST_INDEX
from treering._store.posix.folder_tree import FolderTree, Parts
from treering._store.posix.reading import LocalFile
from treering._values.human import counted
from treering._values.leaves_names import INDEX
from treering.errors import Format

# Without waiting, should it be a pipe that nobody writes to; files ignore that flag.
_READING = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)


def opened_below(tree: FolderTree, parts: Parts, name: str) -> LocalFile:
    """Open a file; the caller closes it.

    Raises:
        LinkRefused: it, or a folder on the way, is a link.
        FileNotFoundError: it is not there.
        NotADirectoryError: a file is on the way.
        StoreFailed: it is no file.
        OSError: the system refuses.
    """
    opened = tree.open(parts, name, _READING)
    return LocalFile(Path(tree.shown(parts, name)), lambda _: opened)


def index_bytes(tree: FolderTree) -> bytes | None:
    """Return the bytes of the index, None when there is none.

    Raises:
        LinkRefused: it is a link.
        Format: it is larger than any index.
        OSError: the system refuses.
    """
    try:
        file = opened_below(tree, (), INDEX)
    except FileNotFoundError:
        return None
    with file:
        if file.size > LARGEST_INDEX:
            raise Format(f"{os.fspath(file.path)!r} has {counted(file.size, 'bytes')}: no index is that large")
        return file.read(0, file.size)


def missing(tree: FolderTree, parts: Parts, name: str) -> DataFileMissing:
    """Return the error for a file that is not where it should be."""
    shown = tree.shown(parts, name)
    error = DataFileMissing(f"{shown!r} is missing")
    error.name = name
    error.errno = errno.ENOENT
    error.strerror = os.strerror(errno.ENOENT)
    error.filename = shown
    return error
