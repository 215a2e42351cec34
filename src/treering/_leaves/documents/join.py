r"""Records -> the ``Index`` that every verb goes by; and a record for a branch that another program wrote.

Such a branch is arrays in nested dicts, without checksums. The leaves that are no arrays stand in eformer's
``PREFIX_structure.json``, not in its index. Tree and values are pickles there, and nothing is unpickled. The keys of
the leaves say the structure. Of the values those are known whose bytes have one of a few fixed forms: None, truth
values, numbers and short texts.

Source: ``save_pytree`` of eformer 0.0.101; ``pickletools`` of Python for the forms.
"""

from __future__ import annotations

import base64
import binascii
import bisect
import dataclasses
import itertools
import re
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from treering._codec.documents import check_hashes, check_texts, decode_text, member, parse_json
from treering._codec.zarr import ZarrArray, chunk_box, chunk_bytes, chunk_count, chunk_name
from treering._format.index import MAX_LEVELS, Chunks, Container, DataFile, Index, LeafType, OpaqueLeaf, Token
from treering._format.leaf_values import check_shape
from treering._format.structure import key_text, nest_paths
from treering._leaves.documents.index import LEAVES_INDEX, Entry
from treering._leaves.documents.record import (
    UNMARKED,
    ChunkLayout,
    LeavesRecord,
    OpenBranch,
    arrays_of,
    first_checksums,
    parts_of_folder,
)
from treering._store.failures import naming_file
from treering._store.leaves_api import OpenLeaves
from treering._values.boxes import Box
from treering._values.checksums import block_bytes
from treering._values.human import pluralize
from treering._values.keys import escape_part, join_key
from treering.errors import CorruptError, DataFileMissingError, UnsupportedError

T_co = TypeVar("T_co", covariant=True)


class LazySequence(Sequence[T_co]):
    """Items that are made each time when they are asked for, so that ten thousand of them take no memory.

    Args:
        count: how many there are.
        make: makes the item of a number.

    Example:
        >>> squares = LazySequence(4, lambda number: number**2)
        >>> len(squares), squares[-1], squares[1:3]
        (4, 9, [1, 4])
    """

    def __init__(self, count: int, make: Callable[[int], T_co]) -> None:
        self._numbers = range(count)
        self._make = make

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, number: Any) -> Any:
        found = self._numbers[number]
        return self._make(found) if isinstance(found, int) else list(map(self._make, found))


# Rows of leaves without checksums, in all: their number is what a ``.zarray`` claims, and no table bears it out.
_MOST_UNCHECKED_ROWS: Final = 100_000


def join_records(records: Sequence[LeavesRecord], *, verified: bool) -> Index:
    """Return the records as one index.

    One record without prefix is its tree. Otherwise the tree is a dict: the keys of the tree without prefix, then a
    branch for each prefix. Where the tree without prefix is no dict, or has a key that is also a prefix, it is the
    branch ``""``.

    ``chunks`` has rows only for leaves whose chunk files are plain bytes and whole: one for each file, in C order of
    the grid. Row and file have the same number, ``file.name`` is the folder and the chunk's name, joined with ``/``.
    ``checksums`` are those of these rows; empty where not ``verified``. Of leaves without checksums that claim more
    than 100,000 chunks together, the last have no rows either.

    Args:
        records: of different prefixes.
        verified: whether all of them have checksums.
    """
    structure, heads = _join_structures(records)
    keys: list[str] = []
    types: dict[LeafType, int] = {}
    leaf_types: list[int] = []
    values: dict[int, Any] = {}
    rows = _Rows(verified=verified)
    for record, head in zip(records, heads, strict=True):
        first = len(keys)
        rows.add(record, first)
        keys.extend(_prepend(head, record.keys))
        numbers = [types.setdefault(kind, len(types)) for kind in record.types]
        leaf_types.extend(map(numbers.__getitem__, record.leaf_types))
        values.update({first + leaf: value for leaf, value in record.values.items()})
    # Of several saves, the one that says the latest time.
    written = max((each.written for each in records), key=lambda written: str(written.get("at", "")), default={})
    several = written.get("processes")
    return Index(
        attempt=records[0].attempt if records else UNMARKED,
        written=written,
        processes=several if type(several) is int and several > 1 else 1,
        meshes=list(dict.fromkeys(itertools.chain.from_iterable(record.meshes for record in records))),
        structure=structure,
        keys=keys,
        types=list(types),
        leaf_types=leaf_types,
        values=values,
        chunks=rows.chunks(),
        checksums=rows.checksums,
        files=rows.files(),
        metadata={record.prefix or "": dict(record.metadata) for record in records if record.metadata},
        verified=verified,
        structured=all(record.structured for record in records),
    )


