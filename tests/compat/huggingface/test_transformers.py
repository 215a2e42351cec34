"""What transformers saves is loaded onto a mesh bit for bit, and transformers loads what treering writes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treering
from tests.compat.model_weights import CONFIGS, key_map_of, scanned, weights_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import safetensors.torch
    import torch
    import transformers

pytestmark = pytest.mark.filterwarnings("ignore")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

MESH = Mesh(np.array(jax.devices()), ("x",))
_CLASSES = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
    "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config),
    "t5": (transformers.T5ForConditionalGeneration, transformers.T5Config),
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

every_model = pytest.mark.parametrize("name", CONFIGS)
every_dtype = pytest.mark.parametrize("dtype", _DTYPES)


def _model(name: str, dtype: str = "float32", seed: int = 0) -> Any:
    """A small model of the name, with random weights of every kind of parameter."""
    model_class, config_class = _CLASSES[name.partition("-")[0]]
    torch.manual_seed(seed)
    model = model_class(config_class(**CONFIGS[name])).to(_DTYPES[dtype]).eval()
    if name == "t5-gated":  # as in files of T5 1.1; a new model has the embedding in this place
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def _bits(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    if isinstance(array, torch.Tensor):
        items = array.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return str(array.dtype).removeprefix("torch."), tuple(array.shape), items.tobytes()
    array = np.asarray(array)
    return array.dtype.name, array.shape, array.tobytes()


def _load_strictly(name: str, folder: Path, dtype: str = "float32") -> Any:
    """Let transformers load a folder in which nothing may be missing or left over."""
    model_class, _ = _CLASSES[name.partition("-")[0]]
    model, told = model_class.from_pretrained(folder, output_loading_info=True, dtype=_DTYPES[dtype])
    assert {key: list(found) for key, found in told.items() if found} == {}
    return model.eval()


def _assert_equal(found: Any, wanted: Any) -> None:
    found, wanted = found.state_dict(), wanted.state_dict()
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert _bits(found[key]) == _bits(tensor), key


def _answer(model: Any) -> torch.Tensor:
    words = torch.arange(8).reshape(1, 8)
    given = {"decoder_input_ids": words} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=words, **given).logits


def _rows(tree: Any) -> Any:
    """Spread every array over the mesh."""
    rows = NamedSharding(MESH, PartitionSpec("x"))
    return jax.tree.map(lambda leaf: jax.device_put(leaf, rows), tree)


@every_model
def test_the_models_have_these_names_and_shapes(name: str, tmp_path: Path) -> None:
    _model(name).save_pretrained(tmp_path)
    stored = {key: leaf.shape for key, leaf in treering.abstract(tmp_path).items()}
    assert stored == {key: array.shape for key, array in weights_of(name).items()}


@every_model
@every_dtype
@pytest.mark.parametrize("size", ["20KB", "5GB"])
def test_what_transformers_saves_is_loaded_onto_a_mesh(name: str, dtype: str, size: str, tmp_path: Path) -> None:
    model = _model(name, dtype)
    model.save_pretrained(tmp_path, max_shard_size=size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (size == "20KB")
    rules = [(".*", PartitionSpec("x"))]
    found = treering.load(tmp_path, like=treering.abstract(tmp_path), shardings=rules, mesh=MESH)
    state = model.state_dict()
    for key, array in found.items():
        assert array.sharding == NamedSharding(MESH, PartitionSpec("x"))
        assert _bits(array) == _bits(state[key]), key
    stored = {state[key].data_ptr() for key in found}
    assert {key for key in state if state[key].data_ptr() not in stored} == set()
    assert treering.verify(tmp_path).ok


@every_model
@every_dtype
@pytest.mark.parametrize("size", ["20KB", "5GB"])
def test_transformers_loads_what_treering_writes(name: str, dtype: str, size: str, tmp_path: Path) -> None:
    model = _model(name, dtype)
    model.save_pretrained(tmp_path / "theirs")
    params = _rows(treering.load(tmp_path / "theirs"))
    model.config.save_pretrained(tmp_path / "ours")
    treering.export(tmp_path / "ours", params, to="hf", max_file_size=size)
    assert (tmp_path / "ours" / "model.safetensors.index.json").exists() == (size == "20KB")
    again = _load_strictly(name, tmp_path / "ours", dtype)
    _assert_equal(again, model)
    if dtype == "float32":
        assert torch.equal(_answer(again), _answer(model))


@every_model
@every_dtype
def test_through_the_key_map_and_back(name: str, dtype: str, tmp_path: Path) -> None:
    model, names = _model(name, dtype), key_map_of(name)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    params = treering.load(tmp_path / "theirs", key_map=names)
    stored = {key: np.asarray(array) for key, array in treering.load(tmp_path / "theirs").items()}
    wanted = scanned(name, stored)
    found = {"/".join(part.key for part in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    assert {key: _bits(leaf) for key, leaf in found.items()} == {key: _bits(leaf) for key, leaf in wanted.items()}
    treering.save(tmp_path / "ckpt", params)
    model.config.save_pretrained(tmp_path / "ours")
    back = treering.load(tmp_path / "ckpt", key_map=names.inverse())
    treering.export(tmp_path / "ours", back, to="hf", max_file_size="20KB")
    _assert_equal(_load_strictly(name, tmp_path / "ours", dtype), model)


@every_model
def test_a_kernel_of_the_map_does_what_its_layer_does(name: str, tmp_path: Path) -> None:
    model = _model(name)
    model.save_pretrained(tmp_path)
    params = treering.load(tmp_path, key_map=key_map_of(name))
    given = torch.randn(5, 32)
    with torch.no_grad():
        if name.startswith("llama"):
            kernel, bias = params["layers"]["mlp"]["gate"]["kernel"][1], 0
            wanted = model.model.layers[1].mlp.gate_proj(given)
        elif name == "gpt2":
            query = params["h"]["attn"]["query"]
            kernel, bias = query["kernel"][2], query["bias"][2]
            wanted = model.transformer.h[2].attn.c_attn(given)[:, :32]
        else:
            kernel, bias = params["decoder"]["layers"]["cross"]["kv"]["kernel"][1][:, 32:], 0
            wanted = model.decoder.block[1].layer[1].EncDecAttention.v(given)
    np.testing.assert_allclose(given.numpy() @ np.asarray(kernel) + bias, wanted.numpy(), rtol=1e-4, atol=1e-4)


@every_model
def test_converted_and_back(name: str, tmp_path: Path) -> None:
    model, names = _model(name), key_map_of(name)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    treering.convert(tmp_path / "theirs", tmp_path / "ckpt", key_map=names)
    model.config.save_pretrained(tmp_path / "ours")
    # What config.json says was taken for metadata, and a folder has a config.json of its own.
    options: Any = {"to": "hf", "max_file_size": "20KB", "lose": "metadata"}
    treering.convert(tmp_path / "ckpt", tmp_path / "shards", key_map=names.inverse(), **options)
    model.config.save_pretrained(tmp_path / "shards")
    _assert_equal(_load_strictly(name, tmp_path / "shards"), model)
    treering.convert(tmp_path / "ckpt", tmp_path / "one.safetensors", key_map=names.inverse())
    # It has an index of treering in its metadata, and transformers reads it all the same.
    (tmp_path / "one.safetensors").rename(tmp_path / "ours" / "model.safetensors")
    _assert_equal(_load_strictly(name, tmp_path / "ours"), model)


_ZOO = [
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8",
    "uint64", "uint32", "uint16", "uint8", "bool", "complex64",
]  # fmt: skip


def test_every_dtype_of_torch_both_ways(tmp_path: Path) -> None:
    zoo = {name: torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in _ZOO}
    zoo |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3)}
    safetensors.torch.save_file(zoo, tmp_path / "theirs.safetensors")
    found = treering.load(tmp_path / "theirs.safetensors")
    assert {name: _bits(array) for name, array in found.items()} == {name: _bits(array) for name, array in zoo.items()}
    treering.export(tmp_path / "ours", found, to="hf", max_file_size=64)
    again: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "ours").glob("*.safetensors"):
        again |= safetensors.torch.load_file(file)
    assert {name: _bits(array) for name, array in again.items()} == {name: _bits(array) for name, array in zoo.items()}


def test_a_module_of_torch_takes_them_strictly(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
    params = [
        {name: np.asarray(value.detach()) + 1 for name, value in layer.named_parameters()}
        for layer in module.children()
    ]
    treering.export(tmp_path / "module", params, to="hf")
    module.load_state_dict(safetensors.torch.load_file(tmp_path / "module" / "model.safetensors"), strict=True)
    for number, layer in enumerate(module.children()):
        for name, value in layer.named_parameters():
            assert _bits(value) == _bits(params[number][name])


def test_a_cast_is_that_of_torch(tmp_path: Path) -> None:
    model = _model("llama")
    model.save_pretrained(tmp_path / "theirs")
    treering.export(tmp_path / "ours", treering.load(tmp_path / "theirs"), to="hf", dtype="bfloat16")
    model.config.save_pretrained(tmp_path / "ours")
    _assert_equal(_load_strictly("llama", tmp_path / "ours", "bfloat16"), model.to(torch.bfloat16))
