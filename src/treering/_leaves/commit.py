"""A record -> the index that names it; and saves without an index, which a newer save of their prefix replaces.

An index is made whole again with saves that were left without one, or anew where it is lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from treering._codec.key_document import is_empty, unindexed_attempts
from treering._codec.zarr import ZarrArray, marker_of, parse_zarray
from treering._coordination.message_board import sweep_messages
from treering._leaves.branches import judge_branch, read_branches, read_zarray
from treering._leaves.documents import index as leaves_index
from treering._leaves.documents.index import LEAVES_INDEX
from treering._leaves.documents.record import LeavesRecord, encode_record, parse_record
from treering._leaves.documents.update import (
    index_unindexed,
    list_later,
    require_disjoint,
    unfinished_update,
    update_for,
    update_in_attempts,
)
from treering._store.api import Store
from treering._store.failures import naming_file, taken_meanwhile
from treering._store.leaves_api import LeavesSave, OlderAttempts, OpenLeaves, Unlisted, Update, has_saver
from treering._store.resolve import begin_leaves_save, open_leaves
from treering._values.checkpoint_names import is_message, is_message_folder
from treering._values.human import join_first
from treering.errors import CorruptError, FormatError, LinkRefusedError, NotFoundError, UnsupportedError


def begin_save(path: Path, attempt: str | None = None, *, live: Collection[str] = (), nbytes: int = 0) -> LeavesSave:
    """Begin a save into the directory ``path``, and remove the messages there whose savers are dead.

    Args:
        path: the directory, wherever that is.
        attempt: that of a joint save; None: a random one.
        live: the attempts whose messages stay, beside the own one.
        nbytes: how many bytes this process will write.
    """
    saving = begin_leaves_save(path, unfinished_update, list_later, attempt=attempt, nbytes=nbytes)
    own = {saving.attempt, *live}
    try:
        with contextlib.suppress(OSError, LinkRefusedError):  # what stays harms nobody, and the next save sweeps
            sweep_messages(
                saving.store, _messages_in(saving.store), lambda other: other in own or has_saver(saving.store, other)
            )
    except BaseException:  # an interrupt; raised again
        saving.close()
        raise
    return saving


def _messages_in(store: Store) -> list[str]:
    """Return the names of messages; what only has such a name, as a link, is not ours."""
    names = [name for name in store.names() if is_message_folder(name) or is_message(name)]
    if store.asks_by_request:  # a bucket has no links, and each look there is a request
        return names
    found = {name: store.find(name) for name in names if not is_message_folder(name)}
    return [name for name in names if name not in found or ((file := found[name]) is not None and file.is_file)]


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
        MismatchError: a leaf would lie in or around the folder of another branch's leaf, or of one that no index lists
            yet; nothing was changed.
        ExistsError: files of others lie where leaves belong, or the index lists some already; nothing was changed.
        CorruptError: the index that is there is damaged; nothing was changed.
        BusyError: another process is saving there.
    """

    def update(old: bytes | None, older: OlderAttempts | None) -> Update:
        if new and old is not None and not is_empty(old):
            raise taken_meanwhile(os.fspath(path))
        if older is None:
            return _update_moved(path, record, old)
        with naming_file(path / LEAVES_INDEX):
            return update_in_attempts(old, [record], older)

    staged.commit(encode_record(record), update if write_index else None)


def _update_moved(path: Path, record: LeavesRecord, old: bytes | None) -> Update:
    """Return the index with this save in it, in the place of older ones of its prefix, indexed or not."""
    with open_leaves(path) as folder:
        unlisted = folder.unlisted()
        kept = read_records(unlisted) if unlisted.pending else {}
        waiting = [kept[attempt] for attempt in sorted(unlisted.pending & kept.keys())]
        update = plan_update(folder, old, [record], [other for other in waiting if other.prefix == record.prefix])
        for other in waiting:
            if other.prefix != record.prefix:
                require_disjoint(record, other.prefix, other.folders, " that was saved without an index")
        return update


