"""Records -> the ``Index`` that every verb goes by."""

from __future__ import annotations

from collections.abc import Sequence

from treering._format.index import Index
from treering._format.leaves_record import LeavesRecord

__all__ = ["opened_index"]


def opened_index(records: Sequence[LeavesRecord], *, verified: bool) -> Index:
    """Return the records as one index.

    One record without prefix is its tree. Otherwise the tree is a dict: the keys of the tree without prefix, then a
    branch for each prefix. Where the tree without prefix is no dict, or has a key that is also a prefix, it is the
    branch ``""``.

    ``chunks`` has rows only for leaves whose chunk files are plain bytes and whole: one for each file, in C order of
    the grid. Row and file have the same number, ``file.name`` is the folder and the chunk's name, joined with ``/``.
    ``checksums`` are those of these rows; empty where not ``verified``.

    Args:
        records: of different prefixes.
        verified: whether all of them have checksums.
    """
    raise NotImplementedError
