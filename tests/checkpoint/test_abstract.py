"""abstract: shapes, dtypes and shardings of every form, from headers alone."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import treering
from tests import faults, meshes
from tests.system_calls import spans_read
from treering.errors import MismatchError, NotFoundError
from treering.leaves import tree_serialize_leaves
from treering.serialization import save_to_file, to_compressed_bytes

BIG = np.arange(300 * 1000, dtype="f4").reshape(300, 1000)
ARRAYS: dict[str, Any] = {"big": BIG, "bf16": np.ones(4, ml_dtypes.bfloat16), "empty": np.zeros((0, 3), "i2")}
SHAPES = {key: jax.ShapeDtypeStruct(array.shape, array.dtype) for key, array in ARRAYS.items()}


def save_leaves(path: Path) -> None:
    tree_serialize_leaves(path, ARRAYS)


def save_run(path: Path) -> None:
    with treering.Run(path) as run:
        run.save(1, {"old": 1})
        run.save(2, ARRAYS)


def save_gzip(path: Path) -> None:
    path.write_bytes(to_compressed_bytes(ARRAYS))


def save_npz(path: Path) -> None:
    file = io.BytesIO()
    np.savez(file, **{key: array for key, array in ARRAYS.items() if key != "bf16"})
    path.write_bytes(file.getvalue())


FORMS: dict[str, Callable[[Path], Any]] = {
    "ckpt": lambda path: treering.save(path, ARRAYS),
    "a.safetensors": lambda path: treering.save(path, ARRAYS),
    "a.msgpack": lambda path: save_to_file(ARRAYS, path),
    "a.msgpack.gz": save_gzip,
    "leaves": save_leaves,
    "run": save_run,
    "a.npz": save_npz,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_one_from_headers_alone(form: str, tmp_path: Path) -> None:
    path = tmp_path / form
    FORMS[form](path)
    wanted = {key: shape for key, shape in SHAPES.items() if form != "a.npz" or key != "bf16"}
    assert treering.abstract(path) == wanted
    assert treering.abstract(path, only="b*") == {key: wanted[key] for key in wanted if key != "empty"}
    back = treering.load(path, treering.abstract(path, only="big"), only="big")
    np.testing.assert_array_equal(back["big"], BIG)


LONG: dict[str, Any] = {"vocabulary": "a b " * 5000, "order": b"x" * 9000, "buffer": bytearray(b"y" * 9000)}


@pytest.mark.parametrize("save", [treering.save, tree_serialize_leaves])
def test_it_is_a_like_of_texts_that_lie_in_data_files(save: Callable[[Path, Any], None], tmp_path: Path) -> None:
    tree = LONG | {"note": "short", "w": np.ones(3, "f4"), "act": jnp.tanh}
    save(tmp_path / "c", tree)
    back = treering.load(tmp_path / "c", like=treering.abstract(tmp_path / "c"))
    assert {name: back[name] for name in LONG} == LONG
    treering.save(tmp_path / "other", {"vocabulary": 3})
    with pytest.raises(MismatchError, match="vocabulary: wanted str, found int"):
        treering.load(tmp_path / "other", like=treering.abstract(tmp_path / "c", only="vocabulary"))


@pytest.mark.parametrize("form", [form for form in FORMS if form != "a.msgpack.gz"])
def test_no_array_is_read(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / form
    FORMS[form](path)
    spans = spans_read(monkeypatch)
    treering.abstract(path)
    assert sum(size for _, size in spans) < BIG.nbytes // 4


def test_what_is_no_plain_array(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"keys": jax.random.split(jax.random.key(3, impl="rbg"), 5), "n": 2**70}
    tree |= {"none": None, "text": "t"}
    treering.save(tmp_path / "ckpt", tree | {"long": "x" * 5000, "list": [np.float32(1), (jnp.ones(2),)]})
    found = treering.abstract(tmp_path / "ckpt")
    assert found["keys"] == jax.eval_shape(lambda: tree["keys"])
    assert {key: found[key] for key in ("n", "none", "text")} == {"n": 2**70, "none": None, "text": "t"}
    assert (found["long"].class_name, found["long"].text) == ("str", "5000 bytes, in a data file")
    assert found["list"] == [jax.ShapeDtypeStruct((), "float32"), (jax.ShapeDtypeStruct((2,), "float32"),)]
    keys = treering.load(tmp_path / "ckpt", {"keys": found["keys"]}, only="keys")["keys"]
    assert (jax.random.key_data(keys) == jax.random.key_data(tree["keys"])).all()
    assert treering.abstract(tmp_path / "ckpt", at="list/1") == found["list"][1]


def test_shardings_that_were_recorded_come_back(tmp_path: Path) -> None:
    mesh = meshes.grid(2, 2)
    given: list[Any] = [("x", None), (("x", "y"),), (), (None, "y")]
    specs = {name: PartitionSpec(*entries) for name, entries in zip("abcd", given, strict=True)}
    tree = {name: jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, spec)) for name, spec in specs.items()}
    keys = jax.device_put(jax.random.split(jax.random.key(0), 4), NamedSharding(mesh, PartitionSpec("y")))
    treering.save(tmp_path / "ckpt", tree | {"key": keys, "one": jnp.ones(3)})
    found = treering.abstract(tmp_path / "ckpt")
    for name, spec in specs.items():
        assert found[name].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2), name
    assert found["key"].sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec("y")), 1)
    assert found["one"].sharding is None
    assert treering.load(tmp_path / "ckpt", found)["b"].sharding.is_equivalent_to(tree["b"].sharding, 2)


def test_shardings_that_this_job_cannot_have_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = NamedSharding(meshes.line(4), PartitionSpec("x"))
    treering.save(tmp_path / "ckpt", {"w": jax.device_put(jnp.ones(8), rows)})
    devices = jax.devices()[:3]
    faults.answer(monkeypatch, jax, "devices", devices)
    assert treering.abstract(tmp_path / "ckpt")["w"].sharding is None


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        treering.abstract(tmp_path / "ckpt")
    treering.save(tmp_path / "ckpt", ARRAYS)
    with pytest.raises(MismatchError, match="did you mean 'big'"):
        treering.abstract(tmp_path / "ckpt", only="bog")


def test_large_texts_stay_in_a_file_in_gzip_form_too(tmp_path: Path) -> None:
    treering.save(tmp_path / "a.msgpack", {"text": "é" * 5000, "w": np.ones(3)})
    (tmp_path / "a.msgpack.gz").write_bytes(gzip.compress((tmp_path / "a.msgpack").read_bytes()))
    plain, packed = (treering.abstract(tmp_path / name) for name in ("a.msgpack", "a.msgpack.gz"))
    assert packed == plain
    assert isinstance(packed["text"], treering.checkpoint.OpaqueLeaf)


@pytest.mark.parametrize("suffix", ["", ".msgpack", ".msgpack.gz"])
def test_long_texts_and_states_are_loaded_like_what_stands_for_them(tmp_path: Path, suffix: str) -> None:
    tree: dict[str, Any] = {"text": "é" * 5000, "raw": b"\0" * 5000}
    path = tmp_path / f"ckpt{suffix}"
    if suffix.endswith(".gz"):
        path.write_bytes(to_compressed_bytes(tree))
    else:
        more = {"array": bytearray(5000), "data": treering.each({"at": "x" * 5000})} if not suffix else {}
        treering.save(path, tree | more)
    found = treering.load(path, treering.abstract(path))
    assert {key: found[key] for key in tree} == tree
    if not suffix:
        assert found["array"] == bytearray(5000)
        assert found["data"][0] == {"at": "x" * 5000}
    treering.save(tmp_path / "other", {"text": 1})
    with pytest.raises(MismatchError, match="text: wanted str, found int"):
        treering.load(tmp_path / "other", treering.abstract(path, only="text"))
