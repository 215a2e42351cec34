"""What numpy's own tests of npz and npy restore, restored by treering; also after a conversion."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from numpy.lib import format as npy_format

import treering
from tests import meshes
from tests.compat.restoring import Prepare, prepare
from treering import KeyMap, KeyRule
from treering.errors import CorruptError, MismatchError, UnsupportedError

__all__ = ["prepare"]


def _assert_same(found: Any, wanted: Any) -> None:
    """The values and the shape, in the byte order of the machine."""
    wanted = np.asarray(wanted)
    wanted = wanted.astype(wanted.dtype.newbyteorder("="))
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert np.asarray(found).tobytes() == wanted.tobytes()


def test_arrays_by_name_and_by_place(prepare: Prepare, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", np.arange(3), np.ones((2, 2)), named=np.array([1, 2], np.float32))
    found = treering.load(prepare(tmp_path / "a.npz"))
    with np.load(tmp_path / "a.npz") as wanted:
        assert list(found) == wanted.files == ["named", "arr_0", "arr_1"]
        for name in wanted.files:
            _assert_same(found[name], wanted[name])


def test_compressed_is_the_same(prepare: Prepare, tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        "zeros": np.zeros((100, 30)),
        "noise": np.random.default_rng(0).standard_normal((50, 7)),
        "n": np.int8(3),
    }
    np.savez_compressed(tmp_path / "a.npz", **arrays)
    found = treering.load(prepare(tmp_path / "a.npz"))
    for name, array in arrays.items():
        _assert_same(found[name], array)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_the_format(version: tuple[int, int], prepare: Prepare, tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    with (tmp_path / "a.npy").open("wb") as file:
        npy_format.write_array(file, array, version=version)
    _assert_same(treering.load(prepare(tmp_path / "a.npy")), array)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("code", ["?", "b", "B", "<i2", ">i2", "<u4", ">u8", "<f2", ">f4", "<f8", "<c8", ">c16"])
def test_every_number_in_either_byte_order(code: str, prepare: Prepare, tmp_path: Path) -> None:
    array = np.arange(12).reshape(3, 4).astype(code)
    np.save(tmp_path / "a.npy", array)
    _assert_same(treering.load(prepare(tmp_path / "a.npy")), array)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1, 1), (5, 1, 2)], ids=str)
def test_shapes_without_items_and_without_axes(shape: tuple[int, ...], prepare: Prepare, tmp_path: Path) -> None:
    array = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    np.savez(tmp_path / "a.npz", c=array, f=array.copy(order="F"))
    found = treering.load(prepare(tmp_path / "a.npz"))
    _assert_same(found["c"], array)
    _assert_same(found["f"], array)


def test_arrays_that_do_not_lie_in_order(prepare: Prepare, tmp_path: Path) -> None:
    array = np.arange(60.0).reshape(3, 4, 5)
    views: dict[str, Any] = {
        "fortran": np.asfortranarray(array),
        "turned": array.T,
        "steps": array[::2, 1:, ::-1],
        "swapped": array.mT,
    }
    np.savez(tmp_path / "a.npz", **views)
    found = treering.load(prepare(tmp_path / "a.npz"))
    for name, view in views.items():
        _assert_same(found[name], view)


def test_a_part_is_read_as_from_a_map_of_the_file(prepare: Prepare, tmp_path: Path) -> None:
    array = np.arange(60, dtype=np.int32).reshape(6, 10)
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "a.npz", w=array)
    keys: list[Any] = [np.s_[2], np.s_[-1, 3:7], np.s_[::2, ::-3], np.s_[..., 4], np.s_[5:2], np.s_[1:4, None, 2]]
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    for path, name in ((prepare(tmp_path / "a.npy"), ""), (prepare(tmp_path / "a.npz"), "w")):
        with treering.open(path) as opened:
            for key in keys:
                np.testing.assert_array_equal(opened[name][key], mapped[key])


def test_names_of_every_kind(prepare: Prepare, tmp_path: Path) -> None:
    names = ["a/b", "model.layer.0", "größe", "a b", "x.npy", "~"]
    arrays: dict[str, Any] = {name: np.full(2, number) for number, name in enumerate(names)}
    np.savez(tmp_path / "a.npz", **arrays)
    found = treering.load(prepare(tmp_path / "a.npz"))
    assert list(found) == names
    assert [int(array[0]) for array in found.values()] == list(range(len(names)))


def test_text_is_text_and_objects_are_never_unpickled(prepare: Prepare, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", note="run 7, größe", w=np.ones(2))
    assert treering.load(prepare(tmp_path / "a.npz"))["note"] == "run 7, größe"
    np.savez(tmp_path / "b.npz", w=np.ones(2), objects=np.array([{}, 1], dtype=object))
    with pytest.raises(UnsupportedError, match=r"objects\.npy.*pickled"):
        treering.load(prepare(tmp_path / "b.npz"))


def test_a_file_that_ends_too_early_is_damaged(prepare: Prepare, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.arange(100))
    (tmp_path / "a.npy").write_bytes(buffer.getvalue()[:-1])
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        archive.writestr("w.npy", buffer.getvalue()[:-1])
    for name in ("a.npy", "b.npz"):
        with pytest.raises(CorruptError):
            treering.load(prepare(tmp_path / name))


def test_a_model_saved_as_a_flat_dict_goes_into_its_tree(prepare: Prepare, tmp_path: Path) -> None:
    params = {"dense": {"kernel": np.arange(24.0, dtype=np.float32).reshape(8, 3), "bias": np.ones(3, np.float32)}}
    flat: dict[str, Any] = {f"dense.{name}": array for name, array in params["dense"].items()}
    np.savez(tmp_path / "a.npz", **flat)
    path = prepare(tmp_path / "a.npz")
    names = KeyMap([KeyRule("{layer}.{name}", "{layer}/{name}")])
    rows = NamedSharding(meshes.line(), PartitionSpec("x"))
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    found = treering.load(path, like, key_map=names, shardings={"dense": {"kernel": rows, "bias": None}})
    assert found["dense"]["kernel"].sharding == rows
    _assert_same(found["dense"]["kernel"], params["dense"]["kernel"])
    renamed = {f"dense/{name}": f"dense.{name}" for name in params["dense"]}
    _assert_same(treering.load(path, params, key_map=renamed)["dense"]["bias"], params["dense"]["bias"])
    with pytest.raises(MismatchError, match=r"dense/bias: missing"):
        treering.load(path, params)
