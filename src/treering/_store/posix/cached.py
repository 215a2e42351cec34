"""Writing through the page cache, with the disk at work from the first bytes on.

``write`` and then ``fsync`` lets the disk wait until everything is copied. Here the kernel is asked to begin with each
run of bytes as soon as it is in the page cache; ``docs/design/store.md`` has the measurements.
"""

from __future__ import annotations

from collections.abc import Iterable

from treering._store.pieces import write_all
from treering._store.posix import descriptors

_PIECE_BYTES = 4 << 20
_RUN_BYTES = 16 << 20


def write_cached(descriptor: int, parts: Iterable[memoryview]) -> None:
    """Write ``parts`` from the start of an empty file.

    Raises:
        OSError: the system refused.
    """
    written = begun = 0
    early = True
    for part in parts:
        for start in range(0, len(part), _PIECE_BYTES):
            piece = part[start : start + _PIECE_BYTES]
            write_all(descriptor, piece)
            written += len(piece)
            if early and written - begun >= _RUN_BYTES:
                early = descriptors.start_writeback(descriptor, begun, written - begun)
                begun = written
