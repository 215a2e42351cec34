"""The listing for programs: its schema, exact keys, ASCII, and bounds."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.view.test_tree_text import HOSTILE
from tests.view.trees import array, chain, small
from treering._values.keys import split_key
from treering._view.listing_json import json_lines
from treering._view.rows import lay_out

TOTALS = {"leaves", "arrays", "parameters", "nbytes"}


def document(tree: Any, *, globs: tuple[str, ...] = (), depth: int = 32) -> dict[str, Any]:
    layout = lay_out(tree, globs=globs, depth=depth)
    text = "\n".join(json_lines(layout, {"file": "x\udc80", "file_bytes": 200, "globs": globs, "depth": depth}))
    assert text.isascii()
    assert "\x7f" not in text
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def test_the_members() -> None:
    found = document(small())
    assert set(found) == {"schema", "file", "file_bytes", "globs", "depth", "total", "selected", "leaves", "branches"}
    assert found["schema"] == "treering.inspect/1"
    assert set(found["total"]) == set(found["selected"]) == TOTALS
    assert found["total"] == {"leaves": 9, "arrays": 4, "parameters": 18, "nbytes": 91}
    assert found["leaves"][0] == {
        "key": "params/dense/kernel",
        "kind": "array",
        "dtype": "float32",
        "shape": [2, 3],
        "nbytes": 24,
        "offset": 10,
        "value": None,
    }
    assert found["branches"] == [
        {"key": "opt/0", "kind": "map", "why": "empty", "leaves": 0, "arrays": 0, "parameters": 0, "nbytes": 0}
    ]
    values = {leaf["key"]: (leaf["kind"], leaf["value"]) for leaf in found["leaves"]}
    assert values["names/0"] == ("str", "a")
    assert values["names/1"] == ("none", None)
    assert values["names/2/1"] == ("float", 2.5)
    assert values["step"] == ("int", 7)


def test_numbers_that_json_lacks_are_text() -> None:
    found = document({"a": float("nan"), "b": 1j, "c": b"\xff", "d": True})
    assert [leaf["value"] for leaf in found["leaves"]] == ["nan", "1j", "b'\\xff'", True]


def test_folded_and_filtered() -> None:
    found = document(small(), globs=("params", "step"), depth=1)
    assert [leaf["key"] for leaf in found["leaves"]] == ["step"]
    assert [(branch["key"], branch["why"], branch["leaves"]) for branch in found["branches"]] == [
        ("params", "depth", 3)
    ]
    assert found["selected"]["leaves"] == 4
    assert (found["globs"], found["depth"]) == (["params", "step"], 1)
    nothing = document(small(), globs=("nope",))
    assert (nothing["leaves"], nothing["branches"]) == ([], [])


def test_hostile_keys_come_back_exactly() -> None:
    found = document(HOSTILE)
    assert [split_key(leaf["key"])[0] for leaf in found["leaves"]] == list(HOSTILE)
    assert split_key(found["leaves"][-1]["key"]) == ("", "")


names = st.text(alphabet="a~/é\x1b", max_size=3)


@given(st.recursive(st.integers(0, 5), lambda below: st.dictionaries(names, below, max_size=3), max_leaves=8))
def test_keys_split_back_into_paths(tree: Any) -> None:
    for leaf in document(tree)["leaves"]:
        node = tree
        for part in split_key(leaf["key"]):
            node = node[part]
        assert node == leaf["value"]


def test_depth_and_long_names_cannot_blow_it_up() -> None:
    deep = document(chain(20_000))
    assert deep["total"]["leaves"] == 20_000
    assert deep["branches"][0]["leaves"] == 19_968
    layout = lay_out({"k" * 10**6: {str(number): array(1) for number in range(1000)}})
    lines = list(json_lines(layout, {"file": "x"}))
    assert max(map(len, lines)) < 2000
    leaf = json.loads("".join(lines))["leaves"][17]
    assert leaf["key_cut"] is True
    assert leaf["key"].endswith("/17")
