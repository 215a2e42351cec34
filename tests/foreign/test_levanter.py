"""Levanter's checkpoints, old and new, written by the calls that it makes, and ones that nobody should have written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
from jax.sharding import NamedSharding, PartitionSpec

import treering
from tests import meshes
from tests.stores import copy_to_memory
from tests.trees import assert_same_arrays, leaves_by_path
from treering.errors import CorruptError, NotFoundError, TreeringError, UnsupportedError

FORMS = ["plain", "OCDBT", "inventory"]


def _state(step: int) -> dict[str, Any]:
    mesh = meshes.grid(2, 2)
    items = np.random.default_rng(step).standard_normal((8, 6)).astype(np.float32)
    weight = jax.device_put(items, NamedSharding(mesh, PartitionSpec("x", "y")))
    layers = [{"w": jnp.asarray(items[layer], jnp.bfloat16), "b": jnp.zeros(3)} for layer in range(2)]
    return {
        "model": {"embed": weight, "layers": layers},
        "optimizer": {"count": jnp.int32(step), "none": None},
        "step": jnp.int32(step),
        "training_key": jax.random.key_data(jax.random.key(step)),
    }


def _save(place: Path, tree: Any, form: str, *, step: int = 7, committed: bool = True) -> Path:
    """Save as Levanter does: the leaves of a tree, the list of them, and the mark of the commit."""
    place.mkdir(parents=True, exist_ok=True)
    leaves = leaves_by_path(tree)
    manager = GlobalAsyncCheckpointManager()
    if form == "plain":
        manager.serialize_with_paths(list(leaves.values()), [str(place / name) for name in leaves])
    else:
        base = {"driver": "file", "path": str(place)}
        specs = [{"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": name}} for name in leaves]
        manager.serialize(list(leaves.values()), specs)
    manager.wait_until_finished()
    if form == "inventory":
        arrays = [
            {"path": name, "shape": list(leaf.shape), "dtype": leaf.dtype.name, "chunk_shape": list(leaf.shape)}
            for name, leaf in leaves.items()
        ]
        inventory = {"format_version": 1, "array_driver": "zarr3", "kvstore_driver": "ocdbt", "arrays": arrays}
        (place / "manifest.json").write_text(json.dumps(inventory, indent=2))
    if committed:
        _commit(place, step)
    return place


def _commit(place: Path, step: int, **members: Any) -> None:
    metadata = {"step": step, "timestamp": "2025-11-03T12:30:00.123456", "is_temporary": False, **members}
    (place / "metadata.json").write_text(json.dumps(metadata))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("levanter")
    for form in FORMS:
        _save(root / form, _state(7), form)
    return root


@pytest.fixture(params=FORMS)
def place(request: pytest.FixtureRequest, written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written / request.param, tmp_path / request.param))


@pytest.fixture
def inventory(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written / "inventory", tmp_path / "step-7"))


def test_every_leaf_bit_for_bit(place: Path) -> None:
    found = treering.load(place)
    assert_same_arrays(found, _state(7), structure=False)
    assert list(found["model"]["layers"]) == ["0", "1"]
    assert treering.verify(place).ok


def test_into_a_target_and_onto_a_mesh(place: Path) -> None:
    like = jax.eval_shape(lambda: _state(7))
    restored = treering.load(place, like=like, missing="keep")
    assert str(jax.tree.structure(restored)) == str(jax.tree.structure(like))
    rows = NamedSharding(meshes.line(2), PartitionSpec("x"))
    found = treering.load(place, only="model/embed", shardings={"model": {"embed": rows}})
    assert found["model"]["embed"].sharding == rows
    with treering.open(place) as opened:
        np.testing.assert_array_equal(
            opened["model/embed"][3:5, ::2], np.asarray(_state(7)["model"]["embed"])[3:5, ::2]
        )


def test_the_verbs_know_it(place: Path) -> None:
    listing = treering.inspect(place)
    storage = "plain, zarr 2" if place.name == "plain" else "OCDBT, zarr 3"
    assert f"format: Levanter, {storage}\n" in str(listing)
    assert listing.metadata["step"] == 7
    assert listing.metadata["timestamp"].startswith("2025-11-03")
    assert treering.abstract(place)["step"].dtype == jnp.int32


def test_it_becomes_a_checkpoint(place: Path, tmp_path: Path) -> None:
    treering.convert(place, tmp_path / "ckpt", at="model")
    assert_same_arrays(treering.load(tmp_path / "ckpt"), _state(7)["model"], structure=False)
    assert treering.inspect(tmp_path / "ckpt").metadata["step"] == 7


def test_in_memory_as_on_disk(place: Path, tmp_path: Path) -> None:
    copy_to_memory(place, f"memory://{tmp_path.name}/root/step-7")
    assert_same_arrays(treering.load(f"memory://{tmp_path.name}/root/step-7"), _state(7), structure=False)
    assert_same_arrays(treering.load(f"memory://{tmp_path.name}/root"), _state(7), structure=False)


def test_a_root_is_its_latest_committed_step(written: Path, tmp_path: Path) -> None:
    for step, form in (("step-9", "plain"), ("step-10", "OCDBT"), ("step-11", "inventory")):
        shutil.copytree(written / form, tmp_path / step)
        _commit(tmp_path / step, int(step[5:]))
    assert treering.inspect(tmp_path).metadata["step"] == 11
    (tmp_path / "step-11" / "metadata.json").unlink()
    listing = treering.inspect(tmp_path)
    assert listing.metadata["step"] == 10
    assert "a root with step-9, step-10, step-11; this is step-10" in str(listing)
    assert "step-11 is passed over, for there is no metadata.json that commits it" in str(listing)
    assert "Levanter, OCDBT, zarr 3, the latest of a root" in str(listing)
    shutil.copytree(written / "plain", tmp_path / "epoch-2")
    _commit(tmp_path / "epoch-2", 400)
    assert treering.inspect(tmp_path).metadata["step"] == 400
    (tmp_path / "step-10" / "metadata.json").write_text('{"step": 1')
    with pytest.raises(CorruptError, match=r"step-10/metadata\.json is not JSON"):
        treering.load(tmp_path)


def test_what_was_not_committed_is_no_checkpoint(tmp_path: Path) -> None:
    _save(tmp_path / "step-1", {"w": jnp.ones(3)}, "OCDBT", committed=False)
    for path in (tmp_path / "step-1", tmp_path):
        with pytest.raises(NotFoundError):
            treering.load(path)
    with pytest.raises(NotFoundError, match="unfinished save"):
        treering.load(tmp_path / "step-1")


def test_folders_of_other_programs_are_theirs(tmp_path: Path) -> None:
    treering.save(tmp_path / "leaf", {"w": jnp.ones(3)})
    _commit(tmp_path / "leaf", 3)
    assert treering.inspect(tmp_path / "leaf").form == "checkpoint"
    treering.leaves.tree_serialize_leaves(tmp_path / "run-3", {"w": jnp.ones(3)})
    _commit(tmp_path / "run-3", 3)
    assert treering.inspect(tmp_path / "run-3").form == "leaves"
    orbax = shutil.copytree(Path(__file__).parent / "golden" / "orbax" / "plain_zarr2", tmp_path / "root" / "step-2")
    _commit(orbax, 2)
    _save(tmp_path / "root" / "step-1", {"w": jnp.ones(3)}, "plain", step=1)
    assert treering.inspect(orbax).form == "orbax"
    assert treering.inspect(tmp_path / "root").form == "orbax"
    for metadata in ('{"step": 3}', '{"step": -1, "timestamp": ""}', '{"step": true, "timestamp": ""}', "[]", "{"):
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / "metadata.json").write_text(metadata)
        with pytest.raises(NotFoundError):
            treering.load(tmp_path / "other")


def test_a_list_of_arrays_counts_and_what_an_earlier_save_left_does_not(inventory: Path) -> None:
    base = {"driver": "file", "path": f"{inventory}/"}
    spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": "stale"}}
    array = np.ones(3, np.float32)
    tensorstore.open(spec, create=True, dtype=array.dtype, shape=array.shape).result().write(array).result()
    assert_same_arrays(treering.load(inventory), _state(7), structure=False)
    (inventory / "manifest.json").unlink()
    assert treering.load(inventory)["stale"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format_version": 2}, "is of the version 2"),
        ({"format_version": None}, "format_version"),
        ({"arrays": {}}, "'arrays' is"),
        ({"arrays": [{"path": "../outside"}]}, r"its array is missing.*at leaf '\.\./outside'"),
        (
            {"arrays": [{"path": "step", "shape": [], "dtype": "int64"}]},
            r"says another dtype or shape than its array has, int32 \[\]",
        ),
        ({"arrays": [{"path": "step", "shape": [1], "dtype": "int32"}]}, "its array has, int32"),
        ({"arrays": []}, "there is no array in it"),
    ],
)
def test_lists_of_arrays_that_make_no_sense(inventory: Path, change: dict[str, Any], problem: str) -> None:
    node = json.loads((inventory / "manifest.json").read_text())
    (inventory / "manifest.json").write_text(json.dumps(node | change))
    with pytest.raises((CorruptError, UnsupportedError), match=problem):
        treering.load(inventory)


def test_a_bare_leaf_and_one_that_does_not_fit_beside_the_others(tmp_path: Path) -> None:
    for form in ("plain", "OCDBT"):
        place = _save(tmp_path / form, {"": jnp.arange(3)}, form)
        assert treering.load(place).tolist() == [0, 1, 2]
    place = _save(tmp_path / "clash", {"a": jnp.ones(1), "a/b": jnp.ones(1)}, "OCDBT")
    with pytest.raises(CorruptError, match="does not fit beside the others"):
        treering.load(place)


def test_links_lead_nowhere_else(written: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(written / "plain", tmp_path / "step-7"))
    (place / "model").rename(tmp_path / "outside")
    (place / "model").symlink_to(tmp_path / "outside")
    with pytest.raises(CorruptError, match="link that leads out"):
        treering.load(place)
    (place / "model").unlink()
    (place / "model").symlink_to(".")
    with pytest.raises(TreeringError):
        treering.load(place)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "step-3").symlink_to(written / "plain")
    with pytest.raises(CorruptError, match="link that leads out"):
        treering.load(tmp_path / "root")


def test_damage_is_an_error_of_ours(place: Path) -> None:
    seen = total = 0
    for number, file in enumerate(sorted(path for path in place.rglob("*") if path.is_file())):
        data = file.read_bytes()
        for at in {len(data) * part // 3 for part in range(3)}:
            cut = number % 2 == at % 2
            file.write_bytes(data[:at] if cut else data[:at] + bytes([data[at] ^ 0x14]) + data[at + 1 :])
            total += 1
            try:
                seen += not treering.verify(place).ok
            except TreeringError:
                seen += 1
        file.write_bytes(data)
    assert total // 4 < seen <= total


def test_a_whole_root_becomes_a_run(written: Path, tmp_path: Path) -> None:
    for step, form in ((5, "plain"), (10, "OCDBT"), (15, "inventory")):
        shutil.copytree(written / form, tmp_path / "root" / f"step-{step}")
        _commit(tmp_path / "root" / f"step-{step}", step, timestamp=f"2025-11-03T12:30:{step:02}")
    orbax = Path(__file__).parent / "golden" / "orbax" / "plain_zarr2"
    shutil.copytree(orbax, tmp_path / "root" / "step-2")  # as Levanter did for a while
    _commit(tmp_path / "root" / "step-2", 2)
    _save(tmp_path / "root" / "step-20", {"w": jnp.ones(3)}, "OCDBT", committed=False)
    treering.convert(tmp_path / "root", tmp_path / "run")
    run = treering.Run(tmp_path / "run")
    assert run.steps() == [2, 5, 10, 15]
    assert_same_arrays(run.load(10), _state(7), structure=False)
    assert treering.inspect(tmp_path / "run").metadata["timestamp"] == "2025-11-03T12:30:15"
    (tmp_path / "root" / "step-10" / "metadata.json").write_text("{")
    with pytest.raises(TreeringError, match=r"step-10/metadata\.json is not JSON"):
        treering.convert(tmp_path / "root", tmp_path / "again")
    assert treering.Run(tmp_path / "again").steps() == [2, 5, 15]
    _commit(tmp_path / "root" / "step-10", 10, timestamp="yesterday")
    with pytest.raises(TreeringError, match="has no step or no time"):
        treering.convert(tmp_path / "root", tmp_path / "again")
    _commit(tmp_path / "root" / "step-10", 15)
    with pytest.raises(UnsupportedError, match="'step-10' and 'step-15' are of the same step"):
        treering.convert(tmp_path / "root", tmp_path / "other")
