"""Saving into a leaves directory by a compare and swap of its index: files stay in the folder of their attempt.

``docs/design/buckets.md`` says why each step is where it is.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Final

from treering._codec.key_document import empty_index, find_attempts, is_tombstone
from treering._store.api import Closable, Document, Outcome, Store
from treering._store.failures import naming, with_errno
from treering._store.leaves_folder.attempts import SweepMessages
from treering._store.leaves_folder.moves import Update
from treering._store.leaves_folder.open_leaves import LeftFiles
from treering._store.pieces import Buffer, pieces
from treering._store.unmoved_leaves.stored_leaves import RequestQueue
from treering._values.checkpoint_names import INDEX as CHECKPOINT
from treering._values.leaves_names import ATTEMPTS, INDEX, MARKER, RECORD, is_attempt, parts_of, staged_leaves
from treering.errors import BusyError, ExistsError

# A file of up to this size is copied, and written while the next ones are made.
_SMALL_BYTES: Final = 1 << 20


class JoinedAttempt(Closable):
    """What this process writes for an attempt that process 0 has begun, a context manager. Any thread may write.

    Args:
        store: the place, not opened yet.
        path: the directory as given.
        attempt: the attempt.

    Attributes:
        store: the place.
        attempt: 16 hexadecimal digits, different for each save.

    Raises:
        StoreError: the store refused.

    Example:
        >>> from treering._store.objects.memory import MemoryStore
        >>> store = MemoryStore()
        >>> with JoinedAttempt(store, Path("a"), "0123456789abcdef") as joined:
        ...     joined.write_file("w", "0.0", [b"tree"], 4)
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
            self._open(undo)
            undo.pop_all()
        self._queue = RequestQueue()

    def close(self) -> None:
        """Give everything back; the files stay. May be called twice."""
        if not self._ended:
            self._ended = True
            self._queue.close()
            self.store.close()

    def require_space(self, size: int) -> None:
        """Refuse early what cannot fit, where the store can tell."""
        with naming(self._shown, "write"):
            self._transaction.require_space(size)

    def write_small(self, folder: str, files: Sequence[tuple[str, bytes]]) -> None:
        """Put the files of a leaf there, soon."""
        with naming(self._shown, "write"):
            for name, data in files:
                self._queue.add(functools.partial(self._create, self._key_of(folder, name), [data], len(data)))

    def write_file(self, folder: str, name: str, buffers: Iterable[Buffer], size: int) -> None:
        """Write one file of a leaf as the concatenation of ``buffers``; a small one soon."""
        with naming(self._shown, "write"):
            if size > _SMALL_BYTES:
                self._create(self._key_of(folder, name), buffers, size)
            else:
                self.write_small(folder, [(name, b"".join(map(bytes, pieces(buffers, size))))])

    def make_durable(self) -> None:
        """Wait for everything that was written.

        Raises:
            StoreError: the store refused something of it.
        """
        with naming(self._shown, "write"):
            self._queue.finish()
            self.store.flush()

    def withdraw(self) -> None:
        """Remove what was written here, as far as that goes; the marker of process 0 is the proof for the rest."""
        self._queue.close()
        with contextlib.suppress(OSError):
            self.store.remove(*self._written)

    def _open(self, undo: contextlib.ExitStack) -> None:
        """Begin to use the place; ``undo`` is what has to be undone if that fails."""
        del undo
        self.store.open()

    def _key_of(self, folder: str, name: str) -> str:
        if self._ended:
            raise RuntimeError("this save has ended")
        key = "/".join((*staged_leaves(self.attempt), *parts_of(folder), name))
        self._written.append(key)
        return key

    def _create(self, key: str, buffers: Iterable[Buffer], size: int) -> None:
        with naming(self._shown, "write"):
            self.store.create(key, buffers, size)


_TRIES: Final = 20
_FIRST_LINE: Final = 256


