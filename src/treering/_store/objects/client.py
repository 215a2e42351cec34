"""What performs requests at a bucket: obstore, with retries, deadlines and counts of our own.

obstore is opened without retries: those of a conditional request would make a refusal of one's own success.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import obstore

from treering._printable import printable
from treering._store.api import LARGEST_DOCUMENT
from treering._store.memory_pool import lasting_pieces
from treering._store.objects.obstore_stores import StoreVariants
from treering._store.objects.repetition import (
    PASSING,
    Cause,
    RepeatingClient,
    ShortAnswer,
    failure_of,
    requests_at_once,
)
from treering._store.objects.requests import (
    PATIENCE,
    Absent,
    Answer,
    Copy,
    Delete,
    Get,
    Head,
    List,
    Listed,
    ObjectVersion,
    Put,
    Range,
    Request,
    Span,
    Status,
)
from treering._store.objects.signed_requests import delete_version, list_past
from treering._store.pieces import Buffer
from treering._values.human import pluralize
from treering._values.telemetry import LOGGER, TRAFFIC

_PAGE: Final = 1000
_STREAMED: Final = 256 << 10
_LONGEST_LISTING: Final = 60.0
_NO_STORE: Final = {"Cache-Control": "no-store"}
_NO_RANGES: Final = "non-partial response"
_EMPTY: Final = ("status code: 416", "Invalid range", "StartTooLarge")


def get(store: Any, name: str, most: int | None) -> Answer:
    """Read an object, or its first bytes; by a range, for the answer to one says how long it has to be."""
    most = most or LARGEST_DOCUMENT
    try:
        result = obstore.get(store, name, options={"range": (0, most)})
    except obstore.exceptions.BaseError as error:
        text = str(error)
        if _NO_RANGES not in text and not any(words in text for words in _EMPTY):
            raise
        # Some servers answer a range that has all bytes with the whole object; of an empty one there is no range.
        result = obstore.get(store, name)
        if _NO_RANGES not in text and result.meta["size"]:
            raise ShortAnswer(errno.EIO, "a range that is there was refused") from error
    found = listed(result.meta)
    data = bytes(result.bytes()) if found.size <= most else b"".join(_first(result, most))
    if len(data) != min(found.size, most):
        raise ShortAnswer(errno.EIO, f"{pluralize(len(data), 'bytes')} of {found.size} came")
    return Answer(Status.DONE, data, found)


def _first(result: Any, most: int) -> Iterator[bytes]:
    """Yield the first bytes of an answer, which may have more of them."""
    for chunk in result.stream(min_chunk_size=_STREAMED):
        yield bytes(chunk[:most])
        most -= len(chunk)
        if most <= 0:
            return


def put(store: Any, request: Put, storage_class: str | None = None) -> Answer:
    """Make data the content of an object. No cache may keep what is replaced."""
    mode: Any = "create" if request.condition is Absent.ABSENT else "overwrite"
    if isinstance(request.condition, ObjectVersion):
        version = {"e_tag": request.condition.e_tag, "version": request.condition.generation}
        mode = {name: value for name, value in version.items() if value is not None}
    attributes = {**_NO_STORE, **storage_attributes(storage_class)}
    result = obstore.put(store, request.name, request.data, mode=mode, use_multipart=False, attributes=attributes)
    return Answer(Status.DONE, found=Listed(request.name, len(request.data), 0.0, version_of(result)))


def storage_attributes(storage_class: str | None) -> dict[str, str]:
    """Return how obstore says the class that an object is put in."""
    return {} if storage_class is None else {"Storage-Class": storage_class}


def delete(store: Any, names: list[str]) -> Answer:
    """Remove objects; those that are gone already are removed."""
    try:
        obstore.delete(store, names)
    except Exception as error:  # obstore has many kinds; what is not that of a missing object is raised again
        if failure_of(error).cause is not Cause.MISSING:
            raise
        if len(names) > 1:  # the store told of one of them, and may have stopped there
            for name in names:
                delete(store, [name])
    return Answer(Status.DONE)


def list_names(store: Any, prefix: str, *, deep: bool, reopen: Callable[[str], Any] = lambda _: None) -> Answer:
    """List what begins with a prefix. obstore lists whole folders, and leaves out what stands for the folder itself."""
    folder, slash, _ = prefix.rpartition("/")
    above = folder + slash or None
    try:
        found = _list_deep(store, above) if deep else _list_level(store, above)
    except obstore.exceptions.InvalidPathError:
        past = list_past(store, reopen, above or "", deep=deep, seconds=_LONGEST_LISTING)
        if past is None:
            raise
        found = past
    names = [one for one in found.listed if one.name.startswith(prefix)]
    return Answer(Status.DONE, listed=names, places=[place for place in found.places if place.startswith(prefix)])


def _list_level(store: Any, above: str | None) -> Answer:
    """List one level of a folder. obstore collects all its pages: an event loop can leave that before it ends."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        result = _collect_level(store, above)
    else:
        with ThreadPoolExecutor(1) as beside:  # a notebook: a thread runs one loop at a time
            result = beside.submit(_collect_level, store, above).result()
    return Answer(Status.DONE, listed=[listed(meta) for meta in result["objects"]], places=result["common_prefixes"])


def _collect_level(store: Any, above: str | None) -> Mapping[str, Any]:
    """List one level of a folder; an interrupt ends it.

    Raises:
        OSError: the pages have no end.
    """

    async def collect() -> Mapping[str, Any]:
        async with asyncio.timeout(_LONGEST_LISTING):
            return await obstore.list_with_delimiter_async(store, above)

    loop = asyncio.new_event_loop()
    task = loop.create_task(collect())
    try:
        return loop.run_until_complete(task)
    except TimeoutError:
        raise OSError(errno.EPROTO, "the bucket lists more and more names, without an end") from None
    finally:
        task.cancel()
        loop.run_until_complete(asyncio.wait([task]))
        loop.close()


