"""Two checkpoints or files -> which leaves changed, and by how much."""

from __future__ import annotations

import contextlib
import math
import os
from typing import Any, Final

from treering._format.listing import LeafRecord
from treering._inspect.diff import blocks_of, compare_listings, needs_reading, pair_nodes
from treering._inspect.inspect import ArrayView, open_leaf_by_leaf
from treering._printable import show_path
from treering._report.statistics import BLOCK_BYTES
from treering._store.resolve import kept, store_at
from treering._values.human import pluralize
from treering._view.plain import visible
from treering._view.progress import reporter, showing

_MOST_ROWS: Final = 5_000
_WORDS: Final = {"missing": "only in one", "value": "another value", "node": "another container"}


def compare(before: str | os.PathLike[str], after: str | os.PathLike[str], *, read: bool) -> dict[str, Any]:
    """Return a table of the leaves that differ, those that changed most first.

    Args:
        before: the one to which the other is compared; of a run its latest step.
        after: the one that is shown.
        read: also read arrays that lie in a bucket; those on a disk are read in any case.

    Raises:
        NotFoundError, StoreError, CorruptError, FormatError: one of them cannot be read.
    """
    before = kept(before)
    read = read or not any(store_at(path).asks_by_request for path in (before, after))
    told = reporter(True, "comparing")
    with open_leaf_by_leaf(before) as left, open_leaf_by_leaf(after) as right, showing(told):
        differences = compare_listings(left.listing, right.listing)
        rows: list[list[Any]] = [
            [each.key, _WORDS.get(each.what, each.what), each.a or "", each.b or "", "", ""] for each in differences
        ]
        pairs = [pair for pair in pair_nodes(left.listing.root, right.listing.root) if needs_reading(*pair[1:])]
        arrays = [(key, a, b) for key, a, b in pairs if all(isinstance(x, LeafRecord) and x.dtype for x in (a, b))]
        changed = []
        for number, (key, a, b) in enumerate(arrays if read else ()):
            if told is not None:
                told(number, len(arrays))
            if (found := measure_change(left.array(a), right.array(b))) is not None:
                changed.append((found[0], [key, *found[1]]))
    rows += [row for _, row in sorted(changed, key=lambda pair: -pair[0])]
    same = len(arrays) - len(changed)
    note = f"{pluralize(same, 'arrays', ',')} are equal bit for bit." if read else "Arrays were not read: --stats does."
    return {
        "id": "changes",
        "title": f"Changes: {pluralize(len(rows), 'differences', ',')} from {visible(show_path(os.fspath(before)))}",
        "note": note,
        "heads": ["key", "what differs", "before", "after", "largest change", "relative change"],
        "right": [4, 5],
        "rows": [[visible(str(cell), 300) for cell in row] for row in rows[:_MOST_ROWS]],
    }


def measure_change(before: ArrayView, after: ArrayView) -> tuple[float, list[str]] | None:
    """Compare two arrays of one shape and dtype block by block; None where every bit is the same.

    Returns:
        The relative change, the norm of the difference by that of the first, and texts for a row: the items that
        differ, of how many, the largest change of an item, and the relative change.
    """
    import numpy as np

    differing = items = 0
    most = apart = size = 0.0
    for box in blocks_of(before.shape, before.dtype.itemsize, BLOCK_BYTES):
        old, new = (np.asarray(view[box], order="C").reshape(-1) for view in (before, after))
        bits = (old.view(np.uint8) != new.view(np.uint8)).reshape(old.size, -1)
        items += old.size
        differing += int(bits.any(axis=1).sum()) if old.size else 0
        wide = np.complex128 if old.dtype.kind == "c" else np.float64
        with np.errstate(all="ignore"):
            left, right = old.astype(wide), new.astype(wide)
            change = np.abs(right - left)
            most = max(most, float(np.nan_to_num(change, nan=0.0).max(initial=0.0)))
            apart += float((np.nan_to_num(change, nan=0.0) ** 2).sum())
            size += float((np.abs(np.nan_to_num(left, nan=0.0)) ** 2).sum())
    if not differing:
        return None
    relative = math.inf
    with contextlib.suppress(ZeroDivisionError):
        relative = math.sqrt(apart / size)
    percent = f"{100 * relative:.3g}%" if math.isfinite(relative) else "from zero"
    return relative, [f"{differing:,} of {items:,} items", "", "", f"{most:.4g}", percent]
