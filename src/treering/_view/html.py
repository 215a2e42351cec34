"""A listing as HTML for a notebook. Everything that comes from the file is escaped."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from treering._values.human import bytes_text, count_text, pluralize
from treering._view.nodes import is_branch
from treering._view.plain import visible
from treering._view.rows import Row, TreeLayout
from treering._view.tree_text import branch_detail, chunks_text, leaf_cells, sharding_text, totals_text

_MOST_ROWS = 300
_HEADS = ("key", "dtype", "shape", "parameters", "bytes")
_LEFT = ' style="text-align:left"'
# Columns that stand there where any row has something to say in them.
_MORE: Final[dict[str, Callable[[Any], str]]] = {"sharding": sharding_text, "chunks": chunks_text}


def html_text(layout: TreeLayout, *, title: str, file_bytes: int, notes: Sequence[tuple[str, str]] = ()) -> str:
    """Write a layout as an HTML fragment: a table with a row for each branch and leaf.

    After 300 rows the rest is counted, not shown.

    Example:
        >>> from treering._view.rows import lay_out
        >>> text = html_text(lay_out({"<b>": 1}), title="x", file_bytes=9)
        >>> "<b>&lt;" in text, "&lt;b&gt;" in text
        (False, True)
    """
    rows = [row for row in layout.rows if row.depth or row.below is None or len(layout.rows) == 1]
    more = {name: text for name, text in _MORE.items() if any(text(row.node) for row in rows[:_MOST_ROWS])}
    heads = (*_HEADS, *more)
    parts = [
        f"<div><b>{_safe(title)}</b> ({bytes_text(file_bytes)})",
        *(f"<br><i>{_safe(label)}</i>: {_safe(text)}" for label, text in notes),
        "</div>",
        "<table><thead>",
        f"<tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>",
        "</thead><tbody>",
        *_rows(rows[:_MOST_ROWS], list(more.values())),
    ]
    left = len(rows) - _MOST_ROWS
    if left > 0:
        parts.append(f'<tr><td colspan="{len(heads)}"{_LEFT}>and {pluralize(left, "more rows", ",")}</td></tr>')
    parts += ["</tbody></table>", f"<div>total: {_safe(totals_text(layout.everything))}</div>"]
    return "\n".join(parts)


def _rows(rows: Sequence[Row], more: Sequence[Callable[[Any], str]]) -> Iterator[str]:
    for row in rows:
        node, totals = row.node, row.totals
        branch = is_branch(node)
        dtype, detail = ("", branch_detail(row)) if branch else leaf_cells(node)
        name = _safe(row.name or ("(the root)" if not row.depth else "''"))
        indent = max(row.depth - 1, 0)
        last = "".join(f"<td{_LEFT}>{_safe(text(node))}</td>" for text in more)
        count = count_text(totals.parameters) if totals.arrays else ""
        yield (
            f'<tr><td style="text-align:left;padding-left:{indent + 0.5}em">{f"<b>{name}</b>" if branch else name}</td>'
            f"<td{_LEFT}>{_safe(dtype)}</td><td{_LEFT}>{_safe(detail)}</td>"
            f"<td>{count}</td><td>{bytes_text(totals.nbytes)}</td>{last}</tr>"
        )


def _safe(text: str) -> str:
    return html.escape(visible(text))
