"""Uploading an object in parts while its bytes are made: they are copied once, and few parts are in memory."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Final

import obstore

from treering._store.objects.obstore_requests import storage_attributes
from treering._store.objects.obstore_stores import StoreVariants
from treering._store.pieces import Buffer, is_lasting, pieces
from treering._values.telemetry import TRAFFIC

_PART_BYTES: Final = 16 << 20
_MOST_PARTS: Final = 10_000
_GRAIN: Final = 1 << 20
_PARTS_AT_ONCE: Final = 5
_MEMORY: Final = 128 << 20
_SLOTS: Final = threading.BoundedSemaphore(_PARTS_AT_ONCE + 1)
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
    store = stores.parts(part)
    wanted = max(1, min(_PARTS_AT_ONCE, _MEMORY // part - 2))
    slots = 0
    failed: list[BaseException] = []
    try:
        # One is waited for; more are taken where they are free.
        while slots < wanted and _SLOTS.acquire(blocking=not slots):
            slots += 1
        parts = _keep_error(fill_parts(buffers, size, part), failed)
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


def fill_parts(buffers: Iterable[Buffer], size: int, part: int) -> Iterator[memoryview]:
    """Yield the bytes of all buffers in parts of one size, in memory that nothing else changes.

    Example:
        >>> [bytes(view) for view in fill_parts([b"tree", b"ring"], 8, 3)]
        [b'tre', b'eri', b'ng']
    """
    free: list[bytearray] = []
    memory, filled = bytearray(), 0
    room = memoryview(memory)
    left = size
    for piece in pieces(buffers, size):
        view = piece
        while view:
            if not filled and len(view) >= part and is_lasting(view.obj):
                yield view[:part]
                left -= part
                view = view[part:]
                continue
            if not filled:
                memory = free.pop() if free else bytearray(min(part, left))
                room = memoryview(memory)  # into a bytearray itself, a slice would be copied twice
            wanted = min(part, left)
            count = min(wanted - filled, len(view))
            room[filled : filled + count] = view[:count]
            filled += count
            view = view[count:]
            if filled == wanted:
                yield _lend(room[:filled], memory, free)
                left -= filled
                filled = 0


def _lend(view: memoryview, memory: bytearray, free: list[bytearray]) -> memoryview:
    """Return the view; once it is gone, its memory is free again. Fresh memory would cost more than the copy."""
    weakref.finalize(view, free.append, memory).atexit = False
    return view
