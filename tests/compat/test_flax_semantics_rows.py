"""One test for each row of flax's semantics: the registry, from_state_dict, error texts, paths, mutation."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import flax.linen as nn
import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import freeze
from flax.training import train_state
from jax.tree_util import Partial

from tests import limits
from tests.properties.strategies import Pair, Point, add
from tests.trees import assert_same, assert_same_structure
from treering import serialization
from treering.errors import TreeringError


class Custom:
    """A class that is no pytree node, registered by hand."""

    def __init__(self, value: Any) -> None:
        self.value = value


class OnlyFlaxKnows:
    """A class that is no pytree node, registered with flax alone."""

    def __init__(self, value: Any) -> None:
        self.value = value


flax.serialization.register_serialization_state(
    OnlyFlaxKnows,
    lambda node: {"value": flax.serialization.to_state_dict(node.value)},
    lambda node, state: OnlyFlaxKnows(flax.serialization.from_state_dict(node.value, state["value"], name="value")),
)


@pytest.fixture
def custom() -> Any:
    """A fresh class that is registered with treering, and its registration."""

    class Fresh(Custom):
        pass

    serialization.register_serialization_state(
        Fresh,
        lambda node: {"value": serialization.to_state_dict(node.value)},
        lambda node, state: Fresh(serialization.from_state_dict(node.value, state["value"], name="value")),
    )
    return Fresh


def shown(value: Any) -> str:
    """An id without addresses, the same in every process."""
    text = value.__name__ if isinstance(value, type) else f"{type(value).__name__} {value}"
    return text if " at 0x" not in text else type(value).__name__


# ------------------------------------------------------------------------------------------------------------- registry


def test_the_registry_goes_by_exact_type(custom: Any) -> None:
    class Derived(custom):
        pass

    assert serialization.to_state_dict(custom(1)) == {"value": 1}
    derived = Derived(1)
    assert serialization.to_state_dict(derived) is derived
    assert serialization.is_serializable(custom)
    assert not serialization.is_serializable(Derived)


def test_a_registered_class_goes_round(custom: Any) -> None:
    data = serialization.to_bytes({"a": custom([1, np.ones(2)])})
    restored = serialization.from_bytes({"a": custom([0, 0])}, data)["a"]
    assert type(restored) is custom
    assert_same(restored.value, [1, np.ones(2)])


def test_registering_twice_is_a_value_error_with_flax_s_text() -> None:
    class Twice:
        pass

    serialization.register_serialization_state(Twice, vars, lambda node, state: node)
    with pytest.raises(ValueError, match='a serialization handler for "Twice" is already registered') as caught:
        serialization.register_serialization_state(Twice, vars, lambda node, state: node)
    assert isinstance(caught.value, TreeringError)


def test_registering_again_with_override_replaces() -> None:
    class Again:
        pass

    serialization.register_serialization_state(Again, lambda node: {"old": 1}, lambda node, state: "old")
    serialization.register_serialization_state(
        ty=Again, ty_to_state_dict=lambda node: {"new": 1}, ty_from_state_dict=lambda node, state: "new", override=True
    )
    assert serialization.to_state_dict(Again()) == {"new": 1}
    assert serialization.from_state_dict(Again(), {}) == "new"


@pytest.mark.parametrize("builtin", [dict, list, tuple])
def test_builtin_containers_cannot_be_registered_by_accident(builtin: type) -> None:
    with pytest.raises(ValueError, match=f'"{builtin.__name__}" is already registered'):
        serialization.register_serialization_state(builtin, vars, lambda node, state: node)


@pytest.mark.parametrize("value", [dict, {}, list, [1], tuple, (), Partial, Point, Point(1, 2), freeze({})], ids=shown)
def test_is_serializable_is_true_where_flax_says_true(value: Any) -> None:
    assert flax.serialization.is_serializable(value)
    assert serialization.is_serializable(value)


@pytest.mark.parametrize("value", [object(), object, Custom, Custom(1), len, set], ids=shown)
def test_is_serializable_is_false_for_what_nobody_knows(value: Any) -> None:
    assert not flax.serialization.is_serializable(value)
    assert not serialization.is_serializable(value)


@pytest.mark.parametrize("not_text", [1, None, b"a", ("a",)], ids=repr)
def test_a_handler_with_a_key_that_is_no_text_is_an_assertion_and_a_type_error(not_text: Any) -> None:
    class Keyed:
        pass

    serialization.register_serialization_state(Keyed, lambda node: {not_text: 1}, lambda node, state: node)
    with pytest.raises(AssertionError, match=r"A state dict must only have string keys\.") as caught:
        serialization.to_state_dict(Keyed())
    assert isinstance(caught.value, TreeringError)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("value", [7, "text", None, [1, 2]], ids=repr)
def test_a_handler_may_return_something_that_is_no_dict(value: Any) -> None:
    class PassThrough:
        pass

    serialization.register_serialization_state(PassThrough, lambda node: value, lambda node, state: ("got", state))
    assert serialization.to_state_dict({"a": PassThrough()}) == {"a": value}
    data = serialization.to_bytes({"a": PassThrough()})
    target: Any = {"a": PassThrough()}
    assert serialization.from_bytes(target, data) == {"a": ("got", value)}


def test_a_live_dict_of_the_object_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Live:
        def __init__(self) -> None:
            self.placed = jnp.ones(3)
            self.big = np.arange(9)

    serialization.register_serialization_state(Live, vars, lambda node, state: node)
    limits.lower(monkeypatch, chunk_of_state_dicts=16)
    live = Live()
    placed, big = live.placed, live.big
    serialization.to_bytes({"a": live})
    assert live.placed is placed
    assert live.big is big


def test_a_type_that_only_flax_s_registry_knows_goes_round() -> None:
    tree = {"a": OnlyFlaxKnows({"b": np.arange(3)})}
    data = serialization.to_bytes(tree)
    assert data == flax.serialization.to_bytes(tree)
    restored = serialization.from_bytes({"a": OnlyFlaxKnows({"b": 0})}, data)
    assert type(restored["a"]) is OnlyFlaxKnows
    assert_same(restored["a"].value, tree["a"].value)


def test_a_type_below_a_struct_that_only_treering_knows_goes_round(custom: Any) -> None:
    tree = Point(custom(1), [collections.OrderedDict(b=np.ones(1), a=2)])
    restored = serialization.from_bytes(tree, serialization.to_bytes(tree))
    assert type(restored.x) is custom
    assert restored.x.value == 1
    assert_same(restored.y, tree.y)


# ----------------------------------------------------------------------------------------------- from_state_dict: loose


@pytest.mark.sampled(5)
@pytest.mark.parametrize("target", [np.ones(3), 1, None, "a", int, object(), Custom(1), jnp.ones(2)], ids=shown)
@pytest.mark.parametrize(
    "state", ["text", {"a": 1}, [1], np.zeros((4, 4), np.int8)], ids=["str", "dict", "list", "array"]
)
def test_a_target_without_structure_takes_any_state_untouched(target: Any, state: Any) -> None:
    assert serialization.from_state_dict(target, state) is state


def test_shape_and_dtype_of_the_target_are_not_looked_at_by_default() -> None:
    restored = serialization.from_bytes(
        {"a": np.zeros(3, np.float32)}, serialization.to_bytes({"a": np.ones((4, 4), np.int8)})
    )
    assert_same(restored, {"a": np.ones((4, 4), np.int8)})


def test_a_shape_dtype_struct_serves_as_a_target_leaf() -> None:
    target = {"a": jax.ShapeDtypeStruct((3,), jnp.float32)}
    assert_same(serialization.from_bytes(target, serialization.to_bytes({"a": np.ones(3)})), {"a": np.ones(3)})


@pytest.mark.parametrize("wrap", [dict, freeze])
def test_extra_keys_of_the_state_are_ignored(wrap: Any) -> None:
    assert serialization.from_state_dict(wrap({"a": 0}), {"b": 2, "a": 1}) == wrap({"a": 1})


def test_keys_keep_the_targets_type_and_order() -> None:
    restored = serialization.from_state_dict({3: 0, "b": 0, "a": 0, None: 0}, {"None": 4, "a": 3, "b": 2, "3": 1})
    assert list(restored.items()) == [(3, 1), ("b", 2), ("a", 3), (None, 4)]


def test_python_scalars_stay_python() -> None:
    restored = serialization.from_bytes([0.0, 0, False, ""], serialization.to_bytes([1.5, 2, True, "x"]))
    assert [type(leaf) for leaf in restored] == [float, int, bool, str]


def test_the_callers_state_dict_is_not_changed() -> None:
    state = {"x": 1, "y": {"0": 2}}
    serialization.from_state_dict(Point(0, [0]), state)
    assert state == {"x": 1, "y": {"0": 2}}


def test_static_fields_come_from_the_target() -> None:
    assert serialization.from_state_dict(Point(0, 0, "mine"), {"x": 1, "y": 2}) == Point(1, 2, "mine")


# ---------------------------------------------------------------------------------------------- from_state_dict: errors


class OriginalTuple(NamedTuple):
    value: Any


class WrongTuple(NamedTuple):
    wrong_field: Any


def dense_params(layers: int) -> Any:
    return {"params": {f"Dense_{layer}": {"kernel": np.ones((2, 2)), "bias": np.ones(2)} for layer in range(layers)}}


def dense_state(layers: int) -> train_state.TrainState:
    return train_state.TrainState.create(
        apply_fn=len, params=dense_params(layers), tx=optax.sgd(learning_rate=0.1, momentum=0.9)
    )


@pytest.mark.parametrize(
    ("saved", "target", "text"),
    [
        (
            [[[1, 2, 3], [4, 5]]],
            [[[1, 2, 3], [4]]],
            "The size of the list and the state dict do not match, got 1 and 2 at path ./0/1",
        ),
        (
            (((1, 2, 3), (4, 5)),),
            (((1, 2, 3), (4,)),),
            "The size of the list and the state dict do not match, got 1 and 2 at path ./0/1",
        ),
        (
            (((1, 2, 3), (OriginalTuple([4, 5]), 6)),),
            (((1, 2, 3), (WrongTuple([4, 5]), 6)),),
            "The field names of the state dict and the named tuple do not match, got {'value'} and {'wrong_field'}"
            " at path ./0/1/0",
        ),
        (
            {"a": {"b": {"c": [1, 2, 3], "d": [4, 5]}}},
            {"a": {"b": {"c": [1, 2, 3], "d": [4]}}},
            "The size of the list and the state dict do not match, got 1 and 2 at path ./a/b/d",
        ),
        (
            {"a": {"b": {"c": [1, 2, 3], "d": [4, 5]}}},
            {"a": {"b": {"c": [1, 2, 3], "e": [4, 5]}}},
            "The target dict keys and state dict keys do not match, target dict contains keys {'e'} which are not"
            " present in state dict at path ./a/b",
        ),
        (
            dense_params(1),
            dense_params(2),
            "The target dict keys and state dict keys do not match, target dict contains keys {'Dense_1'} which are"
            " not present in state dict at path ./params",
        ),
        (
            freeze(dense_params(1)),
            freeze(dense_params(2)),
            "The target dict keys and state dict keys do not match, target dict contains keys {'Dense_1'} which are"
            " not present in state dict at path ./params",
        ),
        (
            dense_state(1),
            dense_state(2),
            "The target dict keys and state dict keys do not match, target dict contains keys {'Dense_1'} which are"
            " not present in state dict at path ./params/params",
        ),
        (
            {"a": {"x": 1}},
            {"a": Point(0, 0)},
            "Missing field y in state dict while restoring an instance of Point, at path ./a",
        ),
        (
            {"a": {"x": 1, "y": 2, "z": 3, "u": 4}},
            {"a": Point(0, 0)},
            'Unknown field(s) "z,u" in state dict while restoring an instance of Point at path ./a',
        ),
        ([{"first": 1}], [Pair(0, 0)], None),
        ({"first": 1, "second": 2, "third": 3}, Pair(0, 0), None),
    ],
    ids=[
        "list",
        "tuple",
        "namedtuple",
        "list in dicts",
        "dict",
        "params",
        "FrozenDict",
        "train state",
        "struct, missing",
        "struct, unknown",
        "namedtuple, missing",
        "namedtuple, extra",
    ],
)
def test_a_mismatch_is_a_value_error_with_flax_s_text(saved: Any, target: Any, text: str | None) -> None:
    data = flax.serialization.to_bytes(saved)
    with pytest.raises(ValueError, match=r"at path \.") as theirs:
        flax.serialization.from_bytes(target, data)
    with pytest.raises(ValueError, match=r"at path \.") as ours:
        serialization.from_bytes(target, data)
    assert isinstance(ours.value, TreeringError)
    if text is not None:  # otherwise the text holds a set of several names, whose order is not fixed in flax
        assert str(theirs.value) == text
        assert str(ours.value) == text


def test_several_missing_keys_are_named_in_a_fixed_order() -> None:
    missing = [f"key{number}" for number in range(9)]
    with pytest.raises(ValueError, match="not present") as caught:
        serialization.from_state_dict(dict.fromkeys(missing), {})
    places = [str(caught.value).index(repr(name)) for name in missing]
    assert places == sorted(places)


def test_the_name_argument_starts_the_path() -> None:
    with pytest.raises(ValueError, match=r"at path root/a$"):
        serialization.from_state_dict({"a": [1]}, {"a": {}}, name="root")


def test_a_mismatch_carries_its_path_as_a_tuple_so_that_slashes_do_not_matter() -> None:
    with pytest.raises(TreeringError) as caught:
        serialization.from_state_dict({"a/b": {"c": [1]}}, {"a/b": {"c": {}}})
    assert caught.value.path == ("a/b", "c")


def test_current_path_is_empty_outside_and_whole_inside() -> None:
    seen = []

    class Watcher:
        pass

    def watch(node: Watcher, state: Any) -> Any:
        seen.append(serialization.current_path())
        return state

    serialization.register_serialization_state(Watcher, lambda node: {}, watch)
    assert serialization.current_path() == ""
    serialization.from_state_dict({"a": [Watcher()], "b": Watcher()}, {"a": {"0": {}}, "b": {}})
    assert seen == ["./a/0", "./b"]
    assert serialization.current_path() == ""


def test_current_path_is_empty_again_after_an_error() -> None:
    with pytest.raises(ValueError, match="size"):
        serialization.from_state_dict({"a": [1]}, {"a": {}})
    assert serialization.current_path() == ""


@pytest.mark.parametrize(
    ("target", "state", "kind"),
    [
        ({"a": 1}, 5, AttributeError),
        ({"a": 1}, None, AttributeError),
        ({"a": 1}, np.ones(2), AttributeError),
        ({"a": 1}, [1], AttributeError),
        (freeze({"a": 1}), 5, AttributeError),
        ([1], 5, TypeError),
        ((1,), None, TypeError),
        ([1], "x", TypeError),
        ([1], {"5": 1}, KeyError),
        (([1],), {"0": {"a": 1}}, KeyError),
        (Pair(1, 2), 5, AttributeError),
        (Pair(1, 2), [1, 2], AttributeError),
        (Partial(add), {}, KeyError),
        (Partial(add), {"args": {}}, KeyError),
        (Partial(add), 7, TypeError),
        (Point(1, 2), 7, AttributeError),
    ],
    ids=shown,
)
def test_a_state_of_the_wrong_kind_is_an_error_of_ours_and_flax_s_class(target: Any, state: Any, kind: type) -> None:
    with pytest.raises(kind):
        flax.serialization.from_state_dict({"k": target}, {"k": state})
    with pytest.raises(TreeringError) as caught:
        serialization.from_state_dict({"k": target}, {"k": state})
    assert isinstance(caught.value, kind)
    assert caught.value.path is not None
    assert caught.value.path[0] == "k"
    assert "k" in str(caught.value)


def test_a_raw_list_as_state_is_flax_s_type_error() -> None:
    raw: Any = [3, 4]
    with pytest.raises(TypeError):
        flax.serialization.from_state_dict([1, 2], raw)
    with pytest.raises(TypeError) as caught:
        serialization.from_state_dict([1, 2], raw)
    assert isinstance(caught.value, TreeringError)


def test_a_mismatch_below_an_int_key_of_a_frozen_dict_says_what_is_wrong() -> None:
    with pytest.raises(TypeError, match="expected str instance"):
        flax.serialization.from_state_dict(freeze({1: {2: 1}}), {"1": {}})
    with pytest.raises(ValueError, match=r"contains keys \{'2'\} which are not present in state dict at path \./1$"):
        serialization.from_state_dict(freeze({1: {2: 1}}), {"1": {}})


# --------------------------------------------------------------------------------------------------------- named tuples


def test_the_old_form_of_a_namedtuple_is_read() -> None:
    old = {"name": "Pair", "fields": {"0": "first", "1": "second"}, "values": {"0": [1], "1": {"0": 2}}}
    assert serialization.from_state_dict(Pair(0, [0]), old) == Pair([1], [2])


Named = collections.namedtuple("Named", ["name", "fields", "values"])  # noqa: PYI024


@pytest.mark.parametrize("tree", [Named(1, 2, 3), Named("a", {"0": "name"}, [1]), Named({}, [], {"0": 1})], ids=str)
def test_a_namedtuple_whose_fields_look_like_the_old_form_goes_round(tree: Any) -> None:
    assert serialization.from_bytes(tree, serialization.to_bytes(tree)) == tree


def test_a_broken_old_form_is_an_error_of_ours() -> None:
    for old in (
        {"name": "Pair", "fields": {"0": "first"}, "values": {}},
        {"name": "Pair", "fields": 3, "values": 4},
        {"name": "Pair", "fields": {"0": []}, "values": {"0": 1}},
    ):
        with pytest.raises(TreeringError):
            serialization.from_state_dict(Pair(1, 2), old)


def test_extra_keywords_of_a_partial_are_dropped() -> None:
    restored = serialization.from_state_dict(Partial(add, b=0), {"args": {}, "keywords": {"b": 1, "c": 2}})
    assert restored.keywords == {"b": 1}
    assert restored.func is add


# ------------------------------------------------------------------------ types that are registered with flax on import


def test_structs_of_flax_go_round() -> None:
    tree = {
        "partitioned": nn.Partitioned(np.ones(2), names=("a",)),
        "logical": nn.LogicallyPartitioned(np.ones(2), names=("a",)),
    }
    data = serialization.to_bytes(tree)
    assert data == flax.serialization.to_bytes(tree)
    restored = serialization.from_bytes(tree, data)
    assert_same_structure(restored, tree)


def test_a_train_state_has_step_params_and_opt_state() -> None:
    assert list(serialization.to_state_dict(dense_state(1))) == ["step", "params", "opt_state"]
