"""Writing local files: the bytes by whichever way to the disk is faster now, and a file replaced as a whole, durably.

``write`` and then ``fsync`` lets the disk wait until everything is copied. Here the kernel is asked to begin with each
run of bytes as soon as it is in the page cache; ``docs/design/store.md`` has the measurements.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from treering._store.failures import naming
from treering._store.pieces import Buffer, pieces, write_all
from treering._store.posix import descriptors
from treering._store.posix.direct import write_direct
from treering._store.posix.folders import make_folder, resolved
from treering._store.posix.stage import StagedFile

# Below this the page cache is as fast, and one thread leaves the other cores alone.
DIRECT_FROM = 128 << 20

# The page cache is the faster way while there is free memory for it. A file that would take more than this share of
# what is free would first push out other pages: it goes past the cache.
FREE_SHARE = 0.25

_PIECE_BYTES = 4 << 20
_RUN_BYTES = 16 << 20


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
    _write_cached(descriptor, parts)


def _write_cached(descriptor: int, parts: Iterable[memoryview]) -> None:
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


def replace_file(path: Path, buffers: Iterable[Buffer], size: int) -> None:
    """Durably replace the file at ``path``, or make it, with the concatenation of ``buffers``.

    When this returns, the new content survives a power cut. Until then, and after any error or kill, ``path`` holds the
    old content (or nothing) or the new one, whole.

    Missing folders are made. A link at ``path`` stays, the file that it leads to is replaced. Permission bits are kept;
    access lists, extended attributes and hard links are not.

    Args:
        path: where to; relative to the current folder as it is now.
        buffers: C-contiguous buffers of any item type, asked for one after the other.
        size: how many bytes the buffers hold together.

    Raises:
        StoreFailed: the system refused; ``errno`` says why, ``filename`` is ``path``. Nothing has changed, except in
            one case that the message names: the new content is in place but may not be durable.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "new", "a.bin")
        >>> replace_file(path, [b"tree", b"ring"], 8)
        >>> path.read_bytes()
        b'treering'
    """
    shown = os.fspath(path)
    with naming(shown, "write"):
        target = resolved(shown)
        make_folder(os.path.dirname(target))
        with StagedFile(target, shown) as staged:
            descriptors.require_space(staged.descriptor, size)
            write_content(staged.descriptor, buffers, size)
            staged.commit()
