"""What a store is: documents and data by name under one place, on disk, in memory, or in a bucket.

Everything above asks for this contract and for nothing else: a `Store` keeps bytes by name, and a `Transaction` changes
what is there so that nothing is lost. What is optional has a default. ``docs/design/store.md`` says for each method
what the disk and buckets do; `treering.testing.StoreContract` tests it.
"""

from __future__ import annotations

import abc
import contextlib
import enum
import mmap
import os
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import PurePath
from typing import Any, Final, NamedTuple, Self, TypeAlias, TypeVar

from treering._store.pieces import Buffer
from treering._values.checkpoint_names import INDEX
from treering._values.human import pluralize
from treering.errors import CorruptError


class Closable:
    """What a ``with`` block closes at its end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what is held open, if anything is. May be called twice."""


LARGEST_DOCUMENT: Final = 2 << 30
"""No document is larger than this many bytes."""

LARGEST_MESSAGE: Final = 64 << 20
"""No message between processes is larger than this many bytes."""

Version: TypeAlias = Hashable
"""Tells one content of a name from another; equal for the same content only."""


ANY: Final[Version] = object()
"""The version to expect where none matters."""


class Outcome(enum.Enum):
    """How a conditional change ended."""

    DONE = "done"
    """It happened, durably once `Store.flush` has returned."""
    LOST = "lost"
    """It did not happen and never will: another version is there."""
    UNKNOWN = "unknown"
    """No answer came, and reading back did not tell: it may have happened, or may yet happen."""


class Held(enum.Enum):
    """Whether the writer of a marker lives."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


class Kind(enum.Enum):
    """What a name stands for."""

    FILE = "file"
    PLACE = "place"
    LINK = "link"
    OTHER = "other"


class Entry(NamedTuple):
    """What is known of a name without reading it."""

    name: str
    """The name."""
    size: int
    """Bytes."""
    modified: float
    """When it was written, in POSIX seconds by the clock of the store."""
    version: Version
    """Its version."""
    kind: Kind = Kind.FILE
    """What it is."""
    key: Hashable = None
    """What locks are known by."""

    @property
    def is_file(self) -> bool:
        """Whether it holds bytes."""
        return self.kind is Kind.FILE


class Document(NamedTuple):
    """The content of a name."""

    data: bytes
    """All of its bytes, or the first of them."""
    version: Version
    """Their version."""


class StagedFolder(NamedTuple):
    """A new folder on disk that does not have its name yet, for files that another library writes."""

    path: str
    """Where it is."""
    write: Callable[[str, bytes], None]
    """Makes a file in it, and the folders above that; a name is a path in it with ``/``."""


class Reader(Closable, abc.ABC):
    """Data open for reading by position: it stays whole whatever a later save does."""

    path: PurePath
    """What messages call it."""
    size: int
    """How many bytes it has."""
    version: Version
    """Its version."""
    threads: int = 2
    """How many threads read faster than fewer."""
    identity: Hashable = None
    """What tells the bytes that are open from all others, whatever name they were opened by; None where nothing does,
    and where they have one name alone."""

    @abc.abstractmethod
    def read(self, offset: int, count: int) -> bytes:
        """Return ``count`` bytes from ``offset`` on; CorruptError where there are fewer."""

    @abc.abstractmethod
    def read_into(self, jobs: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each writable buffer with the bytes from its offset on."""

    def refetch(self, jobs: Sequence[tuple[int, memoryview]]) -> bool:
        """Fill the buffers anew after what came was not what was saved; False where the same would come again."""
        return False

    def map(self) -> mmap.mmap | bytes:
        """Return all bytes, read-only: a mapping where the store can; CorruptError where there are none."""
        if not self.size:
            raise CorruptError(f"{os.fspath(self.path)!r} is empty", offset=0)
        return self.read(0, self.size)


def require_range(file: Reader, offset: int, count: int) -> None:
    """Refuse to read what is not there, before any memory is asked for: the numbers may come from a hostile file.

    Raises:
        CorruptError: the file has fewer bytes.
    """
    if offset < 0 or count < 0 or offset + count > file.size:
        wanted = f"{pluralize(count, 'bytes')} from byte {offset} on are wanted, it has {file.size}"
        raise CorruptError(f"{os.fspath(file.path)!r} is cut short: {wanted}", offset=min(max(offset, 0), file.size))


