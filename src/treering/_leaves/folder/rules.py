"""What the store has to be told about a leaves directory, for it knows no JSON: indexes, moves, markers.

A save into a leaves directory is two indexes and what to do between them. The first index is the commit: it sends
readers to the staged files. Then old leaves are cleared, staged ones are moved to their key paths, and the second index
says so.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One attempt's staged files on their way to their key paths.

    Example:
        >>> Move(attempt="0123456789abcdef", cleared=("layer/w",)).cleared
        ('layer/w',)
    """

    attempt: str
    """Whose staged files are moved: 16 hexadecimal digits."""
    cleared: tuple[str, ...]
    """Folders of leaves that this save replaces, below the directory, with ``/``. Those that are not there, that have a
    link on their way, or that belong to the attempt itself are left alone."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A new index for a leaves directory, in two steps, and what to do between them.

    Example:
        >>> move = Move(attempt="0123456789abcdef", cleared=())
        >>> Update(moving=b"{1}", settled=b"{2}", moves=(move,)).dropped
        ()
    """

    moving: bytes
    """The index that is the commit: it names the attempts whose files are still staged, and what they clear."""
    settled: bytes
    """The index when everything is at its key path."""
    moves: tuple[Move, ...]
    """What ``moving`` promises; the same that `IndexRules.moves` reads from it."""
    dropped: tuple[str, ...] = ()
    """Saves without an index (`StagedLeaves.leave`) that this one replaces: their folders under ``.treering`` go. What
    they have at their key paths has to be in some move's ``cleared``."""


class IndexRules(Protocol):
    """How to read what the store must know of an index and of a ``.zarray``. Nothing here ever raises."""

    def moves(self, index: bytes) -> tuple[Move, ...]:
        """Return the moves that a dead save left undone; none for an index that cannot be read."""

    def settled(self, index: bytes) -> bytes:
        """Return the same index with those moves done."""

    def attempts(self, index: bytes) -> frozenset[str]:
        """Return all attempts that an index names, moved or not."""

    def marker(self, zarray: bytes) -> str | None:
        """Return the attempt that a ``.zarray`` names; None for another program's, or a damaged one."""

    def is_chunk(self, zarray: bytes, name: str) -> bool:
        """Whether a file of that name beside this ``.zarray`` is a chunk of its array; ``0/0`` for one in a folder."""
