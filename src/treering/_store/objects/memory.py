"""A bucket in the memory of this process, which its threads share: ``memory://name/...``.

It is a dictionary that answers the requests of a bucket, so everything above it is what a real bucket has.
"""

from __future__ import annotations

import errno
import itertools
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from treering._store.memory_pool import lasting_pieces
from treering._store.objects.requests import (
    PATIENCE,
    Absent,
    Answer,
    Client,
    Condition,
    Copy,
    Delete,
    Get,
    Head,
    List,
    Listed,
    ObjectVersion,
    Put,
    Range,
    Request,
    Span,
    Status,
)
from treering._store.objects.store import ObjectRoot, ObjectStore
from treering._store.objects.url import MemoryPath
from treering._store.pieces import Buffer

_MISSING: Final = Answer(Status.MISSING)
_REFUSED: Final = Answer(Status.REFUSED)


class _Object(NamedTuple):
    data: bytes
    found: Listed


class DictionaryClient:
    """A client of a bucket in memory, for the threads of one process. Conditions hold, and versions never recur.

    Args:
        shown: the bucket, as messages call it.
        clock: tells when an object is put, in POSIX seconds.

    Example:
        >>> client = DictionaryClient()
        >>> client.perform(Put("a", b"treering")).status, client.perform(Get("a", 4)).data
        (<Status.DONE: 'done'>, b'tree')
        >>> client.perform(Put("a", b"other", Absent.ABSENT)).status
        <Status.REFUSED: 'refused'>
    """

    def __init__(self, shown: str = "memory://", clock: Callable[[], float] = time.time) -> None:
        self.shown = shown
        self.patience = PATIENCE
        self._clock = clock
        self._lock = threading.Lock()
        self._objects: dict[str, _Object] = {}
        self._numbers = itertools.count(1)

    def perform(self, request: Request) -> Answer:
        """Make one request."""
        if isinstance(request, Range):  # a copy, for which nobody else has to wait
            return self._fill(request.name, request.version, request.span)
        with self._lock:
            match request:
                case Get(name, most):
                    if (there := self._objects.get(name)) is None:
                        return _MISSING
                    return Answer(Status.DONE, there.data[:most], there.found)
                case Head(name):
                    there = self._objects.get(name)
                    return _MISSING if there is None else Answer(Status.DONE, found=there.found)
                case Put(name, data, condition):
                    return self._put(name, bytes(data), condition)
                case Delete(names, condition):
                    return self._delete(names, condition)
                case List(prefix, deep):
                    return self._list(prefix, deep=deep)
                case Copy(name, new):
                    there = self._objects.get(name)
                    return _MISSING if there is None else self._put(new, there.data, None)

    def put_parts(self, name: str, buffers: Iterable[Buffer], size: int, *, new: bool = True) -> None:
        """Write an object."""
        self.perform(Put(name, b"".join(lasting_pieces(buffers, size))))

    def _fill(self, name: str, version: ObjectVersion, span: Span) -> Answer:
        if (there := self._objects.get(name)) is None:
            return _MISSING
        if there.found.version == version:
            if span.stop > len(there.data):
                raise OSError(errno.EIO, "the object has fewer bytes than were asked for")
            span.fill(span.start, memoryview(there.data)[span.start : span.stop])
        return Answer(Status.DONE, found=there.found)

    def _put(self, name: str, data: bytes, condition: Condition) -> Answer:
        if not self._holds(name, condition):
            return _REFUSED
        found = Listed(name, len(data), self._clock(), ObjectVersion(self._e_tag(data)))
        self._objects[name] = _Object(data, found)
        return Answer(Status.DONE, found=found)

    def _e_tag(self, data: bytes) -> str:
        return f'"{next(self._numbers)}"'

    def _delete(self, names: tuple[str, ...], condition: ObjectVersion | None) -> Answer:
        if condition is not None and not self._holds(names[0], condition):
            return _REFUSED if names[0] in self._objects else _MISSING
        for name in names:
            self._objects.pop(name, None)
        return Answer(Status.DONE)

    def _holds(self, name: str, condition: Condition) -> bool:
        there = self._objects.get(name)
        if condition is None:
            return True
        if condition is Absent.ABSENT:
            return there is None
        return there is not None and there.found.version == condition

    def _list(self, prefix: str, *, deep: bool) -> Answer:
        listed: list[Listed] = []
        places: dict[str, None] = {}
        for name, there in self._objects.items():
            if name.startswith(prefix):
                slash = -1 if deep else name.find("/", len(prefix))
                if slash < 0:
                    listed.append(there.found)
                else:
                    places[name[:slash]] = None
        return Answer(Status.DONE, listed=listed, places=list(places))


class MemoryStore(ObjectStore):
    """A store in a memory of its own, for tests of what needs any store.

    Example:
        >>> store = MemoryStore()
        >>> store.put(".treering-waiting-00001", b"here")
        >>> store.read(".treering-waiting-00001").data, store.read(".treering-waiting-00002")
        (b'here', None)
    """

    def __init__(self) -> None:
        super().__init__(DictionaryClient(), "", MemoryPath("memory://test"), grace=0.0)


class MemoryRoot(ObjectRoot):
    """All that is at ``memory://...`` in this process. Versions never recur, so no file there needs a nonce.

    Args:
        client: what holds it.
        grace: seconds that superseded data stay for readers.
    """

    is_shared = False
    needs_nonce = False

    def __init__(self, client: Client, grace: float = 0.0) -> None:
        super().__init__(lambda path: (client, MemoryPath(path).key), lambda _: grace)
