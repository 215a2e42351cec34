"""What flax's own tests of serialization and checkpoints restore, restored by treering; also after a conversion."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax
import flax.linen as nn
import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict, freeze
from flax.training import checkpoints, train_state
from jax.sharding import NamedSharding, PartitionSpec

import treering
from tests import meshes
from tests.compat.restoring import Prepare, prepare
from tests.trees import Pair, assert_same_structure, fingerprint
from treering.errors import MismatchError, UnsupportedError

__all__ = ["prepare"]


def _assert_same(found: Any, wanted: Any) -> None:
    """The same to the last bit; an array of numpy is as good as one of jax."""
    assert fingerprint(found, restored=True) == fingerprint(wanted, restored=True)


def _write(path: Path, tree: Any) -> Path:
    path.write_bytes(flax.serialization.to_bytes(tree))
    return path


def _restore_as_flax_does(target: Any, path: Path, prepare: Prepare) -> Any:
    """Restore into a target, and require what flax itself makes of the file."""
    found = treering.load(prepare(path), like=target)
    assert_same_structure(found, target)
    _assert_same(found, flax.serialization.from_bytes(target, path.read_bytes()))
    return found


def _params(seed: int) -> Any:
    keys = jax.random.split(jax.random.key(seed))
    return {"dense": {"kernel": jax.random.normal(keys[0], (8, 3)), "bias": jax.random.normal(keys[1], (3,))}}


def _train_state(seed: int) -> Any:
    clip, adam = optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-3, 0.0, 10))
    return train_state.TrainState.create(apply_fn=None, params=_params(seed), tx=optax.chain(clip, adam))


def test_a_train_state_goes_on_in_a_fresh_one(prepare: Prepare, tmp_path: Path) -> None:
    state = _train_state(0).apply_gradients(grads=jax.tree.map(jnp.ones_like, _params(0)))
    fresh = _train_state(1)
    found = _restore_as_flax_does(fresh, _write(tmp_path / "state.msgpack", state), prepare)
    assert (found.step, found.tx) == (1, fresh.tx)
    again = found.apply_gradients(grads=_params(2))
    wanted = state.apply_gradients(grads=_params(2))
    _assert_same(jax.tree.leaves(again), jax.tree.leaves(wanted))


def test_an_initialised_model_and_frozen_dicts(prepare: Prepare, tmp_path: Path) -> None:
    variables = nn.BatchNorm(use_running_average=True).init(jax.random.key(0), jnp.ones((2, 4)))
    for number, target in enumerate((variables, freeze(variables), {"model": freeze(variables), "more": [variables]})):
        path = _write(tmp_path / f"{number}.msgpack", jax.tree.map(lambda leaf: leaf + 1, target))
        found = _restore_as_flax_does(target, path, prepare)
        assert isinstance(found, FrozenDict) == isinstance(target, FrozenDict)


def test_without_a_target_the_state_dict_comes_back(prepare: Prepare, tmp_path: Path) -> None:
    tree = {"list": [np.ones(2), (np.arange(3), 4)], "pair": Pair(None, {}), "empty": (), "step": 7}
    path = _write(tmp_path / "a.msgpack", tree)
    _assert_same(treering.load(prepare(path)), flax.serialization.msgpack_restore(path.read_bytes()))


def test_python_values_and_scalars_keep_their_types(prepare: Prepare, tmp_path: Path) -> None:
    tree = {
        "int": 2**60, "float": 0.1, "bool": True, "complex": 1 - 2j, "text": "hällo", "bytes": b"\0\xff", "none": None,
        "half": np.float16(0.5), "wide": np.int64(-(2**40)), "array of no axes": np.array(3, np.uint8),
        "jax": jnp.float32(2.5), "key": jax.random.PRNGKey(3),
    }  # fmt: skip
    path = _write(tmp_path / "a.msgpack", tree)
    _restore_as_flax_does(tree, path, prepare)
    _assert_same(treering.load(prepare(path)), flax.serialization.msgpack_restore(path.read_bytes()))


@flax.struct.dataclass
class _Point:
    x: Any
    y: Any
    label: str = flax.struct.field(pytree_node=False, default="")


def test_a_dataclass_keeps_the_fields_that_are_no_leaves(prepare: Prepare, tmp_path: Path) -> None:
    path = _write(tmp_path / "a.msgpack", {"p": _Point(np.ones(2), np.zeros(3), "saved")})
    found = _restore_as_flax_does({"p": _Point(np.zeros(2), np.ones(3), "here")}, path, prepare)
    assert found["p"].label == "here"


def test_namedtuples_tuples_and_lists_are_matched_by_name_and_place(prepare: Prepare, tmp_path: Path) -> None:
    path = _write(tmp_path / "a.msgpack", {"p": Pair(np.ones(2), [np.arange(3)]), "t": (np.zeros(1), np.float32(2))})
    found = _restore_as_flax_does(
        {"p": Pair(np.zeros(2), [np.zeros(3, np.int64)]), "t": (np.ones(1), np.float32(0))}, path, prepare
    )
    assert isinstance(found["p"], Pair)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint32", "bool", "complex64", "float8_e4m3fn"])
def test_arrays_of_many_dtypes(dtype: str, prepare: Prepare, tmp_path: Path) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    tree = {"w": np.arange(6).reshape(2, 3).astype(kind), "empty": np.zeros((0, 2), kind), "none": np.array(1, kind)}
    _restore_as_flax_does(tree, _write(tmp_path / "a.msgpack", tree), prepare)
    _restore_as_flax_does(jax.tree.map(jnp.asarray, tree), tmp_path / "a.msgpack", prepare)


def test_what_does_not_fit_is_named_all_at_once(prepare: Prepare, tmp_path: Path) -> None:
    path = prepare(_write(tmp_path / "a.msgpack", {"a": np.ones(2), "t": (np.ones(1), np.ones(1)), "old": np.ones(3)}))
    with pytest.raises(MismatchError) as caught:
        treering.load(path, {"a": np.ones(3), "t": (np.ones(1),), "new": np.ones(3)})
    text = str(caught.value)
    for part in ("a: wanted", "new: missing", "old: unexpected", "t/1: unexpected"):
        assert part in text, part


def test_large_arrays_that_flax_divides_are_whole(
    prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 64)
    tree = {"a": np.arange(100.0).reshape(4, 25), "b": {"c": jnp.arange(40)}, "small": np.ones(3)}
    _restore_as_flax_does(tree, _write(tmp_path / "a.msgpack", tree), prepare)


def test_the_parameters_of_a_training_state_alone(prepare: Prepare, tmp_path: Path) -> None:
    state = _train_state(0)
    path = prepare(_write(tmp_path / "state.msgpack", state))
    found = treering.load(path, like=_params(1), at="params")
    _assert_same(found, state.params)
    bigger = {**_params(1), "head": {"kernel": jnp.full((3, 2), 5.0)}}
    kept = treering.load(path, like=bigger, at="params", missing="keep")
    _assert_same(kept["dense"], state.params["dense"])
    _assert_same(kept["head"], bigger["head"])


def test_onto_a_mesh(prepare: Prepare, tmp_path: Path) -> None:
    path = prepare(_write(tmp_path / "a.msgpack", _params(0)))
    rows = NamedSharding(meshes.line(), PartitionSpec("x"))
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), _params(0))
    found = treering.load(path, like, shardings={"dense": {"kernel": rows, "bias": None}})
    assert found["dense"]["kernel"].sharding == rows
    for name, array in _params(0)["dense"].items():
        _assert_same(found["dense"][name], array)


def test_the_pure_dict_of_an_nnx_model(prepare: Prepare, tmp_path: Path) -> None:
    saved, fresh = (nnx.Linear(4, 2, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    path = _write(tmp_path / "a.msgpack", nnx.to_pure_dict(nnx.state(saved)))
    state = nnx.state(fresh)
    nnx.replace_by_pure_dict(state, _restore_as_flax_does(nnx.to_pure_dict(state), path, prepare))
    nnx.update(fresh, state)
    np.testing.assert_array_equal(fresh(jnp.ones((1, 4))), saved(jnp.ones((1, 4))))


# ------------------------------------------------------------------------------------------- flax.training.checkpoints


@pytest.fixture(params=["msgpack", "orbax"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Let flax write its own files, or items of Orbax."""
    before = flax.config.flax_use_orbax_checkpointing
    flax.config.update("flax_use_orbax_checkpointing", request.param == "orbax")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield request.param
    flax.config.update("flax_use_orbax_checkpointing", before)


