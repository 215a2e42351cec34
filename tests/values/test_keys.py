"""Key text and globs: round trips, and the globs against a matcher that is obviously right."""

from __future__ import annotations

import functools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treering._values.keys import GlobSet, escape_part, join_key, split_key, unescape_part
from treering.errors import FormatError

parts = st.text(alphabet="ab~/01*é", max_size=5)
paths = st.lists(parts, max_size=5).map(tuple)
pattern_parts = st.one_of(st.just("**"), st.text(alphabet="ab*", max_size=5))


@given(st.text())
def test_a_part_survives_its_escape(part: str) -> None:
    assert unescape_part(escape_part(part)) == part
    assert "/" not in escape_part(part)


@given(paths)
def test_a_path_survives_its_key_text(path: tuple[str, ...]) -> None:
    assert split_key(join_key(path)) == path


@given(paths, paths)
def test_different_paths_have_different_key_texts(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    assert (join_key(one) == join_key(other)) == (one == other)


@pytest.mark.parametrize("text", ["a~", "~3", "a/~/b", "~~0", "~2~"])
def test_a_lone_tilde_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match="stands alone"):
        split_key(text)
    with pytest.raises(FormatError, match="stands alone"):
        GlobSet([f"{text}/*"])


def naive_part(pattern: str, part: str) -> bool:
    if not pattern:
        return not part
    if pattern[0] == "*":
        return any(naive_part(pattern[1:], part[skip:]) for skip in range(len(part) + 1))
    return bool(part) and part[0] == pattern[0] and naive_part(pattern[1:], part[1:])


def matches(glob: str, path: tuple[str, ...]) -> bool:
    globs = GlobSet([glob])
    return bool(globs.accepted(functools.reduce(globs.step, path, globs.start)))


def naive(pattern: list[str], path: tuple[str, ...]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(naive(pattern[1:], path[skip:]) for skip in range(len(path) + 1))
    return bool(path) and naive_part(pattern[0], path[0]) and naive(pattern[1:], path[1:])


@given(
    st.lists(pattern_parts, min_size=1, max_size=5).filter(lambda each: each != [""]),
    st.lists(st.text(alphabet="ab", max_size=4), max_size=5).map(tuple),
)
def test_a_glob_agrees_with_the_naive_matcher(pattern: list[str], path: tuple[str, ...]) -> None:
    assert matches("/".join(pattern), path) == naive(pattern, path)


@given(paths, paths)
def test_a_key_text_whose_stars_are_escaped_matches_itself_alone(path: tuple[str, ...], other: tuple[str, ...]) -> None:
    glob = join_key(path).replace("*", "~2")
    assert matches(glob, path)
    assert not matches(glob, (*path, "more"))
    assert not matches(glob, tuple(part.replace("*", "x") for part in path)) or "*" not in join_key(path)
    assert matches(glob, other) == (path == other)


def test_the_escape_of_a_star_is_for_globs_alone() -> None:
    with pytest.raises(FormatError, match="stands alone"):
        split_key("a~2b")


@pytest.mark.parametrize(
    ("glob", "key", "wanted"),
    [
        ("params/**", "params", True),
        ("params/**", "params/a/b", True),
        ("**/kernel", "kernel", True),
        ("**/kernel", "a/b/kernel", True),
        ("*/kernel", "a/b/kernel", False),
        ("layer_*/w", "layer_12/w", True),
        ("a~1*", "a~1b", True),
        ("a*b", "a~1b", True),
        ("**", "", True),
        ("", "", True),
        ("*", "", False),
        ("~", "~", True),
    ],
)
def test_globs_by_example(glob: str, key: str, wanted: bool) -> None:
    assert matches(glob, split_key(key)) is wanted


def test_no_pattern_takes_long() -> None:
    began = time.thread_time()
    assert not matches("*a" * 2_000 + "b", ("a" * 100_000,))
    assert not matches("**/a/" * 50 + "b", ("a",) * 10_000)
    assert time.thread_time() - began < 5


PARTS = st.sampled_from(["a", "b", "ab", "*", "**", "a*", "*b", ""])


@given(
    st.lists(st.lists(PARTS, max_size=4).map("/".join), min_size=1, max_size=6),
    st.lists(st.sampled_from(["a", "b", "ab", "aab", ""]), max_size=5),
)
def test_globs_together_match_what_each_matches(texts: list[str], path: list[str]) -> None:
    together = GlobSet(texts)
    state = together.start
    for part in path:
        state = together.step(state, part)
    assert sorted(together.accepted(state)) == [
        number for number, glob in enumerate(texts) if matches(glob, tuple(path))
    ]
