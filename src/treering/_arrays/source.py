"""An opened tree: what is in it, and what gives boxes of its arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from treering._arrays.incoming import Wish
from treering._arrays.jobs import Progress
from treering._format.index import Index
from treering._plan.exchange import StoredChunk

if TYPE_CHECKING:
    import numpy as np


class Arrays(Protocol):
    """What gives boxes of leaves."""

    def read(self, wishes: Sequence[Wish], progress: Progress | None = None) -> None:
        """Fill ``arrays`` of every wish."""

    def check_files(self) -> None:
        """Require every file to be there and its header to be intact."""

    def dtype_of(self, leaf: int) -> np.dtype[Any]:
        """Return the dtype of what is stored of a leaf."""

    def stored_chunks(self, leaf: int) -> tuple[StoredChunk, ...]:
        """Return how a stored leaf lies; nothing where no part of it can be read without the rest."""


class Source:
    """An opened tree.

    Attributes:
        index: what is in it.
        arrays: its arrays.
        structured: whether its containers are those that were saved.
        raw_keys: whether it knows no typed PRNG keys.
        mapped: whether arrays may be maps of the files.
        held: whether arrays are the source's own memory, the same at every read.
        is_current: tells whether what was opened still stands at the path; it may be False only where a save there can
            take files away from an opened tree.
    """

    def __init__(
        self,
        index: Index,
        arrays: Arrays,
        *,
        structured: bool = True,
        raw_keys: bool = False,
        mapped: bool = False,
        held: bool = False,
        is_current: Callable[[], bool] = lambda: True,
    ) -> None:
        self.index = index
        self.structured = structured
        self.raw_keys = raw_keys
        self.mapped = mapped
        self.held = held
        self.is_current = is_current
        self.read: Callable[[Sequence[Wish], Progress | None], None] = arrays.read
        self.dtype_of = arrays.dtype_of
        self.stored_chunks = arrays.stored_chunks
        self.check_files = arrays.check_files
