"""All places in buckets by their whole path."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePath
from typing import Final

from treering._store.api import Entry, Kind, Outcome
from treering._store.failures import naming, taken_meanwhile
from treering._store.memory_pool import lasting_pieces
from treering._store.objects.claim import ignores_conditions, patience
from treering._store.objects.file_protocol import put_file
from treering._store.objects.requests import Client, Head, List, ObjectVersion, ask, drive, unanswered
from treering._store.objects.store import GRACE, WHOLE_BYTES, ObjectStore, entry_of
from treering._store.pieces import Buffer
from treering._store.root import Root
from treering._values.warned import warn_of
from treering.errors import NotFenced

# Some may write and not look; some servers know no conditions.
_NOT_KNOWN: Final = frozenset({errno.ENOTSUP})
_NO_CONDITIONS: Final = _NOT_KNOWN | {errno.EACCES, errno.EPERM}


class ObjectRoot(Root):
    """All places in buckets.

    Args:
        connect: returns the client of the bucket that a path is in, and the path's key in it.
        grace_of: returns how many seconds superseded data stay for readers where a path leads.
        freeze: returns a path that has the client it has now for ever.
    """

    needs_nonce = True

    def __init__(
        self,
        connect: Callable[[PurePath], tuple[Client, str]],
        grace_of: Callable[[PurePath], float] = lambda _: GRACE,
        freeze: Callable[[PurePath], PurePath] = lambda path: path,
    ) -> None:
        self._connect = connect
        self._grace_of = grace_of
        self._freeze = freeze

    def place(self, path: PurePath) -> ObjectStore:
        """Return the store at a path."""
        client, key = self._connect(path)
        return ObjectStore(client, f"{key}/" if key else "", path, grace=self._grace_of(path))

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
                outcome = drive(client, put_file(key, data, patience(client), new=new))
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
                raise lost if outcome is Outcome.LOST else unanswered(client.shown, key)
            if ignores_conditions(client, key, data):
                _warn_of(path, "the server does not heed conditions")
            if new or unique:
                return
            digest = hashlib.md5(data, usedforsecurity=False).hexdigest()
            with contextlib.suppress(OSError):  # the file is saved, and only the warning is at stake
                found = client.perform(Head(key)).found
                if found is not None and found.version == ObjectVersion(f'"{digest}"'):  # which recurs with the content
                    _warn_of(path, "few arrays in msgpack, or a copy: these bytes may have been there before")

    def _while_free(self, path: PurePath, buffers: Iterable[Buffer]) -> Iterator[Buffer]:
        """Yield what an object is made of; at its end, require that nothing has its name yet."""
        yield from buffers
        with ThreadPoolExecutor(1) as asking:
            # The client asks for these from within its own runtime, in which this thread cannot make another request.
            taken = asking.submit(self.is_taken, path).result()
        if taken:
            raise taken_meanwhile(os.fspath(path))

    def absolute(self, path: PurePath) -> PurePath:
        """Return a path that leads to the same place when the environment changes."""
        return self._freeze(path)

    def is_taken(self, path: PurePath) -> bool:
        """Whether an object has the name; others may have names that begin so."""
        with naming(os.fspath(path), "read"):
            return self.place(path.parent).find(path.name) is not None

    def find(self, path: PurePath, *, follow: bool = True) -> Entry | None:
        """Return the object at a path, or the place: a name that others begin with, or a bucket."""
        client, key = self._connect(path)
        with naming(os.fspath(path), "read"):
            if key and (found := ask(client, Head(key)).found) is not None:
                return entry_of(path.name, found)
            # A document is no place: that need not be asked.
            there = not key or (path.suffix != ".json" and _holds_any(client, key))
        return Entry(path.name, 0, 0.0, None, Kind.PLACE) if there else None


def _warn_of(path: PurePath, why: str) -> None:
    what = "a request of an earlier save that comes late may undo this one; a folder has no such limit"
    warn_of(what, [f"{os.fspath(path)}: {why}"], NotFenced)


def _holds_any(client: Client, key: str) -> bool:
    """Tell whether anything is in a place; where that is denied, whoever looks into it finds out."""
    try:
        answer = ask(client, List(f"{key}/"))
    except PermissionError:
        return True
    return bool(answer.listed or answer.places)