class LeavesAttempt(JoinedAttempt):
    """One save on its way into a leaves directory, a context manager: left without `commit`, nothing has changed.

    Its base is the index that was there when it began. If that has changed at the commit, the save has failed: saves
    of other prefixes count, too.

    Args:
        store: the place, not opened yet.
        path: the directory as given.
        sweep: removes the messages of processes that may go.
        attempt: that of a joint save, on which its processes have agreed; None: a random one.
        live: the attempts whose messages stay, beside the own one.

    Attributes:
        attempt: 16 hexadecimal digits, different for each save.

    Raises:
        ExistsError: a checkpoint is there.
        BusyError: others kept saving.
        StoreError: the store refused, or does not heed conditions. Nothing has changed.
    """

    def __init__(
        self, store: Store, path: Path, sweep: SweepMessages, attempt: str | None = None, live: Collection[str] = ()
    ) -> None:
        self._kept = False
        self._sweep_stale = sweep
        self._live = live
        super().__init__(store, path, attempt or secrets.token_hex(8))

    def close(self) -> None:
        """Remove what was not committed, give everything back. May be called twice."""
        if self._ended:
            return
        try:
            self._queue.close()
            if not self._kept and not self._may_be_committed():
                with contextlib.suppress(OSError):  # what stays is swept by a later save
                    self._remove(self.attempt)
                    self._transaction.abort()
                    self._transaction.unmake()
        finally:
            self._transaction.close()
            super().close()

    def abandon(self) -> None:
        """End the save, but leave its files and its marker: others may still be writing. A later save sweeps them."""
        self._kept = True
        self.close()

    def remains(self) -> LeftFiles:
        """Return what older attempts have there, as far as it can be listed."""
        with naming(self._shown, "read"):
            attempts = self._attempts_there()
            if attempts is None:
                attempts = find_attempts(self._base.data)
            return LeftFiles(attempts, self._transaction.now() if attempts else 0.0, self.store.grace)

    def commit(self, record: bytes, update: Callable[[bytes | None], Update]) -> None:
        """Make ``update(index)`` the index, if no other save has changed it since this one began.

        Raises:
            BusyError: one has. Nothing of this save stays.
            StoreError: the store refused, or did not answer; the message says whether the new content may be there.
        """
        with naming(self._shown, "write"):
            self.make_durable()
            if record:
                self._create(f"{ATTEMPTS}/{self.attempt}/{RECORD}", [record], len(record))
            self.store.flush()
            change = update(self._base.data)
            try:
                outcome = self._transaction.commit(change.moving)
            except FileNotFoundError:  # only an attempt that cannot be committed loses its marker
                outcome = Outcome.LOST
            if outcome is Outcome.LOST:
                raise self._busy("another save changed the index meanwhile")
            self._kept = True
            if outcome is Outcome.UNKNOWN:
                raise OSError(errno.EIO, f"no answer came to PUT {INDEX!r}, the commit: it may yet be in place")
            self.store.flush()
            # The save is done; the next one sweeps what stays.
            with contextlib.suppress(OSError):
                self._sweep(change)

    # ------------------------------------------------------------------------------------------------------- beginning

    def _require_no_checkpoint(self) -> None:
        found = self.store.read(CHECKPOINT, _FIRST_LINE)
        if found is not None and not is_tombstone(found.data):  # a reader would see only one of two forms
            hint = "save to a directory of its own"
            error = ExistsError(f"a checkpoint of treering.save is at {self._shown!r} already", hint=hint)
            raise with_errno(error, errno.EEXIST, self._shown)

    def _open(self, undo: contextlib.ExitStack) -> None:
        self._transaction.make()
        undo.callback(self._transaction.unmake)
        self.store.open()
        undo.callback(self.store.close)
        self._require_no_checkpoint()
        self._begin()
        undo.callback(self._transaction.abort)
        with contextlib.suppress(OSError):  # what stays harms nobody, and the next save sweeps
            self._sweep_messages()

    def _begin(self) -> None:
        """Find the base, and put the marker there that says so."""
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
            except BaseException:  # an interrupt too; raised again
                self._transaction.abort()
                raise
            return
        raise self._busy("other processes keep saving there")

    # -------------------------------------------------------------------------------------------------------- removing

    def _attempts_there(self) -> frozenset[str] | None:
        """Return the attempts that have anything there, but for the own one; None where that may not be listed."""
        try:
            places = self.store.at(ATTEMPTS).places()
        except PermissionError:
            return None
        return frozenset(place for place in places if is_attempt(place) and place != self.attempt)

    def _sweep(self, change: Update) -> None:
        """Remove superseded saves that need to wait no more, then saves that can never be committed."""
        for attempt in change.dropped:
            self._remove(attempt)
        named = find_attempts(change.moving)
        for attempt in (self._attempts_there() or frozenset()) - named:
            names, marker = self._names_of(attempt), _marker_of(attempt)
            # Without a marker nothing proves that no index that was lost had named it.
            if marker in names:
                self._transaction.sweep(marker, [name for name in names if name != marker])

    def _sweep_messages(self) -> None:
        """Remove what processes of jobs wrote to each other there, but for attempts that may go on."""

        def is_live(attempt: str) -> bool:
            return attempt in self._live or self.store.find(_marker_of(attempt)) is not None

        self._sweep_stale(self.store, self.store.names(), is_live)

    def _remove(self, attempt: str) -> None:
        self.store.remove(*(name for name in self._names_of(attempt) if name != _marker_of(attempt)))

    def _names_of(self, attempt: str) -> list[str]:
        return [found.name for found in self.store.list(f"{ATTEMPTS}/{attempt}/")]

    def _may_be_committed(self) -> bool:
        try:
            return self._transaction.committed()
        except OSError:  # that cannot be known: then everything stays
            return True

    def _busy(self, what: str) -> BusyError:
        error = BusyError(f"could not write {self._shown!r}: {what}", hint="save again")
        return with_errno(error, errno.EBUSY, self._shown)


def _marker_of(attempt: str) -> str:
    return f"{ATTEMPTS}/{attempt}/{MARKER}"
