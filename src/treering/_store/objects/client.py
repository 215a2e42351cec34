"""What performs requests at a bucket: obstore, with retries, deadlines and counts of our own.

obstore is opened without retries: those of a conditional request would make a refusal of one's own success.
"""

from __future__ import annotations

import errno
import functools
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from treering._printable import hide_queries, printable
from treering._store.crew import FirstError, work_together
from treering._store.objects import obstore_requests
from treering._store.objects.conditional_delete import delete_version
from treering._store.objects.obstore_stores import StoreVariants, requests_at_once
from treering._store.objects.reading import Span, plan_spans
from treering._store.objects.request_failures import Cause, failure_of
from treering._store.objects.requests import (
    PATIENCE,
    Answer,
    Delete,
    Get,
    Head,
    List,
    ObjectVersion,
    Put,
    Request,
    Status,
    no_answer,
)
from treering._store.objects.writing import FailedBuffers, upload_parts
from treering._store.pieces import Buffer
from treering._values.telemetry import LOGGER, TRAFFIC

_SLOTS: Final = threading.BoundedSemaphore(requests_at_once())
"""Of this process, beside the parts of uploads."""

_THREADS: Final = 8
_NAMES_AT_ONCE: Final = 1000
_LARGEST_MESSAGE: Final = 64 << 20
_FIRST_PAUSE: Final = 0.1
_FIRST_SLOW_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 15.0
_AGAIN: Final = frozenset({Cause.PASSING, Cause.CONFLICT})
_DATA: Final = (".safetensors", ".msgpack")
_FIRST_CONTACT: Final = 10.0
"""Seconds in which a server must be reached that never was: its URL may be wrong."""

_RIGHTS: Final = {
    "S3Store": {"get": "s3:GetObject", "put": "s3:PutObject", "delete": "s3:DeleteObject", "list": "s3:ListBucket"},
    "GCSStore": {
        "get": "storage.objects.get", "put": "storage.objects.create and storage.objects.delete",
        "delete": "storage.objects.delete", "list": "storage.objects.list",
    },
    "AzureStore": {"get": "blobs/read", "put": "blobs/write", "delete": "blobs/delete", "list": "blobs/read"},
}  # fmt: skip


