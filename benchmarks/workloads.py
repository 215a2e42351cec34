"""The trees that are measured: A a transformer, B many small leaves, C one big array.

Values are gaussian, not random bits: compressors of later benchmarks would look too good on random bits.
Every leaf starts at a 64-byte boundary, as jax's own arrays do.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import ml_dtypes
import numpy as np

from benchmarks.measure import equal_bytes

__all__ = [
    "DEVICES",
    "LeafKind",
    "Tree",
    "Workload",
    "ask_for_devices",
    "build",
    "flat",
    "mapped",
    "mesh",
    "outline",
    "same_leaves",
    "sharded",
    "to_jax",
]

Tree: TypeAlias = dict[str, Any]
LeafKind: TypeAlias = Literal["numpy", "jax"]
Shape: TypeAlias = tuple[int, ...]

DEVICES = 8
"""Devices of the mesh that trees are laid over."""

_ALIGNMENT = 64
_POOL = 1 << 22
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One tree with what the tables say about it."""

    name: str
    """A, B or C."""
    title: str
    """What it is, for people."""
    tree: Tree
    """Nested dict of numpy arrays."""
    leaves: int
    """Number of arrays."""
    nbytes: int
    """Bytes of all arrays."""
    repeats: int
    """Rounds for each round asked for; short cases need more of them."""


class _Filler:
    """Makes aligned arrays out of one pool of gaussian values, at the speed of memcpy."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        values = self._random.standard_normal(_POOL, dtype=np.float32) * np.float32(0.02)
        self._pools = {dtype: values.astype(dtype) for dtype in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))}

    def array(self, shape: Shape, dtype: Any) -> np.ndarray[Any, Any]:
        """A new array of this shape, its values a stretch of the pool, wrapped round."""
        kind = np.dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        room = np.empty(nbytes + _ALIGNMENT, np.uint8)
        start = -room.ctypes.data % _ALIGNMENT
        flat_array = room[start : start + nbytes].view(kind)
        pool = self._pools[kind]
        at, source = 0, int(self._random.integers(len(pool)))
        while at < len(flat_array):
            piece = pool[source : source + len(flat_array) - at]
            flat_array[at : at + len(piece)] = piece
            at, source = at + len(piece), 0
        return flat_array.reshape(shape)


class _Outliner:
    """Makes arrays of one item that look like whole ones: for those who only ask what there is."""

    def array(self, shape: Shape, dtype: Any) -> np.ndarray[Any, Any]:
        """A view of one item in this shape."""
        return np.broadcast_to(np.zeros((), dtype), shape)


def _transformer(fill: _Filler | _Outliner, factor: float) -> Tree:
    """16 layers of 9 leaves, embedding, last norm and head: 147 leaves, 1049 MiB at factor 1."""
    scale = math.sqrt(factor)
    width, narrow, hidden, words = (max(8, round(size * scale)) for size in (1536, 512, 4096, 32000))
    half = ml_dtypes.bfloat16

    def layer() -> Tree:
        return {
            "attention": {
                "query": {"kernel": fill.array((width, width), half)},
                "key": {"kernel": fill.array((width, narrow), half)},
                "value": {"kernel": fill.array((width, narrow), half)},
                "output": {"kernel": fill.array((width, width), half)},
            },
            "attention_norm": {"scale": fill.array((width,), np.float32)},
            "mlp": {
                "gate": {"kernel": fill.array((width, hidden), half)},
                "up": {"kernel": fill.array((width, hidden), half)},
                "down": {"kernel": fill.array((hidden, width), half)},
            },
            "mlp_norm": {"scale": fill.array((width,), np.float32)},
        }

    return {
        "params": {
            "embedding": {"table": fill.array((words, width), half)},
            "head": {"kernel": fill.array((width, words), np.float32)},
            "layers": {f"{index:02d}": layer() for index in range(16)},
            "norm": {"scale": fill.array((width,), np.float32)},
        }
    }


def _small_leaves(fill: _Filler | _Outliner, factor: float) -> Tree:
    """100 branches of 100 leaves of 1 KiB at factor 1."""
    count = max(1, round(10_000 * factor))
    tree: Tree = {}
    for index in range(count):
        branch = tree.setdefault(f"block_{index // 100:03d}", {})
        branch[f"leaf_{index % 100:02d}"] = fill.array((256,), np.float32)
    return tree


def _one_array(fill: _Filler | _Outliner, factor: float) -> Tree:
    """One float32 array of 1 GiB at factor 1."""
    return {"weights": fill.array((max(1, round((1 << 28) * factor)),), np.float32)}


_BUILDERS = {
    "A": (_transformer, "transformer, bf16 with f32 norms and head", 1),
    "B": (_small_leaves, "many leaves of 1 KiB", 3),
    "C": (_one_array, "one float32 array", 1),
}


def build(name: str, factor: float = 1.0, seed: int = 7) -> Workload:
    """Build workload A, B or C with numpy leaves; factor scales its bytes, seed fixes its values.

    Raises:
        KeyError: there is no such workload.
    """
    return _built(name, factor, _Filler(seed))


def outline(name: str, factor: float = 1.0) -> Workload:
    """The same with arrays that have shapes and dtypes, and take no memory: all their items are one zero.

    Raises:
        KeyError: there is no such workload.
    """
    return _built(name, factor, _Outliner())


def _built(name: str, factor: float, fill: _Filler | _Outliner) -> Workload:
    make, what, repeats = _BUILDERS[name]
    tree = make(fill, factor)
    arrays = [array for _, array in flat(tree)]
    nbytes = sum(array.nbytes for array in arrays)
    title = f"{what}: {len(arrays):,} leaves, {nbytes / _MIB:,.1f} MiB"
    return Workload(name=name, title=title, tree=tree, leaves=len(arrays), nbytes=nbytes, repeats=repeats)


def flat(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its key, parts joined with a slash, in the dict's order."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def to_jax(tree: Tree) -> Tree:
    """The same tree with new jax arrays that no one has converted to numpy yet.

    On CPU they alias the numpy leaves, which are aligned and which nobody writes: no bytes are copied.
    The dicts keep their order, which jax's own tree functions would sort.
    """
    arrays = dict(zip((key for key, _ in flat(tree)), jax.device_put([leaf for _, leaf in flat(tree)]), strict=True))
    jax.block_until_ready(arrays)
    return _refill(tree, "", arrays)


def _refill(tree: Tree, prefix: str, leaves: dict[str, Any]) -> Tree:
    """The same branches with other leaves, taken by their keys."""
    return {
        key: _refill(value, f"{prefix}{key}/", leaves) if isinstance(value, dict) else leaves[prefix + key]
        for key, value in tree.items()
    }


def mapped(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """The same branches with the function's answer for each leaf."""
    return _refill(tree, "", {key: function(leaf) for key, leaf in flat(tree)})


