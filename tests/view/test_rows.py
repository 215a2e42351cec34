"""Listings as rows, and rows as text: totals, folding, globs; columns, cutting, colors, and no terminal commands."""

from __future__ import annotations

import dataclasses
import sys
import time
import unicodedata
from functools import reduce
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.properties.strategies import quick
from treering._format.listing import LeafRecord
from treering._printable import printable
from treering._values.keys import GlobSet, join_key
from treering._view.plain import cell_width, cut, fit_width, visible
from treering._view.rows import DEEPEST, TreeLayout, children_of, is_branch, lay_out, record_of
from treering._view.tree_text import ASCII, UNICODE, Style, tree_lines


def array(*shape: int, dtype: str = "float32", itemsize: int = 4, offset: int = 10) -> LeafRecord:
    nbytes = itemsize
    for length in shape:
        nbytes *= length
    return LeafRecord(kind="array", dtype=dtype, shape=shape, nbytes=nbytes, offset=offset)


def small() -> dict[str, Any]:
    return {
        "params": {
            "dense": {"kernel": array(2, 3), "bias": array(3, dtype="bfloat16", itemsize=2)},
            "norm": {"scale": array(3)},
        },
        "opt": {"0": {}, "mu": {"dense": {"kernel": array(2, 3)}}},
        "names": ["a", None, (1, 2.5)],
        "step": 7,
    }


def chain(levels: int) -> dict[str, Any]:
    """Nest maps ``levels`` deep, with a leaf on each level."""
    node: dict[str, Any] = {"leaf": 1}
    for _ in range(levels - 1):
        node = {"leaf": 1, "in": node}
    return node


def keys_of(layout: TreeLayout) -> list[str]:
    path: list[str] = []
    keys = []
    for row in layout.rows:
        del path[max(row.depth - 1, 0) :]
        if row.depth:
            path.append(row.name)
        keys.append(join_key(path))
    return keys


