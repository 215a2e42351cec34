"""Buckets in the memory of this process, for tests, and how paths lead to them.

Tests that are not about the object store itself learn here what they need of it: the requests of a client, paths and
plain URLs that lead to one, and what this process remembers of buckets.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Final

import pytest

from treering._store import resolve, waiting
from treering._store.objects import connect, obstore_stores, requests, store
from treering._store.objects.client import ObstoreClient
from treering._store.objects.memory import DictionaryClient, MemoryRoot
from treering._store.objects.repetition import RepeatingClient
from treering._store.objects.requests import (
    Answer,
    Client,
    Delete,
    Get,
    Head,
    List,
    ObjectVersion,
    Put,
    Range,
    Request,
    Status,
)
from treering._store.objects.store import GRACE, ObjectStore
from treering._store.objects.url import MemoryPath, bucket_path

__all__ = [
    "DAY", "HOUR", "NO_ANSWER", "Answer", "Client", "Delete", "Get", "Head", "List", "MemoryBucket", "ObjectVersion",
    "ObstoreClient", "Put", "Range", "Request", "Status", "ask_once", "bucket_path", "forget", "forget_clocks",
    "install", "lead_to", "no_patience", "store_in", "use_for_memory", "without_settings",
]  # fmt: skip

HOUR: Final = 3600.0
DAY: Final = 24 * HOUR
NO_ANSWER: Final = Answer(Status.NO_ANSWER)
_NUMBERS: Final = itertools.count()


class MemoryBucket(DictionaryClient):
    """A bucket that notes what it is asked, and does what a test wants of it.

    Attributes:
        requests: what was asked for, apart from the ranges of objects.
        asked: the names of the kinds of requests; each range that a client would ask for is a "Range".
        received: bytes of the answers to those that read.
        opened: the objects of which something was read.
        denied: tells of a request whether it is denied.
        meet: is called with each request first. What it returns is the answer; None: the bucket answers.
        time: the clock of the bucket; 0: that of the machine.
    """

    def __init__(self, shown: str | None = None) -> None:
        super().__init__(shown or f"s3://tests-{os.getpid()}-{next(_NUMBERS)}", lambda: self.time or time.time())
        self.requests: list[Request] = []
        self.asked: list[str] = []
        self.received = 0
        self.opened: set[str] = set()
        self.denied: Callable[[Request], bool] = lambda _: False
        self.meet: Callable[[Request], Answer | None] = lambda _: None
        self.time = 0.0
        self._counting = threading.Lock()

    def perform(self, request: Request) -> Answer:
        """Make one request."""
        if isinstance(request, Range):
            return self.read_range(request)
        self.requests.append(request)
        if self.denied(request):
            raise PermissionError(errno.EACCES, "AccessDenied")
        answer = self.meet(request) or self.answer(request)
        self._count(type(request).__name__, len(answer.data))
        if isinstance(request, Get) and answer.found is not None:
            self.opened.add(request.name)
        return answer

    def answer(self, request: Request) -> Answer:
        """Make one request that nothing notes or meets."""
        return super().perform(request)

    def read_range(self, request: Range) -> Answer:
        """Fill the buffers of a range."""
        self._count("Range", request.span.stop - request.span.start)
        return super().perform(request)

    def is_clock_of_runs(self, patch: pytest.MonkeyPatch) -> None:
        """Let what a run remembers of its bucket be as old as the bucket's own clock says."""
        patch.setattr(time, "monotonic", lambda: self.time)

    def start_over(self) -> None:
        """Forget what was asked."""
        self.asked.clear()
        self.opened.clear()
        self.received = 0

    def counted(self, action: Callable[[], object]) -> int:
        """How many requests an action makes."""
        before = len(self.requests)
        action()
        return len(self.requests) - before

    def wait(self, seconds: float) -> None:
        """Let time pass in the bucket."""
        self.time += seconds
        forget_clocks()

    def put(self, name: str, data: bytes) -> None:
        """Put an object, whatever is there."""
        self.answer(Put(name, data))

    def names(self, prefix: str = "") -> list[str]:
        """The names of all objects."""
        return sorted(name for name in self._objects if name.startswith(prefix))

    def data(self, name: str) -> bytes:
        """The content of an object."""
        return self._objects[name].data

    def size(self, name: str) -> int:
        """How many bytes an object has."""
        return len(self.data(name))

    def _count(self, kind: str, received: int) -> None:
        with self._counting:
            self.asked.append(kind)
            self.received += received


def use_for_memory(patch: pytest.MonkeyPatch, client: Client, *, grace: float = 0.0) -> None:
    """Let all paths at ``memory://`` lead into this bucket, where superseded data stay so many seconds."""
    root = MemoryRoot(client, grace)
    patch.setattr(resolve, "_memory", lambda: root)


def install(patch: pytest.MonkeyPatch, *, grace: float = GRACE) -> MemoryBucket:
    """Let all paths at ``memory://`` lead into one new bucket, whose clock stands until it is told to go on.

    What this process has warned of before is forgotten.
    """
    bucket = MemoryBucket("memory://")
    bucket.time = 1_000_000.0
    use_for_memory(patch, bucket, grace=grace)
    patch.setattr(waiting, "_warned", set())
    forget_clocks()
    return bucket


def forget_clocks() -> None:
    """Let this process ask buckets anew how late it is."""
    store._CLOCKS.clear()
    store._MARKERS.clear()


def no_patience(patch: pytest.MonkeyPatch, tries: int = 0) -> None:
    """Let stores give up on a request without an answer after so many tries, and not wait in between."""
    patch.setattr(requests, "_wait", lambda _: Answer(Status.DONE))
    turns = itertools.count()
    patch.setattr(store, "patience", lambda *_: lambda: next(turns) >= tries)


def ask_once(patch: pytest.MonkeyPatch) -> None:
    """Let clients that are made from now on ask nothing a second time."""
    begun = RepeatingClient.__init__
    patch.setattr(RepeatingClient, "__init__", lambda self, shown, *_: begun(self, shown, 0.0))


def store_in(bucket: Client, prefix: str, *, grace: float = GRACE) -> ObjectStore:
    """A place in a bucket."""
    return ObjectStore(bucket, f"{prefix}/", MemoryPath(f"memory://{prefix}"), grace=grace)


def lead_to(client: Client, *, grace: float | None = None) -> PurePath:
    """Let all plain URLs of the bucket of a client lead to that client, and return the path of the bucket."""
    options = connect.BucketOptions(grace=grace)
    connect._BUCKETS[client.shown] = connect.Connection(client.shown, options, client)
    return bucket_path(client.shown)


def forget(client: Client) -> None:
    """Let plain URLs of the bucket of a client no longer lead to it."""
    del connect._BUCKETS[client.shown]


@contextmanager
def without_settings(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take what clouds are reached by out of the environment; at the end, forget what was connected meanwhile."""
    for name in list(os.environ):
        if name.startswith(obstore_stores._READ) or name.lower().endswith("_proxy"):
            patch.delenv(name)
    before = dict(connect._BUCKETS)
    yield
    connect._BUCKETS.clear()
    connect._BUCKETS.update(before)
