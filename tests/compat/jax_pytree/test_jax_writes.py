"""What jax's pytree_serialization writes is read bit for bit, and as jax itself reads it."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.array_serialization import pytree_serialization
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import treering
from tests.compat.jax_pytree.all_nodes import DTYPES, Layer, all_nodes, register

pytestmark = pytest.mark.slow
register()


def _array(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    items = np.random.default_rng(seed).integers(0, 2, shape)
    return jnp.asarray(items.astype(getattr(ml_dtypes, dtype, dtype)))


_ARRAYS = st.builds(
    _array, st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(DTYPES), st.integers(0, 99)
)
_NAMES = st.text("aä/~.*0", max_size=3)
_TREES = st.recursive(
    st.one_of(_ARRAYS, st.none()),
    lambda inner: st.one_of(
        st.dictionaries(_NAMES, inner, max_size=3),
        st.dictionaries(_NAMES, inner, max_size=3).map(OrderedDict),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=8,
)


def _bits(tree: Any) -> Any:
    def bits(leaf: Any) -> Any:
        array = np.asarray(leaf)
        return leaf if leaf is None else (array.dtype.name, array.shape, array.tobytes())

    return jax.tree.map(bits, tree, is_leaf=lambda leaf: leaf is None)


def test_any_tree(tmp_path_factory: pytest.TempPathFactory) -> None:
    @settings(max_examples=50, deadline=None)
    @given(_TREES)
    def check(tree: Any) -> None:
        place = tmp_path_factory.mktemp("jax") / "tree"
        pytree_serialization.save(tree, place)
        assert _bits(treering.load(place)) == _bits(tree)
        assert _bits(treering.load(place, like=tree)) == _bits(tree)

    check()


def test_every_kind_of_node(tmp_path: Path) -> None:
    wanted = all_nodes()
    pytree_serialization.save(wanted, tmp_path / "tree")
    found = treering.load(tmp_path / "tree")
    layer, stand_in = wanted.pop("layer"), found.pop("layer")
    moments, named = wanted.pop("moments"), found.pop("moments")
    assert isinstance(layer, Layer)
    assert isinstance(stand_in, treering.checkpoint.StandIn)
    assert (stand_in.class_name, stand_in.static) == ("golden.Layer", {"aux": layer.activation})
    assert _bits(list(stand_in.values())) == _bits(list(layer.children))
    assert _bits(named._asdict()) == _bits(moments._asdict())
    assert _bits(found) == _bits(wanted)


def test_as_jax_itself_reads_it(tmp_path: Path) -> None:
    tree = {"a": jnp.arange(6.0).reshape(2, 3), "z": [jnp.zeros(3), None]}
    pytree_serialization.save(tree, tmp_path / "tree")
    theirs = pytree_serialization.load(tmp_path / "tree", SingleDeviceSharding(jax.devices()[0]))
    assert _bits(treering.load(tmp_path / "tree")) == _bits(theirs)


@pytest.mark.parametrize("spec", [("x", "y"), ("x",), (None, "y"), ()], ids=str)
def test_sharded_arrays(tmp_path: Path, spec: tuple[str | None, ...]) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    items = np.random.default_rng(0).standard_normal((64, 48)).astype(np.float32)
    pytree_serialization.save({"w": jax.device_put(items, NamedSharding(mesh, PartitionSpec(*spec)))}, tmp_path / "a")
    np.testing.assert_array_equal(treering.load(tmp_path / "a")["w"], items)
    assert treering.verify(tmp_path / "a").ok


def test_specifications_of_tensorstore_that_the_caller_passes(tmp_path: Path) -> None:
    items = np.random.default_rng(0).integers(0, 3, (64, 48)).astype(np.int32)
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "zstd", "configuration": {"level": 3}}]
    grid = {"name": "regular", "configuration": {"chunk_shape": [16, 48]}}
    metadata = {"shape": items.shape, "data_type": "int32", "chunk_grid": grid, "codecs": codecs}
    specs = {"w": {"driver": "zarr3", "metadata": metadata}}
    pytree_serialization.save({"w": jnp.asarray(items)}, tmp_path / "a", ts_specs=specs)
    np.testing.assert_array_equal(treering.load(tmp_path / "a")["w"], items)
