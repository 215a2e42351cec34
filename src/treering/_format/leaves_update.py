"""What becomes of an index when branches are saved, and what the store has to know of indexes without reading them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from treering._format.leaves_record import LeavesRecord

if TYPE_CHECKING:
    from treering._store.leaves_rules import IndexRules, Update

__all__ = ["LEAVES_RULES", "update_for"]


def update_for(old: bytes | None, records: Sequence[LeavesRecord]) -> Update:
    """Return the two indexes that a save of these branches goes through: staged and moved.

    Branches with other prefixes, and everything that is unknown, stay as they are.

    Raises:
        Corrupt: the present index is damaged; nothing may be replaced in silence.
        Format: it is the index of another format.
        Mismatch: a leaf would lie in or around the folder of another branch's leaf; both are named.
    """
    raise NotImplementedError


LEAVES_RULES: IndexRules
"""What the store may ask about an index and a ``.zarray``."""