def leaves_of(tree: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if not is_branch(tree):
        return [(path, tree)]
    return [leaf for name, node in children_of(tree) for leaf in leaves_of(node, (*path, name))]


def test_every_place_has_a_row_and_every_branch_its_totals() -> None:
    layout = lay_out(small())
    rows = dict(zip(keys_of(layout), layout.rows, strict=True))
    assert list(rows)[:4] == ["", "params", "params/dense", "params/dense/kernel"]
    assert rows["params"].totals.parameters == 6 + 3 + 3
    assert rows["params"].totals.nbytes == 24 + 6 + 12
    assert rows["names"].totals.leaves == 4
    assert rows["names"].totals.arrays == 0
    assert rows["opt/0"].totals.leaves == 0
    assert layout.everything == layout.kept == rows[""].totals
    assert layout.everything.leaves == 9


def test_depth_folds_and_keeps_the_totals() -> None:
    layout = lay_out(small(), depth=1)
    assert keys_of(layout) == ["", "params", "opt", "names", "step"]
    assert [row.closed for row in layout.rows] == [None, "depth", "depth", "depth", None]
    assert layout.rows[1].totals.parameters == 12
    assert layout.kept == layout.everything
    alone = lay_out(small(), depth=0)
    assert (len(alone.rows), alone.rows[0].closed) == (1, "depth")


@pytest.mark.parametrize(
    ("globs", "wanted"),
    [
        (["**/kernel"], ["params/dense/kernel", "opt/mu/dense/kernel"]),
        (["params"], ["params/dense/kernel", "params/dense/bias", "params/norm/scale"]),
        (["params/*/b*", "step"], ["params/dense/bias", "step"]),
        (["names/2"], ["names/2/0", "names/2/1"]),
        (["kernel"], []),
    ],
)
def test_globs_keep_leaves_and_whole_branches(globs: list[str], wanted: list[str]) -> None:
    layout = lay_out(small(), globs=globs)
    pairs = zip(keys_of(layout), layout.rows, strict=True)
    assert [key for key, row in pairs if not is_branch(row.node)] == wanted
    assert layout.kept.leaves == len(wanted)
    assert layout.everything.leaves == 9


def test_a_kept_empty_branch_keeps_its_row() -> None:
    assert keys_of(lay_out(small(), globs=["opt/0"])) == ["", "opt", "opt/0"]
    assert keys_of(lay_out(small(), globs=["opt/0"], depth=1)) == []


def test_globs_count_below_the_fold_too() -> None:
    layout = lay_out(small(), globs=["**/kernel"], depth=1)
    assert keys_of(layout) == ["", "params", "opt"]
    assert [row.totals.leaves for row in layout.rows] == [2, 1, 1]


def test_a_file_that_is_one_leaf() -> None:
    layout = lay_out(array(4))
    assert [(row.depth, row.name) for row in layout.rows] == [(0, "")]
    assert layout.kept.parameters == 4


trees = st.recursive(
    st.one_of(st.integers(0, 9), st.none(), st.builds(array, st.integers(0, 3))),
    lambda below: st.one_of(st.dictionaries(st.text("ab", max_size=2), below, max_size=3), st.lists(below, max_size=2)),
    max_leaves=12,
)


@given(
    trees,
    st.lists(st.lists(st.sampled_from(["**", "*", "a", "b*", "0"]), max_size=3).map("/".join), max_size=2),
    st.integers(0, 4),
)
def test_totals_agree_with_a_plain_walk(tree: Any, globs: list[str], depth: int) -> None:
    layout = lay_out(tree, globs=globs, depth=depth)

    together = GlobSet(globs)

    def is_kept(path: tuple[str, ...]) -> bool:
        heads = [path[:length] for length in range(len(path) + 1)]
        return not globs or any(together.accepted(reduce(together.step, head, together.start)) for head in heads)

    leaves = leaves_of(tree)
    kept = [(path, leaf) for path, leaf in leaves if is_kept(path)]
    assert layout.everything.leaves == len(leaves)
    assert layout.kept.leaves == len(kept)
    assert layout.kept.nbytes == sum(record_of(leaf).nbytes for _, leaf in kept)
    shown = [row for row in layout.rows if not is_branch(row.node)]
    assert len(shown) == sum(len(path) <= depth for path, _ in kept)
    if layout.rows:
        assert layout.rows[0].totals == layout.kept


def test_depth_beyond_the_recursion_limit() -> None:
    levels = 30 * sys.getrecursionlimit()
    began = time.process_time()
    layout = lay_out(chain(levels), globs=["**/leaf"], depth=DEEPEST)
    assert time.process_time() - began < 15
    assert layout.kept.leaves == levels
    assert max(row.depth for row in layout.rows) == DEEPEST
    assert [row.closed for row in layout.rows if row.closed] == ["depth"]


def test_a_long_list_of_values_is_one_row() -> None:
    tree = {"words": ["a"] * 101, "few": [1, 2], "arrays": [array(1)] * 101}
    layout = lay_out(tree)
    rows = dict(zip(keys_of(layout), layout.rows, strict=True))
    assert rows["words"].closed == "long"
    assert rows["words"].totals.leaves == rows["words"].totals.nbytes == 101
    assert "words/0" not in rows
    assert {"few/1", "arrays/100"} <= set(rows)
    assert layout.everything == layout.kept
    assert keys_of(lay_out(tree, globs=["words/5"])) == ["", "words", "words/5"]
    assert lay_out(["a"] * 101).kept.leaves == 101


def drawn(tree: object, *, style: Style = UNICODE, globs: tuple[str, ...] = (), depth: int = 32) -> list[str]:
    layout = lay_out(tree, globs=globs, depth=depth)
    return list(tree_lines(layout, title="x.msgpack", file_bytes=200, style=style))


def test_the_whole_picture() -> None:
    assert (
        "\n".join(drawn(small()))
        == """\
x.msgpack · 200 B
                    dtype     shape       parameters  bytes
├─ params                                         12   42 B
│  ├─ dense                                        9   30 B
│  │  ├─ kernel     float32   [2, 3]               6   24 B
│  │  └─ bias       bfloat16  [3]                  3    6 B
│  └─ norm                                         3   12 B
│     └─ scale      float32   [3]                  3   12 B
├─ opt                                             6   24 B
│  ├─ 0                       empty map                 0 B
│  └─ mu                                           6   24 B
│     └─ dense                                     6   24 B
│        └─ kernel  float32   [2, 3]               6   24 B
├─ names                      list of 3                17 B
│  ├─ 0             str       'a'                       1 B
│  ├─ 1             None                                0 B
│  └─ 2                       tuple of 2               16 B
│     ├─ 0          int       1                         8 B
│     └─ 1          float     2.5                       8 B
└─ step             int       7                         8 B
total: 9 leaves, 18 parameters in 4 arrays, 91 B"""
    )


def test_folded_and_filtered_lines() -> None:
    lines = drawn(small(), depth=1, globs=("params", "step"))
    assert "… 3 leaves" in lines[2]
    assert lines[-3:] == [
        "folded below level 1; --depth N opens more levels",
        "shown: 4 leaves, 12 parameters in 3 arrays, 50 B",
        "total: 9 leaves, 18 parameters in 4 arrays, 91 B",
    ]


def test_one_leaf_is_the_root() -> None:
    assert "(the root)" in drawn(array(4))[2]
    assert "empty map" in drawn({})[2]


def test_names_give_way_to_the_columns_of_a_terminal() -> None:
    tree = {"a_very_long_name_of_a_module_" * 3: {"kernel": array(1024, 1024)}, "重み" * 30: array(3)}
    for width in (80, 120):
        lines = drawn(tree, style=dataclasses.replace(UNICODE, width=width))
        assert all(cell_width(line) <= width for line in lines)
    assert any("…" in line for line in drawn(tree, style=dataclasses.replace(UNICODE, width=80)))
    assert any("a_very_long_name_of_a_module_" * 3 in line for line in drawn(tree))


def test_ascii_is_ascii() -> None:
    assert all(line.isascii() for line in drawn(small(), style=ASCII, depth=1))
    assert all(line.isascii() for line in drawn({"n" * 500: "v" * 100, "m": array(*[1] * 60)}, style=ASCII))


def test_color_changes_no_character() -> None:
    colored = drawn(small(), style=dataclasses.replace(UNICODE, color=True))
    assert any("\x1b[1m" in line for line in colored)
    plain = [line.replace("\x1b[0m", "") for line in colored]
    for paint in ("\x1b[1m", "\x1b[2m", "\x1b[36m"):
        plain = [line.replace(paint, "") for line in plain]
    assert plain == drawn(small())


HOSTILE = {
    "\x1b[2J\x1b]0;owned\x07": 1,
    "line\nbreak\r": "\x1b[31m",
    "\u202egnp.exe": array(3),
    "zero\u200bwidth\ufeff": {"\x9b31m": None},
    "\ud800": b"\x1b",
    "tab\tdel\x7f": "\u2066",
    "back\\slash": 1,
    "": {"": 1},
}


def test_hostile_names_and_values_are_escaped() -> None:
    text = "".join(drawn(HOSTILE))
    assert text.isprintable()
    for shown in (r"\x1b[2J\x1b]0;owned\x07", r"line\nbreak\r", r"\u202egnp.exe", r"zero\u200bwidth\ufeff", r"\ud800"):
        assert shown in text


@given(st.dictionaries(st.text(max_size=8), st.one_of(st.text(max_size=8), st.binary(max_size=4)), max_size=5))
def test_whatever_the_names_lines_are_printable(tree: dict[str, object]) -> None:
    assert all(line.isprintable() for line in drawn(tree))


@given(st.text())
def test_visible_text_is_printable_and_short(text: str) -> None:
    assert visible(text).isprintable()
    assert len(visible(text, limit=10)) <= 10 * len("\\U0010ffff")


@given(st.text(), st.integers(3, 30))
@example(text="⺀゛\U00018cd6\U00018cd6⺀", width=6)
def test_fitted_fits(text: str, width: int) -> None:
    shown = visible(text)
    assert cell_width(fit_width(shown, width)) <= max(width, 5)


@pytest.mark.parametrize("size", [10**7])
def test_a_name_of_megabytes_costs_one_line(size: int) -> None:
    lines = drawn({"\x1b" * size: {"w": array(3)}})
    assert max(map(len, lines)) < 1000


def test_a_chain_of_many_levels_is_folded() -> None:
    lines = drawn(chain(20_000))
    assert len(lines) < 100
    assert any("19,968 leaves" in line for line in lines)
    assert cut("abcdef", 5) == "ab…ef"


def test_shardings_stand_last_where_there_is_room() -> None:
    cut_array = dataclasses.replace(array(1024, 8), sharding="P('data', None) over data=4")
    tree = {"w": cut_array, "n": 1, "whole": dataclasses.replace(array(2), sharding="P() over data=4")}
    lines = drawn(tree)
    assert lines[1].endswith("  sharding")
    assert lines[2].endswith("KiB  P('data', None)")
    assert lines[3].endswith(" B")
    assert lines[4].endswith("8 B  P()")
    narrow = drawn(tree, style=dataclasses.replace(UNICODE, width=60))
    assert all(cell_width(line) <= 60 for line in narrow)
    assert not any("P(" in line for line in narrow)
    evil = dataclasses.replace(cut_array, sharding="\x1b[2J" * 100)
    assert all(line.isprintable() for line in drawn({"w": evil}))


NEVER = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))


@quick(200)
@given(st.text() | st.text(st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp", "Cn"])))
def test_what_is_printable_is_one_line_that_shows_as_itself(text: str) -> None:
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)
    assert "\n".join(map(printable, text.split("\n"))) == printable(text, lines=True)
    if text.isprintable():
        assert printable(text) == text


def test_no_character_of_all_is_forgotten() -> None:
    never = [chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) in NEVER]
    assert len(never) > 2000
    assert printable("".join(never)).isascii()
