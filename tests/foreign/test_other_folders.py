"""What is said of folders of other programs that treering does not read as a whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import treering
from treering.errors import FormatError, NotFoundError, TreeringError

_TREE: dict[str, Any] = {"a": np.arange(6, dtype=np.float32)}
_VERBS: tuple[Callable[[Path], Any], ...] = (
    treering.load, treering.inspect, treering.verify, treering.abstract, treering.open,
)  # fmt: skip


def _write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".safetensors"):
            save_file(_TREE, folder / name)
        elif name.endswith(".json"):
            (folder / name).write_text(json.dumps({"weight_map": {"a": "model.fp16-1.safetensors"}}))
        else:
            treering.save(folder / f"{name}.msgpack", _TREE)
            (folder / f"{name}.msgpack").rename(folder / name)


_FOLDERS = {
    "peft": (("adapter_config.json", "adapter_model.safetensors"), "a PEFT adapter", "adapter_model.safetensors"),
    "variant": (("config.json", "model.fp16.safetensors"), "a variant of a Hugging", "model.fp16.safetensors"),
    "variants": (
        ("model.safetensors.index.fp16.json", "model.fp16-1.safetensors"),
        "a variant of a Hugging",
        "model.safetensors.index.fp16.json",
    ),
    "pipeline": (
        ("model_index.json", "unet/diffusion_pytorch_model.safetensors"),
        "a pipeline of diffusers",
        "unet/diffusion_pytorch_model.safetensors",
    ),
    "model": (("config.json", "diffusion_pytorch_model.safetensors"), "safetensors", "diffusion_pytorch_model.safet"),
    "flax": (("checkpoint_9", "checkpoint_10"), "a folder of flax's checkpoints", "checkpoint_10"),
    "hub": (
        ("snapshots/abc/model.safetensors", "refs/x.json"),
        "a model in the cache of the Hugging Face hub",
        "snapshots/abc",
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", _FOLDERS)
def test_it_says_what_it_is_and_what_to_pass(tmp_path: Path, name: str) -> None:
    files, what, passed = _FOLDERS[name]
    _write(tmp_path, *files)
    for verb in _VERBS:
        with pytest.raises(NotFoundError, match=f"it is .*{what}.*; pass the path of .*'{passed}"):
            verb(tmp_path)
    with pytest.raises(NotFoundError, match=what):
        treering.convert(tmp_path, tmp_path / "out")
    whole = next(path for path in tmp_path.rglob("*") if path.as_posix().endswith(passed) or passed in path.name)
    np.testing.assert_array_equal(treering.load(whole)["a"], _TREE["a"])


def test_a_cache_of_the_hub_is_named(tmp_path: Path) -> None:
    _write(tmp_path, "models--org--name/snapshots/abc/model.safetensors")
    with pytest.raises(NotFoundError, match="it is a cache of the Hugging Face hub; pass the path of a snapshot"):
        treering.load(tmp_path)


def _by_sha_256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _by_git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _blob(tmp_path: Path, name: str = "a.safetensors", named: Callable[[bytes], str] = _by_sha_256) -> Path:
    """Return a file of arrays in the cache of the hub, under its hash."""
    model = tmp_path / "models--org--name"
    (model / "snapshots" / "abc").mkdir(parents=True)
    (model / "blobs").mkdir()
    file = model / "blobs" / name
    if name.endswith("safetensors"):
        save_file(_TREE, file)
    elif name.endswith("npz"):
        np.savez(file, **_TREE)
    else:
        treering.save(file, _TREE)
    return file.rename(model / "blobs" / named(file.read_bytes()))


@pytest.fixture
def blob(tmp_path: Path) -> Path:
    return _blob(tmp_path)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("named", [_by_sha_256, _by_git])
@pytest.mark.parametrize("name", ["model.safetensors", "a.safetensors", "a.npz", "a.msgpack"])
@pytest.mark.parametrize("absolute", [False, True])
def test_verify_compares_a_blob_with_its_name(
    tmp_path: Path, name: str, named: Callable[[bytes], str], absolute: bool
) -> None:
    blob = _blob(tmp_path, name, named)
    link = blob.parents[1] / "snapshots" / "abc" / name
    link.symlink_to(blob if absolute else f"../../blobs/{blob.name}")
    paths = [link, link.parent] if name == "model.safetensors" else [link]
    whole = blob.read_bytes()
    for path in paths:
        np.testing.assert_array_equal(treering.load(path)["a"], _TREE["a"])
        assert "with the hashes that the cache of the hub names them by, 1 of 1" in str(treering.verify(path))
    for at in range(0, 8 * len(whole), 8 * len(whole) // 37):
        data = bytearray(whole)
        data[at // 8] ^= 1 << at % 8
        blob.write_bytes(data)
        for path in paths:
            try:
                found = treering.verify(path)
            except TreeringError:  # it is no file of that form any more
                continue
            assert not found.ok
    if name.endswith("safetensors"):
        assert "it has another hash" in str(treering.verify(link).findings[-1])


def test_files_that_only_look_like_blobs_are_not_compared(blob: Path, tmp_path: Path) -> None:
    other = tmp_path / "blobs" / ("0" * 64)
    other.parent.mkdir()
    other.write_bytes(blob.read_bytes())
    assert treering.verify(other).ok
    assert "no checksums" in str(treering.verify(other).note)


def test_absolute_links_lead_into_the_own_blobs_alone(blob: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "blobs" / blob.name
    other.parent.mkdir(parents=True)
    other.write_bytes(blob.read_bytes())
    snapshot = blob.parents[1] / "snapshots" / "abc"
    for target in (other, f"{blob.parent}/../../other/blobs/{blob.name}", tmp_path / blob.name):
        (snapshot / "model.safetensors").symlink_to(target)
        with pytest.raises(FormatError, match="is a link"):
            treering.load(snapshot)
        (snapshot / "model.safetensors").unlink()


@pytest.mark.parametrize("text", ["my notes", "{}", ""])
def test_metadata_that_are_called_treering(tmp_path: Path, text: str) -> None:
    save_file(_TREE, tmp_path / "a.safetensors", metadata={"treering": text})
    np.testing.assert_array_equal(treering.load(tmp_path / "a.safetensors")["a"], _TREE["a"])
    assert treering.inspect(tmp_path / "a.safetensors").metadata == {"treering": text}
    treering.convert(tmp_path / "a.safetensors", tmp_path / "out")
    np.testing.assert_array_equal(treering.load(tmp_path / "out")["a"], _TREE["a"])


def test_long_names_are_cut_in_messages(tmp_path: Path) -> None:
    name = "k" * 40_000
    treering.save(tmp_path / "own", {name: np.arange(3.0)})
    data = next(path for path in (tmp_path / "own").iterdir() if path.name.startswith("data"))
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    (tmp_path / "hf").mkdir()
    index = {"weight_map": {name: f"{name}.safetensors"}}
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    for path in (tmp_path / "own", tmp_path / "hf"):
        with pytest.raises(treering.errors.TreeringError) as caught:
            treering.load(path)
        assert len(str(caught.value)) < 2_000
    assert len(str(treering.verify(tmp_path / "own"))) < 3_000
    with treering.open(tmp_path / "own") as opened:
        assert len(repr(opened)) < 3_000
