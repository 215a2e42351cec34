"""An index -> a ``Listing``: the tree of a checkpoint with records for leaves; numpy is not needed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from treering._codec.documents import raising_corrupt
from treering._codec.msgpack.scan import Scanner
from treering._format.index import ARRAY_KINDS, Container, Index, OpaqueLeaf, leaf_bytes
from treering._format.structure import assemble, zip_children
from treering._values.dtypes import Dtype
from treering.errors import FormatError

_COUNTED: Final = (ARRAY_KINDS | {"array"}) - {"numpy scalar"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeafRecord:
    """One leaf that was not read: what it is, how large, and where its bytes lie.

    Example:
        >>> LeafRecord(kind="jax", dtype="float32", shape=(2, 3), nbytes=24, offset=4096).is_array
        True
    """

    kind: str
    """In a checkpoint one of the kinds of its index: "jax", "numpy", "numpy scalar", "key" (a typed PRNG key), "str",
    "bytes", "bytearray" and so on; "array", "numpy scalar", "str" or "bytes" in a file that does not say more."""

    dtype: str | None
    """Name of the dtype of an array or numpy scalar, else None; for a key that of its data."""

    shape: tuple[int, ...] | None
    """Shape of an array or numpy scalar, else None; for a key that of its data."""

    nbytes: int
    """Bytes of the leaf's value, without its headers."""

    offset: int | None
    """Where the first of these bytes is in its file; None for a small Python value, which lies beside the names."""

    file: str | None = None
    """Name of the data file that holds the first of them; None where that is the very file that was listed."""

    parts: tuple[tuple[int, int], ...] = ()
    """First byte and length of each piece, where a msgpack file holds the leaf in several; else empty."""

    chunks: int = 1
    """In how many boxes a checkpoint holds it, in how many chunk files a leaves directory; perhaps 0."""

    grid: tuple[int, ...] | None = None
    """Into how many parts each axis was cut in a checkpoint of several processes; None elsewhere, and where the boxes
    are no grid."""

    processes: tuple[int, ...] = ()
    """The processes that wrote its boxes, where several wrote the checkpoint; else empty."""

    chunk_shape: tuple[int, ...] | None = None
    """Shape of a full chunk in a leaves directory; None elsewhere."""

    compressor: str | None = None
    """Configuration of its compressor in a leaves directory, a JSON text; None where there is none."""

    sharding: str | None = None
    """How it lay on devices when it was saved, as text for people; None where that is not known."""

    impl: str | None = None
    """Name of the implementation of a PRNG key, else None."""

    number: int | None = None
    """Its number in the index of its checkpoint or safetensors file."""

    value: Any = None
    """The value itself, where it is a small Python value."""

    @property
    def is_array(self) -> bool:
        """Whether it is an array: its elements count as parameters."""
        return self.kind in _COUNTED


