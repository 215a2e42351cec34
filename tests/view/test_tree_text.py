"""The tree as text: columns, folding, cutting, colors, and nothing in it that a terminal would obey."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.view.trees import array, chain, small
from treering._view.plain import cell_width, cut, fit_width, visible
from treering._view.rows import lay_out
from treering._view.tree_text import ASCII, UNICODE, Look, tree_lines


def drawn(tree: object, *, look: Look = UNICODE, globs: tuple[str, ...] = (), depth: int = 32) -> list[str]:
    layout = lay_out(tree, globs=globs, depth=depth)
    return list(tree_lines(layout, title="x.msgpack", file_bytes=200, look=look))


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


def test_folded_and_filtered() -> None:
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
        lines = drawn(tree, look=dataclasses.replace(UNICODE, width=width))
        assert all(cell_width(line) <= width for line in lines)
    assert any("…" in line for line in drawn(tree, look=dataclasses.replace(UNICODE, width=80)))
    assert any("a_very_long_name_of_a_module_" * 3 in line for line in drawn(tree))


def test_ascii_is_ascii() -> None:
    assert all(line.isascii() for line in drawn(small(), look=ASCII, depth=1))
    assert all(line.isascii() for line in drawn({"n" * 500: "v" * 100, "m": array(*[1] * 60)}, look=ASCII))


def test_color_changes_no_character() -> None:
    colored = drawn(small(), look=dataclasses.replace(UNICODE, color=True))
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
    narrow = drawn(tree, look=dataclasses.replace(UNICODE, width=60))
    assert all(cell_width(line) <= 60 for line in narrow)
    assert not any("P(" in line for line in narrow)
    evil = dataclasses.replace(cut_array, sharding="\x1b[2J" * 100)
    assert all(line.isprintable() for line in drawn({"w": evil}))
