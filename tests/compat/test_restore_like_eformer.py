"""What eformer's and EasyDeL's own tests of leaves restore, restored by treering; also after a conversion.

tests/compat/eformer asks the real eformer; these files it wrote once, or they are made here as it writes them.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import treering
from tests import meshes
from tests.compat.golden_files import EFORMER
from tests.compat.restoring import Prepare, prepare
from tests.compat.test_eformer_golden import SPECS, assert_holds, expected
from tests.trees import assert_same_arrays, assert_same_structure, leaves_by_path
from treering import KeyMap, KeyRule
from treering.errors import CorruptError, MismatchError

__all__ = ["prepare"]

GRID = meshes.grid(2, 4, axes=("dp", "tp"))


def _write(folder: Path, branches: Mapping[str, Mapping[str, np.ndarray]]) -> Path:
    """Write arrays of some prefixes, each a compressed chunk in a folder of its own, and the index."""
    prefixes: dict[str, list[dict[str, Any]]] = {}
    for prefix, arrays in branches.items():
        for key, array in arrays.items():
            path = f"{prefix}/{key}"
            place = folder / path
            place.mkdir(parents=True)
            zarray = {
                "chunks": list(array.shape), "shape": list(array.shape), "dtype": array.dtype.str,
                "compressor": {"id": "zlib", "level": 1}, "dimension_separator": ".", "fill_value": None,
                "filters": None, "order": "C", "zarr_format": 2,
            }  # fmt: skip
            (place / ".zarray").write_text(json.dumps(zarray))
            (place / (".".join("0" * array.ndim) or "0")).write_bytes(zlib.compress(array.tobytes()))
            entry = {"path": path, "shape": list(array.shape), "dtype": array.dtype.name}
            prefixes.setdefault(prefix, []).append(entry)
    index = {"format": "tensorstore", "version": "0.0.101", "prefixes": prefixes}
    (folder / "tensorstore_index.json").write_text(json.dumps(index))
    return folder


def test_a_nested_tree_comes_back_by_names(prepare: Prepare) -> None:
    assert_holds(treering.load(prepare(EFORMER / "plain")), "plain", None)


def test_every_dtype(prepare: Prepare) -> None:
    assert_holds(treering.load(prepare(EFORMER / "dtypes")), "dtypes", None)


def test_prefixes_are_branches_and_each_loads_alone(prepare: Prepare) -> None:
    path = prepare(EFORMER / "prefixed")
    tree = treering.load(path)
    assert list(tree) == ["model", "optimizer"]
    for prefix in tree:
        assert_holds(tree[prefix], "prefixed", prefix)
        assert_holds(treering.load(path, at=prefix), "prefixed", prefix)
    with pytest.raises(MismatchError, match="modle"):
        treering.load(path, at="modle")


def test_a_prefix_beside_a_tree_without_one(prepare: Prepare) -> None:
    tree = treering.load(prepare(EFORMER / "mixed_index"))
    assert_holds(tree["model"], "mixed_index", "model")
    assert_same_arrays(tree["extra"], expected("mixed_index", None)["extra"])


def test_the_oldest_index(prepare: Prepare) -> None:
    assert_holds(treering.load(prepare(EFORMER / "index_v1")), "index_v1", None)


def test_wide_arrays_with_and_without_x64(prepare: Prepare) -> None:
    path = prepare(EFORMER / "x64")
    with jax.enable_x64(True):
        assert_holds(treering.load(path), "x64", None)
    for key, array in treering.load(path).items():
        assert type(array) is np.ndarray
        assert_same_arrays(array, expected("x64", None)[key])


def test_shards_of_one_mesh_onto_another(prepare: Prepare) -> None:
    path = prepare(EFORMER / "sharded_2x4")
    turned = {key: PartitionSpec(*reversed(spec)) for key, spec in SPECS.items()}
    found = treering.load(path, shardings=[(f"s/{key}$", spec) for key, spec in turned.items()], mesh=GRID)
    assert_holds(found, "sharded_2x4", None)
    assert {key: leaf.sharding for key, leaf in found["s"].items()} == {
        key: NamedSharding(GRID, spec) for key, spec in turned.items()
    }
    with treering.open(path) as opened:
        assert_same_arrays(opened["s/both"][1:, 2:3], expected("sharded_2x4", None)["s/both"][1:, 2:3])


def test_lists_come_back_into_a_target(prepare: Prepare) -> None:
    path, wanted = prepare(EFORMER / "plain"), expected("plain", None)
    target: dict[str, Any] = {
        "params": {"dense": {"kernel": jnp.zeros((4, 3)), "bias": jnp.zeros(3)}},
        "layers": [jnp.zeros(2) for _ in range(12)],
        "step": jax.ShapeDtypeStruct((), jnp.int32),
    }
    found = treering.load(path, target)
    for number, layer in enumerate(found["layers"]):
        assert_same_arrays(layer, wanted[f"layers/{number}"])
    with pytest.raises(MismatchError) as caught:
        treering.load(path, {**target, "step": jnp.zeros(3), "more": jnp.zeros(2)})
    assert len(caught.value.differences) == 2


def test_an_optimizer_goes_on_where_it_was(prepare: Prepare, tmp_path: Path) -> None:
    params = {"w": jnp.arange(8.0).reshape(4, 2), "b": jnp.ones(2)}
    optimizer = optax.adamw(1e-2)
    _, state = optimizer.update(params, optimizer.init(params), params)
    # Keys of namedtuples are the names of their fields, those of tuples their places.
    saved = {"0/count": state[0].count} | {f"0/{n}/{k}": getattr(state[0], n)[k] for n in ("mu", "nu") for k in params}
    folder = _write(
        tmp_path / "run-7",
        {
            "model": {key: np.asarray(array) for key, array in params.items()},
            "tx": {key: np.asarray(array) for key, array in saved.items()},
        },
    )
    found = treering.load(prepare(folder), {"model": params, "tx": optimizer.init(params)})
    assert_same_structure(found["tx"], state)
    wanted, _ = optimizer.update(params, state, params)
    updates, _ = optimizer.update(found["model"], found["tx"], found["model"])
    for key, array in wanted.items():
        assert_same_arrays(updates[key], array)


def test_a_model_of_easydel_by_partition_rules(prepare: Prepare, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    arrays = {
        f"model/layers/{layer}/self_attn/{name}_proj/kernel": random.standard_normal((8, 8), np.float32)
        for layer in range(3)
        for name in "qkvo"
    } | {"model/embed_tokens/embedding": random.standard_normal((16, 8), np.float32)}
    path = prepare(_write(tmp_path / "model", {"model": arrays}))
    rules = [("embed_tokens/embedding", PartitionSpec("tp", "dp")), ("o_proj/kernel", PartitionSpec("tp")),
             ("[qkv]_proj/kernel", PartitionSpec("dp", "tp"))]  # fmt: skip
    found = treering.load(path, at="model", shardings=rules, mesh=GRID)
    for key, leaf in leaves_by_path(found).items():
        assert_same_arrays(leaf, arrays[key])
        assert leaf.sharding.spec == next(spec for pattern, spec in rules if re.search(pattern, key))


def test_layers_of_their_own_into_one_that_is_scanned(prepare: Prepare, tmp_path: Path) -> None:
    arrays = {f"layers/{n}/mlp/kernel": np.full((2, 3), n, np.float32) for n in range(12)}
    path = prepare(_write(tmp_path / "model", {"model": arrays}))
    names = KeyMap([KeyRule("model/layers/{i}/{name**}", "layers/{name**}", stack={"i": 0})])
    kernel = treering.load(path, key_map=names)["layers"]["mlp"]["kernel"]
    assert_same_arrays(kernel, np.stack([arrays[f"layers/{n}/mlp/kernel"] for n in range(12)]))


def test_a_chunk_that_is_missing_or_damaged_is_an_error(prepare: Prepare, tmp_path: Path) -> None:
    folder = _write(tmp_path / "a", {"model": {"w": np.arange(100.0), "b": np.ones(3)}})
    chunk = folder / "model" / "w" / "0"
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 0xFF
    chunk.write_bytes(data)
    with pytest.raises(CorruptError, match="model/w"):
        treering.load(prepare(folder))
    chunk.unlink()
    with pytest.raises(CorruptError, match="model/w"):
        treering.load(prepare(folder))
