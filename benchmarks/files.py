"""Plain files: what the machine does without any library, and names for files to write."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Files", "bytes_read", "bytes_written", "contents", "forget", "fsync", "read_into", "warm", "write"]

_PIECE = 4 << 20


class Files:
    """New names for files and folders to write; what the last round wrote is removed before the next round."""

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
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
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


def contents(path: Path) -> list[Path]:
    """Every file below a folder; of a file, the file itself."""
    return sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]


def warm(path: Path, room: np.ndarray[Any, Any]) -> None:
    """Bring every file below a folder into the page cache, piece by piece through the room."""
    for each in contents(path):
        with each.open("rb", buffering=0) as file:
            while file.readinto(room):
                pass


def forget(path: Path) -> None:
    """Take every file below a folder out of the page cache; where the system cannot, it stays.

    What was written goes to the disk first: only clean pages can be dropped.
    """
    for each in contents(path):
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def bytes_read() -> int:
    """How many bytes this process has asked the system to read so far, cached or not (Linux: rchar); 0 elsewhere."""
    return _counter("rchar")


def bytes_written() -> int:
    """How many bytes this process has given the system to write so far (Linux: wchar); 0 elsewhere."""
    return _counter("wchar")


def _counter(name: str) -> int:
    counters = Path("/proc/self/io")
    if not counters.exists():
        return 0
    return int(next(line for line in counters.read_text().splitlines() if line.startswith(name)).split()[1])