def ask_for_devices() -> None:
    """Ask jax for as many pretended devices as a mesh needs; only before jax starts, and not where XLA was asked."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", DEVICES)


def mesh(*, turned: bool = False) -> jax.sharding.Mesh:
    """A mesh of 4 x 2 devices; turned, the same devices as 2 x 4.

    Raises:
        RuntimeError: jax has fewer devices; it must be asked for them before it starts.
    """
    devices = jax.devices()[:DEVICES]
    if len(devices) < DEVICES:
        raise RuntimeError(f"{DEVICES} devices are needed, jax has {len(devices)}: XLA_FLAGS or jax_num_cpu_devices")
    grid = np.array(devices).reshape(4, 2)
    return jax.sharding.Mesh(grid.T if turned else grid, ("rows", "columns"))


def sharded(leaf: Any, over: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
    """Rows over one axis of the mesh and columns over the other, where the shape can be divided so."""
    names = [
        name if size % over.shape[name] == 0 else None for name, size in zip(over.axis_names, leaf.shape, strict=False)
    ]
    return jax.sharding.NamedSharding(over, jax.sharding.PartitionSpec(*names))


def same_leaves(found: dict[str, Any], wanted: dict[str, Any], kind: type[Any]) -> str | None:
    """What is wrong with a flat dict of leaves, or None if they have the wanted keys, dtypes, shapes and bytes."""
    if found.keys() != wanted.keys():
        return "the keys are not those of the tree"
    for key, value in wanted.items():
        leaf = found[key]
        if not isinstance(leaf, kind) or leaf.dtype != value.dtype or leaf.shape != value.shape:
            return f"{key}: wanted {kind.__name__} {value.dtype}{value.shape}, found {type(leaf).__name__}"
        if not equal_bytes(np.ascontiguousarray(np.asarray(leaf)), value):
            return f"{key}: the values differ"
    return None