class ObstoreClient:
    """A client of one bucket.

    Args:
        store: a store of obstore: ``S3Store``, ``GCSStore``, ``AzureStore`` or ``MemoryStore``. It is opened again with
            the same options, but for its retries and its timeout.
        shown: the bucket, as messages call it: ``s3://bucket``.
        timeout: seconds for a small request; a large one gets more.
        patience: seconds after which nothing is asked again that was not answered.
        storage_class: the class that data files are put in; documents stay in the usual one.
    """

    def __init__(
        self,
        store: Any,
        shown: str,
        *,
        timeout: float = 30.0,
        patience: float = PATIENCE,
        storage_class: str | None = None,
    ) -> None:
        self.shown = shown
        self.patience = patience
        self._storage_class = storage_class
        self._unlisted = False
        self._reached = False
        self._stores = StoreVariants(store, timeout)

    def perform(self, request: Request) -> Answer:
        """Make one request. One with a condition is made once; others are repeated until the patience is over.

        Raises:
            PermissionError: the bucket denies it.
            OSError: it can never succeed.
        """
        try:
            answer = self._perform(request)
        except PermissionError as error:
            # S3 says the same of what is absent where the right to list is missing.
            denied = isinstance(request, Head) or "AccessDenied" in str(error)
            if self._unlisted and denied and isinstance(request, Get | Head):
                return Answer(Status.MISSING)
            self._unlisted = self._unlisted or isinstance(request, List)
            raise
        self._unlisted = self._unlisted and not isinstance(request, List)
        return answer

    def _perform(self, request: Request) -> Answer:
        match request:
            case Get(name, most):
                size = min(most or _LARGEST_MESSAGE, _LARGEST_MESSAGE)
                answer = self._answer("get", lambda store: obstore_requests.get(store, name, most), size)
                TRAFFIC.add(received=len(answer.data))
                return answer
            case Head(name):
                return self._answer("get", lambda store: obstore_requests.head(store, name))
            case Put(name, data, condition):
                TRAFFIC.add(sent=len(data))
                place = self._storage_class if name.endswith(_DATA) else None
                call = functools.partial(obstore_requests.put, request=request, storage_class=place)
                return self._answer("put", call, len(data), once=condition is not None)
            case Delete((name, *_), ObjectVersion() as version):
                return self._answer("delete", lambda store: delete_version(store, name, version), once=True)
            case Delete(names, _):
                return self._delete(names)
            case List(prefix, deep):
                return self._answer("list", lambda store: obstore_requests.list_names(store, prefix, deep=deep))

    def put_parts(self, name: str, buffers: Iterable[Buffer], size: int, *, new: bool = True) -> None:
        """Write an object in parts that are sent while the next ones are made.

        Args:
            name: its name.
            buffers: its bytes.
            size: how many they are.
            new: whether nothing was ever at that name: then what is there after a lost answer is what was sent.

        Raises:
            PermissionError: the bucket denies it.
            OSError: it was not written, or the buffers hold another number of bytes.
        """
        try:
            upload_parts(self._stores, name, buffers, size, self._storage_class)
        except FailedBuffers as error:
            raise error.__cause__ or error from None
        except Exception as error:  # obstore has many kinds; `failure_of` raises any other again
            # What completes an upload may have been done, and only its answer lost.
            failure = failure_of(error)
            doubtful = new and failure.cause in {*_AGAIN, Cause.MISSING}
            found = self.perform(Head(name)).found if doubtful else None
            if found is None or found.size != size:
                raise failure.error(self.shown, self._right("put")) from error

    def read_into(self, name: str, version: ObjectVersion, jobs: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer with the bytes from its offset on, by several requests at once.

        Raises:
            FileNotFoundError: that version is gone.
            PermissionError: the bucket denies it.
            OSError: it cannot be read.
        """
        todo = deque(plan_spans(jobs))
        failure = FirstError()

        def work() -> None:
            while failure.error is None:
                with failure:
                    try:
                        span = todo.popleft()
                    except IndexError:
                        return
                    self._fetch(name, version, span)

        work_together(work, max(0, min(len(todo), _THREADS) - 1))
        failure.reraise()

    def _fetch(self, name: str, version: ObjectVersion, span: Span) -> None:
        size = span.stop - span.start
        answer = self._answer("get", lambda store: obstore_requests.fetch(store, name, version, span), size)
        TRAFFIC.add(received=size)
        if answer.status is Status.NO_ANSWER:
            raise no_answer(self, answer)
        if answer.found is None or answer.found.version != version:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def _delete(self, names: Sequence[str]) -> Answer:
        answer = Answer(Status.DONE)
        for start in range(0, len(names), _NAMES_AT_ONCE):
            some = list(names[start : start + _NAMES_AT_ONCE])
            answer = self._answer("delete", functools.partial(obstore_requests.delete, names=some))
            if answer.status is not Status.DONE:
                break
        return answer

    def _right(self, verb: str) -> str:
        """Return what a policy calls the right to do so."""
        return _RIGHTS.get(type(self._stores.store).__name__, {}).get(verb, "")

    def _answer(self, verb: str, call: Callable[[Any], Answer], nbytes: int = 0, *, once: bool = False) -> Answer:
        """Make a request once, or until it is answered."""
        begun = time.monotonic()
        pauses = _pauses()
        while True:
            try:
                with _SLOTS:
                    TRAFFIC.add(requests=1)
                    answer = call(self._stores.single(nbytes))
                    self._reached = True
                    return answer
            except Exception as error:  # noqa: BLE001 - what is none of the bucket's is raised again there
                failure = failure_of(error)
            self._reached = self._reached or not failure.unconnected
            patience = self.patience if self._reached else min(self.patience, _FIRST_CONTACT)
            if failure.cause is Cause.DENIED and self._stores.renew():
                continue  # with new credentials; what was denied has not happened
            pause = next(pauses) * (_FIRST_SLOW_PAUSE / _FIRST_PAUSE if failure.slow_down else 1)
            pause = min(pause, _LONGEST_PAUSE) * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
            if once or failure.cause not in _AGAIN or time.monotonic() + pause > begun + patience:
                if not (once or self._reached):
                    raise failure.error(self.shown)
                return failure.answer(self.shown, self._right(verb))
            TRAFFIC.add(retries=1)
            LOGGER.info("%s: %s; next try in %.1f s", self.shown, printable(hide_queries(failure.reason)), pause)
            time.sleep(pause)


def _pauses() -> Iterator[float]:
    pause = _FIRST_PAUSE
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE)
