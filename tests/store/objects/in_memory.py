"""A bucket in memory at ``memory://``, with a clock of its own and a record of the requests, for tests of all above."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from tests.store.objects.memory_bucket import MemoryBucket, use_for_memory
from treering._store.objects.requests import Answer, Range, Request
from treering._store.objects.store import GRACE, ObjectStore
from treering._store.objects.transaction import _CLOCKS, _MARKERS
from treering._store.objects.url import MemoryPath

HOUR = 3600.0
DAY = 24 * HOUR


class TestBucket(MemoryBucket):
    """A bucket whose clock stands until it is told to go on, and that can deny requests.

    Attributes:
        time: the clock of the bucket.
        requests: what was asked for, but for ranges.
        denied: tells of a request whether it is denied.
    """

    __test__ = False

    def __init__(self) -> None:
        super().__init__(clock=lambda: self.time)
        self.time = 1_000_000.0
        self.requests: list[Request] = []
        self.denied: Callable[[Request], bool] = lambda _: False

    def perform(self, request: Request) -> Answer:
        if not isinstance(request, Range):
            self.requests.append(request)
        if self.denied(request):
            raise PermissionError(errno.EACCES, "AccessDenied")
        return super().perform(request)

    def wait(self, seconds: float) -> None:
        """Let time pass in the bucket."""
        self.time += seconds
        _CLOCKS.clear()
        _MARKERS.clear()

    def names(self, prefix: str = "") -> list[str]:
        """The names of all objects."""
        return sorted(name for name in self._objects if name.startswith(prefix))

    def data(self, name: str) -> bytes:
        """The content of an object."""
        return self._objects[name].data

    def size(self, name: str) -> int:
        """How many bytes an object has."""
        return len(self.data(name))

    def counted(self, action: Callable[[], object]) -> int:
        """How many requests an action makes."""
        before = len(self.requests)
        action()
        return len(self.requests) - before


def install(monkeypatch: pytest.MonkeyPatch, *, grace: float = GRACE) -> TestBucket:
    """Let all paths at ``memory://`` lead into one new bucket."""
    bucket = TestBucket()
    use_for_memory(monkeypatch, bucket, grace=grace)
    _CLOCKS.clear()
    _MARKERS.clear()
    return bucket


def store_in(bucket: TestBucket, prefix: str, *, grace: float = GRACE) -> ObjectStore:
    """A place in a bucket."""
    return ObjectStore(bucket, f"{prefix}/", MemoryPath(f"memory://{prefix}"), grace=grace)
