"""Patterns with several captures: a map that is taken brings each leaf back as itself, and no other in its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import treering
from treering import KeyMap, KeyRule
from treering._keymap.key_rule import MapLeaf
from treering.errors import MismatchError

ROUND = {f"{a}_{b}_{c}": np.full(2, n, np.float32) for n, (a, b, c) in enumerate(map(list, ("abc", "cab", "bca")))}
_MOST_KEYS = 12
SWAP = KeyRule("{x}_{y}", "{y}_{x}")
DOORS: list[Callable[[Path, KeyMap], object]] = [
    lambda path, names: treering.load(path / "a", key_map=names),
    lambda path, names: treering.load(path / "a", ROUND, key_map=names),
    lambda path, names: treering.open(path / "a", key_map=names),
    lambda path, names: treering.abstract(path / "a", key_map=names),
    lambda path, names: treering.export(path / "b", ROUND, key_map=names),
    lambda path, names: treering.export(path / "b", ROUND, key_map=names, to="hf"),
    lambda path, names: treering.convert(path / "a", path / "b.npz", key_map=names),
]


@st.composite
def _patterns(draw: st.DrawFn, mark: str) -> tuple[str, str]:
    """Draw two patterns with the same captures, in any order and nearly always with the same text between them."""
    names = draw(st.sampled_from(["xy", "xyz"]))
    kinds = dict.fromkeys(names, draw(st.sampled_from(["", "*", "**"])))
    between = st.sampled_from([mark, mark, mark, f"{mark}a{mark}"])
    first, second = (
        "".join(f"{{{name}{kinds[name]}}}{draw(between)}" for name in order[:-1]) + f"{{{order[-1]}{kinds[order[-1]]}}}"
        for order in (names, draw(st.permutations(names)))
    )
    return first, second


_WORDS = st.lists(st.sampled_from("abc"), unique=True, min_size=2, max_size=3)


@st.composite
def _maps(draw: st.DrawFn) -> tuple[KeyMap, list[MapLeaf]]:
    """Draw a map, and leaves whose keys it makes of each other, so that they may change places."""
    mark = draw(st.sampled_from("_./"))
    rules = [KeyRule(*pair) for pair in draw(st.lists(_patterns(mark), min_size=1, max_size=2))]
    keys: dict[str, None] = {}
    for words in draw(st.lists(_WORDS, min_size=1, max_size=3)):
        key: str | None = mark.join(words)
        while key is not None and key not in keys and len(keys) < _MOST_KEYS:
            keys[key] = None
            key = next((made for rule in rules if (made := _other_name(rule, key)) is not None), None)
    rest = [KeyRule("{rest**}", "{rest**}", rest=True)] if draw(st.booleans()) else []
    return KeyMap(rules + rest), [MapLeaf(key, (2,), "float32") for key in keys]


@hypothesis.settings(max_examples=300)
@hypothesis.given(_maps())
def test_a_leaf_comes_back_as_itself_or_the_map_is_refused(drawn: tuple[KeyMap, list[MapLeaf]]) -> None:
    """The patterns alone say here what a way there and back makes of each key."""
    rules, leaves = drawn
    for names, plan in ((rules, rules.plan), (rules.inverse(), rules.plan_save)):
        try:
            there = plan(leaves)
        except MismatchError:
            continue
        for leaf in there.leaves:
            back = [_other_name(rule, leaf.key) for rule in names.inverse().rules if not rule.rest]
            # What another rule names is not part of the rest.
            found = {key for key in back if key is not None} or {leaf.key}
            assert found == {leaves[leaf.pieces[0].leaf].key}


def _other_name(rule: KeyRule, key: str) -> str | None:
    captures = rule.sources[0].match(key)
    return None if captures is None else rule.targets[0].render(captures)


def test_every_door_refuses_what_would_change_places(tmp_path: Path) -> None:
    (tmp_path / "swap.toml").write_text('[[rule]]\nfrom = "{x}_{y}"\nto = "{y}_{x}"\n', encoding="utf-8")
    treering.save(tmp_path / "a", ROUND)
    before = set(tmp_path.rglob("*"))
    for names in (KeyMap([SWAP]), KeyMap([SWAP]).inverse(), KeyMap.read(tmp_path / "swap.toml")):
        for call in DOORS:
            with pytest.raises(MismatchError, match="a_b_c: another leaf comes back as it"):
                call(tmp_path, names)
        assert set(tmp_path.rglob("*")) == before
    two = {key: ROUND[key] for key in ("a_b_c", "c_a_b")}
    with pytest.raises(MismatchError):
        treering.export(tmp_path / "b", two, key_map=KeyMap([SWAP]))
    swapped = {"a_b": ROUND["a_b_c"], "b_a": ROUND["c_a_b"]}
    treering.export(tmp_path / "b", swapped, key_map=KeyMap([SWAP]))
    assert np.array_equal(treering.load(tmp_path / "b")["a_b"], swapped["b_a"])
    assert np.array_equal(treering.load(tmp_path / "b", key_map=KeyMap([SWAP]))["a_b"], swapped["a_b"])
