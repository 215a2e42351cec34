"""The memory store under a simulation, and the saves of coordinators in it, one request at a time.

The store proves of nobody that it lives or is dead: versions decide. A save here makes the requests of
`treering._checkpoint.transaction` in their order: look, begin, sweep, compare and swap, tidy. Between any two of them
its process may sleep for as long as it likes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from torture.simulated_folder import Violation
from torture.versioned_store import VersionedStore
from treering._coordination.message_board import FolderMessageBoard, stale_messages
from treering._store.api import Held, Outcome, Version
from treering._values.checkpoint_names import (
    INDEX,
    attempt_of_journal,
    attempt_of_message,
    data_of,
    decision_name,
    is_data,
    is_message,
    journal_of,
)
from treering.errors import BusyError, ExistsError, StoreError

__all__ = ["Request", "SimulatedSave", "WatchedStore"]


class Request(NamedTuple):
    """An operation of a save: one request to the store."""

    do: Callable[[], None]
    lose: Callable[[], None] | None = None
    """What its process does where no answer comes; None for a request whose answer is never lost."""
    late: Callable[[], None] | None = None
    """What the store does when it comes late."""


class _Index(NamedTuple):
    attempt: str
    data: list[str]
    replaces: list[str]


class WatchedStore(VersionedStore):
    """A memory store that watches whether what its index names stays.

    Attributes:
        commits: all attempts that ever were committed, in order.
        swept: attempts that another saver has swept, since they can never be committed.
        unsaid: attempts of which another saver has swept the decision, or all.
        unheard: attempts of which another saver has swept a message.
        orphans: data that came so late that its attempt was gone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.commits: list[str] = []
        self.swept: set[str] = set()
        self.unsaid: set[str] = set()
        self.unheard: set[str] = set()
        self.orphans: set[str] = set()

    @property
    def index(self) -> str | None:
        """The attempt that is committed."""
        found = self.read_index()
        return None if found is None else found.attempt

    @property
    def data(self) -> list[tuple[str, str]]:
        """The data there is, by attempt and name."""
        return [(name.split("-")[1], name) for name in self.names() if is_data(name)]

    def messages(self) -> list[str]:
        """Return the names of all messages."""
        return sorted(name for name in self.names() if is_message(name))

    def read_index(self) -> _Index | None:
        """Return what the index says."""
        found = self.read(INDEX)
        return None if found is None else _Index(*json.loads(found.data))

    def remove(self, *names: str) -> None:
        """Remove names.

        Raises:
            Violation: the index names one.
        """
        for name in filter(is_data, names):
            if (index := self.read_index()) is not None and name in index.data:
                raise Violation(f"{name} is removed while the index names it")
        super().remove(*names)

    def add_data(self, attempt: str, process: int) -> None:
        """Write the data of a process.

        Raises:
            Violation: nothing proves that it may go, should its writer be killed.
        """
        if self.find(journal_of(attempt)) is None and attempt not in self.swept:
            raise Violation(f"process {process} writes data of attempt {attempt} and there is no marker of it")
        self.create(data_name(attempt, process), [b"x"], 1)

    def add_late(self, attempt: str, process: int) -> None:
        """Write the data of a process that has given up by now."""
        if self.find(name := data_name(attempt, process)) is None:
            self.create(name, [b"x"], 1)
            self.orphans.add(name)

    def remove_data(self, attempt: str, process: int) -> None:
        """Remove the data of a process, if it is there."""
        self.remove(data_name(attempt, process))

    def release(self, holder: int) -> None:
        """A process that was killed holds nothing."""

    def save_alone(self) -> None:
        """Save twice when all is over: the first save moves the version on, the second sweeps what that proves dead.

        Raises:
            Violation: that does not work, or something of others is left after it.
        """
        if self.index != (self.commits[-1] if self.commits else None):
            raise Violation(f"the index is {self.index}, the last commit was {self.commits[-1:]}")
        for attempt in ("e" * 16, "f" * 16):
            save = SimulatedSave(self, attempt, (), overwrite=True)
            for request in save.enter():
                request.do()
            self.add_data(attempt, 0)
            for request in save.commit(1):
                request.do()
        own = data_name("f" * 16, 0)
        # What came after a sweep, from a process that slept through it and was then killed, nothing tells.
        left = [name for of, name in self.data if name != own and of not in self.swept and name not in self.orphans]
        more = [name for name in self.names() if is_message(name) or attempt_of_journal(name)]
        if left or more:
            raise Violation(f"left over: {left + more}")


