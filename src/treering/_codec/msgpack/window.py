"""A window on a source of bytes, the numbers of the wire, and the items of msgpack that need no stack.

Methods take an index into the window and return values with the index behind them. Reading past the end raises
``IndexError`` or ``struct.error``, which the scanner turns into "cut short".
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Final

import msgpack

from treering._values.human import pluralize
from treering.errors import CorruptError, UnsupportedError

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
        UnsupportedError: the payload exceeds what one msgpack ext can hold.

    Example:
        >>> array_header(EXT_ARRAY, (1, 2), "float32", 4)
        (b'\xc7\x16\x01\x93\x92\x01\x02\xa7float32\xc4\x08', 8)
    """
    nbytes = math.prod(shape) * itemsize
    inner = b"\x93" + msgpack.packb(shape) + msgpack.packb(dtype_name)
    if nbytes <= LONGEST_PAYLOAD:
        inner += _sized_header(0xC4, nbytes)
    if (payload := len(inner) + nbytes) > LONGEST_PAYLOAD:
        raise UnsupportedError(
            f"an array of {pluralize(nbytes, 'bytes')} does not fit into one msgpack item of {LONGEST_PAYLOAD} bytes",
            hint="put it into a dict, so that it is written in chunks (MAX_CHUNK_SIZE)",
        )
    return _ext_header(code, payload) + inner, nbytes


def complex_leaf(value: complex) -> bytes:
    """Return a Python complex number: ext 2 around an array of two float64."""
    return _ext_header(EXT_COMPLEX, 19) + struct.pack(">BBdBd", 0x92, 0xCB, value.real, 0xCB, value.imag)


WINDOW_BYTES: Final = 64 * 1024
_FIRST_STEP: Final = 4 * 1024
_SLACK: Final = 1024  # more than any key of one length byte, ext header and inner array header together
_NEVER: Final = 2**63

Fetch = Callable[[int, int], bytes]
"""``fetch(offset, n)`` returns exactly ``n`` bytes of a source."""

_NUMBERS: Final = {0xCA + number: struct.Struct(f">{code}") for number, code in enumerate("fdBHIQbhiq")}


class Window:
    """Some of a source's bytes, around what is read next.

    Args:
        first: the bytes at the start of the source, or all of them.
        size: bytes in the whole source.
        fetch: ``fetch(offset, n)`` returns exactly ``n`` bytes; only asked for bytes that are there.
        step: how many bytes are fetched at once, where all of them are wanted; else few, behind a large array very few.

    Attributes:
        data: the bytes in the window.
        base: offset in the source of its first byte.
        size: bytes in the whole source.
        next: index in ``data`` of what is read next; behind its end after a jump.
        safe: index up to which an item's headers surely lie inside the window.
    """

    __slots__ = ("_all", "_fetch", "_step", "base", "data", "next", "safe", "size")

    def __init__(self, first: bytes, size: int, fetch: Fetch, step: int | None = None) -> None:
        self.data = first
        self.base = 0
        self.size = size
        self.next = 0
        self._fetch = fetch
        self._all = step is not None
        self._step = step or WINDOW_BYTES
        self.safe = self._safe_end()

    def _safe_end(self) -> int:
        reaches_the_end = self.base + len(self.data) >= self.size
        return _NEVER if reaches_the_end else len(self.data) - _SLACK

    def refill(self) -> None:
        """Move on, so that the window starts with the next item; called when that is not safely inside."""
        offset = self.base + self.next
        # Behind a large array another may follow at once: look at little until small items come.
        if not self._all:
            jumped = self.next > len(self.data)
            self._step = _FIRST_STEP if jumped else min(2 * self._step, WINDOW_BYTES)
        self.data = b""  # two of them need not be in memory
        self.data = self._fetch(offset, min(self._step, self.size - offset))
        self.base, self.next = offset, 0
        self.safe = self._safe_end()

    def read(self, at: int, nbytes: int) -> bytes:
        """Return ``nbytes`` from ``at`` on, from the source where the window ends before."""
        self.need(at, nbytes)
        return self.data[at : at + nbytes] if at + nbytes <= len(self.data) else self._fetch(self.base + at, nbytes)

    def need(self, at: int, nbytes: int) -> None:
        """Raise where the source ends before ``nbytes`` from ``at`` on."""
        end = self.base + at + nbytes
        if end > self.size:
            count = pluralize(self.size, "bytes")
            raise CorruptError(f"the data is cut short: it ends after {count}; at least {end} were needed")

    def unsigned(self, at: int, width: int) -> int:
        """Return the big-endian number of ``width`` bytes."""
        field = self.data[at : at + width]
        if len(field) != width:
            raise IndexError
        return int.from_bytes(field, "big")

    def number(self, at: int) -> tuple[int | float | bool | None, int]:
        """Return a nil, bool, int or float."""
        first = self.data[at]
        if first <= 0x7F:
            return first, at + 1
        if first >= 0xE0:
            return first - 0x100, at + 1
        if first == 0xC0:
            return None, at + 1
        if first in (0xC2, 0xC3):
            return first == 0xC3, at + 1
        if (form := _NUMBERS.get(first)) is None:
            raise CorruptError(f"byte 0x{first:02x} starts no msgpack item")
        return form.unpack_from(self.data, at + 1)[0], at + 1 + form.size

    def blob_header(self, at: int) -> tuple[int, int, bool]:
        """Return where a str or bin starts, its length, and whether it is a str."""
        first = self.data[at]
        if first <= 0xBF:
            return at + 1, first & 0x1F, True
        is_text = first >= 0xD9
        width = 1 << (first - (0xD9 if is_text else 0xC4))
        return at + 1 + width, self.unsigned(at + 1, width), is_text

    def ext_header(self, at: int) -> tuple[int, int, int]:
        """Return payload length, code (signed) and where the payload starts."""
        first = self.data[at]
        if first >= 0xD4:
            nbytes, at = 1 << (first - 0xD4), at + 1
        else:
            width = 1 << (first - 0xC7)
            nbytes, at = self.unsigned(at + 1, width), at + 1 + width
        code = self.data[at]
        return nbytes, code - 0x100 if code > 0x7F else code, at + 1

    def container_header(self, at: int) -> tuple[bool, int, int]:
        """Return whether it is a map, how many items it claims, and where they start."""
        first = self.data[at]
        if first <= 0x9F:
            return first <= 0x8F, first & 0x0F, at + 1
        width = 4 if first & 1 else 2
        return first >= 0xDE, self.unsigned(at + 1, width), at + 1 + width

    def complex(self, start: int, nbytes: int) -> complex:
        """Return the complex number in an ext payload."""
        payload = self.read(start, nbytes) if nbytes == 19 else b""
        if payload[:2] != b"\x92\xcb" or payload[10:11] != b"\xcb":
            raise CorruptError("a complex number (ext 2) is not a pair of float64")
        real, imag = struct.unpack(">dxd", payload[2:])
        return complex(real, imag)
