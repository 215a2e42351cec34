"""The branches of a leaves directory. Each one is ours and intact, another program's, or damaged. No numpy."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Sequence
from typing import Final, TypeAlias

from treering._codec.zarr import parse_zarray
from treering._leaves.documents.foreign import foreign_record
from treering._leaves.documents.index import LEAVES_INDEX, IndexBranch, LeavesIndex, parse_leaves_index, record_of
from treering._leaves.documents.record import LeavesRecord, OpenBranch, arrays_of
from treering._printable import kind_of
from treering._store.failures import DataFileMissing, LinkRefused, naming_file
from treering._store.leaves_folder.moves import marker_of
from treering._store.leaves_folder.open_leaves import OpenLeaves
from treering._values.human import join_first, near, pluralize
from treering._values.leaves_names import ZARRAY
from treering.errors import Busy, Corrupt, Format, Mismatch, NotFound, StoreFailed, Unsupported

# Each try needs a whole save between reading the index and reading what it names.
TRIES: Final = 100
_SHOWN: Final = 20
_LARGEST_ZARRAY: Final = 1 << 20
# Almost all are no longer than this, and are read in half the time.
_USUAL_ZARRAY: Final = 4 << 10


class _Every(enum.Enum):
    """Stands for every branch where a prefix may stand."""

    BRANCH = "every branch"


ALL: Final = _Every.BRANCH
"""All branches of a directory, in place of one prefix."""

Prefix: TypeAlias = str | _Every | None
"""A prefix; None or "" for the tree without one; ``ALL``."""


def read_branches(folder: OpenLeaves, *, prefix: Prefix = ALL) -> tuple[list[OpenBranch], list[IndexBranch]]:
    """Return the branches of an open directory, and the same branches as they stand in the index.

    A branch is ours where its record is intact and lists what the index lists. Where it does not, and no ``.zarray`` of
    its arrays has our marker, another program wrote it: it is read as it is, unverified. Otherwise something was lost.

    Args:
        folder: the directory.
        prefix: which branch; ``ALL`` for every one.

    Raises:
        NotFound: there is no index; the hint says what is there instead.
        Mismatch: no branch has this prefix; those that are there are named.
        Corrupt: the index, a record or a ``.zarray`` is damaged.
        Format: an index of another format, or a newer version wrote it.
    """
    for _ in range(TRIES):
        read = _select(_read_index(folder), prefix, folder)
        try:
            return [judge_branch(folder, branch) for branch in read], read
        except (Corrupt, NotFound):
            # Perhaps a save replaced the branch meanwhile; then its index is there now.
            if is_unchanged(folder, read):
                raise
    raise replaced_too_often(folder)


def is_unchanged(folder: OpenLeaves, read: Sequence[IndexBranch]) -> bool:
    """Tell whether the index still says the same of branches that were read from it; also where it is lost now."""
    try:
        now = _read_index(folder).branches
    except (NotFound, Corrupt, Format, Unsupported):
        return True
    return all(now.get(branch.prefix) == branch for branch in read)


def replaced_too_often(folder: OpenLeaves) -> Busy:
    """Return the error for a directory that is overwritten again and again while it is read."""
    return Busy(f"{str(folder.path)!r} was replaced {TRIES} times while it was being read", hint="try again")


def _read_index(folder: OpenLeaves) -> LeavesIndex:
    data = folder.read_index()
    with naming_file(folder.path / LEAVES_INDEX):
        return parse_leaves_index(data)


def _select(index: LeavesIndex, prefix: Prefix, folder: OpenLeaves) -> list[IndexBranch]:
    if isinstance(prefix, _Every):
        return list(index.branches.values())
    if not isinstance(prefix, str | None):
        raise Unsupported(f"prefix is {kind_of(prefix)}, but must be a str or None")
    branch = index.branches.get(prefix or None)
    if branch is not None:
        return [branch]
    there = [text for text in index.branches if text is not None]
    where, shown = repr(str(folder.path)), join_first(list(map(repr, there)), _SHOWN)
    hint: str | None = None
    if not prefix and not there:
        what = f"the index of {where} lists no tree"
    elif not prefix:
        what, hint = f"{where} holds only trees with prefixes: {shown}", f"for example prefix={there[0]!r}"
    elif not there:
        what, hint = f"{where} has no prefix {prefix!r}: its tree has none", "omit prefix="
    else:
        close = near(prefix, there)
        what, hint = f"{where} has no prefix {prefix!r:.200}; there are {shown}", f"did you mean {close!r}?"
        hint = hint if close else None
    waiting = "; a save that it does not list waits for treering.leaves.index_leaves" if folder.pending() else ""
    raise Mismatch(what + waiting, hint=hint)


# ------------------------------------------------------------------------------------------------------------ judgement


def judge_branch(folder: OpenLeaves, branch: IndexBranch) -> OpenBranch:
    """Return one branch of an open directory, judged as `read_branches` says; raises as that does."""
    trouble: Corrupt | Format | Unsupported | None = None
    try:
        with naming_file(folder.path / LEAVES_INDEX):
            record = record_of(branch)
        if record is not None:
            attempt = record.attempt if branch.moving is not None or branch.stays else None
            if not _is_replaced(folder, record, attempt):
                return OpenBranch(record=record, arrays=arrays_of(record), attempt=attempt, verified=True)
    except (Corrupt, Format, Unsupported) as error:
        if not branch.entries:
            raise
        trouble = error
    return _read_foreign(folder, branch, trouble)


def _is_replaced(folder: OpenLeaves, record: LeavesRecord, attempt: str | None) -> bool:
    """Tell whether another program wrote every array anew, with the very names, shapes and dtypes of the record.

    One ``.zarray`` answers that, unless it has no marker. What is missing or damaged is found when it is read.
    """
    for name in record.folders:
        try:
            data = read_zarray(folder, name, attempt)
        except (NotFound, Corrupt, LinkRefused, StoreFailed):
            return False
        # One with our attempt anywhere in it is ours, and damaged where that is no marker any more.
        if marker_of(data) is not None or record.attempt.encode() in data:
            return False
    return bool(record.folders)


def _read_foreign(folder: OpenLeaves, branch: IndexBranch, trouble: Exception | None) -> OpenBranch:
    """Return a branch that another program wrote.

    Raises:
        Corrupt: it is ours after all, or damaged.
    """
    arrays = []
    for path, _ in branch.entries:
        try:
            array = parse_zarray(read_zarray(folder, path, None))
        except (NotFound, Corrupt, Format, Unsupported) as error:
            raise trouble or _locate_error(error, path) from error
        if array.marker is not None:
            raise trouble or _recordless_error(folder, branch)
        arrays.append(array)
    with naming_file(folder.path / LEAVES_INDEX):
        record = foreign_record(branch.prefix, branch.entries, arrays)
    # In the order of the leaves, which is not that of the entries where those of one folder do not stand together.
    return OpenBranch(record=record, arrays=arrays_of(record), attempt=None, verified=False)


def read_zarray(folder: OpenLeaves, name: str, attempt: str | None) -> bytes:
    """Return the bytes of the ``.zarray`` in a leaf's folder.

    Raises:
        DataFileMissing: it is not there.
        Corrupt: it is larger than any, or ``name`` leads out of the directory.
        LinkRefused: it, or a folder on the way, is a link.
    """
    with contextlib.suppress(DataFileMissing):
        (data,) = folder.read_small(name, [(ZARRAY, _USUAL_ZARRAY)], attempt)
        if len(data) <= _USUAL_ZARRAY:
            return data
    with folder.open(name, ZARRAY, attempt) as file:
        if file.size > _LARGEST_ZARRAY:
            raise Corrupt(f"{str(file.path)!r} has {pluralize(file.size, 'bytes')}, more than any array needs")
        return file.read(0, file.size)


def _locate_error(error: NotFound | Corrupt | Format | Unsupported, path: str) -> Corrupt | Format | Unsupported:
    """Return the error with the leaf's name; a file that the index lists and that is not there is damage."""
    where = tuple(path.split("/")) if path else None
    if isinstance(error, NotFound):
        what = f"{path or '.'}/.zarray is missing, and {LEAVES_INDEX!r} lists that array"
        return Corrupt(what, path=where, hint="copy the whole directory, or save it again")
    error.path = error.path or where
    return error


def _recordless_error(folder: OpenLeaves, branch: IndexBranch) -> Corrupt:
    what = "its tree" if branch.prefix is None else f"the tree with the prefix {branch.prefix!r}"
    return Corrupt(
        f"{str(folder.path / LEAVES_INDEX)!r} has lost the record of {what}, which treering wrote",
        hint="treering.leaves.index_leaves finds its copy under .treering; if that is lost too, use a backup",
    )
