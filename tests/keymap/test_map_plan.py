"""Plans carried out: numpy computes the same, boxes are exact, and each leaf comes back as itself or is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from numpy.typing import NDArray

import treering
from tests.drawn import drawn
from tests.trees import assert_same_arrays
from treering import KeyMap, KeyRule
from treering._arrays.derived_source import map_source
from treering._arrays.incoming import ReadRequest
from treering._arrays.source import HeldArrays, Source
from treering._foreign.msgpack_source import index_leaves
from treering._keymap.key_rule import MapLeaf
from treering._values.boxes import picked_shape, size_of, slices, whole
from treering.errors import MismatchError

_Tree = dict[str, NDArray[Any]]


class _Case(NamedTuple):
    rules: list[KeyRule]
    stored: _Tree
    wanted: _Tree
    """Computed by numpy alone."""


@st.composite
def _cases(draw: st.DrawFn) -> _Case:
    rules: list[KeyRule] = []
    stored: _Tree = {}
    wanted: _Tree = {}
    for name in "abc"[: draw(st.integers(1, 3))]:
        rule, some, made = draw(_one_rule(name))
        rules.append(rule)
        stored |= some
        wanted |= made
    for name in draw(st.sets(st.sampled_from("xyz"))):
        rules.append(KeyRule(name, f"{name}/{name}"))
        stored[name] = np.arange(draw(st.integers(0, 3)))
        wanted[f"{name}/{name}"] = stored[name]
    keys = draw(st.permutations(list(stored)))
    return _Case(draw(st.permutations(rules)), {key: stored[key] for key in keys}, wanted)


class _Fold(NamedTuple):
    """What a rule does with the axes of one part."""

    shape: list[int]
    unflatten: tuple[int, int] | None
    order: tuple[int, ...] | None
    flatten: tuple[int, int] | None
    new: list[int]

    def carry_out(self, array: NDArray[Any]) -> NDArray[Any]:
        sides = list(array.shape)
        if self.unflatten is not None:
            axis, count = self.unflatten
            sides[axis : axis + 1] = [count, sides[axis] // count]
        array = array.reshape(sides)
        array = array if self.order is None else np.transpose(array, self.order)
        return array if self.flatten is None else array.reshape(self.new)


def _orders(rank: int) -> st.SearchStrategy[tuple[int, ...] | None]:
    return st.none() | st.permutations(range(rank)).map(tuple)


@st.composite
def _folds(draw: st.DrawFn, shape: list[int]) -> _Fold:
    """Draw axes that are divided, put in order, and joined."""
    unflatten = draw(st.none() | st.tuples(st.integers(0, len(shape) - 1), st.integers(1, 3))) if shape else None
    stored, sides = list(shape), list(shape)
    if unflatten is not None:
        axis, count = unflatten
        stored[axis] *= count
        sides.insert(axis, count)
    order = draw(_orders(len(sides)))
    new = [sides[place] for place in order or range(len(sides))]
    joined = draw(st.none() | st.integers(0, len(new) - 2)) if len(new) > 1 else None
    flatten = None if joined is None else (joined, new[joined])
    if joined is not None:
        new[joined : joined + 2] = [new[joined] * new[joined + 1]]
    return _Fold(stored, unflatten, order, flatten, new)


@st.composite
def _one_rule(draw: st.DrawFn, name: str) -> tuple[KeyRule, _Tree, _Tree]:
    """Draw a rule with up to two layer axes, and what it makes of random arrays."""
    mode = draw(st.sampled_from(["plain", "merge", "split"]))
    rank = draw(st.integers(0 if mode == "plain" else 1, 3))
    shape = draw(st.lists(st.integers(1, 4), min_size=rank, max_size=rank))
    captures = draw(st.sampled_from(["", "i", "ij"]))
    lengths = [draw(st.integers(1, 3)) for _ in captures]
    stacks = draw(st.booleans()) and bool(captures)
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=3)) if mode != "plain" else [0]
    axis = draw(st.integers(-rank, rank - 1)) if rank else 0
    fold = draw(_folds(shape)) if mode == "plain" else _Fold(shape, None, draw(_orders(rank)), None, shape)
    shape, order = fold.shape, fold.order
    rank = len(fold.new)
    cast = draw(st.sampled_from([None, ("int16", "int32"), ("int16", "int64")]))
    path = "".join(f".{{{capture}}}" for capture in captures)
    places = sorted(draw(st.permutations(range(rank + len(captures))))[: len(captures)])
    axes = dict(zip(captures, draw(st.permutations(places)), strict=True)) if stacks else {}
    parts = [f"{name}{path}.p{number}" for number in range(len(sizes))]
    news = [f"{name}/q{number}{'' if stacks else path.replace('.', '/')}" for number in range(len(sizes))]
    rule = KeyRule(
        parts if mode == "merge" else parts[0], news if mode == "split" else news[0], stack=axes,
        unflatten=fold.unflatten, transpose=order, flatten=fold.flatten,
        merge=axis if mode == "merge" else None, split=axis if mode == "split" else None,
        sizes=None if mode == "plain" or (len(set(sizes)) == 1 and draw(st.booleans())) else sizes, cast=cast,
    )  # fmt: skip
    made: _Tree = {}
    stored: _Tree = {}
    by_place: list[dict[tuple[int, ...], NDArray[Any]]] = [{} for _ in news]
    for place in itertools.product(*map(range, lengths)):
        texts = dict(zip(captures, map(str, place), strict=True))
        some = []
        for number, size in enumerate(sizes if mode == "merge" else [sum(sizes)]):
            here = list(shape)
            if mode != "plain":  # the axis of what is merged is one of the axes in their new order
                here[(order or range(rank))[axis] if mode == "merge" else axis] = size
            array = np.frombuffer(
                draw(st.binary(min_size=2 * int(np.prod(here)), max_size=2 * int(np.prod(here)))), "<i2"
            )
            stored[parts[number].format(**texts)] = array.reshape(here)
            some.append(array.reshape(here))
        if mode == "split":
            some = list(np.split(some[0], np.cumsum(sizes)[:-1], axis=axis))
        some = [fold.carry_out(array) for array in some]
        if mode == "merge":
            some = [np.concatenate(some, axis=axis)]
        for number, array in enumerate(some):
            by_place[number][place] = array if cast is None else array.astype(cast[1])
            if not stacks:
                made[news[number].format(**texts)] = by_place[number][place]
    if stacks:
        for number in range(len(news) if mode == "split" else 1):
            made[news[number]] = _stack(by_place[number], lengths, [axes[capture] for capture in captures])
    return rule, stored, made


def _stack(arrays: dict[tuple[int, ...], NDArray[Any]], lengths: list[int], axes: list[int]) -> NDArray[Any]:
    """Stack along the axes of the result, one by one."""
    some = np.stack([arrays[place] for place in itertools.product(*map(range, lengths))])
    some = some.reshape(*lengths, *some.shape[1:])
    return np.moveaxis(some, range(len(lengths)), axes)


def _source(tree: _Tree) -> Source:
    index, leaves = index_leaves(tree)
    return Source(index, HeldArrays(dict(enumerate(leaves))))


def _read(source: Source) -> _Tree:
    found: _Tree = {}
    for number, key in enumerate(source.index.keys):
        request = ReadRequest(number, [whole(source.index.type_of(number).shape or ())])
        source.arrays.read([request])
        (found[key],) = request.arrays
    return found


@hypothesis.given(_cases())
def test_a_plan_carried_out_is_what_numpy_computes_and_it_comes_back(case: _Case) -> None:
    names = KeyMap(case.rules)
    mapped = map_source(_source(case.stored), names)
    made = _read(mapped)
    assert_same_arrays(made, case.wanted)
    assert_same_arrays(_read(map_source(mapped, names.inverse())), case.stored)


@hypothesis.given(_cases(), st.data())
def test_boxes_are_exact(case: _Case, data: st.DataObject) -> None:
    plan = KeyMap(case.rules).plan(MapLeaf(key, a.shape, a.dtype.name) for key, a in case.stored.items())
    source = map_source(_source(case.stored), KeyMap(case.rules))
    stored = list(case.stored.values())
    leaf = data.draw(st.sampled_from(plan.leaves))
    array = case.wanted[leaf.key]
    assert (leaf.shape, leaf.dtype) == (array.shape, array.dtype.name)
    corners = [data.draw(st.tuples(st.integers(0, length), st.integers(0, length))) for length in array.shape]
    box = tuple((min(pair), max(pair)) for pair in corners)
    steps = data.draw(st.none() | st.tuples(*(st.integers(1, 3) for _ in box)))
    filled = np.zeros(picked_shape(box, steps), np.int64)
    for part in leaf.find_boxes(box, steps):
        filled[slices(part.into)] += 1
        picked = stored[part.leaf][slices(part.box, part.steps)]
        assert picked.size == size_of(part.into) > 0
        assert all(0 <= low < high <= n for (low, high), n in zip(part.box, stored[part.leaf].shape, strict=True))
    assert (filled == 1).all()
    request = ReadRequest(source.index.keys.index(leaf.key), [box], steps=steps)
    source.arrays.read([request])
    np.testing.assert_array_equal(request.arrays[0], array[slices(box, steps)])
    assert request.arrays[0].dtype == array.dtype


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


@hypothesis.settings(max_examples=drawn(300))
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
