"""What safetensors' own tests of its bindings restore, restored by treering; also after a conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.flax
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec
from safetensors import safe_open

import treering
from tests import meshes
from tests.compat.model_weights import write_folder
from tests.compat.restoring import Prepare, prepare
from tests.trees import assert_same_arrays
from treering.errors import MismatchError, TreeringError

__all__ = ["prepare"]

MESH = meshes.line()
WIDE = np.arange(4 * 6 * 5, dtype=np.float32).reshape(4, 6, 5)


def _save(path: Path, tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> Path:
    safetensors.numpy.save_file(tensors, path, metadata)
    return path


def test_a_file_comes_back_as_the_library_loads_it(prepare: Prepare, tmp_path: Path) -> None:
    tensors = {"a": np.zeros((2, 2)), "b": np.zeros((2, 3), np.uint8), "no items": np.zeros((2, 0)), "one": np.array(7)}
    path = _save(tmp_path / "a.safetensors", tensors)
    found, wanted = treering.load(prepare(path)), safetensors.numpy.load_file(path)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert_same_arrays(found[name], array)


def test_no_tensors_at_all(prepare: Prepare, tmp_path: Path) -> None:
    assert treering.load(prepare(_save(tmp_path / "a.safetensors", {}))) == {}


def test_metadata_is_there_without_reading_a_tensor(prepare: Prepare, tmp_path: Path) -> None:
    path = prepare(_save(tmp_path / "a.safetensors", {"w": WIDE}, {"by": "them", "steps": "7"}))
    with treering.open(path) as opened:
        assert opened.metadata == {"by": "them", "steps": "7"}
        assert (opened["w"].shape, opened["w"].dtype) == (WIDE.shape, WIDE.dtype)
    assert treering.inspect(path).metadata == {"by": "them", "steps": "7"}


SLICES: list[Any] = [
    np.s_[:], np.s_[1], np.s_[1:3], np.s_[:, 2:], np.s_[:, :, 1:2], np.s_[..., 3], np.s_[2:, 1, :4], np.s_[0, 0, 0],
    np.s_[3:3],
]  # fmt: skip


def test_slices_are_those_of_the_library(prepare: Prepare, tmp_path: Path) -> None:
    path = _save(tmp_path / "a.safetensors", {"w": WIDE, "other": WIDE})
    with treering.open(prepare(path)) as opened, safe_open(path, "np") as theirs:
        part = theirs.get_slice("w")
        assert list(opened["w"].shape) == part.get_shape()
        for key in SLICES:
            assert_same_arrays(opened["w"][key], part[key])
        # Which the library does not take, or not in every version.
        for key in (np.s_[-1], np.s_[1:100], np.s_[::-2, 1::3], np.s_[:, None, -2:]):
            assert_same_arrays(opened["w"][key], WIDE[key])


def test_each_rank_takes_its_rows(prepare: Prepare, tmp_path: Path) -> None:
    tensors = {"w": np.arange(96.0, dtype=np.float32).reshape(16, 6), "b": np.arange(8, dtype=np.int32)}
    path = _save(tmp_path / "a.safetensors", tensors)
    place = prepare(path)
    rows = NamedSharding(MESH, PartitionSpec("x"))
    found = treering.load(place, shardings=rows)
    with treering.open(place) as opened, safe_open(path, "np") as theirs:
        for rank, device in enumerate(MESH.devices):
            for name, array in tensors.items():
                step = len(array) // 8
                wanted = theirs.get_slice(name)[rank * step : (rank + 1) * step]
                assert_same_arrays(opened[name][rank * step : (rank + 1) * step], wanted)
                (shard,) = (shard for shard in found[name].addressable_shards if shard.device == device)
                assert_same_arrays(shard.data, wanted)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "dtype",
    ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "bool"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)],
)
def test_the_dtypes_of_the_format(dtype: str, prepare: Prepare, tmp_path: Path) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    tensors = {"w": np.arange(6).reshape(2, 3).astype(kind), "empty": np.zeros((0, 2), kind), "one": np.ones((), kind)}
    found = treering.load(prepare(_save(tmp_path / "a.safetensors", tensors)))
    for name, array in tensors.items():
        assert_same_arrays(found[name], array)


def test_nan_and_infinity_keep_their_bits(prepare: Prepare, tmp_path: Path) -> None:
    bits = np.array([0x7FC00001, 0xFF800000, 0x7F800000, 0x80000000, 0x00000001], np.uint32).view(np.float32)
    like = {"w": jax.ShapeDtypeStruct(bits.shape, bits.dtype)}
    path = prepare(_save(tmp_path / "a.safetensors", {"w": bits}))
    assert_same_arrays(treering.load(path)["w"], bits)
    assert_same_arrays(treering.load(path, like)["w"], bits)


def test_what_its_flax_functions_wrote(prepare: Prepare, tmp_path: Path) -> None:
    params = {"dense.kernel": jax.random.normal(jax.random.key(0), (8, 3)), "dense.bias": jnp.ones(3, jnp.bfloat16)}
    safetensors.flax.save_file(params, tmp_path / "a.safetensors")
    like = {"dense": {"kernel": jnp.zeros((8, 3)), "bias": jnp.zeros(3, jnp.bfloat16)}}
    rename = {"dense/kernel": "dense.kernel", "dense/bias": "dense.bias"}
    found = treering.load(prepare(tmp_path / "a.safetensors"), like, key_map=rename)
    for name, array in params.items():
        assert_same_arrays(found["dense"][name.removeprefix("dense.")], array)


def test_a_strict_load_names_what_is_missing_and_what_is_left_over(prepare: Prepare, tmp_path: Path) -> None:
    path = prepare(_save(tmp_path / "a.safetensors", {"a": np.ones(2), "b": np.ones(2)}))
    like = {"a": np.zeros(2), "c": np.full(2, 5.0)}
    with pytest.raises(MismatchError) as caught:
        treering.load(path, like)
    assert "c: missing" in str(caught.value)
    assert "b: unexpected" in str(caught.value)
    found = treering.load(path, like, missing="keep", extra="ignore")
    assert_same_arrays(found["a"], np.ones(2))
    assert_same_arrays(found["c"], like["c"])
    with pytest.raises(MismatchError, match=r"a: wanted float64\[3\], found float64\[2\]"):
        treering.load(path, {"a": np.zeros(3), "b": np.zeros(2)})


def test_shards_with_an_index_are_one_model(prepare: Prepare, tmp_path: Path) -> None:
    tensors = {f"layers.{n}.w": np.full((8, 4), n, np.float32) for n in range(7)} | {"norm": np.ones(4, np.float16)}
    folder = prepare(write_folder(tmp_path / "model", tensors))
    found = treering.load(folder, shardings=[("layers", PartitionSpec("x")), ("norm", PartitionSpec())], mesh=MESH)
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        assert_same_arrays(found[name], array)
    assert list(treering.load(folder, only="layers.3.w")) == ["layers.3.w"]


@pytest.mark.parametrize("cut", ["length", "header", "data", "nothing"])
def test_a_file_that_is_not_whole_is_refused(cut: str, prepare: Prepare, tmp_path: Path) -> None:
    data = safetensors.numpy.save({"w": WIDE})
    size = int.from_bytes(data[:8], "little")
    parts = {"length": data[:5], "header": data[: size - 3], "data": data[:-1], "nothing": b""}
    (tmp_path / "a.safetensors").write_bytes(parts[cut])
    with pytest.raises(TreeringError):
        treering.load(prepare(tmp_path / "a.safetensors"))
