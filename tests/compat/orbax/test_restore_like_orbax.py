"""What Orbax's own tests restore, restored by treering; also after a conversion."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp1
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint._src.metadata.pytree_metadata_options import PyTreeMetadataOptions

import treering
from tests.compat.restoring import Prepare, prepare
from tests.trees import assert_same_arrays
from treering.errors import CorruptError, MismatchError

__all__ = ["prepare"]

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
logging.getLogger("absl").setLevel(logging.ERROR)


def _save(place: Path, tree: Any, **options: Any) -> Path:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as writer:
        writer.save(place, args=ocp.args.PyTreeSave(tree))
    return place


def _mesh(rows: int, columns: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: rows * columns]).reshape(rows, columns), ("x", "y"))


def _params() -> dict[str, Any]:
    layers = [{"kernel": jnp.arange(8.0 * n).reshape(4, 2 * n), "bias": jnp.ones(n, jnp.bfloat16)} for n in (1, 2, 3)]
    return {"layers": layers, "scale": jnp.float32(2), "step": 5}


@pytest.mark.parametrize("ocdbt", [True, False])
def test_into_a_target_of_shapes_and_without_one(prepare: Prepare, tmp_path: Path, ocdbt: bool) -> None:
    tree = _params()
    path = prepare(_save(tmp_path / "item", tree, use_ocdbt=ocdbt))
    assert_same_arrays(treering.load(path), tree)
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
    assert_same_arrays(treering.load(path, like), tree)
    # Orbax's own metadata and ours say the same shapes.
    abstract = treering.abstract(path)
    assert jax.tree.map(np.shape, abstract["layers"]) == jax.tree.map(np.shape, tree["layers"])


def test_arrays_of_one_mesh_onto_another_and_onto_one_device(prepare: Prepare, tmp_path: Path) -> None:
    items = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
    saved = {
        "both": jax.device_put(items, NamedSharding(_mesh(4, 2), PartitionSpec("x", "y"))),
        "rows": jax.device_put(items, NamedSharding(_mesh(4, 2), PartitionSpec("x"))),
        "same": jax.device_put(items, NamedSharding(_mesh(4, 2), PartitionSpec())),
    }
    path = prepare(_save(tmp_path / "item", saved))
    for sharding in (
        NamedSharding(_mesh(2, 4), PartitionSpec("y", "x")),
        NamedSharding(_mesh(1, 2), PartitionSpec(None, ("x", "y"))),
        jax.sharding.SingleDeviceSharding(jax.devices()[3]),
    ):
        like = {name: jax.ShapeDtypeStruct(items.shape, items.dtype, sharding=sharding) for name in saved}
        for array in treering.load(path, like).values():
            assert array.sharding == sharding
            np.testing.assert_array_equal(array, items)


def test_without_what_orbax_noted_of_shardings(prepare: Prepare, tmp_path: Path) -> None:
    place = _save(tmp_path / "item", _params())
    (place / "_sharding").unlink()
    assert_same_arrays(treering.load(prepare(place)), _params())


def test_another_dtype_is_cast_where_it_is_asked_for(prepare: Prepare, tmp_path: Path) -> None:
    path = prepare(_save(tmp_path / "item", {"w": jnp.arange(6.0) / 3}))
    like = {"w": jax.ShapeDtypeStruct((6,), jnp.bfloat16)}
    np.testing.assert_array_equal(treering.load(path, like, cast=True)["w"], (jnp.arange(6.0) / 3).astype(jnp.bfloat16))
    with pytest.raises(MismatchError, match="bfloat16"):  # Orbax casts it all the same
        treering.load(path, like)


def test_other_shapes_and_other_keys_are_refused_by_name(prepare: Prepare, tmp_path: Path) -> None:
    path = prepare(_save(tmp_path / "item", {"a": jnp.ones(3), "b": {"c": jnp.zeros((2, 2))}}))
    with pytest.raises(MismatchError, match="b/c"):
        treering.load(path, {"a": jnp.ones(3), "b": {"c": jnp.zeros((2, 3))}})
    with pytest.raises(MismatchError, match="b/d"):
        treering.load(path, {"a": jnp.ones(3), "b": {"c": jnp.zeros((2, 2)), "d": jnp.ones(1)}})
    with pytest.raises(MismatchError, match="b/c"):
        treering.load(path, {"a": jnp.ones(3)})


def test_a_part_of_the_tree(prepare: Prepare, tmp_path: Path) -> None:
    tree = _params()
    path = prepare(_save(tmp_path / "item", tree))
    part = {"layers": [{"kernel": tree["layers"][0]["kernel"]}]}
    assert_same_arrays(treering.load(path, part, extra="ignore"), part)
    assert_same_arrays(treering.load(path, at="layers/2"), tree["layers"][2])
    assert_same_arrays(
        treering.load(path, only="layers/*/bias")["layers"], [{"bias": one["bias"]} for one in tree["layers"]]
    )
    new = {"a": jnp.full(3, 7.0), "scale": jnp.float32(0)}
    kept = treering.load(path, new, missing="keep", extra="ignore")
    assert_same_arrays(kept, {"a": new["a"], "scale": tree["scale"]})


def test_leaves_under_other_names(prepare: Prepare, tmp_path: Path) -> None:
    path = prepare(_save(tmp_path / "item", {"encoder": {"w": jnp.ones((2, 3))}, "head": {"w": jnp.zeros(4)}}))
    like = {"model": {"enc": {"w": jnp.zeros((2, 3))}}, "head": {"w": jnp.ones(4)}}
    found = treering.load(path, like, key_map={"model/enc/w": "encoder/w"})
    assert_same_arrays(found, {"model": {"enc": {"w": jnp.ones((2, 3))}}, "head": {"w": jnp.zeros(4)}})


def test_an_optimizer_state_into_its_own_classes(prepare: Prepare, tmp_path: Path) -> None:
    params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = optimizer.init(params)
    updates, state = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
    saved = {"params": optax.apply_updates(params, updates), "opt": state}
    path = prepare(_save(tmp_path / "item", saved))
    assert_same_arrays(treering.load(path, {"params": params, "opt": optimizer.init(params)}), saved)


@pytest.mark.parametrize("zarr3", [True, False])
def test_recorded_classes_without_a_target(prepare: Prepare, tmp_path: Path, zarr3: bool) -> None:
    state = (optax.ScaleByAdamState(jnp.int32(3), {"w": jnp.ones(2)}, {"w": jnp.zeros(2)}), optax.EmptyState())
    rich = PyTreeMetadataOptions(support_rich_types=True)
    place = _save(tmp_path / "item", {"opt": state, "pair": (1, ())}, pytree_metadata_options=rich, use_zarr3=zarr3)
    found = treering.load(prepare(place))
    assert type(found["opt"]) is tuple
    assert type(found["opt"][0]).__name__ == "ScaleByAdamState"
    assert found["opt"][0]._fields == optax.ScaleByAdamState._fields
    assert found["opt"][1] == ()
    assert found["pair"] == (1, ())
    assert_same_arrays(tuple(found["opt"][0]), tuple(state[0]))


def test_numbers_texts_empties_and_keys(prepare: Prepare, tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "int": 3,
        "float": 2.5,
        "true": True,
        "text": "a/b",
        "none": None,
        "dict": {},
        "list": [],
        "zero": np.ones(()),
    }
    tree |= {"key": jax.random.key(7), "keys": jax.random.split(jax.random.key(1, impl="rbg"), 2)}
    found: Any = treering.load(prepare(_save(tmp_path / "item", tree)))
    for name in ("key", "keys"):
        one, other = found.pop(name), tree.pop(name)
        assert jax.random.key_impl(one) == jax.random.key_impl(other)
        np.testing.assert_array_equal(jax.random.key_data(one), jax.random.key_data(other))
    assert found == tree
    assert [type(found[name]) for name in ("int", "float", "true", "text")] == [int, float, bool, str]


def test_steps_items_and_metrics_of_a_manager(prepare: Prepare, tmp_path: Path) -> None:
    root = tmp_path / "root"
    options = ocp.CheckpointManagerOptions(max_to_keep=2, best_fn=lambda metrics: metrics["loss"], best_mode="min")
    with ocp.CheckpointManager(root, options=options) as manager:
        for step in (1, 2, 3):
            items = {"state": ocp.args.StandardSave({"w": jnp.full(2, step)}), "config": ocp.args.JsonSave({"n": step})}
            manager.save(step, args=ocp.args.Composite(**items), metrics={"loss": 1 / step})
        manager.wait_until_finished()
        steps = manager.all_steps()
    for step in steps:
        path = prepare(root / str(step))
        assert treering.load(path)["w"].tolist() == [step] * 2
        with treering.open(path) as opened:
            assert dict(opened.metadata) == {"config": {"n": step}, "metrics": {"loss": 1 / step}}
    shutil.copytree(root / "2", root / "4.orbax-checkpoint-tmp")
    assert treering.load(root)["w"].tolist() == [3, 3]
    with pytest.raises(CorruptError, match="not committed"):
        treering.load(root / "4.orbax-checkpoint-tmp")


def test_what_the_v1_api_saved(prepare: Prepare, tmp_path: Path) -> None:
    tree = _params()
    ocp1.save(tmp_path / "one", tree, custom_metadata={"git": "3f2c1ab"})
    path = prepare(tmp_path / "one")
    assert_same_arrays(treering.load(path), tree)
    with treering.open(path) as opened:
        assert opened.metadata["custom_metadata"] == {"git": "3f2c1ab"}
    ocp1.save_checkpointables(tmp_path / "two", {"model": {"w": jnp.ones(3)}, "ema": {"w": jnp.zeros(3)}})
    assert_same_arrays(treering.load(prepare(tmp_path / "two"), at="ema"), {"w": jnp.zeros(3)})
    with ocp1.training.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(7, {"w": jnp.ones(2)}, metrics={"loss": 0.5})
    assert_same_arrays(treering.load(prepare(tmp_path / "run" / "7")), {"w": jnp.ones(2)})
