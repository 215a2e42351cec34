"""What a checkpoint holds and where: the meaning of ``treering.json``, in columns.

A checkpoint of 10,000 leaves is a handful of lists here, not 10,000 objects. ``docs/spec/checkpoint.md`` says how it
lies on disk. Blocks say which checksums belong to which chunk, and a digest binds a data file's header to them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from treering._codec.key_document import Superseded
from treering._values.boxes import Box, text_of, whole
from treering._values.checksums import SMALLEST_BLOCK, block_checksums, block_count, digest, pack_checksums
from treering._values.dtypes import itemsize_of
from treering._values.human import pluralize
from treering.errors import CorruptError

ARRAY_KINDS: Final = frozenset({"jax", "numpy", "numpy scalar", "key"})
"""Kinds of leaves that are arrays; "key" is a typed PRNG key, stored as its uint32 data."""

PYTHON_KINDS: Final = frozenset({"none", "bool", "int", "float", "complex", "str", "bytes", "bytearray", "opaque"})
"""Kinds of leaves whose value is a Python object."""

LARGE_VALUE: Final = 4096
"""A str, bytes or bytearray of more bytes than this lies in a data file, as uint8 items."""

LIMIT: Final = 1 << 63
"""Sizes, places and numbers in documents are below it."""

DIGEST_BYTES: Final = 16
"""Bytes of the digest of a chunk, where an index has these."""

MAX_LEVELS: Final = 1024
"""Containers inside containers, at most."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeafType:
    """What many leaves have in common."""

    kind: str
    """One of ``ARRAY_KINDS`` or ``PYTHON_KINDS``."""
    dtype: str | None = None
    """Name of the dtype of what lies in the files; None where nothing does."""
    shape: tuple[int, ...] | None = None
    """Shape of what lies in the files; None where nothing does."""
    sharding: str | None = None
    """How the array lay on devices when it was saved, as text for people."""
    impl: str | None = None
    """Name of the PRNG implementation of a key."""

    @property
    def stored(self) -> bool:
        """Whether the leaf's bytes lie in data files."""
        return self.dtype is not None


@dataclasses.dataclass(frozen=True, slots=True)
class OpaqueLeaf:
    """A leaf that cannot be stored, such as an activation function: its class and its text stand for it."""

    class_name: str
    """Module and qualified name of its class."""
    text: str
    """Its own name, or its repr without addresses."""
    digest: str | None = dataclasses.field(default=None, compare=False, repr=False)
    """Digest of all of it; None where it has no canonical form."""
    left_out: str = dataclasses.field(default="", compare=False, repr=False)
    """What in it takes no part in its digest, or why it has none; files do not hold this."""


@dataclasses.dataclass(frozen=True, slots=True)
class ForeignKey:
    """A dict key or static field of a class that files do not hold; ``like`` gives the real one."""

    class_name: str
    """Module and qualified name of its class."""
    text: str
    """Its text, without addresses."""
    digest: str | None = dataclasses.field(default=None, compare=False, repr=False)
    """Digest of all of a static field; None for keys, and where it has no canonical form."""
    left_out: str = dataclasses.field(default="", compare=False, repr=False)
    """What in it takes no part in its digest, or why it has none; files do not hold this."""

    def __str__(self) -> str:
        return self.text


