"""Places in a bucket: documents and data under one prefix. ``docs/design/buckets.md`` says what is done when."""

from __future__ import annotations

import builtins
import contextlib
import errno
import hashlib
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePath
from typing import Final

from treering._codec.documents import is_whole
from treering._codec.key_document import is_tombstone
from treering._store import api
from treering._store.api import ANY, Document, Entry, Held, Kind, Outcome, Reader, Store, Transaction, Version
from treering._store.failures import naming, taken_meanwhile
from treering._store.memory_pool import lasting_pieces
from treering._store.objects import protocol, requests
from treering._store.objects.protocol import put_file
from treering._store.objects.reading import ObjectReader
from treering._store.pieces import Buffer
from treering._values.checkpoint_names import INDEX, attempt_of_journal, heartbeat_name
from treering._values.leaves_names import INDEX as LEAVES_INDEX
from treering._values.leaves_names import attempt_of_marker
from treering._values.telemetry import warn_of
from treering.errors import NotFencedWarning

GRACE: Final = 3600.0
"""Seconds that superseded data stay, if nothing else is said."""

WHOLE_BYTES: Final = 16 << 20
"""An object up to this size is put by one request, a larger one in parts."""

_MAY_NOT_LIST: Final = "without the right to list, one checkpoint, or one step by its number, can be saved and loaded"


