"""The real flax as referee: made-up trees encode to identical bytes, and each library reads the other's file."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import optax
import pytest
from flax.core import freeze
from flax.training import train_state
from hypothesis import given
from hypothesis import strategies as st

import treering.serialization
from tests.properties.strategies import (
    EXTENDED_DTYPES,
    NUMPY_DTYPES,
    Pair,
    Point,
    arrays,
    flax_trees,
    jax_arrays,
    leaves,
    numpy_scalars,
    python_leaves,
    quick,
)
from tests.trees import assert_same, assert_same_structure, fingerprint


@contextlib.contextmanager
def chunks_of(size: int) -> Iterator[None]:
    """Lower the chunk size in both libraries."""
    sizes = flax.serialization.MAX_CHUNK_SIZE, treering.serialization.MAX_CHUNK_SIZE
    flax.serialization.MAX_CHUNK_SIZE = treering.serialization.MAX_CHUNK_SIZE = size
    try:
        yield
    finally:
        flax.serialization.MAX_CHUNK_SIZE, treering.serialization.MAX_CHUNK_SIZE = sizes


def assert_agree(tree: Any) -> None:
    """Same bytes, and each library makes the same of them, with and without a target."""
    theirs = flax.serialization.to_bytes(tree)
    before = fingerprint(tree)
    ours = treering.serialization.to_bytes(tree)
    assert fingerprint(tree) == before
    assert ours == theirs
    assert_same(treering.serialization.msgpack_restore(theirs), flax.serialization.msgpack_restore(ours))
    got = treering.serialization.from_bytes(tree, theirs)
    assert_same(got, flax.serialization.from_bytes(tree, ours), restored=False)
    assert_same(got, tree)
    assert_same_structure(got, tree)


@quick(150)
@given(flax_trees())
def test_trees_of_every_kind_agree(tree: Any) -> None:
    assert_agree(tree)


@quick(60)
@given(flax_trees(arrays(max_side=9)), st.integers(1, 80))
def test_chunked_trees_agree(tree: Any, size: int) -> None:
    with chunks_of(size):
        assert_agree(tree)


@quick(60)
@given(flax_trees())
def test_state_dicts_agree(tree: Any) -> None:
    ours, theirs = treering.serialization.to_state_dict(tree), flax.serialization.to_state_dict(tree)
    assert fingerprint(ours) == fingerprint(theirs)
    assert_same(
        treering.serialization.from_state_dict(tree, theirs),
        flax.serialization.from_state_dict(tree, ours),
        restored=False,
    )


_RAW = st.recursive(
    leaves(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=5), inner, max_size=4),
        st.dictionaries(st.integers(-(2**63), 2**64 - 1), inner, max_size=3),
        st.dictionaries(st.binary(max_size=3), inner, max_size=3),
    ),
    max_leaves=10,
)


@quick(80)
@given(_RAW, st.booleans())
def test_low_level_trees_agree(tree: Any, in_place: bool) -> None:
    before = fingerprint(tree)
    ours = treering.serialization.msgpack_serialize(tree, in_place=in_place)
    assert fingerprint(tree) == before
    assert ours == flax.serialization.msgpack_serialize(tree, in_place=in_place)
    assert_same(treering.serialization.msgpack_restore(ours), flax.serialization.msgpack_restore(ours))


@quick(30)
@given(
    st.dictionaries(
        st.one_of(
            st.text(max_size=3), st.binary(max_size=3), st.integers(), st.none(), st.floats(allow_nan=False)
        ).filter(lambda key: not isinstance(key, int) or -(2**63) <= key < 2**64),
        python_leaves(),
        max_size=6,
    )
)
def test_low_level_maps_with_mixed_keys_agree(tree: dict[Any, Any]) -> None:
    ours = treering.serialization.msgpack_serialize(tree, in_place=True)
    assert ours == flax.serialization.msgpack_serialize(dict(tree), in_place=True)
    assert_same(treering.serialization.msgpack_restore(ours), flax.serialization.msgpack_restore(ours))


def test_chunks_below_a_raw_list_agree() -> None:
    def raw() -> dict[str, Any]:
        return {"below": [np.arange(9)], "beside": np.arange(9)}

    with chunks_of(16):
        ours = treering.serialization.msgpack_serialize(raw(), in_place=True)
        assert ours == flax.serialization.msgpack_serialize(raw(), in_place=True)


# ----------------------------------------------------------------------------------------------------- borders of forms


# A tuple is written as a list is: as a dict of its positions.
@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("kind", "count"),
    [(kind, count) for kind in (dict, list) for count in (0, 1, 15, 16, 17, 65535, 65536)]
    + [(tuple, count) for count in (0, 1, 15, 16)],
)
def test_container_sizes_agree(kind: type, count: int) -> None:
    items = range(count)
    tree = {f"{item:x}": item for item in items} if kind is dict else kind(items)
    data = flax.serialization.to_bytes(tree)
    assert treering.serialization.to_bytes(tree) == data
    assert treering.serialization.msgpack_restore(data) == flax.serialization.msgpack_restore(data)
    assert treering.serialization.from_bytes(tree, data) == tree


@pytest.mark.sampled(3)
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 65535, 65536])
def test_raw_list_sizes_agree(count: int) -> None:
    ours = treering.serialization.msgpack_serialize(list(range(count)))
    assert ours == msgpack.packb(list(range(count)))
    assert treering.serialization.msgpack_restore(ours) == list(range(count))


@pytest.mark.parametrize("size", [0, 1, 31, 32, 255, 256, 65535, 65536])
@pytest.mark.parametrize("unit", ["s", "\u00e9", b"b"], ids=["ascii", "two bytes each", "bytes"])
def test_text_and_bytes_sizes_agree(unit: str | bytes, size: int) -> None:
    value = unit * size
    assert_bytes_agree({"value": value})
    if isinstance(value, str):
        assert_bytes_agree({value: 1})


@pytest.mark.sampled(5)
@pytest.mark.parametrize("size", [*range(6), *range(238, 248), 255, 256, 257, *range(65510, 65540)])
def test_ext_sizes_agree(size: int) -> None:
    assert_bytes_agree(np.arange(size, dtype=np.uint8))


@pytest.mark.parametrize(
    "shape", [(), (1,), (127,), (128,), (256, 1), (65536, 0), (2**32, 0), (1,) * 15, (1,) * 16, (1,) * 32]
)
def test_shape_forms_agree(shape: tuple[int, ...]) -> None:
    assert_bytes_agree(np.zeros(shape, np.int8))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", NUMPY_DTYPES + EXTENDED_DTYPES)
def test_every_dtype_agrees(dtype: str) -> None:
    @quick(6)
    @given(arrays([dtype]))
    def check(array: np.ndarray) -> None:
        assert_agree({"array": array, "scalar": array.reshape(-1)[0] if array.size else None})

    check()


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    "value",
    [
        side * 2**power + step
        for power in (0, 5, 7, 8, 15, 16, 31, 32, 63, 64)
        for side in (1, -1)
        for step in (-1, 0, 1)
    ],
)
def test_integer_forms_agree(value: int) -> None:
    if -(2**63) <= value < 2**64:
        assert_bytes_agree([value])


def assert_bytes_agree(tree: Any) -> None:
    """As assert_agree, for trees that are too large to compare item by item."""
    data = flax.serialization.to_bytes(tree)
    assert treering.serialization.to_bytes(tree) == data
    assert_same(treering.serialization.msgpack_restore(data), flax.serialization.msgpack_restore(data))
    got = treering.serialization.from_bytes(tree, data)
    assert type(got) is type(tree)
    assert_same(got, tree)


# ---------------------------------------------------------------------------------------------------------- real states


def params() -> dict[str, Any]:
    kernel = np.arange(6, dtype=np.float32).reshape(2, 3) / 8
    return {"dense": {"kernel": jnp.asarray(kernel), "bias": jnp.zeros((3,), jnp.bfloat16)}, "scale": jnp.float32(2)}


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw with a schedule": lambda: optax.adamw(optax.cosine_decay_schedule(1e-3, 10)),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
    "masked": lambda: optax.masked(optax.adam(1e-3), {"dense": True, "scale": False}),
    "partitioned": lambda: optax.partition(
        {"a": optax.adam(1e-3), "b": optax.sgd(1e-3)}, {"dense": {"kernel": "a", "bias": "b"}, "scale": "b"}
    ),
    "many steps": lambda: optax.MultiSteps(optax.adam(1e-3), 2),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    "finite": lambda: optax.apply_if_finite(optax.lion(1e-3), 3),
    "adafactor": lambda: optax.adafactor(1e-3),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_states_agree(name: str) -> None:
    assert_agree(OPTIMIZERS[name]().init(params()))


def test_linen_train_state_agrees() -> None:
    model = nn.Dense(3)
    variables = model.init(jax.random.PRNGKey(0), jnp.ones((1, 2)))
    state = train_state.TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optax.adam(1e-3))
    assert_agree(state)
    assert_agree(state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params)))


def test_partitioned_variables_agree() -> None:
    model = nn.Dense(3, kernel_init=nn.with_partitioning(nn.initializers.ones, ("in", None)))
    assert_agree(model.init(jax.random.PRNGKey(0), jnp.ones((1, 2))))


@pytest.mark.parametrize(
    "tree",
    [
        freeze({"a": {1: {2: np.float32(3)}}}),
        {3: {4: "int keys"}, 10: 1, 9: 2},
        {"": {"": 1}, "a/b.c": 2, "~": 3},
        [Pair([1], {"z": None}), Point((), {}), optax.EmptyState()],
        jax.tree_util.Partial(max, 1, key=np.arange(2)),
        msgpack.Timestamp(5, 7),
        collections.namedtuple("Bare", [])(),  # noqa: PYI024
        bytearray(b"ab"),
        np.float64(1.5),
        True,
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_odd_trees_agree(tree: Any) -> None:
    data = flax.serialization.to_bytes(tree)
    assert treering.serialization.to_bytes(tree) == data
    assert_same(
        treering.serialization.from_bytes(tree, data), flax.serialization.from_bytes(tree, data), restored=False
    )


@quick(20)
@given(st.lists(st.one_of(jax_arrays(), numpy_scalars()), max_size=3))
def test_any_buffer_type_is_read(tree: list[Any]) -> None:
    data = flax.serialization.to_bytes(tree)
    for given_as in (bytes(data), bytearray(data), memoryview(data), np.frombuffer(data, np.uint8).data):
        assert_same(treering.serialization.from_bytes(tree, given_as), tree)
