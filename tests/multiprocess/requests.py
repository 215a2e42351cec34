"""Worker of `test_requests`: loads from a bucket, whose requests each process counts."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy
from jax.sharding import PartitionSpec as P

import treering as tr
from tests.buckets import MemoryBucket
from tests.multiprocess.trees import placed, spread

_TREE = {
    f"{name} {number:03}": np.arange(number, number + side * side, dtype=np.float32).reshape(side, side)
    for name, count, side in (("small", 80, 64), ("large", 12, 768))
    for number in range(count)
}


class _SameBucket(MemoryBucket):
    """A bucket that is the same in each process: its name says so, and versions follow from contents."""

    def __init__(self) -> None:
        super().__init__("s3://of-all")

    def _e_tag(self, data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()


def loads(folder: str) -> dict[str, dict[str, Any]]:
    """Save to a folder, load what is in it from a bucket in several ways, and return what each load asked for."""
    rows = spread("line rows", jax.devices(), 2)
    tr.save(Path(folder, "saved"), {name: placed(items, rows) for name, items in _TREE.items()}, timeout=60)
    bucket = _SameBucket()
    for file in Path(folder, "saved").glob("[!.]*"):
        bucket.put(f"saved/{file.name}", file.read_bytes())
    bucket.put("foreign.safetensors", safetensors.numpy.save(_TREE))
    found: dict[str, dict[str, Any]] = {}
    for name in ("saved", "foreign.safetensors"):
        for how, spec in {"rows": P("x"), "columns": P(None, "x"), "everywhere": P()}.items():
            wanted = jax.sharding.NamedSharding(rows.mesh, spec)
            like = {
                key: jax.ShapeDtypeStruct(items.shape, items.dtype, sharding=wanted) for key, items in _TREE.items()
            }
            bucket.start_over()
            tree: Any = tr.load(tr.bucket(bucket) / name, like, timeout=60)
            for key, items in _TREE.items():
                for shard in tree[key].addressable_shards:
                    assert np.array_equal(shard.data, items[shard.index])
            found[f"{name}: {how}"] = {
                "asked": len(bucket.asked),
                "opened": len(bucket.opened),
                "received": bucket.received,
                "wanted": sum(items.nbytes for items in _TREE.values()) // (jax.process_count() if spec else 1),
            }
    return found
