"""A listing as lines of text, and as one JSON document for programs.

The lines say where it comes from, its leaves one a line, and how many bytes each branch takes. The page
docs/reference/command-line.md describes every member of the document.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from treering._format.listing import LeafRecord, Listing, Named, describe_part
from treering._printable import show_path
from treering._values.human import bytes_text, join_first, pluralize
from treering._values.keys import key_name
from treering._values.outline import Outline, OutlineRow
from treering._values.processes import format_processes
from treering._view.plain import Json, align, json_document, json_text, members_of, visible
from treering._view.rows import (
    LONGEST_KEY,
    USUAL_DEPTH,
    Row,
    Totals,
    TreeLayout,
    branch_kind,
    has_json,
    is_branch,
    lay_out,
    record_of,
    value_text,
    weight_of,
    with_keys,
)
from treering._view.tree_text import ALWAYS, CYAN, HEADS, RIGHT, UNICODE, Style, leaf_cells, row_texts, totals_text

_MOST_FILES = 4
_MOST_BRANCHES = 8
_MOST_SHARES = 4
_NAMES = {"checkpoint": "treering checkpoint", "leaves": "leaves directory"}
_WIDEST = 80, 16, 42
"""Columns of a key, dtype and detail."""
_LONGEST = 200
_GAP = "  "


def notes_of(listing: Listing) -> list[tuple[str, str]]:
    """Return notes, each with a label; none for a msgpack file, which says nothing about itself.

    Example:
        >>> notes_of(Listing(form="safetensors", file_bytes=9, root={}, metadata={"step": 7}))
        [('form', 'safetensors, without checksums'), ('metadata', '{"step": 7}')]
    """
    if listing.form.startswith("msgpack"):
        return []
    notes = [("form", form_text(listing))]
    if _is_mixed(listing):
        shown = join_first([repr(prefix) if prefix else "no prefix" for prefix in listing.unverified], _MOST_BRANCHES)
        notes.append(("unverified", f"{shown}: written by another program, without checksums"))
    sizes = [f"{file.name} ({bytes_text(file.nbytes)})" for file in listing.files]
    more = [
        ("part", describe_part(listing.part) if listing.part else ""),
        *(("note", text) for text in listing.notes),
        ("written", _written(listing) if listing.written else ""),
        ("split", _shares(listing) if listing.shares else ""),
        ("meshes" if len(listing.meshes) > 1 else "mesh", "; ".join(listing.meshes)),
        # The tree has no line for its root.
        ("root", listing.root.class_name if isinstance(listing.root, Named) else ""),
        ("files", join_first(sizes, _MOST_FILES)),
        ("metadata", json_text(listing.metadata) if listing.metadata else ""),
    ]
    return [*notes, *((label, text) for label, text in more if text)]


def form_text(listing: Listing) -> str:
    """Name the form of a listing, and whether its arrays can be checked.

    Example:
        >>> form_text(Listing(form="checkpoint", file_bytes=9, root={}, verified=True))
        'treering checkpoint, with checksums'
    """
    if listing.form.startswith("msgpack"):
        return listing.form
    form = _NAMES.get(listing.form, listing.form)
    if listing.verified and listing.form != "checkpoint":
        form += " by treering"
    if _is_mixed(listing):
        return f"{form} by treering and others, with checksums of some leaves"
    return f"{form}, {'with' if listing.verified else 'without'} checksums"


def _is_mixed(listing: Listing) -> bool:
    return 0 < len(listing.unverified) < len(listing.prefixes)


def _written(listing: Listing) -> str:
    # The number of processes has words of its own.
    said = listing.written.items()
    shown = [f"{name} {value}" for name, value in said if name != "processes" and isinstance(value, str | int | float)]
    if listing.processes > 1:
        shown.append(pluralize(listing.processes, "processes"))
    return ", ".join(shown)


def _shares(listing: Listing) -> str:
    """Say what each process wrote; of many, the one with the fewest bytes and the one with the most."""
    shares = listing.shares
    if listing.processes <= _MOST_SHARES:
        of = {each.process: f"{bytes_text(each.nbytes)} in {pluralize(each.files, 'files', ',')}" for each in shares}
        return "; ".join(f"process {number}: {of.get(number, 'no file')}" for number in range(listing.processes))
    least, most = min(shares, key=lambda share: share.nbytes), max(shares, key=lambda share: share.nbytes)
    writers = format_processes(share.process for share in shares)
    files = f"{pluralize(sum(share.files for share in shares), 'files', ',')} by {writers}"
    sizes = [f"{bytes_text(share.nbytes)} (process {share.process})" for share in (least, most)]
    return f"{files}, from {sizes[0]} to {sizes[1]}"


# --------------------------------------------------------------------------------------------------- leaves, one a line


def key_lines(leaves: Sequence[tuple[str, Any]], style: Style = UNICODE) -> Iterator[str]:
    """Write leaves as lines without line ends, in columns; a long key moves the columns of its line.

    Example:
        >>> for line in key_lines([("step", 7), ("on", True)]):
        ...     print(line)
        step  int   7     8 B
        on    bool  True  1 B
    """
    cells = []
    for key, leaf in leaves:
        name = key_name(visible(key, LONGEST_KEY, style.ellipsis))
        cells.append((name, *leaf_cells(leaf, style), bytes_text(weight_of(leaf)[0])))
    for key, dtype, *more in align(cells, right=(3,), widest=_WIDEST):
        yield _GAP.join((key, style.paint(CYAN, dtype), *more))


# ------------------------------------------------------------------------------------------------------------- bytes


def measure_usage(layout: TreeLayout) -> list[tuple[str, Totals]]:
    """Divide a layout into its leaves and the branches that it folds, the largest first.

    Together they are the whole: no byte is counted twice. Each has its key text, that of a branch with a slash at its
    end, and what it adds up to.

    Example:
        >>> from treering._view.rows import lay_out
        >>> layout = lay_out({"a": {"b": 1, "c": 2}, "d": True}, depth=1)
        >>> [(key, totals.nbytes) for key, totals in measure_usage(layout)]
        [('a/', 16), ('d', 1)]
    """
    shares = [
        (f"{key}/" if is_branch(row.node) and row.depth else key, row.totals)
        for key, row in with_keys(layout.rows)
        if row.closed is not None or not is_branch(row.node)
    ]
    return sorted(shares, key=lambda share: -share[1].nbytes)


def usage_lines(layout: TreeLayout, shares: Sequence[tuple[str, Totals]], *, ellipsis: str = "…") -> Iterator[str]:
    r"""Write shares as lines: bytes, part of the whole, leaves, key; and the total.

    Example:
        >>> from treering._view.rows import lay_out
        >>> layout = lay_out({"a": {"b": 1, "c": 2}, "d": True}, depth=1)
        >>> print("\n".join(usage_lines(layout, measure_usage(layout))))
         bytes   part  leaves  key
          16 B  94.1%       2  a/
           1 B   5.9%       1  d
          17 B   100%       3  total
    """
    whole = layout.kept
    rows = [(" bytes", " part", "leaves", "key")]
    for key, totals in shares:
        part = f"{100 * totals.nbytes / whole.nbytes:.1f}%".replace("100.0%", "100%") if whole.nbytes else "-"
        name = key_name(visible(key, _LONGEST, ellipsis))
        rows.append((bytes_text(totals.nbytes), part, f"{totals.leaves:,}", name))
    rows.append((bytes_text(whole.nbytes), "100%", f"{whole.leaves:,}", "total"))
    return map(_GAP.join, align(rows, right=range(3)))


SCHEMA = "treering.inspect/1"
"""Names the document's form. Members may be added under this name; none changes its meaning or goes away."""


