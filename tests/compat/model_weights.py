"""Weights of small models by the names and shapes of transformers, made by numpy; and what their key maps make of them.

tests/compat/huggingface compares names and shapes with those of the real models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from treering import KeyMap

__all__ = ["CONFIGS", "key_map_of", "scanned", "weights_of", "write_folder"]

_LLAMA = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip
_T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "tie_word_embeddings": False},
    "llama-tied": {**_LLAMA, "tie_word_embeddings": True},
    "gpt2": {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 3, "n_head": 4},
    "t5": {**_T5, "tie_word_embeddings": True},
    "t5-gated": {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
"""The models, each by the arguments of its configuration. The first part of the name is that of its key map."""

_WIDTH, _WORDS, _INNER = 32, 64, 48


def key_map_of(model: str) -> KeyMap:
    """The key map that docs/maps has for a model."""
    return KeyMap.read(Path(__file__).parents[2] / "docs" / "maps" / f"{model.partition('-')[0]}.toml")


def _llama(*, tied: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (_WORDS, _WIDTH), "model.norm.weight": (_WIDTH,)}
    for i in range(2):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (_WIDTH, _WIDTH) for name in "qo"}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (_WIDTH // 2, _WIDTH) for name in "kv"}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (_INNER, _WIDTH) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (_WIDTH, _INNER)
        shapes |= {f"{layer}.{name}_layernorm.weight": (_WIDTH,) for name in ("input", "post_attention")}
    return shapes if tied else shapes | {"lm_head.weight": (_WORDS, _WIDTH)}


def _gpt2() -> dict[str, tuple[int, ...]]:
    kernels = {
        "attn.c_attn": (_WIDTH, 3 * _WIDTH), "attn.c_proj": (_WIDTH, _WIDTH), "mlp.c_fc": (_WIDTH, 4 * _WIDTH),
        "mlp.c_proj": (4 * _WIDTH, _WIDTH), "ln_1": (_WIDTH,), "ln_2": (_WIDTH,),
    }  # fmt: skip
    layers = {f"transformer.h.{i}.{name}": shape for i in range(3) for name, shape in kernels.items()}
    layers["transformer.ln_f"] = (_WIDTH,)
    shapes = {f"{name}.weight": shape for name, shape in layers.items()}
    shapes |= {f"{name}.bias": shape[-1:] for name, shape in layers.items()}
    return shapes | {"transformer.wte.weight": (_WORDS, _WIDTH), "transformer.wpe.weight": (16, _WIDTH)}


def _t5(*, gated: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"shared.weight": (_WORDS, _WIDTH)}
    for side, depth in (("encoder", 2), ("decoder", 3)):
        parts = ["SelfAttention", *(["EncDecAttention"] if side == "decoder" else []), "DenseReluDense"]
        bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        shapes |= {bias: (32, 4), f"{side}.final_layer_norm.weight": (_WIDTH,)}
        for i in range(depth):
            for number, part in enumerate(parts):
                layer = f"{side}.block.{i}.layer.{number}"
                shapes[f"{layer}.layer_norm.weight"] = (_WIDTH,)
                if part != "DenseReluDense":
                    shapes |= {f"{layer}.{part}.{name}.weight": (_WIDTH, _WIDTH) for name in "qkvo"}
                    continue
                wide = ("wi_0", "wi_1") if gated else ("wi",)
                shapes |= {f"{layer}.{part}.{name}.weight": (_INNER, _WIDTH) for name in wide}
                shapes[f"{layer}.{part}.wo.weight"] = (_WIDTH, _INNER)
    return shapes | ({"lm_head.weight": (_WORDS, _WIDTH)} if gated else {})


def weights_of(model: str, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Every tensor that the files of a model hold; of any bits, NaN of every kind among them."""
    shapes = {
        "llama": lambda: _llama(tied=False), "llama-tied": lambda: _llama(tied=True), "gpt2": _gpt2,
        "t5": lambda: _t5(gated=False), "t5-gated": lambda: _t5(gated=True),
    }[model]()  # fmt: skip
    random, kind = np.random.default_rng(0), np.dtype(getattr(ml_dtypes, dtype, dtype))
    return {
        name: np.frombuffer(random.bytes(int(np.prod(shape)) * kind.itemsize), kind).reshape(shape)
        for name, shape in shapes.items()
    }


def write_folder(path: Path, weights: Mapping[str, np.ndarray], files: int = 3) -> Path:
    """Write a folder as save_pretrained does, by safetensors."""
    path.mkdir()
    names = list(weights)
    shards = {f"model-{n + 1:05}-of-{files:05}.safetensors": names[n::files] for n in range(files)}
    for file, part in shards.items():
        save_file({name: weights[name] for name in part}, path / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, part in shards.items() for name in part}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return path


