"""Plain files: what the machine does without any library, and names for files to write."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Files", "fsync", "read_into", "write"]

_PIECE = 4 << 20


class Files:
    """New names for files to write; what the last round wrote is removed before the next round."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: list[Path] = []
        self._count = 0

    def new(self) -> Path:
        """A path where nothing is."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._count += 1
        path = self._folder / f"{os.getpid()}-{self._count}"
        self._made.append(path)
        return path

    def clear(self) -> None:
        """Remove what was written, and wait until the disk has forgotten it too."""
        for path in self._made:
            path.unlink(missing_ok=True)
        self._made.clear()
        os.sync()


def fsync(path: Path) -> None:
    """Flush a file that is already closed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(path: Path, data: bytes, *, durable: bool) -> Path:
    """Write plainly, through the page cache in pieces of 4 MiB."""
    view = memoryview(data)
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(view), _PIECE):
            file.write(view[start : start + _PIECE])
        if durable:
            os.fsync(file.fileno())
    return path


def read_into(path: Path, room: np.ndarray[Any, Any]) -> None:
    """Read a whole file into memory that is already there."""
    left = memoryview(room)
    with path.open("rb", buffering=0) as file:
        while left and (got := file.readinto(left)):
            left = left[got:]
