"""Single requests by obstore, each made once. The length of each answer is checked here."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import obstore

from treering._store.api import LARGEST_DOCUMENT
from treering._store.memory_pool import lasting_pieces
from treering._store.objects.obstore_stores import StoreVariants
from treering._store.objects.repetition import Cause, ShortAnswer, failure_of, requests_at_once
from treering._store.objects.requests import Absent, Answer, Condition, Listed, ObjectVersion, Put, Span, Status
from treering._store.objects.signed_requests import list_past
from treering._store.pieces import Buffer
from treering._values.human import pluralize
from treering._values.telemetry import TRAFFIC

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


def head(store: Any, name: str) -> Answer:
    """Ask for the size, version and time of an object."""
    return Answer(Status.DONE, found=listed(obstore.head(store, name)))


def put(store: Any, request: Put, storage_class: str | None = None) -> Answer:
    """Make data the content of an object. No cache may keep what is replaced."""
    mode = put_mode(request.condition)
    attributes = {**_NO_STORE, **storage_attributes(storage_class)}
    result = obstore.put(store, request.name, request.data, mode=mode, use_multipart=False, attributes=attributes)
    return Answer(Status.DONE, found=Listed(request.name, len(request.data), 0.0, version_of(result)))


def copy(store: Any, name: str, new: str) -> Answer:
    """Let the server copy an object."""
    obstore.copy(store, name, new)
    return Answer(Status.DONE)


def storage_attributes(storage_class: str | None) -> dict[str, str]:
    """Return how obstore says the class that an object is put in."""
    return {} if storage_class is None else {"Storage-Class": storage_class}


def put_mode(condition: Condition) -> Any:
    """Return how obstore says a condition."""
    if condition is None:
        return "overwrite"
    if condition is Absent.ABSENT:
        return "create"
    expected = {"e_tag": condition.e_tag}
    return expected if condition.generation is None else {**expected, "version": condition.generation}


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
            raise ShortAnswer(
                errno.EIO, f"{pluralize(position - span.start, 'bytes')} of {span.stop - span.start} came"
            )
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


class FailedBuffers(Exception):
    """What makes the bytes failed; the cause is its error."""


def part_size(size: int) -> int:
    """Return how many bytes each part of an object gets: no upload has more than 10,000 parts.

    Example:
        >>> part_size(1 << 30) >> 20, part_size(1 << 40) >> 20
        (16, 105)
    """
    return max(_PART_BYTES, -(-size // (_MOST_PARTS * _GRAIN)) * _GRAIN)


def upload_parts(
    stores: StoreVariants, name: str, buffers: Iterable[Buffer], size: int, storage_class: str | None = None
) -> None:
    """Write a new object in parts; an error, of the buffers too, ends the upload and leaves no object."""
    part = part_size(size)
    store = stores.variant(part, parts=True)
    wanted = max(1, min(_PARTS_AT_ONCE, _MEMORY // part - 2))
    slots = 0
    failed: list[BaseException] = []
    try:
        # One is waited for; more are taken where they are free.
        while slots < wanted and _SLOTS.acquire(blocking=not slots):
            slots += 1
        parts = _keep_error(lasting_pieces(buffers, size), failed)
        attributes: Any = storage_attributes(storage_class)
        obstore.put(
            store, name, parts, attributes=attributes, use_multipart=True, chunk_size=part, max_concurrency=slots
        )
    except BaseException:  # an interrupt too; raised again below
        if failed:
            raise FailedBuffers from failed[0]
        raise
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
