"""A leaves directory as a source of leaves: one of its branches, or all of them as one tree. No jax."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from treering._arrays.source import Source
from treering._leaves.branches import ALL, JudgedBranch, Leaves, Prefix, is_as_read, judged_leaves
from treering._leaves.chunks.arrays import LeavesArrays
from treering._leaves.chunks.files import OpenBranch
from treering._leaves.documents.join import opened_index
from treering._leaves.folder.leaves_folder import OpenLeaves


class LeavesSource(Source):
    """A leaves directory open for reading.

    Attributes:
        folder: the directory.
        branches: those that make up the tree; their stored leaves follow each other in the index.
    """

    def __init__(self, folder: OpenLeaves, leaves: Leaves, prefix: Prefix, *, mapped: bool) -> None:
        self.folder = folder
        self.branches: Sequence[JudgedBranch] = leaves.branches
        records = [branch.record for branch in leaves.branches]
        if prefix is not ALL:
            # The tree of one branch, whatever it is called.
            records = [dataclasses.replace(record, prefix=None) for record in records]
        index = opened_index(records, verified=all(branch.verified for branch in leaves.branches))
        opened = [
            OpenBranch(record=branch.record, arrays=branch.arrays, attempt=branch.attempt, verified=branch.verified)
            for branch in leaves.branches
        ]
        super().__init__(
            index,
            LeavesArrays(index, opened, folder, mapped=mapped),
            structured=index.verified,
            raw_keys=not index.verified,
            mapped=mapped,
            is_current=lambda: is_as_read(folder, leaves.read),
        )


def opened_leaves(
    path: str | os.PathLike[str], files: contextlib.ExitStack, *, mapped: bool = False, prefix: Prefix = ALL
) -> LeavesSource:
    """Open a leaves directory; it stays open until ``files`` closes it.

    A branch of another program is read without checksums; the source's ``structured`` and ``index.verified`` say so.
    The source's ``is_current`` tells whether a save has replaced what was opened: damage may come from that, and
    whoever finds some opens it again, as `treering._checkpoint.retry_on_overwrite` does.

    Args:
        path: the directory.
        files: closes it.
        mapped: whether arrays may be maps of the files.
        prefix: which branch is the tree; ``ALL``: a tree without prefix alone is it, else each prefix is a branch.

    Raises:
        NotFound: there is no directory or no index.
        Mismatch: no branch has this prefix.
        Corrupt, Format, Unsupported: the index or a record is damaged, of another format, or newer.
        StoreFailed: the system refuses.
    """
    folder = files.enter_context(OpenLeaves(Path(path)))
    return LeavesSource(folder, judged_leaves(folder, prefix=prefix), prefix, mapped=mapped)
