"""Saves that were left without an index, and what becomes of them when a newer one of their prefix is committed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from treering._checkpoint.naming import naming
from treering._leaves.branches import read_zarray
from treering._leaves.documents.index import LEAVES_INDEX, encode_leaves_index, parse_leaves_index
from treering._leaves.documents.paths import overlapping
from treering._leaves.documents.record import LeavesRecord, encode_record, parse_record
from treering._leaves.documents.update import LEAVES_RULES, update_for
from treering._leaves.folder.leaves_folder import OpenLeaves
from treering._leaves.folder.rules import Update
from treering._leaves.folder.staged_leaves import StagedLeaves
from treering._store.failures import LinkRefused
from treering.errors import Corrupt, Format, Mismatch, NotFound, Unsupported


def kept_records(folder: OpenLeaves) -> dict[str, LeavesRecord]:
    """Return the copies of records that can be read, by attempt.

    One that is damaged, or of a newer treering, is no copy that a save could be taken up from.
    """
    found = {}
    for attempt, document in folder.records().items():
        try:
            record = parse_record(document)
        except (Corrupt, Format, Unsupported):
            continue
        if record.attempt == attempt:
            found[attempt] = record
    return found


def by_age(records: Iterable[LeavesRecord]) -> list[LeavesRecord]:
    """Return saves, the oldest first."""
    return sorted(records, key=lambda record: (str(record.written.get("at", "")), record.attempt))


def update_dropping(
    folder: OpenLeaves, old: bytes | None, records: Sequence[LeavesRecord], dropped: Sequence[LeavesRecord]
) -> Update:
    """Return the update for a commit of ``records``, in whose place older saves go that no index lists.

    What they have at their key paths is cleared, each by the save of the same prefix.

    Raises:
        Corrupt, Format, Mismatch: as `update_for`.
    """
    with naming(folder.path / LEAVES_INDEX):
        update = update_for(old, records)
    if not dropped:
        return update
    lying: dict[str | None, list[str]] = {record.prefix: [] for record in records}
    for record in dropped:
        lying[record.prefix] += [name for name in record.folders if marker_at(folder, name, None) == record.attempt]
    cleared = {record.attempt: lying[record.prefix] for record in records}
    moves = tuple(
        dataclasses.replace(move, cleared=_joined(move.cleared, cleared.get(move.attempt, ()))) for move in update.moves
    )
    return dataclasses.replace(
        update,
        moving=_promising(update.moving, lying),
        moves=moves,
        dropped=(*update.dropped, *(record.attempt for record in dropped)),
    )


def _promising(moving: bytes, lying: Mapping[str | None, Sequence[str]]) -> bytes:
    """Return the index with more folders to be cleared: a save that finishes for a dead one reads them there."""
    index = parse_leaves_index(moving)
    branches = {
        prefix: branch
        if branch.moving is None
        else dataclasses.replace(branch, moving=_joined(branch.moving, lying.get(prefix, ())))
        for prefix, branch in index.branches.items()
    }
    return encode_leaves_index(dataclasses.replace(index, branches=branches))


def _joined(some: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*some, *others)))


def marker_at(folder: OpenLeaves, name: str, attempt: str | None) -> str | None:
    """Return which save wrote the array in a folder; None where none is there, or another program's.

    Args:
        folder: the directory.
        name: the array's folder.
        attempt: the save among whose staged files it is looked for first.
    """
    try:
        return LEAVES_RULES.marker(read_zarray(folder, name, attempt))
    except (NotFound, Corrupt, LinkRefused):
        return None


def acknowledge(path: Path, staged: StagedLeaves, record: LeavesRecord, *, write_index: bool) -> None:
    """Make a written save the one that the index names; without the index, one that `index_leaves` finds.

    Raises:
        Mismatch: a leaf would lie in or around the folder of another branch's leaf, or of one that no index lists yet;
            nothing was changed.
        Exists: files of others lie where leaves belong; nothing was changed.
        Corrupt: the index that is there is damaged; nothing was changed.
        Busy: another process is saving there.
    """
    document = encode_record(record)
    if write_index:
        staged.commit(document, lambda old: _update(path, record, old))
    else:
        staged.leave(document)


def _update(path: Path, record: LeavesRecord, old: bytes | None) -> Update:
    """Return the index with this save in it, in the place of older ones of its prefix, indexed or not."""
    with OpenLeaves(path) as folder:
        pending = folder.pending()
        kept = kept_records(folder) if pending else {}
        waiting = [kept[attempt] for attempt in sorted(pending & kept.keys())]
        older = [other for other in waiting if other.prefix == record.prefix]
        update = update_dropping(folder, old, [record], older)
        for other in waiting:
            if other.prefix != record.prefix:
                _require_apart(record, other)
        return update


def _require_apart(record: LeavesRecord, waiting: LeavesRecord) -> None:
    """Refuse leaves in or around those of a save that no index lists yet: none could list both."""
    clash = overlapping((*record.folders, *waiting.folders))
    if clash is not None:
        raise Mismatch(
            f"the folders {clash[0]!r:.200} and {clash[1]!r:.200} are the same, or one lies in the other, and one is of"
            f" a tree with {'no prefix' if waiting.prefix is None else f'the prefix {waiting.prefix!r:.200}'} that was"
            " saved without an index",
            hint="save under another prefix, or into another directory",
        )
