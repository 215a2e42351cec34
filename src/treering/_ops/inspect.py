"""A file -> what its headers say, without jax or numpy."""

from __future__ import annotations

import os
from pathlib import Path

from treering._codec.gzip import decompressed
from treering._codec.msgpack.window import WINDOW_BYTES
from treering._format.msgpack_listing import list_msgpack
from treering._format.records import Listing
from treering._store.local import LocalFile

__all__ = ["inspect_file"]


def inspect_file(path: str | os.PathLike[str]) -> Listing:
    """Return the listing of a msgpack file; one in gzip form is unpacked in memory first.

    Raises:
        NotFound, StoreFailed: no file, or not readable.
        Corrupt, Format: as loading the file would raise, array bytes apart.
    """
    with LocalFile(Path(path)) as file:
        first = file.read(0, min(file.size, WINDOW_BYTES))
        if first[:2] == b"\x1f\x8b":
            data = decompressed(file.read(0, file.size), None)
            return list_msgpack(data, len(data), lambda offset, n: data[offset : offset + n])
        return list_msgpack(first, file.size, file.read)
