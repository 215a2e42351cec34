"""Many trees in one directory: none touches another, none lies in another in silence; other programs' trees too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

from tests.folders import listing
from tests.leaves.saved import INDEX, arrays_at, index_at, stored, visible
from tests.trees import assert_same
from treering.errors import MismatchError, UnsupportedError
from treering.leaves import tree_serialize_leaves

GOLDEN = Path(__file__).parents[1] / "compat" / "golden" / "eformer"


def test_every_prefix_is_a_tree_of_its_own(tmp_path: Path) -> None:
    trees: dict[str | None, Any] = {
        "model": {"w": jnp.ones((2, 3)), "n": None},
        "ema.model": {"w": jnp.zeros((2, 3))},
        "a/b": {"c": np.arange(3)},
        "a.c": [1, jnp.ones(1)],
        None: {"step": jnp.int32(7), "models": {"w": jnp.ones(1)}},
        "just numbers": {"n": 1},
    }
    for prefix, tree in trees.items():
        tree_serialize_leaves(tmp_path / "d", tree, prefix=prefix)
    for _ in range(2):
        for prefix, tree in trees.items():
            assert_same(stored(tmp_path / "d", prefix), tree, restored=False)
        tree_serialize_leaves(tmp_path / "d", trees["model"], prefix="model")
    index = index_at(tmp_path / "d")
    assert index["version"] == "2.0"
    assert set(index["prefixes"]) == trees.keys() - {None}
    assert arrays_at(tmp_path / "d", "a.c") == {"a/c/1": (1, "float32")}
    assert arrays_at(tmp_path / "d", None) == {"step": ("int32",), "models/w": (1, "float32")}


def test_the_empty_prefix_is_none(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path / "d", {"w": jnp.ones(3)}, prefix="")
    assert index_at(tmp_path / "d")["prefixes"] == {}
    assert_same(stored(tmp_path / "d"), {"w": jnp.ones(3)}, restored=False)


BAD = [
    "..",
    "../x",
    "/abs",
    "a//b",
    "a/",
    ".",
    "a..b",
    "x\0y",
    "a:b",
    "a\\b",
    "%2E",
    "x" * 300,
    "\udc80",
    "\n",
    3,
    b"x",
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("prefix", BAD, ids=repr)
@pytest.mark.parametrize("tree", [{"w": jnp.ones(2)}, {}], ids=["array", "empty"])
def test_a_prefix_that_is_no_folder_is_refused_and_makes_nothing(prefix: Any, tree: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="prefix"):
        tree_serialize_leaves(tmp_path / "d", tree, prefix=prefix)
    assert list(tmp_path.iterdir()) == []


W = {"w": jnp.ones(2)}

CLASHES: list[tuple[str | None, Any, str | None, Any]] = [
    ("model", {"ema": W}, "model/ema", W),  # the same folder
    ("model", {"ema": {"w": W}}, "model.ema", W),  # in it
    ("model", {"ema": W}, "model.ema", {"w": W}),  # around it
    ("model", W, None, {"model": W}),
    (None, {"model": {"w": {"x": jnp.ones(1)}}}, "model", W),
    (None, {"model": jnp.ones(1)}, "model", W),  # a leaf where the prefix's folder is
    ("model", jnp.ones(1), None, {"model": {"a": {"b": jnp.ones(1)}}}),
    ("a", jnp.ones(1), "a/b", jnp.ones(1)),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CLASHES, ids=range(len(CLASHES)))
def test_trees_that_would_lie_in_one_another_are_refused(case: Any, tmp_path: Path) -> None:
    for first, one, second, other in (case, (*case[2:], *case[:2])):
        path = tmp_path / repr(first)
        tree_serialize_leaves(path, one, prefix=first)
        before = listing(path)
        with pytest.raises(MismatchError) as caught:
            tree_serialize_leaves(path, other, prefix=second)
        assert set(arrays_at(path, first)) & set(caught.value.message.split("'"))  # both leaves are named
        assert listing(path) == before
        assert_same(stored(path, first), one, restored=False)
        # Once it is out of the way there is no clash.
        tree_serialize_leaves(path, {"n": 1}, prefix=first)
        tree_serialize_leaves(path, other, prefix=second)
        assert_same(stored(path, second), other, restored=False)


def test_trees_side_by_side_are_no_clash(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path / "d", {"w": W, "ema-2": W}, prefix="model")
    tree_serialize_leaves(tmp_path / "d", W, prefix="model/ema")
    tree_serialize_leaves(tmp_path / "d", {"model2": W, "mode": W}, prefix=None)
    assert len(visible(tmp_path / "d")) == 1 + 2 * 5


# ----------------------------------------------------------------------------------------------------- other programs


def written_by_eformer(path: Path, prefix: str | None, arrays: dict[str, Any]) -> None:
    """Do as eformer does: arrays with zstd, then the whole index read, changed, and written."""
    file = path / INDEX
    index = json.loads(file.read_text()) if file.is_file() else {}
    entries = []
    for key, value in arrays.items():
        folder = "/".join([prefix, key] if prefix else [key])
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": str(path / folder)},
            "metadata": {
                "compressor": {"id": "zstd"},
                "shape": value.shape,
                "chunks": [max(1, n) for n in value.shape],
            },
            "dtype": value.dtype.name,
        }
        ts.open(spec, create=True, open=True).result().write(value).result()
        entries.append({"path": folder, "shape": list(value.shape), "dtype": value.dtype.name})
    index |= {"format": "tensorstore", "version": "0.0.101"}
    index.setdefault("prefixes", {})
    if prefix:
        index["prefixes"][prefix] = entries
    else:
        index["arrays"] = entries
    file.write_text(json.dumps(index, indent=2))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("model", "optimizer"), ("a/b", "optimizer"), (None, "optimizer"), ("model", None), ("a/b", None)],
)
def test_eformer_adds_a_tree_to_ours_and_we_to_its(ours: str | None, theirs: str | None, tmp_path: Path) -> None:
    tree = {"w": jnp.arange(6.0).reshape(2, 3), "n": None, "k": jax.random.key(1), "u": jnp.ones(3, "uint4")}
    arrays = {"mu/x": np.arange(4, dtype="f4"), "nu": np.ones((2, 2), "i4"), "s": np.float32(3).reshape(())}
    for path, first in ((tmp_path / "one", ours), (tmp_path / "other", theirs)):
        for turn in range(4):
            if (turn % 2 == 0) == (first == ours):
                tree_serialize_leaves(path, tree, prefix=ours)
            else:
                written_by_eformer(path, theirs, arrays)
        assert_same(stored(path, ours), tree, restored=False)
        found = stored(path, theirs)
        assert_same(
            found, {"mu": {"x": jnp.arange(4.0)}, "nu": jnp.ones((2, 2), "i4"), "s": jnp.float32(3)}, restored=False
        )


def test_our_save_replaces_a_tree_of_eformer(tmp_path: Path) -> None:
    arrays = {"w": np.arange(4, dtype="f4"), "old/x": np.ones((2, 2), "i4")}
    for prefix in ("model", None):
        written_by_eformer(tmp_path / "d", prefix, arrays)
    tree = {"w": jnp.ones((3, 3), "bfloat16"), "n": 1}
    tree_serialize_leaves(tmp_path / "d", tree, prefix="model")
    assert_same(stored(tmp_path / "d", "model"), tree, restored=False)
    assert sorted(stored(tmp_path / "d")) == ["old", "w"]
    tree_serialize_leaves(tmp_path / "d", tree)
    assert visible(tmp_path / "d") == {INDEX, "model/w/.zarray", "model/w/0.0", "w/.zarray", "w/0.0"}


@pytest.mark.parametrize("name", ["plain", "prefixed", "mixed_index", "index_v1", "sharded_2x4"])
def test_a_tree_of_ours_beside_the_golden_ones(name: str, tmp_path: Path) -> None:
    path = tmp_path / "d"
    shutil.copytree(GOLDEN / name, path)
    theirs = {prefix: stored(path, prefix) for prefix in prefixes_at(path)}
    files = listing(path)
    tree = {"w": jnp.arange(3), "n": None}
    tree_serialize_leaves(path, tree, prefix="ours")
    assert_same(stored(path, "ours"), tree, restored=False)
    for prefix, want in theirs.items():
        assert_same(stored(path, prefix), want, restored=False)
    kept = listing(path)
    for file, data in files.items():
        assert file == INDEX or kept[file] == data
    # What theirs listed, it still lists.
    index, old = index_at(path), json.loads(files[INDEX] or b"")
    assert index.get("arrays") == old.get("arrays")
    assert index["prefixes"].items() >= old.get("prefixes", {}).items()


def prefixes_at(path: Path) -> list[str | None]:
    """The trees that an index lists."""
    index = index_at(path)
    return [*index.get("prefixes", {}), *([None] if "arrays" in index else [])]


def test_members_that_nobody_knows_stay(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path / "d", {"w": jnp.ones(2)}, prefix="model")
    index = index_at(tmp_path / "d")
    index |= {"by": {"me": [1, "ä"]}, "arrays": [{"path": "x", "shape": [], "dtype": "int32", "note": "mine"}]}
    index["prefixes"]["model"][0]["note"] = 2
    (tmp_path / "d" / INDEX).write_text(json.dumps(index))
    tree_serialize_leaves(tmp_path / "d", {"w": jnp.ones(2)}, prefix="other")
    found = index_at(tmp_path / "d")
    assert found["by"] == {"me": [1, "ä"]}
    assert found["arrays"] == index["arrays"]
    assert found["prefixes"]["model"] == index["prefixes"]["model"]
