"""The branches of a leaves directory. Each one is ours and intact, another program's, or damaged. No numpy.

A listing of the directory says what its headers say, with prefixes as branches.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

from treering._checkpoint.detect import Form
from treering._codec.zarr import (
    LONGEST_DOCUMENT,
    ZarrArray,
    chunk_bytes,
    chunk_count,
    chunk_name,
    marker_of,
    parse_zarray,
    zarray_bytes,
)
from treering._format.index import Index
from treering._format.listing import UNKNOWN_KIND, FileRecord, LeafRecord, Listing, iter_leaves, list_index
from treering._leaves.documents.index import LEAVES_INDEX, IndexBranch, LeavesIndex, parse_leaves_index, record_of
from treering._leaves.documents.join import add_structure, foreign_record, join_records
from treering._leaves.documents.record import LeavesRecord, OpenBranch, arrays_of
from treering._printable import kind_of
from treering._store.failures import naming_file
from treering._store.leaves_api import OpenLeaves
from treering._store.resolve import open_leaves
from treering._values.human import join_first, near, pluralize
from treering._values.leaves_names import ZARRAY
from treering.errors import (
    BusyError,
    CorruptError,
    FormatError,
    LinkRefusedError,
    MismatchError,
    NotFoundError,
    StoreError,
    UnsupportedError,
)

# Each try needs a whole save between reading the index and reading what it names.
TRIES: Final = 100
_SHOWN: Final = 20
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
        NotFoundError: there is no index; the hint says what is there instead.
        MismatchError: no branch has this prefix; those that are there are named.
        CorruptError: the index, a record or a ``.zarray`` is damaged.
        FormatError: an index of another format, or a newer version wrote it.
    """
    for _ in range(TRIES):
        read = _select(_read_index(folder), prefix, folder)
        try:
            return [judge_branch(folder, branch) for branch in read], read
        except (CorruptError, NotFoundError):
            # Perhaps a save replaced the branch meanwhile; then its index is there now.
            if is_unchanged(folder, read):
                raise
    raise replaced_too_often(folder)


def is_unchanged(folder: OpenLeaves, read: Sequence[IndexBranch]) -> bool:
    """Tell whether the index still says the same of branches that were read from it; also where it is lost now."""
    try:
        now = _read_index(folder).branches
    except (NotFoundError, CorruptError, FormatError, UnsupportedError):
        return True
    return all(now.get(branch.prefix) == branch for branch in read)


def replaced_too_often(folder: OpenLeaves) -> BusyError:
    """Return the error for a directory that is overwritten again and again while it is read."""
    return BusyError(f"{str(folder.path)!r} was replaced {TRIES} times while it was being read", hint="try again")


def _read_index(folder: OpenLeaves) -> LeavesIndex:
    data = folder.read_index()
    with naming_file(folder.path / LEAVES_INDEX):
        return parse_leaves_index(data)


def _select(index: LeavesIndex, prefix: Prefix, folder: OpenLeaves) -> list[IndexBranch]:
    if isinstance(prefix, _Every):
        return list(index.branches.values())
    if not isinstance(prefix, str | None):
        raise UnsupportedError(f"prefix is {kind_of(prefix)}, but must be a str or None")
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
    if folder.unlisted().pending:
        what += "; a save that it does not list waits for treering.leaves.index_leaves"
    raise MismatchError(what, hint=hint)


# ------------------------------------------------------------------------------------------------------------ judgement


def judge_branch(folder: OpenLeaves, branch: IndexBranch) -> OpenBranch:
    """Return one branch of an open directory, judged as `read_branches` says; raises as that does."""
    trouble: CorruptError | FormatError | UnsupportedError | None = None
    try:
        with naming_file(folder.path / LEAVES_INDEX):
            record = record_of(branch)
        if record is not None:
            attempt = record.attempt if branch.moving is not None or branch.stays else None
            if not _is_replaced(folder, record, attempt):
                return OpenBranch(record=record, arrays=arrays_of(record), attempt=attempt, verified=True)
    except (CorruptError, FormatError, UnsupportedError) as error:
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
        except (NotFoundError, CorruptError, LinkRefusedError, StoreError):
            return False
        # One with our attempt anywhere in it is ours, and damaged where that is no marker any more.
        if marker_of(data) is not None or record.attempt.encode() in data:
            return False
    return bool(record.folders)


def _read_foreign(folder: OpenLeaves, branch: IndexBranch, trouble: Exception | None) -> OpenBranch:
    """Return a branch that another program wrote.

    Raises:
        CorruptError: it is ours after all, or damaged.
    """
    arrays = []
    for path, _ in branch.entries:
        try:
            array = parse_zarray(read_zarray(folder, path, None))
        except (NotFoundError, CorruptError, FormatError, UnsupportedError) as error:
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
        DataFileMissingError: it is not there.
        CorruptError: it is larger than any, or ``name`` leads out of the directory.
        LinkRefusedError: it, or a folder on the way, is a link.
    """
    (found,) = folder.read_each([(name, [(ZARRAY, _USUAL_ZARRAY)], attempt)])
    if found is not None and len(found[0]) <= _USUAL_ZARRAY:
        return found[0]
    with folder.open(name, ZARRAY, attempt) as file:
        if file.size > LONGEST_DOCUMENT:
            raise CorruptError(f"{str(file.path)!r} has {pluralize(file.size, 'bytes')}, more than any array needs")
        return file.read(0, file.size)


def _locate_error(
    error: NotFoundError | CorruptError | FormatError | UnsupportedError, path: str
) -> CorruptError | FormatError | UnsupportedError:
    """Return the error with the leaf's name; a file that the index lists and that is not there is damage."""
    where = tuple(path.split("/")) if path else None
    if isinstance(error, NotFoundError):
        what = f"{path or '.'}/.zarray is missing, and {LEAVES_INDEX!r} lists that array"
        return CorruptError(what, path=where, hint="copy the whole directory, or save it again")
    error.path = error.path or where
    return error


