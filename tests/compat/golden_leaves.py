"""Leaves directories of version 1 as they were written once: the trees that went in, and how the files were made.

    python -c "from tests.compat.golden_leaves import main; main()"    # writes golden/treering-leaves anew, 8 devices

Every later version has to read them. They change only if a tree here does.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.compat import golden_checkpoints
from treering.leaves import tree_serialize_leaves

__all__ = ["GOLDEN", "ZSTD", "branches", "main", "write"]

GOLDEN = Path(__file__).parent / "golden" / "treering-leaves"
ZSTD = {"id": "zstd", "level": 1}

DTYPES = ("bool", "int8", "uint16", "int64", "float16", "float64", "complex64", "datetime64[ns]", "bfloat16")
MORE_DTYPES = ("int4", "uint4", "float8_e4m3fn", "float8_e4m3", "float4_e2m1fn")


def _in_rows() -> jax.Array:
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    return jax.device_put(jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), NamedSharding(mesh, P("x")))


def branches() -> dict[str, dict[str | None, tuple[Any, dict[str, Any]]]]:
    """The name of each directory; in it the tree of each prefix, and what else it was saved with."""
    trees = golden_checkpoints.trees()
    kinds = {name: trees["dtypes"][name] for name in (*DTYPES, *MORE_DTYPES)}
    ragged = np.arange(70, dtype=np.float32).reshape(7, 10)
    return {
        "example": {"model": ({"params": {"w": _in_rows(), "layer.0": np.float64(0.5)}, "step": 7}, {})},
        "mixed": {
            "model.ema": ({"w": np.arange(3)}, {}),
            "opt/adam": ({"w": np.arange(4), "note": "x" * 5000}, {}),
            None: ({"extra": [jnp.ones(2), None]}, {}),
        },
        "dtypes": {None: (kinds, {}), "packed": (kinds, {"compressor": ZSTD})},
        "arrays": {None: (trees["arrays"], {})},
        "ragged": {
            None: ({"a": ragged}, {"chunk_bytes": 80}),
            "p": ({"a": ragged}, {"chunk_bytes": 80, "compressor": ZSTD}),
        },
        "divided": {None: (trees["divided"], {})},
        "python": {None: (trees["python"], {})},
        "containers": {None: (trees["containers"], {})},
        "bare": {None: (np.arange(3), {}), "p": (np.arange(4), {})},
    }


def write(folder: Path, saves: dict[str | None, tuple[Any, dict[str, Any]]]) -> None:
    """Save the branches of one directory."""
    for prefix, (tree, options) in saves.items():
        tree_serialize_leaves(folder, tree, prefix=prefix, **options)


def main() -> None:
    """Write them all."""
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for name, saves in branches().items():
        write(GOLDEN / name, saves)
