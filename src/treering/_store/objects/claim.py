"""One attempt to change a document in a bucket: its marker says which version it is based on."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final

from treering._store.api import Claim, Outcome
from treering._store.objects import protocol
from treering._store.objects.requests import Absent, Client, Delete, ObjectVersion, Put, Status, drive

_PROBED: Final[weakref.WeakSet[Client]] = weakref.WeakSet()
"""The buckets that are known to heed conditions."""

_DELETING: Final[weakref.WeakSet[Client]] = weakref.WeakSet()
"""Those of them that have refused to delete another version; of others that is not known."""

_ASKED: Final[weakref.WeakSet[Client]] = weakref.WeakSet()
"""The buckets of which a single file was put twice, to see whether they heed conditions."""

_MARKERS: Final[weakref.WeakKeyDictionary[Client, tuple[str, float]]] = weakref.WeakKeyDictionary()
_JUST_NOW: Final = 30.0
_PROBING: Final = threading.Lock()


def patience(client: Client) -> Callable[[], bool]:
    """Return what tells when the patience of a client is over, counted from now on."""
    deadline = time.monotonic() + client.patience
    return lambda: time.monotonic() > deadline or client.patience < 0


def last_marker(client: Client) -> tuple[str, float] | None:
    """Return the marker that was put last, and when by the monotonic clock; None where that was not just now."""
    found = _MARKERS.get(client)
    return found if found is not None and time.monotonic() - found[1] < _JUST_NOW else None


def deletes_versions(client: Client) -> bool:
    """Tell whether a save of this process has seen that a bucket refuses to delete another version."""
    return client in _DELETING


def ignores_conditions(client: Client, name: str, data: bytes) -> bool:
    """Tell, once for each bucket, whether it does what was just put once more on condition that nothing is there."""
    if client in _PROBED or client in _ASKED:
        return False
    _ASKED.add(client)
    with contextlib.suppress(OSError):
        return client.perform(Put(name, data, Absent.ABSENT)).status is Status.DONE
    return False


class ObjectClaim(Claim):
    """An attempt to change the object ``key``.

    Args:
        client: the bucket.
        key: the object.
        marker: the name of the marker.
        attempt: the attempt, as the document names it.
        base: the version that the attempt is based on; None where nothing is there but, perhaps, a tombstone.
        read_attempts: reads the attempts that the object names.
    """

    def __init__(
        self,
        client: Client,
        key: str,
        marker: str,
        attempt: str,
        base: ObjectVersion | None,
        *,
        read_attempts: protocol.ReadAttempts,
    ) -> None:
        self._client = client
        self._key = key
        self._marker = marker
        self._attempt = attempt
        self._base = base
        self._read_attempts = read_attempts
        self._data = b""
        self._made = False
        self._outcome: Outcome | None = None

    def make(self) -> None:
        """Put the marker there; without a base, a placeholder first.

        Raises:
            FileExistsError: it is there already.
            FileNotFoundError: another writer came between: begin again.
            OSError: the bucket refused, or does not heed conditions.
        """
        if self._base is None:
            found = drive(self._client, protocol.find_base(self._key, patience(self._client), absent=True))
            if not protocol.is_empty_tombstone(found):  # the new index would not list what waits there
                raise FileNotFoundError(errno.ENOENT, "another writer saved there meanwhile")
            self._base = found.version
        with contextlib.nullcontext() if self._client in _PROBED else _PROBING:
            probe = self._client not in _PROBED
            steps = protocol.make_marker(self._key, self._marker, self._base, patience(self._client), probe=probe)
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

    def prepare(self, data: bytes) -> None:
        """Keep it."""
        self._data = data

    def commit(self) -> Outcome:
        """Compare and swap, then remove the marker.

        Raises:
            OSError: the bucket refused: it is not committed.
        """
        if self._base is None:
            raise RuntimeError("the claim was not made")
        self._outcome = Outcome.UNKNOWN
        steps = protocol.commit(
            self._key, self._data, self._base, self._attempt, patience(self._client), read_attempts=self._read_attempts
        )
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
            steps = protocol.read_back(
                self._key, self._base, self._attempt, patience(self._client), read_attempts=self._read_attempts
            )
            outcome = drive(self._client, steps) if self._client.patience > 0 else Outcome.UNKNOWN
            if outcome is Outcome.UNKNOWN:
                raise OSError(errno.EIO, f"no answer came to PUT {self._key!r}, the commit, and it may yet happen")
            self._outcome = outcome
        return self._outcome is Outcome.DONE

    def withdraw(self) -> None:
        """Remove the marker; a placeholder stays."""
        if self._made:
            self._remove_marker()

    def close(self) -> None:
        """Nothing is held open."""

    def _remove_marker(self) -> None:
        with contextlib.suppress(OSError):  # a sweep knows it for a leftover
            self._client.perform(Delete((self._marker,)))
            self._made = False
