"""A new index for a leaves directory without a new save: for saves that were left without one, or a lost index."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from treering._store.leaves_rules import IndexRules, Update

__all__ = ["commit_pending"]


def commit_pending(path: Path, rules: IndexRules, update: Callable[[bytes | None], Update | None]) -> None:
    """Make ``update(index)`` the index of the directory, and do the moves that it promises.

    Moved attempts are no longer pending. Damaged indexes are handed to ``update`` as they are; it may make a new one.

    Args:
        path: the directory; it must be there.
        rules: how to read an index.
        update: gets the present index, None when there is none, while nobody else can change it; None as its answer
            leaves everything as it is.

    Raises:
        NotFound: there is no such directory.
        Busy: others kept saving.
        LinkRefused: the index, or ``.treering``, is a link.
        StoreFailed: the system refused.
    """
    raise NotImplementedError