def _list_deep(store: Any, above: str | None) -> Answer:
    """List all objects in a folder; a server that gives the same page again and again would never end."""
    seen: dict[str, Mapping[str, Any]] = {}
    for page in obstore.list(store, above, chunk_size=_PAGE):
        before = len(seen)
        seen |= {meta["path"]: meta for meta in page}
        if page and len(seen) == before:
            raise OSError(errno.EPROTO, "the bucket lists the same names again and again")
    return Answer(Status.DONE, listed=[listed(meta) for meta in seen.values()])


def fetch(store: Any, name: str, version: ObjectVersion, span: Span) -> Answer:
    """Fill the buffers of a span, if it is of that version; the answer says which one it is of."""
    result = obstore.get(store, name, options={"range": (span.start, span.stop)})
    found = listed(result.meta)
    position = span.start
    if found.version == version:
        for chunk in result.stream(min_chunk_size=_STREAMED):
            view = memoryview(chunk)
            span.fill(position, view)
            position += len(view)
        if result.range != (span.start, span.stop) or position != span.stop:
            came = pluralize(position - span.start, "bytes")
            raise ShortAnswer(errno.EIO, f"{came} of {span.stop - span.start} came")
        TRAFFIC.add(received=position - span.start)
    return Answer(Status.DONE, found=found)


def listed(meta: Mapping[str, Any]) -> Listed:
    """Return what obstore says of an object."""
    return Listed(meta["path"], meta["size"], meta["last_modified"].timestamp(), version_of(meta))


def version_of(meta: Mapping[str, Any]) -> ObjectVersion:
    """Return the version of an object. A generation is a number; S3 keeps the name of an old content there."""
    version = meta["version"]
    return ObjectVersion(meta["e_tag"] or "", version if version is not None and version.isdecimal() else None)


_PART_BYTES: Final = 16 << 20
_MOST_PARTS: Final = 10_000
_GRAIN: Final = 1 << 20
_PARTS_AT_ONCE: Final = 5
_MEMORY: Final = 128 << 20
_SLOTS: Final = threading.BoundedSemaphore(min(_PARTS_AT_ONCE + 1, requests_at_once()))
"""Of this process, beside its other requests, on which what makes the bytes may wait."""


def part_size(size: int) -> int:
    """Return how many bytes each part of an object gets: no upload has more than 10,000 parts.

    Example:
        >>> part_size(1 << 30) >> 20, part_size(1 << 40) >> 20
        (16, 105)
    """
    return max(_PART_BYTES, -(-size // (_MOST_PARTS * _GRAIN)) * _GRAIN)


def upload_parts(
    stores: StoreVariants, name: str, buffers: Iterator[memoryview], size: int, storage_class: str | None = None
) -> None:
    """Write a new object in parts; an error, of the buffers too, ends the upload and leaves no object."""
    part = part_size(size)
    store = stores.variant(part, parts=True)
    wanted = max(1, min(_PARTS_AT_ONCE, _MEMORY // part - 2))
    slots = 0
    try:
        # One is waited for; more are taken where they are free.
        while slots < wanted and _SLOTS.acquire(blocking=not slots):
            slots += 1
        attributes: Any = storage_attributes(storage_class)
        obstore.put(
            store, name, buffers, attributes=attributes, use_multipart=True, chunk_size=part, max_concurrency=slots
        )
    finally:
        for _ in range(slots):
            _SLOTS.release()
    TRAFFIC.add(requests=2 + -(-size // part), sent=size)


def _keep_error(parts: Iterator[memoryview], failed: list[BaseException]) -> Iterator[memoryview]:
    """Keep an error of the buffers, which obstore would tell in words only."""
    try:
        yield from parts
    except GeneratorExit:
        raise
    except BaseException as error:  # an interrupt too
        failed.append(error)
        raise


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
                answer = self._answer("get", name, lambda store: get(store, name, most), size)
                TRAFFIC.add(received=len(answer.data))
                return answer
            case Range(name, version, span):
                size = span.stop - span.start
                call = functools.partial(fetch, name=name, version=version, span=span)
                return self._answer("get", name, call, size)
            case Head(name):
                return self._answer(
                    "get", name, lambda store: Answer(Status.DONE, found=listed(obstore.head(store, name)))
                )
            case Put(name, data, condition):
                TRAFFIC.add(sent=len(data))
                place = self._storage_class if name.endswith(_DATA) else None
                call = functools.partial(put, request=request, storage_class=place)
                return self._answer("put", name, call, len(data), once=condition is not None)
            case Delete((name, *_), ObjectVersion() as version):
                return self._answer("delete", name, lambda store: delete_version(store, name, version), once=True)
            case Delete(names, _):
                return self._delete(names)
            case List(prefix, deep):
                listing = functools.partial(list_names, prefix=prefix, deep=deep, reopen=self._stores.at_url)
                return self._answer("list", prefix, listing)
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
        begun, failed = time.monotonic(), list[BaseException]()
        try:
            parts = _keep_error(lasting_pieces(buffers, size), failed)
            upload_parts(self._stores, name, parts, size, self._storage_class)
        except BaseException as error:  # a panic is no Exception; `failure_of` raises what is none of obstore's again
            if failed:  # obstore tells of it in words only
                raise failed[0] from None
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
            answer = self._answer("delete", some[0], functools.partial(delete, names=some))
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
                obstore.copy(store, name, new)
            except Exception as error:  # obstore has many kinds; `failure_of` raises any other again
                failed.add(failure_of(error).cause)
                raise
            return Answer(Status.DONE)

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
