"""What one process of a crew does when it is asked: hold shards, save them, load them, compare them."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.files import bytes_read, bytes_written
from benchmarks.measure import trim_heap
from benchmarks.process_peers import LIBRARIES, LibraryName, library
from benchmarks.process_trees import Layout, Pieces, read_tree, wrong_shard
from benchmarks.workloads import Tree
from treering._coordination.message_board import FolderMessageBoard

__all__ = ["Done", "Station"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What one process counted while it did its part; times are those of a clock that all processes share."""

    read: int
    """Bytes that it read."""
    written: int
    """Bytes that it wrote."""
    notes: int
    """Notes that it put, looked for and removed."""
    part: float
    """When it had put its part; 0 if it put none."""
    end: float
    """When it was done."""


@dataclasses.dataclass(slots=True)
class _Seen:
    """Notes of one save."""

    touched: int = 0
    part: float = 0.0


class Station:
    """One process of a crew."""

    def __init__(self) -> None:
        self._libraries = {name: library(name) for name in LIBRARIES}
        self._tree: Tree = {}
        self._pieces = Pieces({})
        self._work: Callable[[], Any] | None = None
        self._check: Callable[[Any], str | None] | None = None
        self._result: Any = None

    def open(self, path: str) -> None:
        """Take the tree of a file for all that follows."""
        self._tree = read_tree(Path(path))
        self._pieces = Pieces(self._tree)

    def save(self, name: LibraryName, path: str, layout: Layout) -> None:
        """Make everything ready for a save; ``go`` does it."""
        tree = self._pieces.arrays(layout)
        self._ready(lambda: self._libraries[name].save(Path(path), tree), lambda _: None)

    def load(self, name: LibraryName, path: str, layout: Layout) -> None:
        """Make everything ready for a load; ``go`` does it."""
        work = self._libraries[name].loader(Path(path), self._tree, layout)
        self._ready(work, lambda found: wrong_shard(found, self._tree, layout))

    def _ready(self, work: Callable[[], Any], check: Callable[[Any], str | None]) -> None:
        self._work, self._check = work, check
        gc.collect()
        trim_heap()

    def go(self) -> dict[str, Any]:
        """Do what was made ready, and count."""
        assert self._work is not None  # save or load came before
        with _watched() as seen:
            read, written = bytes_read(), bytes_written()
            self._result = self._work()
            end = time.monotonic()
        done = Done(
            read=bytes_read() - read, written=bytes_written() - written, notes=seen.touched, part=seen.part, end=end
        )
        return dataclasses.asdict(done)

    def check(self) -> str | None:
        """Say what is wrong with what was done, or None; it is let go."""
        assert self._check is not None  # save or load came before
        fault = self._check(self._result)
        self._work = self._check = self._result = None
        gc.collect()
        trim_heap()
        return fault


@contextmanager
def _watched() -> Iterator[_Seen]:
    """Count what happens to notes, and remember when a part was put."""
    seen = _Seen()
    put, get, remove = FolderMessageBoard.put, FolderMessageBoard.get, FolderMessageBoard.remove_all

    def counted_put(notes: FolderMessageBoard, name: str, data: bytes) -> None:
        seen.touched += 1
        put(notes, name, data)
        if "-part-" in name and not seen.part:
            seen.part = time.monotonic()

    def counted_get(notes: FolderMessageBoard, name: str) -> bytes | None:
        seen.touched += 1
        return get(notes, name)

    def counted_remove(notes: FolderMessageBoard, names: Collection[str]) -> None:
        seen.touched += len(names)
        remove(notes, names)

    with (
        mock.patch.object(FolderMessageBoard, "put", counted_put),
        mock.patch.object(FolderMessageBoard, "get", counted_get),
        mock.patch.object(FolderMessageBoard, "remove_all", counted_remove),
    ):
        yield seen
