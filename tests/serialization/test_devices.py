"""to_jax= and shardings=: arrays on devices, aligned memory, nothing cast; spread-out arrays when saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from tests.trees import assert_same
from treering import serialization
from treering.errors import TreeringError

TREE: dict[str, Any] = {
    "b": np.arange(16, dtype=np.float32).reshape(8, 2),
    "a": {"x": np.arange(8).astype(ml_dtypes.bfloat16), "n": 3, "none": None, "text": "t"},
}


@pytest.fixture
def mesh() -> Mesh:
    devices = jax.devices()
    assert len(devices) == 8, "tests/conftest.py asks for eight devices"
    return Mesh(np.array(devices).reshape(4, 2), ("x", "y"))


def ways_in(tmp_path: Path) -> list[Any]:
    """Every function that takes to_jax and shardings, bound to the bytes of TREE."""
    path = tmp_path / "state.msgpack"
    serialization.save_to_file(TREE, path)
    data = path.read_bytes()
    packed = serialization.compress_bytes(data)
    return [
        lambda target, **kw: serialization.from_bytes(target, data, **kw),
        lambda target, **kw: serialization.load_from_file(target, path, **kw),
        lambda target, **kw: serialization.load_from_file(target, path, mapped=True, **kw),
        lambda target, **kw: serialization.from_compressed_bytes(target, packed, **kw),
    ]


@pytest.mark.parametrize("target", [TREE, None], ids=["target", "no target"])
def test_to_jax_puts_every_array_on_the_default_device_and_leaves_the_rest(target: Any, tmp_path: Path) -> None:
    for load in ways_in(tmp_path):
        restored = load(target, to_jax=True)
        assert isinstance(restored["b"], jax.Array)
        assert restored["b"].devices() == {jax.devices()[0]}
        assert restored["a"]["x"].dtype == jnp.bfloat16
        assert_same(jax.device_get(restored["b"]), TREE["b"])
        assert (restored["a"]["n"], restored["a"]["none"], restored["a"]["text"]) == (3, None, "t")
        assert list(restored) == ["b", "a"]


def test_one_sharding_is_for_every_array(mesh: Mesh, tmp_path: Path) -> None:
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    for load in ways_in(tmp_path):
        restored = load(TREE, shardings=sharding)
        assert restored["b"].sharding == sharding
        assert restored["a"]["x"].sharding == sharding
        assert_same(jax.device_get(restored["b"]), TREE["b"])
        assert restored["a"]["n"] == 3


def test_a_prefix_tree_of_shardings(mesh: Mesh, tmp_path: Path) -> None:
    rows, single = NamedSharding(mesh, PartitionSpec("x", "y")), SingleDeviceSharding(jax.devices()[3])
    for load in ways_in(tmp_path):
        restored = load(TREE, shardings={"b": rows, "a": single})
        assert restored["b"].sharding == rows
        assert restored["a"]["x"].devices() == {jax.devices()[3]}


def test_none_in_shardings_is_the_default_device(mesh: Mesh) -> None:
    data = serialization.to_bytes(TREE)
    restored = serialization.from_bytes(TREE, data, shardings={"b": NamedSharding(mesh, PartitionSpec()), "a": None})
    assert isinstance(restored["a"]["x"], jax.Array)
    assert len(restored["b"].devices()) == 8


def test_shardings_made_from_the_targets_arrays(mesh: Mesh) -> None:
    placed = {
        "w": jax.device_put(np.ones((8, 2), np.float32), NamedSharding(mesh, PartitionSpec("x", "y"))),
        "b": jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, PartitionSpec("y"))),
    }
    shardings = jax.tree.map(lambda leaf: leaf.sharding, placed)
    restored = serialization.from_bytes(placed, serialization.to_bytes(placed), shardings=shardings)
    assert jax.tree.map(lambda leaf: leaf.sharding, restored) == shardings
    assert_same(restored, placed, restored=False)


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64", "complex128"])
def test_a_64_bit_array_without_x64_is_refused_never_cast(dtype: str) -> None:
    data = serialization.to_bytes({"k": np.ones(2, dtype)})
    with pytest.raises(TreeringError) as caught:
        serialization.from_bytes(None, data, to_jax=True)
    assert isinstance(caught.value, TypeError)
    assert caught.value.path == ("k",)
    assert dtype in str(caught.value)


def test_a_64_bit_array_with_x64_is_placed() -> None:
    data = serialization.to_bytes({"k": np.array([2**40 + 1])})
    with jax.enable_x64(True):
        restored = serialization.from_bytes(None, data, to_jax=True)
        assert_same(jax.device_get(restored), {"k": np.array([2**40 + 1])})


@pytest.mark.parametrize("dtype", ["datetime64[s]", "timedelta64[D]"])
def test_a_dtype_that_jax_does_not_have_is_refused(dtype: str) -> None:
    data = serialization.to_bytes({"k": np.zeros(2, dtype)})
    with pytest.raises(TreeringError) as caught:
        serialization.from_bytes(None, data, to_jax=True)
    assert caught.value.path == ("k",)


def test_a_sharding_that_does_not_divide_is_an_error_with_the_path(mesh: Mesh) -> None:
    data = serialization.to_bytes({"k": np.ones(7, np.float32)})
    with pytest.raises(ValueError, match="7") as caught:
        serialization.from_bytes(None, data, shardings=NamedSharding(mesh, PartitionSpec("x")))
    assert isinstance(caught.value, TreeringError)
    assert caught.value.path == ("k",)


@pytest.mark.parametrize("shardings", [{"other": None}, {"b": None}, [None, None], {"b": "text", "a": None}], ids=str)
def test_shardings_that_do_not_fit_the_tree_are_an_error_of_ours(shardings: Any) -> None:
    with pytest.raises(TreeringError):
        serialization.from_bytes(TREE, serialization.to_bytes(TREE), shardings=shardings)


@pytest.mark.parametrize("key_data", [np.arange(2, dtype=np.uint32)], ids=["threefry"])
def test_typed_keys_stay_keys(key_data: np.ndarray) -> None:
    key = jax.random.wrap_key_data(jnp.asarray(key_data))
    restored = serialization.from_bytes({"k": key}, serialization.to_bytes({"k": key}), to_jax=True)
    assert_same(restored, {"k": key}, restored=False)


# ------------------------------------------------------------------------------------------------------------ alignment


def test_arrays_loaded_from_a_file_are_aligned_for_jax(tmp_path: Path) -> None:
    tree = {f"n{size}": np.arange(size, dtype=np.float32) for size in (1, 17, 100, 5000, 300_000)}
    serialization.save_to_file(tree, tmp_path / "state")
    for array in serialization.load_from_file(None, tmp_path / "state").values():
        assert array.ctypes.data % 64 == 0
        assert not array.flags.writeable


def test_an_aligned_array_is_aliased_not_copied(tmp_path: Path) -> None:
    tree = {"w": np.arange(300_000, dtype=np.float32)}
    serialization.save_to_file(tree, tmp_path / "state")
    array = serialization.load_from_file(None, tmp_path / "state")["w"]
    placed = jax.device_put(array)
    if placed.unsafe_buffer_pointer() != array.ctypes.data:
        # this jax copies on its own; there is nothing to win by alignment
        return
    loaded: Any = serialization.load_from_file(tree, tmp_path / "state", to_jax=True)["w"]
    assert loaded.unsafe_buffer_pointer() % 64 == 0
    assert_same(jax.device_get(loaded), tree["w"])


def test_jax_results_do_not_change_with_the_callers_buffer() -> None:
    tree = {"w": np.arange(4096, dtype=np.float32)}
    given = bytearray(serialization.to_bytes(tree))
    restored = serialization.from_bytes(None, given, to_jax=True)
    plain = serialization.from_bytes(None, given)
    given[-100:] = bytes(100)
    assert_same(jax.device_get(restored), tree)
    assert_same(plain, tree)


def test_placed_arrays_outlive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "state"
    serialization.save_to_file(TREE, path)
    for mapped in (False, True):
        restored = serialization.load_from_file(TREE, path, to_jax=True, mapped=mapped)
        serialization.save_to_file({"b": np.zeros((8, 2), np.float32)}, path)
        assert_same(jax.device_get(restored["b"]), TREE["b"])
        path.unlink()
        assert_same(jax.device_get(restored["b"]), TREE["b"])
        serialization.save_to_file(TREE, path)


def test_a_computation_on_placed_arrays(tmp_path: Path) -> None:
    serialization.save_to_file(TREE, tmp_path / "state")
    restored = serialization.load_from_file(TREE, tmp_path / "state", to_jax=True)
    assert float(jax.jit(jnp.sum)(restored["b"])) == TREE["b"].sum()
    donated = jax.jit(lambda x: x + 1, donate_argnums=0)(restored["b"])
    assert_same(np.asarray(donated), TREE["b"] + 1)
    assert_same(serialization.load_from_file(None, tmp_path / "state")["b"], TREE["b"])


# --------------------------------------------------------------------------------------------------------------- saving


@pytest.mark.parametrize(
    "spec",
    [PartitionSpec(), PartitionSpec("x"), PartitionSpec(None, "y"), PartitionSpec("x", "y"), PartitionSpec(("x", "y"))],
)
def test_a_sharded_array_is_saved_whole(spec: PartitionSpec, mesh: Mesh, tmp_path: Path) -> None:
    array = np.arange(16, dtype=np.float32).reshape(8, 2)
    placed = {"w": jax.device_put(array, NamedSharding(mesh, spec))}
    data = serialization.to_bytes(placed)
    assert data == serialization.to_bytes({"w": array})
    serialization.save_to_file(placed, tmp_path / "state")
    assert (tmp_path / "state").read_bytes() == data


def test_a_sharded_array_of_keys_is_saved_whole(mesh: Mesh) -> None:
    keys = jax.random.split(jax.random.key(0), 8)
    placed = jax.device_put(keys, NamedSharding(mesh, PartitionSpec("x")))
    assert serialization.to_bytes(placed) == serialization.to_bytes(keys)
