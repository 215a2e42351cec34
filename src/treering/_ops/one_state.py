"""Work on a tree in one state of it, also while saves replace it: what began on one save does not end on the next."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final, TypeVar

from treering._arrays.source import Source
from treering.errors import Busy, Corrupt, NotFound

__all__ = ["on_one_state"]

S = TypeVar("S", bound=Source)
T = TypeVar("T")

# Each try needs a whole save while the tree is being read.
_TRIES: Final = 100


def on_one_state(opened: Callable[[], AbstractContextManager[S]], work: Callable[[S], T]) -> T:
    """Return ``work(source)``, done once more on the newer tree where a save replaced the older one meanwhile.

    Files that are gone, or have other bytes, are damage only as long as the tree that was opened is the one that
    stands there. Bytes without checksums may be another save's without looking damaged.

    Args:
        opened: opens the tree, each time anew.
        work: reads it; what it did is thrown away where it has to be done again.

    Raises:
        Busy: the tree was replaced again and again.
        Exception: whatever ``work`` raises on a tree that was not replaced.
    """
    for _ in range(_TRIES):
        with opened() as source:
            try:
                result = work(source)
            except (Corrupt, NotFound):
                if source.is_current():
                    raise
                continue
            if source.index.verified or source.is_current():
                return result
    raise Busy(f"the tree was replaced {_TRIES} times while it was being read", hint="try again")
