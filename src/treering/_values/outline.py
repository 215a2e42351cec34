"""What a notebook shows of an object: a title, notes and rows that fold, as HTML and as parts for treescope."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from treering._printable import cut_middle, printable

_LONGEST = 300
_MOST_OPEN = 40
_WIDE, _HIGH = 120, 20
_LEAST_SHARE, _MOST_SHARE = 4, 40
# No color and no background: those of the notebook hold, light or dark. Each row divides the same width into the same
# shares, whatever stands in it, so that no column moves; a long text goes on below itself.
_STYLE = (
    "<style>.treering-row{display:grid;grid-template-columns:var(--treering-columns);"
    "column-gap:1em;overflow-wrap:anywhere}"
    ".treering-row>.right{text-align:right}.treering-head{font-style:italic;opacity:.7}"
    '.treering details details>summary>:first-child::before{content:"\\25b8  "}'
    '.treering details details[open]>summary>:first-child::before{content:"\\25be  "}</style>'
)


class OutlineRow(NamedTuple):
    """One row of an outline."""

    depth: int
    """Its level, 1 for the outermost; what lies below it has a larger one, and folds with it."""
    cells: Sequence[str]
    """Its texts, a column each, not escaped."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What is shown of an object; no text in it is escaped yet."""

    title: str
    """What it is, and where."""
    detail: str = ""
    """What stands beside the title."""
    notes: Sequence[tuple[str, str]] = ()
    """Lines above the rows, each a label and a text."""
    curves: Sequence[tuple[str, Sequence[float]]] = ()
    """Numbers that are drawn as a line, each with its name."""
    heads: Sequence[str] = ()
    """The titles of the columns."""
    rows: Sequence[OutlineRow] = ()
    """The rows, each before what lies below it."""
    right: Collection[int] = ()
    """The columns that hold numbers."""


class InNotebook:
    """What shows itself in a notebook, by its own `_outline`; also inside of what treescope draws."""

    __slots__ = ()

    def _outline(self) -> Outline:
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return outline_html(self._outline())

    def __treescope_repr__(self, path: str | None, subtree_renderer: object) -> Any:
        from treescope import rendering_parts as parts

        outline = self._outline()
        levels: list[tuple[str, list[Any]]] = [(f"{_plain(outline.title)} {_plain(outline.detail)}".rstrip(), [])]
        levels[0][1].extend(f"{_plain(label)}: {_plain(text)}" for label, text in outline.notes)

        def close(depth: int) -> None:
            while len(levels) > depth:
                text, below = levels.pop()
                where = path if not levels else None
                folded = (text + " {", below, "}") if below else (text, [], "")
                node = parts.build_foldable_tree_node_from_children(*folded, path=where)
                if not levels:
                    levels.append(("", [node]))
                    return
                levels[-1][1].append(node)

        for row in outline.rows:
            close(row.depth)
            levels.append(("  ".join(_plain(cell) for cell in row.cells if cell), []))
        close(1)
        close(0)
        return levels[0][1][0]


def outline_html(outline: Outline) -> str:
    """Write an outline as an HTML fragment that folds, without a script.

    Example:
        >>> text = outline_html(Outline(title="<b>", rows=[OutlineRow(1, ["a"]), OutlineRow(2, ["b"])]))
        >>> "<b>&lt;b&gt;</b>" in text, text.count("<details"), text.count("</details>")
        (True, 2, 2)
    """
    return "".join(_fragment(outline))


def _fragment(outline: Outline) -> Iterator[str]:
    yield f'<div class="treering" style="--treering-columns:{_shares(outline)}">{_STYLE}<details open><summary>'
    yield f"<b>{_safe(outline.title)}</b> {_safe(outline.detail)}</summary>\n"
    yield from (f"<div><i>{_safe(label)}</i>: {_safe(text)}</div>\n" for label, text in outline.notes)
    yield from (f"<div><i>{_safe(name)}</i> {curve_svg(values)}</div>\n" for name, values in outline.curves)
    if outline.heads:
        yield f'<div class="treering-row treering-head">{_cells(1, outline.heads, outline.right)}</div>\n'
    opens = "<details open>" if len(outline.rows) <= _MOST_OPEN else "<details>"
    above: list[int] = []
    for place, row in enumerate(outline.rows):
        while above and above[-1] >= row.depth:
            above.pop()
            yield "</details>\n"
        cells = _cells(row.depth, row.cells, outline.right)
        if outline.rows[place + 1 : place + 2] and outline.rows[place + 1].depth > row.depth:
            above.append(row.depth)
            yield f'{opens}<summary class="treering-row">{cells}</summary>\n'
        else:
            yield f'<div class="treering-row">{cells}</div>\n'
    yield "</details>" * (len(above) + 1) + "</div>"


def _shares(outline: Outline) -> str:
    """Divide the width among the columns by their longest texts."""
    longest = [len(head) for head in outline.heads]
    for row in outline.rows:
        widths = [len(cell) for cell in row.cells]
        widths[0] += 2 * row.depth
        longest = [max(pair) for pair in itertools.zip_longest(longest, widths, fillvalue=0)]
    return " ".join(f"minmax(0,{min(max(width, _LEAST_SHARE), _MOST_SHARE)}fr)" for width in longest)


def _cells(depth: int, cells: Sequence[str], right: Collection[int]) -> str:
    first = f'<span style="padding-left:{min(depth, 30)}em">{_safe(cells[0])}</span>'
    more = [f"<span{' class=right' if n in right else ''}>{_safe(cell)}</span>" for n, cell in enumerate(cells[1:], 1)]
    return " ".join([first, *more])


def curve_svg(values: Sequence[float]) -> str:
    """Draw numbers as a small line in the color of the text; one that is no number leaves a gap.

    Example:
        >>> curve_svg([1.0, float("nan"), 3.0, 2.0]).count("<polyline")
        2
    """
    finite = [value for value in values if math.isfinite(value)]
    low = min(finite, default=0.0) / 2  # of halves, for the difference of two large numbers may be infinite
    span = max(finite, default=0.0) / 2 - low or 1.0
    lines: list[list[str]] = [[]]
    for place, value in enumerate(values):
        if math.isfinite(value):
            across = 1 + (_WIDE - 2) * place / max(len(values) - 1, 1)
            lines[-1].append(f"{across:.1f},{_HIGH - 1 - (_HIGH - 2) * (value / 2 - low) / span:.1f}")
        elif lines[-1]:
            lines.append([])
    # The end of a line that is round shows also a number that stands alone.
    drawn = "".join(f'<polyline points="{" ".join(line)} {line[-1]}"/>' for line in lines if line)
    drawn = f'<g fill="none" stroke="currentColor" stroke-width="1.5" stroke-linecap="round">{drawn}</g>'
    told = f"{finite[0]:.5g} to {finite[-1]:.5g}" if finite else "no number"
    return f'<svg width="{_WIDE}" height="{_HIGH}" role="img" aria-label="{told}">{drawn}</svg> {told}'


def _plain(text: str) -> str:
    return printable(cut_middle(text, _LONGEST))


def _safe(text: str) -> str:
    import html  # the command line starts sooner without it

    return html.escape(_plain(text))
