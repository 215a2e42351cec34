"""Uploading an object in parts while its bytes are made: few parts are in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any, Final

import obstore

from treering._store.memory_pool import lasting_pieces
from treering._store.objects.obstore_requests import storage_attributes
from treering._store.objects.obstore_stores import StoreVariants
from treering._store.objects.repetition import requests_at_once
from treering._store.pieces import Buffer
from treering._values.telemetry import TRAFFIC

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
