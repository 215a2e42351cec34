"""Every array read once, a few MiB at a time -> its statistics and its histogram."""

from __future__ import annotations

import contextlib
import math
import os
from typing import TYPE_CHECKING, Any, Final

from treering._format.listing import LeafRecord
from treering._inspect.diff import blocks_of
from treering._inspect.inspect import ArrayView, open_leaf_by_leaf
from treering._values.human import pluralize
from treering._view.plain import visible
from treering._view.progress import reporter, showing
from treering._view.rows import leaves_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_BYTES: Final = 2 << 20
"""So much of an array is read at a time; as float64, the widest that is computed with, it is at most 8 times that."""
_FINE: Final = 1024
_BARS: Final = 32
_TALLEST: Final = 99
_MOST_ROWS: Final = 5_000


def describe_leaves(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the arrays at a path, and return a table of what is in each; of very many the largest.

    Raises:
        CorruptError, StoreError: a block is damaged or cannot be read.
    """
    rows: list[list[Any]] = []
    told = reporter(True, "reading")
    with open_leaf_by_leaf(path) as tree, showing(told):
        arrays = [
            (key, leaf)
            for key, leaf in leaves_of(tree.listing.root)
            if isinstance(leaf, LeafRecord) and leaf.dtype is not None and leaf.kind != "key"
        ]
        most = sorted(arrays, key=lambda pair: -pair[1].nbytes)[:_MOST_ROWS]
        done, total = 0, sum(leaf.nbytes for _, leaf in most)
        for key, leaf in most:
            rows.append([visible(key, 300), *summarize(tree.array(leaf)).cells()])
            done += leaf.nbytes
            if told is not None:
                told(done, total)
    left = f"; {pluralize(len(arrays) - len(most), 'smaller ones', ',')} not read" if len(arrays) > len(most) else ""
    heads = ["key", "min", "max", "mean", "std", "zeros", "nan", "inf", "histogram"]
    title = f"Statistics of {pluralize(len(most), 'arrays', ',')}{left}"
    return {"id": "statistics", "title": title, "heads": heads, "right": list(range(1, 8)), "rows": rows}


def summarize(view: ArrayView) -> Summary:
    """Read an array block by block; of complex numbers the magnitudes count.

    Raises:
        CorruptError, StoreError: a block is damaged or cannot be read.
    """
    import numpy as np

    found = Summary()
    for box in blocks_of(view.shape, view.dtype.itemsize, BLOCK_BYTES):
        block = np.asarray(view[box]).reshape(-1)
        with np.errstate(all="ignore"):
            found.add(np.abs(block).astype(np.float64) if block.dtype.kind == "c" else block.astype(np.float64))
    return found


class Summary:
    """What is known of the numbers that were added so far.

    Example:
        >>> import numpy as np
        >>> found = Summary()
        >>> found.add(np.array([0.0, 1.0, 2.0]))
        >>> found.add(np.array([9.0, np.nan]))
        >>> found.low, found.high, found.mean, found.zeros, found.nans, sum(found.counts)
        (0.0, 9.0, 3.0, 1, 1, 4)
    """

    def __init__(self) -> None:
        self.items = self.finite = self.zeros = self.nans = self.infinite = 0
        self.low, self.high = math.inf, -math.inf
        self.mean = self.squares = 0.0
        self.counts: list[int] = []
        self._start = self._span = 0.0

    def add(self, block: NDArray[Any]) -> None:
        """Add a block of float64."""
        import numpy as np

        self.items += block.size
        self.nans += (nans := int(np.isnan(block).sum()))
        good = block[np.isfinite(block)]
        self.infinite += block.size - good.size - nans
        if not good.size:
            return
        self.zeros += good.size - int(np.count_nonzero(good))
        low, high, mean = float(good.min()), float(good.max()), float(good.mean())
        # Two parts are joined as Chan, Golub and LeVeque do it: no sum of squares that loses its digits.
        share, apart = good.size / (self.finite + good.size), mean - self.mean
        self.squares += float(((good - mean) ** 2).sum()) + apart * apart * self.finite * share
        self.mean += apart * share
        self.finite += good.size
        self.low, self.high = min(self.low, low), max(self.high, high)
        self._count(good, low, high)

    def _count(self, good: NDArray[Any], low: float, high: float) -> None:
        """Count into narrow bins of one width, which double where a block lies outside."""
        import numpy as np

        if not self.counts:
            self.counts = [0] * _FINE
            self._start, self._span = low, (high - low) or abs(low) or 1.0
        while math.isfinite(self._span) and (low < self._start or high > self._start + self._span):
            pairs = [sum(self.counts[at : at + 2]) for at in range(0, _FINE, 2)]
            below = low < self._start
            self.counts = [0] * (_FINE // 2) + pairs if below else pairs + [0] * (_FINE // 2)
            self._start -= self._span if below else 0.0
            self._span *= 2
        if math.isfinite(self._span + abs(self._start)):
            found, _ = np.histogram(good, _FINE, (self._start, self._start + self._span))
            self.counts = [before + int(more) for before, more in zip(self.counts, found, strict=True)]

    def bars(self) -> list[int]:
        """Return the histogram from the least to the greatest number, each bar's height from 0 to 99."""
        if not self.finite or not any(self.counts):
            return []
        width, sums = (self.high - self.low) or 1.0, [0] * _BARS
        for place, count in enumerate(self.counts):
            middle = self._start + (place + 0.5) * self._span / _FINE
            sums[min(max(int((middle - self.low) / width * _BARS), 0), _BARS - 1)] += count
        # A bar that is not empty can be seen.
        return [-(-each * _TALLEST // max(sums)) for each in sums]

    def cells(self) -> list[Any]:
        """Return min, max, mean, standard deviation, counts, and the bars of the histogram."""
        numbers = [""] * 4
        if self.finite:
            with contextlib.suppress(OverflowError):
                deviation = math.sqrt(self.squares / self.finite)
                numbers = [f"{each:.4g}" for each in (self.low, self.high, self.mean, deviation)]
        counts = [f"{each:,}" if each else "" for each in (self.zeros, self.nans, self.infinite)]
        return [*numbers, *counts, {"bars": self.bars()}]
