"""Files of a leaves directory, opened for reading below an open folder; links are refused."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from treering._store.api import LARGEST_DOCUMENT
from treering._store.posix import folder
from treering._store.posix.folder_tree import FolderTree, Parts
from treering._store.posix.reading import LocalFile
from treering._values.human import pluralize
from treering._values.leaves_names import INDEX
from treering.errors import Format

# Without waiting, should it be a pipe that nobody writes to; files ignore that flag.
_READING = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)


def open_below(tree: FolderTree, parts: Parts, name: str) -> LocalFile:
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
        file = open_below(tree, (), INDEX)
    except FileNotFoundError:
        return None
    with file:
        if file.size > LARGEST_DOCUMENT:
            raise Format(f"{os.fspath(file.path)!r} has {pluralize(file.size, 'bytes')}: no index is that large")
        return file.read(0, file.size)


_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_READING_NO_LINK = _READING | _NO_LINK | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)


def read_small_files(tree: FolderTree, parts: Parts, files: Sequence[tuple[str, int]]) -> list[bytes]:
    """Return what is in some files of a folder.

    Args:
        tree: what the folder lies in.
        parts: the way to the folder.
        files: their names, each with how many bytes are wanted at most: of a longer file comes one byte more.

    Raises:
        LinkRefused: one of them, or a folder on the way, is a link.
        FileNotFoundError: one of them is not there.
        NotADirectoryError: a file is on the way.
        OSError: the system refuses.
    """
    if not (parts and _NO_LINK and folder.FROM_DESCRIPTOR):
        found: list[bytes] = []
        for file in files:
            with tree.open(parts, file[0], _READING) as opened:
                found += _contents([opened.number], [file])
        return found
    names = [name for name, _ in files]
    # Opened beside those that the tree keeps: nobody comes back to it.
    with tree.open(parts[:-1], parts[-1], _FOLDER) as opened:
        opener = functools.partial(os.open, dir_fd=opened.number)
        try:
            numbers = opened.open_each(opener, names, itertools.repeat(_READING_NO_LINK))
        except OSError:
            for name in names:
                tree.refuse_link((*parts, name))
            raise
        return _contents(numbers, files)


def _contents(numbers: Sequence[int], files: Sequence[tuple[str, int]]) -> list[bytes]:
    """Return the first bytes of open files, one more than wanted of those that have more."""
    found: list[bytes] = []
    for number, (_, most) in zip(numbers, files, strict=True):
        data = os.read(number, most + 1)
        while len(data) < most and (more := os.read(number, most + 1 - len(data))):
            data += more
        found.append(data)
    return found