def _join_structures(records: Sequence[LeavesRecord]) -> tuple[list[Token], list[str]]:
    """Return the containers around all leaves, and the key text in front of those of each record."""
    if len(records) == 1 and records[0].prefix is None:
        return list(records[0].structure), [""]
    names: list[Any] = []
    heads: list[str] = []
    tokens: list[Token] = []
    prefixes = {record.prefix for record in records}
    for record in records:
        root = record.structure[0]
        if (
            record.prefix is None
            and isinstance(root, Container)
            and root.node == "dict"
            and prefixes.isdisjoint(map(key_text, root.keys))
        ):
            names.extend(root.keys)
            heads.append("")
            tokens.extend(record.structure[1:])
        else:
            name = record.prefix or ""
            names.append(name)
            heads.append(escape_part(name) + "/")
            tokens.extend(record.structure)
    return [Container(node="dict", keys=tuple(names)), *tokens], heads


def _prepend(head: str, keys: Sequence[str]) -> list[str]:
    """Return key texts as they are below another text; the one of a bare array is that text, and ``~`` an empty one."""
    if not head:
        return list(keys)
    return [head[:-1] or "~"] if list(keys) == [""] else [head if key == "~" else head + key for key in keys]


class _Rows:
    """The rows of chunks as they are found, leaf after leaf."""

    def __init__(self, *, verified: bool) -> None:
        self.checksums: array[int] = array("Q")
        self._verified = verified
        self._files: dict[int, tuple[str, ZarrArray]] = {}
        self._leaf: list[int] = []
        self._box: list[Box | None] = []
        self._nbytes: list[int] = []
        self._block: list[int] = []
        self._room = _MOST_UNCHECKED_ROWS

    def add(self, record: LeavesRecord, first: int) -> None:
        """Add the rows of a record's plain leaves.

        Args:
            record: the record.
            first: number of its first leaf in the index.
        """
        checked = record.attempt != UNMARKED
        starts = first_checksums(record) if checked and self._verified else []
        arrays = arrays_of(record)
        most = None if checked else _MOST_UNCHECKED_ROWS
        known = {key: _describe_files(this, most) for key, this in {id(this): this for this in arrays}.items()}
        stored = zip(record.stored_leaves(), record.folders, arrays, strict=True)
        for number, (leaf, folder, this) in enumerate(stored):
            nbytes, boxes, block = known[id(this)]
            count = len(boxes)
            if not count or (not checked and count > self._room):
                continue
            self._room -= 0 if checked else count
            self._leaf += [first + leaf] * count
            self._box += boxes
            self._nbytes += [nbytes] * count
            self._block += [block] * count
            self._files[first + leaf] = folder, this
            if starts:
                self.checksums += record.checksums[starts[number] : starts[number + 1]]

    def files(self) -> LazySequence[DataFile]:
        """Return the chunk files; ten thousand of them are one column."""

        def make(row: int) -> DataFile:
            leaf = self._leaf[row]
            folder, this = self._files[leaf]
            name = f"{folder}/{chunk_name(this, row - bisect.bisect_left(self._leaf, leaf))}".removeprefix("/")
            return DataFile(name=name, nbytes=chunk_bytes(this), header=0, digest=None)

        return LazySequence(len(self._leaf), make)

    def chunks(self) -> Chunks:
        """Return the columns."""
        count = len(self._leaf)
        return Chunks(
            leaf=self._leaf,
            box=self._box,
            file=list(range(count)),
            offset=[0] * count,
            nbytes=self._nbytes,
            block=self._block,
        )


