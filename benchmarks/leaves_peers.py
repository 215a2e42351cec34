"""What the benchmark of leaves directories compares with: eformer, and TensorStore by itself."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore

from benchmarks.workloads import Tree, flat

__all__ = ["Eformer", "tensorstore_load", "tensorstore_save"]

_SLOW_START = "eformer takes seconds to import, and lives in an environment of its own: python3 dev.py bench leaves"


class Eformer:
    """eformer's two functions, each with a manager of its own that it waits for."""

    def __init__(self) -> None:
        try:
            from eformer import serialization
        except ImportError as error:
            raise SystemExit(f"{error}; {_SLOW_START}") from error
        self._serialization = serialization

    def save(self, path: Path, tree: Tree) -> Path:
        """Save to a path where nothing is."""
        self._serialization.tree_serialize_leaves(path, tree)
        return path

    def load(self, path: Path, mesh: jax.sharding.Mesh, shardings: dict[str, Any] | None) -> Tree:
        """Load as nested dicts; shardings by dotted key."""
        tree: Tree = self._serialization.tree_deserialize_leaves(path, mesh, shardings=shardings)
        return jax.block_until_ready(tree)


def tensorstore_save(path: Path, tree: Tree, *, durable: bool) -> Path:
    """Write every leaf, or every shard of one, with TensorStore: zarr v2, no compressor, one chunk for each shard.

    The index is written plainly, so that the result is a leaves directory too.
    """
    context = tensorstore.Context({"file_io_sync": durable})
    pending: list[Any] = []
    entries = []
    for key, leaf in flat(tree):
        shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
        chunk = [max(1, length) for length in shards[0].data.shape]
        store = tensorstore.open(_spec(path / key, leaf, chunk), create=True, open=True, context=context)
        pending.append((store, shards))
        entries.append({"path": key, "shape": list(leaf.shape), "dtype": leaf.dtype.name})
    writes = [
        store.result()[shard.index].write(
            np.asarray(shard.data), can_reference_source_data_indefinitely=True, batch=None
        )
        for store, shards in pending
        for shard in shards
    ]
    for write in writes:
        write.result()
    index = {"format": "tensorstore", "version": "2.0", "prefixes": {}, "arrays": entries}
    (path / "tensorstore_index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return path


def _spec(path: Path, leaf: Any, chunk: list[int]) -> dict[str, Any]:
    metadata = {
        "shape": list(leaf.shape),
        "chunks": chunk,
        "dtype": "bfloat16" if leaf.dtype.name == "bfloat16" else leaf.dtype.str,
        "compressor": None,
        "filters": None,
        "order": "C",
        "fill_value": None,
        "zarr_format": 2,
    }
    return {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{path}{os.sep}"}, "metadata": metadata}


def tensorstore_load(path: Path, keys: list[str]) -> dict[str, Any]:
    """Read every leaf with TensorStore from maps of its files, and put it on the first device."""
    context = tensorstore.Context({"file_io_mode": {"mode": "memmap"}})
    stores = [
        tensorstore.open(
            {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{path / key}{os.sep}"}}, context=context
        )
        for key in keys
    ]
    reads = [store.result().read() for store in stores]
    arrays = jax.device_put([read.result() for read in reads])
    return jax.block_until_ready(dict(zip(keys, arrays, strict=True)))
