"""save and load of one file: what each form holds, what it refuses by name, and that all doors know it."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import serialization as flax_serialization
from jax.sharding import NamedSharding, PartitionSpec

import treering
from tests import meshes
from tests.trees import Pair, assert_same
from treering import serialization
from treering.errors import CorruptError, MismatchError, TreeringError, UnsupportedError

ARRAYS: dict[str, Any] = {
    "b": {"kernel": np.arange(12, dtype="f4").reshape(3, 4), "bias": np.zeros(4, ml_dtypes.bfloat16)},
    "a": [np.arange(3), np.ones((0, 2), "u1")],
    "t": (np.array(True), np.arange(70_000)),
}
JAX = {"w": jnp.arange(6.0).reshape(2, 3), "h": jnp.ones(3, jnp.bfloat16)}


def test_arrays_in_each_form(tmp_path: Path) -> None:
    for name in ("c.safetensors", "c.msgpack"):
        treering.save(tmp_path / name, ARRAYS)
        assert (tmp_path / name).is_file()
        assert_same(treering.load(tmp_path / name, ARRAYS), ARRAYS)
        with treering.open(tmp_path / name) as ckpt:
            assert set(ckpt) == {"b/kernel", "b/bias", "a/0", "a/1", "t/0", "t/1"}
            assert_same(ckpt["t/1"][5:8], np.arange(5, 8))
            assert_same(ckpt["b/kernel"][:, 1], ARRAYS["b"]["kernel"][:, 1])
    assert_same(treering.load(tmp_path / "c.safetensors"), ARRAYS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.msgpack", "c.safetensors"]


@pytest.mark.parametrize("name", ["c.safetensors", "c.msgpack"])
def test_a_save_that_fails_leaves_no_folders(tmp_path: Path, name: str) -> None:
    def fail(done: int, total: int) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        treering.save(tmp_path / "new" / "folders" / name, ARRAYS, progress=fail)
    assert not list(tmp_path.iterdir())


def test_kinds_in_a_safetensors_file(tmp_path: Path) -> None:
    tree = JAX | {"n": np.arange(3), "s": np.float32(2)}
    treering.save(tmp_path / "c.safetensors", tree)
    assert_same(treering.load(tmp_path / "c.safetensors"), tree, restored=False)


def test_kinds_of_a_msgpack_file_come_from_like(tmp_path: Path) -> None:
    treering.save(tmp_path / "c.msgpack", JAX)
    found = treering.load(tmp_path / "c.msgpack")
    assert_same(found, JAX)
    assert all(leaf.flags.writeable for leaf in found.values())
    assert_same(treering.load(tmp_path / "c.msgpack", JAX), JAX, restored=False)


def test_a_msgpack_without_like_is_its_state_dict(tmp_path: Path) -> None:
    tree = {"p": Pair(1, [2, (3.5, "x")]), "n": None, "b": b"y", "s": np.float32(1), "c": 1 + 2j}
    treering.save(tmp_path / "c.msgpack", tree)
    assert_same(treering.load(tmp_path / "c.msgpack"), serialization.to_state_dict(tree))
    assert_same(treering.load(tmp_path / "c.msgpack", tree), tree)


def test_numpy_bools_are_no_bools_of_python(tmp_path: Path) -> None:
    tree = {"done": np.bool_(True), "also": False, "w": np.ones(2)}
    treering.save(tmp_path / "c.msgpack", tree)
    (tmp_path / "c.gz").write_bytes(gzip.compress((tmp_path / "c.msgpack").read_bytes()))
    for name in ("c.msgpack", "c.gz"):
        assert_same(treering.load(tmp_path / name), tree)
        assert_same(treering.load(tmp_path / name, tree), tree)
        found = treering.load(tmp_path / name, {"done": False, "also": False, "w": tree["w"]}, cast=True)
        assert found["done"] is True
        treering.convert(tmp_path / name, tmp_path / f"{name}.folder")
        assert_same(treering.load(tmp_path / f"{name}.folder"), tree)
        with treering.open(tmp_path / name) as opened:
            assert opened["done"].dtype == np.bool_


def test_flax_reads_ours_and_we_read_flax(tmp_path: Path) -> None:
    tree = {"w": np.arange(5), "j": jnp.ones(2), "n": {"x": 1.5}}
    treering.save(tmp_path / "c.msgpack", tree)
    data = (tmp_path / "c.msgpack").read_bytes()
    assert data == flax_serialization.to_bytes(tree)
    (tmp_path / "flax").write_bytes(flax_serialization.to_bytes(tree))
    assert_same(treering.load(tmp_path / "flax", tree), tree, restored=False)
    (tmp_path / "flax.gz").write_bytes(gzip.compress(data))
    assert_same(treering.load(tmp_path / "flax.gz", tree), tree, restored=False)


@pytest.mark.parametrize("mapped", [False, True])
def test_typed_keys_in_files_that_know_none(mapped: bool, tmp_path: Path) -> None:
    tree = {"k": jax.random.key(5, impl="rbg"), "w": np.ones(2)}
    treering.save(tmp_path / "c.msgpack", tree)
    assert_same(treering.load(tmp_path / "c.msgpack", tree, mapped=mapped), tree, restored=False)
    other = {"k": jax.random.key(5), "w": np.ones(2)}
    with pytest.raises(MismatchError, match="k:"):
        treering.load(tmp_path / "c.msgpack", other)


def test_what_safetensors_cannot_hold_is_named(tmp_path: Path) -> None:
    tree = {"w": np.ones(2), "step": 3, "deep": {"name": "x"}, "q": np.ones(2, ml_dtypes.int4)}
    with pytest.raises(UnsupportedError) as caught:
        treering.save(tmp_path / "c.safetensors", tree)
    for key in ("step", "deep/name"):
        assert key in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_what_msgpack_cannot_hold_is_named(tmp_path: Path) -> None:
    for tree in ({"a": {"f": jax.nn.relu}}, {"a": {"f": {1, 2}}}, {"a": {"f": 2**70}}):
        with pytest.raises(TreeringError, match="f"):
            treering.save(tmp_path / "c.msgpack", tree)
    with pytest.raises(UnsupportedError, match="metadata"):
        treering.save(tmp_path / "c.msgpack", {"w": 1}, metadata={"a": 1})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["c.safetensors", "c.msgpack"])
def test_shardings_for_single_files(name: str, tmp_path: Path) -> None:
    mesh = meshes.grid(4, 2)
    array = np.arange(64, dtype="f4").reshape(8, 8)
    columns, rows = (NamedSharding(mesh, spec) for spec in (PartitionSpec("y", "x"), PartitionSpec("x")))
    treering.save(tmp_path / name, {"w": jax.device_put(array, columns), "b": jnp.ones(8)})
    for sharding in (rows, columns, jax.sharding.SingleDeviceSharding(jax.devices()[5])):
        found = treering.load(tmp_path / name, at="w", shardings=sharding)
        assert found.sharding == sharding
        assert_same(np.asarray(found), array)
    rules = [("w", PartitionSpec("x", "y")), ("b", PartitionSpec())]
    found = treering.load(tmp_path / name, shardings=rules, mesh=mesh)
    assert found["w"].sharding.spec == PartitionSpec("x", "y")
    assert_same(
        treering.load(tmp_path / name, only="b", mapped=True)["b"],
        jnp.ones(8) if "safe" in name else np.ones(8, "f4"),
        restored=False,
    )


@pytest.mark.parametrize("name", ["c.safetensors", "c.msgpack"])
def test_views_share_nothing(name: str, tmp_path: Path) -> None:
    treering.save(tmp_path / name, {"w": np.arange(100_000), "s": np.arange(4)})
    with treering.open(tmp_path / name) as ckpt:
        for key in ("w", "s"):
            for index in (..., slice(2, 4)):
                first = ckpt[key][index]
                first[...] = -1
                assert ckpt[key][index][0] == (2 if isinstance(index, slice) else 0)
    found = treering.load(tmp_path / name)
    found["w"][:] = 0
    found["s"][:] = 0
    assert_same(treering.load(tmp_path / name)["s"], np.arange(4))


def test_mapped_single_files_are_read_only(tmp_path: Path) -> None:
    for name in ("c.safetensors", "c.msgpack"):
        treering.save(tmp_path / name, {"w": np.arange(100_000), "s": np.arange(4)})
        found = treering.load(tmp_path / name, mapped=True)
        assert not any(leaf.flags.writeable for leaf in found.values())
        treering.save(tmp_path / name, {"w": np.zeros(1)}, overwrite=True)
        assert_same(found, {"w": np.arange(100_000), "s": np.arange(4)})


def test_a_renamed_file_is_told_by_its_content(tmp_path: Path) -> None:
    treering.save(tmp_path / "c.safetensors", ARRAYS)
    treering.save(tmp_path / "c.msgpack", ARRAYS)
    for before, after in (("c.safetensors", "one.bin"), ("c.msgpack", "two")):
        shutil.move(tmp_path / before, tmp_path / after)
        assert_same(treering.load(tmp_path / after, ARRAYS), ARRAYS)


@pytest.mark.parametrize("mapped", [False, True])
def test_damage_in_a_safetensors_file_of_ours(mapped: bool, tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    treering.save(path, {"w": np.arange(30_000), "s": np.arange(4)}, metadata={"a": 1})
    content = path.read_bytes()
    header = len(content) - 30_004 * 8
    for at, key in ((header, "'w'"), (header + 123_456, "'w'"), (len(content) - 1, "'s'")):
        damaged = bytearray(content)
        damaged[at] ^= 16
        path.write_bytes(damaged)
        with pytest.raises(CorruptError, match=key):
            treering.load(path, mapped=mapped)
    for end in (-1, header, 50):
        path.write_bytes(content[:end])
        with pytest.raises(CorruptError):
            treering.load(path, mapped=mapped)
    wrong = []
    for at in range(0, header, 17):
        damaged = bytearray(content)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        try:
            found = treering.load(path, mapped=mapped)
        except TreeringError:
            continue
        if not (found["w"].tolist() == list(range(30_000)) and found["s"].tolist() == [0, 1, 2, 3]):
            wrong.append(at)
    assert wrong == [], "a changed header gave other values, and nothing was said"
