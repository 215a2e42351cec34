"""The record of one save into a leaves directory: its tree, how its leaves lie there, and the checksums of all files.

From the record follow the index entries, every ``.zarray`` byte for byte, and the name and size of every chunk file.
``docs/spec/leaves.md`` is its specification.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from treering._format.index import LeafType, Token

if TYPE_CHECKING:
    from treering._codec.zarr import ZarrArray

__all__ = [
    "RECORD_VERSION",
    "UNMARKED",
    "Layout",
    "LeavesRecord",
    "arrays_of",
    "encode_record",
    "first_checksums",
    "parse_record",
    "stored_leaves",
]

RECORD_VERSION: Final = 1
"""Version of the record. It grows when a reader of the old version would read something wrong."""

UNMARKED: Final = "0" * 16
"""The attempt of a made up record: arrays of another writer, whose ``.zarray`` has no marker."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How an array is cut into chunk files; many leaves have the same."""

    chunks: tuple[int, ...]
    """Lengths of a chunk, at least 1 for each axis."""
    compressor: str | None = None
    """Canonical JSON of the compressor's configuration; None where the files hold plain bytes."""
    order: str = "C"
    """"F" only in another writer's arrays."""
    separator: str = "."
    """"/" only in another writer's arrays."""
    big_endian: bool = False
    """True only in another writer's arrays."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeavesRecord:
    """Everything that is known of one save: of the branch under one prefix, or of the tree without prefix."""

    prefix: str | None
    """The prefix as the user gave it."""
    attempt: str
    """16 hexadecimal digits, different for each save; ``UNMARKED`` where another writer made the arrays."""
    written: Mapping[str, Any]
    """Who wrote it: versions and time."""
    meshes: Sequence[str]
    """The meshes of its arrays, as text for people."""
    structure: Sequence[Token]
    """The containers around the leaves, in pre-order."""
    keys: Sequence[str]
    """Key text of each leaf, in the order of the structure, without the prefix."""
    types: Sequence[LeafType]
    """The different types of leaves."""
    leaf_types: Sequence[int]
    """Number of the type of each leaf."""
    values: Mapping[int, Any]
    """Leaf number -> its Python value, for leaves that do not lie in files."""
    folders: Sequence[str]
    """Folder of each stored leaf, in the order of the leaves. It follows from prefix and key, and is not written."""
    layouts: Sequence[Layout]
    """The different layouts."""
    leaf_layouts: Sequence[int]
    """Number of the layout of each stored leaf."""
    sizes: Sequence[int]
    """Bytes of each chunk file of the compressed leaves, leaf after leaf; those of the others follow from the chunks."""
    checksums: array[int]
    """Checksums of the blocks of the chunk files: leaf after leaf, chunk after chunk in C order of the grid."""


def encode_record(record: LeavesRecord) -> bytes:
    """Return the record as a document.

    Raises:
        Unsupported: ``written``, or a key or static field of the structure, has no form in it.
    """
    raise NotImplementedError


def parse_record(data: bytes) -> LeavesRecord:
    """Return the record that a document holds, with everything in it checked.

    Raises:
        Corrupt: it is damaged, or contradicts itself.
        Format: a newer version wrote it.
        Unsupported: it has a dtype that this version does not know.
    """
    raise NotImplementedError


def stored_leaves(record: LeavesRecord) -> list[int]:
    """Return the numbers of the leaves that lie in files."""
    raise NotImplementedError


def arrays_of(record: LeavesRecord) -> list[ZarrArray]:
    """Return what the ``.zarray`` of each stored leaf says; leaves of one type and layout share the object."""
    raise NotImplementedError


def first_checksums(record: LeavesRecord) -> list[int]:
    """Return where in ``checksums`` those of each stored leaf begin, and behind the last leaf how many there are.

    For a record without checksums (another writer's branch) all of them are 0.
    """
    raise NotImplementedError
