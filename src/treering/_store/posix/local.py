"""Local files: replaced as a whole and durably, or not at all; read by position."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from treering._store.failures import naming
from treering._store.pieces import Buffer
from treering._store.posix.folders import make_folder, resolved
from treering._store.posix.stage import StagedFile
from treering._store.posix.writing import write_content


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
            staged.require_space(size)
            write_content(staged.descriptor, buffers, size)
            staged.commit()
