"""What becomes of an index when branches are saved, and what the store has to know of indexes without reading them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import secrets
from collections.abc import Mapping, Sequence

from treering._leaves.documents import index as leaves_index
from treering._leaves.documents.record import LeavesRecord, attempt_of, encode_record, find_overlap, parse_record
from treering._store.leaves_api import Move, OlderAttempts, Update
from treering.errors import CorruptError, FormatError, MismatchError, TreeringError, UnsupportedError


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
    index = leaves_index.LeavesIndex(branches={}, document={}) if old is None else leaves_index.parse_leaves_index(old)
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
    moves = []
    for record in records:
        before = branches.get(record.prefix)
        replaced = [] if before is None else [each for each in _folders(before, replaced=True) if each not in kept]
        if before is not None and before.stays:
            replaced = []  # nothing of it is at its key paths
        moving = tuple(dict.fromkeys((*replaced, *cleared.get(record.prefix, ()))))
        branches[record.prefix] = leaves_index.IndexBranch(
            prefix=record.prefix,
            entries=[leaves_index.Entry(node["path"], node) for node in leaves_index.entries_of(record)],
            record=encode_record(record),
            moving=moving,
        )
        moves.append(Move(attempt=record.attempt, cleared=moving))
    _check_disjoint(records, others)
    first, second = leaves_index.encode_steps(dataclasses.replace(index, branches=branches), saved)
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
    index = leaves_index.LeavesIndex(branches={}, document={}) if old is None else leaves_index.parse_leaves_index(old)
    saved = {record.prefix: record.attempt for record in records}
    others = {prefix: branch for prefix, branch in index.branches.items() if prefix not in saved}
    waiting = read_unindexed(index)
    _check_disjoint(records, {prefix: _folders(branch) for prefix, branch in others.items()})
    for record, other in itertools.product(records, waiting):
        if other.prefix not in saved:
            require_disjoint(record, other.prefix, other.folders, " that was saved without an index")
    # What is gone already waits no more.
    branches = {prefix: _replace_superseded(branch, branch.superseded, older) for prefix, branch in others.items()}
    for record in records:
        gone = [other.attempt for other in waiting if other.prefix == record.prefix and other.attempt != record.attempt]
        branches[record.prefix] = _branch_in_attempt(record, index.branches.get(record.prefix), gone, older)
    taken = {other.attempt for other in waiting if other.prefix in saved}
    unindexed = [*(one for one in index.unindexed if attempt_of(one) not in taken), *later]
    document = {**index.document, "nonce": secrets.token_hex(16), **({"last attempt": last} if last else {})}
    new = leaves_index.LeavesIndex(branches=branches, document=document, unindexed=unindexed)
    data = leaves_index.encode_leaves_index(new)
    superseded = itertools.chain.from_iterable(each.superseded for each in branches.values())
    dropped = [one.attempt for one in superseded if one.since + older.grace <= older.now]
    named = (*unindexed, *(each.record for each in branches.values() if each.record is not None))
    live = {attempt_of(one) for one in named}
    if None in live or not live.isdisjoint(dropped):
        dropped = []  # something in the index is damaged: nothing is removed on its word
    return Update(moving=data, moved=data, moves=(), dropped=tuple(dropped))


def list_later(old: bytes, record: bytes, older: OlderAttempts) -> Update:
    """Return the index in a bucket that holds the record of a save which is to be listed later.

    Raises:
        CorruptError, FormatError: as `update_for`.
    """
    return update_in_attempts(old, [], older, later=[record])


def index_unindexed(old: bytes | None, older: OlderAttempts, last: str) -> Update:
    """Return the index in a bucket that lists, of each prefix, the newest save that was to be listed later.

    Raises:
        CorruptError, FormatError, MismatchError: as `update_for`.
    """
    waiting = read_unindexed(leaves_index.parse_leaves_index(old or b""))
    newest = {record.prefix: record for record in waiting}
    return update_in_attempts(old, list(newest.values()), older, last=last)


def read_unindexed(index: leaves_index.LeavesIndex) -> list[LeavesRecord]:
    """Return the saves that are to be listed later, but for those whose record cannot be read."""
    found = []
    for record in index.unindexed:
        with contextlib.suppress(CorruptError, FormatError, UnsupportedError):
            found.append(parse_record(record))
    return found


def _branch_in_attempt(
    record: LeavesRecord, before: leaves_index.IndexBranch | None, gone: Sequence[str], older: OlderAttempts
) -> leaves_index.IndexBranch:
    """Return the branch of a save whose files stay in the folder of its attempt.

    Args:
        record: of the save.
        before: the branch that it replaces.
        gone: other attempts that it replaces.
        older: what older attempts have there.

    Raises:
        CorruptError, FormatError: the branch that it replaces is damaged or newer.
    """
    superseded: list[leaves_index.SupersededSave] = []
    if before is not None:
        _folders(before, replaced=True)  # what is damaged or newer is not replaced
        superseded += before.superseded
        gone = [*filter(None, [attempt_of(before.record or b"")]), *gone]
    superseded += [leaves_index.SupersededSave(attempt, older.now) for attempt in gone]
    branch = leaves_index.IndexBranch(
        prefix=record.prefix,
        entries=[leaves_index.Entry(node["path"], node) for node in leaves_index.entries_of(record, stays=True)],
        record=encode_record(record),
        moving=None,
        stays=True,
    )
    return _replace_superseded(branch, superseded, older)


def _replace_superseded(
    branch: leaves_index.IndexBranch, superseded: Sequence[leaves_index.SupersededSave], older: OlderAttempts
) -> leaves_index.IndexBranch:
    kept = tuple(one for one in superseded if one.attempt in older.attempts)
    return dataclasses.replace(branch, superseded=kept)


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


def _clash(mine: Sequence[str], others: Sequence[str]) -> tuple[str, str] | None:
    there = set(others)
    if "" not in there and find_overlap((*mine, *there)) is None:
        return None
    around = {above: other for other in others for above in _above(other)}
    for folder in mine:
        if folder in there:
            return folder, folder
        if folder in around:
            return folder, around[folder]
        for above in _above(folder):
            if above in there:
                return folder, above
    return None


def _above(folder: str) -> list[str]:
    parts = folder.split("/")
    return ["", *("/".join(parts[:count]) for count in range(1, len(parts)))] if folder else []


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
