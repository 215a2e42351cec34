"""Patterns, rules and maps as values: what they match, what is refused, and the way back."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from treering import KeyMap, KeyRule
from treering._keymap.key_rule import KeyPattern, MapLeaf, cut_leaf
from treering.errors import FormatError, MismatchError, NotFoundError, UnsupportedError


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"source": "{i}.w", "target": "w"}, "stack= names the captures that only the source has, which are: {i}"),
        ({"source": "w", "target": "{i}.w"}, "unstack= names the captures that only the target has, which are: {i}"),
        ({"source": "w", "target": "v", "stack": {"i": 0}}, "which are: none"),
        ({"source": "{i}.w", "target": "w", "stack": {"i": -1}}, "does not map captures to axes"),
        ({"source": "{i}.{j}", "target": "w", "stack": {"i": 0, "j": 0}}, "an axis twice"),
        ({"source": ["a", "b"], "target": "c"}, "several sources and merge="),
        ({"source": "a", "target": "c", "merge": 0}, "several sources and merge="),
        ({"source": "a", "target": ["b", "c"]}, "several targets and split="),
        ({"source": ["a", "{b}"], "target": "c", "merge": 0}, "different captures"),
        ({"source": ["a", "b"], "target": "c", "merge": 0, "sizes": [1]}, "for each of the 2 parts"),
        ({"source": ["a", "b"], "target": "c", "merge": 0, "sizes": [1, 0]}, "a size of 1 or more"),
        ({"source": "a", "target": "c", "sizes": [1]}, "sizes= belongs to"),
        ({"source": "a", "target": "c", "transpose": [0, 0]}, "not an order of axes"),
        ({"source": "a", "target": "c", "cast": ["float32"]}, "not a pair of dtypes"),
        ({"source": "a", "target": "c", "cast": ["float32", "object"]}, "not a pair of dtypes"),
        ({"source": "a", "target": None, "cast": ["float32", "float16"]}, "without a target has nothing else"),
        ({"source": "a", "target": "b", "copy": 1}, "neither True nor False"),
        ({"source": 3, "target": "b"}, "a pattern is a text"),
        ({"source": [], "target": "b"}, "it has no pattern"),
    ],
)
def test_a_rule_that_contradicts_itself_is_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        KeyRule(**given)
    assert problem in str(caught.value)


def test_the_way_back_swaps_everything() -> None:
    rule = KeyRule(
        ["h.{i}.q", "h.{i}.k"], "h/qk", merge=-1, sizes=[3, 5], stack={"i": 1}, transpose=(2, 0, 1),
        cast=("float32", "bfloat16"),
    )  # fmt: skip
    back = rule.inverse()
    assert back == KeyRule(
        "h/qk", ("h.{i}.q", "h.{i}.k"), split=-1, sizes=(3, 5), unstack={"i": 1}, transpose=(1, 2, 0),
        cast=("bfloat16", "float32"),
    )  # fmt: skip
    assert back is not None
    assert back.inverse() == rule
    assert eval(repr(rule)) == rule


def test_what_is_left_out_does_not_come_back() -> None:
    names = KeyMap([KeyRule("a", "b"), KeyRule("c", None), KeyRule("a", "d", copy=True)])
    assert names.inverse() == KeyMap([KeyRule("b", "a"), KeyRule("d", None)])
    assert names != KeyMap([KeyRule("a", "b")])
    assert hash(names) == hash(KeyMap(names.rules))


def test_only_rules_make_a_map() -> None:
    with pytest.raises(UnsupportedError, match="made of KeyRule, found"):
        KeyMap([("a", "b")])  # type: ignore[list-item]
    with pytest.raises(UnsupportedError, match=r"made of KeyRule, found 3$"):
        KeyMap(3)  # type: ignore[arg-type]


def _findings(rules: list[KeyRule], *leaves: MapLeaf) -> tuple[str, ...]:
    with pytest.raises(MismatchError, match="the key map does not fit the leaves") as caught:
        KeyMap(rules).plan(leaves)
    return caught.value.differences


def _floats(key: str, *shape: int) -> MapLeaf:
    return MapLeaf(key, shape, "float32")


def test_all_findings_come_together() -> None:
    rules = [
        KeyRule("model.{i}.w", "w", stack={"i": 0}, transpose=(1, 0)),
        KeyRule("model.{i}.v", "v", stack={"i": 0}),
        KeyRule("x{n}", "y{n}"),
        KeyRule("x1", "z"),
        KeyRule("p{n}", "y{n}"),
        KeyRule("step", "step", transpose=(0,)),
        KeyRule("half", "half", cast=("float16", "float32")),
    ]
    found = _findings(
        rules, _floats("model.0.w", 2, 3), _floats("model.1.w", 2), _floats("model.0.v", 2), _floats("model.2.v", 2),
        _floats("modle.0.w", 2, 3), _floats("x1", 1), _floats("x2", 1), _floats("p2", 1), MapLeaf("step"),
        _floats("half", 1), _floats("model.last.v", 2),
    )  # fmt: skip
    text = "\n".join(found)
    assert "model.1.w: the rule 'model.{i}.w' -> 'w' is for 2 axes, its shape is (2,)" in found
    assert "modle.0.w: no rule names it; did you mean 'model.{i}.w'?" in found
    assert "x1: two rules name it, the rule 'x{n}' -> 'y{n}' and the rule 'x1' -> 'z'" in found
    assert "p2: the rule 'p{n}' -> 'y{n}' makes 'y2' of it, and 'x2' becomes that too" in found
    assert "step: the rule 'step' -> 'step' changes arrays, and it can only have another key" in found
    assert "half: the rule 'half' -> 'half' casts from float16, found float32" in found
    assert "v: the rule 'model.{i}.v' -> 'v' needs parts that are not there: 'model.{i}.v' with {i}=1" in found
    assert "model.last.v: the rule 'model.{i}.v' -> 'v' stacks by {i}, and 'last' is not a place" in text
    assert len(found) == 8


def test_a_gap_says_how_many_parts_it_has() -> None:
    rule = KeyRule("layer.{i}.w", "w", stack={"i": 0})
    few, many = (_findings([rule], *(_floats(f"layer.{i}.w", 2) for i in (0, 1, last))) for last in (5, 2000))
    told = "'layer.{i}.w' with {i}=2, 'layer.{i}.w' with {i}=3, 'layer.{i}.w' with {i}=4"
    assert few[0].endswith(f"that are not there: {told}")
    assert many[0].endswith(f"that are not there: {told} and 1,995 more")


@pytest.mark.parametrize(
    ("rule", "leaves", "problem"),
    [
        (KeyRule("{i}", "w", stack={"i": 0}), [_floats("0", 2), _floats("1", 3)], "parts of the shapes (2,) and (3,)"),
        (KeyRule("{i}", "w", stack={"i": 0}), [_floats("0", 2), MapLeaf("1", (2,), "int8")], "of float32 and of int8"),
        (KeyRule("{i}", "w", stack={"i": 3}), [_floats("0", 2)], "an axis to stack along beyond the last one, 1"),
        (KeyRule("{i}", "w", stack={"i": 0}), [_floats("00", 2)], "'00' is not a place"),
        (KeyRule("{i}", "w", stack={"i": 0}), [_floats("9999999", 2)], "'{i}' with {i}=0, '{i}' with {i}=1"),
        (KeyRule(("a", "b"), "w", merge=0), [_floats("a", 2, 3), _floats("b", 2, 4)], "to be joined along axis 0"),
        (KeyRule(("a", "b"), "w", merge=2), [_floats("a", 2), _floats("b", 2)], "to be joined along axis 2"),
        (KeyRule(("a", "b"), "w", merge=0), [_floats("a", 2), _floats("b", 3)], "lengths [2, 3] along axis 0"),
        (KeyRule(("a", "b"), "w", merge=0, sizes=(1, 3)), [_floats("a", 2), _floats("b", 2)], "wanted (1, 3)"),
        (KeyRule(("a", "b"), "w", merge=0), [_floats("a", 2)], "not there: 'b'"),
        (KeyRule("w", ("a", "b"), split=0), [_floats("w", 3)], "into 2 equal parts, its shape is (3,)"),
        (KeyRule("w", ("a", "b"), split=0, sizes=(1, 3)), [_floats("w", 3)], "into (1, 3), its shape is (3,)"),
        (KeyRule("w", ("a", "b"), split=1), [_floats("w", 3)], "splits an axis that it does not have"),
        (KeyRule("w", "{i}", unstack={"i": 1}), [_floats("w", 3)], "unstacks an axis that it does not have"),
        (KeyRule("w", "{i}", unstack={"i": 0}), [_floats("w", 0, 3)], "makes nothing of it"),
        (KeyRule("w", "{i}", unstack={"i": 0}), [_floats("w", 1 << 40)], "makes more than 1048576 leaves of it"),
        (KeyRule("{n}", "{n}", copy=True), [_floats("w", 1)], "only copies it"),
        (KeyRule("{n**}", "a~{n**}"), [_floats("w", 1)], "it is not a key"),
    ],
)
def test_what_does_not_fit_is_named(rule: KeyRule, leaves: list[MapLeaf], problem: str) -> None:
    (found,) = _findings([rule], *leaves)
    assert problem in found


def test_a_leaf_inside_a_leaf_is_refused() -> None:
    found = _findings([KeyRule("a", "x"), KeyRule("b", "x/y")], _floats("a", 1), _floats("b", 1))
    assert found == ("x/y: it lies inside 'x', which is a leaf too",)
    found = _findings([KeyRule("a", ""), KeyRule("b", "x")], _floats("a", 1), _floats("b", 1))
    assert found == ("(the root): it is a leaf, and there are others",)


def test_a_map_that_cannot_be_inverted_is_refused() -> None:
    # Both are found by the first rule of the way back.
    rules = [KeyRule("{a}.b", "{a}/x"), KeyRule("c", "k/x")]
    found = _findings(rules, _floats("a.b", 1), _floats("c", 1))
    assert found == ("on the way back, k/x: two rules name it, the rule '{a}/x' -> '{a}.b' and the rule 'k/x' -> 'c'",)
    # What is captured on the way back ends at another place.
    found = _findings([KeyRule("{a}.{b}", "{a}_{b}")], _floats("p_q.r", 1))
    assert found == ("p_q.r: it does not come back",)


def test_keys_that_come_back_for_one_another_are_refused() -> None:
    rule = KeyRule("{x}_{y}", "{y}_{x}")
    leaves = [_floats(key, 1) for key in ("a_b_c", "c_a_b", "b_c_a")]
    assert any("another leaf comes back as it" in line for line in _findings([rule], *leaves))
    assert KeyMap([KeyRule("{x}.{y}", "{y}.{x}")]).plan([_floats(key, 1) for key in ("a.b", "b.a", "c.c")])


def test_rules_that_find_nothing_are_no_findings() -> None:
    plan = KeyMap([KeyRule("w", "v"), KeyRule("bias", None)]).plan([_floats("w", 2)])
    assert [leaf.key for leaf in plan.leaves] == ["v"]
    assert KeyMap().plan([]).leaves == ()


# ----------------------------------------------------------------------------------------------------------- TOML files

_FILE = """
# A model.
[[rule]]
from = "wte.weight"
to = "embed/embedding"

