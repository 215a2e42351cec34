"""Partition rules: what programs written for eformer rely on, line by line, and names for every kind of container."""

from __future__ import annotations

import collections
import dataclasses
import re
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import freeze
from jax.sharding import PartitionSpec as P

from treering.errors import MismatchError, TreeringError, UnsupportedError
from treering.sharding import match_partition_rules


def shaped(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, "float32")


EVERYTHING = [(".*", P("x"))]


def names_of(tree: Any) -> list[str]:
    """Return the names that rules see: no rule fits, so all are named."""
    with pytest.raises(MismatchError) as caught:
        match_partition_rules([("$^.", P())], tree, strict=False)
    return list(caught.value.differences)


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    params: Any
    step: Any


class Layer(eqx.Module):
    weight: Any
    bias: Any
    width: int = eqx.field(static=True)


class Model(nnx.Module):
    def __init__(self) -> None:
        self.dense = nnx.Linear(2, 3, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        (shaped(2), [""]),
        ({"a": [shaped(2), {"k": shaped(2)}], "b": (shaped(3),)}, ["a/0", "a/1/k", "b/0"]),
        ({"a": Pair(shaped(2), shaped(2))}, ["a/first", "a/second"]),
        ({1: shaped(2), -2: shaped(2)}, ["1", "-2"]),
        ({"a/b": {"c.d": shaped(2)}}, ["a/b/c.d"]),
        (collections.OrderedDict(b=shaped(2), a=shaped(2)), ["b", "a"]),
        (State(params={"w": shaped(2)}, step=shaped(1)), ["params/w", "step"]),
        (Layer(shaped(2, 3), shaped(3), 3), ["weight", "bias"]),
        (freeze({"params": {"w": shaped(2)}}), ["params/w"]),
        (nnx.state(nnx.eval_shape(Model)), ["dense/bias/value", "dense/kernel/value"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_names_and_the_same_structure(tree: Any, names: list[str]) -> None:
    assert sorted(names_of(tree)) == sorted(names)
    specs = match_partition_rules(EVERYTHING, tree)
    assert type(specs) is type(tree) or isinstance(tree, jax.ShapeDtypeStruct)
    assert jax.tree.leaves(specs) == [P("x")] * len(names)
    structures: list[Any] = [jax.tree.structure(specs), jax.tree.structure(tree)]
    assert structures[0] == structures[1]


def test_keys_that_jax_cannot_sort() -> None:
    tree = {1: shaped(2), None: shaped(2), "a": shaped(2)}
    rules = [("1", P("x")), ("None", P("y")), ("a", P("z"))]
    assert match_partition_rules(rules, tree) == {1: P("x"), None: P("y"), "a": P("z")}


def test_patterns_are_searched_for_and_the_first_wins() -> None:
    tree = {"dense": {"kernel": shaped(4, 4), "bias": shaped(4)}}
    rules: list[Any] = [
        ("kernel", P("tp", None)),
        (re.compile("DENSE/b", re.IGNORECASE), P("dp")),
        ("(?i)DENSE", P("never")),
    ]
    assert match_partition_rules(rules, tree) == {"dense": {"kernel": P("tp", None), "bias": P("dp")}}
    found = match_partition_rules([("(?i)KERNEL$", P("tp")), ("", P())], tree, report=lambda _: None)
    assert found["dense"]["kernel"] == P("tp")


def test_rules_may_be_any_iterable() -> None:
    assert match_partition_rules(iter(EVERYTHING), [shaped(2), shaped(2)]) == [P("x"), P("x")]


@pytest.mark.parametrize("leaf", [shaped(), np.float32(1), jnp.float32(1), 3, "text", True, len])
def test_strict_replicates_what_has_no_axes_before_any_rule(leaf: Any) -> None:
    assert match_partition_rules([], {"a": leaf}) == {"a": P()}
    assert match_partition_rules([("(", P("x"))], {"a": leaf}) == {"a": P()}


def test_one_item_on_an_axis_is_no_scalar() -> None:
    assert match_partition_rules(EVERYTHING, {"a": shaped(1)}) == {"a": P("x")}
    with pytest.raises(ValueError, match="not found"):
        match_partition_rules([], {"a": shaped(1)})


def test_strict_cuts_a_spec_to_the_axes() -> None:
    assert match_partition_rules([("a", P("x", "y", "z"))], {"a": shaped(4, 4)}) == {"a": P("x", "y")}
    assert match_partition_rules([("a", P("x"))], {"a": shaped(4, 4)}) == {"a": P("x")}


def test_small_arrays_are_replicated_once_a_rule_fits() -> None:
    tree = {"a": shaped(128, 128), "b": shaped(127, 129)}
    assert match_partition_rules(EVERYTHING, tree, min_size=16_384) == {"a": P("x"), "b": P()}
    assert match_partition_rules(EVERYTHING, tree, min_size=None) == {"a": P("x"), "b": P()}
    assert match_partition_rules(EVERYTHING, tree) == {"a": P("x"), "b": P("x")}
    assert match_partition_rules(EVERYTHING, {"a": shaped(0, 3)}, min_size=0) == {"a": P("x")}
    with pytest.raises(ValueError, match="not found for param: b"):
        match_partition_rules([("a", P("x"))], tree, 1 << 30)


def test_not_strict_returns_what_the_rule_says() -> None:
    long = P("x", "y", "z")
    value = object()
    rules = [("scalar", long), ("long", long), ("none", None), ("tuple", ("x", "y")), ("other", value)]
    tree = {"scalar": shaped(), "long": shaped(4), "none": shaped(4), "tuple": shaped(4), "other": 3}
    specs = match_partition_rules(rules, tree, min_size=1 << 30, strict=False)
    assert specs == {"scalar": long, "long": long, "none": None, "tuple": ("x", "y"), "other": value}
    assert specs["long"] is long


def test_a_tuple_stays_one_unless_it_is_cut() -> None:
    rules = [("", ("x", "y"))]
    assert type(match_partition_rules(rules, {"a": shaped(4, 4)})["a"]) is tuple
    assert type(match_partition_rules(rules, {"a": shaped(4)})["a"]) is P
    assert match_partition_rules(rules, {"a": shaped(4)}) == {"a": P("x")}


@pytest.mark.parametrize("strict", [True, False])
def test_no_rule(strict: bool) -> None:
    with pytest.raises(ValueError, match="not found") as caught:
        match_partition_rules([("b", P())], {"a": {"w": shaped(4)}}, strict=strict)
    assert isinstance(caught.value, MismatchError)
    assert str(caught.value) == "Partition rule not found for param: a/w"


def test_no_rule_for_many_says_so() -> None:
    with pytest.raises(
        MismatchError, match=r"^Partition rule not found for param: 0, and for 19 more: 1, 2, .*, \.\.\.$"
    ):
        match_partition_rules([], [shaped(4)] * 20)
    with pytest.raises(ValueError, match=r"not found for param: a$"):
        match_partition_rules([], {"a": 3}, strict=False)


def test_none_is_no_leaf() -> None:
    assert match_partition_rules([], {"a": None, "b": [None]}) == {"a": None, "b": [None]}
    assert match_partition_rules([], None, strict=False) is None


@pytest.mark.parametrize("spec", [None, "x", 3])
def test_a_rule_without_a_spec_is_a_type_error_when_strict(spec: Any) -> None:
    with pytest.raises(TypeError, match=r"rule 'a' gives .* to 'a/w', but must give a PartitionSpec"):
        match_partition_rules([("a", spec)], {"a": {"w": shaped(4)}})


def test_a_bad_pattern_is_told_when_it_is_reached() -> None:
    rules = [("a", P("x")), ("(", P("y"))]
    assert match_partition_rules(rules, {"a": shaped(4)}) == {"a": P("x")}
    with pytest.raises(re.error, match=r"the partition rule '\(' is not a regular expression") as caught:
        match_partition_rules(rules, {"b": shaped(4)})
    assert isinstance(caught.value, TreeringError)
    assert (caught.value.pattern, caught.value.pos) == ("(", 0)


@pytest.mark.parametrize("rule", [3, ("a",), ("a", P(), P()), (3, P()), (b"a", P())])
def test_what_is_no_rule_is_refused(rule: Any) -> None:
    with pytest.raises(UnsupportedError, match="partition rule"):
        match_partition_rules([rule], {"a": shaped(4)})


def test_deep_trees() -> None:
    tree: Any = shaped(4)
    for _ in range(400):
        tree = {"a": tree}
    assert jax.tree.leaves(match_partition_rules(EVERYTHING, tree)) == [P("x")]


def test_classes_and_what_has_no_shape_are_no_arrays() -> None:
    tree = {"a": jnp.ones(8), "dtype": np.float32, "array": np.ndarray}
    assert match_partition_rules([(".*", P("x"))], tree) == {"a": P("x"), "dtype": P(), "array": P()}
