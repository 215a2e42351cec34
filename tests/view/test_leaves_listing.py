"""Listings of leaves directories: chunks and compressors, and which prefixes another program wrote."""

from __future__ import annotations

import dataclasses
import json

from tests.view.test_index_listing import ARRAY, INT, TEXT, container, index
from treering._format.listing import list_index
from treering._format.records import LeafRecord, Listing, Place
from treering._view.html import html_text
from treering._view.listing_json import leaf_members, origin_members
from treering._view.listing_text import notes_of
from treering._view.nodes import leaves_of
from treering._view.rows import lay_out
from treering._view.tree_text import UNICODE, tree_lines

OURS = Place(file="a/0.0", chunks=6, chunk_shape=(1, 1), compressor=None, verified=True)
ZIPPED = Place(file="b/0", chunks=1, chunk_shape=(5000,), compressor='{"id":"zstd","level":1}', verified=True)
THEIRS = dataclasses.replace(OURS, file="c/0.0", verified=False)


def listing() -> Listing:
    found = index([container("dict", "a", "n", "b", "c"), 4], [ARRAY, INT, TEXT, ARRAY])
    return list_index(found, form="leaves", files=(), file_bytes=1, places=[OURS, ZIPPED, THEIRS])


def test_every_stored_leaf_has_its_place() -> None:
    leaves = dict(leaves_of(listing().root))
    assert leaves["n"] == 1
    a, b, c = (leaves[key] for key in "abc")
    assert (a.kind, a.file, a.offset, a.chunks, a.chunk_shape, a.compressor) == ("jax", "a/0.0", 0, 6, (1, 1), None)
    # What is compressed lies at no offset.
    assert (b.kind, b.dtype, b.file, b.offset, b.compressor) == ("str", None, "b/0", None, ZIPPED.compressor)
    assert (c.kind, c.file) == ("array", "c/0.0")


def test_chunks_stand_last_where_there_is_room() -> None:
    lines = list(tree_lines(lay_out(listing().root), title="x", file_bytes=1))
    assert lines[1].endswith("  sharding  chunks")
    assert lines[2].endswith("  P('x')    6 of [1, 1]")
    assert lines[4].endswith(" " * 10 + "zstd")
    narrow = dataclasses.replace(UNICODE, width=60)
    lines = list(tree_lines(lay_out(listing().root), title="x", file_bytes=1, look=narrow))
    assert not any("chunks" in line or "P('x')" in line for line in lines)
    assert "6 of [1, 1]" in html_text(lay_out(listing().root), title="x", file_bytes=1)


def test_programs_get_shape_and_configuration() -> None:
    leaves = {key: leaf_members(key, leaf) for key, leaf in leaves_of(listing().root)}
    assert (leaves["a"]["chunks"], leaves["a"]["chunk_shape"], leaves["a"]["compressor"]) == (6, (1, 1), None)
    assert leaves["b"]["compressor"] == {"id": "zstd", "level": 1}
    assert "chunks" not in leaves["b"]
    assert "chunk_shape" not in leaves["n"]
    plain = LeafRecord(kind="jax", dtype="int8", shape=(1,), nbytes=1, offset=0)
    assert "chunk_shape" not in leaf_members("w", plain)


def test_prefixes_of_others_are_told() -> None:
    found = dataclasses.replace(listing(), verified=False, prefixes=("model", "ema", ""), unverified=("ema", ""))
    assert origin_members(found)["prefixes"] == ("model", "ema", "")
    assert origin_members(found)["unverified"] == ("ema", "")
    notes = dict(notes_of(found))
    assert notes["form"] == "leaves directory by treering and others, with checksums of some leaves"
    assert notes["unverified"] == "'ema', no prefix: written by another program, without checksums"
    many = dataclasses.replace(found, prefixes=[str(n) for n in range(30)], unverified=[str(n) for n in range(20)])
    assert " and 12 more: " in dict(notes_of(many))["unverified"]


def test_where_all_are_alike_the_form_says_it() -> None:
    foreign = dataclasses.replace(listing(), verified=False, prefixes=("a", "b"), unverified=("a", "b"))
    assert notes_of(foreign)[0] == ("form", "leaves directory, without checksums")
    assert "unverified" not in dict(notes_of(foreign))
    ours = dataclasses.replace(listing(), verified=True, prefixes=("",), notes=("a save is not indexed",))
    assert notes_of(ours)[:2] == [
        ("form", "leaves directory by treering, with checksums"),
        ("note", "a save is not indexed"),
    ]
    assert "prefixes" not in origin_members(Listing(form="checkpoint", file_bytes=1, root={}))
    assert json.loads(json.dumps(origin_members(ours)))["unverified"] == []