[[rule]]
from = ["h.{i}.q.weight", "h.{i}.k.weight"]
to = "layers/qk/kernel"
transpose = [1, 0]
merge = 1
sizes = [4, 2]
stack = { i = 0 }
cast = ["float32", "bfloat16"]

[[rule]]
from = "wte.weight"
to = "head/kernel"
copy = true

[[rule]]
from = "rotary.{n**}"
drop = true
"""


def test_a_file_is_the_same_map(tmp_path: Path) -> None:
    path = tmp_path / "map.toml"
    path.write_text(_FILE, encoding="utf-8")
    assert KeyMap.read(path) == KeyMap([
        KeyRule("wte.weight", "embed/embedding"),
        KeyRule(
            ("h.{i}.q.weight", "h.{i}.k.weight"), "layers/qk/kernel", transpose=(1, 0), merge=1, sizes=(4, 2),
            stack={"i": 0}, cast=("float32", "bfloat16"),
        ),
        KeyRule("wte.weight", "head/kernel", copy=True),
        KeyRule("rotary.{n**}", None),
    ])  # fmt: skip
    with pytest.raises(NotFoundError):
        KeyMap.read(tmp_path / "nothing.toml")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[[rule]]\nfrom = 'a'\nto = 'b'\n[[rule]]\nfrom = '{'\nto = 'b'", "(rule 2, line 4): a brace stands alone"),
        ("\n\n[[rule]]\nform = 'a'", "rule 1, line 3: unknown member 'form'; did you mean 'from'?"),
        ("[[rule]]\nfrom = 'a'", "rule 1, line 1: it needs `from`, and either `to` or `drop = true`"),
        ("[[rule]]\nfrom = 'a'\nto = 'b'\ndrop = true", "either `to` or `drop = true`"),
        ("rule = [{from = 'a', to = 'b', cast = 'x'}]", "(rule 1): cast='x' is not a pair"),
        ("[[rule]]\nfrom = {a = 1}\nto = 'b'", "a pattern is a text"),
        ("[[rule]]\nfrom = 'a'\nto = 'b'\nstack = 1", "stack=1 does not map captures"),
        ("rule = [1]", "rule 1: it is not a table"),
        ("rules = []", "it has the members ['rules']"),
        ("", "it has the members []"),
        ("[[rule]", "it is not TOML"),
        ("a = " + "[" * 100_000, "it is not TOML"),
        ("a = " + "9" * 100_000, "it is not TOML"),
    ],
)
def test_a_file_that_is_wrong_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "map.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FormatError) as caught:
        KeyMap.read(path)
    assert problem in str(caught.value)
    assert "map.toml' is not a key map: " in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "a." * 50_000 + "a = 1",
        "[" + "a . " * 25_000 + "a]",
        "x = {" + "a." * 50_000 + "a = 1}",
        '"a".' * 25_000 + "a = 1",
    ],
    ids=["key", "table", "inline", "quoted"],
)
def test_a_key_of_many_parts_takes_no_memory(text: str, tmp_path: Path) -> None:
    path = tmp_path / "map.toml"
    path.write_text(text)
    tracemalloc.start()
    with pytest.raises(FormatError, match="a key of more parts than any rule needs"):
        KeyMap.read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 << 20


def test_texts_and_comments_are_no_keys(tmp_path: Path) -> None:
    parts = ".".join("abcdefghijklm")
    text = f'# {parts} = 1\n[[rule]]\nfrom = \'{parts}.{{i}}\' # {parts}\nto = """{parts}"""\nstack.i = 0\n'
    (tmp_path / "map.toml").write_text(text)
    assert KeyMap.read(tmp_path / "map.toml").rules == (KeyRule(f"{parts}.{{i}}", parts, stack={"i": 0}),)


def test_a_file_of_any_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "map.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(FormatError, match="it is not TOML"):
        KeyMap.read(path)
    path.write_bytes(b"#" * (1 << 20) + b"#")
    with pytest.raises(FormatError, match="at most 1048576 bytes"):
        KeyMap.read(path)


@pytest.mark.parametrize("cast", [("float32", "int8"), ("complex64", "float64"), ("int8", "uint8"), ("int8", "bool")])
def test_a_cast_to_another_kind_is_refused_before_anything_is_read(cast: tuple[str, str]) -> None:
    reason = cut_leaf(MapLeaf("w", (2,), cast[0]), KeyRule("w", "w", cast=cast))
    assert reason == f"casts from {cast[0]} to {cast[1]}, which holds another kind of number"
    assert not isinstance(cut_leaf(MapLeaf("w", (2,), cast[1]), KeyRule("w", "w", cast=cast[::-1])), str)


@pytest.mark.parametrize(
    ("pattern", "key", "captures"),
    [
        ("a.{i}.b", "a.3.b", {"i": "3"}),
        ("a.{i}.b", "a.3.4.b", None),
        ("a/{i*}/b", "a/3.4/b", {"i": "3.4"}),
        ("a/{i*}/b", "a/3/4/b", None),
        ("a/{i**}/b", "a/3/4/b", {"i": "3/4"}),
        ("{n}_proj.weight", "q_proj.weight", {"n": "q"}),
        ("{n}_proj.weight", "q_proj.weights", None),
        ("{n}_proj", "q_proj_proj", {"n": "q_proj"}),
        ("{a}_{b}", "x_y_z", {"a": "x", "b": "y_z"}),
        ("{a}", "", None),
        ("w", "w", {}),
        ("w", "ww", None),
        ("{{{a}}}", "{x}", {"a": "x"}),
        ("a.b", "axb", None),
        ("{n**}", "a\nb", {"n": "a\nb"}),
    ],
)
def test_match(pattern: str, key: str, captures: dict[str, str] | None) -> None:
    assert KeyPattern(pattern).match(key) == captures


@pytest.mark.parametrize("text", ["{", "}", "a{}b", "{1}", "{a}{b}", "{a}.{a}", "{a***}", "{a!r}", 3])
def test_what_is_not_a_pattern_is_refused(text: str) -> None:
    with pytest.raises(UnsupportedError, match="pattern"):
        KeyPattern(text)


@hypothesis.given(st.lists(st.from_regex(r"[a-z0-9_]{1,4}", fullmatch=True), min_size=3, max_size=3))
def test_what_is_rendered_matches(texts: list[str]) -> None:
    pattern = KeyPattern("layers.{a}/x.{b}/{c**}")
    captures = dict(zip("abc", texts, strict=True))
    assert pattern.match(pattern.render(captures)) == captures


def test_a_hostile_key_costs_time_in_proportion_to_it() -> None:
    pattern = KeyPattern("{a*}x{b*}x{c*}x{d*}x{e**}xy")
    start = time.process_time()
    assert pattern.match("x" * 200_000) is None
    assert time.process_time() - start < 2


def test_a_map_of_a_rule_for_each_leaf_costs_time_in_proportion_to_them() -> None:
    names = KeyMap([KeyRule(f"h.{number}.weight", f"h/{number}/kernel") for number in range(5000)])
    leaves = [MapLeaf(f"h.{number}.weight", (2,), "int8") for number in range(5000)]
    start = time.process_time()
    assert len(names.plan(leaves).leaves) == 5000
    assert time.process_time() - start < 8
