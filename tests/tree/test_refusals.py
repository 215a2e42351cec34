"""What cannot be saved is refused by name, all of it at once, with what to do about it."""

from __future__ import annotations

import array
import collections
import dataclasses
import functools
import io
import random
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.properties.strategies import Point, add
from treering._tree.flatten import flatten, flatten_like
from treering.errors import Unsupported
from treering.serialization import register_serialization_state


class Text(str):
    __slots__ = ()


class Number(int):
    pass


class Items(list):  # a class of its own, unknown to jax
    pass


class Holder:
    """Arrays where jax cannot see them."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "Holder()"


class Model:
    """Callable, and it holds arrays."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, x: Any) -> Any:
        return x @ self.value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "Slotted()"


class Foreign:
    """An array of another library."""

    shape = (2,)
    dtype = "float32"


class Numbered:
    pass


register_serialization_state(Numbered, lambda _: {1: 2}, lambda target, _: target)


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        ({1, 2}, "sorted list"),
        (frozenset({1}), "sorted list"),
        (collections.deque([1]), "list"),
        (Items([1]), "list"),
        (types.MappingProxyType({"a": 1}), "dict"),
        (collections.Counter("aab"), "dict"),
        (memoryview(b"ab"), "bytes"),
        (array.array("d", [1.0]), "numpy"),
        (Text("a"), "plain Python type"),
        (Number(1), "plain Python type"),
        (np.array([1, "a"], object), "dtype"),
        (np.array(["a"]), "str"),
        (np.zeros(2, [("x", "f4")]), "field"),
        (np.void(b"ab"), "dtype|could"),
        (np.str_("a"), "str"),
        (np.ma.masked_array([1, 2], [True, False]), "asarray"),
        (np.rec.array([(1, 2.0)]), "field"),
        (jax.ShapeDtypeStruct((2,), jnp.float32), "no data"),
        (Holder(np.ones(2)), "'value'.*pytree node"),
        (Holder([{"deep": jnp.ones(2)}]), "'value'"),
        (Holder(Holder(np.ones(2))), "'value.value'"),
        (Slotted(np.ones(2)), "'value'"),
        (Model(np.ones((2, 2))), "'value'"),
        (functools.partial(add, np.ones(2)), "jax.tree_util.Partial"),
        (functools.partial(add, right=[jnp.ones(2)]), "jax.tree_util.Partial"),
        (random.Random(0), "repr"),
        (np.random.default_rng(0), "repr"),
        (threading.Lock(), "repr"),
        ((n for n in range(3)), "repr"),
        (Foreign(), "asarray"),
        (io.BytesIO(), "repr"),
        (Numbered(), "string keys"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_it_is_refused_where_it_stands(leaf: Any, words: str) -> None:
    with pytest.raises(Unsupported, match=words) as caught:
        flatten({"a": [0, leaf]})
    assert caught.value.path == ("a", "1")
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(Unsupported, match=words):
        flatten(leaf)


def test_all_of_them_are_named_at_once() -> None:
    with pytest.raises(Unsupported) as caught:
        flatten({"a": {1}, "b": [np.ones(2), np.array([None])], "c": {"d": Text("x"), "e": 5}})
    message = str(caught.value)
    assert message.startswith("3 leaves cannot be saved:")
    for part in ("a: a set", "b/1: Object", "c/d: a Text"):
        assert part in message
    assert message.count("\n") == 3


def test_many_are_counted() -> None:
    with pytest.raises(Unsupported, match="and 80 more") as caught:
        flatten([{1}] * 100)
    assert str(caught.value).count("\n") == 21


def test_a_name_cannot_move_the_cursor() -> None:
    with pytest.raises(Unsupported) as caught:
        flatten({"\x1b[2J": {1}, "b": {1}})
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    "tree",
    [
        {1: 0, "1": 0},
        {None: 0, "None": 0},
        {(1, 2): 0, "(1, 2)": 0},
        {b"a": 0, "b'a'": 0},
        {1.0: 0, "1.0": 0},
        collections.OrderedDict([(1, 0), ("1", 0)]),
    ],
    ids=repr,
)
def test_keys_that_are_alike_as_text_are_refused_naming_both(tree: Any) -> None:
    first, second = tree
    for walk in (flatten, flatten_like):
        with pytest.raises(Unsupported, match="alike") as caught:
            walk({"x": tree})
        assert repr(first) in str(caught.value)
        assert repr(second) in str(caught.value)
        assert caught.value.path == ("x",)


def test_a_key_without_text_is_refused() -> None:
    with pytest.raises(Unsupported, match="text"):
        flatten({10**5000: 0})


def test_dict_keys_that_jax_cannot_sort_are_no_reason() -> None:
    assert flatten({1: 0, "a": 1}).keys == ["1", "a"]


def test_too_deep_is_refused() -> None:
    tree: Any = 7
    for _ in range(1025):
        tree = {"a": tree}
    with pytest.raises(Unsupported, match=r"1024 containers deep.*hold itself"):
        flatten(tree)


def test_a_tree_that_holds_itself_is_refused() -> None:
    tree: list[Any] = [1, 2]
    tree += [tree, tree]
    for walk in (flatten, flatten_like):
        with pytest.raises(Unsupported, match="hold itself"):
            walk(tree)


def test_a_traced_array_is_refused_by_name() -> None:
    def save(x: jax.Array) -> jax.Array:
        flatten({"a": x})
        return x

    with pytest.raises(Unsupported, match="outside of jit"):
        jax.jit(save)(jnp.ones(2))
    assert flatten({"a": jnp.ones(2)}).kinds == ["jax"]


def test_a_dataclass_with_an_array_beside_its_fields_is_refused() -> None:
    @dataclasses.dataclass
    class Normed:
        w: Any

        @functools.cached_property
        def norm(self) -> Any:
            return np.abs(self.w)

    tree = Normed(np.ones(2))
    assert flatten(tree).keys == ["w"]
    assert tree.norm is not None
    with pytest.raises(Unsupported, match="'norm'"):
        flatten(tree)


def test_a_node_that_jax_cannot_open_is_refused_where_it_stands() -> None:
    @jax.tree_util.register_pytree_node_class
    class Broken:
        def tree_flatten(self) -> Any:
            raise ValueError("no")

        @classmethod
        def tree_unflatten(cls, *_: Any) -> Any:
            return cls()

    with pytest.raises(Unsupported, match="Broken") as caught:
        flatten({"a": Broken()})
    assert caught.value.path == ("a",)


def test_what_stands_beside_it_is_not_lost() -> None:
    with pytest.raises(Unsupported, match="x/1"):
        flatten(Point([1, {1}], 2))
