"""What cannot be saved is refused by name, all of it at once, with what to do about it."""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime
import decimal
import fractions
import functools
import io
import pathlib
import random
import re
import threading
import types
import uuid
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treering
from tests.buckets import MemoryBucket
from tests.properties.strategies import Point, add
from treering.errors import UnsupportedError
from treering.serialization import register_serialization_state, to_bytes


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


def closing_over(value: Any) -> Callable[..., Any]:
    """A function that holds something."""
    return lambda *_: value


class Foreign:
    """An array of another library."""

    shape = (2,)
    dtype = "float32"


class Numbered:
    pass


register_serialization_state(Numbered, lambda _: {1: 2}, lambda target, _: target)


def save(tree: Any) -> PurePath:
    """Save a tree to a bucket of its own, and return where."""
    path = treering.bucket(MemoryBucket()) / "a"
    treering.save(path, tree)
    return path


def kinds_of(tree: Any) -> list[str]:
    """As what the leaves of a tree are saved."""
    return [leaf.kind for leaf in treering.inspect(save(tree)).leaves.values()]


def load_like(tree: Any) -> None:
    """Ask for a tree of this structure."""
    treering.load(save({}), like=tree)


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
        (np.zeros(1, [("x", "i4"), ("y", "f4")]).view(np.recarray), "field"),
        (jax.ShapeDtypeStruct((2,), jnp.float32), "no data"),
        (Holder(np.ones(2)), "'value'.*register_pytree_node"),
        (Holder([{"deep": jnp.ones(2)}]), "'value'"),
        (Holder(Holder(np.ones(2))), "'value.value'"),
        (Slotted(np.ones(2)), "'value'"),
        (Model(np.ones((2, 2))), "'value'"),
        (functools.partial(add, np.ones(2)), "jax.tree_util.Partial"),
        (functools.partial(add, right=[jnp.ones(2)]), "jax.tree_util.Partial"),
        (random.Random(0), "omit it"),
        (np.random.default_rng(0), "omit it"),
        (threading.Lock(), "omit it"),
        ((n for n in range(3)), "omit it"),
        (object(), "omit it"),
        (..., "omit it"),
        (Holder(3), "jax.tree_util.register_dataclass .*treering.serialization.register_serialization_state"),
        (datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), r"x\.isoformat\(\)"),
        (datetime.date(2026, 1, 2), r"x\.isoformat\(\)"),
        (datetime.timedelta(1), r"x\.total_seconds\(\)"),
        (datetime.UTC, r"str\(x\)"),
        (pathlib.PurePosixPath("a"), r"str\(x\)"),
        (decimal.Decimal("1.5"), r"str\(x\)"),
        (fractions.Fraction(1, 3), r"str\(x\)"),
        (uuid.UUID(int=1), r"str\(x\)"),
        (range(3), r"list\(x\)"),
        (slice(1, 2), r"\[x\.start, x\.stop, x\.step\]"),
        (re.compile("a"), r"x\.pattern"),
        (closing_over(np.ones(2)), "holds arrays.*'value'.*jax.tree_util.Partial"),
        (closing_over([jnp.ones(2)]), "'value'"),
        (closing_over(closing_over(np.ones(2))), "'value.value'"),
        (closing_over(Holder(np.ones(2))), "'value.value'"),
        (jax.jit(closing_over(np.ones(2))), "'value'"),
        (functools.partial(closing_over(np.ones(2)), 1), "'func.value'"),
        (Model(np.ones((2, 2))).__call__, "'__self__.value'"),
        (Holder(closing_over(np.ones(2))), "'value.value'"),
        (Foreign(), "asarray"),
        (io.BytesIO(), "omit it"),
        (Numbered(), "string keys"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_it_is_refused_where_it_stands(leaf: Any, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words) as caught:
        save({"a": [0, leaf]})
    assert caught.value.path == ("a", "1")
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(UnsupportedError, match=words):
        save(leaf)


def test_functions_that_hold_no_arrays_are_code() -> None:
    def unset() -> Any:
        return later  # an empty cell

    leaves = [closing_over(3), closing_over(abs), closing_over([1.5, None]), unset, "".join, Holder(1).__repr__]
    assert kinds_of(leaves) == ["opaque"] * len(leaves)
    later = 1
    assert unset() == later
    every = [getattr(place, name) for place in (jnp, jax.nn, jax.lax) for name in dir(place)]
    assert set(kinds_of([x for x in every if callable(x) or isinstance(x, types.ModuleType)])) == {"opaque"}


def test_settings_are_of_the_target() -> None:
    leaves = [jax.random.key(0).dtype, jax.tree.structure(0), jax.lax.Precision.HIGH, np.dtype("i2"), jnp.bfloat16]
    assert kinds_of(leaves) == ["opaque"] * len(leaves)


def test_what_lies_below_a_class_is_refused_too_and_what_is_static_is_text() -> None:
    path = pathlib.PurePosixPath("a")
    with pytest.raises(UnsupportedError, match=r"str\(x\)") as caught:
        save({"p": Point([path], 2)})
    assert caught.value.path == ("p", "x", "0")
    assert kinds_of(Point(1, 2, path)) == ["int", "int"]  # type: ignore[arg-type]


def test_all_of_them_are_named_at_once() -> None:
    with pytest.raises(UnsupportedError) as caught:
        save({"a": {1}, "b": [np.ones(2), np.array([None])], "c": {"d": Text("x"), "e": 5}})
    message = str(caught.value)
    assert message.startswith("3 leaves cannot be saved:")
    for part in ("a: a set", "b/1: Object", "c/d: a Text"):
        assert part in message
    assert message.count("\n") == 3


def test_many_are_counted() -> None:
    with pytest.raises(UnsupportedError, match="and 80 more") as caught:
        save([{1}] * 100)
    assert str(caught.value).count("\n") == 21


def test_a_name_cannot_move_the_cursor() -> None:
    with pytest.raises(UnsupportedError) as caught:
        save({"\x1b[2J": {1}, "b": {1}})
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
    for walk in (save, load_like):
        with pytest.raises(UnsupportedError, match="have the same text") as caught:
            walk({"x": tree})
        assert repr(first) in str(caught.value)
        assert repr(second) in str(caught.value)
        assert caught.value.path == ("x",)


def test_a_key_without_text_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="text"):
        save({10**5000: 0})