def _describe_files(this: ZarrArray, most: int | None) -> tuple[int, list[Box | None], int]:
    """Return size, boxes and block of the chunk files of a leaf; no boxes where they are not plain and whole."""
    count, nbytes = chunk_count(this), chunk_bytes(this)
    whole_chunks = not any(length % chunk for length, chunk in zip(this.shape, this.chunks, strict=True))
    boxes: list[Box | None] = []
    if this.plain and whole_chunks and (most is None or count <= most):
        boxes = [None] if count == 1 else [chunk_box(this, chunk) for chunk in range(count)]
    return nbytes, boxes, block_bytes(nbytes)


# ------------------------------------------------------------------------------------------- written by another program


class OtherLeaf(NamedTuple):
    """A leaf of a branch that is no array."""

    path: str
    """Where its folder would be."""
    type: LeafType
    """What it is."""
    value: Any
    """Its value."""


def foreign_record(
    prefix: str | None, entries: Sequence[Entry], arrays: Sequence[ZarrArray], others: Sequence[OtherLeaf] = ()
) -> LeavesRecord:
    """Return a made up record: nested dicts of jax arrays, in the order of the entries as far as dicts allow.

    Its attempt is ``UNMARKED``, it has no checksums, and `arrays_of` gives the arrays back in the order of its leaves.

    Args:
        prefix: the branch's.
        entries: of the branch.
        arrays: what the ``.zarray`` of each entry says.
        others: leaves that are no arrays.

    Raises:
        CorruptError: two entries have one folder, or one lies in the other: a leaf was lost when they were written.
        UnsupportedError: an array is larger than any memory, or keys are nested too deep.

    Example:
        >>> entries = [Entry("a/w", {}), Entry("b", {}), Entry("a/x", {})]
        >>> record = foreign_record(None, entries, [ZarrArray(shape=(2,), chunks=(2,), dtype="int8")] * 3)
        >>> record.keys, record.folders
        (['a/w', 'a/x', 'b'], ['a/w', 'a/x', 'b'])
    """
    listed = [*entries, *(Entry(other.path, {}) for other in others)]
    every = [parts_of_folder(one.path, prefix) if one.path else () for one in listed]
    if deep := [one.path for one, path in zip(listed, every, strict=True) if len(path) >= MAX_LEVELS]:
        raise UnsupportedError(f"the path {deep[0][:200]!r} is more than {MAX_LEVELS} folders deep")
    structure, found = nest_paths(every, lambda one, other: _clash_error(listed[one].path, listed[other].path))
    paths = [every[number] for number in found]
    check_hashes([this.shape for this in arrays], "the shapes of the arrays")
    check_hashes([this.chunks for this in arrays], "the chunks of the arrays")
    types: dict[LeafType, int] = {}
    layouts: dict[ChunkLayout, int] = {}
    leaf_types: list[int] = []
    leaf_layouts: list[int] = []
    known: dict[int, tuple[int, int]] = {}
    values: dict[int, Any] = {}
    for number, path in zip(found, paths, strict=True):
        if number >= len(arrays):
            other = others[number - len(arrays)]
            values[len(leaf_types)] = other.value
            leaf_types.append(types.setdefault(other.type, len(types)))
            continue
        this = arrays[number]
        if id(this) not in known:
            kind, layout = _describe(this, path)
            known[id(this)] = types.setdefault(kind, len(types)), layouts.setdefault(layout, len(layouts))
        leaf_types.append(known[id(this)][0])
        leaf_layouts.append(known[id(this)][1])
    return LeavesRecord(
        prefix=prefix,
        structure=structure,
        keys=list(map(join_key, paths)),
        types=list(types),
        leaf_types=leaf_types,
        values=values,
        folders=[entries[number].path for number in found if number < len(entries)],
        layouts=list(layouts),
        leaf_layouts=leaf_layouts,
    )


def _describe(this: ZarrArray, path: tuple[str, ...]) -> tuple[LeafType, ChunkLayout]:
    try:
        shape = check_shape(list(this.shape), this.dtype, "the array")
    except (CorruptError, UnsupportedError) as error:
        error.path = path
        raise
    layout = {field.name: getattr(this, field.name) for field in dataclasses.fields(ChunkLayout)}
    return LeafType(kind="jax", dtype=this.dtype, shape=shape), ChunkLayout(**layout)


