"""The key maps that docs/maps has for models of transformers: total, exact, and back to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import treering
from tests import meshes
from tests.compat.model_weights import CONFIGS, key_map_of, scanned, weights_of, write_folder
from tests.trees import leaves_by_path
from treering.errors import MismatchError


def _assert_same_bits(found: Any, wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        here = np.asarray(found[name])
        assert (here.dtype, here.shape) == (array.dtype, array.shape), name
        assert here.tobytes() == array.tobytes(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", CONFIGS)
def test_there_and_back_to_the_same_bits(model: str, dtype: str, tmp_path: Path) -> None:
    weights, names = weights_of(model, dtype), key_map_of(model)
    folder = write_folder(tmp_path / "model", weights)
    params = treering.load(folder, key_map=names)
    _assert_same_bits(leaves_by_path(params), scanned(model, weights))
    treering.save(tmp_path / "ckpt", params)
    _assert_same_bits(treering.load(tmp_path / "ckpt", key_map=names.inverse()), weights)
    treering.export(tmp_path / "again", treering.load(tmp_path / "ckpt", key_map=names.inverse()), to="hf")
    _assert_same_bits(treering.load(tmp_path / "again"), weights)


@pytest.mark.parametrize("model", ["llama", "gpt2", "t5"])
def test_onto_a_mesh_and_by_convert(model: str, tmp_path: Path) -> None:
    weights, names = weights_of(model), key_map_of(model)
    folder = write_folder(tmp_path / "model", weights)
    mesh = meshes.line()
    rules = [(".*/kernel|.*embedding", PartitionSpec(None, "x")), (".*/(scale|bias)", PartitionSpec())]
    if model == "t5":
        rules.insert(0, (".*relative_bias.*", PartitionSpec("x")))
    found = leaves_by_path(treering.load(folder, key_map=names, shardings=rules, mesh=mesh))
    _assert_same_bits(found, scanned(model, weights))
    kernel = next(leaf for key, leaf in found.items() if key.endswith("kernel"))
    assert kernel.sharding == NamedSharding(mesh, PartitionSpec(None, "x"))
    treering.convert(folder, tmp_path / "ckpt", key_map=names)
    _assert_same_bits(leaves_by_path(treering.load(tmp_path / "ckpt")), scanned(model, weights))
    treering.convert(tmp_path / "ckpt", tmp_path / "back.safetensors", key_map=names.inverse())
    _assert_same_bits(treering.load(tmp_path / "back.safetensors"), weights)


def test_what_old_files_have_besides_is_left_out(tmp_path: Path) -> None:
    more: dict[str, dict[str, Any]] = {
        "llama": {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)},
        "gpt2": {"lm_head.weight": np.ones((64, 32)), "transformer.h.0.attn.bias": np.ones((1, 1, 16, 16), np.uint8)},
        "t5": {f"{side}.embed_tokens.weight": np.ones((64, 32)) for side in ("encoder", "decoder")},
    }
    for model, extra in more.items():
        weights = weights_of(model)
        folder = write_folder(tmp_path / model, {**weights, **extra})
        _assert_same_bits(leaves_by_path(treering.load(folder, key_map=key_map_of(model))), scanned(model, weights))


@pytest.mark.parametrize("model", CONFIGS)
def test_a_tensor_of_another_model_is_named(model: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", {**weights_of(model), "classifier.weight": np.ones((2, 32))})
    with pytest.raises(MismatchError, match=r"classifier\.weight: no rule names it"):
        treering.load(folder, key_map=key_map_of(model))
