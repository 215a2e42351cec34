"""Changes of a place in a bucket, of which versions decide; ``docs/design/buckets.md`` says what is done when."""

from __future__ import annotations

import contextlib
import errno
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Final

from treering._store.api import Entry, Held, Outcome, Store, Transaction, Version
from treering._store.objects import protocol
from treering._store.objects.requests import Absent, Client, Delete, Head, ObjectVersion, Put, Status, ask, drive
from treering._values.checkpoint_names import attempt_of_journal, heartbeat_name
from treering._values.leaves_names import attempt_of_marker

_PROBED: Final[weakref.WeakSet[Client]] = weakref.WeakSet()
"""The buckets that are known to heed conditions."""

_DELETING: Final[weakref.WeakSet[Client]] = weakref.WeakSet()
"""Those of them that have refused to delete another version; of others that is not known."""

_ASKED: Final[weakref.WeakSet[Client]] = weakref.WeakSet()
"""The buckets of which a single file was put twice, to see whether they heed conditions."""

_MARKERS: Final[weakref.WeakKeyDictionary[Client, tuple[str, float]]] = weakref.WeakKeyDictionary()
_CACHE_SECONDS: Final = 30.0
_PROBING: Final = threading.Lock()
_CLOCK_KEPT: Final = 86400.0
_HIGHEST_PROCESS: Final = 99_999
_CLOCKS: Final[weakref.WeakKeyDictionary[Client, tuple[float, float]]] = weakref.WeakKeyDictionary()
"""The time of each bucket, and that of the monotonic clock at that moment."""


def patience(client: Client) -> Callable[[], bool]:
    """Return what tells when the patience of a client is over, counted from now on."""
    deadline = time.monotonic() + client.patience
    return lambda: time.monotonic() > deadline or client.patience < 0


def ignores_conditions(client: Client, name: str, data: bytes) -> bool:
    """Tell, once for each bucket, whether it does what was just put once more on condition that nothing is there."""
    if client in _PROBED or client in _ASKED:
        return False
    _ASKED.add(client)
    with contextlib.suppress(OSError):
        return client.perform(Put(name, data, Absent.ABSENT)).status is Status.DONE
    return False


