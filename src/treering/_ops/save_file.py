"""A tree -> one file, msgpack or safetensors, durable when this returns."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treering._arrays.incoming import Progress
from treering._ops import state_file
from treering._ops.state_bytes import pieces_of
from treering._tree.state_dict import to_state_dict
from treering.errors import Exists, Unsupported

__all__ = ["require_free", "save_msgpack"]

_CHUNK_BYTES = 2**30


def require_free(path: Path, *, overwrite: bool) -> None:
    """Refuse to replace a file that nobody said may go.

    Raises:
        Exists: something is at ``path``.
    """
    if not overwrite and os.path.lexists(path):
        raise Exists(f"{os.fspath(path)!r} exists", hint="overwrite=True replaces it")


def save_msgpack(
    path: Path, tree: Any, *, metadata: Mapping[str, Any], overwrite: bool, progress: Progress | None
) -> None:
    """Write the state dict of ``tree`` as flax does.

    Raises:
        Unsupported: a leaf that the form cannot hold, or metadata.
    """
    if metadata:
        raise Unsupported("a msgpack file has no place for metadata", hint="save to a folder or a .safetensors file")
    pieces = pieces_of(to_state_dict(tree), chunk_size=_CHUNK_BYTES)
    require_free(path, overwrite=overwrite)
    state_file.save(pieces, path)
    if progress is not None:
        size = path.stat().st_size
        progress(size, size)
