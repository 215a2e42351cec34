"""A record -> the index that names it; and saves without an index, which a newer save of their prefix replaces.

An index is made whole again with saves that were left without one, or anew where it is lost. At the end is what becomes
of an index when branches are saved, and what the store has to know of indexes without reading them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from treering._codec.key_document import is_empty, unindexed_attempts
from treering._codec.zarr import ZarrArray, marker_of, parse_zarray
from treering._coordination.message_board import sweep_messages
from treering._leaves.branches import judge_branch, read_branches, read_zarray
from treering._leaves.documents import index as leaves_index
from treering._leaves.documents.index import LEAVES_INDEX
from treering._leaves.documents.record import LeavesRecord, attempt_of, encode_record, parse_record
from treering._store.api import Store
from treering._store.failures import naming_file, taken_meanwhile
from treering._store.leaves_api import LeavesSave, Move, OlderAttempts, OpenLeaves, Unlisted, Update, has_saver
from treering._store.resolve import begin_leaves_save, open_leaves
from treering._values.checkpoint_names import is_message, is_message_folder
from treering._values.human import join_first
from treering.errors import (
    CorruptError,
    FormatError,
    LinkRefusedError,
    MismatchError,
    NotFoundError,
    TreeringError,
    UnsupportedError,
)


def begin_save(path: Path, attempt: str | None = None, *, live: Collection[str] = (), nbytes: int = 0) -> LeavesSave:
    """Begin a save into the directory ``path``, and remove the messages there whose savers are dead.

    Args:
        path: the directory, wherever that is.
        attempt: that of a joint save; None: a random one.
        live: the attempts whose messages stay, beside the own one.
        nbytes: how many bytes this process will write.
    """
    saving = begin_leaves_save(path, unfinished_update, attempt=attempt, nbytes=nbytes)
    own = {saving.attempt, *live}
    try:
        with contextlib.suppress(OSError, LinkRefusedError):  # what stays harms nobody, and the next save sweeps
            if messages := _messages_in(saving.store):
                sweep_messages(saving.store, messages, lambda other: other in own or has_saver(saving.store, other))
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
    document = encode_record(record)

    def update(old: bytes | None, older: OlderAttempts | frozenset[str]) -> Update:
        if new and old is not None and not is_empty(old):
            raise taken_meanwhile(os.fspath(path))
        if older and isinstance(older, frozenset):
            return _update_beside(Path(staged.store.path), record, old, older)
        with naming_file(path / LEAVES_INDEX):
            if isinstance(older, frozenset):
                return update_for(old, [record])
            if write_index:
                return update_in_attempts(old, [record], older)
            return update_in_attempts(old, [], older, later=[document])

    staged.commit(document, update, listed=write_index)


def _update_beside(path: Path, record: LeavesRecord, old: bytes | None, pending: frozenset[str]) -> Update:
    """Return the index with this save in it, where saves without one wait: it replaces those of its prefix."""
    with open_leaves(path) as folder:
        kept = read_records(folder.unlisted())
        waiting = [kept[attempt] for attempt in sorted(pending & kept.keys())]
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

        def update(old: bytes | None, older: OlderAttempts | frozenset[str]) -> Update | None:
            if isinstance(older, frozenset):
                return _rebuild_index(Path(saving.store.path), old, lost)
            # Of each prefix the newest of those that were to be listed later, which are in order.
            waiting = read_unindexed(leaves_index.parse_leaves_index(old or b""))
            newest = {record.prefix: record for record in waiting}
            change = update_in_attempts(old, list(newest.values()), older, last=saving.attempt)
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
        index = None  # where there is none, or one that is damaged beyond reading
        with contextlib.suppress(CorruptError), naming_file(path / LEAVES_INDEX):
            index = None if old is None else leaves_index.parse_leaves_index(old)
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


# --------------------------------------------------------------------------------------------------- the index it makes


def update_for(
    old: bytes | None,
    records: Sequence[LeavesRecord],
    *,
    cleared: Mapping[str | None, Sequence[str]] = {},
    dropped: Sequence[str] = (),
) -> Update:
    """Return the two indexes that a save of these branches goes through: staged, and moved.

    Branches with other prefixes, and everything that is unknown, stay as they are.

    Args:
        old: the present index, None where there is none.
        records: of different prefixes.
        cleared: prefix -> folders that its save clears beside those of the branch that it replaces.
        dropped: the attempts of saves without an index that these saves replace.

    Raises:
        CorruptError: the present index, or what it says of a replaced branch, is damaged; nothing is replaced in
            silence.
        FormatError: it is the index of another format, or a newer version wrote a replaced branch.
        MismatchError: a leaf would lie in, or around, the folder of another branch's leaf; both are named.
    """
    index = _parsed(old)
    branches = dict(index.branches)
    done = {*dropped, *(record.attempt for record in records)}
    index = dataclasses.replace(index, unindexed=[one for one in index.unindexed if attempt_of(one) not in done])
    for prefix, branch in branches.items():
        if branch.moving is not None and attempt_of(branch.record or b"") is None:
            raise CorruptError(
                f"{leaves_index.LEAVES_INDEX}: the record of {_shown(prefix)} is damaged, and its files are not all in"
                " their places",
                hint="treering.leaves.index_leaves rebuilds the index from the copies under .treering",
            )
    saved = [record.prefix for record in records]
    others = {prefix: _folders(branch) for prefix, branch in branches.items() if prefix not in saved}
    # What another branch lists as well is not this one's to clear: eformer lists one array twice where the keys of a
    # tree without prefix begin as a prefix does.
    kept = set(itertools.chain.from_iterable(others.values()))
    moves, staged = [], {}
    for record in records:
        before = branches.get(record.prefix)
        replaced = [] if before is None else [each for each in _folders(before, replaced=True) if each not in kept]
        if before is not None and before.stays:
            replaced = []  # nothing of it is at its key paths
        moving = tuple(dict.fromkeys((*replaced, *cleared.get(record.prefix, ()))))
        branches[record.prefix] = branch = _branch_of(record)
        staged[record.prefix] = dataclasses.replace(branch, moving=moving)
        moves.append(Move(attempt=record.attempt, cleared=moving))
    _check_disjoint(records, others)
    steps = (dataclasses.replace(index, branches=each) for each in (branches | staged, branches))
    first, second = map(leaves_index.encode_leaves_index, steps)
    return Update(moving=first, moved=second, moves=tuple(moves), dropped=tuple(dropped))


def update_in_attempts(
    old: bytes | None,
    records: Sequence[LeavesRecord],
    older: OlderAttempts,
    *,
    later: Sequence[bytes] = (),
    last: str | None = None,
) -> Update:
    """Return the index that a save of branches makes where its files stay in the folder of its attempt.

    Branches with other prefixes, and everything that is unknown, stay as they are. What is at the key paths of the
    branch that is replaced, as another program or a copy from a disk put it there, stays as well.

    Args:
        old: the present index.
        records: of different prefixes.
        older: what older attempts have there.
        later: the records of saves that are not to be listed yet.
        last: the attempt that changes the index and has no save of its own, by which it is known that it did.

    Raises:
        CorruptError, FormatError, MismatchError: as `update_for`.
    """
    index = _parsed(old)
    saved = {record.prefix: record.attempt for record in records}
    others = {prefix: branch for prefix, branch in index.branches.items() if prefix not in saved}
    waiting = read_unindexed(index)
    _check_disjoint(records, {prefix: _folders(branch) for prefix, branch in others.items()})
    for record, other in itertools.product(records, waiting):
        if other.prefix not in saved:
            require_disjoint(record, other.prefix, other.folders, " that was saved without an index")
    branches = dict(others)
    for record in records:
        gone = [other.attempt for other in waiting if other.prefix == record.prefix and other.attempt != record.attempt]
        superseded: list[leaves_index.SupersededSave] = []
        if (replaced := index.branches.get(record.prefix)) is not None:
            _folders(replaced, replaced=True)  # what is damaged or newer is not replaced
            superseded += replaced.superseded
            gone = [*filter(None, [attempt_of(replaced.record or b"")]), *gone]
        superseded += [leaves_index.SupersededSave(attempt, older.now) for attempt in gone]
        branches[record.prefix] = dataclasses.replace(_branch_of(record, stays=True), superseded=tuple(superseded))
    for prefix, branch in branches.items():  # what is gone already waits no more
        kept = tuple(one for one in branch.superseded if one.attempt in older.attempts)
        branches[prefix] = dataclasses.replace(branch, superseded=kept)
    taken = {other.attempt for other in waiting if other.prefix in saved}
    unindexed = [*(one for one in index.unindexed if attempt_of(one) not in taken), *later]
    document = {**index.document, "nonce": secrets.token_hex(16), **({"last attempt": last} if last else {})}
    new = leaves_index.LeavesIndex(branches=branches, document=document, unindexed=unindexed)
    data = leaves_index.encode_leaves_index(new)
    past = itertools.chain.from_iterable(each.superseded for each in branches.values())
    dropped = [one.attempt for one in past if one.since + older.grace <= older.now]
    named = (*unindexed, *(each.record for each in branches.values() if each.record is not None))
    live = {attempt_of(one) for one in named}
    if None in live or not live.isdisjoint(dropped):
        dropped = []  # something in the index is damaged: nothing is removed on its word
    return Update(moving=data, moved=data, moves=(), dropped=tuple(dropped))


def read_unindexed(index: leaves_index.LeavesIndex) -> list[LeavesRecord]:
    """Return the saves that are to be listed later, but for those whose record cannot be read."""
    found = []
    for record in index.unindexed:
        with contextlib.suppress(CorruptError, FormatError, UnsupportedError):
            found.append(parse_record(record))
    return found


def _parsed(old: bytes | None) -> leaves_index.LeavesIndex:
    return leaves_index.LeavesIndex(branches={}, document={}) if old is None else leaves_index.parse_leaves_index(old)


def _branch_of(record: LeavesRecord, *, stays: bool = False) -> leaves_index.IndexBranch:
    """Return what the index says of a branch that is saved."""
    nodes = leaves_index.entries_of(record, stays=stays)
    entries = [leaves_index.Entry(node["path"], node) for node in nodes]
    document = encode_record(record)
    return leaves_index.IndexBranch(prefix=record.prefix, entries=entries, record=document, moving=None, stays=stays)


def _check_disjoint(records: Sequence[LeavesRecord], others: Mapping[str | None, Sequence[str]]) -> None:
    """Require that no leaf lies in, around, or instead of another branch's leaf."""
    folders: dict[str | None, Sequence[str]] = {record.prefix: record.folders for record in records}
    folders |= others
    for record in records:
        for prefix, there in folders.items():
            if prefix != record.prefix:
                require_disjoint(record, prefix, there)


