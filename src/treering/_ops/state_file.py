"""State dict <-> one file."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, BinaryIO, cast

from treering._arrays.host import piece_buffers
from treering._arrays.loaded import PlannedArrays
from treering._codec.msgpack.scan import Scanner
from treering._codec.msgpack.window import WINDOW_BYTES
from treering._codec.msgpack.write import Piece, pieces_size
from treering._ops.restore import restored
from treering._ops.state_bytes import refuse_gzip, unpack
from treering._store.local import LocalFile, replace_file, write_stream
from treering._tree.match import require_match
from treering.errors import TreeringError, Unsupported

__all__ = ["load", "local_path", "save"]

PathOrFile = str | os.PathLike[str] | BinaryIO

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the path, refusing a URL before a folder called ``gs:`` is made."""
    text = os.fspath(path)
    if not isinstance(text, str):
        raise Unsupported(f"a path is a str or os.PathLike of str, found {type(text).__name__}")
    if _URL.match(text):
        raise Unsupported(f"{text!r} is a URL; only local files are supported", hint="copy the file here first")
    return Path(text)


def save(pieces: list[Piece], filepath: PathOrFile) -> None:
    """Write the pieces durably: to a path all or nothing, to an open file from where it stands."""
    buffers = piece_buffers(pieces)
    if hasattr(filepath, "write"):
        write_stream(cast("BinaryIO", filepath), buffers)
    else:
        replace_file(local_path(filepath), buffers, pieces_size(pieces))


def load(target: Any, filepath: PathOrFile, *, strict: bool, to_jax: bool, shardings: Any, mapped: bool) -> Any:
    """Read a file into ``target``'s structure."""
    if hasattr(filepath, "read"):
        data = cast("BinaryIO", filepath).read()
        if not isinstance(data, bytes | bytearray | memoryview):
            raise Unsupported(f"reading the file gave {type(data).__name__}", hint='open it with mode "rb"')
        return restored(target, unpack(data), strict=strict, to_jax=to_jax, shardings=shardings)
    path = local_path(filepath)
    try:
        with LocalFile(path) as file:
            state = unpack(file.map()) if mapped else _read(file, target, strict=strict)
        return restored(target, state, strict=strict and mapped, to_jax=to_jax, shardings=shardings)
    except TreeringError as error:
        error.add_note(f"while loading {str(path)!r}")
        raise


def _read(file: LocalFile, target: Any, *, strict: bool) -> Any:
    """Plan from the headers, compare, then read every array into memory of its own."""
    arrays = PlannedArrays(file.read)
    first = file.read(0, min(file.size, WINDOW_BYTES))
    refuse_gzip(first)
    state = Scanner(first, file.size, file.read, arrays).run()
    if strict:
        require_match(target, state)
    file.read_into(arrays.reads())
    arrays.seal()
    return state
