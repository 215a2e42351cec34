"""The arrays of an opened leaves directory: each chunk file opened when it is touched, checked, and closed again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from treering._arrays.incoming import Progress, Wish
from treering._format.index import Index

if TYPE_CHECKING:
    import numpy as np

    from treering._codec.zarr import ZarrArray
    from treering._format.leaves_record import LeavesRecord
    from treering._store.open_leaves_folder import OpenLeaves

__all__ = ["LeavesArrays", "OpenBranch"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenBranch:
    """One branch of a leaves directory, as its record says."""

    record: LeavesRecord
    """What was saved, or what was made up for another writer's branch."""
    arrays: Sequence[ZarrArray]
    """The layout of each stored leaf, in leaf order."""
    attempt: str | None
    """Whose staged files are to be looked at first; None when all of them have been moved."""
    verified: bool
    """Whether the record came with the checksums of its saver."""


class LeavesArrays:
    """The arrays of one opened leaves directory.

    Args:
        index: what is in it; the stored leaves of the branches follow each other in order.
        branches: its branches.
        folder: the open directory.
        mapped: take memory from maps of the files where a wanted box lies there in one piece.
    """

    def __init__(
        self, index: Index, branches: Sequence[OpenBranch], folder: OpenLeaves, *, mapped: bool = False
    ) -> None:
        raise NotImplementedError

    def dtype_of(self, leaf: int) -> np.dtype[Any]:
        """Return the dtype of what is stored of a leaf."""
        raise NotImplementedError

    def check_files(self) -> None:
        """Check what reading every leaf would not."""
        raise NotImplementedError

    def read(self, wishes: Sequence[Wish], progress: Progress | None = None) -> None:
        """Fill ``arrays`` of every wish.

        Raises:
            Corrupt: a file is missing, short, too long, or its bytes are not those that were saved.
            StoreFailed: the system refuses.
        """
        raise NotImplementedError
