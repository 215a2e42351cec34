"""Where a folder is meant: a local path, which may end in a separator, as a shell completes it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from treering._checkpoint.source import require_path
from treering._wire.state_file import local_path, new_path
from treering.errors import StoreFailed


def folder_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a folder.

    Raises:
        Unsupported: it is no path, empty, or a URL.

    Example:
        >>> folder_path("runs/a/").name
        'a'
    """
    return local_path(_without_end(path))


def new_folder_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a folder to write.

    Raises:
        Unsupported: it is no path, empty, a URL, or begins with ``~``.
    """
    return new_path(_without_end(path))


def absolute(path: Path) -> Path:
    """Return a path that holds when the program changes its current folder.

    Raises:
        StoreFailed: the path is relative, and the current folder was removed.
    """
    try:
        return path.absolute()
    except OSError as error:
        gone = OSError(error.errno or errno.ENOENT, "it is relative, and the current folder was removed")
        raise StoreFailed.of(gone, path, "find", hint="change to another folder, or give the whole path") from error


def _without_end(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    require_path(path)
    return f"{path}." if isinstance(path, str) and path.endswith(("/", os.sep)) else path
