"""Bytes of branches, the largest first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from treering._values.human import bytes_text
from treering._view.flat import child_key
from treering._view.listing_json import json_text, totals_members
from treering._view.nodes import is_branch
from treering._view.plain import padded, visible
from treering._view.rows import Layout, Totals

_LONGEST = 200


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one branch or leaf takes of the whole."""

    key: str
    """Key text; that of a branch ends with a slash."""
    totals: Totals
    """What it adds up to."""


def shares_of(layout: Layout) -> list[Share]:
    """Divide a layout into its leaves and the branches that it folds, the largest first.

    Together they are the whole: no byte is counted twice.

    Example:
        >>> from treering._view.rows import lay_out
        >>> layout = lay_out({"a": {"b": 1, "c": 2}, "d": True}, depth=1)
        >>> [(share.key, share.totals.nbytes) for share in shares_of(layout)]
        [('a/', 16), ('d', 1)]
    """
    above: list[str] = []
    shares: list[Share] = []
    for row in layout.rows:
        del above[row.depth :]
        above.append(child_key(above[-1], row.depth - 1, row.name) if row.depth else "")
        branch = is_branch(row.node)
        if branch and row.closed is None:
            continue
        shares.append(Share(key=f"{above[-1]}/" if branch and row.depth else above[-1], totals=row.totals))
    return sorted(shares, key=lambda share: -share.totals.nbytes)


def usage_lines(layout: Layout, shares: Sequence[Share], *, ellipsis: str = "…") -> Iterator[str]:
    r"""Write shares as lines: bytes, part of the whole, leaves, key; and the total.

    Example:
        >>> from treering._view.rows import lay_out
        >>> layout = lay_out({"a": {"b": 1, "c": 2}, "d": True}, depth=1)
        >>> print("\n".join(usage_lines(layout, shares_of(layout))))
         bytes   part  leaves  key
          16 B  94.1%       2  a/
           1 B   5.9%       1  d
          17 B   100%       3  total
    """
    whole = layout.kept
    sizes = [bytes_text(share.totals.nbytes) for share in shares]
    width = max(6, *map(len, sizes), len(bytes_text(whole.nbytes))) if sizes else 6
    counts = max(len("leaves"), len(f"{whole.leaves:,}"))
    yield f"{'bytes':>{width}}   part  {'leaves':>{counts}}  key"
    for share, size in zip(shares, sizes, strict=True):
        part = f"{100 * share.totals.nbytes / whole.nbytes:.1f}%" if whole.nbytes else "-"
        key = visible(share.key, _LONGEST, ellipsis) or "(the root)"
        yield f"{size:>{width}}  {part.replace('100.0%', '100%'):>5}  {share.totals.leaves:>{counts},}  {key}"
    yield f"{padded(bytes_text(whole.nbytes), width, right=True)}   100%  {whole.leaves:>{counts},}  total"


def usage_json(
    layout: Layout, shares: Sequence[Share], *, title: str, globs: Sequence[str], depth: int
) -> Iterator[str]:
    """Write shares as the lines of one JSON object, in ASCII.

    Example:
        >>> from treering._view.rows import lay_out
        >>> layout = lay_out({"d": True})
        >>> import json
        >>> json.loads("".join(usage_json(layout, shares_of(layout), title="x", globs=(), depth=2)))["shares"][0]["key"]
        'd'
    """
    head = {
        "schema": "treering.du/1",
        "file": title,
        "globs": list(globs),
        "depth": depth,
        "total": totals_members(layout.everything),
        "selected": totals_members(layout.kept),
    }
    yield json_text(head)[:-1] + ","
    yield ' "shares": ['
    for place, share in enumerate(shares, 1):
        comma = "," if place < len(shares) else ""
        yield f"  {json_text({'key': share.key} | totals_members(share.totals))}{comma}"
    yield " ]}"
