"""A leaves directory as a source of leaves: one of its branches, or all of them as one tree. No jax."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from treering._arrays.source import Source
from treering._leaves.branches import ALL, Prefix, is_unchanged, read_branches
from treering._leaves.chunks.arrays import LeavesArrays
from treering._leaves.documents.foreign import add_structure
from treering._leaves.documents.index import IndexBranch
from treering._leaves.documents.join import join_records
from treering._leaves.documents.record import OpenBranch
from treering._store.api import Version
from treering._store.leaves_folder.open_leaves import OpenLeaves
from treering._store.leaves_places import open_leaves
from treering._store.resolve import opened_store


class LeavesSource(Source):
    """A leaves directory open for reading.

    Args:
        folder: the directory.
        branches: those that make up the tree; their stored leaves follow each other in the index.
        read: what the index said of them when they were opened.
        prefix: which branch is the tree; ``ALL``: a tree without prefix alone is it, else each prefix is a branch.
        mapped: whether arrays may be maps of the files.
    """

    def __init__(
        self,
        folder: OpenLeaves,
        branches: Sequence[OpenBranch],
        read: Sequence[IndexBranch],
        *,
        prefix: Prefix = ALL,
        mapped: bool = False,
    ) -> None:
        self.folder = folder
        self.branches = branches
        records = [branch.record for branch in branches]
        if prefix is not ALL:
            # The tree of one branch, whatever it is called.
            records = [dataclasses.replace(record, prefix=None) for record in records]
        index = join_records(records, verified=all(branch.verified for branch in branches))
        super().__init__(
            index,
            LeavesArrays(index, branches, folder, mapped=mapped),
            structured=index.is_exact,
            raw_keys=not index.is_exact,
            mapped=mapped,
            is_current=self._is_current,
        )
        self._read = read
        self._files = _list_files(folder.path, branches)

    def _is_current(self) -> bool:
        same = is_unchanged(self.folder, self._read)
        return same and self._files == _list_files(self.folder.path, self.branches)


def open_source(
    path: str | os.PathLike[str], files: contextlib.ExitStack, *, mapped: bool = False, prefix: Prefix = ALL
) -> LeavesSource:
    """Open a leaves directory; it stays open until ``files`` closes it.

    A branch of another program is read without checksums; the source's ``structured`` and ``index.verified`` say so.
    The source's ``is_current`` tells whether a save has replaced what was opened: damage may come from that, and then
    the directory is opened again (`treering._checkpoint.joint_load`).

    Args:
        path: the directory.
        files: closes it.
        mapped: whether arrays may be maps of the files.
        prefix: which branch is the tree, as for `LeavesSource`.

    Raises:
        NotFoundError: there is no directory or no index.
        MismatchError: no branch has this prefix.
        CorruptError, FormatError, UnsupportedError: the index or a record is damaged, of another format, or newer.
        StoreError: the system refuses.
    """
    folder = files.enter_context(open_leaves(path))
    branches, read = read_branches(folder, prefix=prefix)
    if prefix is ALL:
        branches = [add_structure(folder, branch) for branch in branches]
    return LeavesSource(folder, branches, read, prefix=prefix, mapped=mapped)


def _list_files(path: Path, branches: Sequence[OpenBranch]) -> dict[str, Version] | None:
    """Return which version each file of the branches without checksums is of; None where they are just replaced.

    Another program may write other numbers into the same files, and the same index.
    """
    folders = {folder for branch in branches if not branch.verified for folder in branch.record.folders}
    if not folders:
        return {}
    try:
        with opened_store(path, quick=True) as store:
            return {found.name: found.version for found in store.list() if _folders_of(found.name) & folders}
    except PermissionError:
        return {}  # whoever may read may not be allowed to list
    except OSError:
        return None


def _folders_of(name: str) -> set[str]:
    parts = name.split("/")[:-1]
    return {"/".join(parts[:count]) for count in range(len(parts) + 1)}
