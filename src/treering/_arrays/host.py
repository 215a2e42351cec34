"""jax arrays -> host memory: what may be written from this process, and its bytes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Final

import jax
import numpy as np

from treering._arrays.parted import host_blocks
from treering._codec.msgpack.write import ArrayLike, Piece
from treering.errors import Unsupported

TOGETHER: Final = 'only all processes of the job together can save it: to a folder, with processes="all"'
"""What to do with an array that lies over processes."""

_RUN_BYTES: Final = 256 * 1024
_LONG_DOUBLES: Final = (np.longdouble, np.clongdouble)


def adopt(value: object) -> ArrayLike | None:
    """Return ``value`` if it is a jax array that this process holds whole, None if it is no array.

    Raises:
        Unsupported: some of its shards belong to other processes, or it was deleted (donated).
    """
    if not isinstance(value, jax.Array):
        return None
    require_alive(value)
    if not value.is_fully_addressable:
        raise Unsupported("the array is not fully addressable: other processes hold some of its shards", hint=TOGETHER)
    return value


def require_alive(value: jax.Array) -> None:
    """Refuse an array that has no bytes, or has them no more.

    Raises:
        Unsupported: it is a tracer, is unreduced, or was deleted (donated).
    """
    if isinstance(value, jax.core.Tracer):
        raise Unsupported("a traced value has no bytes yet", hint="save outside of jit, grad and vmap")
    if getattr(getattr(value.sharding, "spec", None), "unreduced", None):
        raise Unsupported("the array is unreduced: its devices hold partial sums", hint="reshard it before")
    if value.is_deleted():
        raise Unsupported("the array has been deleted, most likely donated to a jitted function", hint="save it before")


def jax_holds(dtype: np.dtype[Any]) -> bool:
    """Tell whether jax, as it is configured now, keeps this dtype.

    Example:
        >>> jax_holds(np.dtype("float32")), jax_holds(np.dtype("datetime64[s]"))
        (True, False)
    """
    numbers = jax.numpy.issubdtype(dtype, np.number) or dtype == np.bool_
    # numpy calls a timedelta64 an integer.
    if not numbers or dtype.kind == "m" or dtype.type in _LONG_DOUBLES:
        return False
    return bool(jax.dtypes.canonicalize_dtype(dtype) == dtype) and _runtime_holds(dtype)


@functools.cache
def _runtime_holds(dtype: np.dtype[Any]) -> bool:
    """Tell whether jax's runtime takes a dtype that jax lists; that of jax 0.10 has no six-bit floats."""
    if dtype.isbuiltin == 1 or dtype.itemsize > 1:
        return True
    try:
        with jax.transfer_guard_host_to_device("allow"):
            jax.device_put(np.zeros((), dtype))
    except RuntimeError:
        return False
    return True


def piece_buffers(pieces: list[Piece]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of the pieces in order; small ones together, a device array fetched when its turn comes."""
    run: list[bytes] = []
    waiting = 0
    for piece in pieces:
        if isinstance(piece, bytes):
            run.append(piece)
            waiting += len(piece)
            if waiting < _RUN_BYTES:
                continue
        if run:
            yield b"".join(run)
            run, waiting = [], 0
        if not isinstance(piece, bytes) and piece.nbytes:
            yield from host_blocks(piece.array, piece.start, piece.stop)
    if run:
        yield b"".join(run)
