"""The index of a leaves directory made whole: with saves that were left without one, or anew where it is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from treering._codec.leaves_key import unindexed_attempts
from treering._codec.zarr import ZarrArray, parse_zarray
from treering._leaves.branches import judge_branch, read_branches, read_zarray
from treering._leaves.commit import begin_save, plan_update, read_marker, read_records
from treering._leaves.documents import index as leaves_index
from treering._leaves.documents.record import LeavesRecord
from treering._leaves.documents.update import index_unindexed, unfinished_update
from treering._store.failures import LinkRefused, naming_file
from treering._store.leaves_folder.commit import commit_pending
from treering._store.leaves_folder.leaves_folder import LeavesFolder
from treering._store.leaves_folder.moves import Update
from treering._store.leaves_places import open_leaves
from treering._store.resolve import is_on_disk
from treering._values.human import join_first
from treering.errors import Corrupt, Format, NotFound, Unsupported

_SHOWN: Final = 10


def index_directory(path: Path) -> None:
    """Make the index of ``path`` whole; ``treering.leaves.index_leaves`` says more."""
    lost: list[str] = []
    if is_on_disk(path):
        commit_pending(path, unfinished_update, lambda old: _update(path, old, lost))
    else:
        _index_unmoved(path, lost)
    if lost:
        raise Corrupt(
            f"{str(path)!r} has saves whose record is lost or cannot be read, so that their content is unknown; they"
            f" are not in the index: {join_first(list(map(repr, lost)), _SHOWN)}",
            hint="use another copy of the directory; everything else is indexed",
        )


def _index_unmoved(path: Path, lost: list[str]) -> None:
    """List the saves that the index in a bucket names only; note in ``lost`` those that it goes on naming."""
    with open_leaves(path) as folder:
        try:
            if not folder.pending():
                read_branches(folder)  # what is damaged is told
                return
        except (Corrupt, NotFound) as error:
            if isinstance(error, Corrupt) or error.hint is None:
                error.hint = "only on a disk can it be rebuilt: copy the directory there, index it, and copy it back"
            raise
    with begin_save(path) as saving:
        if (remains := saving.remains()) is None:
            raise RuntimeError(f"the files of {os.fspath(path)!r} are moved")

        def update(old: bytes | None) -> Update:
            change = index_unindexed(old, remains, saving.attempt)
            lost.extend(f".treering/{attempt}/record.json" for attempt in sorted(unindexed_attempts(change.moving)))
            return change

        saving.commit(b"", update)


def _update(path: Path, old: bytes | None, lost: list[str]) -> Update | None:
    """Return the new index; note in ``lost`` what cannot be in it."""
    with LeavesFolder(path) as folder:
        kept = read_records(folder)
        pending = folder.pending()
        lost += [f".treering/{attempt}/record.json" for attempt in sorted(pending - kept.keys())]
        index = _read(path, old)
        if index is None:
            return _rebuild(folder, list(kept.values()), lost)
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
        Format: it is the index of another format.
    """
    try:
        with naming_file(path / leaves_index.LEAVES_INDEX):
            return None if old is None else leaves_index.parse_leaves_index(old)
    except Corrupt:
        return None


def _is_unreadable(folder: LeavesFolder, branch: leaves_index.IndexBranch) -> bool:
    try:
        # Perhaps a newer treering wrote it: then it is not damaged, and is not replaced.
        with contextlib.suppress(Format, Unsupported):
            judge_branch(folder, branch)
    except Corrupt:
        return True
    return False


def _select_newest(saves: Iterable[LeavesRecord]) -> dict[str | None, LeavesRecord]:
    """Return the newest save of each prefix."""
    by_age = sorted(saves, key=lambda record: (str(record.written.get("at", "")), record.attempt))
    return {record.prefix: record for record in by_age}


def _select_whole(folder: LeavesFolder, records: Iterable[LeavesRecord]) -> list[LeavesRecord]:
    """Return the saves of which every array is there, staged or at its key path."""
    return [
        record
        for record in records
        if all(read_marker(folder, name, record.attempt) == record.attempt for name in record.folders)
    ]


def _rebuild(folder: LeavesFolder, records: list[LeavesRecord], lost: list[str]) -> Update | None:
    """Return an index of what lies there: the newest whole save of each prefix, and arrays that no save wrote.

    Raises:
        NotFound: there is nothing to be indexed.
    """
    newest = _select_newest(_select_whole(folder, records))
    chosen = {record.attempt for record in newest.values()}
    older = [record for record in records if record.attempt not in chosen and record.prefix in newest]
    arrays = _find_arrays(folder, {name for record in newest.values() for name in record.folders})
    attempts = {record.attempt for record in older}
    lost += [name for name, array in arrays.items() if array.marker is not None and array.marker not in attempts]
    foreign = {name: array for name, array in arrays.items() if array.marker is None}
    base = _index_foreign(foreign, newest.keys()) if foreign else None
    if newest:
        return plan_update(folder, base, [*newest.values()], older)
    if base is not None:
        return Update(moving=base, settled=base, moves=())
    if lost:
        return None
    raise NotFound(
        f"nothing in {str(folder.path)!r} can be indexed: there is no complete save of treering and no zarr v2 array"
    )


def _find_arrays(folder: LeavesFolder, known: Collection[str]) -> dict[str, ZarrArray]:
    """Return the zarr v2 arrays at key paths, by folder, except those in ``known`` folders.

    What cannot be read as a leaf, such as an array of records, is left out.
    """
    found = {}
    for name in folder.array_folders():
        if name not in known:
            with contextlib.suppress(NotFound, Corrupt, Format, LinkRefused, Unsupported):
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
