"""save(only=, dtype=): a part of a tree that says so, and floats that are cast on their way into the file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treering as tr
from tests import meshes
from tests.trees import assert_unchanged
from treering.errors import MismatchError, StaticFieldsDifferWarning, UnsupportedError


class Pair(NamedTuple):
    x: Any
    y: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    weight: Any
    lora: Any
    act: str = dataclasses.field(default="relu", metadata={"static": True})


def tree() -> dict[Any, Any]:
    return {
        "layers": [Layer(jnp.arange(4.0), jnp.zeros(2)), Layer(jnp.ones(4), jnp.full(2, 3.0))],
        "pair": Pair(np.arange(3.0), 2.5),
        "step": 7,
        5: {"deep": np.float32(1.5), "a*b": np.arange(2)},
        "key": jax.random.key(3),
    }


@pytest.fixture(params=["disk", "memory", "file"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    name = {
        "disk": f"{tmp_path}/ckpt",
        "memory": f"memory://{tmp_path.name}/parts",
        "file": f"{tmp_path}/part.safetensors",
    }
    return name[request.param]


def test_a_part_comes_back_as_a_load_of_that_part_does(path: str, tmp_path: Path) -> None:
    tr.save(tmp_path / "whole", tree())
    for only in ("**/lora", ["layers/1", "pair/x"], "5/**", ["5/a~2b"]):
        tr.save(path, tree(), only=only, overwrite=True)
        assert_unchanged(tr.load(path), tr.load(tmp_path / "whole", only=only))
        assert tr.verify(path).ok


def test_the_index_says_that_it_is_a_part(path: str) -> None:
    tr.save(path, tree(), only=["**/lora", "pair/x"])
    assert "part: only=['**/lora', 'pair/x']" in str(tr.inspect(path))
    with pytest.raises(MismatchError) as caught:
        tr.load(path, {"layers": tree()["layers"]}, extra="ignore")
    said = str(caught.value)
    assert "between `like` and the checkpoint, which is a part of a tree (only=['**/lora', 'pair/x']):" in said
    assert "layers/0/weight: missing" in said
    assert "load([base, part], like) puts a part over the rest of its tree" in said


def test_a_part_that_is_all_of_the_tree_is_none(path: str) -> None:
    tr.save(path, {"a": np.arange(3), "b": np.ones(2)}, only="**")
    assert "part:" not in str(tr.inspect(path))


def test_a_part_goes_into_the_classes_of_like_without_a_warning(path: str, recwarn: pytest.WarningsRecorder) -> None:
    tr.save(path, tree(), only="layers/*/lora")
    like = {"layers": [Layer(jnp.full(1, 9.0), jnp.zeros(2)), Layer(None, jnp.zeros(2), act="gelu")]}
    found = tr.load(path, like, missing="keep")
    assert isinstance(found["layers"][1], Layer)
    assert found["layers"][1].lora.tolist() == [3.0, 3.0]
    assert not [one for one in recwarn if issubclass(one.category, StaticFieldsDifferWarning)]


def test_leaves_that_are_left_out_need_not_be_saved(tmp_path: Path) -> None:
    gone = jnp.ones(3)
    gone.delete()
    for _ in range(2):  # the second time the plan might come from the first
        tr.save(tmp_path / "a", {"w": jnp.ones(2), "base": gone, "tags": {"x"}}, only="w", overwrite=True)
    assert list(tr.load(tmp_path / "a")) == ["w"]
    with pytest.raises(UnsupportedError, match=r"a set cannot be saved \(at leaf 'tags'\)"):
        tr.save(tmp_path / "b", {"w": jnp.ones(2), "tags": {"x"}}, only=["w", "tags"])


def test_a_glob_that_keeps_nothing_is_refused_and_nothing_is_written(path: str, tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=r"nothing in the tree matches '\*\*/lorax' of only=.*'\*' stays inside"):
        tr.save(path, tree(), only=["**/lora", "**/lorax"])
    with pytest.raises(MismatchError, match="nothing in the tree matches 'nowhere' of dtype="):
        tr.save(path, tree(), only="pair/x", dtype={"nowhere": "bfloat16"})
    with pytest.raises(MismatchError, match=r"holds no glob.*omit it to save everything"):
        tr.save(path, tree(), only=[])
    with pytest.raises(UnsupportedError, match="only= is a glob or a list of globs, found 3"):
        tr.save(path, tree(), only=3)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_msgpack_cannot_say_it(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"cannot say that it holds a part of a tree, only=.*safetensors"):
        tr.save(tmp_path / "a.msgpack", {"w": np.ones(2)}, only="w")
    with pytest.raises(UnsupportedError, match=r"without dtype=.*treering\.export"):
        tr.save_async(tmp_path / "a.msgpack", {"w": np.ones(2)}, dtype="float16")
    assert list(tmp_path.iterdir()) == []


def test_the_plan_of_one_part_is_not_that_of_another(path: str) -> None:
    state: dict[str, Any] = {"a": np.arange(3.0), "b": {"c": np.ones(2), "d": 3.5}}
    for only, dtype in (
        ("a", None),
        ("b", None),
        ("a", "float32"),
        (None, "float32"),
        (None, None),
        ("b", "float16"),
    ) * 2:
        tr.save(path, state, only=only, dtype=dtype, overwrite=True) if "safetensors" not in path else tr.save(
            path, {"a": state["a"], "b": {"c": np.ones(2)}}, only=only, dtype=dtype, overwrite=True
        )
        found = tr.load(path)
        assert set(found) == {only or "a", only or "b"}
        array = found["a"] if "a" in found else found["b"]["c"]
        assert array.dtype == np.dtype(dtype or "float64")
        state["a"] = state["a"] + 1


def test_a_part_of_a_part_stays_one_in_a_conversion(tmp_path: Path) -> None:
    tr.save(tmp_path / "part", tree(), only="**/lora")
    tr.convert(tmp_path / "part", tmp_path / "part.safetensors")
    tr.convert(tmp_path / "part.safetensors", tmp_path / "again")
    assert "part: only='**/lora'" in str(tr.inspect(tmp_path / "again"))
    assert_unchanged(tr.load(tmp_path / "again"), tr.load(tmp_path / "part"))


def test_a_damaged_word_on_the_part_is_told(tmp_path: Path) -> None:
    from tests.on_disk import signed_again

    tr.save(tmp_path / "part", tree(), only="pair/x")
    index = tmp_path / "part" / "treering.json"
    whole = index.read_bytes()
    assert json.loads(whole)["part"] == {"only": ["pair/x"]}
    for odd in (b'{"only":[]}', b'{"only":[3]}', b"7", b"{}"):
        index.write_bytes(signed_again(whole.replace(b'{"only":["pair/x"]}', odd)))
        with pytest.raises(tr.errors.CorruptError):
            tr.load(tmp_path / "part")


# ------------------------------------------------------------------------------------------------------------- dtype=


def test_floats_are_cast_and_nothing_else(path: str) -> None:
    state: dict[str, Any] = {
        "w": jnp.arange(6.0).reshape(2, 3) / 7, "n": np.arange(3.0) / 3, "s": np.float64(0.1), "i": np.arange(3),
        "c": np.array([1j]), "b": jnp.ones(2, "bfloat16"), "m": np.array([True]),
    }  # fmt: skip
    if "safetensors" in path:
        del state["c"]
    tr.save(path, state, dtype="bfloat16")
    found = tr.load(path)
    for name in ("w", "n", "s"):
        wanted = np.asarray(state[name]).astype(ml_dtypes.bfloat16)
        assert np.asarray(found[name]).tobytes() == wanted.tobytes()
    assert isinstance(found["w"], jax.Array)
    assert isinstance(found["n"], np.ndarray)
    assert isinstance(found["s"], np.generic)
    for name in {"i", "c", "b", "m"} & set(state):
        assert_unchanged(found[name], state[name])
    assert tr.verify(path).ok


def test_the_first_glob_that_matches_counts(path: str) -> None:
    state = {"head": {"w": jnp.ones(2)}, "body": {"w": jnp.ones(2), "norm": jnp.ones(2)}, "rest": np.ones(2)}
    tr.save(path, state, dtype={"body/norm": jnp.float32, "body": "bfloat16", "**/w": np.float16})
    assert jax.tree.map(lambda x: x.dtype.name, tr.load(path)) == {
        "head": {"w": "float16"}, "body": {"w": "bfloat16", "norm": "float32"}, "rest": "float64",
    }  # fmt: skip


def test_a_glob_with_none_leaves_a_leaf_as_it_is(path: str) -> None:
    state = {"head": {"w": jnp.ones(2)}, "body": {"w": jnp.ones(2)}}
    tr.save(path, state, dtype={"head": None, "**": "bfloat16"})
    found = tr.load(path)
    assert found["head"]["w"].dtype == jnp.float32
    assert found["body"]["w"].dtype == jnp.bfloat16
    assert isinstance(found["head"]["w"], jax.Array)
    tr.convert(path, f"{path}-b", dtype={"**/w": None})
    assert tr.load(f"{path}-b")["body"]["w"].dtype == jnp.bfloat16


def test_export_and_convert_take_globs_too(tmp_path: Path) -> None:
    state = {"a": np.ones(2, "f4"), "b": np.ones(2, "f4")}
    tr.export(tmp_path / "a.npz", state, dtype={"a": "float16"})
    tr.save(tmp_path / "ckpt", state)
    tr.convert(tmp_path / "ckpt", tmp_path / "b", dtype={"b": np.float64})
    assert {key: array.dtype.name for key, array in tr.load(tmp_path / "a.npz").items()} == {
        "a": "float16",
        "b": "float32",
    }
    assert {key: array.dtype.name for key, array in tr.load(tmp_path / "b").items()} == {"a": "float32", "b": "float64"}


def test_a_value_that_would_become_another_is_named_and_the_old_checkpoint_stays(path: str) -> None:
    tr.save(path, {"w": np.zeros(2)})
    large = np.zeros((3, 4))
    large[1, 2] = 1e30
    with pytest.raises(MismatchError, match=r"the value 1e\+30 at index \[1, 2\] does not fit float16 \(at leaf 'w'\)"):
        tr.save(path, {"w": large}, dtype="float16", overwrite=True)
    pending = tr.save_async(path, {"w": large}, dtype="float16", overwrite=True)
    with pytest.raises(MismatchError, match=r"at index \[1, 2\] does not fit"):
        pending.result()
    assert tr.load(path)["w"].tolist() == [0, 0]


@pytest.mark.parametrize("dtype", ["int8", "nothing", 3, {"a": "int8"}, {3: "float32"}])
def test_what_is_no_dtype_of_floats_is_refused(path: str, dtype: Any) -> None:
    with pytest.raises(UnsupportedError, match="dtype="):
        tr.save(path, {"a": np.ones(2)}, dtype=dtype)


def test_arrays_in_parts_are_cast_box_by_box(path: str) -> None:
    array = jax.device_put(np.arange(64.0).reshape(8, 8), NamedSharding(meshes.grid(2, 4), P("x", "y")))
    for dtype in ("bfloat16", "float32"):
        tr.save(path, {"w": array, "b": array.astype("bfloat16")}, dtype=dtype, overwrite=True)
        found = tr.load(path)
        assert np.array_equal(np.asarray(found["w"]), np.asarray(array).astype(dtype))
        assert found["b"].dtype == dtype
    bad = jax.device_put(
        np.where(np.arange(64).reshape(8, 8) == 45, 1e30, 0), NamedSharding(meshes.grid(2, 4), P("x", "y"))
    )
    with pytest.raises(MismatchError, match=r"at index \[5, 5\] does not fit float16"):
        tr.save(path, {"w": bad}, dtype="float16", overwrite=True)


def test_a_snapshot_holds_what_was_there_and_is_cast_later(path: str) -> None:
    weights = np.arange(100_000.0)
    on_device = jnp.arange(1000.0)
    pending = tr.save_async(path, {"w": weights, "d": on_device}, dtype="float32")
    weights[:] = -1
    on_device.delete()
    pending.result()
    found = tr.load(path)
    assert found["w"].dtype == np.float32
    assert found["w"][-1] == 99_999
    assert found["d"].sum() == 499_500


def test_a_cast_of_a_large_leaf_takes_little_memory(tmp_path: Path) -> None:
    import tracemalloc

    large = np.ones((1 << 22, 4), "f4")  # 64 MiB
    tr.save(tmp_path / "warm", {"w": large[:4]}, dtype="bfloat16")
    tracemalloc.start()
    try:
        tr.save(tmp_path / "ckpt", {"w": large}, dtype="bfloat16")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 << 20
    assert tr.load(tmp_path / "ckpt")["w"].dtype == ml_dtypes.bfloat16


# --------------------------------------------------------------------------------------------------------------- runs


def test_a_step_may_be_a_part(tmp_path: Path) -> None:
    base = tree()
    with tr.Run(tmp_path / "run", keep=tr.KeepLast(2)) as run:
        for step in range(3):
            run.save(step, {"model": base, "step": step}, only=["**/lora", "step"], dtype={"**/lora": "bfloat16"})
        found = run.load(2)
        assert found["step"] == 2
        assert found["model"]["layers"][1]["lora"].dtype == jnp.bfloat16
        assert list(found["model"]) == ["layers"]
        with pytest.raises(MismatchError, match="nothing in the tree matches 'nothing'"):
            run.save(3, {"w": 1}, only="nothing")
        assert run.steps() == [1, 2]


def test_a_step_that_is_a_part_lies_over_its_base(tmp_path: Path) -> None:
    state = {"w": jnp.ones(3), "lora": jnp.zeros(2)}
    tr.save(tmp_path / "base", {"w": state["w"]})
    with tr.Run(tmp_path / "run") as run:
        run.save(1, state | {"lora": jnp.full(2, 5.0)}, only="lora")
    found = tr.load([tmp_path / "base", tmp_path / "run"], state)  # the run's latest step
    assert found["lora"].tolist() == [5.0, 5.0]
