"""A new data file of a checkpoint: created exclusively, with the rights of the index that it will replace, durable."""

from __future__ import annotations

import os
from collections.abc import Iterable

from treering._store.pieces import Buffer
from treering._store.posix import descriptors
from treering._store.posix.folder import Folder
from treering._store.posix.rights import take_over
from treering._store.posix.writing import write_content


def write_new_file(folder: Folder, name: str, buffers: Iterable[Buffer], size: int, old: os.stat_result | None) -> None:
    """Write the new file ``name``, durable but for its name, as the concatenation of ``buffers``.

    Args:
        folder: where.
        name: its name.
        buffers: C-contiguous buffers of any item type, asked for one after the other.
        size: how many bytes the buffers hold together.
        old: the index that will be replaced, whose rights the file takes over; None for none.

    Raises:
        OSError: the system refused, or the buffers hold another number of bytes.
    """
    # Closed to others until it has the rights of the old index, which may be as narrow.
    with folder.create(name, 0o600 if old else 0o666) as opened:
        if old:
            take_over(opened.number, old)
        write_content(opened.number, buffers, size)
        descriptors.sync(opened.number)