def require_disjoint(record: LeavesRecord, prefix: str | None, folders: Sequence[str], which: str = "") -> None:
    """Refuse leaves in, around, or instead of those of another prefix: no index could list both.

    Args:
        record: of the leaves.
        prefix: the other prefix.
        folders: the folders of its leaves.
        which: what has to be said of its tree.
    """
    clash = _clash(record.folders, folders) if folders and record.folders else None
    if clash is not None:
        raise MismatchError(
            f"the folder {clash[0]!r:.200} of {_shown(record.prefix)} and {clash[1] or '.'!r:.200} "
            f"of {_shown(prefix)}{which} are the same, or one lies in the other",
            hint="save one of them with another prefix, or into another directory",
        )


def _folders(branch: leaves_index.IndexBranch, *, replaced: bool = False) -> list[str]:
    """Return where the leaves of a branch lie.

    Of one that is to be replaced, what an unfinished save was to clear as well; of another one as far as it is known.
    """
    folders = dict.fromkeys(entry.path for entry in branch.entries)
    if replaced:
        folders |= dict.fromkeys(branch.moving or ())
    if branch.record is not None:
        try:
            folders |= dict.fromkeys(parse_record(branch.record).folders)
        except (CorruptError, FormatError, UnsupportedError) as error:
            # It is not this save that damaged another one; the store refuses to move onto files of any kind.
            if replaced:
                whose = f"{_shown(branch.prefix)}, which is to be replaced"
                error.message = f"{leaves_index.LEAVES_INDEX}: {whose}: {error.message}"
                raise
    return list(folders)