def json_lines(layout: TreeLayout, head: Json) -> Iterator[str]:
    """Write a layout as the lines of one JSON object, one line for each leaf, all in ASCII.

    ``head`` holds members for its head: the file, the globs, and those of `origin_members`. Keys are key text, exact up
    to 1000 characters; a longer one is cut in its middle and its entry says ``"key_cut": true``. Leaves that are too
    deep for a row, and long lists of small values, are summed up in ``branches``. Branches that are objects of a class
    are in ``nodes``, where there are any.

    Example:
        >>> from treering._view.rows import lay_out
        >>> layout = lay_out({"step": 7})
        >>> document = json.loads("".join(json_lines(layout, {"file": "x"})))
        >>> document["schema"], document["leaves"][0]["key"], document["total"]["nbytes"]
        ('treering.inspect/1', 'step', 8)
    """
    rows = layout.rows
    lists = {
        "leaves": (leaf_members(key, row.node) for key, row in with_keys(rows) if not is_branch(row.node)),
        "branches": (_branch(key, row) for key, row in with_keys(rows) if _is_closed(row)),
    }
    if any(isinstance(row.node, Named) for row in rows):
        lists["nodes"] = (_node(key, row) for key, row in with_keys(rows) if isinstance(row.node, Named))
    return json_document({"schema": SCHEMA, **head, **_sums(layout)}, **lists)


