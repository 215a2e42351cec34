"""jax arrays -> host memory: what may be written from this process, and its bytes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import jax
import numpy as np

from treering._arrays.parted import host_blocks
from treering._codec.documents import MAX_NESTING
from treering._codec.msgpack.write import ArrayLike, Piece
from treering._values.processes import Processes
from treering.errors import Unsupported

TOGETHER: Final = 'only all processes of the job together can save it: to a folder, with processes="all"'
"""What to do with an array that lies over processes."""

_LONG_DOUBLES: Final = (np.longdouble, np.clongdouble)
_SCALARS: Final = (np.generic, np.ndarray, jax.Array)
# Truth values, ints, floats; V: those of ml_dtypes, bfloat16 for instance.
_KINDS: Final = "biufV"
_RUN_BYTES: Final = 256 << 10


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
        what = "the array has been deleted, probably because it was donated to a jitted function"
        raise Unsupported(what, hint="save it before")


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


def piece_buffers(parts: Iterable[Piece]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of the pieces in order; small ones together, a device array fetched when its turn comes."""
    run: list[bytes] = []
    waiting = 0
    for part in parts:
        if isinstance(part, bytes):
            run.append(part)
            waiting += len(part)
            if waiting < _RUN_BYTES:
                continue
        if run:
            yield b"".join(run)
            run, waiting = [], 0
        if not isinstance(part, bytes):
            yield from host_blocks(part.array, part.start, part.stop)
    if run:
        yield b"".join(run)


def with_python_numbers(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a user's metadata in which scalars of numpy and jax are Python's bool, int or float.

    What is no number stays as it is, for ``check_json`` to name.

    Example:
        >>> with_python_numbers({"step": np.int64(3), "losses": [np.float32(0.5), jax.numpy.float32(2)]})
        {'step': 3, 'losses': [0.5, 2.0]}
    """
    return {name: _plain(value, ()) for name, value in metadata.items()}


def _plain(value: Any, above: tuple[int, ...]) -> Any:
    if isinstance(value, _SCALARS):
        return _number(value)
    if type(value) not in (dict, list) or len(above) > MAX_NESTING or id(value) in above:
        return value
    above = (*above, id(value))
    if type(value) is dict:
        return {name: _plain(item, above) for name, item in value.items()}
    return [_plain(item, above) for item in value]


def _number(value: Any) -> Any:
    """Return the number that a scalar holds, or the scalar itself where it is none, or lies elsewhere."""
    try:
        with jax.transfer_guard_device_to_host("allow"):
            number = value.item() if not value.shape and value.dtype.kind in _KINDS else value
    except (TypeError, ValueError, RuntimeError):  # a tracer, a deleted array, or one of other processes
        return value
    return number if type(number) in (bool, int, float) else value


def job_processes() -> Processes:
    """Return which process of the job this is, and how many there are; asked where jax is sure to run."""
    return Processes(this=jax.process_index(), count=jax.process_count())


def this_processes(leaves: Iterable[Any]) -> Processes:
    """Return which process of the job this is, and how many there are.

    jax is asked only where it is sure to run already: ``jax.distributed`` is initialised, or a leaf is an array of
    jax's. A tree of numpy arrays starts no backend.

    Example:
        >>> import numpy as np
        >>> this_processes([np.zeros(2), 3])
        Processes(this=0, count=1)
    """
    # By class: there are few of them, and thousands of leaves.
    if jax.distributed.is_initialized() or any(issubclass(kind, jax.Array) for kind in set(map(type, leaves))):
        return job_processes()
    return Processes(this=0, count=1)
