"""A tree that is saved through a key map: its files have the other names, and the same map gives the tree again."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file

import treering
from tests import meshes
from tests.jobs import be_process
from tests.trees import assert_same_arrays
from treering import KeyMap, KeyRule
from treering.errors import MismatchError, UnsupportedError

LAYERS, HEADS, SIZE, WIDTH = 3, 2, 4, 6
MAP = KeyMap([
    KeyRule("embed.weight", "embed/embedding"),
    KeyRule(
        "layers.{i}.{name}_proj.weight", "layers/attn/{name}/kernel",
        unflatten=(0, HEADS), transpose=(2, 0, 1), stack={"i": 0},
    ),
    KeyRule("layers.{i}.out.weight", "layers/out/kernel", unflatten=(1, HEADS), transpose=(1, 2, 0), stack={"i": 0}),
    KeyRule(
        ["layers.{i}.up.weight", "layers.{i}.gate.weight"], "layers/mlp/kernel",
        transpose=(1, 0), merge=1, stack={"i": 0},
    ),
    KeyRule("norm.bias", "norm/bias", cast=("float16", "float32")),
])  # fmt: skip


class Pair(NamedTuple):
    q: Any
    v: Any


def tensor(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32)


def make_tree() -> dict[str, Any]:
    heads = tensor(LAYERS, WIDTH, HEADS, SIZE)
    attention = {"q": {"kernel": heads}, "v": {"kernel": heads + 1}}
    bias = tensor(WIDTH).astype(np.float16).astype(np.float32)
    return {
        "embed": {"embedding": tensor(5, WIDTH)},
        "layers": {
            "attn": attention,
            "out": {"kernel": tensor(LAYERS, HEADS, SIZE, WIDTH)},
            "mlp": {"kernel": tensor(LAYERS, WIDTH, 10)},
        },
        "norm": {"bias": bias},
    }


def stored(tree: dict[str, Any]) -> dict[str, Any]:
    """Return by numpy alone what the files have to hold."""
    found = {"embed.weight": tree["embed"]["embedding"], "norm.bias": tree["norm"]["bias"].astype(np.float16)}
    layers = tree["layers"]
    for i in range(LAYERS):
        for name in "qv":
            kernel = layers["attn"][name]["kernel"][i]
            found[f"layers.{i}.{name}_proj.weight"] = kernel.transpose(1, 2, 0).reshape(HEADS * SIZE, WIDTH)
        found[f"layers.{i}.out.weight"] = layers["out"]["kernel"][i].transpose(2, 0, 1).reshape(WIDTH, HEADS * SIZE)
        up, gate = np.split(layers["mlp"]["kernel"][i], 2, axis=1)
        found |= {f"layers.{i}.up.weight": up.T, f"layers.{i}.gate.weight": gate.T}
    return found


@pytest.mark.parametrize("name", ["checkpoint", "tree.safetensors", "tree.msgpack", "hf"])
def test_the_files_have_the_other_names_and_the_map_gives_the_tree_again(name: str, tmp_path: Path) -> None:
    tree, path = make_tree(), tmp_path / name
    treering.export(path, tree, key_map=MAP, to="hf" if name == "hf" else None)
    assert_same_arrays(treering.load(path), stored(tree))
    assert_same_arrays(treering.load(path, key_map=MAP), tree)
    assert treering.abstract(path, key_map=MAP)["layers"]["attn"]["q"]["kernel"] == jax.ShapeDtypeStruct(
        (LAYERS, WIDTH, HEADS, SIZE), "float32"
    )
    assert treering.verify(path).ok


def test_another_program_reads_what_was_saved(tmp_path: Path) -> None:
    tree = make_tree()
    treering.export(tmp_path / "hf", tree, key_map=MAP, to="hf", max_file_size=600, dtype="float16")
    found: dict[str, Any] = {}
    for file in sorted((tmp_path / "hf").glob("*.safetensors")):
        found |= load_file(file)
    assert_same_arrays(found, {key: array.astype(np.float16) for key, array in stored(tree).items()})


def test_arrays_on_a_mesh_and_any_containers(tmp_path: Path) -> None:
    mesh = meshes.line(2)
    heads = NamedSharding(mesh, PartitionSpec(None, None, "x"))
    kernels = make_tree()["layers"]["attn"]
    pair = Pair(*(jax.device_put(kernels[name]["kernel"], heads) for name in "qv"))
    state = {"attn": [pair, jax.random.key(3)], "step": 7}
    names = KeyMap(
        [
            KeyRule("{i}.{name}_proj", "attn/0/{name}", unflatten=(0, HEADS), transpose=(2, 0, 1), stack={"i": 0}),
            KeyRule("step", "step"),
            KeyRule("rng", "attn/1"),
        ]
    )
    treering.export(tmp_path / "a", state, key_map=names)
    found: Any = treering.load(tmp_path / "a", state, key_map=names)
    assert found["attn"][0].q.sharding == heads
    assert_same_arrays(found["attn"][0], pair)
    assert (found["step"], found["attn"][1]) == (7, jax.random.key(3))


def test_every_leaf_that_no_rule_names_is_listed_and_nothing_is_written(tmp_path: Path) -> None:
    tree = make_tree()
    tree["layers"]["attn"]["q"]["bias"] = tensor(LAYERS, HEADS, SIZE)
    tree["norm"]["scale"] = tensor(3)
    with pytest.raises(MismatchError) as caught:
        treering.export(tmp_path / "a", tree, key_map=MAP)
    assert [line.split(":")[0] for line in caught.value.differences] == ["layers/attn/q/bias", "norm/scale"]
    assert "no rule names it" in str(caught.value)
    del tree["layers"]["attn"]["q"]["bias"], tree["norm"]["scale"]
    tree["layers"]["attn"]["q"]["kernel"] = tensor(LAYERS, WIDTH, HEADS + 1, SIZE)
    with pytest.raises(MismatchError, match=r"layers/attn/q/kernel: .* flattens axis 0 of the length 2"):
        treering.export(tmp_path / "a", tree, key_map=MAP)
    assert not (tmp_path / "a").exists()


def test_a_copy_that_is_none_any_more_is_refused(tmp_path: Path) -> None:
    tied = KeyMap(
        [
            KeyRule("wte", "embed"),
            KeyRule("wte", "head", transpose=(1, 0), copy=True),
            KeyRule("lm_head", None),
            KeyRule("step", "step"),
            KeyRule("step", "again", copy=True),
        ]
    )
    tree: dict[str, Any] = {"embed": tensor(4, 3), "head": tensor(4, 3).T, "step": 1, "again": 1}
    treering.export(tmp_path / "a", tree, key_map=tied)
    assert_same_arrays(treering.load(tmp_path / "a", key_map=tied), tree)
    for wrong in ({"head": tree["head"] + 1}, {"again": True}):
        with pytest.raises(MismatchError, match=f"{next(iter(wrong))}: it is not what the key map makes"):
            treering.export(tmp_path / "b", tree | wrong, key_map=tied)
    assert not (tmp_path / "b").exists()


def test_what_cannot_be_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match=r"key_map= is a treering\.KeyMap"):
        treering.export(tmp_path / "a", make_tree(), key_map={})  # type: ignore[arg-type]
    with pytest.raises(MismatchError, match="does not fit float16"):
        treering.export(tmp_path / "a", make_tree() | {"norm": {"bias": np.array([1e9], np.float32)}}, key_map=MAP)
    with pytest.raises(UnsupportedError, match="cannot hold"):
        treering.export(tmp_path / "a.safetensors", {"step": 1}, key_map=KeyMap([KeyRule("{k}", "{k}")]))
    assert not list(tmp_path.iterdir())
    with monkeypatch.context() as job:
        be_process(job, 1, 2)
        with pytest.raises(UnsupportedError, match="process 0 does, alone"):
            treering.export(tmp_path / "a", make_tree(), key_map=MAP)
        be_process(job, 0, 2)
        treering.export(tmp_path / "a", make_tree(), key_map=MAP)
    assert_same_arrays(treering.load(tmp_path / "a", key_map=MAP), make_tree())


def test_memory_holds_one_new_leaf_at_a_time(tmp_path: Path) -> None:
    tree = {"layers": {name: np.ones((8, 256, 256), np.float32) for name in "abcdefgh"}}
    names = KeyMap([KeyRule("{i}.{name}", "layers/{name}", stack={"i": 0}, transpose=(1, 0))])
    treering.export(tmp_path / "first", {"layers": {"a": tree["layers"]["a"]}}, key_map=names)
    tracemalloc.start()
    treering.export(tmp_path / "a", tree, key_map=names)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * 256 * 256 * 4 / 2  # of 16 MiB, an eighth


def test_leaves_without_axes_go_through_maps_and_casts(tmp_path: Path) -> None:
    tree = {"w": np.arange(3, dtype=np.float32), "scale": np.float32(1.5), "logit": np.array(2.5, np.float32)}
    treering.save(tmp_path / "a", tree)
    key_map = treering.KeyMap(
        [treering.KeyRule("w", "w/{i}", unstack={"i": 0}), treering.KeyRule("{k**}", "{k**}", rest=True)]
    )
    found = treering.load(tmp_path / "a", key_map=key_map)
    assert [np.asarray(found["w"][str(i)]).item() for i in range(3)] == [0, 1, 2]
    treering.convert(tmp_path / "a", tmp_path / "b", dtype="bfloat16")
    cast = treering.load(tmp_path / "b")
    assert [np.asarray(cast[name]).astype(np.float32).item() for name in ("scale", "logit")] == [1.5, 2.5]
    assert {str(np.asarray(leaf).dtype) for leaf in cast.values()} == {"bfloat16"}
