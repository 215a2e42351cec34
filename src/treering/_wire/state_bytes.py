"""State dict <-> bytes in memory."""

from __future__ import annotations

from typing import Any

from treering._arrays.host import adopt
from treering._arrays.parted import to_host
from treering._codec.msgpack.scan import Scanner
from treering._codec.msgpack.views import Views
from treering._codec.msgpack.window import WINDOW_BYTES
from treering._codec.msgpack.wire import MAX_DEPTH
from treering._codec.msgpack.write import Encoder, Piece
from treering._store.pieces import Readable, is_lasting
from treering._tree.state_dict import partial_state_dict
from treering._values.keys import Trail, unwind
from treering._wire.join import join_pieces
from treering.errors import Format, TreeringError


def encode_state(state: Any, *, chunk_size: int, sort_keys: bool = False) -> list[Piece]:
    """Return the pieces of the msgpack form of a tree of dicts and lists."""
    return Encoder(adopt, to_host, max(0, chunk_size), sort_keys).encode(state)


def pack(pytree: Any, *, chunk_size: int, sort_keys: bool) -> bytes:
    """Return the msgpack form of a tree of dicts and lists; ``sort_keys`` orders every dict as jax does."""
    return join_pieces(encode_state(pytree, chunk_size=chunk_size, sort_keys=sort_keys))


def unpack(encoded: Readable, *, allowance: int | None = None) -> Any:
    """Return the state dict in ``encoded``.

    Arrays are read-only views of bytes and of read-only maps; of anything that somebody could still write to, a copy
    is taken first. ``allowance`` is that of the scanner.
    """
    view = memoryview(encoded)
    owner = view.obj
    if not view.c_contiguous or not is_lasting(owner):
        return unpack(view.tobytes(), allowance=allowance)
    source: Any = owner if view.nbytes == len(owner) else view.cast("B")  # type: ignore[arg-type]
    first = source if isinstance(source, bytes) else bytes(source[:WINDOW_BYTES])
    refuse_gzip(first)
    size, leaves = len(source), Views(source)
    return Scanner(first, size, lambda at, n: bytes(source[at : at + n]), leaves, allowance=allowance).run()


def refuse_gzip(first: bytes) -> None:
    """Tell a gzip file from a damaged msgpack one."""
    if first[:2] == b"\x1f\x8b":
        hint = "read it with from_compressed_bytes or decompress_bytes"
        raise Format("this is gzip, not bare msgpack", offset=0, hint=hint)


def unserializable(pytree: Any, *, chunk_size: int) -> list[str]:
    """Return one line for each thing in ``pytree`` that ``to_bytes`` would refuse."""
    state, refused = partial_state_dict(pytree)
    issues = [str(error) for error in refused]
    pending: list[tuple[int, Trail, Any]] = [(0, None, state)]
    while pending:
        depth, trail, value = pending.pop()
        if depth > MAX_DEPTH:  # a handler's dict may hold itself
            return [*issues, f"the tree is more than {MAX_DEPTH} containers deep; it may hold itself"]
        if type(value) is dict and value:
            pending.extend((depth + 1, (trail, str(key)), child) for key, child in reversed(value.items()))
            value = dict.fromkeys(value)  # its keys alone
        try:
            encode_state(value, chunk_size=chunk_size)
        except TreeringError as error:
            error.path = unwind(trail) + (error.path or ())
            issues.append(str(error))
    return issues
