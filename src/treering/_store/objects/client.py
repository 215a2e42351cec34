"""What performs requests at a bucket: obstore, with retries, deadlines and counts of our own.

obstore is opened without retries: those of a conditional request would make a refusal of one's own success.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from treering._printable import printable
from treering._store.objects import obstore_requests
from treering._store.objects.obstore_requests import FailedBuffers, upload_parts
from treering._store.objects.obstore_stores import StoreVariants
from treering._store.objects.repetition import PASSING, Cause, RepeatingClient, failure_of
from treering._store.objects.requests import (
    PATIENCE,
    Answer,
    Copy,
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
from treering._store.objects.signed_requests import delete_version
from treering._store.pieces import Buffer
from treering._values.telemetry import LOGGER, TRAFFIC

_NAMES_AT_ONCE: Final = 1000
_LARGEST_MESSAGE: Final = 64 << 20
_LARGEST_COPY: Final = 5 << 30
_DATA: Final = (".safetensors", ".msgpack")
_RIGHTS: Final = {
    "S3Store": {"get": "s3:GetObject", "put": "s3:PutObject", "delete": "s3:DeleteObject", "list": "s3:ListBucket"},
    "GCSStore": {
        "get": "storage.objects.get", "put": "storage.objects.create and storage.objects.delete",
        "delete": "storage.objects.delete", "list": "storage.objects.list",
    },
    "AzureStore": {"get": "blobs/read", "put": "blobs/write", "delete": "blobs/delete", "list": "blobs/read"},
}  # fmt: skip


class ObstoreClient(RepeatingClient):
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
        super().__init__(shown, patience)
        self._storage_class = storage_class
        self._unlisted = False
        self._stores = StoreVariants(store, timeout, patience)

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
                answer = self._answer("get", name, lambda store: obstore_requests.get(store, name, most), size)
                TRAFFIC.add(received=len(answer.data))
                return answer
            case Range(name, version, span):
                size = span.stop - span.start
                call = functools.partial(obstore_requests.fetch, name=name, version=version, span=span)
                return self._answer("get", name, call, size)
            case Head(name):
                return self._answer("get", name, lambda store: obstore_requests.head(store, name))
            case Put(name, data, condition):
                TRAFFIC.add(sent=len(data))
                place = self._storage_class if name.endswith(_DATA) else None
                call = functools.partial(obstore_requests.put, request=request, storage_class=place)
                return self._answer("put", name, call, len(data), once=condition is not None)
            case Delete((name, *_), ObjectVersion() as version):
                return self._answer("delete", name, lambda store: delete_version(store, name, version), once=True)
            case Delete(names, _):
                return self._delete(names)
            case List(prefix, deep):
                list_names = functools.partial(obstore_requests.list_names, prefix=prefix, deep=deep)
                return self._answer("list", prefix, lambda store: list_names(store, reopen=self._stores.at_url))
            case Copy(name, new):
                return self._copy(name, new)

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
        begun = time.monotonic()
        try:
            upload_parts(self._stores, name, buffers, size, self._storage_class)
        except FailedBuffers as error:
            raise error.__cause__ or error from None
        except Exception as error:  # obstore has many kinds; `failure_of` raises any other again
            # What completes an upload may have been done, and only its answer lost.
            failure = failure_of(error)
            doubtful = failure.cause in {*PASSING, Cause.MISSING}
            if failure.cause in PASSING:  # obstore has repeated it for the whole time
                self._note_silence(begun, f"PUT {name!r}").over = True
            found = self.perform(Head(name)).found if doubtful and new else None
            if doubtful and not new:
                reason = f"{failure.reason}; the file may have been put, or, if its upload was not aborted, may yet be"
                failure = dataclasses.replace(failure, reason=reason)
            if found is None or found.size != size:
                failure = dataclasses.replace(failure, reason=f"PUT {name!r}: {failure.reason}")
                raise failure.error(self.shown, self._right("put")) from error

    def _delete(self, names: Sequence[str]) -> Answer:
        answer = Answer(Status.DONE)
        if self.patience < 0:  # it may be asked for in the end of a save that failed, and is not worth a wait
            return Answer(Status.NO_ANSWER, reason="it did not answer before")
        for start in range(0, len(names), _NAMES_AT_ONCE):
            some = list(names[start : start + _NAMES_AT_ONCE])
            answer = self._answer("delete", some[0], functools.partial(obstore_requests.delete, names=some))
            if answer.status is not Status.DONE:
                break
        return answer

    def _copy(self, name: str, new: str) -> Answer:
        """Let the server copy an object, which may take as long as its bytes take to be sent."""
        # obstore copies into the usual class. Azure may go on after its answer, when the source may be removed.
        if self._storage_class is not None or type(self._stores.store).__name__ == "AzureStore":
            return Answer(Status.REFUSED)
        failed: set[Cause] = set()

        def copy(store: Any) -> Answer:
            try:
                return obstore_requests.copy(store, name, new)
            except Exception as error:  # obstore has many kinds; `failure_of` raises any other again
                failed.add(failure_of(error).cause)
                raise

        try:
            answer = self._answer("put", new, copy, _LARGEST_COPY)
        except OSError as error:  # it is denied, or larger than a copy may be; whoever writes it instead finds out
            LOGGER.info("%s copies no %s: %s", printable(self.shown), printable(name), printable(str(error)))
            answer = Answer(Status.REFUSED)
        # An earlier try that was not answered may yet be done: over what would be written there instead.
        return Answer(Status.NO_ANSWER) if answer.status is not Status.DONE and failed & PASSING else answer

    def _right(self, verb: str) -> str:
        """Return what a policy calls the right to do so."""
        return _RIGHTS.get(type(self._stores.store).__name__, {}).get(verb, "")

    def _renew(self) -> bool:
        return self._stores.renew()

    def _answer(
        self, verb: str, name: str, call: Callable[[Any], Answer], nbytes: int = 0, *, once: bool = False
    ) -> Answer:
        """Make a request that moves so many bytes."""
        what = f"{verb.upper()} {name!r}"
        return self._repeat(lambda: call(self._stores.variant(nbytes)), what, self._right(verb), once=once)
