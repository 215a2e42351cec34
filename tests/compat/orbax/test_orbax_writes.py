"""What Orbax writes, by every option that changes bytes on disk, is read bit for bit, and as Orbax itself reads it."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp1
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treering

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
logging.getLogger("absl").setLevel(logging.ERROR)

_DTYPES = ["float32", "int8", "uint32", "bool", "complex64", "bfloat16", "float8_e4m3fn", "int4", "float16"]


def _array(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    items = np.random.default_rng(seed).integers(0, 2, shape)
    return items.astype(getattr(ml_dtypes, dtype, dtype))


_ARRAYS = st.builds(
    _array, st.lists(st.integers(1, 5), max_size=3).map(tuple), st.sampled_from(_DTYPES), st.integers(0, 99)
)
_LEAVES = st.one_of(_ARRAYS, _ARRAYS.map(jnp.asarray), st.integers(-9, 9), st.floats(allow_nan=False), st.text("aä/"))
# Orbax itself fails at "~" in the name of a string, and TensorStore at names that are no paths.
_NAMES = st.from_regex(r"[ab*]{1,2}(/[ab])?", fullmatch=True)


def _can_be_written(node: dict[str, Any]) -> bool:
    """Tell whether Orbax can write a dict: it puts texts into one JSON document, in which "a" has no room for "a/b"."""
    inside = [other for name in node for other in node if other.startswith(f"{name}/")]
    return not inside or not any(isinstance(leaf, str) for leaf in jax.tree.leaves(node))


_TREES = st.dictionaries(
    _NAMES,
    st.recursive(
        st.one_of(_LEAVES, st.none()),
        lambda inner: st.one_of(
            st.dictionaries(_NAMES, inner, max_size=3).filter(_can_be_written), st.lists(inner, max_size=3)
        ),
        max_leaves=6,
    ),
    min_size=1,
    max_size=4,
).filter(_can_be_written)


def _bits(tree: Any) -> Any:
    def bits(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return str(jax.random.key_impl(leaf)), _bits(jax.random.key_data(leaf))
        if isinstance(leaf, jax.Array | np.ndarray | np.generic):
            array = np.asarray(leaf)
            return array.dtype.name, array.shape, array.tobytes()
        return leaf

    return jax.tree.map(bits, tree)


def _write(place: Path, tree: Any, **options: Any) -> None:
    saving = {name: options.pop(name) for name in ("save_args", "ocdbt_target_data_file_size") if name in options}
    with warnings.catch_warnings(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as writer:
        writer.save(place, args=ocp.args.PyTreeSave(tree, **saving))


@pytest.mark.parametrize("ocdbt", [True, False])
@pytest.mark.parametrize("zarr3", [True, False])
def test_any_tree(tmp_path_factory: pytest.TempPathFactory, ocdbt: bool, zarr3: bool) -> None:
    @settings(max_examples=10, deadline=None)
    @given(_TREES)
    def check(tree: Any) -> None:
        place = tmp_path_factory.mktemp("orbax") / "item"
        _write(place, tree, use_ocdbt=ocdbt, use_zarr3=zarr3)
        assert _bits(treering.load(place)) == _bits(tree)

    check()


def _sharded(rows: str | None, columns: str | None) -> Any:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    items = np.random.default_rng(0).standard_normal((64, 48)).astype(np.float32)
    return jax.device_put(items, NamedSharding(mesh, PartitionSpec(rows, columns)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_ocdbt": False},
        {"use_zarr3": True},
        {"use_zarr3": True, "use_ocdbt": False},
        {"use_compression": False},
        {"use_compression": False, "use_zarr3": True},
        {"use_zarr3": True, "save_args": ocp.SaveArgs(chunk_byte_size=1024)},
        {"save_args": ocp.SaveArgs(chunk_byte_size=1024)},
        {"save_args": ocp.SaveArgs(dtype=np.dtype("bfloat16"))},
        {"use_zarr3": True, "ocdbt_target_data_file_size": 2048},
    ],
    ids=lambda options: ",".join(options) or "defaults",
)
def test_every_option_that_changes_bytes(tmp_path: Path, options: dict[str, Any]) -> None:
    tree = {"both": _sharded("x", "y"), "rows": _sharded("x", None), "same": _sharded(None, None)}
    tree |= {"zeros": jnp.zeros((32, 8)), "layer.0": {"w": np.arange(5000)}}
    given_options = dict(options)
    wanted = tree
    if (args := options.get("save_args")) is not None:
        given_options["save_args"] = jax.tree.map(lambda _: args, tree)
        if args.dtype is not None:
            wanted = jax.tree.map(lambda leaf: leaf.astype(args.dtype), tree)
    _write(tmp_path / "item", tree, **given_options)
    assert _bits(treering.load(tmp_path / "item")) == _bits(wanted)
    assert treering.verify(tmp_path / "item").ok


def test_typed_keys_and_what_orbax_restores(tmp_path: Path) -> None:
    tree = {"key": jax.random.key(3), "keys": jax.random.split(jax.random.key(1, impl="rbg"), 4), "n": np.float32(2)}
    with ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "item", tree)
    found = treering.load(tmp_path / "item")
    assert _bits(found)["key"] == _bits(tree)["key"]
    assert _bits(found)["keys"] == _bits(tree)["keys"]
    assert found["n"] == 2


def test_the_v1_api(tmp_path: Path) -> None:
    tree = {"a": [jnp.arange(3), (1, 2.5, True, "text")], "e": {}}
    ocp1.save(tmp_path / "one", tree, custom_metadata={"note": 1})
    assert _bits(treering.load(tmp_path / "one")) == _bits({"a": [jnp.arange(3), [1, 2.5, True, "text"]], "e": {}})
    assert treering.inspect(tmp_path / "one").metadata == {"custom_metadata": {"note": 1}}
    ocp1.save_checkpointables(tmp_path / "two", {"model": {"w": jnp.ones(3)}, "ema": {"w": jnp.zeros(3)}})
    found = treering.load(tmp_path / "two")
    assert _bits(found) == _bits({"model": {"w": jnp.ones(3)}, "ema": {"w": jnp.zeros(3)}})


@pytest.mark.parametrize("names", [{}, {"step_prefix": "ckpt"}, {"step_format_fixed_length": 8}], ids=str)
def test_a_manager(tmp_path: Path, names: dict[str, Any]) -> None:
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"], best_mode="min", **names)
    with ocp.CheckpointManager(tmp_path / "root", options=options) as manager:
        for step in (1, 2, 10):
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.full(3, step)}), metrics={"loss": 1 / step})
        manager.wait_until_finished()
        latest = manager.latest_step()
    assert treering.load(tmp_path / "root")["w"].tolist() == [latest] * 3
    assert treering.inspect(tmp_path / "root").metadata == {"metrics": {"loss": 0.1}}


@pytest.mark.parametrize("names", [{}, {"step_prefix": "ckpt", "step_format_fixed_length": 8}], ids=str)
def test_a_manager_becomes_a_run(tmp_path: Path, names: dict[str, Any]) -> None:
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"], best_mode="min", **names)
    root, run = tmp_path / "root", treering.Run(tmp_path / "run")

    def items(step: int) -> Any:
        state = {"w": jnp.full((4, 3), step, jnp.bfloat16), "key": jax.random.key(step), "n": step}
        return ocp.args.Composite(state=ocp.args.StandardSave(state), config=ocp.args.JsonSave({"at": step}))

    with ocp.CheckpointManager(root, options=options, metadata={"run": "a"}) as manager:
        for number, step in enumerate((1, 2, 10)):
            manager.save(step, args=items(step), metrics={"loss": 1 / step}, custom_metadata={"number": number})
            manager.wait_until_finished()
            treering.convert(root, run.path)
        kept, best = manager.all_steps(), manager.best_step()
        restored = manager.restore(best, args=ocp.args.Composite(state=ocp.args.StandardRestore()))["state"]
    assert (run.steps(), run.best("loss")) == (kept, best)
    assert _bits(run.load(best)) == _bits(dict(restored))
    with treering.open(run.path / "step_00000002") as opened:
        metadata = dict(opened.metadata)
    assert metadata["config"] == {"at": 2}
    assert metadata["custom_metadata"] == {"run": "a", "number": 1}
    assert metadata["treering"]["metrics"] == {"loss": 0.5}