class Named(dict[Any, Any]):
    """A branch that is an object with named children: a namedtuple, a dataclass, a module.

    Attributes:
        node: "namedtuple" or "other".
        class_name: module and qualified name of its class, as the file says it.
        static: fields that are no children, name and value.

    Example:
        >>> branch = Named({"count": 1}, node="namedtuple", class_name="optax.ScaleByAdamState")
        >>> branch["count"], branch.class_name
        (1, 'optax.ScaleByAdamState')
    """

    __slots__ = ("class_name", "node", "static")

    def __init__(
        self, children: Mapping[Any, Any], *, node: str, class_name: str | None, static: Sequence[tuple[str, Any]] = ()
    ) -> None:
        super().__init__(children)
        self.node = node
        self.class_name = class_name or node
        self.static = tuple(static)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file of a checkpoint."""

    name: str
    """Its name."""

    nbytes: int
    """Its size."""

    process: int | None = None
    """Which process wrote it, where several wrote the checkpoint; else None."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessShare:
    """What one of several processes wrote."""

    process: int
    """Its number."""

    files: int
    """How many data files; perhaps none."""

    nbytes: int
    """Their bytes together."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A file or checkpoint seen through its headers."""

    form: str
    """"checkpoint", "leaves", "safetensors", "msgpack" or "msgpack in gzip"."""

    file_bytes: int
    """Size of the file, or of what its gzip form unpacks to; of a checkpoint or leaves directory its files together."""

    root: Any
    """Nested dicts, lists and tuples as the file has them, in file order; ``Named`` for other nodes. Leaves:
    ``LeafRecord`` for arrays, numpy scalars and long text; None, bool, int, float, complex, ``msgpack.Timestamp``,
    short str and bytes are there themselves, so that a list of a million numbers stays small."""

    files: Sequence[FileRecord] = ()
    """The files of a checkpoint, the index of a leaves directory; empty where there is but the one."""

    written: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Who wrote it, and when, as far as the file says so."""

    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What the user wrote beside the tree."""

    meshes: Sequence[str] = ()
    """The meshes of its arrays, as text for people."""

    processes: int = 1
    """How many processes wrote it."""

    verified: bool = False
    """Whether it holds checksums of its arrays, of all of them."""

    prefixes: Sequence[str] = ()
    """Prefixes in a leaves directory, each a branch of ``root``; "" for leaves without one."""

    unverified: Sequence[str] = ()
    """Those of ``prefixes`` whose leaves another program wrote, without checksums."""

    notes: Sequence[str] = ()
    """What else people should know about it, a sentence each."""

    structured: bool = False
    """Whether it keeps the kinds of its containers and leaves; else they are what the form makes of them."""

    part: Sequence[str] = ()
    """The globs that kept its leaves, where others of the tree were left out."""

    @property
    def shares(self) -> tuple[ProcessShare, ...]:
        """What each process wrote, in their order; empty where it was one, or where the files do not say.

        Example:
            >>> files = [FileRecord(name="a", nbytes=9, process=0), FileRecord(name="b", nbytes=5, process=1)]
            >>> [share.nbytes for share in Listing(form="checkpoint", file_bytes=14, root={}, files=files).shares]
            [9, 5]
        """
        of: dict[int, list[int]] = {}
        for file in self.files:
            if file.process is not None:
                of.setdefault(file.process, []).append(file.nbytes)
        return tuple(ProcessShare(process=each, files=len(of[each]), nbytes=sum(of[each])) for each in sorted(of))


UNKNOWN_KIND: Final = "array"
"""The kind of an array of another writer, who does not say whether it was jax's or numpy's."""
_TEXT_KINDS: Final = frozenset({"str", "bytes", "bytearray"})
_SHORT_TEXT: Final = 256
_SHOWN_GLOBS: Final = 5


def list_index(
    index: Index, *, form: str, files: Sequence[FileRecord], file_bytes: int, leaves: Iterable[Any] | None = None
) -> Listing:
    """Return what an index says, as a listing.

    Args:
        index: a parsed index, or what a foreign safetensors header or leaves directory was read as.
        form: "checkpoint", "leaves" or "safetensors".
        files: the files that are shown.
        file_bytes: their bytes together.
        leaves: what is shown of each leaf; None: `iter_leaves`.

    Raises:
        CorruptError: the structure and the leaves do not fit together.
    """
    with raising_corrupt(FormatError):
        root = assemble(index.structure, list(iter_leaves(index) if leaves is None else leaves), _node)
    return Listing(
        form=form,
        file_bytes=file_bytes,
        root=root,
        files=files,
        written=index.written,
        metadata=index.metadata,
        meshes=index.meshes,
        processes=index.processes,
        verified=index.verified,
        structured=index.is_exact,
        part=index.part,
    )


def describe_part(part: Sequence[str]) -> str:
    """Return for people the argument that kept the leaves of a part.

    Example:
        >>> describe_part(["**/lora_a", "**/lora_b"])
        "only=['**/lora_a', '**/lora_b']"
    """
    more = f", and {len(part) - _SHOWN_GLOBS} more" if len(part) > _SHOWN_GLOBS else ""
    shown = ", ".join(f"{glob!r:.100}" for glob in part[:_SHOWN_GLOBS])
    return f"only={shown}" if len(part) == 1 else f"only=[{shown}{more}]"


def _node(head: Container, children: list[Any]) -> Any:
    if head.node in ("list", "tuple"):
        return children if head.node == "list" else tuple(children)
    named = zip_children(head.keys, children)
    return (
        named if head.node == "dict" else Named(named, node=head.node, class_name=head.class_name, static=head.static)
    )


