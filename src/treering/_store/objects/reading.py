"""Reading one object by position: its first bytes with the request that opens it, the rest by ranges."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import errno
import itertools
import operator
import os
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Final

from treering._store.api import Reader
from treering._store.failures import DataFileMissing, naming, with_errno
from treering._store.objects.read_ahead import NEAR, ReadAhead
from treering._store.objects.requests import Client, Get, ObjectVersion, ask
from treering.errors import StoreFailed

FIRST_BYTES: Final = 256 << 10
"""An object is opened by reading so many of its first bytes: a small one needs no other request."""

_NEARLY: Final = 8 << 20
# What is planned to be read together has a little more than 8 MiB.
_USUAL_RANGE: Final = 10 << 20
_LARGEST_RANGE: Final = 16 << 20
_AT_ONCE: Final = 8


@dataclasses.dataclass(slots=True)
class Span:
    """Bytes of an object that one request fetches, and the memory that they go to."""

    start: int
    stop: int
    targets: list[tuple[int, memoryview]]
    """Offsets and flat buffers, ascending; they may leave gaps, and do not overlap."""

    def fill(self, position: int, data: memoryview) -> None:
        """Copy what was received from ``position`` on to where it belongs."""
        end = position + len(data)
        first = max(bisect.bisect_right(self.targets, position, key=operator.itemgetter(0)) - 1, 0)
        for offset, buffer in itertools.islice(self.targets, first, None):
            if offset >= end:
                break
            start, stop = max(offset, position), min(offset + len(buffer), end)
            if start < stop:
                buffer[start - offset : stop - offset] = data[start - position : stop - position]


def plan_spans(jobs: Sequence[tuple[int, memoryview]]) -> list[Span]:
    """Return the requests that fill the buffers of all jobs: near ones together, large ones in pieces.

    Example:
        >>> rooms = [memoryview(bytearray(100)) for _ in range(3)]
        >>> [(span.start, span.stop) for span in plan_spans([(0, rooms[0]), (500, rooms[1]), (1 << 30, rooms[2])])]
        [(0, 600), (1073741824, 1073741924)]
    """
    flat = sorted(((offset, buffer.cast("B")) for offset, buffer in jobs if buffer.nbytes), key=lambda job: job[0])
    total = sum(len(buffer) for _, buffer in flat)
    # No more of them than there are 8 MiB.
    most = min(max(-(-total // max(total // _NEARLY, 1)), total // _AT_ONCE, _USUAL_RANGE), _LARGEST_RANGE)
    spans: list[Span] = []
    for start, whole in flat:
        offset, buffer = start, whole
        while len(buffer):
            last = spans[-1] if spans else None
            if last is None or not last.stop <= offset < min(last.stop + NEAR, last.start + most):
                spans.append(last := Span(offset, offset, []))
            part = buffer[: last.start + most - offset]
            last.targets.append((offset, part))
            offset = last.stop = offset + len(part)
            buffer = buffer[len(part) :]
    return spans


class ObjectReader(Reader):
    """An object open for reading. What is read is of the version that was opened, or an error.

    Raises:
        NotFound: nothing is there.
        StoreFailed: the bucket refuses.

    Example:
        >>> from obstore.store import MemoryStore
        >>> from treering._store.objects.client import ObstoreClient
        >>> bucket = ObstoreClient(MemoryStore(), "s3://bucket")
        >>> bucket.put_parts("a", [b"treering"], 8)
        >>> with ObjectReader(bucket, "a", PurePath("a")) as file:
        ...     file.size, file.read(4, 4)
        (8, b'ring')
    """

    version: ObjectVersion
    threads = _AT_ONCE

    def __init__(self, client: Client, name: str, path: PurePath) -> None:
        self.path = path
        self._client = client
        self._name = name
        with naming(os.fspath(path), "read"):
            answer = ask(client, Get(name, FIRST_BYTES))
            if answer.found is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        self.size = answer.found.size
        self.version = answer.found.version
        self._ahead = ReadAhead(answer.data, self.size, self._fetch)

    def close(self) -> None:
        """Let go of what was fetched ahead; nothing is held open."""
        self._ahead.forget()

    def read(self, offset: int, count: int) -> bytes:
        """Return ``count`` bytes from ``offset`` on.

        Raises:
            Corrupt: there are fewer.
            DataFileMissing: it was replaced or removed.
            StoreFailed: the bucket refuses.
        """
        self.require(offset, count)
        data = bytearray(count)
        self.read_into([(offset, memoryview(data))])
        return bytes(data)

    def read_into(self, jobs: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each writable buffer with the bytes from its offset on.

        Raises:
            Corrupt: there are fewer.
            DataFileMissing: it was replaced or removed.
            StoreFailed: the bucket refuses.
        """
        for offset, buffer in jobs:
            self.require(offset, buffer.nbytes)
        self._ahead.fill([(offset, buffer.cast("B")) for offset, buffer in jobs if buffer.nbytes])

    def refetch(self, jobs: Sequence[tuple[int, memoryview]]) -> bool:
        """Fill the buffers anew: a bit may have changed on the way."""
        self._ahead.forget()
        self.read_into(jobs)
        return True

    def _fetch(self, jobs: Sequence[tuple[int, memoryview]]) -> None:
        with self._naming():
            self._client.read_into(self._name, self.version, jobs)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            gone = DataFileMissing(f"{os.fspath(self.path)!r} was replaced or removed while it was read")
            gone.name = self.path.name
            raise with_errno(gone, errno.ENOENT, self.path) from error
        except OSError as error:
            raise StoreFailed.of(error, self.path, "read") from error
