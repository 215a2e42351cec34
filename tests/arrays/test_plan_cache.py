"""A tree held against the structure of one that was flattened: only what flattens alike passes, leaf by leaf."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import pytest

from treering._arrays.plan_cache import KnownStructure
from treering._tree.flatten import flatten


class Pair(NamedTuple):
    """Two things."""

    one: Any
    other: Any


class Lying(NamedTuple):
    """A sequence that says nothing true of its length."""

    one: Any
    other: Any

    def __len__(self) -> int:
        return 7


class Likes(type):
    """Classes that say they equal any other."""

    def __eq__(cls, other: object) -> bool:
        return True

    def __hash__(cls) -> int:
        return 7


class Liked(metaclass=Likes):
    """A leaf that treering cannot save as such."""


def known(tree: Any) -> KnownStructure:
    return KnownStructure(tree, flatten(tree))


TREE = {
    "a": [1, (2, {"x": 3, "y": []}), Pair(4, {"z": 5})],
    "b": {},
    "c": collections.OrderedDict(p=6, q=[7, 8]),
    "d": ({"x": 9}, {"x": 10}),
    "e": 11,
}


def test_leaves_come_in_the_order_in_which_flatten_meets_them() -> None:
    assert known(TREE).leaves(TREE) == flatten(TREE).leaves == list(range(1, 12))


def test_the_leaves_are_those_of_the_other_tree() -> None:
    other = {**TREE, "d": ({"x": -9}, {"x": -10})}
    assert known(TREE).leaves(other) == [1, 2, 3, 4, 5, 6, 7, 8, -9, -10, 11]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([{"a": 1}, {"b": 2, "c": 3}], [{"a": 1, "b": 2}, {"c": 3}]),
        ([[1], [2, 3]], [[1, 2], [3]]),
        ([[], [1]], [[1], []]),
        ([{}, {"a": 1}], [{"a": 1}, {}]),
        ({"a": {"b": 1}, "c": 2}, {"a": 2, "c": {"b": 1}}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1: "x"}, {True: "x"}),
        ([(1, 2)], [Pair(1, 2)]),
        ([1], (1,)),
        ([1], 1),
        (1, [1]),
        ([1, [2]], [[1], 2]),
        ([[[1]]], [[1]]),
        ([1], [1.0]),
        ([1], [Liked()]),
        (collections.OrderedDict(a=1, b=2), collections.OrderedDict(b=2, a=1)),
        (collections.OrderedDict(a=1), {"a": 1}),
    ],
)
def test_another_structure_is_another(one: Any, other: Any) -> None:
    assert known(one).leaves(other) is None
    assert known(one).leaves(one) == flatten(one).leaves


def test_nobody_believes_what_a_class_says_of_itself() -> None:
    tree = [Lying(1, 2), Lying(3, 4)]
    assert flatten(tree).leaves == [1, 2, 3, 4]
    assert known(tree).leaves(tree) in (None, [1, 2, 3, 4])


def test_a_tree_that_is_deeper_is_looked_into_no_deeper() -> None:
    tree: Any = 1
    for _ in range(1000):
        tree = [tree]
    endless: Any = []
    endless.append(endless)
    assert known(tree).leaves(tree) == [1]
    assert known(tree).leaves(endless) is None
    assert known(tree).leaves([tree]) is None
