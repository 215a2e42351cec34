"""What reads a leaves directory, and what saves into one, wherever it is: on disk, in memory, or in a bucket."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from treering._store.api import Closable, Kind, Reader, Store, open_below
from treering._store.failures import link_error
from treering._store.pieces import Buffer
from treering._values.leaves_names import MARKER, attempt_folder

SmallFiles: TypeAlias = tuple[str, Sequence[tuple[str, int]], str | None]
"""Some small files of a leaf: its folder; names in it, each with how many bytes are wanted at most; the attempt."""


class Unlisted(NamedTuple):
    """What lies in a leaves directory that an index could list; records and arrays are looked for when used."""

    pending: frozenset[str]
    """The attempts that were saved without an index and that no index has taken up yet."""
    records: Iterator[tuple[str, bytes]] = iter(())
    """Attempts with the copies of their records, but for a save that is still on its way to its commit. One that is
    larger than any index is given as empty: as damaged as that."""
    arrays: Iterator[str] = iter(())
    """Every folder that holds a ``.zarray``, sorted. Links are not followed; staged folders, what lies in the folder
    of an array, other leaves directories and groups of zarr, which no program makes for leaves, are left out."""


LeafFile: TypeAlias = tuple[str, Iterable[Buffer], int]
"""A file of a leaf: its name; C-contiguous buffers of any item type, asked for one after the other, whose concatenation
it is; how many bytes they hold together."""


class OpenLeaves(Closable, abc.ABC):
    """A leaves directory open for reading. It takes no lock; any thread may ask.

    Attributes:
        path: the directory as given.
        store: the same, for what else lies in it.
        rebuilds: whether an index that is lost can be made again of what lies there.
    """

    path: Path
    store: Store
    rebuilds: bool

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
    def read_each(self, wanted: Sequence[SmallFiles]) -> list[list[bytes] | None]:
        """Return what is in some small files of each of several leaves, in half the time that `open` needs.

        Of a file that is longer than wanted comes one byte more. None stands for a leaf of which a file is missing, or
        just being moved: `open` finds each one. It raises as `open` does.
        """

    @abc.abstractmethod
    def unlisted(self) -> Unlisted:
        """Return what lies there that an index could list.

        Raises:
            LinkRefusedError: a folder on the way, or a record, is a link.
            StoreError: the system refuses.
        """


@contextlib.contextmanager
def opened_at(directory: Store, parts: Iterable[str]) -> Iterator[Store]:
    """Open a folder below an open directory, one part of its path after the other.

    Raises:
        LinkRefusedError: it, or a folder on the way, is a link.
        OSError: it is not there, or the system refuses.
    """
    with contextlib.ExitStack() as opened:
        for part in parts:
            try:
                below = opened.enter_context(open_below(directory, part))
            except OSError:
                if (found := directory.find(part)) is not None and found.kind is Kind.LINK:
                    raise link_error(os.fspath(directory.path / part)) from None
                raise
            directory = below
        yield directory


def has_saver(directory: Store, attempt: str) -> bool:
    """Tell whether an attempt in an open directory may go on, so that its messages have to stay.

    In a bucket its marker says so, elsewhere the lock of its folder; False where that cannot be told.
    """
    if directory.find("/".join((*attempt_folder(attempt), MARKER))) is not None:
        return True
    with (
        contextlib.suppress(FileNotFoundError, NotADirectoryError),
        opened_at(directory, attempt_folder(attempt)) as place,
        place.transaction() as transaction,
    ):
        return not transaction.lock()
    return False


class LeafWriter(Closable, abc.ABC):
    """Takes the files of the leaves of one attempt. Any thread may write.

    Closed, the part of a process in a joint save leaves its files: others may still be writing, and the next save
    sweeps what was not committed.

    Attributes:
        attempt: 16 hexadecimal digits, different for each save.
        store: the directory itself, for the messages of processes, and for what another program stages.
    """

    attempt: str
    store: Store

    @abc.abstractmethod
    def write(self, folder: str, files: Sequence[LeafFile]) -> None:
        """Make the folder of a leaf if it is missing, and files in it that are not there yet; of thousands of leaves.

        Raises:
            StoreError: the system refused, or buffers hold another number of bytes.
            UnsupportedError: the folder's path is longer than the system takes.
        """

    def require_room(self, folder: str) -> None:
        """Refuse the folder of a leaf that another program is to make, as `write` does; a bucket refuses keys itself.

        Raises:
            UnsupportedError: its path is longer than the system takes.
        """

    @abc.abstractmethod
    def make_durable(self) -> None:
        """Make what this process has written durable.

        Raises:
            StoreError: the system refused; it is not asked again.
        """

    @abc.abstractmethod
    def roll_back(self) -> None:
        """Remove what this process has written, as far as that goes; process 0 does when it is closed."""


@dataclasses.dataclass(frozen=True, slots=True)
class OlderAttempts:
    """What older attempts have in a store that moves no files: theirs stay in the folders of their attempts."""

    attempts: frozenset[str]
    """Those of which anything is there."""
    now: float
    """The time, in POSIX seconds by the clock of the store."""
    grace: float
    """Seconds that superseded files stay for readers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One attempt's staged files on their way to their key paths.

    Example:
        >>> Move(attempt="0123456789abcdef", cleared=("layer/w",)).cleared
        ('layer/w',)
    """

    attempt: str
    """Whose staged files are moved: 16 hexadecimal digits."""
    cleared: tuple[str, ...]
    """Folders of leaves that this save replaces, below the directory, with ``/``. Those that are not there, that have a
    link on their way, or that belong to the attempt itself are left alone."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A new index for a leaves directory, in two steps, and what to do between them.

    The first index is the commit: it sends readers to the staged files. Then old leaves are cleared, staged ones are
    moved to their key paths, and the second index says so. In a bucket nothing is moved, and both are the same.

    Example:
        >>> move = Move(attempt="0123456789abcdef", cleared=())
        >>> Update(moving=b"{1}", moved=b"{2}", moves=(move,)).dropped
        ()
    """

    moving: bytes
    """The index that is the commit: it names the attempts whose files are still staged, and what they clear."""
    moved: bytes
    """The index when everything is at its key path."""
    moves: tuple[Move, ...]
    """What ``moving`` promises."""
    dropped: tuple[str, ...] = ()
    """Attempts that the new index no longer needs: their folders under ``.treering`` go. What unlisted ones have at
    their key paths has to be in some move's ``cleared``."""


Unfinished: TypeAlias = Callable[[bytes], Update | None]
"""Reads what an index promises that its saver did not do; None for nothing, and for an index that cannot be read."""

MakeUpdate: TypeAlias = Callable[[bytes | None, OlderAttempts | frozenset[str]], Update | None]
"""Returns the update for the present index, None when there is none; None as its answer leaves everything as it is.
It is told what older attempts have there, where their files are not moved; where they are, which attempts were saved
without an index and are in none yet."""


class LeavesSave(LeafWriter):
    """One save on its way into a leaves directory: closed without a commit, nothing has changed."""

    @abc.abstractmethod
    def commit(self, record: bytes, update: MakeUpdate, *, listed: bool = True) -> None:
        """Make everything durable, and ``update`` the index.

        Args:
            record: the copy of the record that is kept under ``.treering``; empty for none, where nothing was written.
            update: what it raises is raised here, and then nothing has changed.
            listed: whether the index is to list the save now. If not, what it says of branches stays: where files
                beside it can say that a save waits, ``update`` is not asked.

        Raises:
            BusyError: others kept saving.
            ExistsError: files that no index lists stand where new ones would go.
            StoreError: the system refused. Nothing has changed, except when the message says otherwise.
        """