class ObjectStore(Store):
    """A place in a bucket.

    Args:
        client: the bucket.
        prefix: what the names of all objects in the place begin with: empty, or it ends in a slash.
        path: the place, as messages call it.
        grace: seconds that superseded data stay for readers.

    Example:
        >>> from obstore.store import MemoryStore
        >>> from treering._store.objects.client import ObstoreClient
        >>> bucket = ObstoreClient(MemoryStore(), "s3://bucket")
        >>> store = ObjectStore(bucket, "runs/a/", PurePath("runs/a"))
        >>> store.create("data", [b"tree", b"ring"], 8)
        >>> store.read("data").data, store.names(), store.places()
        (b'treering', ['data'], [])
    """

    keeps_open = False
    longest_delay = protocol.LONGEST_DELAY
    asks_by_request = separate_rights = True

    def __init__(self, client: requests.Client, prefix: str, path: PurePath, *, grace: float = GRACE) -> None:
        self.path = path
        self.grace = grace
        self.client = client
        self._prefix = prefix

    def key_of(self, name: str) -> str:
        """Return the whole name of an object in the bucket."""
        return self._prefix + name

    def open(self, *, quick: bool = False) -> None:
        """Nothing is asked: a place is there where an object is in it."""

    def at(self, name: str) -> ObjectStore:
        """Return the place ``name`` in this one."""
        return ObjectStore(self.client, f"{self._prefix}{name}/", self.path / name, grace=self.grace)

    def transaction(self, name: str = INDEX) -> ObjectTransaction:
        """Return what changes the place by compare and swap of a document."""
        return ObjectTransaction(self, name)

    def names(self) -> list[str]:
        """Return the names in it, those of places below too."""
        answer = self._ask(requests.List(self._prefix))
        return list(dict.fromkeys([*(found.name for found in self._entries(answer)), *self._places(answer)]))

    def places(self) -> list[str]:
        """Return the names of the places below."""
        return self._places(self._ask(requests.List(self._prefix)))

    def find(self, name: str) -> Entry | None:
        """Return what is known of an object; None also of a place. The place itself is there."""
        if not name:
            return Entry(name, 0, 0.0, None, Kind.PLACE)
        found = self._ask(requests.Head(self.key_of(name))).found
        return None if found is None else entry_of(name, found)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Walk through all that begins with ``prefix``, at any depth."""
        yield from self._entries(self._ask(requests.List(self._prefix + prefix, deep=True)))

    def open_file(self, name: str) -> ObjectReader:
        """Open an object for reading, with its first bytes."""
        return ObjectReader(self.client, self.key_of(name), self.path / name)

    def read(self, name: str, most: int = api.LARGEST_DOCUMENT) -> Document | None:
        """Return an object, at most its first ``most`` bytes; None where there is none."""
        whole = most >= api.LARGEST_DOCUMENT
        answer = self._ask(requests.Get(self.key_of(name), None if whole else most))
        # The index of leaves has no digest; its records have.
        if whole and answer.data and name != LEAVES_INDEX and not is_whole(answer.data):
            answer = self._ask(requests.Get(self.key_of(name)))  # a bit may have changed on the way
        return None if answer.found is None else Document(answer.data, answer.found.version)

    def create(self, name: str, buffers: Iterable[Buffer], size: int, *, like: Version | None = None) -> None:
        """Write data: a small object by one request, on condition that nothing is there, a larger one in parts.

        A name that gets parts is one of an attempt: nothing is ever there.

        Raises:
            FileExistsError: something is there.
            OSError: the bucket refused, or the buffers hold another number of bytes.
        """
        if size > WHOLE_BYTES:
            self.client.put_parts(self._prefix + name, buffers, size)
            return
        data = b"".join(lasting_pieces(buffers, size))
        outcome = self._swap(name, data, None)
        if outcome is Outcome.LOST:
            raise FileExistsError(errno.EEXIST, f"{name!r} is there already")
        if outcome is Outcome.UNKNOWN:
            self._ask(requests.Head(self._prefix + name))  # its error names what failed first
            raise requests.unanswered(self.client.shown, self._prefix + name)

    def replace(self, name: str, data: bytes, expected: Version = ANY, *, sweep: bool = True) -> Outcome:
        """Make ``data`` the content of a document of that version; a tombstone counts as nothing."""
        if expected is None or isinstance(expected, requests.ObjectVersion):
            outcome = self._swap(name, data, expected)
            if outcome is Outcome.LOST and expected is None:
                there = self.read(name)
                if there is not None and is_tombstone(there.data):
                    return self._swap(name, data, version_of(there.version))
            return outcome
        expired = patience(self.client)
        while True:
            outcome = requests.drive(self.client, put_file(self._prefix + name, bytes(data), expired))
            if outcome is Outcome.DONE:
                return outcome
            if expired():
                lost = OSError(errno.EAGAIN, f"{name!r} is replaced by others again and again")
                raise lost if outcome is Outcome.LOST else requests.unanswered(self.client.shown, self._prefix + name)

    def put(self, name: str, data: bytes) -> None:
        """Make ``data`` the content of a message."""
        self._ask(requests.Put(self._prefix + name, data))

    def remove(self, *names: str) -> None:
        """Remove objects, up to a thousand by one request; no place stays where none is."""
        if keys := tuple(self._prefix + name for name in names if name):
            self._ask(requests.Delete(keys))

    def flush(self) -> None:
        """What was answered is durable."""

    def _swap(self, name: str, data: bytes, expected: requests.ObjectVersion | None) -> Outcome:
        return requests.drive(
            self.client, protocol.swap(self._prefix + name, bytes(data), expected, patience(self.client))
        )

    def _ask(self, request: requests.Request) -> requests.Answer:
        """Make a request without a condition; no answer is an error."""
        try:
            answer = requests.ask(self.client, request)
        except PermissionError as error:
            if isinstance(request, requests.List):
                raise PermissionError(error.errno, f"{error.strerror}; {_MAY_NOT_LIST}") from error
            raise
        if answer.status is requests.Status.MISSING and isinstance(request, requests.Put | requests.List):
            raise OSError(errno.ENODEV, f"{self.client.shown} does not exist; make it first")
        return answer

    def _entries(self, answer: requests.Answer) -> Iterator[Entry]:
        """Yield what a listing has, but for what stands for a folder: an empty object whose name ends in a slash."""
        for found in answer.listed:
            name = found.name[len(self._prefix) :]
            if name and not name.endswith("/"):
                yield entry_of(name, found)

    def _places(self, answer: requests.Answer) -> builtins.list[str]:
        return [name for place in answer.places if (name := place[len(self._prefix) :])]


def copy_object(source: Store, target: Store, name: str, new: str) -> bool:
    """Let the server copy an object into another place of the same bucket; False where it does not.

    It is what it was before: the name of data is never used again, and the version is compared afterwards.

    Raises:
        OSError: the bucket refused, or does not answer.
    """
    if not isinstance(source, ObjectStore) or not isinstance(target, ObjectStore) or source.client is not target.client:
        return False
    found = source.find(name)
    if found is None:
        return False
    answer = target.client.perform(requests.Copy(source.key_of(name), target.key_of(new)))
    if answer.status is not requests.Status.DONE:
        if answer.status is requests.Status.NO_ANSWER:
            raise requests.unanswered(target.client.shown, target.key_of(new))
        return False
    after, copy = source.find(name), target.find(new)
    if after is not None and copy is not None and after.version == found.version and copy.size == found.size:
        return True
    target.remove(new)
    return False


def entry_of(name: str, found: requests.Listed) -> Entry:
    """Return what a bucket says of an object."""
    return Entry(name, found.size, found.modified, found.version)


# Some may write and not look; some servers know no conditions.
_NOT_KNOWN: Final = frozenset({errno.ENOTSUP})
_NO_CONDITIONS: Final = _NOT_KNOWN | {errno.EACCES, errno.EPERM}


class ObjectRoot:
    """All places in buckets, by their whole path.

    Args:
        connect: returns the client of the bucket that a path is in, and the path's key in it.
        grace_of: returns how many seconds superseded data stay for readers where a path leads.
        absolute: returns a path that leads to the same place when the environment changes: to the client it has now.
    """

    is_shared = True
    """Whether the processes of a job can see the same place."""

    needs_nonce = True
    """Whether a single file has to have other bytes than every earlier one: its version may say no more."""

    def __init__(
        self,
        connect: Callable[[PurePath], tuple[requests.Client, str]],
        grace_of: Callable[[PurePath], float] = lambda _: GRACE,
        absolute: Callable[[PurePath], PurePath] = lambda path: path,
    ) -> None:
        self._connect = connect
        self._grace_of = grace_of
        self.absolute = absolute

    def place(self, path: PurePath) -> ObjectStore:
        """Return the store at a path, not opened yet."""
        client, key = self._connect(path)
        return ObjectStore(client, f"{key}/" if key else "", path, grace=self._grace_of(path))

    def open_file(self, path: PurePath) -> Reader:
        """Open a single object; NotFoundError, StoreError."""
        return self.place(path.parent).open_file(path.name)

    def write_file(
        self, path: PurePath, buffers: Iterable[Buffer], size: int, *, new: bool = False, unique: bool = False
    ) -> None:
        """Make a single object, or, unless it is ``new``, replace it as a whole.

        What is put in parts cannot be put by condition: whether it is new is asked again when all of them are there.
        """
        client, key = self._connect(path)
        with naming(os.fspath(path), "write"):
            if size > WHOLE_BYTES:
                client.put_parts(key, self._while_free(path, buffers) if new else buffers, size, new=False)
                return
            data = b"".join(lasting_pieces(buffers, size))
            try:
                outcome = requests.drive(client, put_file(key, data, patience(client), new=new))
            except OSError as error:
                if error.errno not in (_NOT_KNOWN if new else _NO_CONDITIONS):
                    raise
                self.place(path.parent).put(path.name, data)
                _warn_of(path, f"it was put without a condition ({error.strerror})")
                return
            if outcome is Outcome.LOST and new:
                raise taken_meanwhile(os.fspath(path))
            if outcome is not Outcome.DONE:
                lost = OSError(errno.EIO, "it is replaced by others again and again")
                raise lost if outcome is Outcome.LOST else requests.unanswered(client.shown, key)
            if ignores_conditions(client, key, data):
                _warn_of(path, "the server does not heed conditions")
            if new or unique:
                return
            recurring = requests.ObjectVersion(f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"')
            with contextlib.suppress(OSError):  # the file is saved, and only the warning is at stake
                found = client.perform(requests.Head(key)).found
                if found is not None and found.version == recurring:  # with the content
                    _warn_of(path, "few arrays in msgpack, or a copy: these bytes may have been there before")

    def _while_free(self, path: PurePath, buffers: Iterable[Buffer]) -> Iterator[Buffer]:
        """Yield what an object is made of; at its end, require that nothing has its name yet."""
        yield from buffers
        with ThreadPoolExecutor(1) as asking:
            # The client asks for these from within its own runtime, in which this thread cannot make another request.
            taken = asking.submit(self.is_taken, path).result()
        if taken:
            raise taken_meanwhile(os.fspath(path))

    def is_taken(self, path: PurePath) -> bool:
        """Whether an object has the name; others may have names that begin so."""
        with naming(os.fspath(path), "read"):
            return self.place(path.parent).find(path.name) is not None

    def find(self, path: PurePath) -> Entry | None:
        """Return the object at a path, or the place: a name that others begin with, or a bucket.

        An empty object is no file where it has the name of a place: Azure's Data Lake has such a one for each folder.
        """
        client, key = self._connect(path)
        with naming(os.fspath(path), "read"):
            found = requests.ask(client, requests.Head(key)).found if key else None
            # A document is no place: that need not be asked.
            if not (found and found.size) and (not key or (path.suffix != ".json" and _holds_any(client, key))):
                return Entry(path.name, 0, 0.0, None, Kind.PLACE)
        return None if found is None else entry_of(path.name, found)


def _warn_of(path: PurePath, why: str) -> None:
    what = "a request of an earlier save that comes late may undo this one; a folder has no such limit"
    warn_of(what, [f"{os.fspath(path)}: {why}"], NotFencedWarning)


def _holds_any(client: requests.Client, key: str) -> bool:
    """Tell whether anything is in a place; where that is denied, whoever looks into it finds out."""
    try:
        answer = requests.ask(client, requests.List(f"{key}/"))
    except PermissionError:
        return True
    return bool(answer.listed or answer.places)


_PROBED: Final[weakref.WeakSet[requests.Client]] = weakref.WeakSet()
"""The buckets that are known to heed conditions."""

_DELETING: Final[weakref.WeakSet[requests.Client]] = weakref.WeakSet()
"""Those of them that have refused to delete another version; of others that is not known."""

_ASKED: Final[weakref.WeakSet[requests.Client]] = weakref.WeakSet()
"""The buckets of which a single file was put twice, to see whether they heed conditions."""

_MARKERS: Final[weakref.WeakKeyDictionary[requests.Client, tuple[str, float]]] = weakref.WeakKeyDictionary()
_CACHE_SECONDS: Final = 30.0
_PROBING: Final = threading.Lock()
_CLOCK_KEPT: Final = 86400.0
_HIGHEST_PROCESS: Final = 99_999
_CLOCKS: Final[weakref.WeakKeyDictionary[requests.Client, tuple[float, float]]] = weakref.WeakKeyDictionary()
"""The time of each bucket, and that of the monotonic clock at that moment."""


def patience(client: requests.Client) -> Callable[[], bool]:
    """Return what tells when the patience of a client is over, counted from now on."""
    deadline = time.monotonic() + client.patience
    return lambda: time.monotonic() > deadline or client.patience < 0


def ignores_conditions(client: requests.Client, name: str, data: bytes) -> bool:
    """Tell, once for each bucket, whether it does what was just put once more on condition that nothing is there."""
    if client in _PROBED or client in _ASKED:
        return False
    _ASKED.add(client)
    with contextlib.suppress(OSError):
        return client.perform(requests.Put(name, data, requests.Absent.ABSENT)).status is requests.Status.DONE
    return False


class ObjectTransaction(Transaction):
    """A change of a place in a bucket. Its marker says which version of the document it is based on.

    Args:
        store: the place.
        name: the document.
    """

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store = store
        self._client = store.client
        self._key = store.key_of(name)
        self._marker = self._attempt = ""
        self._base: requests.ObjectVersion | None = None
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
        self._marker, self._attempt = self._store.key_of(marker), _attempt_of(marker)
        self._made, self._outcome = False, None
        if base is None:
            found = requests.drive(self._client, protocol.find_base(self._key, patience(self._client), absent=True))
            if not protocol.is_empty_tombstone(found):  # the new index would not list what waits there
                raise FileNotFoundError(errno.ENOENT, "another writer saved there meanwhile")
            base = found.version
        self._base = version_of(base)
        with contextlib.nullcontext() if self._client in _PROBED else _PROBING:
            probe = self._client not in _PROBED
            steps = protocol.make_marker(self._key, self._marker, self._base, patience(self._client), probe=probe)
            self._made = True
            try:
                if requests.drive(self._client, steps):
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
        steps = protocol.commit(self._key, data, self._base, self._attempt, patience(self._client))
        try:
            self._outcome = requests.drive(self._client, steps)
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
            steps = protocol.read_back(self._key, self._base, self._attempt, patience(self._client))
            outcome = requests.drive(self._client, steps) if self._client.patience > 0 else Outcome.UNKNOWN
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
        marked, keys = self._store.key_of(marker), list(map(self._store.key_of, data))
        try:
            return requests.drive(
                self._client, protocol.sweep(self._key, marked, _attempt_of(marker), keys, patience(self._client))
            )
        except PermissionError:
            return Held.UNKNOWN  # nothing may be removed here

    def delete(self, expected: Version, tombstone: str) -> Outcome:
        """Replace the document by a tombstone, which has no name of its own."""
        return requests.drive(self._client, protocol.delete(self._key, version_of(expected), patience(self._client)))

    def delete_tombstone(self, found: Entry) -> bool:
        """Remove one that is a day old, where the bucket is known to compare: no late request brings one back."""
        now = self.now()
        if found.modified + protocol.LONGEST_DELAY >= now or self._client not in _DELETING:
            return False
        steps = protocol.delete_tombstone(self._key, version_of(found.version), now, patience(self._client))
        return requests.drive(self._client, steps) is Outcome.DONE

    def _look_at_marker(self) -> tuple[float, float] | None:
        """Return when a marker was put just now, by both clocks; None where none was."""
        put = _MARKERS.get(self._client)
        if put is None or time.monotonic() - put[1] >= _CACHE_SECONDS:
            return None
        found = requests.ask(self._client, requests.Head(put[0])).found
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
            self._client.perform(requests.Delete((self._marker,)))
            self._made = False


def version_of(version: Version) -> requests.ObjectVersion:
    """Return the version of an object; one of another store is none of a bucket's."""
    if not isinstance(version, requests.ObjectVersion):
        raise TypeError(f"{version!r} is no version of an object")
    return version


def _attempt_of(marker: str) -> str:
    return attempt_of_journal(marker) or attempt_of_marker(marker) or marker
