"""What treering writes for Orbax is restored by Orbax bit for bit: by v0 and v1, with a target and without, sharded."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp1
import pytest
from flax import linen, nnx
from flax.training import train_state
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treering

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
logging.getLogger("absl").setLevel(logging.ERROR)

GOLDEN = Path(__file__).parents[2] / "foreign" / "golden" / "orbax"
Pair = collections.namedtuple("Pair", "left right")  # noqa: PYI024

_FLOAT8 = ["e3m4", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"]
_DTYPES = [
    "bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16",
    "bfloat16", "float32", "float64", "complex64", "complex128", "float4_e2m1fn", *(f"float8_{at}" for at in _FLOAT8),
]  # fmt: skip


def _array(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    items = np.random.default_rng(seed).integers(0, 256, (*shape, 16), np.uint8)
    if dtype == "bool" or dtype.startswith(("int", "float4")):
        return (items[..., 0] % 2).astype(getattr(ml_dtypes, dtype, dtype))
    found = np.dtype(getattr(ml_dtypes, dtype, dtype))  # any bits at all, NaN too
    return np.ascontiguousarray(items[..., : found.itemsize]).view(found)[..., 0]


def _in_jax(array: Any) -> Any:
    return array if array.dtype.itemsize == 8 and array.dtype != "complex64" else jnp.asarray(array)


_SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
_ARRAYS = st.builds(_array, _SHAPES, st.sampled_from(sorted({*_DTYPES} - {"complex128"})), st.integers(0, 99))
_LEAVES = st.one_of(
    _ARRAYS.filter(lambda array: array.shape != ()), _ARRAYS.map(_in_jax),
    st.integers(-(1 << 63), (1 << 63) - 1), st.booleans(), st.floats(), st.text("aä/~"), st.none(),
    st.sampled_from([{}, [], ()]), st.integers(0, 9).map(jax.random.key), st.just(optax.EmptyState()),
)  # fmt: skip
_NAMES = st.text("ab/é~ ", min_size=1, max_size=2).map(lambda name: name.replace("~", "."))
_TREES = st.dictionaries(
    _NAMES,
    st.recursive(
        _LEAVES,
        lambda inner: st.one_of(
            st.dictionaries(_NAMES, inner, max_size=3), st.lists(inner, max_size=3), st.tuples(inner, inner),
            st.builds(Pair, inner, inner),
        ),
        max_leaves=8,
    ),
    max_size=4,
)  # fmt: skip


def _bits(tree: Any) -> Any:
    """Return a tree with the dtype, shape and bytes of its arrays; its tuples are lists, as Orbax keeps them."""
    if isinstance(tree, dict):
        return {key: _bits(child) for key, child in tree.items()}
    if isinstance(tree, tuple) and not tree:
        return _bits(None if type(tree) is optax.EmptyState else [])
    if isinstance(tree, Pair):
        return _bits(dict(zip(tree._fields, tree, strict=True)))
    if isinstance(tree, list | tuple):
        return [_bits(child) for child in tree]
    if isinstance(tree, jax.Array) and jnp.issubdtype(tree.dtype, jax.dtypes.prng_key):
        return str(jax.random.key_impl(tree)), _bits(jax.random.key_data(tree))
    if isinstance(tree, jax.Array | np.ndarray | np.generic):
        array = np.asarray(tree)
        return array.dtype.name, array.shape, array.tobytes()
    return type(tree), repr(tree)


def _restored(place: Path, like: Any = None) -> dict[str, Any]:
    """Return what each of Orbax's readers gives; the standard one of v0 refuses texts in a target."""
    readers: dict[str, Callable[[], Any]] = {
        "standard": lambda: ocp.StandardCheckpointer().restore(place),
        "pytree": lambda: ocp.PyTreeCheckpointer().restore(place),
        "v1": lambda: ocp1.load(place),
    }
    if like is not None:
        readers |= {
            "pytree, target": lambda: ocp.PyTreeCheckpointer().restore(place, item=like),
            "v1, target": lambda: ocp1.load(place, like),
        }
    return {name: read() for name, read in readers.items()}


def test_any_tree(tmp_path_factory: pytest.TempPathFactory) -> None:
    @settings(max_examples=100, deadline=None, phases=[Phase.explicit, Phase.generate])
    @given(_TREES)
    def check(tree: Any) -> None:
        place = tmp_path_factory.mktemp("tree") / "item"
        try:
            treering.export(place, tree, to="orbax")
        except treering.errors.UnsupportedError as error:  # "a.b" beside a tree "a", or a text inside of another
            if "'names'" not in str(error):
                raise
            return
        for name, found in _restored(place).items():
            assert _bits(found) == _bits(tree), name
        assert _bits(ocp1.load(place, tree)) == _bits(tree)

    check()


