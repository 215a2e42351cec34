"""What knows all places of one kind by their whole path."""

from __future__ import annotations

import abc
import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import PurePath

from treering._store.api import ANY, Entry, Outcome, Reader, Store
from treering._store.failures import taken_meanwhile
from treering._store.pieces import Buffer, pieces


class Root(abc.ABC):
    """All places of one kind by their whole path: the disk, the memory of this process, a bucket.

    What is not said here otherwise for a kind is asked of the store that a path, or the one above it, leads to.
    """

    is_shared = True
    """Whether the processes of a job can see the same place."""

    on_disk = False
    """Whether these are folders, with renames, locks and descriptors."""

    needs_nonce = False
    """Whether a single file there has to have other bytes than every earlier one: its version may say no more."""

    @abc.abstractmethod
    def place(self, path: PurePath) -> Store:
        """Return the store at a path, not opened yet."""

    def open_file(self, path: PurePath) -> Reader:
        """Open a single file; NotFoundError, StoreError."""
        return self.place(path.parent).open_file(path.name)

    def write_file(
        self, path: PurePath, buffers: Iterable[Buffer], size: int, *, new: bool = False, unique: bool = False
    ) -> None:
        """Make a single file, or, unless it is ``new``, replace it as a whole, durably; places above are made.

        ``unique`` says that no other save has these bytes. StoreError; ExistsError where it had to be new.
        """
        data = b"".join(map(bytes, pieces(buffers, size)))
        if self.place(path.parent).replace(path.name, data, None if new else ANY) is Outcome.LOST:
            raise taken_meanwhile(os.fspath(path))

    def find(self, path: PurePath, *, follow: bool = True) -> Entry | None:
        """Return what is at a path; None for nothing. A place is an entry that is no file."""
        return self.place(path.parent).find(path.name)

    def is_taken(self, path: PurePath) -> bool:
        """Whether a file that is written at a path replaces anything."""
        return self.find(path, follow=False) is not None

    def names(self, path: PurePath) -> Iterator[str]:
        """Walk through the names in a place, if there is one that can be read."""
        with contextlib.suppress(OSError):
            yield from self.place(path).names()

    def places(self, path: PurePath, most: int | None = None) -> list[str]:
        """Return the places among the first ``most`` names in a place, or in all of it."""
        with contextlib.suppress(OSError):
            return self.place(path).places()[:most]
        return []

    def absolute(self, path: PurePath) -> PurePath:
        """Return a path that holds when the program changes its current folder."""
        return path

    def settled(self, path: PurePath) -> PurePath:
        """Return the path by which one place is known whatever leads to it."""
        return path
