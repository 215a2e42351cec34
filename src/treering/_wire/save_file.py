"""A tree -> one file, msgpack or safetensors, durable when this returns."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from treering._arrays.host import piece_buffers
from treering._arrays.jobs import Progress
from treering._background.save_job import UNWATCHED, Watch
from treering._codec.msgpack.write import Piece, pieces_size
from treering._store.posix.local import replace_file
from treering._tree.state_dict import to_state_dict
from treering._wire.state_bytes import pieces_of
from treering.errors import Exists, Unsupported

_T = TypeVar("_T")

_CHUNK_BYTES = 2**30


def require_free(path: Path, *, overwrite: bool) -> None:
    """Refuse to replace a file that nobody said may go.

    Raises:
        Exists: something is at ``path``.
    """
    if not overwrite and os.path.lexists(path):
        raise Exists(f"{os.fspath(path)!r} exists", hint="overwrite=True replaces it")


def claimed_last(content: Iterable[_T], watch: Watch) -> Iterator[_T]:
    """Yield what a file is made of; before it is told that this was all, nobody can call the save off any more."""
    watch.move()
    for piece in content:
        yield piece
        watch.move()
    watch.claim()


def save_msgpack(
    path: Path, tree: Any, *, metadata: Mapping[str, Any], overwrite: bool, progress: Progress | None
) -> None:
    """Write the state dict of ``tree`` as flax does.

    Raises:
        Unsupported: a leaf that the form cannot hold, or metadata.
    """
    write_msgpack(path, msgpack_pieces(tree, metadata), overwrite=overwrite, progress=progress)


def msgpack_pieces(tree: Any, metadata: Mapping[str, Any]) -> list[Piece]:
    """Return what the file will be made of.

    Raises:
        Unsupported: a leaf that the form cannot hold, or metadata.
    """
    if metadata:
        raise Unsupported("a msgpack file has no place for metadata", hint="save to a folder or a .safetensors file")
    return pieces_of(to_state_dict(tree), chunk_size=_CHUNK_BYTES)


def write_msgpack(
    path: Path, pieces: list[Piece], *, overwrite: bool, progress: Progress | None, watch: Watch = UNWATCHED
) -> None:
    """Write the pieces of a file."""
    require_free(path, overwrite=overwrite)
    replace_file(path, claimed_last(piece_buffers(pieces), watch), pieces_size(pieces))
    if progress is not None:
        size = path.stat().st_size
        progress(size, size)
