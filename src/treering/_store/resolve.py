"""From what the caller gives to a store: the only place that knows which kinds there are."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Final, cast

from treering._printable import kind_of
from treering._store.api import Entry, Kind, Reader, Store
from treering._store.memory import MemoryPath, MemoryRoot
from treering._store.pieces import Buffer
from treering._store.posix.root import PosixRoot
from treering._store.root import Root
from treering.errors import StoreFailed, Unsupported

# A pathlib.Path has made one slash of the two.
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_MEMORY: Final = re.compile(r"memory:/")
_POSIX: Final = PosixRoot()
_IN_MEMORY: Final = MemoryRoot()


def is_url(text: str) -> bool:
    """Tell whether a text names a place of a kind that this version does not know.

    Example:
        >>> is_url("gs://bucket/a"), is_url("memory://a"), is_url("runs/a")
        (True, False, False)
    """
    return _URL.match(text) is not None and _MEMORY.match(text) is None


def located(path: str | os.PathLike[str]) -> Path:
    """Return the path that a text or a path object names, in whichever store.

    One that is not on disk has no methods that look at the disk.
    """
    text = os.fspath(path)
    return cast("Path", MemoryPath(text)) if isinstance(path, MemoryPath) or _MEMORY.match(text) else Path(text)


def file_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file, refusing a URL before a folder called ``gs:`` is made.

    Raises:
        Unsupported: it is no text, a URL, or names no file.
    """
    text = os.fspath(path)
    if not isinstance(text, str):
        raise Unsupported(f"a path is a str or os.PathLike of str, found {type(text).__name__}")
    if is_url(text):
        hint = "copy it here first, or save here and copy it there"
        raise Unsupported(f"{text!r} is a URL; only local files are supported", hint=hint)
    if not text or text.endswith(("/", os.sep)):
        raise Unsupported(f"{text!r} is not the name of a file", hint="pass the name of a file")
    return located(path)


def new_file_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of something to write, refusing also ``~``: a folder called so is hardly meant.

    Raises:
        Unsupported: as `file_path`, or it begins with ``~``.

    Example:
        >>> new_file_path("runs/7").name
        '7'
    """
    place = file_path(path)
    if place.parts[:1] and place.parts[0].startswith("~"):
        hint = "'~' is not expanded here; os.path.expanduser does it"
        raise Unsupported(f"{os.fspath(path)!r} begins with '~'", hint=hint)
    return place


def require_path(path: object) -> None:
    """Refuse what is no path, such as a tree in its place.

    Raises:
        Unsupported: neither a str nor an ``os.PathLike``.
    """
    if not isinstance(path, str | os.PathLike):
        raise Unsupported(f"the first argument is the path, a str or os.PathLike; found {kind_of(path)}")


def local_folder_path(path: str | os.PathLike[str], *, new: bool = False) -> Path:
    """Return the path of a folder on disk: a leaves directory needs renames, which no other store has.

    Args:
        path: the folder; it may end in a separator, as a shell completes it.
        new: whether it is to be written.

    Raises:
        Unsupported: as `file_path`, or as `new_folder_path` for a new one, or it is not on disk.

    Example:
        >>> local_folder_path("runs/a/").name
        'a'
    """
    place = (new_file_path if new else file_path)(_without_end(path))
    if root_of(place) is not _POSIX:
        hint = "a leaves directory is a folder on disk; treering.save writes there"
        raise Unsupported(f"{os.fspath(place)!r} is a URL; only local files are supported", hint=hint)
    return place


def new_folder_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a folder to write.

    Raises:
        Unsupported: it is no path, empty, a URL, or begins with ``~``.
    """
    return new_file_path(_without_end(path))


def absolute(path: PurePath) -> Path:
    """Return a path that holds when the program changes its current folder.

    Raises:
        StoreFailed: the path is relative, and the current folder was removed.
    """
    return cast("Path", root_of(path).absolute(path))


def settled(path: str | os.PathLike[str]) -> Path:
    """Return the path by which one place is known, whatever leads to it; itself where the system cannot say."""
    return cast("Path", root_of(path).settled(located(path)))


def root_of(path: str | os.PathLike[str]) -> Root:
    """Return what knows all places of the kind that a path is of."""
    return _IN_MEMORY if isinstance(path, MemoryPath) or _MEMORY.match(os.fspath(path)) else _POSIX


def find_at(path: str | os.PathLike[str], *, follow: bool = True) -> Entry | None:
    """Return what is at a path; None for nothing, and where there can be nothing.

    Raises:
        StoreFailed: the store refuses to say.
    """
    return root_of(path).find(located(path), follow=follow)


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Tell whether a folder is at a path, or a link to one.

    Raises:
        StoreFailed: the store refuses to say.
    """
    found = find_at(path)
    return found is not None and found.kind is Kind.PLACE


def is_seen(path: str | os.PathLike[str]) -> bool:
    """Tell whether anything is known to be at a path."""
    try:
        return find_at(path, follow=False) is not None
    except StoreFailed:
        return False


def store_at(path: str | os.PathLike[str]) -> Store:
    """Return the store at a path, which is not opened yet."""
    return root_of(path).place(located(path))


def opened_store(path: str | os.PathLike[str], *, quick: bool = False) -> Store:
    """Return the store at a path, open; ``quick`` for those who open it again and again.

    Raises:
        OSError: nothing is there, or it cannot be opened.
    """
    store = store_at(path)
    store.open(quick=quick)
    return store


def open_file(path: str | os.PathLike[str]) -> Reader:
    """Open a single file.

    Raises:
        NotFound: nothing is there.
        StoreFailed: it is a folder or no file at all, or the store refuses.
    """
    return root_of(path).open_file(located(path))


def write_file(path: str | os.PathLike[str], buffers: Iterable[Buffer], size: int) -> None:
    """Make a single file, or replace it as a whole, durably; folders above are made.

    Raises:
        StoreFailed: the store refused, or the buffers hold another number of bytes.
    """
    root_of(path).write_file(located(path), buffers, size)


def _without_end(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    require_path(path)
    return f"{path}." if isinstance(path, str) and path.endswith(("/", os.sep)) else path
