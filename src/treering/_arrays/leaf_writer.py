"""Leaves -> the chunk files of a leaves directory: small ones with few system calls, large ones by two threads."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from treering._arrays.incoming import Progress
from treering._arrays.outgoing import Outgoing

if TYPE_CHECKING:
    from treering._codec.zarr import ZarrArray
    from treering._store.leaves_folder import StagedLeaves

__all__ = ["write_leaves"]


def write_leaves(
    staged: StagedLeaves,
    folders: Sequence[str],
    leaves: Outgoing,
    arrays: Sequence[ZarrArray],
    *,
    progress: Progress | None = None,
) -> tuple[list[int], array[int]]:
    """Write every stored leaf: its ``.zarray`` and its chunk files.

    Args:
        staged: where they go.
        folders: the folder of each stored leaf, in leaf order.
        leaves: the leaves; those in ``leaves.sources`` are written.
        arrays: the layout of each of them.
        progress: called from this thread.

    Returns:
        The size of each chunk file of the compressed leaves, and the checksums of all blocks of all chunk files:
        chunk after chunk in the order of the grid, leaf after leaf.

    Raises:
        Unsupported: a compressor that cannot be used here.
        StoreFailed: the system refuses.
    """
    raise NotImplementedError
