"""``.npz`` and ``.npy`` files, as numpy writes them: arrays by range, never a pickle.

Source: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html; the archive is a zip file, whose entries
are stored or deflated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import itertools
import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from treering._checkpoint.detect import EQUINOX, READ_EQUINOX
from treering._codec.zarr import ZarrArray, stored_dtype
from treering._foreign.foreign_tree import ForeignLeaf, ForeignTree, GridLeaf, build_index, flat_dict
from treering._format.index import LARGE_VALUE, DataFile, LeafType, Token
from treering._format.leaf_values import check_shape
from treering._store.api import Reader, remembered, require_range
from treering._store.failures import naming_file
from treering._store.resolve import open_file
from treering._values.checksums import require_crc
from treering._values.dtypes import is_numpy, itemsize_of
from treering._values.human import pluralize
from treering.errors import CorruptError, FormatError, UnsupportedError

_MAGIC: Final = b"\x93NUMPY"
_SUFFIX: Final = ".npy"
_LONGEST_HEADER: Final = 1 << 16
_LARGEST_DIRECTORY: Final = 64 << 20
_MOST_ENTRIES: Final = 1 << 20
# At the end of an archive, where its directory is; at the start of an entry, where most headers end.
_TAIL_BYTES: Final = 64 << 10
_HEAD_BYTES: Final = 4096
_NEAR_BYTES: Final = 1 << 20
_LOCAL_BYTES: Final = 30
_LISTED_BYTES: Final = 46
_LARGE_END_BYTES: Final = 40
_IN_UTF_8: Final = 1 << 11
_ANOTHER_COPY: Final = "use another copy of the file"
_AGAIN: Final = "save it with numpy"
_COMPARED: Final = "each array has the CRC-32 that the archive has of it, which tells damage, and no forgery"
_HEADER: Final = re.compile(
    # Each number is followed by one thing alone: there is nothing to try in another way.
    rb"\{'descr': ('[^']*'|\[.*\]), 'fortran_order': (True|False), "
    rb"'shape': \(((?:[0-9]{1,19}(?:, |,?(?=\))))*)\),? ?\}\s*",
    re.DOTALL,
)
_CODE: Final = re.compile(r"([<>|=])([?biufcMmSUVO])([0-9]{1,18})?(\[[0-9A-Za-z]+\])?")
_KINDS: Final = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}
_TIMES: Final = {"M": "datetime64", "m": "timedelta64"}
_TEXT: Final = {"U": ("str", 4), "S": ("bytes", 1)}


class _Array(NamedTuple):
    """What the header of an ``.npy`` says."""

    dtype: str
    """As numpy writes it, for example ``<f4``."""
    fortran: bool
    shape: tuple[int, ...]
    header: int
    """Where the data start."""


def recognise(place: Path) -> str | None:
    """Detect a file of numpy: return its version, or None for a zip archive of something else."""
    with open_file(place) as file:
        first = file.read(0, min(file.size, 8))
        if first.startswith(_MAGIC):
            return f"npy {first[6]}.{first[7]}" if len(first) == 8 else "npy"  # noqa: PLR2004
        try:
            entries = _list_entries(file)
        except CorruptError:
            return "npz" if place.suffix == ".npz" else None
    names = [entry.filename for entry in entries]
    is_archive = all(name.endswith(_SUFFIX) for name in names) and (names or place.suffix == ".npz")
    return f"npz, {pluralize(len(names), 'arrays')}" if is_archive else None


def open_foreign(place: Path, files: contextlib.ExitStack) -> ForeignTree:
    """Open a file of either kind: a bare array, or a flat dict of arrays by their names.

    Raises:
        CorruptError: it is damaged.
        FormatError: it is a file of equinox, with several arrays one behind the other.
        UnsupportedError: the bare array holds pickled objects, or is of a dtype that has no form here; never
            unpickled. In an archive such an array is refused when it is read.
        StoreError: the store refuses.
    """
    file = files.enter_context(open_file(place))
    with naming_file(place):
        return _read_tree(file)


def _read_tree(file: Reader) -> ForeignTree:
    data = DataFile(name="", nbytes=file.size, header=0, digest=None)
    notes: list[str] = []
    if file.read(0, min(file.size, len(_MAGIC))) == _MAGIC:
        structure: list[Token] = [1]
        leaves, keys = [_bare_leaf(file)], [""]
    else:
        entries = _list_entries(file)
        names = [entry.filename.removesuffix(_SUFFIX) for entry in entries]
        if len(set(names)) < len(names):
            raise CorruptError("two arrays of the archive have one name")
        _check_apart(entries)
        structure, keys = flat_dict(names)
        leaves = _leaves_of(file, entries, notes)
    index = build_index(structure, keys, leaves, [data])
    tree = ForeignTree(index=index, files=[file], leaves=leaves, nbytes=file.size, notes=notes, threads=file.threads)
    return tree if keys == [""] else dataclasses.replace(tree, checks=_COMPARED)


def _bare_leaf(file: Reader) -> ForeignLeaf:
    try:
        return _raw_leaf(file, 0, file.size)
    except CorruptError:
        # More than one array, one behind the other: this one ends where the next begins.
        found = _parse_header(file.read(0, min(file.size, _LONGEST_HEADER)), "the file")
        code = _CODE.fullmatch(found.dtype)
        size = found.header + int((code and code[3]) or 1) * math.prod(found.shape)
        if size >= file.size or file.read(size, min(len(_MAGIC), file.size - size)) != _MAGIC:
            raise
    raise FormatError(EQUINOX, hint=READ_EQUINOX)


class _Window(io.RawIOBase):
    """A reader as zipfile wants it, which never gives out more at once than the directory of an archive may be."""

    def __init__(self, file: Reader) -> None:
        self._file = file
        self._at = 0
        self._tail_at = max(0, file.size - _TAIL_BYTES)
        self._tail = file.read(self._tail_at, file.size - self._tail_at)

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        if self._at < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._file.size - self._at)
        count = left if size < 0 else min(size, left)
        if count > _LARGEST_DIRECTORY:
            raise CorruptError(f"the directory of the archive would have {pluralize(count, 'bytes')}")
        at = self._at
        self._at += count
        if at < self._tail_at:
            return self._file.read(at, count)
        return self._tail[at - self._tail_at :][:count]


def _list_entries(file: Reader) -> list[zipfile.ZipInfo]:
    return remembered((_list_entries, file.path, file.version), lambda: _read_entries(file))


def _read_entries(file: Reader) -> list[zipfile.ZipInfo]:
    try:
        archive = zipfile.ZipFile(window := _Window(file))
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, OSError) as error:
        raise CorruptError(f"its directory is damaged: {error}", hint=_ANOTHER_COPY) from None
    if len(entries := archive.infolist()) > _MOST_ENTRIES:
        raise CorruptError(f"it has {len(entries)} entries, more than {_MOST_ENTRIES}")
    # zipfile does not count them, and passes over those behind an entry that says that it is longer.
    rest = [len(_name_bytes(entry)) + len(entry.extra) + len(entry.comment) for entry in entries]
    window.seek(archive.start_dir + _LISTED_BYTES * len(entries) + sum(rest))
    end = window.read(_LARGE_END_BYTES)
    count = end[32:40] if end.startswith(b"PK\x06\x06") else end[10:12] if end.startswith(b"PK\x05\x06") else b""
    if len(entries) != int.from_bytes(count, "little"):
        raise CorruptError("its directory is damaged: it does not list all entries", hint=_ANOTHER_COPY)
    return entries


def _check_apart(entries: list[zipfile.ZipInfo]) -> None:
    """Refuse entries that lie on top of each other: a small file could hold any number of large ones."""
    in_order = sorted(entries, key=lambda entry: entry.header_offset)
    for one, other in itertools.pairwise(in_order):
        if one.header_offset + _LOCAL_BYTES + one.compress_size > other.header_offset:
            problem = f"the entries {one.filename!r:.200} and {other.filename!r:.200} lie on top of each other"
            raise CorruptError(problem, offset=other.header_offset)


def _leaves_of(file: Reader, entries: list[zipfile.ZipInfo], notes: list[str]) -> list[ForeignLeaf]:
    """Describe the arrays of all entries. Where large ones begin is read at once: in a bucket each is a request."""
    large = [entry for entry in entries if entry.compress_size > _NEAR_BYTES]
    starts = {entry.header_offset: bytearray(_start_bytes(file, entry)) for entry in large}
    file.read_into([(at, memoryview(room)) for at, room in starts.items()])
    return [_try_leaf(file, entry, bytes(starts.get(entry.header_offset, b"")), notes) for entry in entries]


def _start_bytes(file: Reader, entry: zipfile.ZipInfo) -> int:
    """Return how many bytes an entry begins with: its own header, and mostly that of its array."""
    most = _LOCAL_BYTES + len(_name_bytes(entry))
    require_range(file, entry.header_offset, most)
    return min(most + _HEAD_BYTES, file.size - entry.header_offset)


def _try_leaf(file: Reader, entry: zipfile.ZipInfo, first: bytes, notes: list[str]) -> ForeignLeaf:
    """Describe the array of an entry; of one that has no form here its bytes, which are refused when they are read."""
    try:
        return _leaf_of(file, entry, first or file.read(entry.header_offset, _start_bytes(file, entry)))
    except UnsupportedError as error:
        problem = UnsupportedError(error.message, hint=f"{error.hint or _AGAIN}; only= reads the others")

    def refuse(_: int) -> bytes:
        raise UnsupportedError(problem.message, hint=problem.hint)

    notes.append(f"{problem.message}, so that only its number of bytes is shown, and it cannot be read")
    size = (max(1, min(entry.compress_size, file.size)),)
    kind = LeafType(kind="numpy", dtype="uint8", shape=size)
    return _encoded_leaf(kind, ZarrArray(shape=size, chunks=size, dtype="uint8"), refuse)


def _leaf_of(file: Reader, entry: zipfile.ZipInfo, first: bytes) -> ForeignLeaf:
    """Describe the array of an entry of the archive, which begins with these bytes."""
    what = f"the entry {entry.filename!r:.200}"
    # The name has no checksum, but stands in two places.
    local = first[: _LOCAL_BYTES + len(_name_bytes(entry))]
    flags, length, extra = (int.from_bytes(local[start : start + 2], "little") for start in (6, 26, 28))
    at = entry.header_offset + _LOCAL_BYTES + length + extra
    is_named = local[_LOCAL_BYTES:] == _name_bytes(entry) and not (flags ^ entry.flag_bits) & _IN_UTF_8
    if local[:4] != b"PK\x03\x04" or not is_named or length != len(local) - _LOCAL_BYTES:
        raise CorruptError(f"{what} does not begin where the directory says", offset=entry.header_offset)
    if entry.flag_bits & 1:
        raise UnsupportedError(f"{what} is encrypted")
    require_range(file, at, entry.compress_size)
    match entry.compress_type:
        case zipfile.ZIP_STORED:
            return _raw_leaf(file, at, entry.file_size, what, crc=entry.CRC, first=first[at - entry.header_offset :])
        case zipfile.ZIP_DEFLATED:
            return _deflated_leaf(file, at, entry, what, first[at - entry.header_offset :])
        case other:
            raise UnsupportedError(f"{what} is compressed by method {other}, not by deflate", hint=_AGAIN)


def _name_bytes(entry: zipfile.ZipInfo) -> bytes:
    return entry.orig_filename.encode("utf-8" if entry.flag_bits & _IN_UTF_8 else "cp437")


def _with_header(first: bytes, more: Callable[[], bytes]) -> bytes:
    """Return the first bytes of an array, or more of them where its header does not end in these."""
    return first if 12 + int.from_bytes(first[8:10], "little") <= len(first) else more()  # 12 is where it begins


def _raw_leaf(
    file: Reader, at: int, size: int, what: str = "the file", *, crc: int | None = None, first: bytes = b""
) -> ForeignLeaf:
    head = _with_header(first[:size], lambda: file.read(at, min(size, _LONGEST_HEADER)))
    found = _parse_header(head, what)
    start, nbytes = at + found.header, size - found.header
    before = zlib.crc32(head[: found.header])

    def fetch(_: int = 0) -> bytes:
        data = file.read(start, nbytes)
        if crc is not None:
            require_crc(zlib.crc32(data, before), crc, what)
        return data

    if (text := _text_of(found, fetch, nbytes, what)) is not None:
        return text
    kind, layout = _layout(found, nbytes, what)
    if layout.plain:
        return ForeignLeaf(kind, pieces=[(None, 0, start)], crc=None if crc is None else (before, crc))
    return _encoded_leaf(kind, layout, fetch)


def _deflated_leaf(file: Reader, at: int, entry: zipfile.ZipInfo, what: str, first: bytes) -> ForeignLeaf:
    def inflate(most: int, start: bytes = b"") -> bytes:
        try:
            packed = start or file.read(at, entry.compress_size)
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, most)
        except zlib.error as error:
            raise CorruptError(f"{what} cannot be unpacked: {error}", hint=_ANOTHER_COPY) from None
        if most > entry.file_size and len(data) != entry.file_size:
            raise CorruptError(f"{what} unpacks to {pluralize(len(data), 'bytes')}, {entry.file_size} were written")
        return data

    most = min(entry.file_size, _LONGEST_HEADER)
    found = _parse_header(_with_header(inflate(most, first[: entry.compress_size]), lambda: inflate(most)), what)
    nbytes = entry.file_size - found.header

    def fetch(_: int = 0) -> bytes:
        data = inflate(entry.file_size + 1)
        require_crc(zlib.crc32(data), entry.CRC, what)
        return data[found.header :]

    if (text := _text_of(found, fetch, nbytes, what)) is not None:
        return text
    return _encoded_leaf(*_layout(found, nbytes, what), fetch)


def _encoded_leaf(kind: LeafType, layout: ZarrArray, fetch: Callable[[int], bytes]) -> ForeignLeaf:
    if 0 in layout.shape:
        fetch(0)  # nobody reads what has no items, and its header has to be checked too
    return ForeignLeaf(kind, grid=GridLeaf(layout, fetch))


def _parse_header(data: bytes, what: str) -> _Array:
    """Return what the header of an ``.npy`` says, by its one grammar: nothing is evaluated."""
    size = {1: 2, 2: 4, 3: 4}.get(data[6] if len(data) > 8 else 0)  # noqa: PLR2004
    if not data.startswith(_MAGIC) or size is None:
        raise CorruptError(f"{what} is no .npy of version 1 to 3")
    start = 8 + size
    length = int.from_bytes(data[8:start], "little")
    found = _HEADER.fullmatch(data[start : start + length]) if start + length <= len(data) else None
    if found is None:
        raise CorruptError(f"{what}: its header is not the one that numpy writes")
    shape = [int(text) for text in found[3].replace(b" ", b"").split(b",") if text]
    return _Array(found[1].decode("latin-1").strip("'"), found[2] == b"True", tuple(shape), start + length)


def _layout(found: _Array, nbytes: int, what: str) -> tuple[LeafType, ZarrArray]:
    """Return what an array is, and how it lies, as one chunk."""
    code = _CODE.fullmatch(found.dtype)
    order, kind, size, unit = code.groups() if code is not None else ("", "", None, None)
    if kind == "O":
        raise UnsupportedError(f"{what} holds pickled Python objects", hint="treering never unpickles; save arrays")
    dtype = "bool" if kind in {"?", "b"} and size in {None, "1"} else f"{_KINDS.get(kind, '?')}{8 * int(size or 0)}"
    if kind in _TIMES and size == "8":
        dtype = f"{_TIMES[kind]}{unit or ''}"
    if not is_numpy(dtype) or (unit and kind not in _TIMES):
        hint = "numpy writes bfloat16 and float8 so, without their names: save them as safetensors"
        problem = f"{what} is of the dtype {found.dtype:.60}, which has no form here"
        raise UnsupportedError(problem, hint=hint if kind == "V" else "save it as numbers, or as a text")
    shape, itemsize = check_shape(list(found.shape), dtype, what), itemsize_of(dtype)
    layout = ZarrArray(
        shape=shape,
        chunks=tuple(max(1, length) for length in shape),
        dtype=stored_dtype(dtype),
        big_endian=order == ">" and itemsize > 1,
        order="F" if found.fortran and len(shape) > 1 else "C",
    )
    if (wanted := itemsize * math.prod(shape)) != nbytes:
        raise CorruptError(
            f"{what}: an array of {dtype} {list(shape)} takes {pluralize(wanted, 'bytes')}, it has {nbytes}"
        )
    return LeafType(kind="numpy", dtype=dtype, shape=shape), layout


def _text_of(found: _Array, fetch: Callable[[], bytes], nbytes: int, what: str) -> ForeignLeaf | None:
    """Return a leaf that is one text or one bytes, which numpy holds as an array of its own kind."""
    code = _CODE.fullmatch(found.dtype)
    if code is None or code[2] not in _TEXT or found.shape or nbytes > LARGE_VALUE * 4:
        return None
    kind, width = _TEXT[code[2]]
    if nbytes != width * int(code[3] or 0):
        raise CorruptError(f"{what}: a text of {found.dtype} does not have {pluralize(nbytes, 'bytes')}")
    data = fetch()
    if kind == "bytes":
        return ForeignLeaf(LeafType(kind=kind), data.rstrip(b"\0"))
    try:
        text = data.decode("utf-32-be" if code[1] == ">" else "utf-32-le").rstrip("\0")
    except UnicodeDecodeError:
        raise CorruptError(f"{what} is not text") from None
    return ForeignLeaf(LeafType(kind=kind), text)
