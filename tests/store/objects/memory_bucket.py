"""Buckets in the memory of this process, for tests: one as it is, and one that counts what it is asked."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from typing import Final

import pytest

from treering._store import resolve
from treering._store.objects.memory import DictionaryClient, MemoryRoot
from treering._store.objects.requests import Answer, Client, Get, Range, Request

MemoryBucket = DictionaryClient


def use_for_memory(monkeypatch: pytest.MonkeyPatch, client: Client, *, grace: float = 0.0) -> None:
    """Let all paths at ``memory://`` lead into this bucket, where superseded data stay so many seconds."""
    root = MemoryRoot(client, grace)
    monkeypatch.setattr(resolve, "_memory", lambda: root)


_COUNTED: Final = itertools.count()


class CountingBucket(MemoryBucket):
    """A bucket that notes what it is asked, as a real one would be.

    Attributes:
        asked: names of the kinds of requests; each range that a client would ask for is a "Range".
        received: bytes of the answers to those that read.
        opened: the objects of which something was read.
    """

    def __init__(self) -> None:
        super().__init__(f"s3://counted-{os.getpid()}-{next(_COUNTED)}")
        self.asked: list[str] = []
        self.received = 0
        self.opened: set[str] = set()
        self._counting = threading.Lock()

    def perform(self, request: Request) -> Answer:
        """Make one request."""
        answer = super().perform(request)
        more = request.span.stop - request.span.start if isinstance(request, Range) else 0
        self._count([type(request).__name__], len(answer.data) + more)
        if isinstance(request, Get) and answer.found is not None:
            self.opened.add(request.name)
        return answer

    def start_over(self) -> None:
        """Forget what was asked."""
        self.asked.clear()
        self.opened.clear()
        self.received = 0

    def _count(self, kinds: Sequence[str], received: int) -> None:
        with self._counting:
            self.asked += kinds
            self.received += received
