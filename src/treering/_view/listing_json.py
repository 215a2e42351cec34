"""A listing as one JSON document for programs. The page docs/command-line.md describes every member."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from treering._format.records import LeafRecord, Listing, Named
from treering._view.json_lines import Json, json_document, members_of
from treering._view.listing_text import UsageRow
from treering._view.nodes import LONGEST_KEY, branch_kind, has_json, is_branch, record_of, value_text
from treering._view.rows import Row, TreeLayout, with_keys

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


def usage_json(layout: TreeLayout, usage: Sequence[UsageRow], head: Json) -> Iterator[str]:
    """Write what the branches take as the lines of one JSON object, in ASCII.

    Example:
        >>> from treering._view.listing_text import measure_usage
        >>> from treering._view.rows import lay_out
        >>> layout = lay_out({"d": True})
        >>> text = "".join(usage_json(layout, measure_usage(layout), {}))
        >>> json.loads(text)["shares"][0]["key"]
        'd'
    """
    entries = ({"key": row.key} | dataclasses.asdict(row.totals) for row in usage)
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
    found["files"] = [
        {name: value for name, value in dataclasses.asdict(file).items() if value is not None} for file in listing.files
    ]
    if listing.form == "leaves":
        found |= members_of(listing, "prefixes", "unverified")
    return found | {"shares": shares} if (shares := listing.shares) else found


def _branch(key: str, row: Row) -> Json:
    why = row.closed or "empty"
    return _mark_cut({"key": key, "kind": branch_kind(row.node), "why": why} | dataclasses.asdict(row.totals))


def _node(key: str, row: Row) -> Json:
    return _mark_cut({"key": key, "kind": row.node.node, "class": row.node.class_name})


def _mark_cut(entry: Json) -> Json:
    return {**entry, "key_cut": True} if len(str(entry["key"])) > LONGEST_KEY else entry
