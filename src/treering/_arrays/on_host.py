"""Bytes that were read -> the leaf on the host: a numpy array or scalar, a str, bytes or bytearray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from treering.errors import Corrupt

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SMALL_BYTES: Final = 64 << 10


def on_host(array: NDArray[Any], kind: str, *, own: bool = True) -> Any:
    """Return the leaf of a kind whose stored items are ``array``.

    Args:
        array: the items.
        kind: a kind of leaf whose bytes lie in files.
        own: copy a small array: those were read together, and one that is kept shall not keep its neighbours.

    Raises:
        Corrupt: a text is no UTF-8.

    Example:
        >>> import numpy as np
        >>> on_host(np.frombuffer(b"ring", np.uint8), "str")
        'ring'
    """
    if kind == "str":
        try:
            return array.tobytes().decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise Corrupt(f"a text is not UTF-8: {error.reason}", offset=error.start) from error
    if kind == "bytes":
        return array.tobytes()
    if kind == "bytearray":
        return bytearray(array.data)
    if kind == "numpy scalar":
        return array[()]
    return array.copy() if own and array.nbytes <= _SMALL_BYTES else array
