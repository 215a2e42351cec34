"""An opened tree -> one ``.npz`` file, an array for each leaf under its key path, stored as ``numpy.savez`` does.

Source: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html, and PKWARE's APPNOTE 6.3.10.
"""

from __future__ import annotations

import io
import re
import secrets
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from treering._arrays.source import Source
from treering._arrays.source_arrays import SourceArray, describe_source
from treering._background.writer import Watch
from treering._checkpoint import forms
from treering._checkpoint.save_files import write_buffers
from treering._checkpoint.save_options import SaveOptions
from treering._format.index import LeafType
from treering._format.selection import Selection
from treering._store.pieces import Buffer
from treering._store.resolve import needs_nonce
from treering._values.dtypes import is_numpy
from treering._values.keys import join_key, quoted_key, split_key

_LARGE: Final = 0xFFFFFFFF
_MANY: Final = 0xFFFF
# In the place of a number that stands in 8 bytes elsewhere.
_ELSEWHERE: Final = 0xFFFFFFFF
# Bytes of UTF-8 that a zip file can say the length of, less those of ".npy".
_LONGEST_NAME: Final = 0xFFFF - 4
_ODD: Final = re.compile("[\0\ud800-\udfff]")
_BARE: Final = "arr_0"
# Sizes and checksum follow the data; names are UTF-8.
_FLAGS: Final = 0x0808
_FIRST_DAY: Final = 0x21
_UNIX: Final = 3 << 8

_Read: TypeAlias = Callable[[SourceArray], Iterable[Buffer]]


class _Entry(NamedTuple):
    """An array in the archive."""

    name: bytes
    head: bytes
    """What an ``.npy`` has before its data."""
    array: SourceArray

    @property
    def size(self) -> int:
        return len(self.head) + int(self.array.nbytes)


def find_losses(source: Source, part: Selection, metadata: Mapping[str, Any]) -> Iterator[forms.Loss]:
    """Yield all that is more than arrays of numpy's own dtypes by their names."""
    yield from forms.lost_members(metadata)
    yield from forms.lost_containers(part.structure)
    yield from forms.lost_leaves(source, part, _refuse)
    yield from forms.lost_names(part.keys, names := _names(part), _is_odd)
    known = set(names)
    for key, name in zip(part.keys, names, strict=True):
        if name.endswith(".npy") and (other := name.removesuffix(".npy")) in known:
            text = f"leaf {quoted_key(key)}: numpy.load reads {other!r:.200} where it is asked for {name!r:.200}"
            yield forms.Loss("names", key, text)


def write(source: Source, part: Selection, save: SaveOptions, watch: Watch) -> dict[str, Any]:
    """Write the file; return what is in it by its keys."""
    leaves = describe_source(source, part)
    names = _names(part)
    arrays: list[SourceArray] = [leaves.whole_of(number) for number in range(len(names))]
    entries = [_Entry(f"{name}.npy".encode(), _head(array), array) for name, array in zip(names, arrays, strict=True)]
    nonce = secrets.token_hex(16).encode() if needs_nonce(save.path) else b""
    size = sum(map(len, _archive(entries, nonce, lambda _: ()))) + sum(array.nbytes for array in arrays)
    content = _archive(entries, nonce, lambda array: array.blocks(0, array.size))
    write_buffers(content, size, save, watch, unique=bool(nonce))
    return dict(zip((join_key([name]) for name in names), arrays, strict=True))


def _refuse(kind: LeafType) -> str | None:
    return forms.refuse_others(kind, (kind.dtype,) if is_numpy(kind.dtype) else ())


def _is_odd(name: str) -> bool:
    return _ODD.search(name) is not None or len(name.encode()) > _LONGEST_NAME


def _names(part: Selection) -> list[str]:
    return ["/".join(split_key(key)) if key else _BARE for key in forms.key_texts(part.structure)]


def _head(array: SourceArray) -> bytes:
    file = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(array.dtype)
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": array.shape})
    return file.getvalue()


def _archive(entries: Sequence[_Entry], comment: bytes, read: _Read) -> Iterator[Buffer]:
    """Yield the bytes of a zip file; ``read`` gives those of an array."""
    directory: list[bytes] = []
    at = 0
    for entry in entries:
        large = entry.size >= _LARGE
        start = _local_header(entry, large=large) + entry.head
        yield start
        checksum = zlib.crc32(entry.head)
        for block in read(entry.array):
            checksum = zlib.crc32(block, checksum)
            yield block
        end = struct.pack("<4sIQQ" if large else "<4sIII", b"PK\x07\x08", checksum, entry.size, entry.size)
        yield end
        directory.append(_directory_entry(entry, checksum, at))
        at += len(start) + entry.array.nbytes + len(end)
    yield from directory
    yield _directory_end(len(directory), sum(map(len, directory)), at, comment)


def _local_header(entry: _Entry, *, large: bool) -> bytes:
    extra = struct.pack("<HHQQ", 1, 16, 0, 0) if large else b""
    version, size = (45, _ELSEWHERE) if large else (20, 0)
    fields = (version, _FLAGS, 0, 0, _FIRST_DAY, 0, size, size, len(entry.name), len(extra))
    return struct.pack("<4s5H3I2H", b"PK\x03\x04", *fields) + entry.name + extra


def _directory_entry(entry: _Entry, checksum: int, at: int) -> bytes:
    wide = [value for value in (entry.size, entry.size, at) if value >= _LARGE]
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    version, size, at = 45 if wide else 20, _shorten(entry.size), _shorten(at)
    ways = _UNIX | version, version, _FLAGS, 0, 0, _FIRST_DAY
    lengths = checksum, size, size, len(entry.name), len(extra)
    # What unzip makes of it is a file that its owner can read and write.
    return struct.pack("<4s6H3I2H6x2I", b"PK\x01\x02", *ways, *lengths, 0o600 << 16, at) + entry.name + extra


def _directory_end(count: int, size: int, at: int, comment: bytes) -> bytes:
    wide = b""
    if count >= _MANY or max(size, at) >= _LARGE:
        wide = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, at)
        wide += struct.pack("<4sIQI", b"PK\x06\x07", 0, at + size, 1)
    few = min(count, _MANY)
    fields = (0, 0, few, few, _shorten(size), _shorten(at), len(comment))
    return wide + struct.pack("<4s4H2IH", b"PK\x05\x06", *fields) + comment


def _shorten(number: int) -> int:
    return _ELSEWHERE if number >= _LARGE else number
