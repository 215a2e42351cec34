"""State dict <-> bytes in memory."""

from __future__ import annotations

import mmap
from typing import Any

from treering._arrays.host import adopt, to_host
from treering._arrays.joined import joined
from treering._codec.msgpack.scan import Scanner
from treering._codec.msgpack.views import Views
from treering._codec.msgpack.window import WINDOW_BYTES
from treering._codec.msgpack.write import Piece, encode
from treering._tree.state_dict import partial_state_dict
from treering._values.trail import Trail, unwound
from treering.errors import Format, TreeringError

__all__ = ["pack", "pieces_of", "refuse_gzip", "unpack", "unserializable"]

Readable = bytes | bytearray | memoryview | mmap.mmap


def pieces_of(state: Any, *, chunk_size: int, sort_keys: bool = False) -> list[Piece]:
    """Return the pieces of the msgpack form of a tree of dicts and lists."""
    return encode(state, adopt=adopt, to_host=to_host, chunk_size=chunk_size, sort_keys=sort_keys)


def pack(pytree: Any, *, chunk_size: int, sort_keys: bool) -> bytes:
    """Return the msgpack form of a tree of dicts and lists; ``sort_keys`` orders every dict as jax does."""
    return joined(pieces_of(pytree, chunk_size=chunk_size, sort_keys=sort_keys))


def unpack(encoded: Readable) -> Any:
    """Return the state dict in ``encoded``; arrays are read-only views of it.

    A buffer that somebody could still write to is copied first.
    """
    if isinstance(encoded, bytes):
        refuse_gzip(encoded)
        return Scanner(encoded, len(encoded), lambda offset, n: encoded[offset : offset + n], Views(encoded)).run()
    if isinstance(encoded, mmap.mmap):
        first = encoded[:WINDOW_BYTES]
        refuse_gzip(first)
        return Scanner(first, len(encoded), lambda offset, n: encoded[offset : offset + n], Views(encoded)).run()
    view = memoryview(encoded)
    if not view.readonly or not view.c_contiguous:
        return unpack(view.tobytes())
    view = view.cast("B")
    first = bytes(view[:WINDOW_BYTES])
    refuse_gzip(first)
    return Scanner(first, len(view), lambda offset, n: bytes(view[offset : offset + n]), Views(view)).run()


def refuse_gzip(first: bytes) -> None:
    """Tell a gzip file from a damaged msgpack one."""
    if first[:2] == b"\x1f\x8b":
        raise Format(
            "this is gzip, not bare msgpack", offset=0, hint="read it with from_compressed_bytes or decompress_bytes"
        )


def unserializable(pytree: Any, *, chunk_size: int) -> list[str]:
    """Return one line for each thing in ``pytree`` that ``to_bytes`` would refuse."""
    state, refused = partial_state_dict(pytree)
    issues = [str(error) for error in refused]
    pending: list[tuple[Trail, Any]] = [(None, state)]
    while pending:
        trail, value = pending.pop()
        if type(value) is dict and value:
            pending.extend(((trail, str(key)), child) for key, child in reversed(value.items()))
            value = dict.fromkeys(value)  # its keys alone
        try:
            pieces_of(value, chunk_size=chunk_size)
        except TreeringError as error:
            error.path = unwound(trail) + (error.path or ())
            issues.append(str(error))
    return issues
