"""All places in buckets by their whole path."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import PurePath

from treering._store.api import Entry, Kind
from treering._store.failures import naming
from treering._store.objects.requests import Client, Head, List
from treering._store.objects.store import GRACE, WHOLE_BYTES, ObjectStore, entry_of
from treering._store.pieces import Buffer, pieces
from treering._store.root import Root


class ObjectRoot(Root):
    """All places in buckets.

    Args:
        connect: returns the client of the bucket that a path is in, and the path's key in it.
        grace: seconds that superseded data stay for readers.
    """

    def __init__(self, connect: Callable[[PurePath], tuple[Client, str]], grace: float = GRACE) -> None:
        self._connect = connect
        self._grace = grace

    def place(self, path: PurePath) -> ObjectStore:
        """Return the store at a path."""
        client, key = self._connect(path)
        return ObjectStore(client, f"{key}/" if key else "", path, grace=self._grace)

    def write_file(self, path: PurePath, buffers: Iterable[Buffer], size: int) -> None:
        """Make a single object, or replace it as a whole."""
        client, key = self._connect(path)
        with naming(os.fspath(path), "write"):
            if size > WHOLE_BYTES:
                client.put_parts(key, buffers, size)
            else:
                self.place(path.parent).put(path.name, b"".join(map(bytes, pieces(buffers, size))))

    def find(self, path: PurePath, *, follow: bool = True) -> Entry | None:
        """Return the object at a path, or the place: a name that others begin with, or a bucket."""
        client, key = self._connect(path)
        with naming(os.fspath(path), "read"):
            if key and (found := client.perform(Head(key)).found) is not None:
                return entry_of(path.name, found)
            answer = client.perform(List(f"{key}/")) if key else None
            there = answer is None or answer.listed or answer.places
        return Entry(path.name, 0, 0.0, None, Kind.PLACE) if there else None
