"""What reads a leaves directory, and what saves into one, wherever it is: on disk, in memory, or in a bucket."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, Self, TypeAlias

from treering._store.api import Closable, Reader, Store
from treering._store.failures import DataFileMissingError
from treering._store.leaves_folder.moves import Update
from treering._store.pieces import Buffer

SmallFiles: TypeAlias = tuple[str, Sequence[tuple[str, int]], str | None]
"""Some small files of a leaf, as `OpenLeaves.read_small` takes them: folder, names with bytes, attempt."""


class OpenLeaves(Closable):
    """A leaves directory open for reading. It takes no lock; any thread may ask.

    Attributes:
        path: the directory as given.
    """

    path: Path

    @abc.abstractmethod
    def read_index(self) -> bytes:
        """Return the bytes of ``tensorstore_index.json``.

        Raises:
            NotFoundError: there is none; the hint says what is there instead.
            LinkRefusedError: it is a link.
            FormatError: it is larger than any index.
            StoreError: the system refuses.
        """

    @abc.abstractmethod
    def open(self, folder: str, name: str, attempt: str | None) -> Reader:
        """Open the file ``name`` of the leaf whose folder is ``folder``; the caller closes it.

        Args:
            folder: the parts of the path below the directory, joined by ``/``; the empty text is the directory itself.
            name: a file in it; ``0/0`` for a chunk in a folder of its own.
            attempt: look among the files of this attempt first, then at the key path; None: there only.

        Raises:
            DataFileMissingError: it is in neither place. A newer index may name others: read it again.
            LinkRefusedError: it, or a folder on the way, is a link.
            CorruptError: the text leads elsewhere than into the directory.
            StoreError: the system refuses.
        """

    @abc.abstractmethod
    def read_small(self, folder: str, files: Sequence[tuple[str, int]], attempt: str | None) -> list[bytes]:
        """Return what is in some small files of a leaf, in half the time that `open` needs.

        Args:
            folder: the folder of the leaf.
            files: names in it, each with how many bytes are wanted at most: of a longer file comes one byte more.
            attempt: as for `open`; all files have to be in the same one of both places.

        Raises:
            DataFileMissingError: one of them is in neither place, or they are moved just now: `open` finds each one.
            LinkRefusedError: one of them, or a folder on the way, is a link.
            CorruptError: the text leads elsewhere than into the directory.
            StoreError: the system refuses.
        """

    def read_each(self, wanted: Sequence[SmallFiles]) -> list[list[bytes] | None]:
        """Return what `read_small` does for each of several leaves; None where a file is missing."""
        found: list[list[bytes] | None] = []
        for one in wanted:
            files = None
            with contextlib.suppress(DataFileMissingError):
                files = self.read_small(*one)
            found.append(files)
        return found

    @abc.abstractmethod
    def names(self, folder: str, attempt: str | None) -> list[str]:
        """Return all names in the folder of a leaf, of both places, sorted; none when it is in neither.

        Raises:
            LinkRefusedError: it, or a folder on the way, is a link.
            CorruptError: the text leads elsewhere than into the directory.
            StoreError: the system refuses.
        """

    @abc.abstractmethod
    def pending(self) -> set[str]:
        """Return the attempts that were saved without an index and that no index has taken up yet.

        Raises:
            LinkRefusedError: a folder on the way is a link.
            StoreError: the system refuses.
        """


class LeafWriter(Protocol):
    """Takes the files of the leaves of one attempt, a context manager. Any thread may write."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_error: object) -> None: ...

    def write_small(self, folder: str, files: Sequence[tuple[str, bytes]]) -> None:
        """Make the folder of a leaf and its files: for thousands of small leaves.

        Raises:
            StoreError: the system refused.
            UnsupportedError: the folder's path is longer than the system takes.
        """

    def write_file(self, folder: str, name: str, buffers: Iterable[Buffer], size: int) -> None:
        """Write one file of a leaf as the concatenation of ``buffers``; from several threads if you like.

        Raises:
            StoreError: the system refused, or the buffers hold another number of bytes.
            UnsupportedError: the folder's path is longer than the system takes.
        """

    def require_space(self, size: int) -> None:
        """Refuse early what cannot fit.

        Raises:
            StoreError: fewer than ``size`` bytes are free.
        """

    def make_durable(self) -> None:
        """Make what this process has written durable.

        Raises:
            StoreError: the system refused.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class LeftFiles:
    """What older attempts have in a store that moves no files: theirs stay in the folders of their attempts."""

    attempts: frozenset[str]
    """Those of which anything is there."""
    now: float
    """The time, in POSIX seconds by the clock of the store."""
    grace: float
    """Seconds that superseded files stay for readers."""


class JoinedWriter(LeafWriter, Protocol):
    """What a process writes of a save that process 0 has begun; left, its files stay."""

    def withdraw(self) -> None:
        """Remove the files that this process has written, as far as that goes."""


class LeavesSave(LeafWriter, Protocol):
    """One save on its way into a leaves directory: left without `commit`, nothing has changed.

    Attributes:
        attempt: 16 hexadecimal digits, different for each save.
    """

    attempt: str

    @property
    def store(self) -> Store:
        """The directory itself, for the messages of processes."""

    def close(self) -> None:
        """Remove what was not committed or left, give everything back. May be called twice."""

    def abandon(self) -> None:
        """End the save, but leave its files: others may still be writing. A later save sweeps them."""

    def remains(self) -> LeftFiles | None:
        """Return what older attempts have there, where files stay in the folders of attempts; None: they are moved."""

    def commit(self, record: bytes, update: Callable[[bytes | None], Update]) -> None:
        """Make everything durable, and ``update(index)`` the index.

        Args:
            record: the copy of the record that is kept under ``.treering``; empty for none, where nothing is moved.
            update: gets the present index, or None when there is none; what it raises is raised here, and then nothing
                has changed.

        Raises:
            BusyError: others kept saving.
            ExistsError: files that no index lists stand where new ones would go.
            StoreError: the system refused. Nothing has changed, except when the message says otherwise.
        """