class SimulatedSave:
    """The save of one coordinator, as requests."""

    def __init__(self, store: WatchedStore, attempt: str, live: Collection[str], *, overwrite: bool) -> None:
        self.alone = False
        """Whether no other process will write anything of this attempt any more."""
        self._store = store
        self._attempt = attempt
        self._live = live
        self._overwrite = overwrite
        self._names: list[str] = []
        self._base: Version | None = None
        self._old: _Index | None = None
        self._transaction = store.transaction()
        self._begun = False
        self._unknown = False
        self._replaces: list[str] = []
        self._count = 0

    def enter(self) -> Iterator[Request]:
        """Yield the requests that begin it; Exists where something is committed and may not be replaced."""
        yield Request(self._list)
        yield Request(self._look)
        yield Request(self._begin)
        yield Request(self._sweep)

    def commit(self, count: int) -> Iterator[Request]:
        """Yield the requests that commit the data of so many processes.

        They raise ExistsError or BusyError where another saver was faster, StoreError where no answer came.
        """
        self._count = count
        yield Request(self._swap, self._lose_answer, self._swap_late)
        yield Request(self._tidy)

    def close(self) -> Iterator[Request]:
        """Yield the requests that end it: what was not committed, and never will be, goes."""
        yield Request(self._remove_own)

    def _swap(self) -> None:
        """Compare and swap the index.

        Raises:
            ExistsError: another saver has committed a first save.
            BusyError: another saver has committed, or removed the marker.
            Violation: it is committed a second time, or without all that belongs to it.
        """
        if not self._begun:
            raise RuntimeError("a commit comes after the marker")
        try:
            outcome = self._transaction.commit(self._document())
        except FileNotFoundError:
            raise BusyError("another process removed the new files") from None
        if outcome is not Outcome.DONE:
            raise (
                ExistsError("a checkpoint is there")
                if self._base is None
                else BusyError("another process saved meanwhile")
            )
        self._note_commit()

    def _swap_late(self) -> None:
        """Compare and swap the index as a bucket does for a request that is under way: it asks for no marker."""
        if self._store.replace(INDEX, self._document(), expected=self._base) is Outcome.DONE:
            self._note_commit()

    def _data(self) -> list[str]:
        return [data_name(self._attempt, process) for process in range(self._count)]

    def _document(self) -> bytes:
        return json.dumps([self._attempt, self._data(), self._replaces]).encode()

    def _note_commit(self) -> None:
        if self._attempt in self._store.commits:
            raise Violation(f"attempt {self._attempt} is committed twice")
        missing = [name for name in self._data() if self._store.find(name) is None]
        if missing:
            raise Violation(f"attempt {self._attempt} is committed without {missing}")
        self._store.commits.append(self._attempt)

    def _lose_answer(self) -> None:
        """Take note that the swap was asked for, and no answer came.

        Raises:
            StoreError: always.
        """
        self._unknown = True
        raise StoreError("no answer came to the commit: the new content may be in place")

    def _list(self) -> None:
        self._names = self._store.names()

    def _look(self) -> None:
        found = self._store.find(INDEX)
        self._base = None if found is None else found.version
        self._old = self._store.read_index()
        if self._base is not None and not self._overwrite:
            raise ExistsError("a checkpoint is there already")

    def _begin(self) -> None:
        self._begun = True
        self._transaction.begin(journal_of(self._attempt), self._base)

    def _sweep(self) -> None:
        store, names = self._store, self._names
        listed = set() if self._old is None else {*self._old.data, *self._old.replaces}
        # A late answer may have committed an attempt since the look: of that one only the marker is left over, as the
        # protocol of buckets reads it at the key before it sweeps.
        now = store.read_index()
        named = listed if now is None else {*listed, *now.data}
        for marker in names:
            if (attempt := attempt_of_journal(marker)) is None:
                continue
            data = [name for name in data_of(attempt, names) if name not in named]
            if self._transaction.sweep(marker, data) is Held.NO:
                store.swept.add(attempt)
                store.unsaid.add(attempt)
                store.unheard.add(attempt)
        for name in stale_messages(names, self._is_live, FolderMessageBoard(store).get):
            store.remove(name)
            if (of := attempt_of_message(name)) is not None:
                (store.unsaid if name == decision_name(of) else store.unheard).add(of)
        # Listed anew: the index may name data that came after the first look.
        self._replaces = [name for name in store.names() if name in listed]

    def _is_live(self, attempt: str) -> bool:
        """Tell whether an attempt may go on: its marker is asked for now, it may have come after the first look."""
        return attempt in self._live or self._store.find(journal_of(attempt)) is not None

    def _tidy(self) -> None:
        for name in self._replaces:
            self._store.remove(name)

    def _remove_own(self) -> None:
        store = self._store
        if not self._begun or self._unknown or self._transaction.committed():
            return
        own = data_of(self._attempt, store.names()) if self.alone else [data_name(self._attempt, 0)]
        for name in own:
            store.remove(name)
        if self.alone:
            self._transaction.abort()


def data_name(attempt: str, process: int) -> str:
    """Return the name of the data of one process."""
    return f"data-{attempt}-{process:05d}-of-00001.safetensors"
