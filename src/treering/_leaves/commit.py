"""A record -> the index that names it; and saves without an index, which a newer save of their prefix replaces."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from treering._codec.leaves_key import is_empty
from treering._coordination.message_board import sweep_messages
from treering._leaves.branches import read_zarray
from treering._leaves.documents.index import LEAVES_INDEX
from treering._leaves.documents.record import LeavesRecord, encode_record, parse_record
from treering._leaves.documents.update import require_apart, unfinished_update, update_for, update_in_attempts
from treering._store.failures import LinkRefused, naming_file, taken_meanwhile
from treering._store.leaves_folder.leaves_folder import LeavesFolder
from treering._store.leaves_folder.moves import Update, marker_of
from treering._store.leaves_folder.open_leaves import LeavesSave, LeftFiles
from treering._store.leaves_folder.staged_leaves import StagedLeaves
from treering._store.leaves_places import begin_leaves_save
from treering.errors import Corrupt, Format, NotFound, Unsupported


def begin_save(path: Path, attempt: str | None = None, *, live: Collection[str] = ()) -> LeavesSave:
    """Begin a save into the directory ``path``, wherever that is; ``StagedLeaves`` says more."""
    return begin_leaves_save(path, unfinished_update, sweep_messages, attempt, live)


def commit_record(
    path: Path, staged: LeavesSave, record: LeavesRecord, *, write_index: bool, new: bool = False
) -> None:
    """Make a written save the one that the index names; without the index, one that `index_leaves` finds.

    Args:
        path: the directory.
        staged: the save.
        record: what it holds.
        write_index: whether the index names it.
        new: whether the index may list nothing yet.

    Raises:
        Mismatch: a leaf would lie in or around the folder of another branch's leaf, or of one that no index lists yet;
            nothing was changed.
        Exists: files of others lie where leaves belong, or the index lists some already; nothing was changed.
        Corrupt: the index that is there is damaged; nothing was changed.
        Busy: another process is saving there.
    """
    document = encode_record(record)
    if isinstance(staged, StagedLeaves) and not write_index:
        staged.leave(document)
    else:

        def update(old: bytes | None) -> Update:
            if new and old is not None and not is_empty(old):
                raise taken_meanwhile(os.fspath(path))
            return _update(path, record, old, staged.remains(), write_index=write_index)

        staged.commit(document, update)


def _update(
    path: Path, record: LeavesRecord, old: bytes | None, remains: LeftFiles | None, *, write_index: bool
) -> Update:
    """Return the index with this save in it, in the place of older ones of its prefix, indexed or not."""
    if remains is not None:
        now, later = ([record], []) if write_index else ([], [record])
        with naming_file(path / LEAVES_INDEX):
            return update_in_attempts(old, now, remains, left=later)
    with LeavesFolder(path) as folder:
        pending = folder.pending()
        kept = read_records(folder) if pending else {}
        waiting = [kept[attempt] for attempt in sorted(pending & kept.keys())]
        update = plan_update(folder, old, [record], [other for other in waiting if other.prefix == record.prefix])
        for other in waiting:
            if other.prefix != record.prefix:
                require_apart(record, other.prefix, other.folders, " that was saved without an index")
        return update


def plan_update(
    folder: LeavesFolder, old: bytes | None, records: Sequence[LeavesRecord], dropped: Sequence[LeavesRecord]
) -> Update:
    """Return the update for a commit of ``records``, which replace older saves that no index lists.

    What those have at their key paths is cleared, each by the save of the same prefix.

    Raises:
        Corrupt, Format, Mismatch: as `update_for`.
    """
    lying: dict[str | None, list[str]] = {}
    for record in dropped:
        moved = [name for name in record.folders if read_marker(folder, name, None) == record.attempt]
        lying.setdefault(record.prefix, []).extend(moved)
    with naming_file(folder.path / LEAVES_INDEX):
        return update_for(old, records, cleared=lying, dropped=[record.attempt for record in dropped])


def read_records(folder: LeavesFolder) -> dict[str, LeavesRecord]:
    """Return the copies of records that can be read, by attempt.

    A save whose copy is damaged, or of a newer treering, cannot be put into an index.
    """
    found = {}
    for attempt, document in folder.records().items():
        with contextlib.suppress(Corrupt, Format, Unsupported):
            record = parse_record(document)
            if record.attempt == attempt:
                found[attempt] = record
    return found


def read_marker(folder: LeavesFolder, name: str, attempt: str | None) -> str | None:
    """Return which save wrote the array in a folder; None where none is there, or another program's.

    Args:
        folder: the directory.
        name: the array's folder.
        attempt: the save among whose staged files it is looked for first.
    """
    try:
        return marker_of(read_zarray(folder, name, attempt))
    except (NotFound, Corrupt, LinkRefused):
        return None