def plan_update(
    folder: OpenLeaves, old: bytes | None, records: Sequence[LeavesRecord], dropped: Sequence[LeavesRecord]
) -> Update:
    """Return the update for a commit of ``records``, which replace older saves that no index lists.

    What those have at their key paths is cleared, each by the save of the same prefix.

    Raises:
        CorruptError, FormatError, MismatchError: as `update_for`.
    """
    lying: dict[str | None, list[str]] = {}
    for record in dropped:
        moved = [name for name in record.folders if read_marker(folder, name, None) == record.attempt]
        lying.setdefault(record.prefix, []).extend(moved)
    with naming_file(folder.path / LEAVES_INDEX):
        return update_for(old, records, cleared=lying, dropped=[record.attempt for record in dropped])


def read_records(unlisted: Unlisted) -> dict[str, LeavesRecord]:
    """Return the copies of records that can be read, by attempt.

    A save whose copy is damaged, or of a newer treering, cannot be put into an index.
    """
    found = {}
    for attempt, document in unlisted.records:
        with contextlib.suppress(CorruptError, FormatError, UnsupportedError):
            record = parse_record(document)
            if record.attempt == attempt:
                found[attempt] = record
    return found


def read_marker(folder: OpenLeaves, name: str, attempt: str | None) -> str | None:
    """Return which save wrote the array in a folder; None where none is there, or another program's.

    Args:
        folder: the directory.
        name: the array's folder.
        attempt: the save among whose staged files it is looked for first.
    """
    try:
        return marker_of(read_zarray(folder, name, attempt))
    except (NotFoundError, CorruptError, LinkRefusedError):
        return None


_SHOWN: Final = 10


def index_directory(path: Path) -> None:
    """Make the index of ``path`` whole; ``treering.leaves.index_leaves`` says more."""
    lost: list[str] = []
    with open_leaves(path) as folder:
        if not (folder.rebuilds or folder.unlisted().pending):
            try:
                read_branches(folder)  # what is damaged is told
            except (CorruptError, NotFoundError) as error:
                if isinstance(error, CorruptError) or error.hint is None:
                    error.hint = (
                        "only on a disk can it be rebuilt: copy the directory there, index it, and copy it back"
                    )
                raise
            return
    with begin_save(path) as saving:

        def update(old: bytes | None, older: OlderAttempts | None) -> Update | None:
            if older is None:
                return _rebuild_index(path, old, lost)
            change = index_unindexed(old, older, saving.attempt)
            lost.extend(map(_record_file, sorted(unindexed_attempts(change.moving))))
            return change

        saving.commit(b"", update)
    if lost:
        raise CorruptError(
            f"{str(path)!r} has saves whose record is lost or cannot be read, so that their content is unknown; they"
            f" are not in the index: {join_first(list(map(repr, lost)), _SHOWN)}",
            hint="use another copy of the directory; everything else is indexed",
        )


def _record_file(attempt: str) -> str:
    return f".treering/{attempt}/record.json"


def _rebuild_index(path: Path, old: bytes | None, lost: list[str]) -> Update | None:
    """Return the new index; note in ``lost`` what cannot be in it."""
    with open_leaves(path) as folder:
        unlisted = folder.unlisted()
        pending, kept = unlisted.pending, read_records(unlisted)
        lost += map(_record_file, sorted(pending - kept.keys()))
        index = _read(path, old)
        if index is None:
            return _rebuild(folder, list(kept.values()), unlisted.arrays, lost)
        unreadable = {prefix for prefix, branch in index.branches.items() if _is_unreadable(folder, branch)}
        saves = [kept[attempt] for attempt in pending & kept.keys()]
        saves += [record for record in _select_whole(folder, kept.values()) if record.prefix in unreadable]
        newest = _select_newest(saves)
        if not newest:
            return None
        chosen = {record.attempt for record in newest.values()}
        older = {record.attempt: record for record in saves if record.attempt not in chosen}
        replaced = unreadable & newest.keys()
        others = {prefix: branch for prefix, branch in index.branches.items() if prefix not in replaced}
        base = leaves_index.encode_leaves_index(dataclasses.replace(index, branches=others))
        return plan_update(folder, base, [*newest.values()], [*older.values()])