def test_the_latest_of_some_checkpoints_and_an_earlier_one(backend: str, prepare: Prepare, tmp_path: Path) -> None:
    folder = tmp_path / "ckpts"
    target: dict[str, Any] = {"w": jnp.zeros(3), "n": {"step": 0}}
    for step in (1, 9, 10):
        checkpoints.save_checkpoint(folder, {"w": jnp.full(3, float(step)), "n": {"step": step}}, step, keep=2)
    latest = checkpoints.latest_checkpoint(folder)
    assert latest is not None
    for path, step in ((Path(latest), 10), (folder / "checkpoint_9", 9)):
        found = treering.load(prepare(path), like=target)
        assert found["w"].tolist() == [step] * 3
        assert found["n"] == {"step": step}
    assert not (folder / "checkpoint_1").exists()
    if backend == "orbax":
        assert treering.load(prepare(folder), like=target)["w"].tolist() == [10] * 3


def test_steps_that_are_no_whole_numbers(backend: str, prepare: Prepare, tmp_path: Path) -> None:
    folder = tmp_path / "ckpts"
    for step in (0.5, 0.75, 1.5):
        checkpoints.save_checkpoint(folder, {"w": jnp.full(3, float(step))}, step, prefix="best_", keep=5)
    assert treering.load(prepare(folder / "best_0.5"))["w"].tolist() == [0.5] * 3
    if backend == "orbax":
        with pytest.raises(UnsupportedError, match=r"the step 'best_.*' is not a whole number.*pass the path"):
            treering.load(folder)
