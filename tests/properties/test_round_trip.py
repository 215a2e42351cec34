"""Every tree goes round bit for bit, structure included, by every way out and in."""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.strategies import (
    EXTENDED_DTYPES,
    JAX_DTYPES,
    NUMPY_DTYPES,
    Box,
    Chexed,
    Layer,
    Pair,
    Plain,
    Point,
    arrays,
    jax_arrays,
    leaves,
    numpy_scalars,
    quick,
    trees,
    typed_keys,
)
from tests.trees import assert_same, assert_same_structure, fingerprint
from treering import serialization
from treering.errors import TreeringError


def assert_comes_back(restored: Any, tree: Any) -> None:
    assert_same(restored, tree)
    assert_same_structure(restored, tree)


@quick(150)
@given(trees())
def test_through_bytes(tree: Any) -> None:
    before = fingerprint(tree)
    data = serialization.to_bytes(tree)
    assert type(data) is bytes
    assert_comes_back(serialization.from_bytes(tree, data), tree)
    assert serialization.to_bytes(tree) == data
    assert fingerprint(tree) == before


@quick(60)
@given(trees(leaves(keys=True)))
def test_through_a_state_dict_alone(tree: Any) -> None:
    state = serialization.to_state_dict(tree)
    before = fingerprint(state)
    assert_same(serialization.from_state_dict(tree, state), tree, restored=False)
    assert fingerprint(state) == before


@quick(60)
@given(trees())
def test_without_a_target_the_state_dict_writes_the_same_bytes_again(tree: Any) -> None:
    data = serialization.to_bytes(tree)
    state = serialization.from_bytes(None, data)
    assert_same(state, serialization.msgpack_restore(data))
    assert serialization.to_bytes(state) == data


