"""State dict <-> one file."""

from __future__ import annotations

import functools
import io
import os
from typing import Any, BinaryIO

from treering._arrays.host import piece_buffers
from treering._codec.msgpack.nonce import vary
from treering._codec.msgpack.window import WINDOW_BYTES
from treering._codec.msgpack.write import Piece, pieces_size
from treering._printable import show_path
from treering._store.posix.writing import write_stream
from treering._store.resolve import file_path, needs_nonce, new_file_path, open_file, write_file
from treering._tree.state_dict import require_match
from treering._values.telemetry import report
from treering._wire.planned_arrays import read_state
from treering._wire.restore import restore_into
from treering._wire.state_bytes import refuse_gzip, unpack
from treering.errors import Corrupt, Format, Unsupported

PathOrFile = str | os.PathLike[str] | BinaryIO


def save(pieces: list[Piece], filepath: PathOrFile) -> None:
    """Write the pieces durably: to a path all or nothing, to an open file from where it stands."""
    if isinstance(filepath, str | os.PathLike):  # some path classes have a ``write`` too
        with report("save", filepath):
            path = new_file_path(filepath)
            pieces, unique = vary(pieces) if needs_nonce(path) else (pieces, False)
            write_file(path, piece_buffers(pieces), pieces_size(pieces), unique=unique)
    elif hasattr(filepath, "write"):
        write_stream(filepath, piece_buffers(pieces))
    else:
        raise _neither(filepath)


def load(target: Any, filepath: PathOrFile, *, strict: bool, to_jax: bool, shardings: Any, mapped: bool) -> Any:
    """Read a file into ``target``'s structure."""
    if not isinstance(filepath, str | os.PathLike):
        if mapped:
            raise Unsupported("an open file cannot be mapped", hint="pass its path")
        return restore_into(target, unpack(_read_open(filepath)), strict=strict, to_jax=to_jax, shardings=shardings)
    path = file_path(filepath)
    with report("load", path):
        try:
            with open_file(path) as file:
                first = file.read(0, min(file.size, WINDOW_BYTES))
                refuse_gzip(first)
                check = functools.partial(require_match, target) if strict else None
                state = read_state(file, first, mapped=mapped, check=check, sealed=True)
        except (Corrupt, Format) as error:
            error.message = f"{show_path(str(path))!r}: {error.message}"
            raise
        return restore_into(target, state, strict=strict and mapped, to_jax=to_jax, shardings=shardings)


def _neither(given: object) -> Unsupported:
    return Unsupported(f"a file is a path or an open binary file, not {type(given).__name__}")


def _read_open(file: BinaryIO) -> bytes | bytearray | memoryview:
    given: object = file
    if not hasattr(file, "read"):
        raise _neither(file)
    data = b"" if isinstance(given, io.TextIOBase) else file.read()
    if isinstance(given, io.TextIOBase) or not isinstance(data, bytes | bytearray | memoryview):
        raise Unsupported("the file is open for text", hint='open it in binary mode, "rb"')
    return data