def key_json(leaves: Sequence[tuple[str, Any]], head: Json) -> Iterator[str]:
    """Write leaves as the lines of one JSON object, one a line, in ASCII.

    Example:
        >>> import json
        >>> text = "".join(key_json([("step", 7)], {}))
        >>> json.loads(text)["leaves"][0]["value"]
        7
    """
    return json_document({"schema": "treering.ls/1", **head}, leaves=itertools.starmap(leaf_members, leaves))


def usage_json(layout: TreeLayout, usage: Sequence[tuple[str, Totals]], head: Json) -> Iterator[str]:
    """Write what the branches take as the lines of one JSON object, in ASCII.

    Example:
        >>> from treering._view.listings import measure_usage
        >>> from treering._view.rows import lay_out
        >>> layout = lay_out({"d": True})
        >>> text = "".join(usage_json(layout, measure_usage(layout), {}))
        >>> json.loads(text)["shares"][0]["key"]
        'd'
    """
    entries = ({"key": key} | dataclasses.asdict(totals) for key, totals in usage)
    return json_document({"schema": "treering.du/1", **head, **_sums(layout)}, shares=entries)


def _sums(layout: TreeLayout) -> Json:
    return {"total": layout.everything, "selected": layout.kept}


def _is_closed(row: Row) -> bool:
    """Tell whether a branch has no entry below it that says that it exists."""
    return is_branch(row.node) and (row.closed is not None or not row.node)


def leaf_members(key: str, leaf: Any) -> Json:
    """Give a leaf as members of an object; those that only checkpoints have are left out elsewhere.

    Example:
        >>> leaf_members("step", 7)["value"]
        7
    """
    record = record_of(leaf)
    members: dict[str, object] = {"key": key, "kind": record.kind, "dtype": record.dtype, "shape": record.shape}
    members |= {"nbytes": record.nbytes, "offset": record.offset}
    members["value"] = leaf if has_json(leaf) else value_text(leaf)
    if isinstance(leaf, LeafRecord):
        more: dict[str, object] = {"file": leaf.file, "sharding": leaf.sharding, "impl": leaf.impl}
        more |= {"grid": leaf.grid, "processes": leaf.processes}
        members |= {name: value for name, value in more.items() if value}
        if leaf.chunks != 1:
            members["chunks"] = leaf.chunks
        if leaf.chunk_shape is not None:
            compressor = None if leaf.compressor is None else json.loads(leaf.compressor)
            members |= {"chunk_shape": leaf.chunk_shape, "compressor": compressor}
    return _mark_cut(members)


def origin_members(listing: Listing) -> Json:
    """Give what is known of a listing as a whole as members of an object.

    Example:
        >>> origin_members(Listing(form="msgpack", file_bytes=1, root=None))
        {'form': 'msgpack'}
    """
    if listing.form.startswith("msgpack"):
        return {"form": listing.form}
    found = members_of(listing, "form", "verified", "written", "processes", "meshes", "files", "metadata")
    files = map(dataclasses.asdict, listing.files)
    found["files"] = [{name: value for name, value in file.items() if value is not None} for file in files]
    if listing.form == "leaves":
        found |= members_of(listing, "prefixes", "unverified")
    found |= members_of(listing, "part") if listing.part else {}
    return found | {"shares": shares} if (shares := listing.shares) else found


def _branch(key: str, row: Row) -> Json:
    why = row.closed or "empty"
    return _mark_cut({"key": key, "kind": branch_kind(row.node), "why": why} | dataclasses.asdict(row.totals))


def _node(key: str, row: Row) -> Json:
    return _mark_cut({"key": key, "kind": row.node.node, "class": row.node.class_name})


def _mark_cut(entry: Json) -> Json:
    return {**entry, "key_cut": True} if len(str(entry["key"])) > LONGEST_KEY else entry


# ------------------------------------------------------------------------------------------- outlines, for notebooks


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
            name = visible(row.name) or ("''" if row.depth else key_name(""))
            yield OutlineRow(max(row.depth, 1), [name + "/" * (is_branch(row.node) and row.depth > 0), *row_texts(row)])
        if left and (after is None or after.depth != row.depth):
            told = ["", pluralize(rest.leaves, "leaves", ","), f"{rest.parameters:,}", bytes_text(rest.nbytes), "", ""]
            yield OutlineRow(row.depth, [f"and {pluralize(left, 'more rows', ',')}", *told])
            left, rest = 0, Totals()
