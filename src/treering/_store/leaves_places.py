"""A leaves directory wherever it is: which of its forms a path leads to."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from treering._store.leaves_folder.attempts import SweepMessages
from treering._store.leaves_folder.leaves_folder import LeavesFolder
from treering._store.leaves_folder.moves import Unfinished
from treering._store.leaves_folder.open_leaves import JoinedWriter, LeavesSave, OpenLeaves
from treering._store.leaves_folder.staged_files import JoinedLeaves
from treering._store.leaves_folder.staged_leaves import StagedLeaves
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
    from treering._store.unmoved_leaves.stored_leaves import StoredLeaves

    return StoredLeaves(store_at(place), place)


def begin_leaves_save(
    path: Path, unfinished: Unfinished, sweep: SweepMessages, attempt: str | None, live: Collection[str]
) -> LeavesSave:
    """Begin a save into a leaves directory; `StagedLeaves` says what the arguments are.

    Raises:
        ExistsError: a checkpoint is there.
        StoreError: the system refused. Nothing has changed.
    """
    if is_on_disk(path):
        return StagedLeaves(path, unfinished, sweep, attempt, live)
    from treering._store.unmoved_leaves.leaves_attempt import LeavesAttempt

    return LeavesAttempt(store_at(path), path, sweep, attempt, live)


def join_leaves_save(path: Path, attempt: str) -> JoinedWriter:
    """Join the save that process 0 has begun.

    Raises:
        StoreError: the system refused, or nothing of that save is there.
    """
    if is_on_disk(path):
        return JoinedLeaves(path, attempt)
    from treering._store.unmoved_leaves.leaves_attempt import JoinedAttempt

    return JoinedAttempt(store_at(path), path, attempt)
