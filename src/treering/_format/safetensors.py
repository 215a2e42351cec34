"""safetensors: the headers of our data files and the order of the arrays in them, and one such file as a whole.

A header of ours follows from the index alone, byte for byte, so that whoever has the index can say what it has to be. A
single file has the index in its header; one of another writer has none.

Source: https://github.com/huggingface/safetensors, "Format" in its README.
"""

from __future__ import annotations

import dataclasses
import operator
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from treering._codec.documents import (
    FIRST_BYTES,
    add_hint,
    check_hashes,
    decode_text,
    describe_text,
    json_text,
    member,
    parse_json,
    quote,
)
from treering._format.columns import escape_surrogates
from treering._format.document import check_chunks, encode_index, is_first_version, parse_index
from treering._format.index import LIMIT, Chunks, Container, DataFile, Index, LeafType, format_chunk, leaf_bytes
from treering._format.leaf_values import check_shape
from treering._values.boxes import Box, shape_of, size_of, text_of
from treering._values.checksums import block_bytes
from treering._values.dtypes import NUMPY_SIZES, itemsize_of
from treering._values.human import pluralize
from treering._values.keys import quoted_key
from treering.errors import CorruptError, FormatError, UnsupportedError

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
    entries = [_note_entry(note)]
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
    return "{" + ",".join(entries) + "}"


def _note_entry(note: Mapping[str, str]) -> str:
    return f'"__metadata__":{json_text(dict(note))}'


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


LARGEST_HEADER: Final = 100_000_000
"""More bytes of header are read by no safetensors reader."""

_INDEX: Final = "treering.index"
_NOTE: Final = "treering"
_NOTE_TEXT: Final = "a tree; treering.index says how it is put together, and checks every byte of this file"
# Readers of torch models look for it.
_FORMAT: Final = "format"
_FORMAT_TEXT: Final = "pt"
RESERVED: Final = (_FORMAT, _NOTE, _INDEX)
"""Names of members that a file has itself."""
_NAMES: Final = {name: dtype for dtype, name in DTYPES.items()}
# Several items share a byte there, so no array of ours can lie on top of them.
_PACKED: Final = frozenset({"F4", "F6_E2M3", "F6_E3M2"})
_NO_ATTEMPT: Final = "0" * 16
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_NO_ESCAPE: Final = re.compile("~(?![01])")
_SHOWN_PROBLEMS: Final = 20


# -------------------------------------------------------------------------------------------------------------- writing