def _clash_error(one: str, other: str) -> CorruptError:
    return CorruptError(
        f"{LEAVES_INDEX} lists an array in {one[:200] or '.'!r} and another one in {other[:200] or '.'!r} or below",
        hint="two keys were saved to one folder, and one of the arrays is lost: save them again under other keys",
    )


_LARGEST: Final = 64 << 20
_PICKLE: Final = re.compile(
    rb"\x80[\x04\x05](?:\x95.{8})?(?:\x8c(?P<size>.)(?P<text>.*)\x94|(?P<form>[NKMJG\x88\x89])(?P<data>.*))\.",
    re.DOTALL,
)
_CONSTANTS: Final = {b"N": ("none", None), b"\x88": ("bool", True), b"\x89": ("bool", False)}
_NUMBERS: Final = {b"K": ("int", "<B"), b"M": ("int", "<H"), b"J": ("int", "<i"), b"G": ("float", ">d")}


def add_structure(folder: OpenLeaves, branch: OpenBranch) -> OpenBranch:
    """Return a branch with the leaves that are no arrays, where another program's structure file lists them.

    A file that does not list the arrays of the index is one of another save, and says nothing of this one.

    Raises:
        CorruptError: the file is damaged.
        LinkRefusedError: it is a link.
        StoreError: the system refuses.
    """
    record = branch.record
    if branch.verified or record.prefix is None:
        return branch
    above, _, name = f"{record.prefix}_structure.json".rpartition("/")
    try:
        with folder.open(above, name, None) as file:
            if file.size > _LARGEST:
                raise CorruptError(f"{name!r} has {pluralize(file.size, 'bytes')}, more than any tree needs")
            data = file.read(0, file.size)
    except DataFileMissingError:
        return branch
    with naming_file(folder.path / above / name):
        document = parse_json(decode_text(data, name), name)
        if type(document) is not dict or document.get("format") != "pytree-structure":
            return branch
        if sorted(_texts(document, "array_relpaths")) != sorted(record.folders):
            return branch
        entries = [Entry(path, {}) for path in record.folders]
        made = foreign_record(record.prefix, entries, branch.arrays, _other_leaves(document))
        written = {"by": f"eformer {document.get('version')!s:.100}"}
        made = dataclasses.replace(made, written=written, metadata=member(document, "extras", dict, name))
    return dataclasses.replace(branch, record=made, arrays=arrays_of(made))


def _other_leaves(document: dict[str, Any]) -> list[OtherLeaf]:
    keys, mask = _texts(document, "leaf_keys_full"), member(document, "arr_mask", list, "it")
    payload = member(document, "nonarray_payload", dict, "it")
    if len(mask) != len(keys) or not all(type(one) is bool for one in mask):
        raise CorruptError(f"arr_mask does not say of {pluralize(len(keys), 'leaves')} which are arrays")
    others = []
    for number, key in enumerate(keys):
        if not mask[number]:
            kind, value = _read_pickle(member(payload, str(number), str, "nonarray_payload"))
            others.append(OtherLeaf(key.replace(".", "/"), LeafType(kind=kind), value))
    return others


def _texts(document: dict[str, Any], name: str) -> list[str]:
    return check_texts(member(document, name, list, "it"), name)


def _read_pickle(text: str) -> tuple[str, Any]:
    """Return kind and value of a leaf, if its bytes have one of the known forms; else what stands for it.

    Example:
        >>> _read_pickle("gAROLg=="), _read_pickle("gARLBy4=")
        (('none', None), ('int', 7))
        >>> _read_pickle("gARdlC4=")
        ('opaque', OpaqueLeaf(class_name='pickle', text='5 bytes, which treering does not unpickle'))
    """
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error:
        raise CorruptError(f"the text {text!r:.60} is not base64") from None
    if (found := _PICKLE.fullmatch(data)) is not None:
        form, bits = found["form"], found["data"]
        if form in _CONSTANTS and not bits:
            return _CONSTANTS[form]
        if form in _NUMBERS and len(bits) == struct.calcsize(_NUMBERS[form][1]):
            kind, layout = _NUMBERS[form]
            return kind, struct.unpack(layout, bits)[0]
        if form is None and len(found["text"]) == found["size"][0]:
            return "str", decode_text(found["text"], "a text")
    return "opaque", OpaqueLeaf("pickle", f"{pluralize(len(data), 'bytes')}, which treering does not unpickle")