def _clash(mine: Sequence[str], others: Iterable[str]) -> tuple[str, str] | None:
    """Return a folder of each that are equal, or of which one lies in the other."""
    # In the order of texts, everything that begins as a folder does follows right behind it. The directory is "".
    ends = sorted((f"{one}/" if one else "", which) for which, some in enumerate((mine, others)) for one in some)
    around: dict[int, str] = {}  # of each of the two the outermost folder around those that follow
    for inner, which in ends:
        if which not in around or not inner.startswith(around[which]):
            around[which] = inner
        outer = around.get(1 - which)
        if outer is not None and inner.startswith(outer):
            found = inner[:-1], outer[:-1]
            return found[which], found[1 - which]
    return None


def _shown(prefix: str | None) -> str:
    return "the tree without prefix" if prefix is None else f"prefix {prefix!r:.200}"


def unfinished_update(index: bytes) -> Update | None:
    """Return what an index promises that its saver did not do; None for nothing, and for one that cannot be read."""
    try:
        found = leaves_index.parse_leaves_index(index)
    except TreeringError:
        return None
    branches, moves = dict(found.branches), []
    for prefix, branch in found.branches.items():
        attempt = None if branch.moving is None else attempt_of(branch.record or b"")
        if attempt is not None:
            moves.append(Move(attempt=attempt, cleared=branch.moving or ()))
            branches[prefix] = dataclasses.replace(branch, moving=None)
    if not moves:
        return None
    moved = leaves_index.encode_leaves_index(dataclasses.replace(found, branches=branches))
    return Update(moving=index, moved=moved, moves=tuple(moves))
