"""The numbers of the wire: msgpack's first bytes, flax's extension codes, and the bounds that a reader keeps.

The msgpack specification gives the byte values (https://github.com/msgpack/msgpack/blob/master/spec.md). The
extension codes are those of flax.serialization (1 to 3) and of Orbax's msgpack files (4). The layout is told in
full in ``docs/spec/msgpack.md``.
"""

from __future__ import annotations

import math
import struct
from typing import Final

import msgpack

from treering._values.human import pluralize
from treering.errors import Unsupported

EXT_ARRAY: Final = 1
EXT_COMPLEX: Final = 2
EXT_SCALAR: Final = 3
EXT_TUPLE: Final = 4
EXT_TIMESTAMP: Final = -1

CHUNK_MARKER: Final = "__msgpack_chunked_array__"

LONGEST_PAYLOAD: Final = 2**32 - 1
"""Bytes that one msgpack ext, bin or str can hold."""

MAX_DEPTH: Final = 2**17
"""Containers inside one another, on writing and on reading."""

MAX_NDIM: Final = 64
"""Axes of one array: what numpy can hold."""

_FIXEXT: Final = {1: b"\xd4", 2: b"\xd5", 4: b"\xd6", 8: b"\xd7", 16: b"\xd8"}


def map_header(count: int) -> bytes:
    r"""Return the header of a map of ``count`` pairs.

    Example:
        >>> map_header(3), map_header(16)
        (b'\x83', b'\xde\x00\x10')
    """
    return bytes((0x80 | count,)) if count < 16 else _sized_header(0xDE, count, narrowest=2)


def list_header(count: int) -> bytes:
    r"""Return the header of an array of ``count`` items.

    Example:
        >>> list_header(2)
        b'\x92'
    """
    return bytes((0x90 | count,)) if count < 16 else _sized_header(0xDC, count, narrowest=2)


def _ext_header(code: int, nbytes: int) -> bytes:
    return (_FIXEXT.get(nbytes) or _sized_header(0xC7, nbytes)) + struct.pack(">b", code)


def _sized_header(first: int, count: int, narrowest: int = 1) -> bytes:
    """Return the first byte and the count behind it, in as few bytes as hold it; ``first`` says the narrowest form."""
    width = max(narrowest, 1 if count < 2**8 else 2 if count < 2**16 else 4)
    return bytes((first + (width // narrowest).bit_length() - 1,)) + count.to_bytes(width, "big")


def array_header(code: int, shape: tuple[int, ...], dtype_name: str, itemsize: int) -> tuple[bytes, int]:
    r"""Return what stands before an array's bytes, and how many bytes follow.

    The header holds the ext header, the inner array of three, the shape, the dtype name and the bin header, so that
    an array is written as header, then its C-order little-endian bytes.

    Raises:
        Unsupported: the payload exceeds what one msgpack ext can hold.

    Example:
        >>> array_header(EXT_ARRAY, (1, 2), "float32", 4)
        (b'\xc7\x16\x01\x93\x92\x01\x02\xa7float32\xc4\x08', 8)
    """
    nbytes = math.prod(shape) * itemsize
    inner = b"\x93" + msgpack.packb(shape) + msgpack.packb(dtype_name)
    if nbytes <= LONGEST_PAYLOAD:
        inner += _sized_header(0xC4, nbytes)
    if (payload := len(inner) + nbytes) > LONGEST_PAYLOAD:
        raise Unsupported(
            f"an array of {pluralize(nbytes, 'bytes')} does not fit into one msgpack item of {LONGEST_PAYLOAD} bytes",
            hint="put it into a dict, so that it is written in chunks (MAX_CHUNK_SIZE)",
        )
    return _ext_header(code, payload) + inner, nbytes


def complex_leaf(value: complex) -> bytes:
    """Return a Python complex number: ext 2 around an array of two float64."""
    return _ext_header(EXT_COMPLEX, 19) + struct.pack(">BBdBd", 0x92, 0xCB, value.real, 0xCB, value.imag)