class Store(Closable, abc.ABC):
    """Documents and data by name under one place, a context manager.

    A name has no slash, but for `find` and `list`. Every method may raise ``OSError``, one of treering's or the
    builtin one. What is done is visible at once to all who open the same place afterwards; `flush` says when it
    survives a power cut.

    Attributes:
        path: the place, as messages call it.
        keeps_open: whether what is open stays whole when its name goes.
        grace: seconds that superseded data stay for readers, where nothing that these hold open keeps them.
        longest_delay: seconds for which a change by a writer that is gone can still arrive.
        asks_by_request: whether each look is a request, for which one waits: what is known without one is not asked,
            several are made at once, and one listing tells of all depths.
        separate_rights: whether each kind of request is a right of its own, so that listing, or removing, alone may be
            denied.
    """

    path: PurePath
    keeps_open: bool = True
    grace: float = 0.0
    longest_delay: float = 0.0
    asks_by_request: bool = False
    separate_rights: bool = False

    @abc.abstractmethod
    def open(self, *, quick: bool = False) -> None:
        """Begin to use a place that is there; ``quick`` for those who open it again and again.

        It may be closed and opened again; files that were opened from it stay open.

        Raises:
            FileNotFoundError: nothing is there, where the store can tell.
            OSError: a single object is there, or, in the place of one that `at` has returned, a link.
        """

    @abc.abstractmethod
    def at(self, name: str) -> Store:
        """Return the place ``name`` in this one, not opened yet."""

    @abc.abstractmethod
    def transaction(self, name: str = INDEX) -> Transaction:
        """Return what changes the place so that nothing is lost: by ``name``, the document that says what is in it."""

    @abc.abstractmethod
    def names(self) -> list[str]:
        """Return the names in it, those of places below too."""

    @abc.abstractmethod
    def places(self) -> list[str]:
        """Return the names of the places below."""

    @abc.abstractmethod
    def find(self, name: str) -> Entry | None:
        """Return what is known of ``name``, which may be ``place/name``, without reading it; None for nothing.

        The empty name is that of the place itself.
        """

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Walk through all that begins with ``prefix``, at any depth, in no order; names are relative to the place."""
        for name in self.names():
            if (found := self.find(name)) is not None and found.is_file:
                if name.startswith(prefix):
                    yield found
            elif (
                found is not None
                and found.kind is Kind.PLACE
                and (f"{name}/".startswith(prefix) or prefix.startswith(f"{name}/"))
            ):
                with open_below(self, name) as place:
                    for entry in place.list(prefix[len(name) + 1 :]):
                        yield entry._replace(name=f"{name}/{entry.name}")

    @abc.abstractmethod
    def open_file(self, name: str) -> Reader:
        """Open data or a document for reading.

        Raises:
            NotFoundError: it is not there.
            FormatError: it is a link that leads elsewhere.
            StoreError: the store refused.
        """

    @abc.abstractmethod
    def read(self, name: str, most: int = LARGEST_DOCUMENT) -> Document | None:
        """Return a document or a message, at most its first ``most`` bytes; None where there is none.

        Raises:
            FormatError: it is a link that leads elsewhere.
            StoreError: the store refused.
        """

    @abc.abstractmethod
    def create(self, name: str, buffers: Iterable[Buffer], size: int, *, like: Version | None = None) -> None:
        """Write data under a name that must not be there, whole; the name is durable after `flush`.

        Args:
            name: the name.
            buffers: C-contiguous buffers of any item type, asked for one after the other; the next one may lie in the
                same memory.
            size: how many bytes they hold together.
            like: the version of what it belongs to, whose owner and permissions it takes over where there are such.

        Raises:
            FileExistsError: something is there.
            OSError: the store refused, or the buffers hold another number of bytes; a part of it may be there.
        """

    @abc.abstractmethod
    def replace(self, name: str, data: bytes, expected: Version = ANY, *, sweep: bool = True) -> Outcome:
        """Make ``data`` the content of a small document in one step, durably.

        Args:
            name: the name.
            data: its bytes; something in them must be random, for a version may say no more than the content does.
            expected: the version to replace; None where nothing may be there, ``ANY`` for whatever is.
            sweep: whether to look for what dead writers of it left, where any could.

        Raises:
            OSError: the store refused; nothing has changed.
        """

    @abc.abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Make ``data`` the content of a message in one step, whatever is there. It need not survive a power cut.

        Raises:
            OSError: the store refused, or its answer was lost; it may be done all the same.
        """

    @abc.abstractmethod
    def remove(self, *names: str) -> None:
        """Remove names, together where the store can; gone already is removed.

        The empty name is that of the place itself, which stays where anything is in it.

        Raises:
            OSError: the store refused some of them; all were tried.
        """

    @abc.abstractmethod
    def flush(self) -> None:
        """Make what was created, put and removed durable, names too; nothing to do where an answer is durable."""