def test_dict_keys_that_jax_cannot_sort_are_no_reason() -> None:
    assert list(treering.load(save({1: 0, "a": 1}))) == [1, "a"]


def test_too_deep_is_refused() -> None:
    tree: Any = 7
    for _ in range(1025):
        tree = {"a": tree}
    with pytest.raises(UnsupportedError, match=r"1024 containers deep.*hold itself"):
        save(tree)


def test_a_template_that_holds_itself_twice_is_refused() -> None:
    path = save([1, 2])
    tree: list[Any] = [1, 2]
    tree += [tree, tree]
    with pytest.raises(UnsupportedError, match="hold itself"):
        treering.load(path, like=tree)


def test_a_traced_array_is_refused_by_name() -> None:
    def step(x: jax.Array) -> jax.Array:
        save({"a": x})
        return x

    with pytest.raises(UnsupportedError, match="outside of jit"):
        jax.jit(step)(jnp.ones(2))
    assert kinds_of({"a": jnp.ones(2)}) == ["jax"]


def test_a_dataclass_with_an_array_beside_its_fields_is_refused() -> None:
    @dataclasses.dataclass
    class Normed:
        w: Any

        @functools.cached_property
        def norm(self) -> Any:
            return np.abs(self.w)

    tree = Normed(np.ones(2))
    assert list(treering.inspect(save(tree)).leaves) == ["w"]
    assert tree.norm is not None
    with pytest.raises(UnsupportedError, match="'norm'"):
        save(tree)


def test_a_node_that_jax_cannot_open_is_refused_where_it_stands() -> None:
    @jax.tree_util.register_pytree_node_class
    class Broken:
        def tree_flatten(self) -> Any:
            raise ValueError("no")

        @classmethod
        def tree_unflatten(cls, *_: Any) -> Any:
            return cls()

    with pytest.raises(UnsupportedError, match="Broken") as caught:
        save({"a": Broken()})
    assert caught.value.path == ("a",)


def test_what_stands_beside_it_is_not_lost() -> None:
    with pytest.raises(UnsupportedError, match="x/1"):
        save(Point([1, {1}], 2))


class ConfigDict:
    """As that of ml_collections: no dict, no pytree, and it becomes a dict."""

    def __init__(self, width: Any = 3) -> None:
        self._fields = {"width": width}

    def to_dict(self) -> dict[str, Any]:
        return self._fields


@pytest.mark.parametrize(
    ("leaf", "hint"),
    [
        (np.zeros(2, jax.dtypes.float0), "differentiate floats only"),
        (np.array(["a"], np.dtypes.StringDType()), "store text as str leaves"),
        (np.array([1, "a"], object), "store text as str leaves"),
        (np.zeros(2, "i4,f4"), "store each field as an array of its own"),
        (ConfigDict(), r"save x\.to_dict\(\)"),
        (ConfigDict(np.ones(2)), r"save x\.to_dict\(\)"),
    ],
    ids=["float0", "strings", "objects", "fields", "ConfigDict", "ConfigDict of arrays"],
)
def test_a_hint_fits_what_is_refused(leaf: Any, hint: str) -> None:
    with pytest.raises(UnsupportedError, match=hint):
        save({"a": leaf})
    with pytest.raises(UnsupportedError, match=hint):
        to_bytes({"a": leaf})
