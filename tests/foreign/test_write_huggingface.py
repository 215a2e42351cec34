"""Hugging Face folders that treering writes, read by safetensors and by treering."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import safe_open
from safetensors.flax import load_file

import treering
from tests.jobs import be_process
from treering.errors import ExistsError, MismatchError, TreeringError, UnsupportedError

WIDE = np.arange(512 * 256, dtype=np.float32).reshape(512, 256)


def tree() -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    return {
        "model": {
            "embed": jax.device_put(WIDE, NamedSharding(mesh, PartitionSpec("x", "y"))),
            "odd": np.arange(5, dtype=np.uint8),
            "norm": jnp.ones(7, jnp.bfloat16),
            "layers": [OrderedDict(w=WIDE.T), {"w": np.asfortranarray(WIDE) + 1}],
            "big": np.arange(3, dtype=">i4"),
        },
        "empty": np.zeros((0, 3), np.float16),
        "scale": np.float32(2),
    }


def flat(given: dict[str, Any]) -> dict[str, Any]:
    model = given["model"]
    layers = {f"model.layers.{number}.w": layer["w"] for number, layer in enumerate(model["layers"])}
    rest = {f"model.{name}": model[name] for name in ("embed", "odd", "norm", "big")}
    return rest | layers | {"empty": given["empty"], "scale": given["scale"]}


def same(found: Any, wanted: Any) -> None:
    found, wanted = np.asarray(found), np.asarray(wanted)
    wanted = np.ascontiguousarray(wanted.astype(wanted.dtype.newbyteorder("=")))
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.reshape(found.shape).shape)
    assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("size", ["1MB", 300_000, "5GB"])
def test_safetensors_and_treering_read_it_bit_for_bit(tmp_path: Path, size: Any) -> None:
    path, given = tmp_path / "model", tree()
    treering.export(path, given, to="hf", max_file_size=size)
    wanted = flat(given)
    by_treering = treering.load(path)
    assert by_treering.keys() == wanted.keys()
    files = sorted(path.glob("*.safetensors"))
    by_others = {name: array for file in files for name, array in load_file(str(file)).items()}
    for name, array in wanted.items():
        same(by_treering[name], array)
        same(by_others[name], array)
    for file in files:
        with safe_open(str(file), "np") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert treering.verify(path).ok
    if size == "5GB":
        assert [file.name for file in path.iterdir()] == ["model.safetensors"]
        return
    assert [file.name for file in files] == [
        f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))
    ]
    index = json.loads((path / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["metadata"] == {"total_size": sum(np.asarray(array).nbytes for array in wanted.values())}
    for name, file in index["weight_map"].items():
        with safe_open(str(path / file), "np") as opened:
            assert name in opened.keys()  # noqa: SIM118 - it is no dict


def test_items_are_aligned_for_torch(tmp_path: Path) -> None:
    given = {"a": np.zeros(5, np.uint8), "b": np.ones(3, ml_dtypes.bfloat16), "c": np.ones(1, np.float64)}
    treering.export(tmp_path / "model", given, to="hf")
    data = (tmp_path / "model" / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert [header[name]["data_offsets"] for name in "cba"] == [[0, 8], [8, 14], [14, 19]]


def test_a_cast_is_asked_for_and_changes_floats_alone(tmp_path: Path) -> None:
    given = tree()
    treering.export(tmp_path / "model", given, to="hf", max_file_size="100KB", dtype=jnp.bfloat16)
    found = treering.load(tmp_path / "model")
    for name, array in flat(given).items():
        floats = np.asarray(array).dtype.name in ("float32", "float16", "bfloat16")
        same(found[name], np.asarray(array).astype(ml_dtypes.bfloat16) if floats else array)


def test_a_cast_that_does_not_fit_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    large = WIDE * 0
    large[300, 7] = 1e6
    for size in ("5GB", 1000):
        with pytest.raises(MismatchError, match=r"the value 1e\+06 does not fit float16 \(at leaf 'b/w'\)"):
            treering.export(
                tmp_path / "m", {"a": WIDE * 0, "b": {"w": large}}, to="hf", dtype="float16", max_file_size=size
            )
        assert not (tmp_path / "m").exists()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", "treering.json", "a.safetensors.index.json"]
)
def test_a_folder_that_holds_weights_is_refused(tmp_path: Path, name: str, overwrite: bool) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ExistsError, match=f"holds weights: {name}.*fixed names.*another folder"):
        treering.export(tmp_path, {"w": WIDE}, to="hf", overwrite=overwrite)
    (tmp_path / name).unlink()
    treering.export(tmp_path, {"w": WIDE}, to="hf", overwrite=overwrite)
    same(treering.load(tmp_path)["w"], WIDE)


def test_what_it_cannot_hold_is_said_at_once(tmp_path: Path) -> None:
    partial = jax.tree_util.Partial(jnp.add, np.ones(2))
    given = {
        "a": {"b": WIDE}, "a.b": WIDE, "none": None, "text": "t", "key": jax.random.key(0), "deep": [{}],
        "four": partial, "int": {3: WIDE}, "wide": np.zeros(2, np.complex128),
    }  # fmt: skip
    with pytest.raises(UnsupportedError) as caught:
        treering.export(tmp_path / "m", given, to="hf")
    for part in (
        "leaf 'a.b': 'a/b' has the name 'a.b' too",
        "leaf 'none': None",
        "leaf 'text': a str",
        "leaf 'key': a typed PRNG key",
        "an empty dict at 'deep/0'",
        "the static fields",
        "the dict at 'int': its key 3",
        "an array of complex128",
    ):
        assert part in str(caught.value), part
    with pytest.raises(UnsupportedError, match="'' is no name"):
        treering.export(tmp_path / "m", WIDE, to="hf")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_file_size": 3}, "max_file_size= needs a form"),
        ({"to": "gguf"}, "to='gguf' is not a form"),
        ({"to": "hf", "max_file_size": 0}, "max_file_size is 0"),
        ({"to": "hf", "max_file_size": "much"}, "max_file_size is 'much'"),
        ({"to": "hf", "dtype": "int8"}, "dtype='int8' is not a dtype of floats"),
        ({"to": "hf", "metadata": {"a": 1, "format": "x"}}, "the member 'a' of the metadata"),
    ],
)
def test_options_without_a_meaning_are_refused(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises(UnsupportedError, match=match):
        treering.export(tmp_path / "m", {"w": WIDE}, **options)
    with pytest.raises(UnsupportedError, match="is not a path of the form hf"):
        treering.export(tmp_path / "m.safetensors", {"w": WIDE}, to="hf")


def test_metadata_goes_into_files_and_index(tmp_path: Path) -> None:
    for size in (None, 1000):
        path = tmp_path / str(size)
        treering.export(path, {"a": WIDE, "b": WIDE}, to="hf", metadata={"license": "mit"}, max_file_size=size)
        assert treering.inspect(path).metadata["license"] == "mit"


def test_an_error_on_the_way_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(done: int, total: int) -> None:
        if done > WIDE.nbytes:
            raise RuntimeError("stop")

    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(RuntimeError, match="stop"):
        treering.export(tmp_path, {"a": WIDE, "b": WIDE, "c": WIDE}, to="hf", max_file_size=1000, progress=fail)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_in_memory_too() -> None:
    path = "memory://test_write_huggingface/model"
    treering.export(path, {"a": WIDE, "b": {"c": WIDE}}, to="hf", max_file_size=1000)
    same(treering.load(path, only="b.c")["b.c"], WIDE)
    with pytest.raises(ExistsError):
        treering.export(path, {"a": WIDE}, to="hf")


def test_little_memory_is_taken(tmp_path: Path) -> None:
    given = {str(number): np.full((1 << 20,), number, np.float64) for number in range(8)}
    tracemalloc.start()
    try:
        treering.export(tmp_path / "m", given, to="hf", max_file_size="20MB", dtype="bfloat16")
        assert tracemalloc.get_traced_memory()[1] < 24 << 20
    finally:
        tracemalloc.stop()


def test_process_0_exports_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as job:
        be_process(job, 1, 2)
        with pytest.raises(TreeringError, match=r"process 1 cannot export .*: process 0 does, alone; call it under"):
            treering.export(tmp_path / "m", {"w": WIDE}, to="hf")
        be_process(job, 0, 2)
        treering.export(tmp_path / "m", {"w": WIDE}, to="hf")
    same(treering.load(tmp_path / "m")["w"], WIDE)


def test_nested_keys_come_back_by_the_map_that_the_error_names(tmp_path: Path) -> None:
    like = {"dense": {"kernel": WIDE}}
    treering.export(tmp_path / "m", like, to="hf")
    rule = 'KeyRule("{a}.{b}", "{a}/{b}")'
    with pytest.raises(MismatchError, match=re.escape(f"key_map=KeyMap([{rule}]) nests names of two parts")):
        treering.load(tmp_path / "m", like=like)
    names = treering.KeyMap([treering.KeyRule("{a}.{b}", "{a}/{b}")])
    same(treering.load(tmp_path / "m", like=like, key_map=names)["dense"]["kernel"], WIDE)
