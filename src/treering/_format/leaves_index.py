"""``tensorstore_index.json``: the branches of a leaves directory, and back. ``docs/spec/leaves.md`` specifies it.

It is eformer's index with one more member, ``treering``, which holds the record of each branch that we wrote. What is
not understood stays as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from treering._format.leaves_record import LeavesRecord

__all__ = [
    "LEAVES_INDEX",
    "Branch",
    "Entry",
    "LeavesIndex",
    "encode_leaves_index",
    "entries_of",
    "parse_leaves_index",
    "record_of",
]

LEAVES_INDEX: Final = "tensorstore_index.json"
"""Name of the document in a leaves directory."""


class Entry(NamedTuple):
    """One array of a branch."""

    path: str
    """Its folder, relative to the directory; ``.`` where another writer put an array into the directory itself."""
    document: Mapping[str, Any]
    """The whole entry, members that are unknown among them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """What the index says of one prefix, or of the tree without prefix."""

    prefix: str | None
    """The prefix as it was given, None for the tree without one."""
    entries: Sequence[Entry]
    """Its arrays, in the order of the leaves."""
    record: bytes | None
    """The record, unread; None where another program wrote the branch."""
    moving: tuple[str, ...] | None
    """While staged folders are not moved: the folders of leaves that this save replaces; else None."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeavesIndex:
    """All branches of a leaves directory."""

    branches: Mapping[str | None, Branch]
    """Prefix -> branch, in the order of the document, the one without prefix last."""
    document: Mapping[str, Any]
    """The document as it was parsed, so that members that are unknown stay."""


def parse_leaves_index(data: bytes) -> LeavesIndex:
    """Return the branches of an index, whichever program and version wrote it.

    The records in it are not read; `record_of` does that.

    Raises:
        Corrupt: it is no JSON, an entry leads out of the directory, or our own member in it is damaged.
        Format: it is the index of another format.
    """
    raise NotImplementedError


def encode_leaves_index(index: LeavesIndex) -> bytes:
    """Return the document: ``branches`` as they are, and of ``document`` all members that are not about branches."""
    raise NotImplementedError


def entries_of(record: LeavesRecord) -> list[dict[str, Any]]:
    """Return what the index has to list for a record: its arrays in the order of the leaves."""
    raise NotImplementedError


def record_of(branch: Branch) -> LeavesRecord | None:
    """Return the record of a branch, None where it has none.

    Without one, the ``.zarray`` files of its entries decide: if any of them has a marker, the record is lost and the
    branch is damaged; else another program wrote it.

    Raises:
        Corrupt: the record is damaged, or its entries are not those of the branch.
        Format: a newer version wrote it.
        Unsupported: it has a dtype that this version does not know.
    """
    raise NotImplementedError