@pytest.mark.parametrize("dtype", _DTYPES)
def test_every_dtype(dtype: str, tmp_path: Path) -> None:
    tree = {"many": _array((3, 4), dtype, 1), "one": _array((), dtype, 2), "none": _array((0, 2), dtype, 3)}
    tree = {name: np.asarray(array) for name, array in tree.items()}
    treering.export(tmp_path / "item", tree, to="orbax")
    for name, found in _restored(tmp_path / "item", tree).items():
        assert _bits(found) == _bits(tree), name
    assert _bits(ocp.StandardCheckpointer().restore(tmp_path / "item", tree)) == _bits(tree)


@pytest.mark.parametrize(
    "name", ["ocdbt_zarr2", "ocdbt_zarr3", "plain_zarr2", "plain_zarr3", "v1_state", "sharded_2x4"]
)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    treering.convert(GOLDEN / name, tmp_path / "ckpt")
    treering.convert(tmp_path / "ckpt", tmp_path / "back", to="orbax")
    if name == "v1_state":
        wanted: Any = ocp1.load(GOLDEN / name)
        assert ocp1.metadata(tmp_path / "back").custom_metadata == {"note": "golden"}
    else:
        wanted = ocp.StandardCheckpointer().restore(GOLDEN / name)
    for reader, found in _restored(tmp_path / "back", wanted).items():
        assert _bits(found) == _bits(wanted), reader


def _mesh(*shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), ("x", "y"))


@pytest.mark.parametrize("shape", [(1, 1), (4, 2), (2, 4)], ids=str)
def test_onto_another_mesh(shape: tuple[int, int], tmp_path: Path) -> None:
    mesh = _mesh(*shape)
    saved = NamedSharding(_mesh(4, 2), PartitionSpec("x", "y"))
    tree = {
        "w": jax.device_put(jnp.arange(64.0).reshape(8, 8), saved),
        "big": jax.device_put(np.arange(6 << 20, dtype=np.float32).reshape(8, -1), saved),
        "b": jnp.ones(8, "bfloat16"),
    }
    treering.save(tmp_path / "ckpt", tree)
    treering.convert(tmp_path / "ckpt", tmp_path / "item", to="orbax")
    sharding = NamedSharding(mesh, PartitionSpec("y", "x"))
    spread = NamedSharding(mesh, PartitionSpec("x"))
    like = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding if array.ndim > 1 else spread)
        for name, array in tree.items()
    }
    for found in (ocp.StandardCheckpointer().restore(tmp_path / "item", like), ocp1.load(tmp_path / "item", like)):
        assert _bits(found) == _bits(tree)
        assert all(found[name].sharding == like[name].sharding for name in like)


class _Model(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)])
        self.drop = nnx.Dropout(0.5, rngs=rngs)


def _states() -> dict[str, Any]:
    linen_model = linen.Sequential([linen.Dense(4), linen.BatchNorm(use_running_average=True), linen.Dense(2)])
    variables = linen_model.init(jax.random.key(0), jnp.ones((1, 3)))
    mlp = equinox.nn.MLP(3, 2, 4, 2, key=jax.random.key(1))
    return {
        "nnx": nnx.to_pure_dict(nnx.state(_Model())),
        "linen": variables,
        "train state": train_state.TrainState.create(
            apply_fn=linen_model.apply, params=variables["params"], tx=optax.adamw(1e-3)
        ),
        "equinox": equinox.filter(mlp, equinox.is_array),
    }


@pytest.mark.parametrize("name", ["nnx", "linen", "train state", "equinox"])
def test_states_of_libraries(name: str, tmp_path: Path) -> None:
    state = _states()[name]
    # Keys that are no text become text; functions and other static fields are those of the target.
    treering.export(tmp_path / "item", state, to="orbax", lose=["structure", "objects"])
    found = ocp.StandardCheckpointer().restore(tmp_path / "item", state)
    assert jax.tree.structure(found) == jax.tree.structure(state)  # type: ignore[operator]
    assert [_bits(leaf) for leaf in jax.tree.leaves(found)] == [_bits(leaf) for leaf in jax.tree.leaves(state)]
    assert [_bits(leaf) for leaf in jax.tree.leaves(ocp1.load(tmp_path / "item", state))] == [
        _bits(leaf) for leaf in jax.tree.leaves(state)
    ]


