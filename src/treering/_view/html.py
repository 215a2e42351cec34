"""A listing as HTML for a notebook. Everything that comes from the file is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from treering._values.human import bytes_text, count_text
from treering._view.nodes import facts_of, is_branch
from treering._view.plain import visible
from treering._view.rows import Layout, Row
from treering._view.tree_text import branch_detail, leaf_cells, sharding_text, totals_text

__all__ = ["html_text"]

_MOST_ROWS = 300
_HEADS = ("key", "dtype", "shape", "parameters", "bytes", "sharding")
_LEFT = ' style="text-align:left"'


def html_text(layout: Layout, *, title: str, file_bytes: int, notes: Sequence[tuple[str, str]] = ()) -> str:
    """Write a layout as an HTML fragment: a table with a row for each branch and leaf.

    After 300 rows the rest is counted, not shown.

    Example:
        >>> from treering._view.rows import lay_out
        >>> text = html_text(lay_out({"<b>": 1}), title="x", file_bytes=9)
        >>> "<b>&lt;" in text, "&lt;b&gt;" in text
        (False, True)
    """
    rows = [row for row in layout.rows if row.depth or row.below is None or len(layout.rows) == 1]
    cut = any(sharding_text(row.node) for row in rows[:_MOST_ROWS])
    heads = _HEADS if cut else _HEADS[:-1]
    parts = [
        f"<div><b>{_safe(title)}</b> ({bytes_text(file_bytes)})",
        *(f"<br><i>{_safe(label)}</i>: {_safe(text)}" for label, text in notes),
        "</div>",
        "<table><thead>",
        f"<tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>",
        "</thead><tbody>",
        *_rows(rows[:_MOST_ROWS], cut=cut),
    ]
    left = len(rows) - _MOST_ROWS
    if left > 0:
        parts.append(f'<tr><td colspan="{len(heads)}"{_LEFT}>and {left:,} more rows</td></tr>')
    parts += ["</tbody></table>", f"<div>total: {_safe(totals_text(layout.everything))}</div>"]
    return "\n".join(parts)


def _rows(rows: Sequence[Row], *, cut: bool) -> Iterator[str]:
    for row in rows:
        node, totals = row.node, row.totals
        branch = is_branch(node)
        dtype, detail = ("", branch_detail(row)) if branch else leaf_cells(facts_of(node))
        name = _safe(row.name or ("(the root)" if not row.depth else "''"))
        indent = max(row.depth - 1, 0)
        sharding = f"<td{_LEFT}>{_safe(sharding_text(node))}</td>" if cut else ""
        count = count_text(totals.parameters) if totals.arrays else ""
        yield (
            f'<tr><td style="text-align:left;padding-left:{indent + 0.5}em">{f"<b>{name}</b>" if branch else name}</td>'
            f"<td{_LEFT}>{_safe(dtype)}</td><td{_LEFT}>{_safe(detail)}</td>"
            f"<td>{count}</td><td>{bytes_text(totals.nbytes)}</td>{sharding}</tr>"
        )


def _safe(text: str) -> str:
    return html.escape(visible(text))
