"""What is known of the locks of a place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from treering._store.api import Entry


@dataclasses.dataclass(frozen=True, slots=True)
class Locks:
    """The locks of one place, as they were at one moment.

    Example:
        >>> NO_LOCKS.holder(None) is None
        True
    """

    gap: str | None
    """Which locks are not shown, as a sentence; None where all are, so that what is not among them is free."""
    holders: Mapping[Any, int]
    """What was locked, by ``Entry.key``, and the number of the process that holds it."""

    def holder(self, found: Entry | None) -> int | None:
        """Return the process of this machine that holds the lock of what was found; None where none is seen."""
        return None if found is None else self.holders.get(found.key)


NO_LOCKS: Final = Locks("this store has no locks", {})
