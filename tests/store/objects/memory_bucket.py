"""A bucket in the memory of this process: the same answers as a real one gives, at once and without faults."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from treering._store.memory_pool import lasting_pieces
from treering._store.objects.reading import plan_spans
from treering._store.objects.requests import (
    PATIENCE,
    Absent,
    Answer,
    Condition,
    Delete,
    Get,
    Head,
    List,
    Listed,
    ObjectVersion,
    Put,
    Request,
    Status,
)
from treering._store.pieces import Buffer

_MISSING: Final = Answer(Status.MISSING)
_REFUSED: Final = Answer(Status.REFUSED)


class _Object(NamedTuple):
    data: bytes
    found: Listed


class MemoryBucket:
    """A client of a bucket in memory, for the threads of one process. Conditions hold, and versions never recur.

    Args:
        shown: the bucket, as messages call it.
        clock: tells when an object is put, in POSIX seconds.

    """

    def __init__(self, shown: str = "memory://bucket", clock: Callable[[], float] = time.time) -> None:
        self.shown = shown
        self.patience = PATIENCE
        self._clock = clock
        self._lock = threading.Lock()
        self._objects: dict[str, _Object] = {}
        self._numbers = itertools.count(1)

    def perform(self, request: Request) -> Answer:
        """Make one request."""
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

    def put_parts(self, name: str, buffers: Iterable[Buffer], size: int, *, new: bool = True) -> None:
        """Write an object."""
        self.perform(Put(name, b"".join(lasting_pieces(buffers, size))))

    def read_into(self, name: str, version: ObjectVersion, jobs: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer with the bytes from its offset on.

        Raises:
            FileNotFoundError: that version is gone.
            OSError: it has fewer bytes.
        """
        there = self._objects.get(name)
        if there is None or there.found.version != version:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        for offset, buffer in jobs:
            if offset < 0 or offset + buffer.nbytes > len(there.data):
                raise OSError(errno.EIO, "the object has fewer bytes than were asked for")
            buffer.cast("B")[:] = memoryview(there.data)[offset : offset + buffer.nbytes]

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


_COUNTED: Final = itertools.count()


class CountingBucket(MemoryBucket):
    """A bucket that notes what it is asked, as a real one would be.

    Attributes:
        asked: names of the kinds of requests; each range that a client would ask for is a "Range".
        received: bytes of the answers to those that read.
    """

    def __init__(self) -> None:
        super().__init__(f"s3://counted-{os.getpid()}-{next(_COUNTED)}")
        self.asked: list[str] = []
        self.received = 0
        self._counting = threading.Lock()

    def perform(self, request: Request) -> Answer:
        """Make one request."""
        answer = super().perform(request)
        self._count([type(request).__name__], len(answer.data))
        return answer

    def read_into(self, name: str, version: ObjectVersion, jobs: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer with the bytes from its offset on."""
        spans = plan_spans(jobs)
        self._count(["Range"] * len(spans), sum(span.stop - span.start for span in spans))
        super().read_into(name, version, jobs)

    def start_over(self) -> None:
        """Forget what was asked."""
        self.asked.clear()
        self.received = 0

    def _count(self, kinds: Sequence[str], received: int) -> None:
        with self._counting:
            self.asked += kinds
            self.received += received
