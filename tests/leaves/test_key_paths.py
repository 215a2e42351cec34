"""Names of leaves: each case is what eformer 0.0.101 was seen to return, save where a test says otherwise."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.trees import Pair, assert_same_structure
from treering.errors import UnsupportedError
from treering.leaves import is_array_like, join_key, leaf_key_paths


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: Any
    b: Any


class Bag:
    """A node that gives jax no keys."""

    def __init__(self, *items: Any) -> None:
        self.items = items


jax.tree_util.register_pytree_node(Bag, lambda bag: (bag.items, None), lambda _, items: Bag(*items))


class OwnKey:
    """A key of a class that jax does not know."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


TREES = {
    "nested": (
        {"a": [1, (2, 3)], "b": Pair(1, {"x": 2})},
        {"a": ["a.0", ("a.1.0", "a.1.1")], "b": Pair("b.left", {"x": "b.right.x"})},
    ),
    "empty": ({"n": None, "e": {}, "l": []}, {"n": None, "e": {}, "l": []}),
    "int keys": ({1: 0, 2: 0}, {1: "1", 2: "2"}),
    "tuple keys": ({(1, 2): 0}, {(1, 2): "(1, 2)"}),
    "empty key": ({"a": {"": 0}}, {"a": {"": "a."}}),
    "dots collide": ({"a.b": 0, "a": {"b": 1}}, {"a.b": "a.b", "a": {"b": "a.b"}}),
    "dataclass": (Layer(0, {"k": 0}), Layer("w", {"k": "b.k"})),
    "ordered": (collections.OrderedDict(b=0, a=0), collections.OrderedDict(b="b", a="a")),
}


@pytest.mark.parametrize("name", TREES)
def test_leaves_become_their_paths(name: str) -> None:
    tree, want = TREES[name]
    got = leaf_key_paths(tree)
    assert got == want
    assert_same_structure(got, tree)


@pytest.mark.parametrize(("prefix", "want"), [("p.q", "p.q.a"), ("", "a"), (None, "a")])
def test_a_prefix_stands_before_every_path(prefix: str | None, want: str) -> None:
    assert leaf_key_paths({"a": 1}, prefix) == {"a": want}


@pytest.mark.parametrize(("prefix", "want"), [("p", "p"), ("", ""), (None, "")])
def test_a_bare_leaf_is_called_as_the_prefix_is(prefix: str | None, want: str) -> None:
    assert leaf_key_paths(np.zeros(2), prefix) == want
    assert leaf_key_paths({"": 1}, prefix) == {"": want}


def test_none_is_a_leaf_only_where_is_leaf_says_so() -> None:
    assert leaf_key_paths(None, "p") is None
    tree = {"n": None, "m": [None], "x": 1}
    assert leaf_key_paths(tree) == {"n": None, "m": [None], "x": "x"}
    assert leaf_key_paths(tree, is_leaf=lambda x: x is None) == {"n": "n", "m": ["m.0"], "x": "x"}


def test_is_leaf_stops_early() -> None:
    assert leaf_key_paths({"a": [1, 2], "b": (3,)}, is_leaf=lambda x: isinstance(x, list)) == {"a": "a", "b": ("b.0",)}


def test_a_node_without_keys_has_flat_indexes() -> None:
    assert leaf_key_paths({"o": Bag(1, [2, 3])})["o"].items == (
        "o.<flat index 0>",
        ["o.<flat index 1>.0", "o.<flat index 1>.1"],
    )


@pytest.mark.parametrize(
    ("text", "want"),
    [(".w", "w"), ("['w']", "w"), ('["w"]', "w"), (".['w']", "w"), ("[3]", "3"), ("..", "."), ("[]", ""), ("['", "['")],
)
def test_keys_of_an_unknown_class_lose_their_marks(text: str, want: str) -> None:
    kind = type("Keyed", (Bag,), {})
    jax.tree_util.register_pytree_with_keys(
        kind, lambda bag: ([(OwnKey(text), bag.items[0])], None), lambda _, items: kind(*items)
    )
    assert leaf_key_paths(kind(1)).items == (want,)


def test_keys_that_jax_cannot_sort_are_named_too() -> None:
    tree = {1: [0, None], "a": 0, None: Pair(0, 0)}  # eformer raises ValueError
    want = {1: ["p.1.0", None], "a": "p.a", None: Pair("p.None.left", "p.None.right")}
    assert leaf_key_paths(tree, "p") == want
    with_none = leaf_key_paths(tree, "p", is_leaf=lambda x: x is None)
    assert with_none == {**want, 1: ["p.1.0", "p.1.1"]}


def test_a_tree_deeper_than_jax_can_walk() -> None:
    tree: Any = 1
    for _ in range(20_000):
        tree = [tree]
    leaf = leaf_key_paths(tree)
    while isinstance(leaf, list):
        [leaf] = leaf
    assert leaf == ".".join("0" * 20_000)


def test_what_is_leaf_and_the_nodes_raise_is_not_hidden() -> None:
    def is_leaf(x: Any) -> bool:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        leaf_key_paths({"a": 1}, is_leaf=is_leaf)

    class Broken(Bag):
        pass

    def flatten(bag: Broken) -> Any:
        raise TypeError("broken")

    jax.tree_util.register_pytree_node(Broken, flatten, lambda _, items: Broken(*items))
    with pytest.raises(UnsupportedError, match="broken"):
        leaf_key_paths({"a": Broken(1)})


@pytest.mark.parametrize(
    "x",
    [np.float32(1), np.zeros(2), jnp.zeros(2), jax.ShapeDtypeStruct((2,), "float32"), jax.random.key(0)],
    ids=lambda x: type(x).__name__,
)
def test_what_has_shape_and_dtype_is_array_like(x: Any) -> None:
    assert is_array_like(x)


@pytest.mark.parametrize("x", [1, 1.5, None, [], {}, "s", np.dtype("float32"), np.float32], ids=repr)
def test_what_has_not_is_not(x: Any) -> None:
    assert not is_array_like(x)  # of the class np.float32 eformer says True


@pytest.mark.parametrize(
    ("prefix", "k", "want"),
    [
        (None, None, ""), (None, "", ""), (None, "k", "k"), ("", None, ""), ("", "", ""), ("", "k", "k"),
        ("p", None, "p"), ("p", "", "p"), ("p", "k", "p.k"),
    ],
)  # fmt: skip
def test_join_key(prefix: str | None, k: str | None, want: str) -> None:
    assert join_key(prefix, k) == want


def test_a_tree_without_none_is_not_asked_about_none() -> None:
    tree = {"a": np.zeros(2), 1: {"c": np.zeros(3)}}  # keys that jax cannot sort
    assert leaf_key_paths(tree, is_leaf=lambda node: len(node) == 3) == {"a": "a", 1: {"c": "1.c"}}
