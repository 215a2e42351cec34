"""The headers of our data files, which are safetensors files, and the order of the arrays in them.

A header follows from the index alone, byte for byte, so that whoever has the index can say what it has to be.

Source: https://github.com/huggingface/safetensors, "Format" in its README.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

from treering._codec.documents import json_text, quote
from treering._format.index import Chunks, Index, LeafType, leaf_bytes
from treering._format.structure_text import escape_surrogates
from treering._values.boxes import Box, shape_of, size_of, text_of
from treering._values.checksums import block_bytes
from treering._values.dtypes import NUMPY_SIZES, itemsize_of

ALIGNMENT: Final = 4096
"""Data starts at a multiple of this, so that every array of whole cache lines is aligned in memory too."""

_ATTEMPT_MEMBER: Final = b'"attempt":"'
_LINE: Final = 64
_LARGEST: Final = 1 << 63

DTYPES: Final[Mapping[str, str]] = (
    {name: f"{name[0].upper()}{8 * size}" for name, size in NUMPY_SIZES.items() if name != "complex128"}
    | {"bool": "BOOL", "bfloat16": "BF16"}
    | {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0"}
    | {"float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ"}
)
"""Our name of a dtype -> its name in safetensors. Four and six bit floats are packed there, so theirs are not ours."""

DATA_NOTE: Final = "data of a checkpoint; its index is treering.json"
"""What the header of a checkpoint's data file says it is."""

Row = tuple[int, Box | None]
"""A leaf's number and which box of it; None for the whole."""


