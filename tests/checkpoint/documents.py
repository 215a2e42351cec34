"""Indexes with something changed, signed again, so that the reader gets past the digest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treering
from tests import on_disk

__all__ = ["Document", "document_of", "rewrite", "sample", "signed", "signed_text"]

Document = dict[str, Any]


def signed_text(body: str, version: str = "1") -> bytes:
    """An index with that text behind its first line."""
    return on_disk.signed("treering", body, version)


def signed(document: Document) -> bytes:
    """An index with those members."""
    return signed_text(json.dumps(document)[1:])


def document_of(folder: Path) -> Document:
    """The members of a checkpoint's index, without version and digest."""
    document = json.loads((folder / "treering.json").read_bytes())
    del document["treering"], document["digest"]
    return document


def rewrite(folder: Path, change: Callable[[Document], None]) -> None:
    """Change a checkpoint's index."""
    document = document_of(folder)
    change(document)
    (folder / "treering.json").write_bytes(signed(document))


def sample(folder: Path) -> Path:
    """A checkpoint with whole and divided arrays, values of every kind, and containers of every kind."""
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    divided = jax.device_put(jnp.arange(64, dtype=jnp.float32).reshape(8, 8), NamedSharding(mesh, P("x", "y")))
    tree = {
        "a": np.arange(6, dtype=np.int32).reshape(2, 3),
        "divided": divided,
        "empty": np.zeros((0, 3), np.float16),
        "large": np.arange(40_000, dtype=np.float64),
        "list": [1, 2.5, None, "text", b"bytes", True, 1 + 2j],
        "tuple": (np.float32(1), jax.random.key(0)),
        (3, "x"): {"inner": np.ones(4, np.complex128)},
        "text": "x" * 5000,
    }
    treering.save(folder, tree, metadata={"note": "sample"})
    return folder