def iter_leaves(index: Index) -> Iterator[Any]:
    """Walk through the leaves: records of those that lie in files, the other values themselves."""
    chunks, files = index.chunks, index.files
    sizes = [leaf_bytes(kind) for kind in index.types]
    # A file of another writer does not say whether its arrays were jax's or numpy's.
    is_said = [index.verified or kind.kind in _TEXT_KINDS for kind in index.types]
    at, count = 0, len(chunks)
    owner = chunks.leaf
    # In a leaves directory nobody notes who wrote which chunk.
    several = index.processes > 1 and len(index.files) > 0 and index.files[0].process is not None
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    for leaf, number in enumerate(index.leaf_types):
        kind = index.types[number]
        first = at
        while at < count and owner[at] == leaf:
            at += 1
        if not kind.stored:
            value = index.values.get(leaf)
            yield value if kind.kind != "opaque" or isinstance(value, OpaqueLeaf) else OpaqueLeaf("", str(value))
            continue
        is_text = kind.kind in _TEXT_KINDS
        rows = range(first, at)
        yield LeafRecord(
            kind=kind.kind if is_said[number] else UNKNOWN_KIND,
            dtype=None if is_text else kind.dtype,
            shape=None if is_text else kind.shape,
            nbytes=sizes[number],
            offset=chunks.offset[first] if first < at else None,
            file=files[chunks.file[first]].name or None if first < at else None,
            chunks=len(rows),
            grid=_grid(index, rows) if several else None,
            processes=_writers(index, rows, known) if several else (),
            sharding=kind.sharding,
            impl=kind.impl,
            number=leaf,
        )


def _grid(index: Index, rows: Sequence[int]) -> tuple[int, ...] | None:
    """Return into how many parts each axis of a leaf is cut; None where its chunks are no grid, or but one."""
    if len(rows) < 2:  # noqa: PLR2004 - one chunk, or none
        return None
    grid = tuple(len(set(sides)) for sides in zip(*map(index.box_of, rows), strict=True))
    return grid if math.prod(grid) == len(rows) else None


def _writers(index: Index, rows: Sequence[int], known: dict[tuple[int, ...], tuple[int, ...]]) -> tuple[int, ...]:
    """Return the processes that wrote the chunks of a leaf; thousands of leaves share a few tuples."""
    found = {index.files[index.chunks.file[row]].process for row in rows}
    writers = tuple(sorted(process for process in found if process is not None))
    return known.setdefault(writers, writers)


class _Records:
    """Leaves as records."""

    def prepare(self, dtype: Dtype) -> Dtype:
        return dtype

    def array(self, shape: tuple[int, ...], dtype: Dtype, offset: int, _data: bytes, _at: int) -> LeafRecord:
        return _array_record("array", shape, dtype, offset)

    def scalar(self, shape: tuple[int, ...], dtype: Dtype, offset: int, _data: bytes) -> LeafRecord:
        return _array_record("numpy scalar", shape, dtype, offset)

    def join_chunks(self, shape: tuple[int, ...], parts: list[LeafRecord]) -> LeafRecord:
        places = tuple((part.offset or 0, part.nbytes) for part in parts)
        return dataclasses.replace(parts[0], shape=shape, nbytes=sum(part.nbytes for part in parts), parts=places)

    def blob(self, read: Callable[[], bytes], offset: int, nbytes: int, is_text: bool) -> Any:
        if nbytes <= _SHORT_TEXT:
            return read().decode() if is_text else read()
        return LeafRecord(kind="str" if is_text else "bytes", dtype=None, shape=None, nbytes=nbytes, offset=offset)


def _array_record(kind: str, shape: tuple[int, ...], dtype: Dtype, offset: int) -> LeafRecord:
    nbytes = dtype.itemsize * math.prod(shape)
    return LeafRecord(kind=kind, dtype=dtype.name, shape=shape, nbytes=nbytes, offset=offset)


def list_msgpack(first: bytes, size: int, fetch: Callable[[int, int], bytes]) -> Listing:
    r"""Return what the headers of a msgpack file say.

    Args:
        first: the bytes at its start.
        size: bytes in all.
        fetch: ``fetch(offset, n)`` returns ``n`` bytes.

    Raises:
        CorruptError, FormatError: as reading the file would.

    Example:
        >>> data = b"\x81\xa1a\x01"
        >>> list_msgpack(data, len(data), lambda offset, n: data[offset : offset + n]).root
        {'a': 1}
    """
    return Listing(form="msgpack", file_bytes=size, root=Scanner(first, size, fetch, _Records()).run())
