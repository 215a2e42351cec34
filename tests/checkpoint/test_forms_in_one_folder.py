"""Two forms in one folder, each pair in both orders: the second is refused, and the first stays whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering as tr
from treering.errors import Exists, Format
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves

FIRST, SECOND = {"a": np.zeros(3)}, {"a": np.ones(4)}


def _convert(path: Path, tree: Any) -> None:
    tr.save(f"{path}-source", tree)
    tr.convert(f"{path}-source", path, to="leaves")


WRITE: dict[str, Callable[[Path, Any], object]] = {
    "checkpoint": tr.save,
    "run": lambda path, tree: tr.Run(path).save(1, tree).result(),
    "leaves": tree_serialize_leaves,
    "leaves by prefix": lambda path, tree: tree_serialize_leaves(path, tree, prefix="m"),
    "converted leaves": _convert,
    "hf": lambda path, tree: tr.save(path, tree, form="hf"),
}
READ: dict[str, Callable[[Path], Any]] = {
    "checkpoint": tr.load,
    "run": lambda path: tr.Run(path).load(),
    "leaves": tree_deserialize_leaves,
    "leaves by prefix": lambda path: tree_deserialize_leaves(path, prefix="m"),
    "converted leaves": tree_deserialize_leaves,
    "hf": tr.load,
}
# One directory of leaves may hold several trees, by their prefixes.
TOGETHER = {frozenset({"leaves", "leaves by prefix"})}
PAIRS = [pair for pair in itertools.permutations(WRITE, 2) if frozenset(pair) not in TOGETHER]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_the_second_form_is_refused(first: str, second: str, tmp_path: Path) -> None:
    if first.endswith("leaves") and "leaves" in second:
        return  # they replace each other, as saves of one form do
    path = tmp_path / "x"
    WRITE[first](path, FIRST)
    with pytest.raises((Exists, Format)) as caught:
        WRITE[second](path, SECOND)
    assert str(path) in str(caught.value)
    found = READ[first](path)
    found = found[0] if isinstance(found, tuple) else found
    np.testing.assert_array_equal(np.asarray(next(iter(found.values()))), FIRST["a"])
    assert tr.verify(path).ok
