"""A listing as HTML for a notebook. Everything that comes from the file is escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence

from treering._values.human import bytes_text, pluralize
from treering._view.nodes import is_branch
from treering._view.plain import visible
from treering._view.rows import Row, TreeLayout
from treering._view.tree_text import ALWAYS, HEADS, RIGHT, row_texts, totals_text

_MOST_ROWS = 300
_LEFT = ' style="text-align:left"'


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
    texts = [row_texts(row) for row in rows[:_MOST_ROWS]]
    shown = [place for place in range(len(HEADS)) if place < ALWAYS or any(each[place] for each in texts)]
    parts = [
        f"<div><b>{_safe(title)}</b> ({bytes_text(file_bytes)})",
        *(f"<br><i>{_safe(label)}</i>: {_safe(text)}" for label, text in notes),
        "</div>",
        "<table><thead>",
        f"<tr>{''.join(f'<th>{head}</th>' for head in ('key', *(HEADS[place] for place in shown)))}</tr>",
        "</thead><tbody>",
        *(_row(row, each, shown) for row, each in zip(rows, texts, strict=False)),
    ]
    if (left := len(rows) - _MOST_ROWS) > 0:
        parts.append(f'<tr><td colspan="{len(shown) + 1}"{_LEFT}>and {pluralize(left, "more rows", ",")}</td></tr>')
    parts += ["</tbody></table>", f"<div>total: {_safe(totals_text(layout.everything))}</div>"]
    return "\n".join(parts)


def _row(row: Row, texts: Sequence[str], shown: Sequence[int]) -> str:
    name = _safe(row.name or ("''" if row.depth else "(the root)"))
    name = f"<b>{name}</b>" if is_branch(row.node) else name
    more = "".join(f"<td{'' if place in RIGHT else _LEFT}>{_safe(texts[place])}</td>" for place in shown)
    indent = max(row.depth - 1, 0) + 0.5
    return f'<tr><td style="text-align:left;padding-left:{indent}em">{name}</td>{more}</tr>'


def _safe(text: str) -> str:
    return html.escape(visible(text))
