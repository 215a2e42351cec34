"""Listings as outlines, which notebooks show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from treering._printable import show_path
from treering._values.human import bytes_text, pluralize
from treering._values.outline import Outline, OutlineRow
from treering._view.plain import visible
from treering._view.rows import USUAL_DEPTH, Row, Totals, TreeLayout, is_branch, lay_out
from treering._view.tree_text import ALWAYS, HEADS, RIGHT, row_texts, totals_text

_MOST_ROWS = 200
_MOST_CHILDREN = 100


def fit_on_screens(root: Any) -> TreeLayout:
    """Lay a tree out so that it fits on a few screens, folding as many levels as that takes.

    Example:
        >>> tree = {f"layer{n}": {f"w{m}": 1 for m in range(50)} for n in range(50)}
        >>> len(fit_on_screens(tree).rows)
        51
    """
    layout = lay_out(root, depth=USUAL_DEPTH)
    if len(layout.rows) <= _MOST_ROWS:
        return layout
    depths = sorted({row.depth for row in layout.rows})
    for depth in reversed(depths[1:-1]):
        if sum(row.depth <= depth for row in layout.rows) <= _MOST_ROWS:
            return lay_out(root, depth=depth)
    return lay_out(root, depth=1) if len(depths) > 1 else layout


def tree_outline(root: Any, *, title: str, notes: Sequence[tuple[str, str]] = ()) -> Outline:
    """Outline a tree of records: a row for each branch and leaf; of many in a branch the first 100, and a sum.

    Example:
        >>> found = tree_outline({f"w{n}": n for n in range(1000)}, title="x")
        >>> len(found.rows), found.rows[-1].cells[0], found.detail
        (101, 'and 900 more rows', '1,000 leaves, 0 parameters in 0 arrays, 7.81 KiB')
    """
    layout = fit_on_screens(root)
    rows = [row for row in layout.rows if row.depth or row.below is None or len(layout.rows) == 1]
    kept = list(_first_children(rows))
    shown = [n for n in range(len(HEADS)) if n < ALWAYS or any(cells[n + 1] for _, cells in kept)]
    return Outline(
        title=show_path(title),
        detail=totals_text(layout.everything),
        notes=notes,
        heads=["key", *(HEADS[n] for n in shown)],
        rows=[OutlineRow(depth, [cells[0], *(cells[n + 1] for n in shown)]) for depth, cells in kept],
        right=[place + 1 for place, n in enumerate(shown) if n in RIGHT],
    )


def _first_children(rows: Sequence[Row]) -> Iterator[OutlineRow]:
    """Yield a row for each of the first children of a branch, and one for the others together.

    The rows come from `fit_on_screens`: where a branch has more of them than are shown, nothing lies below them.
    """
    counts, rest = dict[int, int](), Totals()
    left = 0
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        counts = {depth: count for depth, count in counts.items() if depth <= row.depth}
        counts[row.depth] = counts.get(row.depth, 0) + 1
        if counts[row.depth] > _MOST_CHILDREN and not (after is not None and after.depth > row.depth):
            left += 1
            rest.add(row.totals)
        else:
            name = visible(row.name) or ("''" if row.depth else "(the root)")
            yield OutlineRow(max(row.depth, 1), [name + "/" * (is_branch(row.node) and row.depth > 0), *row_texts(row)])
        if left and (after is None or after.depth != row.depth):
            told = ["", pluralize(rest.leaves, "leaves", ","), f"{rest.parameters:,}", bytes_text(rest.nbytes), "", ""]
            yield OutlineRow(row.depth, [f"and {pluralize(left, 'more rows', ',')}", *told])
            left, rest = 0, Totals()
