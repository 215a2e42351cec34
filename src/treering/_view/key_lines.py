"""Leaves one a line: key, dtype, shape or value, bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from treering._values.human import bytes_text
from treering._view.flat import LONGEST_KEY
from treering._view.listing_json import json_text, leaf_members
from treering._view.nodes import facts_of
from treering._view.plain import cell_width, padded, visible
from treering._view.tree_text import UNICODE, Look, leaf_cells

_WIDEST_KEY = 80
_WIDEST_DTYPE = 16
_WIDEST_DETAIL = 42
_GAP = "  "

Leaves = Sequence[tuple[str, Any]]


def key_lines(leaves: Leaves, look: Look = UNICODE) -> Iterator[str]:
    """Write leaves as lines without line ends, in columns; a long key moves the columns of its line.

    Example:
        >>> for line in key_lines([("step", 7), ("on", True)]):
        ...     print(line)
        step  int   7     8 B
        on    bool  True  1 B
    """
    cells = [_cells(key, leaf, look) for key, leaf in leaves]
    keys = min(max((cell_width(each[0]) for each in cells), default=0), _WIDEST_KEY)
    dtypes = min(max((len(each[1]) for each in cells), default=0), _WIDEST_DTYPE)
    details = min(max((cell_width(each[2]) for each in cells), default=0), _WIDEST_DETAIL)
    sizes = max((len(each[3]) for each in cells), default=0)
    for key, dtype, detail, size in cells:
        dtype_cell = look.painted("\x1b[36m", padded(dtype, dtypes))
        yield _GAP.join((padded(key, keys), dtype_cell, padded(detail, details), padded(size, sizes, right=True)))


def _cells(key: str, leaf: Any, look: Look) -> tuple[str, str, str, str]:
    facts = facts_of(leaf)
    dtype, detail = leaf_cells(facts, look)
    return visible(key, LONGEST_KEY, look.ellipsis) or "(the root)", dtype, detail, bytes_text(facts.nbytes)


def key_json(leaves: Leaves, *, title: str, globs: Sequence[str], origin: Mapping[str, object]) -> Iterator[str]:
    """Write leaves as the lines of one JSON object, one a line, in ASCII.

    Example:
        >>> import json
        >>> text = "".join(key_json([("step", 7)], title="x", globs=(), origin={}))
        >>> json.loads(text)["leaves"][0]["value"]
        7
    """
    head = {"schema": "treering.ls/1", "file": title, "globs": list(globs)} | dict(origin)
    yield json_text(head)[:-1] + ","
    yield ' "leaves": ['
    for place, (key, leaf) in enumerate(leaves, 1):
        yield f"  {json_text(leaf_members(key, leaf))}{',' if place < len(leaves) else ''}"
    yield " ]}"
