"""Flat views of a listing: keys, lines, shares of the bytes, notes."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.view.test_rows import leaves_of as every_leaf
from tests.view.test_tree_text import HOSTILE
from tests.view.trees import array, chain, small
from treering._format.records import FileRecord, LeafRecord, Listing, Named
from treering._values.keys import join_key
from treering._view.differences import Difference, compare_listings
from treering._view.listing_json import key_json
from treering._view.listing_text import key_lines, measure_usage, notes_of, usage_lines
from treering._view.nodes import LONGEST_KEY, is_branch, leaves_of, nodes_of, record_of, value_text
from treering._view.plain import cell_width
from treering._view.rows import lay_out
from treering._view.tree_text import ASCII, tree_lines

names = st.text(alphabet="ab~/é", max_size=2)
trees = st.recursive(
    st.integers(0, 3), lambda below: st.dictionaries(names, below, max_size=3) | st.lists(below, max_size=3)
)
globs = st.lists(st.sampled_from(["a", "**", "*", "a/*", "**/b", "*/a", "~1", "0"]), max_size=2)


@given(trees, globs)
def test_leaves_are_those_that_rows_keep(tree: Any, texts: list[str]) -> None:
    found = list(leaves_of(tree, texts))
    assert len(found) == lay_out(tree, globs=texts).kept.leaves
    if not texts:
        assert found == [(join_key(path), leaf) for path, leaf in every_leaf(tree)]
    else:
        assert set(found) <= set(leaves_of(tree))


@given(trees, st.integers(0, 3))
def test_shares_add_up(tree: Any, depth: int) -> None:
    layout = lay_out(tree, depth=depth)
    shares = measure_usage(layout)
    for member in ("nbytes", "leaves", "parameters"):
        assert sum(getattr(share.totals, member) for share in shares) == getattr(layout.everything, member)


def test_branches() -> None:
    assert [key for key, node in nodes_of(small()) if is_branch(node)] == [
        "",
        "params",
        "params/dense",
        "params/norm",
        "opt",
        "opt/0",
        "opt/mu",
        "opt/mu/dense",
        "names",
        "names/2",
    ]


def test_deep_keys_are_cut() -> None:
    keys = [key for key, _ in leaves_of(chain(5000))]
    assert len(keys) == 5000
    assert max(map(len, keys)) == LONGEST_KEY + 1


def test_hostile_keys_reach_no_terminal() -> None:
    leaves = list(leaves_of(HOSTILE))
    lines = [*key_lines(leaves), *usage_lines(lay_out(HOSTILE), measure_usage(lay_out(HOSTILE)))]
    assert all(line.isprintable() for line in lines)
    text = "".join(key_json(leaves, {"file": "\x1b"}))
    assert text.isascii()
    assert text.isprintable()
    assert len(json.loads(text)["leaves"]) == len(HOSTILE)
    assert str(Difference(key="\x1b[2J", what="value", a="\n", b="\u202e")).isprintable()


def test_ascii_lines_are_ascii() -> None:
    leaves = [("n" * 3000, array(*[1] * 60)), ("x", "v" * 500)]
    assert all(line.isascii() for line in key_lines(leaves, ASCII))


def test_columns_stand_below_each_other() -> None:
    lines = list(key_lines(list(leaves_of(small()))))
    assert len({cell_width(line) for line in lines}) == 1
    assert list(key_lines([])) == []


def test_records_of_values() -> None:
    assert record_of("text") == LeafRecord(kind="str", dtype=None, shape=None, nbytes=4, offset=None, value="text")
    assert record_of(None).kind == "none"
    assert record_of(bytearray(3)).nbytes == 3
    assert record_of(2**100).nbytes == 13
    assert (value_text(7**20_000) or "").startswith("0x")


def test_notes_tell_where_it_came_from() -> None:
    files = [FileRecord(name=f"data-{n}", nbytes=10) for n in range(6)]
    listing = Listing(
        form="checkpoint",
        file_bytes=60,
        root=Named({}, node="other", class_name="nn.Model"),
        files=files,
        written={"by": "treering 1", "at": "now", "more": {"not": "shown"}},
        meshes=("x=8", "y=2"),
        processes=4,
        verified=True,
        metadata={"loss": float("inf")},
    )
    notes = dict(notes_of(listing))
    assert notes["written"] == "by treering 1, at now, 4 processes"
    assert notes["meshes"] == "x=8; y=2"
    assert notes["files"].endswith("data-3 (10 B) and 2 more")
    assert notes["root"] == "nn.Model"
    assert notes["metadata"] == '{"loss": "inf"}'
    lines = list(tree_lines(lay_out({"a": 1}), title="x", file_bytes=1, notes=[("a", "b\n")]))
    assert lines[1] == r"a: b\n"


def test_two_children_of_one_name_are_both_compared() -> None:
    one = Listing(form="msgpack", file_bytes=1, root={1: "a", "1": "b"})
    two = Listing(form="msgpack", file_bytes=1, root={1: "a", "1": "c"})
    assert [str(each) for each in compare_listings(one, two)] == ["1': value: 'b' in A, 'c' in B"]
    assert not list(compare_listings(one, one))


def test_static_fields_are_compared() -> None:
    def node(**static: Any) -> Listing:
        root = Named({"w": 1}, node="other", class_name="nn.Dense", static=tuple(static.items()))
        return Listing(form="checkpoint", file_bytes=1, root={"m": root}, structured=True)

    assert not list(compare_listings(node(a=1, x=float("nan")), node(a=1, x=float("nan"))))
    assert [str(each) for each in compare_listings(node(a=1, b=2), node(a=True))] == [
        "m.a: static: 1 in A, True in B",
        "m.b: static: 2 in A, not there in B",
    ]


def test_forms_that_keep_less_are_compared_on_what_they_keep() -> None:
    exact = Listing(form="checkpoint", file_bytes=1, root={"x": (1, 2), "e": {}}, structured=True)
    loose = Listing(form="msgpack", file_bytes=1, root={"x": {"0": 1, "1": 2}})
    assert not list(compare_listings(exact, loose))
    assert not list(compare_listings(loose, exact))
