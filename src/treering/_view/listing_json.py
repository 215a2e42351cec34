"""A listing as one JSON document for programs. The page docs/inspect.md describes every member."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from treering._values.keys import escape_part
from treering._view.nodes import branch_kind, facts_of, is_branch
from treering._view.plain import cut
from treering._view.rows import Layout, Row, Totals

__all__ = ["SCHEMA", "json_lines"]

SCHEMA = "treering.inspect/1"
"""Names the document's form. Members may be added under this name; none changes its meaning or goes away."""

_LONGEST_KEY = 1000

Json = dict[str, object]


def json_lines(layout: Layout, *, title: str, file_bytes: int, globs: Sequence[str], depth: int) -> Iterator[str]:
    """Write a layout as the lines of one JSON object, one line for each leaf, all in ASCII.

    Keys are key text, exact up to 1000 characters; a longer one is cut in its middle and its entry says
    ``"key_cut": true``. Leaves deeper than ``depth``, and long lists of
    small values, are summed up in ``branches``.

    Example:
        >>> from treering._view.rows import lay_out
        >>> layout = lay_out({"step": 7})
        >>> document = json.loads("".join(json_lines(layout, title="x", file_bytes=7, globs=(), depth=32)))
        >>> document["schema"], document["leaves"][0]["key"], document["total"]["nbytes"]
        ('treering.inspect/1', 'step', 8)
    """
    head = {
        "schema": SCHEMA,
        "file": title,
        "file_bytes": file_bytes,
        "globs": list(globs),
        "depth": depth,
        "total": _totals(layout.everything),
        "selected": _totals(layout.kept),
    }
    yield _text(head)[:-1] + ","
    yield ' "leaves": ['
    yield from _joined(_leaf(key, row) for key, row in _keyed(layout.rows) if not is_branch(row.node))
    yield " ],"
    yield ' "branches": ['
    yield from _joined(_branch(key, row) for key, row in _keyed(layout.rows) if _is_closed(row))
    yield " ]}"


def _is_closed(row: Row) -> bool:
    """Tell whether a branch has no entry below it that says that it exists."""
    return is_branch(row.node) and (row.closed is not None or not row.node)


def _keyed(rows: Sequence[Row]) -> Iterator[tuple[str, Row]]:
    """Walk through the rows with their key texts, each built from its parent's in bounded time."""
    above: list[str] = []
    for row in rows:
        del above[row.depth :]
        key = escape_part(row.name)
        if row.depth == 1:
            # As join_key writes it: the empty text is the root.
            key = key or "~"
        elif row.depth:
            key = f"{'' if row.depth == 2 and above[1] == '~' else above[-1]}/{key}"  # noqa: PLR2004
        above.append(key if len(key) <= _LONGEST_KEY else cut(key, _LONGEST_KEY + 1))
        yield above[-1], row


def _leaf(key: str, row: Row) -> Json:
    facts = facts_of(row.node)
    return _marked(
        {
            "key": key,
            "kind": facts.kind,
            "dtype": facts.dtype,
            "shape": None if facts.shape is None else list(facts.shape),
            "nbytes": facts.nbytes,
            "offset": facts.offset,
            "value": _native(row.node, facts.value),
        }
    )


def _native(leaf: Any, text: str | None) -> Any:
    """Give a small Python value as JSON's own where JSON has it, else as Python writes it."""
    is_native = isinstance(leaf, bool | int | str) or (isinstance(leaf, float) and math.isfinite(leaf))
    return leaf if is_native else text


def _branch(key: str, row: Row) -> Json:
    why = row.closed or "empty"
    return _marked({"key": key, "kind": branch_kind(row.node), "why": why} | _totals(row.totals))


def _marked(entry: Json) -> Json:
    return entry | {"key_cut": True} if len(str(entry["key"])) > _LONGEST_KEY else entry


def _totals(totals: Totals) -> Json:
    return {
        "leaves": totals.leaves,
        "arrays": totals.arrays,
        "parameters": totals.parameters,
        "nbytes": totals.nbytes,
    }


def _joined(entries: Iterator[Json]) -> Iterator[str]:
    """Put commas between entries, one entry a line."""
    waiting = None
    for entry in entries:
        if waiting is not None:
            yield f"  {waiting},"
        waiting = _text(entry)
    if waiting is not None:
        yield f"  {waiting}"


def _text(value: Json) -> str:
    # ASCII alone, and DEL, the one control character that JSON leaves as it is.
    return json.dumps(value, ensure_ascii=True, allow_nan=False).replace("\x7f", "\\u007f")