def lay_out(nbytes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return in which order arrays lie in a file, and where each begins, counted from where the data starts.

    safetensors allows no gaps. So arrays whose size is a multiple of 64 bytes come first, and each of them is aligned;
    among them, and among the rest, the largest first, and equal ones as they were given.

    Args:
        nbytes: the size of each array.

    Returns:
        The numbers of the arrays in file order; and for each array, as they were given, its offset.

    Example:
        >>> lay_out([4, 128, 64, 12])
        ([1, 2, 3, 0], [204, 0, 128, 192])
    """
    places = [size if size % _LINE else size + _LARGEST for size in nbytes]
    order = sorted(range(len(nbytes)), key=places.__getitem__, reverse=True)  # equal ones stay in order
    offsets, at = [0] * len(nbytes), 0
    for number in order:
        offsets[number] = at
        at += nbytes[number]
    return order, offsets


def lay_out_files(
    attempt: str,
    keys: Sequence[str],
    types: Sequence[LeafType],
    leaf_types: Sequence[int],
    files: Sequence[Sequence[Row]],
) -> tuple[Chunks, list[bytes]]:
    """Return where everything will lie, and the header of each file, before a byte of data is looked at.

    Args:
        attempt: the save's 16 hexadecimal digits.
        keys: key text of each leaf.
        types: the different types of leaves.
        leaf_types: number of the type of each leaf.
        files: for each file the leaves, or boxes of leaves, that it will hold.

    Returns:
        The chunks, in the order of the leaves; and for each file its bytes before the data.

    Example:
        >>> kind = LeafType(kind="numpy", dtype="float32", shape=(16,))
        >>> chunks, headers = lay_out_files("0" * 16, ["a", "b"], [kind], [0, 0], [[(0, None), (1, None)]])
        >>> chunks.offset, [len(header) for header in headers]
        ([4096, 4160], [4096])
    """
    by_type = [leaf_bytes(kind) for kind in types]
    columns: list[list[Any]] = [[] for _ in range(5)]
    headers: list[bytes] = []
    for number, given in enumerate(files):
        parts = sorted(given, key=operator.itemgetter(0))
        sizes = [by_type[leaf_types[n]] if box is None else _box_bytes(types[leaf_types[n]], box) for n, box in parts]
        order, offsets = lay_out(sizes)
        placed = [(*parts[place], offsets[place], sizes[place]) for place in order]
        headers.append(frame(header_text(keys, types, leaf_types, placed, _data_note(attempt))))
        base = len(headers[-1])
        rows = (*zip(*parts, strict=True), [number] * len(parts), [base + at for at in offsets], sizes)
        for column, more in zip(columns, rows, strict=True) if parts else ():
            column.extend(more)
    if len(files) > 1:
        by_leaf = sorted(range(len(columns[0])), key=columns[0].__getitem__)
        columns = [[column[row] for row in by_leaf] for column in columns]
    leaf, box, file, offset, nbytes = columns
    block = list(map(block_bytes, nbytes))
    return Chunks(leaf=leaf, box=box, file=file, offset=offset, nbytes=nbytes, block=block), headers


def of_attempt(header: bytes, attempt: str) -> bytes:
    """Return the header that a file of the same content has in another attempt.

    Example:
        >>> kind = LeafType(kind="numpy", dtype="float32", shape=(16,))
        >>> _, one = lay_out_files("0" * 16, ["a"], [kind], [0], [[(0, None)]])
        >>> _, other = lay_out_files("1" * 16, ["a"], [kind], [0], [[(0, None)]])
        >>> of_attempt(one[0], "1" * 16) == other[0]
        True
    """
    # The note is a header's first entry, and the text in front of the attempt is always the same.
    start = header.index(_ATTEMPT_MEMBER) + len(_ATTEMPT_MEMBER)
    return header[:start] + attempt.encode("ascii") + header[start + len(attempt) :]


def header_bytes(index: Index, file: int) -> bytes:
    """Return what the first bytes of a data file have to be: 8 bytes of length, JSON, and spaces up to its data.

    Args:
        index: attempt, keys, types and chunks are taken from it; its checksums need not be there yet.
        file: number of the file.
    """
    rows = rows_of_file(index, file)
    return frame(header_text(index.keys, index.types, index.leaf_types, rows, _data_note(index.attempt)))


def rows_of_file(index: Index, file: int) -> list[tuple[int, Box | None, int, int]]:
    """Return leaf, box, offset from the start of the data, and size of each array of a file, in file order."""
    chunks, base = index.chunks, index.files[file].header
    rows = chunks.of_file(file)
    return [(chunks.leaf[row], chunks.box[row], chunks.offset[row] - base, chunks.nbytes[row]) for row in rows]


def _data_note(attempt: str) -> dict[str, str]:
    return {"treering": DATA_NOTE, "attempt": attempt}


def header_text(
    keys: Sequence[str],
    types: Sequence[LeafType],
    leaf_types: Sequence[int],
    rows: Sequence[tuple[int, Box | None, int, int]],
    note: Mapping[str, str],
) -> str:
    """Return the JSON of a header.

    Args:
        keys: key text of each leaf.
        types: the different types of leaves.
        leaf_types: number of the type of each leaf.
        rows: leaf, box, offset from the start of the data, and size of each array, in file order.
        note: what stands in ``__metadata__``.
    """
    plain = [_entry(kind, kind.shape or ()) if kind.stored else "" for kind in types]
    note_entry = f'"__metadata__":{json_text(dict(note))}'
    entries: list[str] = []
    for leaf, box, offset, nbytes in rows:
        key, number = keys[leaf], leaf_types[leaf]
        if box is None:
            entry = plain[number]
        else:
            key, entry = f"{key}~[{text_of(box)}]", _entry(types[number], shape_of(box))
        if key == "__metadata__":
            key = "~__metadata__"
        elif not key.isascii():
            key = escape_surrogates(key)
        entries.append(f"{quote(key)}:{entry}[{offset},{offset + nbytes}]}}")
    return "{" + ",".join([note_entry, *entries]) + "}"


def _entry(kind: LeafType, shape: tuple[int, ...]) -> str:
    """Return the entry of an array up to its offsets."""
    shown = DTYPES.get(kind.dtype or "")
    if shown is None:  # unsigned ints of the size stand for it; larger items have an axis of these
        itemsize = itemsize_of(kind.dtype)
        shown = f"U{8 * min(itemsize, 8)}"
        shape = (*shape, itemsize // 8) if itemsize > 8 else shape  # noqa: PLR2004
    return f'{{"dtype":"{shown}","shape":{json_text(list(shape))},"data_offsets":'


def frame(text: str, size: int | None = None) -> bytes:
    r"""Return a header: the length, the JSON, and spaces up to a multiple of 4,096 bytes, or up to ``size``.

    Example:
        >>> frame("{}")[:12], len(frame("{}"))
        (b'\xf8\x0f\x00\x00\x00\x00\x00\x00{}  ', 4096)
    """
    size = round_up(8 + len(text)) if size is None else size
    return struct.pack("<Q", size - 8) + text.ljust(size - 8).encode("ascii")


def round_up(size: int) -> int:
    """Return the next multiple of 4,096.

    Example:
        >>> round_up(1), round_up(4096)
        (4096, 4096)
    """
    return -(-size // ALIGNMENT) * ALIGNMENT


def _box_bytes(kind: LeafType, box: Box) -> int:
    return itemsize_of(kind.dtype) * size_of(box)
