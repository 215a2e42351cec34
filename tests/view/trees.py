"""Listings that the tests look at."""

from __future__ import annotations

from typing import Any

from treering._format.records import LeafRecord


def array(*shape: int, dtype: str = "float32", itemsize: int = 4, offset: int = 10) -> LeafRecord:
    nbytes = itemsize
    for length in shape:
        nbytes *= length
    return LeafRecord(kind="array", dtype=dtype, shape=shape, nbytes=nbytes, offset=offset)


def small() -> dict[str, Any]:
    return {
        "params": {
            "dense": {"kernel": array(2, 3), "bias": array(3, dtype="bfloat16", itemsize=2)},
            "norm": {"scale": array(3)},
        },
        "opt": {"0": {}, "mu": {"dense": {"kernel": array(2, 3)}}},
        "names": ["a", None, (1, 2.5)],
        "step": 7,
    }


def chain(levels: int) -> dict[str, Any]:
    """Nest maps ``levels`` deep, with a leaf on each level."""
    node: dict[str, Any] = {"leaf": 1}
    for _ in range(levels - 1):
        node = {"leaf": 1, "in": node}
    return node
