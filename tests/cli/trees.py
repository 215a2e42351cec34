"""Checkpoints and files that the tests of the command line look at."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import treering
from treering import serialization


class Adam(NamedTuple):
    count: int  # type: ignore[assignment]
    mu: dict[str, Any]


def state() -> dict[Any, Any]:
    """A state with something of every kind."""
    return {
        "params": {"w": jnp.arange(24.0).reshape(4, 6), "b": np.arange(3).astype(ml_dtypes.bfloat16)},
        "adam": Adam(3, {"w": np.arange(8.0).reshape(2, 4)}),
        "key": jax.random.key(0),
        "names": ["a", None, (1, 2.5)],
        "empty": {},
        5: {"a/b": np.int8(7)},
        "note": "long " * 2000,
        "raw": b"\x00\xff",
        "nan": float("nan"),
        "wide": 2**70,
        "c": 1 - 2j,
        "act": jax.nn.gelu,
    }


def saved(path: Path, tree: Any = None, **metadata: Any) -> Path:
    """Save a tree as a checkpoint or single file, as the suffix says."""
    treering.save(path, state() if tree is None else tree, metadata=metadata)
    return path


def arrays() -> dict[str, Any]:
    """What every form can hold."""
    return {
        "w": np.arange(24, dtype=np.float32).reshape(4, 6),
        "b": np.arange(3).astype(ml_dtypes.bfloat16),
        "deep": {"n": np.arange(5), "none": np.zeros((0, 3), np.int16)},
    }


def in_every_form(folder: Path) -> dict[str, Path]:
    """The same arrays as a checkpoint, as our safetensors, as another writer's, as msgpack, and that in gzip."""
    from safetensors.numpy import save_file

    found = {
        "checkpoint": saved(folder / "checkpoint", arrays()),
        "safetensors": saved(folder / "ours.safetensors", arrays()),
        "foreign": folder / "foreign.safetensors",
        "msgpack": folder / "state.msgpack",
        "gzip": folder / "state.gz",
    }
    flat = {"w": arrays()["w"], "n": arrays()["deep"]["n"], "a.b": np.array(2.5)}
    save_file(flat, found["foreign"], metadata={"format": "np"})
    serialization.save_to_file(arrays(), found["msgpack"])
    found["gzip"].write_bytes(serialization.to_compressed_bytes(arrays()))
    return found
