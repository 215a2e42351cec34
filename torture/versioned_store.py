"""A store in memory where versions alone decide: no locks, no proof that a writer lives, no tombstones.

It is the plainest store that keeps the contract, and the one over which the joint protocol is simulated.
"""

from __future__ import annotations

import collections
import dataclasses
import errno
import itertools
import os
import re
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import PurePath, PurePosixPath

from treering._store import api
from treering._store.api import (
    ANY,
    Document,
    Entry,
    Held,
    Kind,
    Outcome,
    Reader,
    Store,
    Transaction,
    Version,
    require_range,
)
from treering._store.pieces import Buffer, pieces
from treering._values.checkpoint_names import INDEX
from treering.errors import StoreError


@dataclasses.dataclass(frozen=True, slots=True)
class _Content:
    data: bytes
    version: int
    modified: float


class _Contents:
    """All names and what they hold; a folder that was made is a name that ends in a slash, as in a bucket."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.by_name: dict[str, _Content] = {}
        self._counts: collections.Counter[str] = collections.Counter()
        self._versions = itertools.count(1)
        self._claimed: dict[str, int] = {}

    def set(self, key: str, data: bytes) -> None:
        with self.lock:
            if key not in self.by_name:
                self._counts.update(_places_of(key))
            self.by_name[key] = _Content(data, next(self._versions), time.time())

    def pop(self, key: str) -> None:
        with self.lock:
            if self.by_name.pop(key, None) is None:
                return
            for place in _places_of(key):
                self._counts[place] -= 1
                if not self._counts[place]:
                    del self._counts[place]
            if key in self._claimed:
                self._claimed[key] = next(self._versions)

    def state(self, key: str) -> int:
        """Return a number that changes with each content of the name, and with each time that it goes."""
        found = self.by_name.get(key)
        return self._claimed.setdefault(key, 0) if found is None else found.version

    def is_place(self, prefix: str) -> bool:
        """Tell whether anything is below a prefix, which ends in a slash."""
        return prefix in self._counts

    def below(self, prefix: str) -> list[str]:
        with self.lock:
            return [key for key in self.by_name if key.startswith(prefix)]


def _places_of(key: str) -> list[str]:
    """Return the prefixes that make places of a name, each with its slash."""
    return [key[: found.end()] for found in re.finditer("/", key)]


class VersionedStore(Store):
    """Documents and data in memory."""

    def __init__(self) -> None:
        self.path: PurePath = PurePosixPath("versioned")
        self._contents = _Contents()
        self._prefix = ""

    def open(self, *, quick: bool = False) -> None:  # noqa: ARG002 - as the contract has it
        """Begin to use a place.

        Raises:
            FileNotFoundError: nothing is there.
            NotADirectoryError: a file is there.
        """
        with self._contents.lock:
            if self._prefix and self._prefix.rstrip("/") in self._contents.by_name:
                raise NotADirectoryError(errno.ENOTDIR, "it is a file, not a folder")
            if self._prefix and not self._contents.is_place(self._prefix):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def at(self, name: str) -> VersionedStore:
        """Return the place ``name`` in this one."""
        store = VersionedStore()
        store.path, store._contents, store._prefix = self.path / name, self._contents, f"{self._prefix}{name}/"
        return store

    def names(self) -> list[str]:
        """Return the names in it, those of places below too."""
        return self._first_parts(1)

    def places(self) -> list[str]:
        """Return the names of the places below."""
        return self._first_parts(2)

    def _first_parts(self, least: int) -> list[str]:
        """Return the first part of each key below that is not empty and has at least so many parts."""
        parts = (key[len(self._prefix) :].split("/", 1) for key in self._contents.below(self._prefix))
        return list(dict.fromkeys(part[0] for part in parts if part[0] and len(part) >= least))

    def find(self, name: str) -> Entry | None:
        """Return what is known of ``name``, which may be ``place/name``; None for nothing."""
        key = self._prefix + name
        with self._contents.lock:
            if (found := self._contents.by_name.get(key)) is not None:
                return Entry(name, len(found.data), found.modified, found.version)
            below = self._contents.is_place(f"{key}/")
        return Entry(name, 0, 0.0, 0, Kind.PLACE) if below else None

    def open_file(self, name: str) -> BytesReader:
        """Open data or a document for reading.

        Raises:
            NotFoundError: it is not there.
        """
        path = self.path / name
        with self._contents.lock:
            found = self._found(name)
            number = errno.EISDIR if not found and self._contents.is_place(f"{self._prefix}{name}/") else errno.ENOENT
        if found is None:
            raise StoreError.of(OSError(number, os.strerror(number)), path, "read")
        return BytesReader(path, found.data, found.version)

    def _found(self, name: str) -> _Content | None:
        return self._contents.by_name.get(self._prefix + name)

    def read(self, name: str, most: int = api.LARGEST_DOCUMENT) -> Document | None:
        """Return a document, at most its first ``most`` bytes; None where there is none."""
        found = self._found(name)
        return None if found is None else Document(found.data[:most], found.version)

    def create(self, name: str, buffers: Iterable[Buffer], size: int, *, like: Version | None = None) -> None:  # noqa: ARG002
        """Write data under a name that must not be there.

        Raises:
            FileExistsError: something is there.
            OSError: the buffers hold another number of bytes.
        """
        if self.find(name) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        data = b"".join(map(bytes, pieces(buffers, size)))
        with self._contents.lock:
            if self.find(name) is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            self._contents.set(self._prefix + name, data)

    def replace(self, name: str, data: bytes, expected: Version = ANY, *, sweep: bool = True) -> Outcome:  # noqa: ARG002
        """Make ``data`` the content of a document, if its version is the expected one."""
        with self._contents.lock:
            if expected is not ANY and self._version(name) != expected:
                return Outcome.LOST
            self._contents.set(self._prefix + name, bytes(data))
        return Outcome.DONE

    def put(self, name: str, data: bytes) -> None:
        """Make ``data`` the content of a message."""
        self.replace(name, data)

    def remove(self, *names: str) -> None:
        """Remove names; gone already is gone. Of the place itself, where that is meant, the name that was made goes."""
        with self._contents.lock:
            for name in names:
                self._contents.pop(self._prefix + name)

    def flush(self) -> None:
        """Nothing is more durable than this process."""

    def transaction(self, name: str = INDEX) -> VersionedTransaction:
        """Return an attempt to change the document ``name``."""
        return VersionedTransaction(self, name)

    def _version(self, name: str) -> int | None:
        found = self._found(name)
        return None if found is None else found.version


class VersionedTransaction(Transaction):
    """A marker that says which version its attempt is based on, then a compare and swap."""

    def __init__(self, store: VersionedStore, name: str) -> None:
        self.store = store
        self._contents, self._prefix = store._contents, store._prefix
        self._name = self._prefix + name
        self._marker = ""
        self._state: Version = None
        self._begun = self._done = False

    def make(self) -> Sequence[str]:
        """Make the place if it is missing, so that it is there before the first name in it."""
        with self._contents.lock:
            for above in itertools.accumulate(self._prefix.rstrip("/").split("/"), "{}/{}".format):
                if above in self._contents.by_name:
                    raise NotADirectoryError(errno.ENOTDIR, f"{above} is a file, not a folder")
            if self._prefix and not self._contents.is_place(self._prefix):
                self._contents.set(self._prefix, b"")
        return ()

    def begin(self, marker: str, base: Version | None) -> None:
        """Put the marker there.

        Raises:
            FileExistsError: it is there already.
        """
        key = self._prefix + marker
        with self._contents.lock:
            if key in self._contents.by_name:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            found = self._contents.by_name.get(self._name)
            # Where nothing was, the number of this absence: it does not come again.
            absent = base is None and found is None
            self._state = self._contents.state(self._name) if absent else base
            self._contents.set(key, _base_text(base))
            self._marker, self._begun, self._done = key, True, False

    def commit(self, data: bytes) -> Outcome:
        """Compare and swap, then remove the marker.

        Raises:
            FileNotFoundError: the marker was swept.
        """
        with self._contents.lock:
            if self._marker not in self._contents.by_name:
                raise FileNotFoundError(errno.ENOENT, "the marker of this attempt is gone")
            if self._contents.state(self._name) != self._state:
                return Outcome.LOST
            self._contents.set(self._name, data)
            self._contents.pop(self._marker)
            self._done = True
        return Outcome.DONE

    def committed(self) -> bool:
        """Whether the swap was made."""
        return self._done

    def abort(self) -> None:
        """Remove the marker."""
        if self._begun:
            self._contents.pop(self._marker)

    def sweep(self, marker: str, data: Sequence[str]) -> Held:
        """Remove what an attempt left whose base is no longer the document."""
        with self._contents.lock:
            begun = self._contents.by_name.get(self._prefix + marker)
            found = self._contents.by_name.get(self._name)
            if begun is None or begun.data == _base_text(found and found.version):
                return Held.UNKNOWN
            self.store.remove(*data, marker)
        return Held.NO

    def delete(self, expected: Version, tombstone: str) -> Outcome:
        """Give the document, of that version, the name ``tombstone``."""
        with self._contents.lock:
            found = self._contents.by_name.get(self._name)
            if found is None or found.version != expected:
                return Outcome.LOST
            self._contents.set(self._prefix + tombstone, found.data)
            self._contents.pop(self._name)
        return Outcome.DONE

    def delete_tombstone(self, found: Entry) -> bool:  # noqa: ARG002 - as the contract has it
        """There are none."""
        return False


def _base_text(version: Version | None) -> bytes:
    return str(version or 0).encode()


class BytesReader(Reader):
    """Bytes in memory, read as a local file is; a context manager."""

    def __init__(self, path: PurePath, data: bytes, version: Version = None) -> None:
        self.path = path
        self.size = len(data)
        self.version = version
        self._data = data

    def read(self, offset: int, count: int) -> bytes:
        """Return ``count`` bytes from ``offset`` on.

        Raises:
            CorruptError: there are fewer.
        """
        require_range(self, offset, count)
        return self._data[offset : offset + count]

    def read_into(self, jobs: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each writable buffer with the bytes from its offset on.

        Raises:
            CorruptError: there are fewer.
        """
        for offset, buffer in jobs:
            require_range(self, offset, buffer.nbytes)
            if buffer.nbytes:
                buffer.cast("B")[:] = memoryview(self._data)[offset : offset + buffer.nbytes]
