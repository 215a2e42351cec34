"""A record for a branch that another program wrote: arrays in nested dicts, without checksums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from treering._format.leaves_index import Entry
from treering._format.leaves_record import LeavesRecord

if TYPE_CHECKING:
    from treering._codec.zarr import ZarrArray

__all__ = ["foreign_record"]


def foreign_record(prefix: str | None, entries: Sequence[Entry], arrays: Sequence[ZarrArray]) -> LeavesRecord:
    """Return a made up record: nested dicts of jax arrays, in the order of the entries as far as dicts allow.

    Its attempt is ``UNMARKED``, it has no checksums, and `arrays_of` gives the arrays back in the order of its leaves.

    Raises:
        Corrupt: two entries have one folder, or one lies in the other: a leaf was lost when they were written.
    """
    raise NotImplementedError
