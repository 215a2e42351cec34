"""Hugging Face folders: shards with an index, one file, and snapshots of the hub's cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import treering
from tests.checkpoint.together import Loading, loading
from tests.reads import read_parts
from tests.system_calls import spans_read
from treering.errors import CorruptError, FormatError, NotFoundError, TreeringError

__all__ = ["loading"]

WIDE = np.arange(512 * 256, dtype=np.float32).reshape(512, 256)
SHARDS: list[dict[str, Any]] = [
    {"model.embed_tokens.weight": WIDE, "model.norm.weight": np.ones(7, ml_dtypes.bfloat16)},
    {"model.layers.0.mlp.weight": WIDE + 1, "model.layers.0.steps": np.array(3)},
]
TREE = SHARDS[0] | SHARDS[1]
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True}


def shard_name(number: int) -> str:
    return f"model-{number + 1:05}-of-{len(SHARDS):05}.safetensors"


def write_index(folder: Path, weights: dict[str, str], name: str = "model.safetensors.index.json") -> None:
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 7}, "weight_map": weights}), encoding="utf-8")


def weights_of() -> dict[str, str]:
    return {name: shard_name(number) for number, shard in enumerate(SHARDS) for name in shard}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    for number, shard in enumerate(SHARDS):
        save_file(shard, path / shard_name(number), metadata={"format": "pt"})
    write_index(path, weights_of())
    (path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return path


def assert_whole(found: dict[str, Any]) -> None:
    assert found.keys() == TREE.keys()
    for name, array in TREE.items():
        assert found[name].dtype == array.dtype or array.dtype.itemsize == 8, name
        np.testing.assert_array_equal(found[name], array)


def test_shards_are_one_flat_dict(folder: Path) -> None:
    assert_whole(treering.load(folder))
    assert_whole(treering.load(folder / "model.safetensors.index.json"))
    listing = treering.inspect(folder)
    assert (listing.form, len(listing.leaves), listing.verified) == ("hf", 4, False)
    assert listing.metadata == {"total_size": 7, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    assert "Hugging Face, shards by model.safetensors.index.json" in str(listing)
    assert treering.verify(folder).ok
    assert treering.abstract(folder)["model.norm.weight"] == jax.ShapeDtypeStruct((7,), "bfloat16")
    assert treering.diff(folder, folder, values=True).differences == ()


def test_one_file_comes_before_the_usual_index_as_in_transformers(folder: Path) -> None:
    save_file({"other": WIDE + 2}, folder / "model.safetensors")
    np.testing.assert_array_equal(treering.load(folder)["other"], WIDE + 2)
    assert "transformers reads model.safetensors, not model.safetensors.index.json" in str(treering.inspect(folder))
    assert "model.safetensors.index.json, which is there too" in str(treering.verify(folder).note)
    assert_whole(treering.load(folder / "model.safetensors.index.json"))


def test_one_file_alone_and_an_index_of_another_name(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors.index.json").rename(folder / "diffusion.safetensors.index.json")
    assert_whole(treering.load(folder))
    alone = tmp_path / "alone"
    alone.mkdir()
    save_file(TREE, alone / "model.safetensors")
    assert_whole(treering.load(alone))
    nested = {"layers": [{"w": WIDE}], "none": None}
    treering.save(alone / "model.safetensors", nested, overwrite=True)
    found = treering.load(alone)
    np.testing.assert_array_equal(found["layers"][0]["w"], WIDE)
    assert found["none"] is None


def test_only_what_is_wanted_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = spans_read(monkeypatch)
    found = treering.load(folder, only="model.layers.0.mlp.weight")
    np.testing.assert_array_equal(found["model.layers.0.mlp.weight"], WIDE + 1)
    assert sum(count for _, count in spans) == WIDE.nbytes
    spans.clear()
    with treering.open(folder) as opened:
        np.testing.assert_array_equal(opened["model.embed_tokens.weight"][3:5], WIDE[3:5])
    assert sum(count for _, count in spans) <= 64 << 10  # one block


def test_onto_a_mesh_by_rules_each_byte_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    like = treering.abstract(folder, only="**.weight")
    rules = [("mlp", PartitionSpec(None, "x")), ("embed", PartitionSpec("x")), ("norm", PartitionSpec())]
    spans = spans_read(monkeypatch)
    found = treering.load(folder, like, shardings=rules, mesh=mesh, extra="ignore")
    assert found["model.layers.0.mlp.weight"].sharding == NamedSharding(mesh, PartitionSpec(None, "x"))
    for name in like:
        np.testing.assert_array_equal(np.asarray(found[name]), TREE[name])
    assert sum(count for _, count in spans) <= 2 * WIDE.nbytes + 64


def test_a_process_reads_only_its_own_rows(folder: Path, loading: Loading, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    found = treering.load(folder, only="model.embed_tokens.weight", shardings=rows)["model.embed_tokens.weight"]
    np.testing.assert_array_equal(np.asarray(found), WIDE)
    assert loading.exchanges == []  # each of the four processes reads what it needs by itself
    first = rows.devices_indices_map(WIDE.shape)
    own = [first[device] for device in jax.devices()[:2]]
    spans = spans_read(monkeypatch)
    read_parts(folder, lambda key: own if key == "model.embed_tokens.weight" else [])
    assert sum(count for _, count in spans) == WIDE.nbytes // 4


def test_a_snapshot_of_the_hub_is_read_and_no_other_link(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--a--b"
    snapshot = cache / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        (cache / "blobs" / f"{number:064x}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{number:064x}")
    assert_whole(treering.load(snapshot))
    assert treering.inspect(snapshot).metadata["model_type"] == "llama"
    for target in ("/etc/passwd", folder / shard_name(0), "../../../blobs/" + "0" * 64):
        (snapshot / shard_name(0)).unlink()
        (snapshot / shard_name(0)).symlink_to(target)
        with pytest.raises(FormatError, match=shard_name(0)):
            treering.load(snapshot)


def test_tied_names_need_no_bytes(folder: Path) -> None:
    write_index(folder, weights_of() | {"lm_head.weight": shard_name(0)})
    assert_whole(treering.load(folder))
    assert "tied to others, and in no file: lm_head.weight" in str(treering.inspect(folder))
    (folder / "config.json").unlink()
    with pytest.raises(CorruptError, match=r"names the tensor 'lm_head.weight' in 'model-00001"):
        treering.load(folder)
    save_file(SHARDS[0], folder / shard_name(0), metadata={"lm_head.weight": "model.embed_tokens.weight"})
    assert_whole(treering.load(folder))


def test_a_name_that_is_listed_twice_is_where_the_files_say(folder: Path) -> None:
    text = (folder / "model.safetensors.index.json").read_text(encoding="utf-8")
    doubled = text.replace('"model.norm.weight"', f'"model.norm.weight": "{shard_name(0)}", "model.norm.weight"')
    (folder / "model.safetensors.index.json").write_text(doubled, encoding="utf-8")
    assert_whole(treering.load(folder))
    save_file(SHARDS[1] | {"model.norm.weight": np.zeros(7, ml_dtypes.bfloat16)}, folder / shard_name(1))
    assert_whole(treering.load(folder))
    assert "in several files, read from the one that the index names: model.norm.weight" in str(
        treering.inspect(folder)
    )


def test_index_and_files_that_differ_are_named(folder: Path) -> None:
    write_index(folder, weights_of() | {"b": shard_name(1), "c": shard_name(1)})
    with pytest.raises(
        CorruptError, match=r"names the tensor 'b' and 1 more in 'model-00002.*does not hold it.*download"
    ):
        treering.load(folder)
    write_index(folder, {name: file for name, file in weights_of().items() if name != "model.norm.weight"})
    with pytest.raises(
        CorruptError, match=r"'model-00001-of-00002.safetensors' holds the tensor 'model.norm.weight', which"
    ):
        treering.load(folder)
    write_index(folder, weights_of())
    (folder / shard_name(1)).unlink()
    with pytest.raises(CorruptError, match=r"'model-00002.*is missing in.*the tensor 'model.layers.0.* and 1 more"):
        treering.load(folder)


@pytest.mark.parametrize("name", ["../a.safetensors", "/a.safetensors", "a/b.safetensors", "config.json", 7, "..", ""])
def test_a_name_that_leads_elsewhere_is_refused(folder: Path, name: Any) -> None:
    write_index(folder, weights_of() | {"b": name})
    with pytest.raises(CorruptError, match="no safetensors file beside it"):
        treering.load(folder)


def test_several_indexes_and_none(folder: Path) -> None:
    (folder / "model.safetensors.index.json").replace(folder / "a.safetensors.index.json")
    write_index(folder, weights_of(), "b.safetensors.index.json")
    with pytest.raises(NotFoundError, match=r"2 indexes: a\.safe.*b\.safe.*; pass the path of one"):
        treering.load(folder)
    assert_whole(treering.load(folder / "b.safetensors.index.json"))


@pytest.mark.parametrize(
    "index", [b"[]", b"{", b'{"weight_map": 3}', b"\xff", b"[" * 100_000, b'{"weight_map": {"a": []}}']
)
def test_an_index_that_is_none_is_damage(folder: Path, index: bytes) -> None:
    (folder / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(CorruptError):
        treering.load(folder)


def test_damage_is_seen_or_harmless(folder: Path) -> None:
    """Cut off or flipped anywhere in a header or the index, it is an error of ours, or no damage to the tree."""
    for name, end in ((shard_name(0), 300), ("model.safetensors.index.json", 10_000)):
        data = (folder / name).read_bytes()
        for at in range(0, min(end, len(data)), 13):
            for damaged in (data[:at], data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]):
                (folder / name).write_bytes(damaged)
                try:
                    treering.abstract(folder)
                except TreeringError:
                    continue
        (folder / name).write_bytes(data)
    assert_whole(treering.load(folder))
