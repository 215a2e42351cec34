"""The bytes of a new file, by whichever way to the disk is faster now."""

from __future__ import annotations

from collections.abc import Iterable

from treering._store.pieces import Buffer, pieces
from treering._store.posix import descriptors
from treering._store.posix.cached import write_cached
from treering._store.posix.direct import write_direct

# Below this the page cache is as fast, and one thread leaves the other cores alone.
DIRECT_FROM = 128 << 20

# The page cache is the faster way while there is free memory for it. A file that would take more than this share of
# what is free would first push out other pages: it goes past the cache.
FREE_SHARE = 0.25


def write_content(descriptor: int, buffers: Iterable[Buffer], size: int) -> None:
    """Write the concatenation of ``buffers``, ``size`` bytes, into a new and empty file. It is not yet durable.

    Raises:
        OSError: the system refused, or the buffers hold another number of bytes.
    """
    parts = pieces(buffers, size)
    if size >= DIRECT_FROM:
        free = descriptors.free_memory()
        if free is not None and size > FREE_SHARE * free and descriptors.go_direct(descriptor):
            write_direct(descriptor, parts, size)
            return
        descriptors.reserve(descriptor, size)
    write_cached(descriptor, parts)