def _recordless_error(folder: OpenLeaves, branch: IndexBranch) -> CorruptError:
    what = "its tree" if branch.prefix is None else f"the tree with the prefix {branch.prefix!r}"
    return CorruptError(
        f"{str(folder.path / LEAVES_INDEX)!r} has lost the record of {what}, which treering wrote",
        hint="treering.leaves.index_leaves finds its copy under .treering; if that is lost too, use a backup",
    )


def list_leaves(path: str | os.PathLike[str]) -> Listing:
    """Return the listing of a leaves directory from its index, and of other programs' arrays from their ``.zarray``.

    Raises:
        NotFoundError: there is no index.
        CorruptError, FormatError, UnsupportedError: the index, a record or a ``.zarray`` is damaged, of another
            format, or newer.
        StoreError: the system refuses.
    """
    with open_leaves(path) as folder:
        branches, read = read_branches(folder)
        branches = [add_structure(folder, branch) for branch in branches]
        index = join_records([each.record for each in branches], verified=all(each.verified for each in branches))
        listing = build_listing(index, branches)
        size = len(folder.read_index())
        return dataclasses.replace(
            listing,
            files=(FileRecord(name=LEAVES_INDEX, nbytes=size),),
            file_bytes=size + sum(_file_bytes(folder, branch) for branch in branches),
            notes=describe_state(folder, read),
        )


def build_listing(index: Index, branches: Sequence[OpenBranch]) -> Listing:
    """Return the branches of a leaves directory as a listing; how large its files are is not looked at.

    Args:
        index: what the branches are together.
        branches: all that are in it.
    """
    listing = list_index(index, form=Form.LEAVES.value, files=(), file_bytes=0, leaves=_place_leaves(index, branches))
    return dataclasses.replace(
        listing,
        prefixes=[branch.record.prefix or "" for branch in branches],
        unverified=[branch.record.prefix or "" for branch in branches if not branch.verified],
    )


def describe_state(folder: OpenLeaves, read: Sequence[IndexBranch]) -> list[str]:
    """Say what a save left to do in a directory that is whole without it.

    Args:
        folder: the directory.
        read: the branches of its index.
    """
    moving = [repr(branch.prefix) if branch.prefix else "no prefix" for branch in read if branch.moving is not None]
    notes = []
    if moving:
        what = f"the save of {', '.join(moving)} has not moved all its files to their key paths"
        notes.append(f"{what}; the next save does, and until then other programs do not see it whole")
    try:
        waiting = len(folder.unlisted().pending)
    except (LinkRefusedError, StoreError) as error:
        # No reader needs what lies there.
        return [*notes, f"saves without an index cannot be listed: {error}"]
    if waiting:
        saves = "1 save is" if waiting == 1 else f"{waiting} saves are"
        notes.append(f"{saves} not in the index; treering.leaves.index_leaves adds saves without one")
    return notes


def _place_leaves(index: Index, branches: Sequence[OpenBranch]) -> Iterator[Any]:
    """Walk through the leaves of all branches, each stored one with where and how it lies there."""
    stored = ((branch, *row) for branch in branches for row in zip(branch.record.folders, branch.arrays, strict=True))
    # Thousands of leaves share a few layouts.
    known: dict[ZarrArray, tuple[int, str]] = {}
    for leaf in iter_leaves(index):
        if not isinstance(leaf, LeafRecord):
            yield leaf
            continue
        branch, name, array = next(stored)
        if array not in known:
            known[array] = (count := chunk_count(array)), chunk_name(array, 0) if count else ""
        count, first = known[array]
        kind = index.type_of(leaf.number or 0).kind if branch.verified or leaf.dtype is None else UNKNOWN_KIND
        # A compressed chunk holds no byte of the leaf that could be looked at.
        offset = 0 if count and array.compressor is None else None
        # Another program may have put an array into the directory itself.
        file = f"{name}/{first}" if name and count else first or None
        yield dataclasses.replace(
            leaf,
            kind=kind,
            offset=offset,
            file=file,
            chunks=count,
            chunk_shape=array.chunks,
            compressor=array.compressor,
        )


def _file_bytes(folder: OpenLeaves, branch: OpenBranch) -> int:
    """Add up the files of one branch, as its record says."""
    total = sum(branch.record.sizes)
    for name, array in zip(branch.record.folders, branch.arrays, strict=True):
        total += len(zarray_bytes(array))
        if array.compressor is None:
            total += chunk_count(array) * chunk_bytes(array)
        elif not branch.verified:
            total += sum(_sizes_there(folder, name, array))
    return total


def _sizes_there(folder: OpenLeaves, name: str, array: ZarrArray) -> Iterator[int]:
    """Walk through the chunk files of an array that no record describes, up to the first that is missing."""
    for number in range(chunk_count(array)):
        try:
            with folder.open(name, chunk_name(array, number), None) as file:
                yield file.size
        except NotFoundError:
            return
