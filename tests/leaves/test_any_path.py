"""`treering.load`, `open`, `inspect`, `verify` and `diff` on leaves directories, as on every other path."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import treering as tr
from tests import meshes
from tests.leaves.saved import put
from torture.scenes import fingerprint
from treering.errors import BusyError, CorruptError, MismatchError
from treering.leaves import tree_serialize_leaves

GOLDEN = Path(__file__).parents[1] / "compat" / "golden" / "eformer"
ZSTD = {"id": "zstd", "level": 1}
W = np.arange(64, dtype=np.float32).reshape(8, 8)


def model() -> dict[str, Any]:
    return {
        "layers": [{"w": put(W, PartitionSpec("x"), (4,))}, {"w": put(W * 2, PartitionSpec(None, "x"), (2,))}],
        "b": jnp.arange(3, dtype=jnp.bfloat16),
        "key": jax.random.key(3),
        "act": None,
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "leaves"
    tree_serialize_leaves(path, model(), prefix="model")
    tree_serialize_leaves(path, {"w": W, "step": 7}, prefix="ema", compressor=ZSTD)
    tree_serialize_leaves(path, {"note": "x" * 5000, "lr": np.float64(0.5)})
    return path


def same(found: Any, wanted: Any) -> bool:
    """Compare two trees, typed keys by their data."""

    def plain(leaf: Any) -> Any:
        typed = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if typed else leaf) if hasattr(leaf, "dtype") else leaf

    sides = [jax.tree.map(plain, tree) for tree in (found, wanted)]
    return fingerprint(sides[0]) == fingerprint(sides[1])


def test_prefixes_are_branches_of_one_tree(saved: Path) -> None:
    found = tr.load(saved)
    assert set(found) == {"model", "ema", "note", "lr"}
    assert same(found["model"], model())
    assert isinstance(found["model"]["layers"], list)
    assert (found["ema"]["step"], found["note"], found["lr"]) == (7, "x" * 5000, 0.5)
    np.testing.assert_array_equal(found["ema"]["w"], W)
    assert isinstance(found["ema"]["w"], np.ndarray)
    assert same(tr.load(str(saved)), found)


def test_one_tree_without_a_prefix_is_the_tree(tmp_path: Path) -> None:
    for number, tree in enumerate([model(), [1, W], W, 3, {}, ()]):
        path = tmp_path / str(number)
        tree_serialize_leaves(path, tree)
        assert same(tr.load(path), tree)
        assert tr.verify(path)


def test_parts(saved: Path) -> None:
    assert same(tr.load(saved, at="model"), model())
    assert same(tr.load(saved, at="model/layers/0"), model()["layers"][0])
    assert list(tr.load(saved, only="ema/**")) == ["ema"]
    assert tr.load(saved, only=["**/step", "lr"]) == {"ema": {"step": 7}, "lr": 0.5}
    with pytest.raises(MismatchError, match="modle"):
        tr.load(saved, at="modle")


def test_like(saved: Path) -> None:
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), model())
    assert same(tr.load(saved, like, at="model"), model())
    like["b"] = jax.ShapeDtypeStruct((4,), jnp.bfloat16)
    with pytest.raises(MismatchError, match=r"b: wanted bfloat16\[4\], found bfloat16\[3\]") as caught:
        tr.load(saved, like | {"extra": 1}, at="model")
    assert len(caught.value.differences) == 2
    renamed: dict[str, Any] = {"m": W, "step": 0}
    found = tr.load(saved, renamed, at="ema", key_map={"m": "w"})
    assert (found["m"].tolist(), found["step"]) == (W.tolist(), 7)


def test_shardings(saved: Path) -> None:
    mesh = meshes.grid(2, 4, axes=("a", "b"))
    found = tr.load(saved, at="model/layers", shardings=PartitionSpec("a", "b"), mesh=mesh)
    for number, layer in enumerate(found):
        assert layer["w"].sharding.spec == PartitionSpec("a", "b")
        np.testing.assert_array_equal(layer["w"], W * (number + 1))
    packed = tr.load(saved, at="ema/w", shardings=PartitionSpec("b"), mesh=mesh)
    assert packed.addressable_shards[0].data.shape == (2, 8)
    np.testing.assert_array_equal(packed, W)


def test_mapped(saved: Path, tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path / "large", {"w": np.arange(1 << 18, dtype=np.int32)})
    found = tr.load(tmp_path / "large", mapped=True)["w"]
    assert not found.flags.writeable
    assert found[-1] == (1 << 18) - 1
    assert same(tr.load(saved, mapped=True), tr.load(saved))


def test_open_reads_slices(saved: Path) -> None:
    with tr.open(saved) as ckpt:
        assert ckpt["ema/step"] == 7
        assert ckpt["note"] == "x" * 5000
        view = ckpt["model/layers/1/w"]
        assert (view.shape, view.dtype, view.kind) == ((8, 8), np.float32, "jax")
        np.testing.assert_array_equal(view[2:5, ::3], (W * 2)[2:5, ::3])
        np.testing.assert_array_equal(ckpt["ema/w"][-1], W[-1])
        assert ckpt.metadata == {}
    assert tr.inspect(saved).leaves["model/layers/1/w"].chunks == 2
    assert tr.inspect(saved).leaves["ema/w"].compressor == json.dumps(ZSTD, separators=(",", ":"))


def test_a_save_meanwhile_is_told(saved: Path) -> None:
    with tr.open(saved) as ckpt:
        view = ckpt["ema/w"]
        tree_serialize_leaves(saved, {"w": W[:4]}, prefix="ema")
        with pytest.raises(BusyError, match="saved again"):
            view[...]
        # What was not replaced is read as before.
        np.testing.assert_array_equal(ckpt["model/layers/0/w"][...], W)
    assert tr.load(saved)["ema"]["w"].shape == (4, 8)


def test_diff_across_forms(saved: Path, tmp_path: Path) -> None:
    tree = tr.load(saved)
    tr.save(tmp_path / "ckpt", tree)
    assert not tr.diff(saved, tmp_path / "ckpt", values=True)
    tree["ema"]["w"] = tree["ema"]["w"] + np.eye(8, dtype=np.float32)
    tr.save(tmp_path / "other", tree)
    (found,) = tr.diff(saved, tmp_path / "other", values=True)
    assert (found.key, found.what) == ("ema/w", "values")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["dtypes", "index_v1", "mixed_index", "plain", "prefixed", "sharded_2x4"])
def test_directories_of_another_program(name: str, tmp_path: Path) -> None:
    wanted = np.load(GOLDEN / f"{name}.expected.npz")
    found = tr.load(GOLDEN / name)
    checked = tr.verify(GOLDEN / name)
    assert (checked.ok, checked.checked, checked.leaves) == (True, False, len(jax.tree.leaves(found)))
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(found)]
    assert sum(array.size for array in arrays) == sum(wanted[key].size for key in wanted.files)
    tr.save(tmp_path / "ckpt", found)
    assert not tr.diff(GOLDEN / name, tmp_path / "ckpt", values=True)


def test_64_bits_of_another_program_stay_64_bits() -> None:
    wanted = np.load(GOLDEN / "x64.expected.npz")
    with tr.open(GOLDEN / "x64") as found:
        assert {found[key].dtype.itemsize for key in found} >= {8}
        for key in found:
            np.testing.assert_array_equal(found[key][...], wanted[key])
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(tr.load(GOLDEN / "x64")) if leaf.itemsize == 8)


def test_damage_in_one_prefix_leaves_the_others(saved: Path) -> None:
    (saved / "model" / "b" / "0").write_bytes(bytes(6))
    with pytest.raises(CorruptError, match="model/b"):
        tr.load(saved)
    assert tr.load(saved, at="ema/step") == 7
    assert [finding.key for finding in tr.verify(saved).findings] == ["model/b"]


def test_a_checkpoint_in_the_same_folder_goes_first(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path, {"w": W})
    shutil.rmtree(tmp_path / "w")
    tr.save(tmp_path / "other", {"x": 1})
    for file in (tmp_path / "other").iterdir():
        file.rename(tmp_path / file.name)
    assert tr.load(tmp_path) == {"x": 1}
    assert tr.inspect(tmp_path).form == "checkpoint"