def holds_text(value: object) -> bool:
    """Tell whether a key or static field is the text of an object, or a tuple that has one in it.

    Example:
        >>> holds_text((1, (ForeignKey("m.C", "C()"),))), holds_text((1, "C()"))
        (True, False)
    """
    return type(value) is ForeignKey or (type(value) is tuple and any(map(holds_text, value)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """The head of a container in the structure; its children follow it."""

    node: str
    """"dict", "list", "tuple", "namedtuple" or "other"."""
    keys: tuple[Any, ...]
    """The keys of a dict, of whatever type; the field names of a namedtuple or other node; 0 to n-1 for a sequence."""
    class_name: str | None = None
    """Module and qualified name of a namedtuple's or other node's class."""
    static: tuple[tuple[str, Any], ...] = ()
    """Fields of an other node that are no children: name and value (str, int, bool, None, float, bytes, a tuple of
    these, or a ``ForeignKey`` that has only its text)."""
    thinned: bool = dataclasses.field(default=False, repr=False)
    """Whether children were left out, in a part of a tree; without ``like`` it comes back as a dict."""


Token: TypeAlias = int | Container
"""A piece of the structure in pre-order: a container whose children follow, or how many leaves come next."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """Where the bytes of the leaves lie: one row for each box of a leaf, in columns of equal length."""

    leaf: Sequence[int]
    """Number of the leaf."""
    box: Sequence[Box | None]
    """Which box of the leaf; None for the whole of it."""
    file: Sequence[int]
    """Number of the data file."""
    offset: Sequence[int]
    """First byte in that file."""
    nbytes: Sequence[int]
    """How many bytes: the box in C order, little endian."""
    block: Sequence[int]
    """Bytes of a checksummed block."""
    _of_files: dict[int, Sequence[int]] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)
    """The rows of each file, once somebody asked: of a thousand files in one look at the columns."""
    _first_blocks: list[int] = dataclasses.field(default_factory=list, init=False, repr=False, compare=False)
    """What `first_blocks` returns, once somebody asked."""

    def __len__(self) -> int:
        return len(self.leaf)

    def first_blocks(self) -> Sequence[int]:
        """Return the number of each chunk's first checksum, and behind the last chunk how many there are.

        Example:
            >>> rows = dict(leaf=[0, 1], box=[None] * 2, file=[0] * 2, offset=[4096, 74096], block=[65536] * 2)
            >>> Chunks(**rows, nbytes=[70000, 4]).first_blocks()
            [0, 2, 3]
        """
        if not self._first_blocks:
            sizes = set(self.nbytes)
            if sizes and min(sizes) > 0 and max(sizes) <= SMALLEST_BLOCK:
                starts: Iterable[int] = range(len(self.nbytes) + 1)  # one block each, as small arrays have it
            else:
                starts = itertools.accumulate(map(block_count, self.nbytes, self.block), initial=0)
            self._first_blocks[:] = list(starts)  # at once, for other threads and after an interrupt
        return self._first_blocks

    def of_file(self, file: int) -> Sequence[int]:
        """Return the numbers of the rows of one file, in the order in which they lie there; a range, if it has all.

        Example:
            >>> rows = dict(leaf=[0, 1, 2], box=[None] * 3, offset=[68, 0, 0], nbytes=[4, 4, 64], block=[65536] * 3)
            >>> Chunks(**rows, file=[1, 0, 1]).of_file(1)
            [2, 0]
        """
        if not self._of_files and self.file:
            offset, nbytes = self.offset, self.nbytes
            if len(set(self.file)) == 1 and all(map(operator.lt, offset, itertools.islice(offset, 1, None))):
                self._of_files[self.file[0]] = range(len(self.file))
                return self._of_files.get(file, ())
            found: dict[int, list[int]] = {}
            for number, place in enumerate(self.file):
                found.setdefault(place, []).append(number)
            # Empty arrays lie where the next one starts; among themselves they keep their order.
            key = offset.__getitem__ if all(nbytes) else lambda row: 2 * offset[row] + (nbytes[row] > 0)
            for rows in found.values():
                rows.sort(key=key)
            self._of_files.update(found)
        return self._of_files.get(file, ())


NO_CHUNKS: Final = Chunks(leaf=(), box=(), file=(), offset=(), nbytes=(), block=())
"""Those of a tree whose arrays lie in no data files."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One file of array bytes, a valid safetensors file."""

    name: str
    """Its name in the checkpoint's folder; empty for the very file that holds this index."""
    nbytes: int
    """Its size."""
    header: int
    """Where its data starts."""
    digest: str | None
    """Digest of its header followed by the checksums of its blocks in file order; None for the file itself."""
    process: int | None = None
    """Which process wrote it; None where one process wrote everything."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TreeColumns:
    """A tree as documents hold it: containers, leaves and their types in columns, and the values in no file."""

    structure: Sequence[Token]
    """The containers around the leaves, in pre-order."""
    keys: Sequence[str]
    """Key text of each leaf, in the order of the structure."""
    types: Sequence[LeafType]
    """The different types of leaves."""
    leaf_types: Sequence[int]
    """Number of the type of each leaf."""
    values: Mapping[int, Any]
    """Leaf number -> its Python value, for leaves that do not lie in files; ``OpaqueLeaf`` for opaque ones."""

    def type_of(self, leaf: int) -> LeafType:
        """Return the type of one leaf."""
        return self.types[self.leaf_types[leaf]]

    def stored_leaves(self) -> list[int]:
        """Return the numbers of the leaves that lie in files, in their order.

        Example:
            >>> types = [LeafType(kind="int"), LeafType(kind="jax", dtype="int8", shape=(2,))]
            >>> columns = {"structure": [3], "keys": ["a", "b", "c"], "types": types, "values": {1: 5}}
            >>> TreeColumns(**columns, leaf_types=[1, 0, 1]).stored_leaves()
            [0, 2]
        """
        stored = [kind.stored for kind in self.types]
        if all(stored):
            return list(range(len(self.leaf_types)))
        return [leaf for leaf, number in enumerate(self.leaf_types) if stored[number]]

    def columns(self) -> dict[str, Any]:
        """Return the columns of the tree by name, for what has them too."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(TreeColumns)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Index(TreeColumns):
    """Everything that is known of a checkpoint without reading an array."""

    attempt: str
    """16 hexadecimal digits, different for each save."""
    written: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Who wrote it: versions and time."""
    processes: int = 1
    """How many processes wrote it."""
    meshes: Sequence[str] = ()
    """The meshes of its arrays, as text for people."""
    chunks: Chunks = NO_CHUNKS
    """Where the other leaves lie; all chunks of a leaf follow each other, in the order of the leaves."""
    checksums: array[int] = dataclasses.field(default_factory=lambda: array("Q"))
    """Checksums of the blocks, chunk after chunk."""
    files: Sequence[DataFile] = ()
    """The data files."""
    replaces: Sequence[str] = ()
    """Data files that this commit superseded; they may still lie there."""
    superseded: Sequence[Superseded] = ()
    """Which of them wait for readers; only where the store keeps superseded data for a grace."""
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What the user wrote beside the tree."""
    part: tuple[str, ...] = ()
    """The globs that kept its leaves, where others of the tree were left out; nothing where all of it was saved."""
    origin: Mapping[str, Any] | None = None
    """Of a copy: the path and the attempt that it was made of."""
    verified: bool = True
    """False for a file of another writer, which has no checksums: then ``checksums`` is empty."""
    structured: bool = True
    """False where its containers are those of another form, which did not have the tree's own."""
    digests: bytes = b""
    """A digest of 16 bytes for each chunk, by which a later save finds what is unchanged; empty where none is."""
    saves: int = 0
    """How many saves in a row have shared data files, this one too."""
    gapped: bool = False
    """Whether bytes of its data files may belong to no leaf: such a file is shared with an older checkpoint."""

    @property
    def is_exact(self) -> bool:
        """Whether containers and kinds of leaves are those that were saved."""
        return self.verified and self.structured

    def box_of(self, chunk: int) -> Box:
        """Return which box of its leaf a chunk holds."""
        box = self.chunks.box[chunk]
        return box if box is not None else whole(self.type_of(self.chunks.leaf[chunk]).shape or ())


DAMAGE_HINT: Final = "use another copy; `treering verify` lists all damage"
Piece: TypeAlias = tuple[int, int, int]
"""Chunk, and where whole blocks of it start and stop in it."""


def leaf_bytes(leaf_type: LeafType) -> int:
    """Return how many bytes a leaf of this type takes in the files, 0 where it takes none.

    Example:
        >>> leaf_bytes(LeafType(kind="jax", dtype="bfloat16", shape=(4, 8)))
        64
    """
    return itemsize_of(leaf_type.dtype) * math.prod(leaf_type.shape or ())


def file_digest(index: Index, file: int, header: bytes | Iterable[bytes]) -> str:
    """Return the digest of a data file: over its header, then the checksums of its blocks as they lie in it.

    Args:
        index: chunks and checksums are taken from it.
        file: number of the file.
        header: the file's bytes before its data, whole or in pieces.
    """
    starts, table, rows = index.chunks.first_blocks(), index.checksums, index.chunks.of_file(file)
    if rows == range(len(index.chunks)):
        in_order = table
    elif starts[-1] == len(index.chunks) and all(index.chunks.nbytes):  # one for each
        sums = table.tolist()
        in_order = array("Q", [sums[chunk] for chunk in rows])
    else:
        in_order = array("Q")
        for chunk in rows:
            in_order.extend(table[starts[chunk] : starts[chunk + 1]])
    pieces = (header,) if isinstance(header, bytes) else header
    return digest(itertools.chain(pieces, (pack_checksums(in_order),)))


def sign_files(index: Index, headers: Sequence[bytes]) -> Index:
    """Return the index with the digest of each data file that has none yet, given their headers."""
    files = [
        file if file.digest is not None else dataclasses.replace(file, digest=file_digest(index, number, header))
        for number, (file, header) in enumerate(zip(index.files, headers, strict=True))
    ]
    return dataclasses.replace(index, files=files)


def span_range(index: Index, span: Sequence[Piece]) -> tuple[int, int]:
    """Return where a stretch of a data file begins there, and how many bytes it has."""
    (first, start, _), (last, _, stop) = span[0], span[-1]
    begin = index.chunks.offset[first] + start
    return begin, index.chunks.offset[last] + stop - begin


def damaged_pieces(
    index: Index, starts: Sequence[int], span: Sequence[Piece], data: memoryview
) -> Iterator[tuple[Piece, array[int], array[int]]]:
    """Yield the pieces of a stretch whose bytes are not those that were saved: the checksums found, and the right ones.

    Args:
        index: the tree.
        starts: what `Chunks.first_blocks` says of it.
        span: the stretch.
        data: its bytes.
    """
    chunks, (begin, _) = index.chunks, span_range(index, span)
    for chunk, start, stop in span:
        at, size = chunks.offset[chunk] - begin, chunks.block[chunk]
        found = block_checksums(data[at + start : at + stop], size)
        number = starts[chunk] + start // size
        wanted = index.checksums[number : number + len(found)]
        if found != wanted:
            yield (chunk, start, stop), found, wanted


def format_chunk(index: Index, chunk: int) -> str:
    """Return the key of a chunk's leaf for people, with the box where the chunk is a part of it."""
    key = index.keys[index.chunks.leaf[chunk]]
    box = index.chunks.box[chunk]
    return repr(key) if box is None else f"{key!r}[{text_of(box)}]"


def damage_error(index: Index, chunk: int, block: int, found: int) -> CorruptError:
    """Return the error for a block whose bytes are not those that were saved.

    Args:
        index: the checkpoint's.
        chunk: number of the chunk.
        block: number of the block in that chunk.
        found: the checksum of the bytes that are there.
    """
    chunks = index.chunks
    size = chunks.block[chunk]
    start = chunks.offset[chunk] + block * size
    stop = min(start + size, chunks.offset[chunk] + chunks.nbytes[chunk])
    wanted = index.checksums[chunks.first_blocks()[chunk] + block]
    name = index.files[chunks.file[chunk]].name or "the file"
    damaged, sums = f"is damaged: bytes {start} to {stop} of {name}", f"{found:016x} instead of {wanted:016x}"
    return CorruptError(f"leaf {format_chunk(index, chunk)} {damaged} have the checksum {sums}", hint=DAMAGE_HINT)


def describe_size(found: int, wanted: int) -> tuple[tuple[int, int], str] | None:
    """Say how the size of a file differs from the one that was written, and which bytes that concerns.

    Example:
        >>> describe_size(3, 5)
        ((3, 5), 'is cut short: 5 bytes were written, 3 are there')
    """
    if found == wanted:
        return None
    how = "cut short" if found < wanted else "too long"
    problem = f"is {how}: {pluralize(wanted, 'bytes were')} written, {found} are there"
    return (min(found, wanted), max(found, wanted)), problem


def describe_lost(index: Index, file: int) -> str:
    """Say which leaves lie in a data file, as the end of a part of a sentence; nothing where none do."""
    chunks = index.chunks
    if not (lost := list(dict.fromkeys(chunks.leaf[chunk] for chunk in chunks.of_file(file)))):
        return ""
    more = f" and {pluralize(len(lost) - 1, 'more leaves')}" if len(lost) > 1 else ""
    return f", and with it {index.keys[lost[0]]!r:.200}{more}"
