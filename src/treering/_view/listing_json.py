"""A listing as one JSON document for programs. The page docs/command-line.md describes every member."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from treering._format.records import FileRecord, LeafRecord, Listing, Named
from treering._view.flat import LONGEST_KEY, child_key
from treering._view.nodes import WIDEST_NUMBER, branch_kind, facts_of, is_branch
from treering._view.rows import Layout, Row, Totals

SCHEMA = "treering.inspect/1"
"""Names the document's form. Members may be added under this name; none changes its meaning or goes away."""


Json = dict[str, object]


def json_lines(
    layout: Layout,
    *,
    title: str,
    file_bytes: int,
    globs: Sequence[str],
    depth: int,
    origin: Mapping[str, object] | None = None,
) -> Iterator[str]:
    """Write a layout as the lines of one JSON object, one line for each leaf, all in ASCII.

    ``origin`` holds more members for the head, those of `origin_members`. Keys are key text, exact up to 1000
    characters; a longer one is cut in its middle and its entry says ``"key_cut": true``. Leaves deeper than ``depth``,
    and long lists of small values, are summed up in ``branches``. Branches that are objects of a class are in
    ``nodes``, where there are any.

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
        "total": totals_members(layout.everything),
        "selected": totals_members(layout.kept),
    } | dict(origin or {})
    yield json_text(head)[:-1] + ","
    yield ' "leaves": ['
    yield from _joined(leaf_members(key, row.node) for key, row in _keyed(layout.rows) if not is_branch(row.node))
    yield " ],"
    yield ' "branches": ['
    yield from _joined(_branch(key, row) for key, row in _keyed(layout.rows) if _is_closed(row))
    nodes = [_node(key, row) for key, row in _keyed(layout.rows) if isinstance(row.node, Named)]
    if nodes:
        yield " ],"
        yield ' "nodes": ['
        yield from _joined(iter(nodes))
    yield " ]}"


def _is_closed(row: Row) -> bool:
    """Tell whether a branch has no entry below it that says that it exists."""
    return is_branch(row.node) and (row.closed is not None or not row.node)


def _keyed(rows: Sequence[Row]) -> Iterator[tuple[str, Row]]:
    """Walk through the rows with their key texts, each built from its parent's in bounded time."""
    above: list[str] = []
    for row in rows:
        del above[row.depth :]
        above.append(child_key(above[-1], row.depth - 1, row.name) if row.depth else "")
        yield above[-1], row


def leaf_members(key: str, leaf: Any) -> Json:
    """Give a leaf as members of an object; those that only checkpoints have are left out elsewhere.

    Example:
        >>> leaf_members("step", 7)["value"]
        7
    """
    facts = facts_of(leaf)
    members: Json = {
        "key": key,
        "kind": facts.kind,
        "dtype": facts.dtype,
        "shape": None if facts.shape is None else list(facts.shape),
        "nbytes": facts.nbytes,
        "offset": facts.offset,
        "value": _native(leaf, facts.value),
    }
    if isinstance(leaf, LeafRecord):
        more = {"file": leaf.file, "sharding": leaf.sharding, "impl": leaf.impl}
        members |= {name: text for name, text in more.items() if text is not None}
        if leaf.chunks != 1:
            members["chunks"] = leaf.chunks
        more_lists = {"grid": leaf.grid, "processes": leaf.processes}
        members |= {name: list(numbers) for name, numbers in more_lists.items() if numbers}
        if leaf.chunk_shape is not None:
            members["chunk_shape"] = list(leaf.chunk_shape)
            members["compressor"] = None if leaf.compressor is None else json.loads(leaf.compressor)
    return _marked(members)


def origin_members(listing: Listing) -> Json:
    """Give what is known of a listing as a whole as members of an object.

    Example:
        >>> origin_members(Listing(form="msgpack", file_bytes=1, root=None))
        {'form': 'msgpack'}
    """
    if listing.form.startswith("msgpack"):
        return {"form": listing.form}
    more: Json = {}
    if listing.form == "leaves":
        more = {"prefixes": list(listing.prefixes), "unverified": list(listing.unverified)}
    if listing.shares:
        more["shares"] = [
            {"process": share.process, "files": share.files, "nbytes": share.nbytes} for share in listing.shares
        ]
    return {
        "form": listing.form,
        "verified": listing.verified,
        "written": dict(listing.written),
        "processes": listing.processes,
        "meshes": list(listing.meshes),
        "files": [_file(file) for file in listing.files],
        "metadata": dict(listing.metadata),
    } | more


def _file(file: FileRecord) -> Json:
    members: Json = {"name": file.name, "nbytes": file.nbytes}
    return members if file.process is None else members | {"process": file.process}


def _native(leaf: Any, text: str | None) -> Any:
    """Give a small Python value as JSON's own where JSON has it, else as Python writes it."""
    if isinstance(leaf, int):
        return leaf if leaf.bit_length() <= WIDEST_NUMBER else text
    is_native = isinstance(leaf, str) or (isinstance(leaf, float) and math.isfinite(leaf))
    return leaf if is_native else text


def _branch(key: str, row: Row) -> Json:
    why = row.closed or "empty"
    return _marked({"key": key, "kind": branch_kind(row.node), "why": why} | totals_members(row.totals))


def _node(key: str, row: Row) -> Json:
    return _marked({"key": key, "kind": row.node.node, "class": row.node.class_name})


def _marked(entry: Json) -> Json:
    return entry | {"key_cut": True} if len(str(entry["key"])) > LONGEST_KEY else entry


def totals_members(totals: Totals) -> Json:
    """Give totals as members of an object."""
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
        waiting = json_text(entry)
    if waiting is not None:
        yield f"  {waiting}"


def json_text(value: Mapping[str, object]) -> str:
    """Write an object as one line of ASCII; a number that JSON lacks is written as text.

    Example:
        >>> json_text({"loss": float("nan")})
        '{"loss": "nan"}'
    """
    try:
        text = json.dumps(value, ensure_ascii=True, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=True, allow_nan=False)
    # DEL is the one control character that JSON leaves as it is.
    return text.replace("\x7f", "\\u007f")


def _finite(value: Any) -> Any:
    """Copy an object with text in place of the numbers that JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
