"""The arrays of an opened leaves directory: each chunk file opened when it is touched, checked, and closed again.

Three ways lead to an array. A small leaf is read whole, many in one job, by one thread. Chunks that lie in their files
as they are go the way of a checkpoint's (`StoredArrays`), one file each. All others are undone chunk by chunk.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from treering._arrays.incoming import Wish
from treering._arrays.jobs import Progress, Tally, Work, run_all
from treering._format.index import Index
from treering._leaves.chunks.arrays import BranchArrays, dtype_in
from treering._leaves.chunks.files import BranchFiles, OpenBranch
from treering._leaves.chunks.open_chunks import OpenChunks
from treering._plan.exchange import StoredChunk

if TYPE_CHECKING:
    import numpy as np

    from treering._leaves.folder.leaves_folder import OpenLeaves


class LeavesArrays:
    """The arrays of one opened leaves directory.

    Args:
        index: what is in it; the stored leaves of the branches follow each other in order.
        branches: its branches.
        folder: the open directory.
        mapped: take memory from maps of the files where a wanted box lies there in one piece.

    Attributes:
        bytes_read: how many bytes of arrays have been read and checked: wanted ones and those in the same blocks.
    """

    def __init__(
        self, index: Index, branches: Sequence[OpenBranch], folder: OpenLeaves, *, mapped: bool = False
    ) -> None:
        self.index = index
        self.bytes_read = 0
        self._open = OpenChunks()
        self._branches: list[BranchArrays] = []
        stored = [leaf for leaf, number in enumerate(index.leaf_types) if index.types[number].stored]
        at = 0
        for branch in branches:
            some = stored[at : at + len(branch.arrays)]
            at += len(branch.arrays)
            if some:
                files = BranchFiles(branch, [index.keys[leaf] for leaf in some], folder)
                self._branches.append(BranchArrays(index, some, files, self._open, mapped=mapped))
        if at != len(stored):
            raise AssertionError(f"the index has {len(stored)} stored leaves, its branches have {at}")
        self._first_leaves = [branch.leaves[0] for branch in self._branches]

    def dtype_of(self, leaf: int) -> np.dtype[Any]:
        """Return the dtype of what is stored of a leaf."""
        return dtype_in(self.index, leaf)

    def stored_chunks(self, leaf: int) -> tuple[StoredChunk, ...]:
        """Return how a stored leaf lies."""
        return self._branches[self._number_of_branch(leaf)].stored_chunks(leaf)

    def check_files(self) -> None:
        """Nothing is left to check: reading a leaf looks at all files that it has, of which an empty one has one."""

    def read(self, wishes: Sequence[Wish], progress: Progress | None = None) -> None:
        """Fill ``arrays`` of every wish.

        Raises:
            Corrupt: a file is missing, cut short, too long, or its bytes are not those that were saved.
            StoreFailed: the system refuses.
        """
        small, shared = Work(), Work()
        by_branch: dict[int, list[Wish]] = {}
        for wish in wishes:
            by_branch.setdefault(self._number_of_branch(wish.leaf), []).append(wish)
        with self._open:
            for number, some in by_branch.items():
                self._branches[number].plan(some, small, shared)
            run_all(shared, Tally(small.nbytes + shared.nbytes, progress), small)
        self.bytes_read += small.nbytes + shared.nbytes

    def _number_of_branch(self, leaf: int) -> int:
        return bisect.bisect_right(self._first_leaves, leaf) - 1