@quick(60)
@given(trees(), st.booleans())
def test_through_a_file(tree: Any, mapped: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.msgpack"
        serialization.save_to_file(tree, path)
        assert path.read_bytes() == serialization.to_bytes(tree)
        assert_comes_back(serialization.load_from_file(tree, path, mapped=mapped), tree)
        assert [found.name for found in Path(folder).iterdir()] == ["state.msgpack"]


@quick(30)
@given(trees())
def test_through_an_open_file(tree: Any) -> None:
    stream = io.BytesIO()
    serialization.save_to_file(tree, stream)
    assert stream.getvalue() == serialization.to_bytes(tree)
    stream.seek(0)
    assert_comes_back(serialization.load_from_file(tree, stream), tree)


@quick(40)
@given(trees())
def test_through_gzip(tree: Any) -> None:
    packed = serialization.to_compressed_bytes(tree)
    assert serialization.decompress_bytes(packed) == serialization.to_bytes(tree)
    assert serialization.to_compressed_bytes(tree) == packed
    assert_comes_back(serialization.from_compressed_bytes(tree, packed), tree)


@quick(50)
@given(trees(arrays(big_endian=True, max_side=9)), st.integers(1, 80))
def test_through_chunks(tree: Any, size: int) -> None:
    whole = serialization.MAX_CHUNK_SIZE
    serialization.MAX_CHUNK_SIZE = size
    try:
        data = serialization.to_bytes(tree)
    finally:
        serialization.MAX_CHUNK_SIZE = whole
    assert_comes_back(serialization.from_bytes(tree, data), tree)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.msgpack"
        path.write_bytes(data)
        for mapped in (False, True):
            assert_comes_back(serialization.load_from_file(tree, path, mapped=mapped), tree)


@quick(40)
@given(trees(st.one_of(jax_arrays(), typed_keys(), st.integers(-9, 9), st.text(max_size=3))))
def test_jax_arrays_come_back_as_jax_arrays_on_request(tree: Any) -> None:
    data = serialization.to_bytes(tree)
    restored = serialization.from_bytes(tree, data, to_jax=True)
    assert_same(restored, tree, restored=False)
    assert_same_structure(restored, tree)


@quick(60)
@given(trees())
def test_strict_accepts_the_tree_itself(tree: Any) -> None:
    assert_comes_back(serialization.from_bytes(tree, serialization.to_bytes(tree), strict=True), tree)


@quick(100)
@given(
    st.one_of(trees(max_leaves=4), leaves()),
    st.one_of(trees(max_leaves=4), st.sampled_from([[], (), {}, [0], Pair(0, 1), Plain(0, 1), Box(0, 1)])),
    st.booleans(),
)
def test_into_the_structure_of_another_tree_it_is_a_tree_or_an_error_of_ours(
    tree: Any, other: Any, to_jax: bool
) -> None:
    with contextlib.suppress(TreeringError):
        serialization.from_bytes(other, serialization.to_bytes(tree), to_jax=to_jax)


@quick(40)
@given(trees(arrays(NUMPY_DTYPES + EXTENDED_DTYPES)))
def test_an_abstract_target_is_enough(tree: Any) -> None:
    def abstract(leaf: Any) -> Any:
        return (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            if isinstance(leaf, np.ndarray) and leaf.dtype.name in JAX_DTYPES
            else leaf
        )

    target = jax.tree.map(abstract, tree)
    restored = serialization.from_bytes(target, serialization.to_bytes(tree), strict=True)
    assert_comes_back(restored, jax.tree.map(lambda leaf: leaf, tree))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", NUMPY_DTYPES + EXTENDED_DTYPES)
def test_every_dtype(dtype: str) -> None:
    @quick(5)
    @given(arrays([dtype], big_endian=True))
    def check(array: np.ndarray) -> None:
        assert_comes_back(serialization.from_bytes(array, serialization.to_bytes(array)), array)

    check()


@quick(60)
@given(st.one_of(numpy_scalars(), typed_keys(), jax_arrays()))
def test_every_leaf_kind_alone(leaf: Any) -> None:
    assert_comes_back(serialization.from_bytes(leaf, serialization.to_bytes(leaf)), leaf)


def _box(inner: Any) -> Any:
    return Box(inner, None)


WRAPPERS = {
    "dict": lambda inner: {"a": inner},
    "dict with int keys": lambda inner: {1: inner},
    "list": lambda inner: [inner],
    "tuple": lambda inner: (inner, 1),
    "namedtuple": lambda inner: Pair(1, inner),
    "struct": lambda inner: Point(inner, 2),
    "registered dataclass": lambda inner: Plain(inner, 3),
    "chex": lambda inner: Chexed(alpha=inner, beta=0),
    "equinox": lambda inner: Layer(inner, abs, 1),
    "old-style node": _box,
    "Partial": lambda inner: jax.tree_util.Partial(max, inner),
}
UNWRAPPERS = {
    "dict": lambda outer: outer["a"],
    "dict with int keys": lambda outer: outer[1],
    "list": lambda outer: outer[0],
    "tuple": lambda outer: outer[0],
    "namedtuple": lambda outer: outer.second,
    "struct": lambda outer: outer.x,
    "registered dataclass": lambda outer: outer.weight,
    "chex": lambda outer: outer.alpha,
    "equinox": lambda outer: outer.weight,
    "old-style node": lambda outer: outer.left,
    "Partial": lambda outer: outer.args[0],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_deep_chain_of_one_kind(kind: str) -> None:
    # equinox looks through the whole tree each time a module is made
    depth = 300 if kind == "equinox" else 3000
    tree: Any = 7
    for _ in range(depth):
        tree = WRAPPERS[kind](tree)
    restored = serialization.from_bytes(tree, serialization.to_bytes(tree))
    for _ in range(depth):
        assert type(restored) is type(tree)
        restored = UNWRAPPERS[kind](restored)
    assert restored == 7


@quick(10)
@given(st.lists(st.sampled_from(sorted(WRAPPERS)), min_size=1, max_size=200))
def test_a_deep_chain_of_mixed_kinds(kinds: list[str]) -> None:
    tree: Any = 7
    for kind in kinds:
        tree = WRAPPERS[kind](tree)
    restored = serialization.from_bytes(tree, serialization.to_bytes(tree))
    for kind in reversed(kinds):
        restored = UNWRAPPERS[kind](restored)
    assert restored == 7
