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
from treering._store.objects import requests
from treering._store.objects.store import ObjectRoot, ObjectStore
from treering._store.objects.url import MemoryPath
from treering._store.pieces import Buffer

_MISSING: Final = requests.Answer(requests.Status.MISSING)
_REFUSED: Final = requests.Answer(requests.Status.REFUSED)


class _Object(NamedTuple):
    data: bytes
    found: requests.Listed


class DictionaryClient:
    """A client of a bucket in memory, for the threads of one process. Conditions hold, and versions never recur.

    Args:
        shown: the bucket, as messages call it.
        clock: tells when an object is put, in POSIX seconds.

    Example:
        >>> client = DictionaryClient()
        >>> client.perform(requests.Put("a", b"treering")).status, client.perform(requests.Get("a", 4)).data
        (<Status.DONE: 'done'>, b'tree')
        >>> client.perform(requests.Put("a", b"other", requests.Absent.ABSENT)).status
        <Status.REFUSED: 'refused'>
    """

    def __init__(self, shown: str = "memory://", clock: Callable[[], float] = time.time) -> None:
        self.shown = shown
        self.patience = requests.PATIENCE
        self._clock = clock
        self._lock = threading.Lock()
        self._objects: dict[str, _Object] = {}
        self._numbers = itertools.count(1)

    def perform(self, request: requests.Request) -> requests.Answer:
        """Make one request."""
        if isinstance(request, requests.Range):  # a copy, for which nobody else has to wait
            return self._fill(request.name, request.version, request.span)
        with self._lock:
            match request:
                case requests.Get(name, most):
                    if (there := self._objects.get(name)) is None:
                        return _MISSING
                    return requests.Answer(requests.Status.DONE, there.data[:most], there.found)
                case requests.Head(name):
                    there = self._objects.get(name)
                    return _MISSING if there is None else requests.Answer(requests.Status.DONE, found=there.found)
                case requests.Put(name, data, condition):
                    return self._put(name, bytes(data), condition)
                case requests.Delete(names, condition):
                    return self._delete(names, condition)
                case requests.List(prefix, deep):
                    return self._list(prefix, deep=deep)
                case requests.Copy(name, new):
                    there = self._objects.get(name)
                    return _MISSING if there is None else self._put(new, there.data, None)

    def put_parts(self, name: str, buffers: Iterable[Buffer], size: int, *, new: bool = True) -> None:
        """Write an object."""
        self.perform(requests.Put(name, b"".join(lasting_pieces(buffers, size))))

    def _fill(self, name: str, version: requests.ObjectVersion, span: requests.Span) -> requests.Answer:
        if (there := self._objects.get(name)) is None:
            return _MISSING
        if there.found.version == version:
            if span.stop > len(there.data):
                raise OSError(errno.EIO, "the object has fewer bytes than were asked for")
            span.fill(span.start, memoryview(there.data)[span.start : span.stop])
        return requests.Answer(requests.Status.DONE, found=there.found)

    def _put(self, name: str, data: bytes, condition: requests.Condition) -> requests.Answer:
        if not self._holds(name, condition):
            return _REFUSED
        found = requests.Listed(name, len(data), self._clock(), requests.ObjectVersion(self._e_tag(data)))
        self._objects[name] = _Object(data, found)
        return requests.Answer(requests.Status.DONE, found=found)

    def _e_tag(self, data: bytes) -> str:
        return f'"{next(self._numbers)}"'

    def _delete(self, names: tuple[str, ...], condition: requests.ObjectVersion | None) -> requests.Answer:
        if condition is not None and not self._holds(names[0], condition):
            return _REFUSED if names[0] in self._objects else _MISSING
        for name in names:
            self._objects.pop(name, None)
        return requests.Answer(requests.Status.DONE)

    def _holds(self, name: str, condition: requests.Condition) -> bool:
        there = self._objects.get(name)
        if condition is None:
            return True
        if condition is requests.Absent.ABSENT:
            return there is None
        return there is not None and there.found.version == condition

    def _list(self, prefix: str, *, deep: bool) -> requests.Answer:
        listed: list[requests.Listed] = []
        places: dict[str, None] = {}
        for name, there in self._objects.items():
            if name.startswith(prefix):
                slash = -1 if deep else name.find("/", len(prefix))
                if slash < 0:
                    listed.append(there.found)
                else:
                    places[name[:slash]] = None
        return requests.Answer(requests.Status.DONE, listed=listed, places=list(places))


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

    def __init__(self, client: requests.Client, grace: float = 0.0) -> None:
        super().__init__(lambda path: (client, MemoryPath(path).key), lambda _: grace)
