"""What flax cannot save: other libraries' modules, plain dataclasses, ordered dicts, typed keys; unregistered."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import chex
import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.properties.strategies import Box, Chexed, Layer, Plain
from tests.trees import assert_same, assert_same_structure
from treering import serialization
from treering.errors import TreeringError


def assert_goes_round(tree: Any, target: Any | None = None) -> Any:
    restored = serialization.from_bytes(tree if target is None else target, serialization.to_bytes(tree))
    assert_same(restored, tree)
    assert_same_structure(restored, tree)
    return restored


# -------------------------------------------------------------------------------------------------------------- equinox


def mlp(seed: int) -> eqx.nn.MLP:
    return eqx.nn.MLP(2, 1, 4, 2, key=jax.random.key(seed))


def test_an_equinox_mlp_goes_round_and_takes_its_functions_from_the_target() -> None:
    restored = assert_goes_round(mlp(0), mlp(1))
    assert restored.activation is mlp(1).activation
    x = jnp.ones(2)
    np.testing.assert_array_equal(restored(x), mlp(0)(x))


def test_a_function_below_a_module_is_nil_on_the_wire() -> None:
    data = serialization.to_bytes(Layer(np.ones(1), abs, 3))
    assert serialization.from_bytes(None, data)["activation"] is None


def test_a_function_deep_below_a_module_is_nil_too() -> None:
    tree = Layer({"inner": [abs, (len,)]}, abs, 3)
    assert_goes_round(tree)


@pytest.mark.parametrize(
    "tree", [{"f": abs}, [abs], (1, abs), abs, {"a": {"b": jax.nn.relu}}], ids=lambda tree: type(tree).__name__
)
def test_a_function_in_a_plain_container_is_refused(tree: Any) -> None:
    with pytest.raises(TypeError) as caught:
        serialization.to_bytes(tree)
    assert isinstance(caught.value, TreeringError)


def test_an_equinox_module_with_optional_fields() -> None:
    layer = eqx.nn.Linear(2, 3, use_bias=False, key=jax.random.key(0))
    restored = assert_goes_round(layer)
    assert restored.bias is None


def test_a_filtered_model_and_its_optimizer_state_go_round() -> None:
    import optax

    params = eqx.filter(mlp(0), eqx.is_array)
    assert_goes_round({"params": params, "opt_state": optax.adam(1e-3).init(params)})


# ----------------------------------------------------------------------------------------------------- other node types


@pytest.mark.parametrize(
    "tree",
    [
        Plain(np.ones(2), [1, None], "mine"),
        Chexed(alpha={"a": np.float32(1)}, beta=()),
        Box(np.ones(1), Box(1, "text")),
        collections.OrderedDict(b=np.ones(1), a=2),
        collections.OrderedDict([(2, "int keys"), (1, None)]),
        collections.defaultdict(list, a=[np.ones(1)]),
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_a_registered_node_goes_round(tree: Any) -> None:
    assert_goes_round(tree)
    assert_goes_round({"below": [tree]})


def test_fields_have_their_names_on_the_wire() -> None:
    assert serialization.to_state_dict(Plain(1, 2)) == {"weight": 1, "bias": 2}
    assert serialization.to_state_dict(Chexed(alpha=1, beta=2)) == {"alpha": 1, "beta": 2}
    assert serialization.to_state_dict(Box(1, 2)) == {"0": 1, "1": 2}
    assert list(serialization.to_state_dict(collections.OrderedDict(b=1, a=2))) == ["b", "a"]


def test_static_fields_come_from_the_target() -> None:
    restored = serialization.from_bytes(Plain(0, 0, "target's"), serialization.to_bytes(Plain(1, 2, "saved")))
    assert restored == Plain(1, 2, "target's")


def test_a_missing_or_unknown_field_is_a_value_error_with_its_path() -> None:
    for state in ({"weight": 1}, {"weight": 1, "bias": 2, "more": 3}):
        with pytest.raises(ValueError, match="Plain") as caught:
            serialization.from_state_dict({"a": Plain(0, 0)}, {"a": state})
        assert isinstance(caught.value, TreeringError)
        assert caught.value.path == ("a",)


def test_nothing_is_saved_as_a_plain_dict_in_silence() -> None:
    @dataclasses.dataclass
    class Unregistered:
        a: int

    with pytest.raises(TypeError):
        serialization.to_bytes({"x": Unregistered(1)})


def test_a_chex_dataclass_that_is_no_mapping_goes_round() -> None:
    class Unmapped:
        a: Any

    unmapped: Any = chex.dataclass(Unmapped, mappable_dataclass=False)
    assert_goes_round(unmapped(a=np.ones(2)))


# ------------------------------------------------------------------------------------------------------------------ nnx


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(2, 3, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)])


def test_an_nnx_state_goes_round() -> None:
    state = nnx.state(Net(nnx.Rngs(0)))
    restored = assert_goes_round(state, nnx.state(Net(nnx.Rngs(1))))
    assert type(restored) is nnx.State


def test_an_nnx_state_restored_into_its_module_computes_the_same() -> None:
    model, other = Net(nnx.Rngs(0)), Net(nnx.Rngs(1))
    nnx.update(other, serialization.from_bytes(nnx.state(other), serialization.to_bytes(nnx.state(model))))
    x = jnp.ones((1, 2))
    np.testing.assert_array_equal(other.dense(x), model.dense(x))


def test_the_pure_dict_form_is_shared_with_flax_users() -> None:
    state = nnx.state(Net(nnx.Rngs(0)), nnx.Param)
    pure = nnx.to_pure_dict(state)
    data = serialization.to_bytes(pure)
    assert data == flax.serialization.to_bytes(pure)
    other = nnx.state(Net(nnx.Rngs(1)), nnx.Param)
    nnx.replace_by_pure_dict(other, serialization.from_bytes(nnx.to_pure_dict(other), data))
    assert_same(jax.tree.leaves(other), [np.asarray(leaf) for leaf in jax.tree.leaves(state)])


def test_an_nnx_state_with_random_streams_keeps_its_typed_keys() -> None:
    state = nnx.state(nnx.Rngs(params=0, dropout=1))
    assert_goes_round(state)


# ----------------------------------------------------------------------------------------------------------- typed keys


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("shape", [None, (3,), (2, 2)], ids=str)
def test_typed_keys_go_round_with_the_targets_kind(impl: str, shape: tuple[int, ...] | None) -> None:
    key = jax.random.key(7, impl=impl)
    keys = key if shape is None else jax.random.split(key, shape)
    restored = assert_goes_round({"rng": keys})["rng"]
    assert restored.dtype == keys.dtype
    first = restored.reshape(-1)[0]
    np.testing.assert_array_equal(jax.random.bits(first), jax.random.bits(keys.reshape(-1)[0]))


def test_without_a_target_a_typed_key_gives_its_raw_data() -> None:
    key = jax.random.key(7)
    restored = serialization.from_bytes(None, serialization.to_bytes({"rng": key}))
    assert_same(restored["rng"], np.asarray(jax.random.key_data(key)))


def test_key_data_that_flax_saved_becomes_a_typed_key() -> None:
    key = jax.random.key(7)
    data = flax.serialization.to_bytes({"rng": jax.random.key_data(key)})
    assert_same(serialization.from_bytes({"rng": jax.random.key(0)}, data), {"rng": key}, restored=False)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_an_abstract_typed_key_is_a_target(impl: str) -> None:
    keys = jax.random.split(jax.random.key(7, impl=impl), 3)
    target = {"rng": jax.ShapeDtypeStruct(keys.shape, keys.dtype)}
    data = serialization.to_bytes({"rng": keys})
    for strict in (False, True):
        assert_same(serialization.from_bytes(target, data, strict=strict), {"rng": keys}, restored=False)


def test_an_abstract_typed_key_cannot_be_saved() -> None:
    key = jax.random.key(7)
    with pytest.raises(TreeringError):
        serialization.to_bytes({"rng": jax.ShapeDtypeStruct(key.shape, key.dtype)})


@pytest.mark.parametrize("bad", [np.zeros(3, np.uint32), np.zeros(2, np.float32), "text", {"a": 1}, None, 5], ids=repr)
def test_data_that_is_no_key_is_an_error_with_its_path(bad: Any) -> None:
    with pytest.raises(TreeringError) as caught:
        serialization.from_bytes({"rng": jax.random.key(0)}, serialization.to_bytes({"rng": bad}))
    assert caught.value.path == ("rng",)


def test_old_style_keys_are_plain_arrays() -> None:
    assert_goes_round({"rng": jax.random.PRNGKey(3)})


@pytest.mark.parametrize(
    "leaf", [jax.ShapeDtypeStruct((2,), jnp.float32), jax.eval_shape(lambda: jnp.ones(2))], ids=["made", "evaluated"]
)
def test_an_abstract_array_cannot_be_saved(leaf: Any) -> None:
    with pytest.raises(TreeringError) as caught:
        serialization.to_bytes({"a": leaf})
    assert caught.value.path == ("a",)


def test_a_traced_array_is_refused_by_name() -> None:
    def save(x: jax.Array) -> jax.Array:
        serialization.to_bytes({"a": x})
        return x

    with pytest.raises((TreeringError, jax.errors.JAXTypeError)):
        jax.jit(save)(jnp.ones(2))


def test_a_deleted_array_is_an_error_that_names_it() -> None:
    array = jnp.ones(2)
    array.delete()
    with pytest.raises((TreeringError, RuntimeError)):
        serialization.to_bytes({"a": array})
