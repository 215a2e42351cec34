"""Headers of a msgpack file -> a ``Listing``; the arrays' bytes are never read, and numpy is not needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from treering._codec.msgpack.chunks import ChunkedArray
from treering._codec.msgpack.scan import Scanner
from treering._format.records import LeafRecord, Listing
from treering._values.dtypes import Dtype

_SHORT_TEXT: Final = 256


class _Records:
    """Leaves as records."""

    def prepare(self, dtype: Dtype) -> Dtype:
        return dtype

    def array(self, shape: tuple[int, ...], dtype: Dtype, offset: int, data: bytes, at: int) -> LeafRecord:
        del data, at
        return _array_record("array", shape, dtype, offset)

    def scalar(self, shape: tuple[int, ...], dtype: Dtype, offset: int) -> LeafRecord:
        return _array_record("numpy scalar", shape, dtype, offset)

    def chunked(self, parts: ChunkedArray) -> LeafRecord:
        first: LeafRecord = parts.parts[0]
        places = tuple((part.offset, part.nbytes) for part in parts.parts)
        return LeafRecord(
            kind="array",
            dtype=first.dtype,
            shape=parts.shape,
            nbytes=sum(nbytes for _, nbytes in places),
            offset=first.offset,
            parts=places,
        )

    def blob(self, read: Callable[[], bytes], offset: int, nbytes: int, is_text: bool) -> Any:
        if nbytes <= _SHORT_TEXT:
            return read().decode() if is_text else read()
        return LeafRecord(kind="str" if is_text else "bytes", dtype=None, shape=None, nbytes=nbytes, offset=offset)


def _array_record(kind: str, shape: tuple[int, ...], dtype: Dtype, offset: int) -> LeafRecord:
    nbytes = dtype.itemsize
    for length in shape:
        nbytes *= length
    return LeafRecord(kind=kind, dtype=dtype.name, shape=shape, nbytes=nbytes, offset=offset)


def list_msgpack(first: bytes, size: int, fetch: Callable[[int, int], bytes]) -> Listing:
    r"""Return what the headers of a msgpack file say.

    Args:
        first: the bytes at its start.
        size: bytes in all.
        fetch: ``fetch(offset, n)`` returns ``n`` bytes.

    Raises:
        Corrupt, Format: as reading the file would.

    Example:
        >>> data = b"\x81\xa1a\x01"
        >>> list_msgpack(data, len(data), lambda offset, n: data[offset : offset + n]).root
        {'a': 1}
    """
    return Listing(form="msgpack", file_bytes=size, root=Scanner(first, size, fetch, _Records()).run())
