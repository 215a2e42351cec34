"""Stores by path, as all of treering finds them, and files that are written and read through them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from treering._coordination.message_board import Heartbeat, PathMessageBoard
from treering._leaves.commit import begin_save as begin_leaves
from treering._store.crew import Latch
from treering._store.resolve import located, open_file, opened_store, store_at
from treering._store.resolve import write_file as write_pieces
from treering._values.processes import Processes

__all__ = [
    "begin_leaves",
    "copy_to_memory",
    "located",
    "names_at",
    "put_messages",
    "read_file",
    "store_at",
    "write_file",
]


def read_file(path: str | os.PathLike[str]) -> bytes:
    """The content of a file, wherever it is."""
    with open_file(located(path)) as file:
        return file.read(0, file.size)


def names_at(path: str | os.PathLike[str]) -> list[str]:
    """The names at a place, wherever it is, those of places below too."""
    with opened_store(path) as store:
        return store.names()


def write_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file, wherever it is."""
    write_pieces(located(path), [data], len(data))


def put_messages(folder: Path, *names: str) -> None:
    """Let messages of a job be in a folder, which is made; those of far processes lie in a folder of messages."""
    store_at(folder).transaction().make()
    board = PathMessageBoard(folder)
    for name in names:
        board.put(name, b"{}")


def wait_for_others(folder: Path, look: Callable[[], None]) -> None:
    """Leave signs of life in a folder, as process 1 of two does that waits for the other; look after each."""
    signs = Heartbeat(Processes(this=1, count=2), PathMessageBoard(folder), "load", 0.1, look=look)
    signs.wait(Latch(), time.monotonic() + 60)


def copy_to_memory(folder: Path, url: str) -> None:
    """Put every file below a folder at its path below a URL of ``memory://``."""
    for file in filter(Path.is_file, folder.rglob("*")):
        write_file(f"{url}/{file.relative_to(folder).as_posix()}", file.read_bytes())
