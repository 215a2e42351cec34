"""The trees that are measured: A a transformer, B many small leaves, C one big array.

Values are gaussian, not random bits: compressors of later benchmarks would look too good on random bits.
Every leaf starts at a 64-byte boundary, as jax's own arrays do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import ml_dtypes
import numpy as np

__all__ = ["LeafKind", "Tree", "Workload", "build", "flat", "to_jax"]

Tree: TypeAlias = dict[str, Any]
LeafKind: TypeAlias = Literal["numpy", "jax"]
Shape: TypeAlias = tuple[int, ...]

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


def _transformer(fill: _Filler, factor: float) -> Tree:
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


def _small_leaves(fill: _Filler, factor: float) -> Tree:
    """100 branches of 100 leaves of 1 KiB at factor 1."""
    count = max(1, round(10_000 * factor))
    tree: Tree = {}
    for index in range(count):
        branch = tree.setdefault(f"block_{index // 100:03d}", {})
        branch[f"leaf_{index % 100:02d}"] = fill.array((256,), np.float32)
    return tree


def _one_array(fill: _Filler, factor: float) -> Tree:
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
    make, what, repeats = _BUILDERS[name]
    tree = make(_Filler(seed), factor)
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