def _read(path: Path, old: bytes | None) -> leaves_index.LeavesIndex | None:
    """Return the index; None where there is none, or one that is damaged beyond reading.

    Raises:
        FormatError: it is the index of another format.
    """
    try:
        with naming_file(path / leaves_index.LEAVES_INDEX):
            return None if old is None else leaves_index.parse_leaves_index(old)
    except CorruptError:
        return None


def _is_unreadable(folder: OpenLeaves, branch: leaves_index.IndexBranch) -> bool:
    try:
        # Perhaps a newer treering wrote it: then it is not damaged, and is not replaced.
        with contextlib.suppress(FormatError, UnsupportedError):
            judge_branch(folder, branch)
    except CorruptError:
        return True
    return False


def _select_newest(saves: Iterable[LeavesRecord]) -> dict[str | None, LeavesRecord]:
    """Return the newest save of each prefix."""
    by_age = sorted(saves, key=lambda record: (str(record.written.get("at", "")), record.attempt))
    return {record.prefix: record for record in by_age}


def _select_whole(folder: OpenLeaves, records: Iterable[LeavesRecord]) -> list[LeavesRecord]:
    """Return the saves of which every array is there, staged or at its key path."""
    return [
        record
        for record in records
        if all(read_marker(folder, name, record.attempt) == record.attempt for name in record.folders)
    ]


def _rebuild(folder: OpenLeaves, records: list[LeavesRecord], there: Iterable[str], lost: list[str]) -> Update | None:
    """Return an index of what lies there: the newest whole save of each prefix, and arrays that no save wrote.

    Raises:
        NotFoundError: there is nothing to be indexed.
    """
    newest = _select_newest(_select_whole(folder, records))
    chosen = {record.attempt for record in newest.values()}
    older = [record for record in records if record.attempt not in chosen and record.prefix in newest]
    known = {name for record in newest.values() for name in record.folders}
    arrays = _read_arrays(folder, (name for name in there if name not in known))
    attempts = {record.attempt for record in older}
    lost += [name for name, array in arrays.items() if array.marker is not None and array.marker not in attempts]
    foreign = {name: array for name, array in arrays.items() if array.marker is None}
    base = _index_foreign(foreign, newest.keys()) if foreign else None
    if newest:
        return plan_update(folder, base, [*newest.values()], older)
    if base is not None:
        return Update(moving=base, moved=base, moves=())
    if lost:
        return None
    raise NotFoundError(
        f"nothing in {str(folder.path)!r} can be indexed: there is no complete save of treering and no zarr v2 array"
    )


def _read_arrays(folder: OpenLeaves, names: Iterable[str]) -> dict[str, ZarrArray]:
    """Return the zarr v2 arrays in some folders, but for what cannot be read as a leaf, such as an array of records."""
    found = {}
    for name in names:
        with contextlib.suppress(NotFoundError, CorruptError, FormatError, LinkRefusedError, UnsupportedError):
            found[name] = parse_zarray(read_zarray(folder, name, None))
    return found


def _index_foreign(arrays: Mapping[str, ZarrArray], taken: Collection[str | None]) -> bytes:
    """Return an index of arrays that came without one, as another program would write it.

    They are a tree without prefix. Where there is such a tree already, each is under a prefix of its own folders, the
    shortest that is free: one branch cannot be checked in one part and not in another.

    Args:
        arrays: by folder.
        taken: prefixes of other trees.
    """
    entries: dict[str | None, list[leaves_index.Entry]] = {}
    for name, array in arrays.items():
        document = {"path": name or ".", "shape": list(array.shape), "dtype": array.dtype}
        entries.setdefault(_free_prefix(name, taken), []).append(leaves_index.Entry(name, document))
    branches = {
        prefix: leaves_index.IndexBranch(prefix=prefix, entries=listed, record=None, moving=None)
        for prefix, listed in entries.items()
    }
    return leaves_index.encode_leaves_index(leaves_index.LeavesIndex(branches=branches, document={}))


def _free_prefix(name: str, taken: Collection[str | None]) -> str | None:
    if None not in taken:
        return None
    parts = name.split("/")
    texts = ("/".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next((text for text in texts if text not in taken), name)
