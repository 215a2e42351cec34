"""Two trees side by side: which containers stand for one another, and what is said where they do not."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from treering._arrays.apply_sharding import pair_leaves


class Pair(NamedTuple):
    left: Any
    right: Any


class Other(NamedTuple):
    left: Any
    right: Any


X, F = "an array", print
MESH = Mesh(np.array(jax.devices()), ("d",))
PLACES = [None, P("d"), P(), NamedSharding(MESH, P("d")), SingleDeviceSharding(jax.devices()[0]), jax.devices()[0], F]

ALIKE = {
    "dicts in another order": ({"b": X, "a": X}, {"a": F, "b": F}),
    "lists": ([X, [X]], [F, [F]]),
    "tuples": ((X, ()), (F, ())),
    "namedtuples": (Pair(X, X), Pair(F, F)),
    "a dict for a list": ([X, X], {"0": F, "1": F}),
    "a dict for a namedtuple": (Pair(X, [X]), {"left": F, "right": {"0": F}}),
    "a dict for an empty list": ({"a": []}, {"a": {}}),
    "a list for a dict": ({"0": X, "1": X}, [F, F]),
    "texts for ints": ({1: X, 2: X}, {"1": F, "2": F}),
    "mixed keys": ({1: X, "a": X}, {"a": F, 1: F}),
    "keys that are alike as text": ({1: X, "1": X}, {"1": F, 1: F}),
    "a dict for an OrderedDict": (collections.OrderedDict(a=X), {"a": F}),
    "bare leaves": (X, F),
    "none for none": ({"a": None}, {"a": None}),
    "a function that is a tree": ({"a": X}, {"a": jax.tree_util.Partial(print, jnp.zeros(2))}),
    "a tree that is a function": (jax.tree_util.Partial(print, X), jax.tree_util.Partial(print, F)),
}

UNLIKE = {
    "too few": ({"a": X, "b": X}, {"a": F}, ["b: it has no place"]),
    "too many": ({"a": X}, {"a": F, "b": F}, ["b: no leaf is there"]),
    "one place for a container": ({"a": {"x": X}}, {"a": F}, ["a: a dict, and its place is a leaf"]),
    "none for a container": ({"a": {"x": X}}, {"a": None}, ["a: a dict, and its place is a leaf"]),
    "none for an empty one": ({"a": {}}, {"a": None}, ["a: a dict, and its place is a leaf"]),
    "a container for a leaf": ({"a": X}, {"a": {"x": F}}, ["a: a leaf, and its place is a dict"]),
    "a list for a tuple": ((X,), [F], [".: a tuple, and its place is a list"]),
    "another class": ([Pair(X, X)], [Other(F, F)], ["0: a Pair, and its place is an Other"]),
    "a longer list": ({"a": [X]}, {"a": [F, F]}, ["a/1: no leaf is there"]),
    "dotted keys": ({"a": {"b": X}}, {"a.b": F}, ["a: it has no place", "a.b: no leaf is there"]),
    "ints for texts and more": ({1: X, "a": X}, {"1": F}, ["a: it has no place"]),
}


@pytest.mark.parametrize("name", ALIKE)
def test_trees_that_fit(name: str) -> None:
    tree, places = ALIKE[name]
    pairs, unlike = pair_leaves(tree, places)
    assert unlike == []
    assert all(leaf is None or leaf == X for _, leaf, _ in pairs)
    assert all(callable(place) or place is None for _, _, place in pairs)


@pytest.mark.parametrize("name", UNLIKE)
def test_trees_that_do_not(name: str) -> None:
    tree, places, want = UNLIKE[name]
    assert pair_leaves(tree, places)[1] == want


@pytest.mark.parametrize("place", PLACES, ids=lambda place: type(place).__name__)
def test_every_kind_of_place_is_a_leaf(place: Any) -> None:
    assert pair_leaves({"a": [X]}, {"a": [place]}) == ([(("a", "0"), X, place)], [])


def test_pairs_come_in_the_order_of_the_tree() -> None:
    pairs, _ = pair_leaves({"b": [X, None], "a": X}, {"a": 1, "b": {"1": 2, "0": 3}})
    assert pairs == [(("b", "0"), X, 3), (("b", "1"), None, 2), (("a",), X, 1)]


def test_a_tree_that_holds_itself_ends() -> None:
    endless: dict[str, Any] = {}
    endless["a"] = endless
    other: dict[str, Any] = {}
    other["a"] = other
    [line] = pair_leaves(endless, other)[1]
    assert "may hold itself" in line


def test_keys_that_clash_as_text_are_no_crash() -> None:
    [line] = pair_leaves({1: X, "1": X}, {"1": F})[1]
    assert "have the same text" in line
