"""A listing as a tree of text for a terminal or a pipe."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from treering._format.listing import LeafRecord, Named
from treering._printable import printable, show_path
from treering._values.human import bytes_text, count_text, pluralize
from treering._values.keys import escape_part, key_name
from treering._values.processes import format_processes
from treering._view.plain import cell_width, cut, fit_width, pad, visible
from treering._view.rows import Row, Totals, TreeLayout, branch_kind, is_branch, record_of, value_text, weight_of

_LONGEST_NAME = 100
_LONGEST_DETAIL = 40
_LONGEST_NOTE = 300
_NARROWEST_NAME = 16
_SHORTEST_NAME = 8
_MOST_KEPT = 50_000
_NAMED_KINDS = frozenset({"numpy", "key"})
"""Kinds of arrays that are named beside the shape; the others are jax's, or of a file that does not say."""
_GAP = "  "
BOLD, DIM, RED, CYAN, _PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[36m", "\x1b[0m"
# Columns behind the name; those that hold numbers; how many every table has, the others where a row needs them.
HEADS = "dtype", "shape", "parameters", "bytes", "sharding", "chunks"
RIGHT, ALWAYS = (2, 3), 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How lines are drawn."""

    tee: str
    """Before a child that has younger siblings."""
    elbow: str
    """Before the last child."""
    bar: str
    """Below a child that has younger siblings, as wide as `tee`."""
    dot: str
    """Between the parts of a headline."""
    ellipsis: str
    """Where text was left out."""
    heights: str
    """What draws a curve, a character a value: the lowest first, at the end one that is no number."""
    color: bool = False
    """Whether to add ANSI colors."""
    width: int | None = None
    """Columns of the terminal, into which names are cut; None cuts only absurd ones."""

    def paint(self, paint: str, text: str) -> str:
        """Color a text, where colors are wanted."""
        return f"{paint}{text}{_PLAIN}" if self.color and paint and text.strip() else text


UNICODE = Style(tee="├─ ", elbow="└─ ", bar="│  ", dot="·", ellipsis="…", heights="▁▂▃▄▅▆▇█x")
"""Box drawing, for every terminal of this century."""
ASCII = Style(tee="|- ", elbow="`- ", bar="|  ", dot="-", ellipsis="...", heights="_.-=+*#x")
"""The same in ASCII, for an output that cannot encode box drawing."""


class _Cells(NamedTuple):
    """The texts of one row; a tuple because a listing makes a million of them."""

    guide: str
    name: str
    texts: tuple[str, ...]
    is_branch: bool


def tree_lines(
    layout: TreeLayout, *, title: str, file_bytes: int, style: Style = UNICODE, notes: Sequence[tuple[str, str]] = ()
) -> Iterator[str]:
    r"""Draw a layout as lines without line ends: the file, its notes, a header, a row each, and the totals.

    ``title`` is the file's name, ``file_bytes`` its size, a note what stands before a colon and what behind it.
    Everything that comes from the file is escaped.

    Example:
        >>> from treering._format.listing import LeafRecord
        >>> from treering._view.rows import lay_out
        >>> kernel = LeafRecord(kind="array", dtype="float32", shape=(2, 3), nbytes=24, offset=9)
        >>> tree = {"a\x1b": {"w": kernel}, "step": 7}
        >>> for line in tree_lines(lay_out(tree), title="x.msgpack", file_bytes=60, style=ASCII):
        ...     print(line)
        x.msgpack - 60 B
                  dtype    shape   parameters  bytes
        |- a\x1b                            6   24 B
        |  `- w   float32  [2, 3]           6   24 B
        `- step   int      7                     8 B
        total: 2 leaves, 6 parameters in 1 array, 32 B
    """
    head = visible(show_path(title), ellipsis=style.ellipsis)
    yield f"{style.paint(BOLD, head)} {style.dot} {bytes_text(file_bytes)}"
    for label, text in notes:
        yield style.paint(DIM, f"{label}: ") + printable(cut(text, _LONGEST_NOTE, style.ellipsis))
    rows = layout.rows
    if rows:
        # The root's totals are the last line; it has a row only where it is itself the leaf.
        yield from _table(rows if rows[0].below is None or len(rows) == 1 else rows[1:], style)
    if (deepest := max((row.depth for row in rows if row.closed == "depth"), default=None)) is not None:
        yield style.paint(DIM, f"folded below level {deepest}; --depth N opens more levels")
    if layout.kept != layout.everything:
        yield style.paint(BOLD, "shown: ") + totals_text(layout.kept)
    yield style.paint(BOLD, "total: ") + totals_text(layout.everything)


def totals_text(totals: Totals) -> str:
    """Write totals as one line.

    Example:
        >>> totals_text(Totals(leaves=3, arrays=2, parameters=1_500_000, nbytes=6_000_000))
        '3 leaves, 1.50 M parameters in 2 arrays, 5.72 MiB'
    """
    parameters = f"{count_text(totals.parameters)} {'parameter' if totals.parameters == 1 else 'parameters'}"
    leaves, arrays = pluralize(totals.leaves, "leaves", ","), pluralize(totals.arrays, "arrays", ",")
    return f"{leaves}, {parameters} in {arrays}, {bytes_text(totals.nbytes)}"


def _add_guides(rows: Sequence[Row], style: Style) -> Iterator[_Cells]:
    """Walk through the rows with the lines that hang each below its parent."""
    above: list[str] = []
    space = " " * len(style.bar)
    for row, is_last in zip(rows, _last_children(rows), strict=True):
        # Children of the root hang from nothing: the root itself has no line.
        del above[max(row.depth - 1, 0) :]
        name = visible(escape_part(cut(row.name, _LONGEST_NAME, style.ellipsis)), limit=2 * _LONGEST_NAME)
        name = (name or "''") if row.depth else key_name("")
        guide = "".join(above) + (style.elbow if is_last else style.tee) if row.depth else ""
        yield _Cells(guide, name, row_texts(row, style), is_branch(row.node))
        if row.depth:
            above.append(space if is_last else style.bar)


def _last_children(rows: Sequence[Row]) -> bytearray:
    """Mark each row that has no younger sibling."""
    last = bytearray(len(rows))
    followed: list[bool] = []
    for place in range(len(rows) - 1, -1, -1):
        depth = rows[place].depth
        followed.extend([False] * (depth + 1 - len(followed)))
        last[place] = not followed[depth]
        followed[depth] = True
        del followed[depth + 1 :]
    return last


def row_texts(row: Row, style: Style = UNICODE) -> tuple[str, ...]:
    """Return the texts of one row, but for its name: dtype, shape or value, parameters, bytes, sharding, chunks.

    Example:
        >>> from treering._view.rows import lay_out
        >>> row_texts(lay_out([1, 2]).rows[0])
        ('', 'list of 2', '', '16 B', '', '')
    """
    node, below = row.node, row.below
    weight = weight_of(node) if below is None else (below.nbytes, below.parameters, below.arrays > 0)
    nbytes, parameters, has_arrays = weight
    return (
        *(("", _branch_detail(row, style)) if is_branch(node) else leaf_cells(node, style)),
        count_text(parameters) if has_arrays else "",
        bytes_text(nbytes),
        *_array_texts(node, style),
    )


def _array_texts(node: Any, style: Style) -> tuple[str, ...]:
    """Say how an array was cut, as far as that is known, and in which pieces it is stored if in more than one file.

    The mesh over which it was cut stands in the notes. In a leaves directory the pieces are chunk files, in a
    checkpoint of several processes the boxes that they wrote.
    """
    if not isinstance(node, LeafRecord):
        return "", ""
    if node.chunk_shape is None:
        chunks = _written_by(node)
    else:
        shown = [f"{node.chunks:,} of [{', '.join(map(str, node.chunk_shape))}]"] if node.chunks > 1 else []
        shown += [] if node.compressor is None else [str(json.loads(node.compressor).get("id"))]
        chunks = ", ".join(shown)
    sharding = (node.sharding or "").partition(" over ")[0]
    return tuple(visible(text, _LONGEST_DETAIL, style.ellipsis) if text else "" for text in (sharding, chunks))


def _written_by(leaf: LeafRecord) -> str:
    if not leaf.processes:
        return ""
    grid = f"{leaf.chunks:,}" if leaf.grid is None else " x ".join(map(str, leaf.grid))
    cuts = "" if leaf.chunks == 1 else f"{grid} over "
    who = format_processes(leaf.processes)
    return cuts + (who if len(cuts + who) <= _LONGEST_DETAIL else f"{len(leaf.processes):,} processes")


def _branch_detail(row: Row, style: Style) -> str:
    """Say what kind of branch it is where that is not obvious, and what was folded into it."""
    kind, length = branch_kind(row.node), len(row.node)
    if isinstance(row.node, Named):
        # The class tells what it is; the module in front of it is in the JSON form.
        shown = [visible(row.node.class_name.rpartition(".")[2], _LONGEST_DETAIL, style.ellipsis)]
    elif not length:
        return f"empty {kind}"
    else:
        shown = [] if kind == "map" else [f"{kind} of {length:,}"]
    if row.closed == "depth":
        shown.append(f"{style.ellipsis} {pluralize(row.totals.leaves, 'leaves', ',')}")
    return ", ".join(shown)


def leaf_cells(leaf: Any, style: Style = UNICODE) -> tuple[str, str]:
    """Name a leaf's type and give its shape or its value.

    Example:
        >>> leaf_cells(7), leaf_cells(None)
        (('int', '7'), ('None', ''))
    """
    if leaf is None:
        return "None", ""
    record, value = record_of(leaf), value_text(leaf)
    if record.dtype is not None and record.shape is not None:
        shape = cut(f"[{', '.join(map(str, record.shape))}]", _LONGEST_DETAIL, style.ellipsis)
        if record.kind == "numpy scalar":
            return record.dtype, shape if record.shape else record.kind
        return record.dtype, f"{shape} {record.kind}" if record.kind in _NAMED_KINDS else shape
    return record.kind, "long" if value is None else printable(cut(value, _LONGEST_DETAIL, style.ellipsis))


def _table(rows: Sequence[Row], style: Style) -> Iterator[str]:
    """Align the columns; on a terminal shardings and chunks give way first, then names, then the line may run over."""
    # The cells of many rows are made twice, to measure and to print: kept, they would be most of the memory.
    kept = list(_add_guides(rows, style)) if len(rows) <= _MOST_KEPT else None
    widest, widths = 0, [0] * len(HEADS)
    for cells in kept or _add_guides(rows, style):
        widest = max(widest, len(cells.guide) + cell_width(cells.name))
        widths = list(map(max, widths, map(cell_width, cells.texts)))
    shown = [place for place, width in enumerate(widths) if place < ALWAYS or width]
    for place in shown:
        widths[place] = max(widths[place], len(HEADS[place]))
    fixed, more = (sum(widths[place] + len(_GAP) for place in part) for part in (shown[:ALWAYS], shown[ALWAYS:]))
    names = min(widest, _LONGEST_NAME)
    if style.width is not None:
        if names + fixed + more > style.width:
            shown = shown[:ALWAYS]
        names = min(widest, max(style.width - fixed, _NARROWEST_NAME))

    def line(name: str, texts: Sequence[str], paint: str = "") -> str:
        cells = [pad(texts[place], widths[place], right=place in RIGHT) for place in shown]
        return _GAP.join((name, style.paint(paint, cells[0]), *cells[1:])).rstrip()

    yield style.paint(DIM, line(" " * names, HEADS))
    for cells in kept or _add_guides(rows, style):
        name, room = cells.name, names - len(cells.guide)
        if style.width is not None:
            name = fit_width(name, max(room, _SHORTEST_NAME), style.ellipsis)
        painted = style.paint(DIM, cells.guide) + style.paint(BOLD if cells.is_branch else "", name)
        yield line(painted + " " * (room - cell_width(name)), cells.texts, CYAN)
