"""Hand-made msgpack: the forms that no honest writer would choose."""

from __future__ import annotations

import struct
from typing import Any

import msgpack

__all__ = ["array_ext", "chunked", "ext", "keyed", "packed"]


def packed(value: Any) -> bytes:
    """Plain msgpack."""
    data = msgpack.packb(value, use_bin_type=True)
    assert isinstance(data, bytes)
    return data


def ext(code: int, payload: bytes) -> bytes:
    """An extension value in the ext32 form."""
    return b"\xc9" + struct.pack(">Ib", len(payload), code) + payload


def array_ext(shape: Any, dtype: Any, buffer: Any, *, code: int = 1, tail: bytes = b"") -> bytes:
    """An array as flax lays it out, every part to be chosen; ``tail`` follows inside the extension."""
    return ext(code, packed([shape, dtype, buffer]) + tail)


def keyed(key: str, value: bytes) -> bytes:
    """A map of one key around a value that is encoded already."""
    return b"\x81" + packed(key) + value


def chunked(shape: dict[str, Any], chunks: list[bytes], *, flag: Any = True) -> bytes:
    """A chunked array: the marker, the shape, the chunks (encoded already)."""
    body = b"".join(packed(str(number)) + chunk for number, chunk in enumerate(chunks))
    head = b"\x83" + packed("__msgpack_chunked_array__") + packed(flag) + packed("shape") + packed(shape)
    return head + packed("chunks") + bytes([0x80 | len(chunks)]) + body