# ------------------------------------------------------------------------------------------ what the maps have to make


def scanned(model: str, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The leaves that the key map of a model makes, by their key texts, told without a key map."""
    return {"llama": _scanned_llama, "gpt2": _scanned_gpt2, "t5": _scanned_t5}[model.partition("-")[0]](weights)


def _turned(layers: Iterable[np.ndarray]) -> np.ndarray:
    return np.stack([layer.T for layer in layers])


def _scanned_llama(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    def layers(name: str) -> list[np.ndarray]:
        return [weights[f"model.layers.{i}.{name}.weight"] for i in range(2)]

    made = {"embed/embedding": weights["model.embed_tokens.weight"], "norm/scale": weights["model.norm.weight"]}
    made |= {f"layers/attn/{name}/kernel": _turned(layers(f"self_attn.{name}_proj")) for name in "qkvo"}
    made |= {f"layers/mlp/{name}/kernel": _turned(layers(f"mlp.{name}_proj")) for name in ("gate", "up", "down")}
    made |= {f"layers/{name}_norm/scale": np.stack(layers(f"{name}_layernorm")) for name in ("input", "post_attention")}
    return made | ({"lm_head/kernel": weights["lm_head.weight"].T} if "lm_head.weight" in weights else {})


def _scanned_gpt2(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    made = {f"{name}/embedding": weights[f"transformer.{name}.weight"] for name in ("wte", "wpe")}
    for name, old in (("scale", "weight"), ("bias", "bias")):
        made[f"ln_f/{name}"] = weights[f"transformer.ln_f.{old}"]
        made |= {
            f"h/{norm}/{name}": np.stack([weights[f"transformer.h.{i}.{norm}.{old}"] for i in range(3)])
            for norm in ("ln_1", "ln_2")
        }
    for name, old in (("kernel", "weight"), ("bias", "bias")):
        for new, part in (("attn/out", "attn.c_proj"), ("mlp/fc", "mlp.c_fc"), ("mlp/proj", "mlp.c_proj")):
            made[f"h/{new}/{name}"] = np.stack([weights[f"transformer.h.{i}.{part}.{old}"] for i in range(3)])
        fused = np.stack([weights[f"transformer.h.{i}.attn.c_attn.{old}"] for i in range(3)])
        for place, part in enumerate(("query", "key", "value")):
            made[f"h/attn/{part}/{name}"] = fused[..., place * _WIDTH : (place + 1) * _WIDTH]
    return made


def _scanned_t5(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    made = {"shared/embedding": weights["shared.weight"]}
    if "lm_head.weight" in weights:
        made["lm_head/kernel"] = weights["lm_head.weight"].T
    for side, depth in (("encoder", 2), ("decoder", 3)):

        def layers(name: str, side: str = side, depth: int = depth) -> list[np.ndarray]:
            return [weights[f"{side}.block.{i}.layer.{name}.weight"] for i in range(depth)]

        last = 1 if side == "encoder" else 2
        bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        made[f"{side}/relative_bias/embedding"] = weights[bias]
        made[f"{side}/final_norm/scale"] = weights[f"{side}.final_layer_norm.weight"]
        made[f"{side}/layers/attn_norm/scale"] = np.stack(layers("0.layer_norm"))
        made[f"{side}/layers/mlp_norm/scale"] = np.stack(layers(f"{last}.layer_norm"))
        qkv = [_turned(layers(f"0.SelfAttention.{name}")) for name in "qkv"]
        made[f"{side}/layers/attn/qkv/kernel"] = np.concatenate(qkv, axis=-1)
        made[f"{side}/layers/attn/out/kernel"] = _turned(layers("0.SelfAttention.o"))
        gates = ("wi_0", "wi_1") if f"{side}.block.0.layer.{last}.DenseReluDense.wi_0.weight" in weights else ("wi",)
        for name in (*gates, "wo"):
            made[f"{side}/layers/mlp/{name}/kernel"] = _turned(layers(f"{last}.DenseReluDense.{name}"))
        if side == "decoder":
            kv = [_turned(layers(f"1.EncDecAttention.{name}")) for name in "kv"]
            made["decoder/layers/cross/query/kernel"] = _turned(layers("1.EncDecAttention.q"))
            made["decoder/layers/cross/kv/kernel"] = np.concatenate(kv, axis=-1)
            made["decoder/layers/cross/out/kernel"] = _turned(layers("1.EncDecAttention.o"))
            made["decoder/layers/cross_norm/scale"] = np.stack(layers("1.layer_norm"))
    return made
