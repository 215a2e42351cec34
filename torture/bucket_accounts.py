"""Two servers of one URL in one program: the environment names the one that a call begins on, then the other."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import treering
from torture.bucket_servers import BucketServer

__all__ = ["Accounts"]


class Accounts:
    """What a program with two accounts does: it changes the environment before each call, and after that has begun.

    Args:
        servers: the two, of one kind and with one name of the bucket.
    """

    def __init__(self, servers: Sequence[BucketServer]) -> None:
        self._servers = servers
        self._lock = threading.Lock()
        self.root: Any = treering.bucket(servers[0].url, grace=0, timeout=10.0)
        """The path of the bucket, whichever server it is on."""
        self._name(0)

    @contextlib.contextmanager
    def beginning(self, number: int) -> Iterator[Any]:
        """Name a server until the call says that it has begun, or ends; then the environment names the other one.

        Yields:
            What is passed as ``progress``: a call tells it of its bytes once it has begun.
        """
        first = threading.Lock()

        def leave(*_: object) -> None:
            if first.acquire(blocking=False):
                self._name(1 - number)
                self._lock.release()

        self._lock.acquire()
        self._name(number)
        try:
            yield leave
        finally:
            leave()

    def _name(self, number: int) -> None:
        # Both have the same variables, so none is added or removed while threads of the client read them.
        os.environ.update(self._servers[number].environment())
