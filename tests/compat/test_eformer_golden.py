"""Leaves directories that eformer wrote: loaded to the last bit, on one device and on a mesh, by every door."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treering as tr
from tests import meshes
from tests.compat.golden_files import EFORMER, dtype_named
from tests.trees import assert_same
from treering.errors import KeptOnHostWarning, MismatchError, UnsupportedError
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves
from treering.sharding import apply_sharding_tree, create_sharding_tree_from_index, validate_sharding_tree

GRID = meshes.grid(2, 4, axes=("dp", "tp"))
ROW = meshes.line(axis="d")

# Folder and prefix of every tree; "x64" needs jax_enable_x64.
TREES: list[tuple[str, str | None]] = [
    ("plain", None), ("prefixed", "model"), ("prefixed", "optimizer"), ("mixed_index", None), ("mixed_index", "model"),
    ("dtypes", None), ("sharded_2x4", None), ("index_v1", None), ("x64", None),
]  # fmt: skip


def expected(name: str, prefix: str | None) -> dict[str, np.ndarray]:
    """The arrays of one tree, by their paths below the prefix."""
    dtypes = json.loads((EFORMER / f"{name}.expected.json").read_text(encoding="utf-8"))
    others = {"prefixed": ("model/", "optimizer/"), "mixed_index": ("model/",)}.get(name, ())
    with np.load(EFORMER / f"{name}.expected.npz") as stored:
        arrays = {key: stored[key].view(dtype_named(dtype)) for key, dtype in dtypes.items()}
    if prefix is None:
        return {key: array for key, array in arrays.items() if not key.startswith(others)}
    return {key.removeprefix(f"{prefix}/"): array for key, array in arrays.items() if key.startswith(f"{prefix}/")}


def flat(tree: Any, path: tuple[str, ...] = ()) -> dict[str, Any]:
    if isinstance(tree, dict):
        return {key: leaf for name, child in tree.items() for key, leaf in flat(child, (*path, name)).items()}
    return {"/".join(path): tree}


def assert_holds(tree: Any, name: str, prefix: str | None) -> None:
    leaves = flat(tree)
    want = expected(name, prefix)
    assert sorted(leaves) == sorted(want)
    for key, array in want.items():
        assert isinstance(leaves[key], jax.Array)
        assert_same(np.asarray(leaves[key]), array)


def test_no_golden_folder_is_missing() -> None:
    there = {path.name for path in EFORMER.iterdir() if path.is_dir()}
    assert there == {name for name, _ in TREES}
    for name in there:
        prefixes = [prefix for other, prefix in TREES if other == name]
        arrays = json.loads((EFORMER / f"{name}.expected.json").read_text(encoding="utf-8"))
        assert sum(len(expected(name, prefix)) for prefix in prefixes) == len(arrays)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "prefix"), TREES)
def test_a_tree_loads_bit_for_bit(name: str, prefix: str | None) -> None:
    with jax.enable_x64(name == "x64"):
        assert_holds(tree_deserialize_leaves(EFORMER / name, prefix=prefix), name, prefix)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "prefix"), TREES)
@pytest.mark.parametrize("mesh", [ROW, GRID], ids=["1-d", "2-d"])
def test_a_tree_made_from_its_index_goes_into_the_loader(mesh: Mesh, name: str, prefix: str | None) -> None:
    with jax.enable_x64(name == "x64"):
        shardings = create_sharding_tree_from_index(EFORMER / name, mesh, prefix)
        loaded = tree_deserialize_leaves(EFORMER / name, mesh, prefix=prefix, shardings=shardings)
        assert_holds(loaded, name, prefix)
        assert validate_sharding_tree(shardings, loaded)
        moved = apply_sharding_tree(loaded, create_sharding_tree_from_index(EFORMER / name, None, prefix))
    assert all(leaf.sharding == NamedSharding(mesh, P()) for leaf in jax.tree.leaves(loaded))
    assert all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(moved))


def test_a_tree_of_two_prefixes_is_called_by_one_of_them() -> None:
    for load in (tree_deserialize_leaves, create_sharding_tree_from_index):
        with pytest.raises(MismatchError, match="only trees with prefixes: 'model', 'optimizer'"):
            load(EFORMER / "prefixed")
        with pytest.raises(MismatchError, match="no prefix 'modle'; there are 'model', 'optimizer'"):
            load(EFORMER / "prefixed", prefix="modle")
        with pytest.raises(MismatchError, match="its tree has none"):
            load(EFORMER / "index_v1", prefix="model")


SPECS = {
    "both": P("dp", "tp"), "rows": P("dp"), "cols": P(None, "tp"), "flat": P(("dp", "tp")), "replicated": P(),
    "vec": P("tp"), "bf16": P(None, "tp"),
}  # fmt: skip


@pytest.mark.parametrize("form", ["nested", "flat", "rules", "other"])
def test_chunks_of_any_grid_load_into_any_sharding(form: str) -> None:
    turned = {key: P(*reversed(spec)) for key, spec in SPECS.items()} if form == "other" else SPECS
    ways: dict[str, dict[str, Any]] = {
        "nested": {"shardings": {"s": turned}},
        "flat": {"shardings": {f"s.{key}": NamedSharding(GRID, spec) for key, spec in turned.items()}},
        "rules": {"partition_rules": [(f"s/{key}$", spec) for key, spec in turned.items()]},
        "other": {"shardings": {"s": turned}},
    }
    loaded = tree_deserialize_leaves(EFORMER / "sharded_2x4", GRID, **ways[form])
    assert_holds(loaded, "sharded_2x4", None)
    assert {key: leaf.sharding for key, leaf in loaded["s"].items()} == {
        key: NamedSharding(GRID, spec) for key, spec in turned.items()
    }


def test_wide_arrays_are_refused_or_numpy_without_x64() -> None:
    with pytest.raises(UnsupportedError, match=r"c \(complex128\), f \(float64\), i \(int64\)"):
        tree_deserialize_leaves(EFORMER / "x64")
    loaded = tree_deserialize_leaves(EFORMER / "x64", x64="numpy")
    for key, want in expected("x64", None).items():
        assert type(loaded[key]) is np.ndarray
        assert_same(loaded[key], want)


def test_a_target_gives_structure_and_lists() -> None:
    want = expected("plain", None)
    target: dict[str, Any] = {
        "params": {"dense": {"kernel": jnp.zeros((4, 3)), "bias": jnp.zeros(3)}},
        "layers": [jnp.zeros(2) for _ in range(12)],
        "step": jax.ShapeDtypeStruct((), jnp.int32),
    }
    loaded = tree_deserialize_leaves(EFORMER / "plain", target=target)
    assert [np.asarray(layer).tolist() for layer in loaded["layers"]] == [
        want[f"layers/{n}"].tolist() for n in range(12)
    ]
    with pytest.raises(MismatchError) as caught:
        tree_deserialize_leaves(EFORMER / "plain", target={**target, "step": jnp.zeros(3), "more": jnp.zeros(2)})
    assert len(caught.value.differences) == 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "prefix"), [tree for tree in TREES if tree[0] != "x64"])
def test_load_open_and_verify_read_it_too(name: str, prefix: str | None) -> None:
    alone = [other for other, _ in TREES].count(name) == 1
    tree = tr.load(EFORMER / name)
    assert_holds(tree if alone else _branch(tree, prefix), name, prefix)
    assert tr.verify(EFORMER / name).ok
    key = next(iter(expected(name, prefix)))
    with tr.open(EFORMER / name) as checkpoint:
        assert_same(np.asarray(checkpoint[key if prefix is None else f"{prefix}/{key}"]), expected(name, prefix)[key])


def _branch(tree: Any, prefix: str | None) -> Any:
    if prefix is not None:
        return tree[prefix]
    return {key: leaf for key, leaf in tree.items() if key != "model"}


def test_load_leaves_wide_arrays_as_numpy_without_x64() -> None:
    loaded = tr.load(EFORMER / "x64")
    assert {key: leaf.dtype.name for key, leaf in loaded.items()} == {"c": "complex128", "f": "float64", "i": "int64"}
    with pytest.warns(KeptOnHostWarning, match="f"):
        tr.load(EFORMER / "x64", mesh=ROW)


def test_a_save_beside_the_oldest_index_keeps_what_it_lists(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    shutil.copytree(EFORMER / "index_v1", folder)
    tree_serialize_leaves(folder, {"w": jnp.ones(2)}, prefix="model")
    assert_holds(tree_deserialize_leaves(folder), "index_v1", None)
    assert tree_deserialize_leaves(folder, prefix="model")["w"].tolist() == [1, 1]