def open_below(store: Store, name: str) -> Store:
    """Open the place ``name`` in an open one; raises as `Store.open` does."""
    place = store.at(name)
    place.open()
    return place


NamesIn: TypeAlias = Callable[[bytes], Collection[str]]
"""Gives the names of all data that a document mentions; its own errors mean a damaged one."""


class Transaction(Closable, abc.ABC):
    """One change of a place that loses nothing, whatever other writers do: begin, stage, commit or abort.

    An attempt to change the document of the place begins with a **marker**, which is there until it is committed or
    aborted: it proves that the data of the attempt are an unfinished save. What proves that an attempt is dead is the
    store's own: a lock that is free, or a version that is gone. An ``OSError`` is a refusal that changed nothing,
    unless `committed` says otherwise. Closed, it lets others in; the marker stays where nothing was committed.
    """

    def make(self) -> Sequence[str]:
        """Make the place if it is missing; durably, unless `Store.at` has returned it. `Store.open` follows.

        Returns:
            The folders that were made, of which `resolve.remove_made` removes those that nothing else uses.
        """
        return ()

    def lock(self) -> bool:
        """Keep other writers out until this is closed, where the store can; False when another one is in.

        Advisory: where a store has no locks, the marker decides who wins.

        Raises:
            FileNotFoundError: the path does not lead to the place any more.
        """
        return True

    def now(self) -> float:
        """Return the time by the clock of the store, in POSIX seconds."""
        return time.time()

    @abc.abstractmethod
    def begin(self, marker: str, base: Version | None) -> None:
        """Put the marker there, durably, of an attempt to replace the document of version ``base``; None for none.

        Raises:
            FileExistsError: it is there already.
            FileNotFoundError: another writer came between: begin again.
            OSError: the store refused, or the document may not be replaced.
        """

    @abc.abstractmethod
    def commit(self, data: bytes) -> Outcome:
        """Make ``data`` the document, if nothing has changed it since this began; durable after `Store.flush`.

        Raises:
            FileNotFoundError: another process moved the place, or removed the marker.
            OSError: the store refused; ask `committed` what became of it.
        """

    @abc.abstractmethod
    def committed(self) -> bool:
        """Whether it has become the document.

        Raises:
            OSError: that cannot be known now.
        """

    @abc.abstractmethod
    def abort(self) -> None:
        """Remove the marker, as far as that goes; the data of the attempt are removed already."""

    @abc.abstractmethod
    def sweep(self, marker: str, data: Sequence[str]) -> Held:
        """Remove what another attempt left, if it can never commit: its data first, its marker last.

        ``marker`` and ``data`` were listed before; ``data`` holds nothing that the document lists.

        Returns:
            YES when its writer lives, UNKNOWN when it may yet commit: nothing was removed then. NO: what could be
            removed was.
        """

    @abc.abstractmethod
    def delete(self, expected: Version, tombstone: str) -> Outcome:
        """Delete the document of that version: it gets the name ``tombstone``, or a tombstone takes its place.

        Raises:
            OSError: the store refused; nothing has changed.
        """

    @abc.abstractmethod
    def delete_tombstone(self, found: Entry) -> bool:
        """Remove a tombstone that lists nothing, of that version; False where it stays, or another one is there."""


T = TypeVar("T")

_KNOWN: Final[ContextVar[dict[Hashable, Any] | None]] = ContextVar("_KNOWN", default=None)
# The first 256 KiB of an object may be one of them.
_MOST_KNOWN: Final = 64


@contextlib.contextmanager
def asking(*, once: bool) -> Iterator[None]:
    """Within, let this thread take what it was told as the answer to the same question; or not, inside of that.

    Only for what looks at a place and opens it: who asks whether something has changed has to ask anew.

    Example:
        >>> with asking(once=True):
        ...     remembered("size", lambda: 1), remembered("size", lambda: 2)
        (1, 1)
    """
    known = _KNOWN.get()
    token = _KNOWN.set(None if not once else {} if known is None else known)
    try:
        yield
    finally:
        _KNOWN.reset(token)


def known_answers() -> dict[Hashable, Any] | None:
    """Return what is known, by question; None where everything is asked anew."""
    return _KNOWN.get()


def remembered(question: Hashable, ask: Callable[[], T]) -> T:
    """Return the answer that is known to a question, or that ``ask`` returns; inside of `asking` it is known then."""
    if (known := _KNOWN.get()) is None:
        return ask()
    if question in known:
        found: T = known[question]
        return found
    answer = ask()
    if len(known) < _MOST_KNOWN:
        known[question] = answer
    return answer
