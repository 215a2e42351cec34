"""A leaves directory wherever it is: which of its forms a path leads to."""

from __future__ import annotations

import os
from pathlib import Path

from treering._store.leaves_api import LeafWriter, LeavesSave, ListLater, OpenLeaves, Unfinished
from treering._store.leaves_folder.leaves_folder import LeavesFolder
from treering._store.leaves_folder.staged_leaves import JoinedLeaves, StagedLeaves
from treering._store.resolve import is_on_disk, located, store_at


def open_leaves(path: str | os.PathLike[str]) -> OpenLeaves:
    """Open a leaves directory for reading.

    Raises:
        NotFoundError: nothing is at the path, where the store can tell.
        StoreError: a file is there, or the system refuses.
    """
    place = located(path)
    if is_on_disk(place):
        return LeavesFolder(place)
    from treering._store.unmoved_leaves import StoredLeaves

    return StoredLeaves(store_at(place), place)


def begin_leaves_save(
    path: Path, unfinished: Unfinished, list_later: ListLater, *, attempt: str | None = None, nbytes: int = 0
) -> LeavesSave:
    """Begin a save into a leaves directory; `StagedLeaves` and `LeavesAttempt` say what the arguments are.

    Raises:
        ExistsError: a checkpoint is there.
        StoreError: the system refused, or has not so much space. Nothing has changed.
    """
    if is_on_disk(path):
        return StagedLeaves(path, unfinished, attempt=attempt, nbytes=nbytes)
    from treering._store.unmoved_leaves import LeavesAttempt

    return LeavesAttempt(store_at(path), path, list_later, attempt=attempt)


def join_leaves_save(path: Path, attempt: str, nbytes: int) -> LeafWriter:
    """Join the save that process 0 has begun, to write so many bytes of it.

    Raises:
        StoreError: the system refused, or nothing of that save is there.
    """
    if is_on_disk(path):
        return JoinedLeaves(path, attempt, nbytes)
    from treering._store.unmoved_leaves import JoinedAttempt

    return JoinedAttempt(store_at(path), path, attempt)