def test_the_state_of_an_optimizer(tmp_path: Path) -> None:
    params = {"w": jnp.ones((3, 4)), "b": jnp.zeros(4, "bfloat16")}
    state = optax.chain(optax.clip(1.0), optax.adamw(optax.constant_schedule(1e-3))).init(params)
    treering.export(tmp_path / "item", {"params": params, "opt": state}, to="orbax")
    like = jax.eval_shape(lambda: {"params": params, "opt": state})
    found = ocp.StandardCheckpointer().restore(tmp_path / "item", like)
    assert type(found["opt"][1][0]) is type(state[1][0])
    assert _bits(found) == _bits({"params": params, "opt": state})


def test_a_run_as_a_manager(tmp_path: Path) -> None:
    tree = {"params": {"w": jnp.arange(6.0).reshape(2, 3)}, "opt": (jnp.ones(2), 0), "data": {"next": 7}}
    with treering.Run(tmp_path / "run") as run:
        for step, loss in {1: 0.5, 5: 0.25, 10: 0.75}.items():
            run.save(step, {**tree, "opt": (jnp.ones(2), step)}, metrics={"loss": loss}, metadata={"config": {"h": 4}})
    treering.convert(tmp_path / "run", tmp_path / "root", to="orbax")
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"], best_mode="min")
    with ocp.CheckpointManager(tmp_path / "root", options=options) as manager:
        assert (manager.all_steps(), manager.latest_step(), manager.best_step()) == ([1, 5, 10], 10, 5)
        assert manager.metrics(5) == {"loss": 0.25}
        wanted = {**tree, "opt": (jnp.ones(2), 5)}
        assert _bits(manager.restore(5)) == _bits(wanted)
        assert _bits(manager.restore(5, args=ocp.args.StandardRestore(wanted))) == _bits(wanted)
        assert manager.metadata(5).custom_metadata == {"config": {"h": 4}}
        assert manager.save(20, args=ocp.args.StandardSave(wanted), metrics={"loss": 0.125})  # the job goes on there
        manager.wait_until_finished()
        assert manager.best_step() == 20


def test_a_run_as_items(tmp_path: Path) -> None:
    with treering.Run(tmp_path / "run") as run:
        tree = {"params": {"w": jnp.ones(3)}, "opt": [jnp.zeros(2), 5], "data": {"next": 7}}
        run.save(5, tree, metrics={"loss": float("nan")}, metadata={"config": {"h": 4}})
    items = {"params": "params", "state": "opt", "data": "grain:data", "config": "json:config"}
    treering.convert(tmp_path / "run", tmp_path / "root", to="orbax", items=items)
    with ocp.CheckpointManager(tmp_path / "root") as manager:
        args = ocp.args.Composite(
            params=ocp.args.StandardRestore(tree["params"]),
            state=ocp.args.PyTreeRestore(),
            config=ocp.args.JsonRestore(),
        )
        found = manager.restore(5, args=args)
        assert _bits([found["params"], found["state"]]) == _bits([tree["params"], tree["opt"]])
        assert found["config"] == {"h": 4}
    assert _bits(ocp1.load_checkpointables(tmp_path / "root" / "5", {"params": None, "state": None})["state"]) == _bits(
        tree["opt"]
    )
    treering.convert(tmp_path / "run", tmp_path / "v1", to="orbax", items={"state": ""})
    with ocp1.training.Checkpointer(tmp_path / "v1") as checkpointer:
        assert _bits(checkpointer.load(5)) == _bits(tree)


def test_a_manager_there_and_back(tmp_path: Path) -> None:
    treering.convert(GOLDEN / "manager", tmp_path / "run")
    items = {"state": "", "config": "json:config"}
    treering.convert(tmp_path / "run", tmp_path / "back", to="orbax", items=items)
    found = []
    for root in (GOLDEN / "manager", tmp_path / "back"):
        args = ocp.args.Composite(state=ocp.args.StandardRestore(), config=ocp.args.JsonRestore())
        with ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
            restored = {step: manager.restore(step, args=args) for step in manager.all_steps()}
            found.append(
                [
                    (step, _bits(step_found["state"]), step_found["config"], manager.metrics(step))
                    for step, step_found in restored.items()
                ]
            )
    assert found[0] == found[1]
    assert len(found[0]) == 2
