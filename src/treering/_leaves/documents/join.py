"""Records -> the ``Index`` that every verb goes by."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, TypeVar, overload

from treering._codec.zarr import ZarrArray, chunk_box, chunk_bytes, chunk_count, chunk_name
from treering._format.index import Chunks, Container, DataFile, Index, LeafType, Token
from treering._format.structure import key_text
from treering._leaves.documents.record import UNMARKED, LeavesRecord, arrays_of, first_checksums, stored_leaves
from treering._values.boxes import Box
from treering._values.checksums import block_bytes
from treering._values.keys import escape_part

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

    @overload
    def __getitem__(self, number: int) -> T_co: ...
    @overload
    def __getitem__(self, number: slice) -> list[T_co]: ...
    def __getitem__(self, number: int | slice) -> T_co | list[T_co]:
        found = self._numbers[number]
        return self._make(found) if isinstance(found, int) else list(map(self._make, found))


# Rows of leaves without checksums, in all: their number is what a ``.zarray`` claims, and no table bears it out.
_MOST_UNCHECKED_ROWS: Final = 100_000

_Described: TypeAlias = tuple[int, list[Box | None], int]
"""Size, boxes and block of the chunk files of one array."""


def list_chunk_files(
    folders: Sequence[str], arrays: Sequence[ZarrArray], firsts: Sequence[int], leaves: Sequence[int]
) -> LazySequence[DataFile]:
    """Return the chunk files of plain leaves; ten thousand of them are two columns.

    Args:
        folders: of each leaf that has rows.
        arrays: what the ``.zarray`` of each says.
        firsts: number of each leaf's first row, and behind the last leaf how many rows there are.
        leaves: which of the leaves each row belongs to.

    Example:
        >>> files = list_chunk_files(["a/w"], [ZarrArray(shape=(4,), chunks=(2,), dtype="int8")], [0, 2], [0, 0])
        >>> len(files), files[1].name, files[1].nbytes
        (2, 'a/w/1', 2)
    """

    def make(row: int) -> DataFile:
        leaf = leaves[row]
        name = f"{folders[leaf]}/{chunk_name(arrays[leaf], row - firsts[leaf])}".removeprefix("/")
        return DataFile(name=name, nbytes=chunk_bytes(arrays[leaf]), header=0, digest=None)

    return LazySequence(len(leaves), make)


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
        files=list_chunk_files(rows.folders, rows.arrays, rows.firsts, rows.owners),
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
        self.folders: list[str] = []
        self.arrays: list[ZarrArray] = []
        self.firsts: list[int] = [0]
        self.owners: list[int] = []
        self.checksums: array[int] = array("Q")
        self._verified = verified
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
        known = {key: _describe(this, most) for key, this in {id(this): this for this in arrays}.items()}
        found = [known[id(this)] for this in arrays]
        leaves = [first + leaf for leaf in stored_leaves(record)]
        if checked and all(len(boxes) == 1 for _, boxes, _ in known.values()):
            self._add_single(leaves, record.folders, arrays, found)
            if starts:
                self.checksums += record.checksums
            return
        for number, (nbytes, boxes, block) in enumerate(found):
            count = len(boxes)
            if not count or (not checked and count > self._room):
                continue
            self._room -= 0 if checked else count
            self._leaf += [leaves[number]] * count
            self._box += boxes
            self._nbytes += [nbytes] * count
            self._block += [block] * count
            self.owners += [len(self.folders)] * count
            self.firsts.append(self.firsts[-1] + count)
            self.folders.append(record.folders[number])
            self.arrays.append(arrays[number])
            if starts:
                self.checksums += record.checksums[starts[number] : starts[number + 1]]

    def _add_single(
        self, leaves: list[int], folders: Sequence[str], arrays: Sequence[ZarrArray], found: Sequence[_Described]
    ) -> None:
        """Add leaves that have one chunk each, as thousands of small ones have, by columns."""
        self._leaf += leaves
        self._box += [None] * len(leaves)
        self._nbytes += [nbytes for nbytes, _, _ in found]
        self._block += [block for _, _, block in found]
        self.owners += range(len(self.folders), len(self.folders) + len(leaves))
        last = self.firsts[-1]
        self.firsts += range(last + 1, last + 1 + len(leaves))
        self.folders += folders
        self.arrays += arrays

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


def _describe(this: ZarrArray, most: int | None) -> _Described:
    """Return size, boxes and block of the chunk files of a leaf; no boxes where they are not plain and whole."""
    count, nbytes = chunk_count(this), chunk_bytes(this)
    whole_chunks = not any(length % chunk for length, chunk in zip(this.shape, this.chunks, strict=True))
    boxes: list[Box | None] = []
    if this.plain and whole_chunks and (most is None or count <= most):
        boxes = [None] if count == 1 else [chunk_box(this, chunk) for chunk in range(count)]
    return nbytes, boxes, block_bytes(nbytes)