def check_single_file(keys: Sequence[str], types: Sequence[LeafType], leaf_types: Sequence[int]) -> None:
    """Require that every leaf has a form in a safetensors file: an array of a dtype that it knows, or None.

    Raises:
        UnsupportedError: some have none; the message names them all, or the first 20.

    Example:
        >>> check_single_file(["a", "b"], [LeafType(kind="none"), LeafType(kind="str")], [0, 1])
        Traceback (most recent call last):
        ...
        treering.errors.UnsupportedError: a safetensors file cannot hold:
          leaf 'b': a str
        save to a folder instead, which can hold them all
    """
    reasons = [why_not_stored(kind) for kind in types]
    if not any(reasons):
        return
    leaves = zip(keys, leaf_types, strict=True)
    if problems := [f"leaf {quoted_key(key)}: {reasons[number]}" for key, number in leaves if reasons[number]]:
        more = len(problems) - _SHOWN_PROBLEMS
        lines = [*problems[:_SHOWN_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]
        listed = "".join(f"\n  {line}" for line in lines)
        raise UnsupportedError(
            f"a safetensors file cannot hold:{listed}\nsave to a folder instead, which can hold them all"
        )


def why_not_stored(kind: LeafType) -> str | None:
    """Say what a leaf is that a safetensors file cannot hold; None where it can, or holds nothing of it."""
    if kind.kind in ("jax", "numpy", "numpy scalar"):
        return None if kind.dtype in DTYPES else f"an array of {kind.dtype}"
    named = {"none": None, "opaque": "a function or another object", "key": f"a typed PRNG key ({kind.impl})"}
    return named.get(kind.kind, f"{'an' if kind.kind == 'int' else 'a'} {kind.kind}")


def check_single_metadata(metadata: Mapping[str, Any]) -> None:
    """Require that the names in the metadata are not those that a single file has itself.

    Raises:
        UnsupportedError: one is.

    Example:
        >>> check_single_metadata({"format": "np"})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        treering.errors.UnsupportedError: metadata of a safetensors file has the member 'format'; ...
    """
    for name in filter(metadata.__contains__, RESERVED):
        raise UnsupportedError(
            f"metadata of a safetensors file has the member {name!r}", hint="the file reserves that name"
        )


def single_file(
    index: Index, header: bytes, like: tuple[int, int] | None = None
) -> tuple[Index, bytes, tuple[int, int]]:
    """Return the index of a file that holds everything, that file's bytes before its data, and a `like` of its own.

    Args:
        index: with one file, and the checksums. Its chunks' offsets count from its file's ``header``, whatever that is:
            here all of them are moved to where the data will start.
        header: what `lay_out_files` made for that file; its entries are those of the single file, only the note is not.
        like: what came back for another index of the same chunks: half the work is to find out how large the header is.

    Raises:
        UnsupportedError: the header is larger than readers take.

    Example:
        >>> from treering._format.safetensors import lay_out_files
        >>> from treering._format.index import Container, LeafType
        >>> kind = LeafType(kind="numpy", dtype="float32", shape=(0,))
        >>> chunks, headers = lay_out_files("0" * 16, ["a"], [kind], [0], [[(0, None)]])
        >>> index = Index(
        ...     attempt="0" * 16, meshes=[], replaces=[],
        ...     structure=[Container(node="dict", keys=("a",)), 1], keys=["a"],
        ...     types=[kind], leaf_types=[0], values={}, chunks=chunks,
        ...     files=[DataFile(name="", nbytes=4096, header=4096, digest=None)],
        ... )
        >>> moved, header, _ = single_file(index, headers[0])
        >>> parse_safetensors(len(header), lambda offset, n: header[offset : offset + n]) == moved
        True
    """
    # The first entry is a note, in which no brace stands.
    entries = header[header.index(b"}") + 1 :].rstrip(b" ").decode("ascii")

    def text_at(size: int) -> tuple[Index, str]:
        moved = _move(index, size)
        return moved, f"{{{_note_entry(_single_note(moved, encode_index(moved, embedded=True)))}{entries}"

    if like is not None:
        moved, text = text_at(like[0])
        if round_up(8 + len(text) + like[1]) == like[0]:
            return moved, frame(text, like[0]), like
    # The header holds the index, and the index where the data starts. Any number of spaces may follow the header, so
    # its size is taken from a guess that is too large.
    _, longest = text_at(round_up(LARGEST_HEADER))
    size = round_up(8 + len(longest))
    if size - 8 > LARGEST_HEADER:
        problem = f"a header of {pluralize(size, 'bytes')} is too large for safetensors readers"
        raise UnsupportedError(f"{problem} (at most {LARGEST_HEADER})", hint="save to a folder instead")
    moved, text = text_at(size)
    return moved, frame(text, size), (size, len(longest) - len(text))


def _move(index: Index, header: int) -> Index:
    file = index.files[0]
    by = header - file.header
    chunks = dataclasses.replace(index.chunks, offset=[offset + by for offset in index.chunks.offset])
    moved = DataFile(name="", nbytes=file.nbytes + by, header=header, digest=None)
    return dataclasses.replace(index, chunks=chunks, files=[moved])


def _single_note(index: Index, document: bytes) -> dict[str, str]:
    note = {_NOTE: _NOTE_TEXT, _INDEX: document.decode("ascii")}
    if not is_first_version(document):
        # The members that any reader of safetensors can hold.
        texts = {n: text for n, text in index.metadata.items() if type(text) is str and not _SURROGATE.search(n + text)}
        note = {_FORMAT: _FORMAT_TEXT, **texts, **note}
    return note


# -------------------------------------------------------------------------------------------------------------- reading


@add_hint("use another copy of the file")
def parse_safetensors(size: int, fetch: Callable[[int, int], bytes]) -> Index:
    """Return what a safetensors file holds; of another writer's file, an index that is not ``verified``.

    Such a file is a flat dict of arrays, and the key of each is its name, unless a name is no key text.

    Args:
        size: bytes of the file.
        fetch: ``fetch(offset, n)`` returns ``n`` bytes.

    Raises:
        CorruptError: the header is damaged, contradicts itself, or its arrays do not tile the file.
        FormatError: the file is a text, or a part of a checkpoint.
        UnsupportedError: an array is of a dtype that has no form in memory here.
    """
    if size < 8:  # noqa: PLR2004
        raise CorruptError(f"a safetensors file has at least 8 bytes, this one {size}", offset=size)
    if (length := int.from_bytes(fetch(0, 8), "little")) > min(size - 8, LARGEST_HEADER):
        if (told := describe_text(fetch(0, min(size, FIRST_BYTES)))) is not None:
            raise FormatError("it is not a safetensors file", hint=told)
        raise CorruptError(f"a header of {pluralize(length, 'bytes')} cannot be in a file of {size}", offset=0)
    raw = fetch(8, length)
    text = decode_text(raw, "the header", at=8)
    if not text.startswith("{"):
        raise CorruptError("the header does not begin with '{'", offset=8)
    header = parse_json(text, "the header")
    note = header.pop("__metadata__", None)
    note = {} if note is None else note
    if type(note) is not dict or not set(map(type, note.values())) <= {str}:
        raise CorruptError("'__metadata__' in the header holds something other than text")
    # Other programs may have a note of this name, but not with one of these texts.
    if _INDEX not in note and note.get(_NOTE) not in (_NOTE_TEXT, DATA_NOTE):
        return _foreign(header, note, size, 8 + length)
    if note.get(_NOTE) == DATA_NOTE:
        raise FormatError("this file holds a part of a checkpoint", hint="pass the folder that it belongs to")
    return _ours(member(note, _INDEX, str, "'__metadata__' in the header"), size, raw)


def _ours(text: str, size: int, raw: bytes) -> Index:
    try:
        document = text.encode("utf-8")
    except UnicodeEncodeError:  # half of a pair of surrogates, which JSON can spell
        raise CorruptError("the index in the header is not text") from None
    index = parse_index(document, embedded=True)
    if not is_first_version(document) and any(map(index.metadata.__contains__, RESERVED)):
        raise CorruptError("the metadata has a member that is the file's own")
    for number, kind in enumerate(index.types):
        if (why := why_not_stored(kind)) is not None:
            raise CorruptError(f"type {number} of the leaves is {why}, which no safetensors file holds")
    if any(box is not None for box in index.chunks.box):
        raise CorruptError("an array lies there in parts, in the one file")
    file = index.files[0]
    if file.nbytes != size:
        ends = map(operator.add, index.chunks.offset, index.chunks.nbytes)
        lost = [format_chunk(index, chunk) for chunk, end in enumerate(ends) if end > size]
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        which = f": leaf {lost[0]}{more} cannot be whole" if lost else ""
        raise CorruptError(f"{pluralize(file.nbytes, 'bytes were')} written, {size} are there{which}", offset=size)
    if file.header != 8 + len(raw):
        raise CorruptError(f"the header has {pluralize(8 + len(raw), 'bytes')}, {file.header} were written", offset=0)
    note, rows = _single_note(index, document), rows_of_file(index, 0)
    wanted = frame(header_text(index.keys, index.types, index.leaf_types, rows, note), file.header)[8:]
    if wanted != raw:
        differing = (place for place, (one, other) in enumerate(zip(wanted, raw, strict=False)) if one != other)
        place = next(differing, min(len(wanted), len(raw)))
        raise CorruptError("the header is not the one that belongs to its index", offset=8 + place)
    return index


def _foreign(header: Mapping[str, Any], note: Mapping[str, str], size: int, base: int) -> Index:
    types: list[LeafType] = []
    # By the text of the shape: tuples of numbers can be made to collide.
    numbers: dict[tuple[str, str], tuple[int, int]] = {}
    leaf_types: list[int] = []
    offsets: list[int] = []
    sizes: list[int] = []
    for name, entry in header.items():
        what = f"the entry of {name[:200]!r} in the header"
        dtype, shape = _describe(entry, what)
        if (known := numbers.get((dtype, str(shape)))) is None:
            kind = LeafType(kind="jax", dtype=dtype, shape=check_shape(list(shape), dtype, what))
            known = numbers[dtype, str(shape)] = (len(types), leaf_bytes(kind))
            types.append(kind)
        start, stop = _range(entry, what)
        if stop - start != known[1]:
            raise CorruptError(
                f"{what}: {dtype} {list(shape)} takes {pluralize(known[1], 'bytes')}, it has {stop - start}"
            )
        leaf_types.append(known[0])
        offsets.append(base + start)
        sizes.append(known[1])
    check_hashes([kind.shape for kind in types], "the shapes in the header")
    names = tuple(header)
    if any(map(_SURROGATE.search, names)):
        raise CorruptError("a name in the header is not text: it holds half a surrogate pair")
    count, blocks = len(names), list(map(block_bytes, sizes))
    chunks = Chunks(
        leaf=list(range(count)), box=[None] * count, file=[0] * count, offset=offsets, nbytes=sizes, block=blocks
    )
    index = Index(
        attempt=_NO_ATTEMPT,
        structure=[Container(node="dict", keys=names), *([len(names)] if names else [])],
        keys=_keys(names),
        types=types,
        leaf_types=leaf_types,
        values={},
        chunks=chunks,
        files=[DataFile(name="", nbytes=size, header=base, digest=None)],
        metadata=note,
        verified=False,
    )
    check_chunks(index)
    return index


def _describe(entry: Any, what: str) -> tuple[str, tuple[int, ...]]:
    name, shape = member(entry, "dtype", str, what), member(entry, "shape", list, what)
    if not set(map(type, shape)) <= {int}:  # before anything looks it up: 1.0 and True are as good as 1 there
        raise CorruptError(f"{what}: its shape holds something other than whole numbers")
    if (dtype := _NAMES.get(name)) is not None:
        return dtype, tuple(shape)
    if name in _PACKED:
        raise UnsupportedError(f"{what} has the dtype {name}, several items to a byte, which numpy and jax cannot hold")
    raise UnsupportedError(f"{what} has the dtype {name[:60]!r}, which this version does not know")


def _range(entry: dict[str, Any], what: str) -> tuple[int, int]:
    offsets = member(entry, "data_offsets", list, what)
    match offsets:
        case [int(start), int(stop)] if 0 <= start <= stop < LIMIT and bool not in map(type, offsets):
            return start, stop
        case _:
            raise CorruptError(f"{what}: its data_offsets are not two bytes of the file")


def _keys(names: Sequence[str]) -> list[str]:
    """Return the names as key texts; where one is none, ``~`` is escaped in all of them."""
    are_keys = all(names) and not any(map(_NO_ESCAPE.search, names))
    return list(names) if are_keys else [name.replace("~", "~0") or "~" for name in names]
