"""Reading one object by position: its first bytes with the request that opens it, the rest ahead and by ranges."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import operator
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Final, TypeAlias

from treering._store.api import Reader, require_range
from treering._store.crew import map_together
from treering._store.failures import missing_error, naming
from treering._store.objects.requests import Client, Get, ObjectVersion, Range, Span, ask, require_answer
from treering.errors import StoreError

Jobs: TypeAlias = "Sequence[tuple[int, memoryview]]"

NEAR: Final = 1 << 20
"""So many bytes cost about as much time as the wait for another answer."""

_WINDOW: Final = 8 << 20
_FIRST_WINDOW: Final = 256 << 10
_MOST_PLACES: Final = 16
# Of what was fetched ahead, so much may not have been asked for yet; where more is not, reads follow no order.
_MOST_UNUSED: Final = 32 << 20


@dataclasses.dataclass(slots=True, weakref_slot=True, eq=False)
class _Window:
    """Bytes of an object that were read, and are held if they were fetched ahead."""

    start: int
    stop: int
    data: memoryview | None = None


# Those of all files together, the one that was used last at the end; a file knows its own weakly.
_HELD: Final[collections.deque[_Window]] = collections.deque(maxlen=8)


class ReadAhead:
    """Fetches ahead for the small reads of one object; any thread may read.

    Args:
        first: the first bytes of the object, which are known.
        size: bytes of the object.
        fetch: fills buffers with bytes from offsets on.

    Example:
        >>> asked = []
        >>> reads = ReadAhead(b"", 1 << 30, lambda jobs: asked.extend((at, len(view)) for at, view in jobs))
        >>> for number in range(100):
        ...     reads.fill([((5 << 20) + 1000 * number, memoryview(bytearray(1000)))])
        >>> asked
        [(5242880, 1000), (5243880, 261144)]
    """

    def __init__(self, first: bytes, size: int, fetch: Callable[[Jobs], None]) -> None:
        self._first: _Window | None = _Window(0, len(first), memoryview(first))
        self._size = size
        self._fetch = fetch
        self._unused = self._busy = 0
        self._lock = threading.Lock()
        # What was read as it was asked for is not held: where it lay is known.
        self._places: collections.deque[_Window | weakref.ref[_Window]] = collections.deque(maxlen=_MOST_PLACES)

    def forget(self) -> None:
        """Let go of all bytes."""
        with self._lock:
            for window in self._known():
                _let_go(window)
            self._first = None
            self._places.clear()

    def _take_what_is_known(
        self, rest: list[tuple[int, memoryview]], start: int, stop: int, *, ahead: bool
    ) -> list[tuple[int, memoryview]]:
        for window in self._known():
            if window.data is not None and window.start < stop and start < window.stop:
                rest = self._take(window, rest)
        while ahead and rest and (further := self._fetch_ahead(rest)) is not None:
            rest = self._take(further, rest)
        return rest

    def fill(self, jobs: Jobs) -> None:
        """Fill flat buffers with the bytes from their offsets on."""
        rest = sorted(jobs, key=operator.itemgetter(0))
        start, stop = _range_of(rest)
        is_small = stop - start < _WINDOW
        with self._lock:
            rest = self._take_what_is_known(rest, start, stop, ahead=is_small)
            if is_small and rest:
                self._places.append(_Window(*_range_of(rest)))
            self._busy += bool(rest)
        if rest:
            try:
                self._fetch(rest)
            finally:
                with self._lock:
                    self._busy -= 1

    def _fetch_ahead(self, jobs: Jobs) -> _Window | None:
        """Fetch what lies around the first bytes that are wanted; None where others were not read near them before."""
        start, stop = _range_of(jobs)
        known = self._known()
        near = [one for one in known if one.start - NEAR <= start <= one.stop + NEAR]
        if not near or self._unused > _MOST_UNUSED:
            return None
        held = [one for one in known if one.data is not None]
        # More is fetched where more was read before.
        much = any(one is not self._first and (one in held or one.stop - one.start >= _FIRST_WINDOW) for one in near)
        length = _WINDOW if much else _FIRST_WINDOW
        # Several that read at once need not wait for each other.
        if stop - start >= (NEAR if self._busy else length):
            return None
        begin = max(start - start % length, *(one.stop for one in known if one.stop <= start), 0)
        end = min(start - start % length + length, *(one.start for one in held if one.start > start), self._size)
        window = _Window(begin, end, data := memoryview(bytearray(end - begin)))
        self._fetch([(begin, data)])
        self._unused += end - begin
        _HELD.append(window)
        self._places.append(weakref.ref(window))
        return window

    def _take(self, window: _Window, jobs: list[tuple[int, memoryview]]) -> list[tuple[int, memoryview]]:
        """Fill buffers with what a window has of their bytes; return what it has not."""
        data = window.data or memoryview(b"")
        if window is not self._first:
            _let_go(window)
            _HELD.append(window)
        rest: list[tuple[int, memoryview]] = []
        for offset, view in jobs:
            first, last = max(offset, window.start), min(offset + len(view), window.stop)
            if first >= last:
                rest.append((offset, view))
                continue
            view[first - offset : last - offset] = data[first - window.start : last - window.start]
            self._unused -= last - first if window is not self._first else 0
            if offset < first:
                rest.append((offset, view[: first - offset]))
            if last < offset + len(view):
                rest.append((last, view[last - offset :]))
        return rest

    def _known(self) -> list[_Window]:
        known = [self._first, *(one() if isinstance(one, weakref.ref) else one for one in self._places)]
        return [one for one in known if one is not None]


def _range_of(jobs: Jobs) -> tuple[int, int]:
    """Return where the first of some buffers begins, and the last one ends."""
    return (jobs[0][0], max(offset + len(view) for offset, view in jobs)) if jobs else (0, 0)


def _let_go(window: _Window) -> None:
    with contextlib.suppress(ValueError, IndexError):  # it has made room for others, or another thread uses them
        _HELD.remove(window)


FIRST_BYTES: Final = 256 << 10
"""An object is opened by reading so many of its first bytes: a small one needs no other request."""

# What is planned to be read together has a little more than 8 MiB.
_USUAL_RANGE: Final = 10 << 20
_LARGEST_RANGE: Final = 16 << 20
_AT_ONCE: Final = 8


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
    most = min(max(-(-total // max(total // _WINDOW, 1)), total // _AT_ONCE, _USUAL_RANGE), _LARGEST_RANGE)
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


def read_ranges(client: Client, name: str, version: ObjectVersion, jobs: Jobs) -> None:
    """Fill each buffer with the bytes from its offset on, by several requests at once.

    Raises:
        FileNotFoundError: that version is gone.
        PermissionError: the bucket denies it.
        OSError: it cannot be read.
    """

    def fetch(span: Span) -> None:
        answer = require_answer(client.shown, client.perform(Range(name, version, span)))
        if answer.found is None or answer.found.version != version:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    map_together(fetch, plan_spans(jobs), _AT_ONCE)


class ObjectReader(Reader):
    """An object open for reading. What is read is of the version that was opened, or an error.

    Raises:
        NotFoundError: nothing is there.
        StoreError: the bucket refuses.

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
            CorruptError: there are fewer.
            DataFileMissingError: it was replaced or removed.
            StoreError: the bucket refuses.
        """
        require_range(self, offset, count)
        data = bytearray(count)
        self.read_into([(offset, memoryview(data))])
        return bytes(data)

    def read_into(self, jobs: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each writable buffer with the bytes from its offset on; raises as `read` does."""
        for offset, buffer in jobs:
            require_range(self, offset, buffer.nbytes)
        self._ahead.fill([(offset, buffer.cast("B")) for offset, buffer in jobs if buffer.nbytes])

    def refetch(self, jobs: Sequence[tuple[int, memoryview]]) -> bool:
        """Fill the buffers anew: a bit may have changed on the way."""
        self._ahead.forget()
        self.read_into(jobs)
        return True

    def _fetch(self, jobs: Sequence[tuple[int, memoryview]]) -> None:
        try:
            read_ranges(self._client, self._name, self.version, jobs)
        except FileNotFoundError as error:
            shown = os.fspath(self.path)
            what = f"{shown!r} was replaced or removed while it was read"
            raise missing_error(shown, self.path.name, what) from error
        except OSError as error:
            raise StoreError.of(error, self.path, "read") from error
