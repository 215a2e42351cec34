"""Local files: replaced as a whole and durably, or not at all; read by position."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from treering._store import descriptors
from treering._store.cached import write_cached
from treering._store.direct import write_direct
from treering._store.folders import make_folder, resolved
from treering._store.pieces import Buffer, pieces
from treering._store.reading import LocalFile
from treering._store.stage import StagedFile
from treering._store.streams import write_stream
from treering.errors import StoreFailed, TreeringError

__all__ = ["Buffer", "LocalFile", "replace_file", "write_stream"]

# Below this the page cache is as fast, and one thread leaves the other cores alone.
DIRECT_FROM = 128 << 20

# The page cache is the faster way while there is free memory for it. A file that would take more than this share of
# what is free would first push out other pages: it goes past the cache.
FREE_SHARE = 0.25

_HINTS = {
    errno.ENOSPC: "free some space; what stood there before is untouched",
    errno.EDQUOT: "free some of your quota; what stood there before is untouched",
    errno.EFBIG: "the file system or the limit of this process (ulimit -f) allows no file of that size",
    errno.EACCES: "the folder must be readable and writable, and so must the file if there is one",
    errno.EPERM: "the folder must be readable and writable, and so must the file if there is one",
    errno.EROFS: "save to another place",
    errno.EMFILE: "this process has too many files open",
    errno.EISDIR: "give the name of a file in that folder",
    errno.EBUSY: "a file that is a mount point cannot be replaced: save beside it",
}


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
    with _named_errors(shown):
        target = resolved(shown)
        make_folder(os.path.dirname(target))
        with StagedFile(target, shown) as staged:
            staged.require_space(size)
            _write(staged.descriptor, pieces(buffers, size), size)
            staged.commit()


def _write(descriptor: int, parts: Iterable[memoryview], size: int) -> None:
    if size >= DIRECT_FROM:
        free = descriptors.free_memory()
        if free is not None and size > FREE_SHARE * free and descriptors.go_direct(descriptor):
            write_direct(descriptor, parts, size)
            return
        descriptors.reserve(descriptor, size)
    write_cached(descriptor, parts)


@contextlib.contextmanager
def _named_errors(shown: str) -> Iterator[None]:
    try:
        yield
    except TreeringError:
        raise
    except OSError as error:
        raise StoreFailed.of(error, shown, "write", hint=_HINTS.get(error.errno or 0)) from error
