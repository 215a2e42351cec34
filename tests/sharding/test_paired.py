"""Two trees side by side: which containers stand for one another, and what is said where they do not."""

from __future__ import annotations

import collections
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from tests import meshes
from tests.trees import Pair
from treering.errors import NotShardedWarning
from treering.sharding import apply_sharding_tree, validate_sharding_tree


class Other(NamedTuple):
    left: Any
    right: Any


PLACED = object()


def place(array: Any) -> Any:
    """Stand for a sharding: an array becomes what this returns."""
    assert isinstance(array, np.ndarray)
    return PLACED


X, F = np.zeros(3), place
MESH = meshes.line(axis="d")
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
    "a function that is a tree": (
        {"a": X},
        {"a": jax.tree_util.Partial(lambda held, array: place(array), jnp.zeros(2))},
    ),
    "a tree that is a function": (jax.tree_util.Partial(print, X), jax.tree_util.Partial(print, F)),
}

UNLIKE = {
    "too few": ({"a": X, "b": X}, {"a": F}, ["b: it has no place"]),
    "too many": ({"a": X}, {"a": F, "b": F}, ["b: no leaf is there"]),
    "one place for a container": ({"a": {"x": X}}, {"a": F}, ["a: a dict, and its place is a leaf"]),
    "none for a container": ({"a": {"x": X}}, {"a": None}, ["a: a dict, and its place is a leaf"]),
    "none for an empty one": ({"a": {}}, {"a": None}, ["a: a dict, and its place is a leaf"]),
    "a container for a leaf": ({"a": X}, {"a": {"x": F}}, ["a: a leaf, and its place is a dict"]),
    "a list for a tuple": ((X,), [F], ["(the root): a tuple, and its place is a list"]),
    "another class": ([Pair(X, X)], [Other(F, F)], ["0: a Pair, and its place is an Other"]),
    "a longer list": ({"a": [X]}, {"a": [F, F]}, ["a/1: no leaf is there"]),
    "dotted keys": ({"a": {"b": X}}, {"a.b": F}, ["a: it has no place", "a.b: no leaf is there"]),
    "ints for texts and more": ({1: X, "a": X}, {"1": F}, ["a: it has no place"]),
}


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of a tree whose dict keys jax cannot sort."""
    if isinstance(tree, dict):
        return [leaf for child in tree.values() for leaf in leaves_of(child)]
    return jax.tree.leaves(tree)


def differences(tree: Any, places: Any) -> list[str]:
    """Return what is said of trees that do not fit; the tree stays as it is then."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert apply_sharding_tree(tree, places) is tree
    (warning,) = caught
    assert warning.category is NotShardedWarning
    first, *lines = str(warning.message).split("\n  ")
    assert first == "arrays and sharding tree differ, so nothing was sharded:"
    return lines


@pytest.mark.parametrize("name", ALIKE)
def test_trees_that_fit(name: str) -> None:
    tree, places = ALIKE[name]
    assert validate_sharding_tree(places, tree)
    placed = apply_sharding_tree(tree, places)
    assert type(placed) is type(tree) or tree is X
    assert len(leaves_of(placed)) == len(leaves_of(tree))
    assert all(leaf is PLACED for leaf in leaves_of(placed))


@pytest.mark.parametrize("name", UNLIKE)
def test_trees_that_do_not(name: str) -> None:
    tree, places, want = UNLIKE[name]
    assert not validate_sharding_tree(places, tree)
    assert differences(tree, places) == want


@pytest.mark.parametrize("place", PLACES, ids=lambda place: type(place).__name__)
def test_every_kind_of_place_is_a_leaf(place: Any) -> None:
    assert validate_sharding_tree({"a": [place]}, {"a": [X]})
    (found,) = apply_sharding_tree({"a": [np.zeros(8, np.float32)]}, {"a": [place]}, MESH)["a"]
    if place is F:
        assert found is PLACED
    else:
        wanted = NamedSharding(MESH, place or P()) if place is None or isinstance(place, P) else place
        assert found.devices() == (wanted.device_set if hasattr(wanted, "device_set") else {wanted})
        assert found.is_fully_replicated is (place in (None, P()) or len(found.devices()) == 1)


def test_arrays_are_placed_in_the_order_of_the_tree() -> None:
    calls: list[tuple[int, Any]] = []

    def note(number: int) -> Any:
        return lambda array: calls.append((number, array))

    first, second, third = np.zeros(1, "f4"), np.zeros(2, "f4"), np.zeros(3, "f4")
    tree = {"b": [first, None, second], "a": third}
    apply_sharding_tree(tree, {"a": note(1), "b": {"1": note(4), "2": note(2), "0": note(3)}})
    assert [number for number, _ in calls] == [3, 2, 1]
    assert [array.shape for _, array in calls] == [(1,), (2,), (3,)]


def test_a_tree_that_holds_itself_ends() -> None:
    endless: dict[str, Any] = {}
    endless["a"] = endless
    other: dict[str, Any] = {}
    other["a"] = other
    [line] = differences(endless, other)
    assert "may hold itself" in line


def test_keys_that_clash_as_text_are_no_crash() -> None:
    [line] = differences({1: X, "1": X}, {"1": F})
    assert "have the same text" in line
