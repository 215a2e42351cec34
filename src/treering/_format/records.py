"""What a listing says of a file or checkpoint: its tree, with a record in place of every leaf that takes room."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

from treering._format.index import ARRAY_KINDS

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
class Place:
    """Where and how a leaves directory holds one leaf."""

    file: str | None
    """Its first chunk file, below the directory; None for an array without items."""

    chunks: int
    """How many chunk files it has."""

    chunk_shape: tuple[int, ...]
    """Shape of a full chunk."""

    compressor: str | None
    """Configuration of the compressor, a JSON text; None: raw."""

    verified: bool
    """Whether it has checksums; False where another program wrote it."""


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
