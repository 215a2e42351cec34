"""A leaves directory in a store that has no folders and no descriptors: names, and objects that may go.

A save is a compare and swap of the index, and files stay in the folder of their attempt. ``docs/design/buckets.md``
says why each step is where it is. Each of many small requests is a wait, so they are made at once.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import queue
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from treering._codec.key_document import empty_index, find_attempts, is_empty, is_tombstone, unindexed_attempts
from treering._store import leaves_api
from treering._store.api import Document, Outcome, Reader, Store
from treering._store.crew import FirstError, ThreadPool, map_together
from treering._store.failures import busy_error, checkpoint_error, missing_error, naming, with_errno
from treering._store.pieces import Buffer, pieces
from treering._values import leaves_names
from treering._values.checkpoint_names import INDEX as CHECKPOINT
from treering._values.leaves_names import ATTEMPTS, INDEX, MARKER, RECORD, is_attempt, parts_of, staged_leaves
from treering.errors import CorruptError, NotFoundError


class StoredLeaves(leaves_api.OpenLeaves):
    """A leaves directory in a store, open for reading.

    Args:
        store: the place, not opened yet.
        path: the directory as given.

    Raises:
        NotFoundError: nothing is at the path, where the store can tell.
        StoreError: the store refuses.

    Example:
        >>> from treering._store.objects.memory import MemoryStore
        >>> store = MemoryStore()
        >>> store.create("model/w/.zarray", [b"{}"], 2)
        >>> StoredLeaves(store, Path("a")).read_each([("model/w", [(".zarray", 9)], None)])
        [[b'{}']]
    """

    rebuilds = False

    def __init__(self, store: Store, path: Path) -> None:
        self.path = path
        self._shown = os.fspath(path)
        self.store = store
        with naming(self._shown, "read"):
            store.open()

    def close(self) -> None:
        """Close the place; files opened from it stay open."""
        self.store.close()

    def read_index(self) -> bytes:
        """Return the bytes of the index; one without branches is what a save that came to nothing left."""
        with naming(self._shown, "read"):
            found = self.store.read(leaves_names.INDEX)
            if found is not None and not is_empty(found.data):
                return found.data
            checkpoint = self.store.find(CHECKPOINT)
        hint = None
        if checkpoint is not None:
            hint = f"it holds {CHECKPOINT!r}: that is a checkpoint, which treering.load reads"
        elif found is not None and unindexed_attempts(found.data):
            hint = "treering.leaves.index_leaves lists the saves that were left without an index"
        what = f"there is no leaves directory in {self._shown!r}: it has no index that lists a tree"
        raise with_errno(NotFoundError(what, hint=hint), errno.ENOENT, os.path.join(self._shown, leaves_names.INDEX))

    def open(self, folder: str, name: str, attempt: str | None) -> Reader:
        """Open the file ``name`` of the leaf whose folder is ``folder``; the caller closes it."""
        if not name:
            raise CorruptError(f"a file without a name is wanted of {folder!r}")
        for key in _keys(folder, name, attempt):
            try:
                return self.store.open_file(key)
            except NotFoundError:
                continue
        raise missing_error(os.path.join(self._shown, folder, name), name)

    def read_each(self, wanted: Sequence[leaves_api.SmallFiles]) -> list[list[bytes] | None]:
        """Return what is in some small files of each of several leaves, by many requests at once."""

        def fetch(one: tuple[str, str, int, str | None]) -> bytes | None:
            folder, name, most, attempt = one
            with naming(self._shown, "read"):
                read = (self.store.read(key, most + 1) for key in _keys(folder, name, attempt))
                return next((found.data for found in read if found is not None), None)

        each = [(folder, name, most, attempt) for folder, files, attempt in wanted for name, most in files]
        read = iter(map_together(fetch, each, THREADS))
        found = [[data for data in itertools.islice(read, len(files)) if data is not None] for _, files, _ in wanted]
        return [some if len(some) == len(one[1]) else None for some, one in zip(found, wanted, strict=True)]

    def unlisted(self) -> leaves_api.Unlisted:
        """Return the attempts that were saved without an index, which the index names."""
        with naming(self._shown, "read"):
            found = self.store.read(leaves_names.INDEX)
        return leaves_api.Unlisted(frozenset() if found is None else unindexed_attempts(found.data))


def _keys(folder: str, name: str, attempt: str | None) -> list[str]:
    """Return where a file may be: in the folder of the attempt first, then at its key path."""
    key = "/".join((*leaves_names.parts_of(folder), *leaves_names.parts_of(name)))
    return [key] if attempt is None else ["/".join((*leaves_names.staged_leaves(attempt), key)), key]


THREADS: Final = 16
"""So many requests are made at once."""

_WAITING: Final = 64


class RequestQueue:
    """Runs jobs in threads of its own while more are added; few of them wait, so that little memory is held.

    Example:
        >>> found = []
        >>> jobs = RequestQueue()
        >>> for number in range(3):
        ...     jobs.add(lambda number=number: found.append(number))
        >>> jobs.finish()
        >>> jobs.close()
        >>> sorted(found)
        [0, 1, 2]
    """

    def __init__(self) -> None:
        self._jobs: queue.Queue[Callable[[], object] | None] = queue.Queue(_WAITING)
        self._failure = FirstError()
        self._threads = ThreadPool(self._work, THREADS)
        self._threads.__enter__()

    def add(self, job: Callable[[], object]) -> None:
        """Run a job soon; raises the first error of any."""
        self._failure.reraise()
        if self._threads.size:
            self._jobs.put(job)
        else:
            job()

    def finish(self) -> None:
        """Wait for all jobs; raises the first error of any."""
        self._jobs.join()
        self._failure.reraise()

    def close(self) -> None:
        """End the threads; jobs that have not begun are left out. May be called twice."""
        self._failure.error = self._failure.error or RuntimeError("this save has ended")
        for _ in range(self._threads.size):
            self._jobs.put(None)
        self._threads.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._failure:
                if self._failure.error is None:
                    job()
            self._jobs.task_done()


# A file of up to this size is copied, and written while the next ones are made.
_SMALL_BYTES: Final = 1 << 20


class JoinedAttempt(leaves_api.LeafWriter):
    """What this process writes for an attempt that process 0 has begun, a context manager. Any thread may write.

    Args:
        store: the place, not opened yet.
        path: the directory as given.
        attempt: the attempt.

    Attributes:
        store: the place.

    Raises:
        StoreError: the store refused.

    Example:
        >>> from treering._store.objects.memory import MemoryStore
        >>> store = MemoryStore()
        >>> with JoinedAttempt(store, Path("a"), "0123456789abcdef") as joined:
        ...     joined.write("w", [("0.0", [b"tree"], 4)])
        ...     joined.make_durable()
        >>> [found.name for found in store.list()]
        ['.treering/0123456789abcdef/leaves/w/0.0']
    """

    def __init__(self, store: Store, path: Path, attempt: str) -> None:
        self.store = store
        self._transaction = store.transaction(INDEX)
        self.attempt = attempt
        self._shown = os.fspath(path)
        self._ended = False
        self._written: list[str] = []
        with naming(self._shown, "write"), contextlib.ExitStack() as undo:
            undo.callback(self.store.close)
            undo.callback(self._transaction.abort)
            self.store.open()
            self._begin()
            undo.pop_all()
        self._queue = RequestQueue()

    def close(self) -> None:
        """Give everything back; the files stay. May be called twice."""
        if not self._ended:
            self._ended = True
            self._queue.close()
            self.store.close()

    def write(self, folder: str, files: Sequence[leaves_api.LeafFile]) -> None:
        """Put the files of a leaf there, small ones soon."""
        with naming(self._shown, "write"):
            for name, buffers, size in files:
                if self._ended:
                    raise RuntimeError("this save has ended")
                key = "/".join((*staged_leaves(self.attempt), *parts_of(folder), name))
                self._written.append(key)
                if size > _SMALL_BYTES:
                    self._create(key, buffers, size)
                else:
                    data = b"".join(map(bytes, pieces(buffers, size)))
                    self._queue.add(functools.partial(self._create, key, [data], size))

    def make_durable(self) -> None:
        """Wait for everything that was written.

        Raises:
            StoreError: the store refused something of it.
        """
        with naming(self._shown, "write"):
            self._queue.finish()
            self.store.flush()

    def roll_back(self) -> None:
        """Remove what was written here, as far as that goes; the marker of process 0 is the proof for the rest."""
        self._queue.close()
        with contextlib.suppress(OSError):
            self.store.remove(*self._written)

    def _begin(self) -> None:
        """Put there what says that the attempt has begun: process 0 does."""

    def _create(self, key: str, buffers: Iterable[Buffer], size: int) -> None:
        with naming(self._shown, "write"):
            self.store.create(key, buffers, size)


_TRIES: Final = 20
_FIRST_LINE: Final = 256


class LeavesAttempt(JoinedAttempt, leaves_api.LeavesSave):
    """One save on its way into a leaves directory: closed without `commit`, nothing has changed.

    Its base is the index that was there when it began. If that has changed at the commit, the save has failed: saves
    of other prefixes count, too.

    Args:
        store: the place, not opened yet.
        path: the directory as given.
        attempt: that of a joint save, on which its processes have agreed; None: a random one.

    Raises:
        ExistsError: a checkpoint is there.
        BusyError: others kept saving.
        StoreError: the store refused, or does not heed conditions. Nothing has changed.
    """

    def __init__(self, store: Store, path: Path, *, attempt: str | None = None) -> None:
        self._kept = False
        # Of a joint save files and marker stay: others may still be writing, and a later save sweeps them.
        self._joint = attempt is not None
        super().__init__(store, path, attempt or secrets.token_hex(8))

    def close(self) -> None:
        """Remove what was not committed, give everything back. May be called twice."""
        if self._ended:
            return
        try:
            self._queue.close()
            if not (self._kept or self._joint or self._may_be_committed()):
                with contextlib.suppress(OSError):  # what stays is swept by a later save
                    self._remove(self.attempt)
                    self._transaction.abort()
        finally:
            self._transaction.close()
            super().close()

    def roll_back(self) -> None:
        """Let the end of a joint save remove everything: no other process will write anything of it any more."""
        self._joint = False

    def commit(self, record: bytes, update: leaves_api.MakeUpdate, *, listed: bool = True) -> None:
        """Make ``update`` the index, if no other save has changed it since this one began.

        Of a save that is not listed it holds the record: only what the index names is known to be whole.

        Raises:
            BusyError: one has. Nothing of this save stays.
            StoreError: the store refused, or did not answer; the message says whether the new content may be there.
        """
        with naming(self._shown, "write"):
            self.make_durable()
            if record:
                self._create(f"{ATTEMPTS}/{self.attempt}/{RECORD}", [record], len(record))
            self.store.flush()
            change = update(self._base.data, self._older())
            if change is None:
                return
            try:
                outcome = self._transaction.commit(change.moving)
            except FileNotFoundError:  # only an attempt that cannot be committed loses its marker
                outcome = Outcome.LOST
            if outcome is Outcome.LOST:
                raise busy_error(self._shown, "another save changed the index meanwhile", "save again")
            self._kept = True
            if outcome is Outcome.UNKNOWN:
                raise OSError(errno.EIO, f"no answer came to PUT {INDEX!r}, the commit: it may yet be in place")
            self.store.flush()
            # The save is done; the next one sweeps what stays.
            with contextlib.suppress(OSError):
                self._sweep(change)

    # ------------------------------------------------------------------------------------------------------- beginning

    def _begin(self) -> None:
        """Find the base, and put the marker there that says so."""
        found = self.store.read(CHECKPOINT, _FIRST_LINE)
        if found is not None and not is_tombstone(found.data):
            raise checkpoint_error(self._shown)
        for _ in range(_TRIES):
            base = self.store.read(INDEX)
            if base is None:
                # Whatever the answer: what is read now is the base. No index is ever committed by create.
                self.store.replace(INDEX, empty_index(), None)
                continue
            # It has no digest, and goes into the next index: a bit that changed on the way would stay in it.
            if self.store.read(INDEX) != base:
                continue
            self._base: Document = base
            try:
                self._transaction.begin(_marker_of(self.attempt), base.version)
            except FileNotFoundError:  # another save was committed in between, and swept it
                continue
            return
        raise busy_error(self._shown, "other processes keep saving there", "save again")

    # -------------------------------------------------------------------------------------------------------- removing

    def _attempts_there(self) -> frozenset[str] | None:
        """Return the attempts that have anything there, but for the own one; None where that may not be listed."""
        try:
            places = self.store.at(ATTEMPTS).places()
        except PermissionError:
            return None
        return frozenset(place for place in places if is_attempt(place) and place != self.attempt)

    def _older(self) -> leaves_api.OlderAttempts:
        """Return what older attempts have there, as far as it can be listed."""
        attempts = self._attempts_there()
        if attempts is None:
            attempts = find_attempts(self._base.data)
        return leaves_api.OlderAttempts(attempts, self._transaction.now() if attempts else 0.0, self.store.grace)

    def _sweep(self, change: leaves_api.Update) -> None:
        """Remove superseded saves that need to wait no more, then saves that can never be committed."""
        for attempt in change.dropped:
            self._remove(attempt)
        named = find_attempts(change.moving)
        for attempt in (self._attempts_there() or frozenset()) - named:
            names, marker = self._names_of(attempt), _marker_of(attempt)
            # Without a marker nothing proves that no index that was lost had named it.
            if marker in names:
                self._transaction.sweep(marker, [name for name in names if name != marker])

    def _remove(self, attempt: str) -> None:
        self.store.remove(*(name for name in self._names_of(attempt) if name != _marker_of(attempt)))

    def _names_of(self, attempt: str) -> list[str]:
        return [found.name for found in self.store.list(f"{ATTEMPTS}/{attempt}/")]

    def _may_be_committed(self) -> bool:
        try:
            return self._transaction.committed()
        except OSError:  # that cannot be known: then everything stays
            return True


def _marker_of(attempt: str) -> str:
    return f"{ATTEMPTS}/{attempt}/{MARKER}"
