"""Where a folder is meant: a local path, which may end in a separator, as a shell completes it."""

from __future__ import annotations

import os
from pathlib import Path

from treering._ops.source import require_path
from treering._ops.state_file import local_path

__all__ = ["folder_path"]


def folder_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a folder.

    Raises:
        Unsupported: it is no path, empty, or a URL.

    Example:
        >>> folder_path("runs/a/").name
        'a'
    """
    require_path(path)
    if isinstance(path, str) and path.endswith(("/", os.sep)):
        path = f"{path}."
    return local_path(path)
