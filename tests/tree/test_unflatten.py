"""The way back into a target: its own classes, static fields, functions and keys around other leaves."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze
from flax.training.train_state import TrainState
from hypothesis import given

from tests.properties.strategies import Box, Chexed, Layer, Pair, Plain, Point, add, quick, trees
from tests.trees import assert_same, assert_same_structure, fingerprint
from treering._tree.flatten import flatten, flatten_like
from treering._tree.likeness import static_differences, unflatten
from treering.serialization import register_serialization_state


@dataclasses.dataclass
class Config:
    width: Any
    table: Any
    note: str = "note"

    def __post_init__(self) -> None:
        self.seen = ["made"]


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: Any
    other: Any = dataclasses.field(default=0, init=False)


class Tally:
    """Only a state-dict handler knows it."""

    def __init__(self, n: Any, kept: str = "kept") -> None:
        self.n = n
        self.kept = kept


class Wrapped:
    """Its handler returns no dict."""

    def __init__(self, value: Any) -> None:
        self.value = value


register_serialization_state(Tally, lambda t: {"n": t.n}, lambda target, state: Tally(state["n"], target.kept))
register_serialization_state(Wrapped, lambda w: w.value, lambda _, state: Wrapped(state))


@quick(150)
@given(trees())
def test_a_tree_around_its_own_leaves_is_the_tree(tree: Any) -> None:
    before = fingerprint(tree)
    result = unflatten(tree, flatten(tree).leaves)
    assert fingerprint(result) == before == fingerprint(tree)
    assert_same_structure(result, tree)


@quick(60)
@given(trees())
def test_each_leaf_goes_to_its_place(tree: Any) -> None:
    flat = flatten_like(tree)
    result = flatten_like(unflatten(tree, [f"leaf {key}" for key in flat.keys]))
    # An nnx.State sorts its keys whenever it is made, so leaves are found by key and not by number.
    assert dict(zip(result.keys, result.leaves, strict=True)) == {key: f"leaf {key}" for key in flat.keys}
    assert static_differences(flat.tokens, result.tokens) == []


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_leaves_is_an_error(count: int) -> None:
    with pytest.raises(ValueError, match=r"lea(f|ves)"):
        unflatten({"a": [1], "b": 2}, list(range(count)))


def test_an_equinox_model_takes_its_functions_from_the_target() -> None:
    saved, like = (eqx.nn.MLP(2, 1, 4, 2, key=jax.random.key(seed)) for seed in (0, 1))
    flat = flatten(saved)
    leaves = [None if kind == "opaque" else leaf for leaf, kind in zip(flat.leaves, flat.kinds, strict=True)]
    for number in flat.opaque:
        leaves[number] = flatten_like(like).leaves[number]
    result = unflatten(like, leaves)
    assert result.activation is like.activation
    x = jnp.ones(2)
    np.testing.assert_array_equal(result(x), saved(x))


def test_a_train_state_goes_on_training() -> None:
    tx = optax.adam(1e-3)
    state = TrainState.create(apply_fn=add, params={"w": jnp.ones(2)}, tx=tx)
    result = unflatten(state, flatten(state).leaves)
    assert_same(result, state, restored=False)
    assert result.tx is tx
    stepped = result.apply_gradients(grads={"w": jnp.ones(2)})
    assert int(stepped.step) == 1


def test_an_nnx_model_computes_the_same() -> None:
    saved, like = (nnx.Linear(2, 3, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    result = unflatten(like, flatten(saved).leaves)
    np.testing.assert_array_equal(result(jnp.ones(2)), saved(jnp.ones(2)))


def test_a_stateful_equinox_norm() -> None:
    tree = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    result = unflatten(tree, flatten(tree).leaves)
    assert_same_structure(result, tree)


def test_partitioned_parameters() -> None:
    boxed: Any = nn.Partitioned(jnp.ones(2), names=("x",))
    assert_same(unflatten({"w": boxed}, [np.zeros(2)]), {"w": boxed.replace(value=np.zeros(2))}, restored=False)


def test_a_linen_module_is_opened_by_its_fields() -> None:
    like = {"m": nn.Dense(3)}
    flat = flatten(like)
    result = unflatten(
        like, [5 if key == "m/features" else leaf for key, leaf in zip(flat.keys, flat.leaves, strict=True)]
    )
    assert result["m"].features == 5
    assert like["m"].features == 3


def test_a_plain_dataclass_is_copied_and_its_fields_are_set() -> None:
    like = Config(3, {"t": np.ones(2)})
    like.seen.append("used")
    result = unflatten(like, [4, np.zeros(2), "other"])
    assert type(result) is Config
    assert (result.width, result.note, result.seen) == (4, "other", ["made", "used"])
    assert like.width == 3
    np.testing.assert_array_equal(result.table["t"], np.zeros(2))


def test_a_frozen_dataclass_with_slots() -> None:
    like = [Frozen(Frozen(1))]
    result = unflatten(like, [5, 6, 7])
    assert (result[0].value.value, result[0].value.other, result[0].other) == (5, 6, 7)
    assert like[0].value == Frozen(1)


def test_types_with_a_handler_only() -> None:
    result = unflatten({"t": Tally({"deep": [1]}, "mine"), "w": Wrapped((1, 2))}, [7, 8, 9])
    assert (result["t"].n, result["t"].kept) == ({"deep": [7]}, "mine")
    assert result["w"].value == (8, 9)


def test_dicts_keep_the_order_and_the_keys_of_the_target() -> None:
    for like in ({2: 0, "b": 1, None: 2}, collections.OrderedDict([("z", 0), (3, 1), ("a", 2)])):
        result = unflatten(like, [7, 8, 9])
        assert list(result.items()) == list(zip(like, [7, 8, 9], strict=True))
        assert type(result) is type(like)
    counted = unflatten(collections.defaultdict(list, b=[1]), [5])
    assert (counted["b"], counted["new"]) == ([5], [])


def test_a_target_of_1024_levels() -> None:
    for wrap in (lambda x: [x], lambda x: {"a": x}, lambda x: Point(x, 0), lambda x: Box(x, 0)):
        like: Any = 0
        for _ in range(1024):
            like = wrap(like)
        flat = flatten(like)
        assert flatten(unflatten(like, flat.leaves)).keys == flat.keys


# ---------------------------------------------------------------------------------------------------------- differences


def differences(saved: Any, like: Any) -> list[str]:
    return static_differences(flatten(saved).tokens, flatten_like(like).tokens)


def test_the_same_tree_has_none() -> None:
    for tree in (Point(1, 2), {"a": [Layer(1, abs, 3), Pair(1, 2)]}, optax.adam(1).init({"w": jnp.ones(1)}), 5):
        assert differences(tree, tree) == []


def test_static_fields_are_compared_at_their_places() -> None:
    saved = {"m": [Point(1, 2, "saved"), Layer(1, abs, 3)]}
    like = {"m": [Point(1, 2, "like"), Layer(1, len, 4)]}
    name = "tests.properties.strategies."
    assert differences(saved, like) == [
        f"m/0: label of {name}Point: saved 'saved', like has 'like'",
        f"m/1: size of {name}Layer: saved 3, like has 4",
    ]


def test_dicts_in_another_order_are_compared_by_their_key_paths() -> None:
    layers = {f"layer {n}": {"w": Pair(1, Point(1, 2, f"{n}")), "b": [1]} for n in range(12)}
    like = dict(reversed([(key, dict(reversed(layer.items()))) for key, layer in layers.items()]))
    assert differences(layers, like) == []
    like["layer 3"] = {"b": (1,), "w": Pair(1, Point(1, 2, "other"))}
    assert differences(layers, like) == [
        "layer 3/w/second: label of tests.properties.strategies.Point: saved '3', like has 'other'",
        "layer 3/b: saved as list, like has tuple",
    ]
    like["layer 3"] = {"b": {"0": 1}, "w": Pair(1, Point(1, 2, "3"))}
    assert differences(layers, like) == ["layer 3/b: saved as list, like has dict"]


def test_functions_are_compared_by_name() -> None:
    (line,) = differences(jax.tree_util.Partial(add, 1), jax.tree_util.Partial(len, 1))
    assert line == f"(the root): func of jax.tree_util.Partial: saved {add.__module__}.add, like has builtins.len"
    assert differences(Point(1, 2, object()), Point(1, 2, object())) == []  # type: ignore[arg-type]


def test_classes_are_compared() -> None:
    assert differences({"a": Plain(1, 2)}, {"a": Point(1, 2)}) == [
        "a: saved as tests.properties.strategies.Plain, like has tests.properties.strategies.Point"
    ]
    assert differences([1], (1,)) == ["(the root): saved as list, like has tuple"]
    assert differences({"a": 1}, freeze({"a": 1})) == [
        "(the root): saved as dict, like has flax.core.frozen_dict.FrozenDict"
    ]
    assert differences(Pair(1, 2), Chexed(alpha=1, beta=2))[0].startswith(
        "(the root): saved as tests.properties.strategies.Pair"
    )


def test_what_is_equal_but_not_the_same_differs_and_nan_does_not() -> None:
    assert differences(Point(1, 2, float("nan")), Point(1, 2, float("nan"))) == []  # type: ignore[arg-type]
    for one, other in ((1, True), (0.0, -0.0), (1, 1.0), ("1", 1)):
        assert len(differences(Point(1, 2, one), Point(1, 2, other))) == 1  # type: ignore[arg-type]


def test_a_field_that_one_side_lacks() -> None:
    saved = flatten(Point(1, 2)).tokens
    head = dataclasses.replace(saved[0], static=())  # type: ignore[type-var]
    assert static_differences(saved, [head, 2]) == [
        "(the root): label of tests.properties.strategies.Point: saved 'static', like has none"
    ]
    assert static_differences([head, 2], saved) == [
        "(the root): label of tests.properties.strategies.Point: not saved, like has 'static'"
    ]


def test_containers_of_one_side_only_are_no_difference() -> None:
    assert differences({"a": [1], "b": Point(1, 2)}, {"a": [1]}) == []
    assert differences({"a": 1}, {"a": Point(1, 2)}) == []


def test_a_long_text_is_cut_and_a_cursor_stays_where_it_is() -> None:
    (line,) = differences(Point(1, 2, "\x1b[2J" + "x" * 900), Point(1, 2))
    assert len(line) < 300
    assert "\x1b" not in line
