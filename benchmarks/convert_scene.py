"""One source of the convert benchmark: its tree, its files in one format, and what makes a result right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import flax.serialization
import ml_dtypes
import numpy as np
import safetensors.numpy

import treering
from benchmarks import workloads
from benchmarks.checkpoint_peers import Orbax
from benchmarks.files import Files, warm
from benchmarks.measure import equal_bytes

__all__ = ["LARGEST_LEAF", "PACKED", "SHARDS", "SOURCES", "ConvertFiles"]

SHARDS = 4
"""Files of a Hugging Face folder."""
LARGEST_LEAF = 1536 * 32000 * 4
"""Bytes of the largest leaf at factor 1."""
PACKED = ("orbax",)
"""Sources in which a leaf is one chunk that is decoded as a whole."""


class ConvertFiles:
    """The transformer tree with float16 in the place of bfloat16, which numpy's format does not know, in one format.

    Args:
        source: the format.
        factor: scales its bytes.
        folder: where files go.
    """

    def __init__(self, source: str, factor: float, folder: Path) -> None:
        folder = folder.resolve()  # Orbax takes no relative paths
        self.work = workloads.build("A", factor)
        self.flat = {key: _as_float16(leaf) for key, leaf in workloads.flat(self.work.tree)}
        self.files = Files(folder / "converted")
        self.path = folder / f"source-{source}{_SUFFIXES.get(source, '')}"
        self._write = _WRITERS[source]

    def prepare(self) -> None:
        """Write the source, by the program whose format it is."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._write(self.path, self.flat)

    def close(self) -> None:
        """Remove every file."""
        self.files.clear()
        if self.path.is_dir():
            shutil.rmtree(self.path)
        else:
            self.path.unlink(missing_ok=True)

    @cached_property
    def room(self) -> np.ndarray[Any, Any]:
        """Memory to read files into."""
        return np.ones(4 << 20, np.uint8)

    def cached(self) -> Path:
        """The source, once all of its pages are in the page cache."""
        warm(self.path, self.room)
        return self.path

    def right_leaves(self, tree: Any) -> str | None:
        """Say what is wrong with a tree, flat or nested; names with dots are paths too."""
        found = {key.replace(".", "/"): leaf for key, leaf in workloads.flat(tree)}
        if found.keys() != self.flat.keys():
            return f"the keys are not those of the tree: {sorted(found.keys() ^ self.flat.keys())[:3]}"
        for key, wanted in self.flat.items():
            leaf = np.ascontiguousarray(np.asarray(found[key]))
            if leaf.dtype != wanted.dtype or leaf.shape != wanted.shape or not equal_bytes(leaf, wanted):
                return f"{key}: the values differ"
        return None


def _as_float16(leaf: Any) -> Any:
    return leaf.view(np.float16) if leaf.dtype == ml_dtypes.bfloat16 else leaf


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return dicts in dicts by the parts of the keys."""
    tree: dict[str, Any] = {}
    for key, leaf in flat.items():
        *above, last = key.split("/")
        branch = tree
        for part in above:
            branch = branch.setdefault(part, {})
        branch[last] = leaf
    return tree


def _dotted(flat: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("/", "."): leaf for key, leaf in flat.items()}


def _write_shards(path: Path, flat: Mapping[str, Any]) -> None:
    """Write a Hugging Face folder: shards of about the same size, in the order of the tree."""
    path.mkdir()
    names = [f"model-{number:05}-of-{SHARDS:05}.safetensors" for number in range(1, SHARDS + 1)]
    total, before = sum(leaf.nbytes for leaf in flat.values()), 0
    shards: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, leaf in _dotted(flat).items():
        shards[names[before * SHARDS // total]][key] = leaf
        before += leaf.nbytes
    for name, shard in shards.items():
        safetensors.numpy.save_file(shard, path / name, metadata={"format": "pt"})
    weights = {key: name for name, shard in shards.items() for key in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weights}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_orbax(path: Path, flat: Mapping[str, Any]) -> None:
    peer = Orbax()
    peer.save(path, workloads.to_jax(nested(flat)))
    peer.close()


def _write_flax(path: Path, flat: Mapping[str, Any]) -> None:
    path.write_bytes(flax.serialization.to_bytes(nested(flat)))


def _write_leaves(path: Path, flat: Mapping[str, Any]) -> None:
    treering.leaves.tree_serialize_leaves(path, workloads.to_jax(nested(flat)))


_SUFFIXES = {"safetensors": ".safetensors", "npz": ".npz", "flax": ".msgpack"}
_WRITERS: dict[str, Callable[[Path, Mapping[str, Any]], None]] = {
    "treering": lambda path, flat: treering.save(path, workloads.to_jax(nested(flat))),
    "safetensors": lambda path, flat: safetensors.numpy.save_file(_dotted(flat), path),
    "hf": _write_shards,
    "npz": lambda path, flat: np.savez(path, **_dotted(flat)),
    "flax": _write_flax,
    "leaves": _write_leaves,
    "orbax": _write_orbax,
}
SOURCES = tuple(_WRITERS)
"""Formats of the source."""
