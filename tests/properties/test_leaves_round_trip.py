"""Every tree goes through a leaves directory bit for bit and node for node, whatever stood there before."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.leaves.saved import stored
from tests.properties.strategies import quick
from tests.properties.test_checkpoint_round_trip import assert_stored, more_trees
from treering.errors import UnsupportedError
from treering.leaves import index_leaves, tree_serialize_leaves
from treering.tree import tree_map_with_path

WAYS: list[dict[str, Any]] = [
    {},
    {"chunk_bytes": 16},
    {"compressor": {"id": "zstd", "level": 1}},
    {"compressor": {"id": "blosc"}, "chunk_bytes": 30},
    {"write_index": False},
]


def zarr_holds(tree: Any) -> bool:
    """Whether zarr v2 has a form for every array."""
    leaves: list[Any] = []
    tree_map_with_path(lambda _, leaf: leaves.append(leaf), tree)
    return not any(
        isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.type in (np.longdouble, np.clongdouble)
        for leaf in leaves
    )


@quick(50)
@given(st.lists(more_trees(), min_size=1, max_size=2), st.sampled_from([None, "model", "a/b.c"]), st.sampled_from(WAYS))
def test_a_tree_goes_round(trees: list[Any], prefix: str | None, way: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "d"
        beside = {"w": np.arange(5), "n": None}
        tree_serialize_leaves(path, beside, prefix="beside")
        for tree in trees:
            if not zarr_holds(tree):
                with pytest.raises(UnsupportedError, match="zarr v2"):
                    tree_serialize_leaves(path, tree, prefix=prefix, **way)
                continue
            tree_serialize_leaves(path, tree, prefix=prefix, **way)
            index_leaves(path)
            assert_stored(stored(path, prefix), tree)
        assert_stored(stored(path, "beside"), beside)