class ObjectTransaction(Transaction):
    """A change of a place in a bucket. Its marker says which version of the document it is based on.

    Args:
        store: the place.
        client: the bucket.
        prefix: what the names of all objects in the place begin with.
        name: the document.
    """

    def __init__(self, store: Store, client: Client, prefix: str, name: str) -> None:
        self._store = store
        self._client = client
        self._prefix = prefix
        self._key = prefix + name
        self._marker = self._attempt = ""
        self._base: ObjectVersion | None = None
        self._made = False
        self._outcome: Outcome | None = None

    def now(self) -> float:
        """Return the time of the bucket: that of an object just put, and how long that is ago."""
        known = _CLOCKS.get(self._client)
        if known is None or time.monotonic() - known[1] > _CLOCK_KEPT:
            known = _CLOCKS[self._client] = self._look_at_marker() or self._look_at_clock()
        return known[0] + time.monotonic() - known[1]

    def begin(self, marker: str, base: Version | None) -> None:
        """Put the marker there; without a base, a placeholder first.

        Raises:
            FileExistsError: it is there already.
            FileNotFoundError: another writer came between: begin again.
            OSError: the bucket refused, or does not heed conditions.
        """
        self._marker, self._attempt = self._prefix + marker, _attempt_of(marker)
        self._made, self._outcome = False, None
        if base is None:
            found = drive(self._client, protocol.find_base(self._key, self._patience(), absent=True))
            if not protocol.is_empty_tombstone(found):  # the new index would not list what waits there
                raise FileNotFoundError(errno.ENOENT, "another writer saved there meanwhile")
            base = found.version
        self._base = version_of(base)
        with contextlib.nullcontext() if self._client in _PROBED else _PROBING:
            probe = self._client not in _PROBED
            steps = protocol.make_marker(self._key, self._marker, self._base, self._patience(), probe=probe)
            self._made = True
            try:
                if drive(self._client, steps):
                    _DELETING.add(self._client)
            except FileExistsError:
                self._made = False  # it is of another one
                raise
            _PROBED.add(self._client)
        # Afterwards, so that the clock of the bucket is never thought to be ahead: then data would go too early.
        _MARKERS[self._client] = self._marker, time.monotonic()

    def commit(self, data: bytes) -> Outcome:
        """Compare and swap, then remove the marker.

        Raises:
            OSError: the bucket refused: it is not committed.
        """
        if self._base is None:
            raise RuntimeError("it was not begun")
        self._outcome = Outcome.UNKNOWN
        steps = protocol.commit(self._key, data, self._base, self._attempt, self._patience())
        try:
            self._outcome = drive(self._client, steps)
        except OSError:
            self._outcome = Outcome.LOST
            raise
        if self._outcome is Outcome.DONE:
            self._remove_marker()
        return self._outcome

    def committed(self) -> bool:
        """Whether it has become the document.

        Raises:
            OSError: that cannot be known now.
        """
        if self._outcome is Outcome.UNKNOWN and self._base is not None:
            # An interrupt came between, or no answer.
            steps = protocol.read_back(self._key, self._base, self._attempt, self._patience())
            outcome = drive(self._client, steps) if self._client.patience > 0 else Outcome.UNKNOWN
            if outcome is Outcome.UNKNOWN:
                raise OSError(errno.EIO, f"no answer came to PUT {self._key!r}, the commit, and it may yet happen")
            self._outcome = outcome
        return self._outcome is Outcome.DONE

    def abort(self) -> None:
        """Remove the marker; a placeholder stays."""
        if self._made:
            self._remove_marker()

    def sweep(self, marker: str, data: Sequence[str]) -> Held:
        """Remove what an attempt left, if the version that it is based on is no longer there."""
        keys = [self._prefix + one for one in data]
        steps = protocol.sweep(self._key, self._prefix + marker, _attempt_of(marker), keys, self._patience())
        try:
            return drive(self._client, steps)
        except PermissionError:
            return Held.UNKNOWN  # nothing may be removed here

    def delete(self, expected: Version, tombstone: str) -> Outcome:
        """Replace the document by a tombstone, which has no name of its own."""
        return drive(self._client, protocol.delete(self._key, version_of(expected), self._patience()))

    def delete_tombstone(self, found: Entry) -> bool:
        """Remove one that is a day old, where the bucket is known to compare: no late request brings one back."""
        now = self.now()
        if found.modified + protocol.LONGEST_DELAY >= now or self._client not in _DELETING:
            return False
        steps = protocol.delete_tombstone(self._key, version_of(found.version), now, self._patience())
        return drive(self._client, steps) is Outcome.DONE

    def _patience(self) -> Callable[[], bool]:
        return patience(self._client)

    def _look_at_marker(self) -> tuple[float, float] | None:
        """Return when a marker was put just now, by both clocks; None where none was."""
        put = _MARKERS.get(self._client)
        if put is None or time.monotonic() - put[1] >= _CACHE_SECONDS:
            return None
        found = ask(self._client, Head(put[0])).found
        return None if found is None else (found.modified, put[1])

    def _look_at_clock(self) -> tuple[float, float]:
        # A name that sweeps know, should it stay.
        name = f"{heartbeat_name(_HIGHEST_PROCESS)}.{secrets.token_hex(8)}.new"
        self._store.put(name, b"now")
        moment, found = time.monotonic(), self._store.find(name)
        with contextlib.suppress(PermissionError):  # what saves may have no right to remove
            self._store.remove(name)
        return time.time() if found is None else found.modified, moment

    def _remove_marker(self) -> None:
        with contextlib.suppress(OSError):  # a sweep knows it for a leftover
            self._client.perform(Delete((self._marker,)))
            self._made = False


def version_of(version: Version) -> ObjectVersion:
    """Return the version of an object; one of another store is none of a bucket's."""
    if not isinstance(version, ObjectVersion):
        raise TypeError(f"{version!r} is no version of an object")
    return version


def _attempt_of(marker: str) -> str:
    return attempt_of_journal(marker) or attempt_of_marker(marker) or marker
