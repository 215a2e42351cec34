"""The trees that `old_programs` writes: every kind of container, leaf, key and static field; public names only."""

from __future__ import annotations

import dataclasses
from typing import Any

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.core import freeze

from tests.compat import golden_checkpoints

__all__ = ["arrays", "checkpoints", "leaves", "states"]

LONG = "ring " * 2000
TEXTS = (
    "",
    "a/b",
    "~",
    "~0",
    "~1",
    "*",
    ".",
    "..",
    "a.b",
    "%2E",
    "%-",
    "__metadata__",
    "__treering__",
    "treering.json",
)
HOSTILE = (*TEXTS, ".zarray", "0.0", "tensorstore_index.json", ".treering", "é", "\U0001f332", "\n\0", "\\", "a" * 200)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Fields:
    """A class with static fields of several kinds."""

    w: Any
    name: str = dataclasses.field(default="", metadata={"static": True})
    shape: tuple[Any, ...] = dataclasses.field(default=(), metadata={"static": True})
    rate: float | None = dataclasses.field(default=None, metadata={"static": True})


class Linear(eqx.Module):
    """A module of equinox."""

    weight: jax.Array
    bias: jax.Array | None
    size: int = eqx.field(static=True)


@flax.struct.dataclass
class Moments:
    """A class of flax."""

    mean: Any
    count: int
    axis: str = flax.struct.field(pytree_node=False, default="x")


def _params() -> dict[str, Any]:
    return {"dense": {"kernel": jnp.arange(12, dtype=jnp.bfloat16).reshape(3, 4), "bias": jnp.zeros(4)}}


def states() -> dict[str, Any]:
    """States of the libraries around jax."""
    optimizer = optax.chain(optax.clip(1.0), optax.adamw(1e-3))
    moments = Moments(mean=jnp.arange(3.0), count=7)
    return {
        "optax": optimizer.init(_params()),
        "flax": {"moments": moments, "frozen": freeze({"b": {"c": np.arange(2)}, "a": 1.5})},
        "msgpack": {
            "params": _params(),
            "step": 3,
            "list": [np.float32(1.5), (1, True)],
            "moments": moments,
            "none": None,
        },
    }


def arrays() -> dict[str, Any]:
    """What a single safetensors file can hold."""
    return {
        "a": [np.arange(3.0), (jnp.ones(2, jnp.bfloat16), None)],
        "ints": {5: np.float32(2)},
        "empty": np.zeros((0, 3), np.int8),
        "f8": jnp.arange(4).astype(jnp.float8_e4m3fn),
        "blocks": np.arange(40_000, dtype=np.uint32) % 256,
    }


def _keys() -> dict[str, Any]:
    return {
        "threefry": jax.random.key(3),
        "many": jax.random.split(jax.random.key(5), 6).reshape(2, 3),
        "rbg": jax.random.key(7, impl="rbg"),
        "unsafe": jax.random.key(7, impl="unsafe_rbg"),
        "raw": jax.random.PRNGKey(9),
    }


def checkpoints() -> dict[str, Any]:
    """The name of each checkpoint, and the tree in it."""
    trees = golden_checkpoints.trees()
    ours = {name: trees[name] for name in ("dtypes", "arrays", "divided", "python", "containers", "bare")}
    return ours | {
        "states": {**states(), "equinox": Linear(jnp.ones((2, 3)), None, 3)},
        "keys": _keys(),
        "static": [Fields(jnp.ones(2), "a/b", ("x", (1, None), 2.5), 0.1), Fields(None, LONG, (), float("nan"))],
        "hostile": {text: np.full(2, number, np.int8) for number, text in enumerate(HOSTILE)},
        "on devices": {
            name: jnp.arange(4).astype(name) for name in ("int4", "uint4", "float8_e5m2", "float16", "bool")
        },
        "blocks": {"large": jnp.arange(100_000, dtype=jnp.int32) % 256, "none": jnp.zeros((0, 7)), "text": LONG},
    }


def leaves() -> dict[str, tuple[Any, dict[str, Any]]]:
    """The name of each leaves directory, the tree in it, and what else it is saved with."""
    trees = checkpoints()
    kinds = {name: trees["dtypes"][name] for name in ("bool", "int64", "float16", "complex64", "bfloat16", "int4")}
    return {
        "arrays": (trees["arrays"], {}),
        "divided": (trees["divided"], {"prefix": "p"}),
        "python": (trees["python"], {}),
        "containers": (trees["containers"], {}),
        "states": (trees["states"], {"prefix": "a.b/c"}),
        "hostile": (trees["hostile"], {}),
        "keys": (trees["keys"], {}),
        "static": (trees["static"], {}),
        "kinds": ({**kinds, "f8": trees["dtypes"]["float8_e4m3fn"]}, {"compressor": {"id": "zstd", "level": 1}}),
        "cut": ({"a": np.arange(700, dtype=np.float32).reshape(7, 100)}, {"chunk_bytes": 800}),
        "packed": ({"a": np.arange(700.0)}, {"chunk_bytes": 800, "compressor": {"id": "blosc"}}),
    }
