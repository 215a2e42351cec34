"""Patterns with captures."""

from __future__ import annotations

import time

import hypothesis
import hypothesis.strategies as st
import pytest

from treering._keymap.key_rule import KeyPattern
from treering.errors import UnsupportedError


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
