"""How many data files each process writes, and which box goes into which: known to all, from the plan alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Final

from treering._plan.save import SavePlan

FILE_BYTES: Final = 32 << 30
"""A file is not begun beyond this many bytes: object stores and copies like files of moderate size."""


def file_counts(plan: SavePlan, limit: int = FILE_BYTES) -> list[int]:
    """Return how many file numbers each process has; the first process's come first.

    Example:
        >>> from treering._plan.save import LeafLayout, plan_save
        >>> big = LeafLayout(nbytes_per_item=4, shape=(1000,), boxes=((((0, 1000),), (1,)),))
        >>> file_counts(plan_save([big], 2), limit=1000)
        [0, 4]
    """
    writers = set(plan.writers)
    return [max(1, -(-load // limit)) if process in writers else 0 for process, load in enumerate(plan.loads)]


def files_by_position(sizes: Iterable[int], count: int, limit: int = FILE_BYTES) -> Sequence[int]:
    """Return for each box, in order, which of a process's files it goes into: the one in which its first byte lies.

    A box larger than a file's limit may leave the numbers after its own without boxes.

    Example:
        >>> files_by_position([600, 600, 600, 200], 2, limit=1000), files_by_position([2500, 500], 3, limit=1000)
        ([0, 0, 1, 1], [0, 2])
    """
    starts = itertools.accumulate(sizes, initial=0)
    # The last start is the end; boxes without items may lie there.
    return [min(start // limit, count - 1) for start in starts][:-1]
