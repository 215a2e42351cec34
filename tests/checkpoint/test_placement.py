"""Where arrays go: shardings=, mesh=, rules, prefix trees and functions; any saved mesh loads on any other."""

from __future__ import annotations

import enum
import itertools
import re
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import treering
from tests.system_calls import spans_read
from tests.trees import assert_same
from treering.errors import KeptOnHostWarning, MismatchError, TreeringError, UnsupportedError
from treering.sharding import match_partition_rules

ARRAY = np.arange(8 * 16 * 4, dtype=np.float32).reshape(8, 16, 4)


def mesh_of(*shape: int, names: str = "xyz", turned: bool = False) -> Mesh:
    devices = jax.devices()
    assert len(devices) == 8, "tests/conftest.py asks for eight devices"
    count = int(np.prod(shape))
    grid = np.array(devices[::-1] if turned else devices)[:count].reshape(shape)
    return Mesh(grid, tuple(names[: len(shape)]))


MESH = mesh_of(4, 2)
SPREAD = {
    "single": SingleDeviceSharding(jax.devices()[3]),
    "replicated": NamedSharding(mesh_of(8), P()),
    "rows": NamedSharding(mesh_of(8), P("x")),
    "columns": NamedSharding(mesh_of(8), P(None, "x")),
    "both": NamedSharding(MESH, P("x", "y")),
    "turned": NamedSharding(MESH, P("y", "x")),
    "backwards": NamedSharding(mesh_of(4, 2, turned=True), P("x", "y")),
    "partly replicated": NamedSharding(MESH, P(None, "y")),
    "two axes on one": NamedSharding(MESH, P(None, ("x", "y"))),
    "two axes on one, other order": NamedSharding(MESH, P(("y", "x"))),
    "deep": NamedSharding(mesh_of(2, 2, 2), P("z", "x", "y")),
    "last": NamedSharding(mesh_of(2, 2, 2), P(None, None, ("y", "z"))),
    "three devices of eight": NamedSharding(mesh_of(2), P("x")),
    "one of eight": NamedSharding(mesh_of(1), P("x")),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint for each way in which the array lay on devices."""
    folder = tmp_path_factory.mktemp("spread")
    for number, sharding in enumerate(SPREAD.values()):
        treering.save(folder / str(number), {"w": jax.device_put(ARRAY, sharding), "n": 3})
    return {name: folder / str(number) for number, name in enumerate(SPREAD)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("before", SPREAD)
def test_any_mesh_loads_on_any_other(before: str, saved: dict[str, Path]) -> None:
    for after in SPREAD.values():
        found = treering.load(saved[before], shardings=after)["w"]
        assert found.sharding == after
        assert_same(np.asarray(found), ARRAY)
        for shard in found.addressable_shards:
            assert_same(np.asarray(shard.data), ARRAY[shard.index])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("before", SPREAD)
def test_without_shardings_it_comes_to_the_default_device(before: str, saved: dict[str, Path]) -> None:
    found = treering.load(saved[before])
    assert found["w"].devices() == {jax.devices()[0]}
    assert not found["w"].committed
    assert_same(found, {"w": jnp.asarray(ARRAY), "n": 3}, restored=False)
    with jax.default_device(jax.devices()[6]):
        assert treering.load(saved[before])["w"].devices() == {jax.devices()[6]}


def test_every_item_is_stored_once(saved: dict[str, Path]) -> None:
    for path in saved.values():
        (file,) = path.glob("*.safetensors")
        assert file.stat().st_size - ARRAY.nbytes == 4096


def test_shapes_of_primes_and_of_nothing(path: Path) -> None:
    """Shapes that no mesh of eight divides are saved from one device and come back to one."""
    tree = {
        f"{shape}": np.arange(np.prod(shape), dtype="i4").reshape(shape)
        for shape in ((7,), (13, 5), (0,), (0, 8), (8, 0), ())
    }
    treering.save(path, jax.tree.map(jnp.asarray, tree))
    found = treering.load(path, shardings=NamedSharding(MESH, P()))
    assert_same(found, jax.tree.map(jnp.asarray, tree), restored=False)
    for spec in (P("x"), P(None, "x"), P("x", "y"), P(("y", "x"))):
        empty = {"a": jax.device_put(np.zeros((0, 8), "f4"), NamedSharding(MESH, spec))}
        again = path.with_name(re.sub(r"\W", "_", str(spec)))
        treering.save(again, empty)
        found = treering.load(again, empty)
        assert found["a"].sharding == empty["a"].sharding
        assert found["a"].shape == (0, 8)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["bool", "int8", "int4", "uint2", "bfloat16", "float8_e4m3fn", "complex64", "uint32"])
def test_dtypes_over_a_mesh(dtype: str, path: Path) -> None:
    array = (np.arange(64).reshape(8, 8) % 2).astype(jnp.dtype(dtype))
    treering.save(path, {"w": jax.device_put(array, NamedSharding(MESH, P("x", "y")))})
    found = treering.load(path, shardings=NamedSharding(MESH, P("y", "x")))["w"]
    assert_same(np.asarray(found), array)


def test_keys_over_a_mesh(path: Path) -> None:
    keys = jax.random.split(jax.random.key(0), (8, 2))
    treering.save(path, {"k": jax.device_put(keys, NamedSharding(MESH, P("x", "y")))})
    for sharding in (NamedSharding(MESH, P("y")), NamedSharding(mesh_of(8), P("x")), SPREAD["single"]):
        found = treering.load(path, shardings=sharding)["k"]
        assert found.sharding.is_equivalent_to(sharding, 2)
        assert_same(found, keys, restored=False)
    assert_same(treering.load(path)["k"], keys, restored=False)


# --------------------------------------------------------------------------------------------------- how it can be said

TREE: dict[str, Any] = {
    "dense": {"kernel": jnp.arange(32.0).reshape(8, 4), "bias": jnp.arange(4.0)},
    "norm": [jnp.ones(8), jnp.zeros(())],
    "host": np.arange(8, dtype="i4"),
    "step": 3,
    "name": "t",
}


@pytest.fixture(scope="module")
def tree_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("placement") / "ckpt"
    treering.save(path, TREE)
    return path


def specs(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(key, simple=True, separator="/"): getattr(leaf.sharding, "spec", leaf.sharding)
        for key, leaf in leaves
        if isinstance(leaf, jax.Array)
    }


def test_one_for_all(tree_path: Path) -> None:
    for sharding in (NamedSharding(MESH, P()), SingleDeviceSharding(jax.devices()[2])):
        found = treering.load(tree_path, shardings=sharding)
        arrays = [leaf for leaf in jax.tree.leaves(found) if hasattr(leaf, "dtype")]
        assert len(arrays) == 5
        assert all(leaf.sharding == sharding for leaf in arrays), "what was numpy goes on devices too"
        assert (found["step"], found["name"]) == (3, "t")
    on_device = treering.load(tree_path, shardings=jax.devices()[4])
    assert on_device["host"].devices() == {jax.devices()[4]}


def test_a_spec_needs_a_mesh(tree_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="mesh"):
        treering.load(tree_path, only="norm/0", shardings=P("x"))
    found = treering.load(tree_path, only="norm/0", shardings=P("x"), mesh=MESH)
    assert found["norm"][0].sharding == NamedSharding(MESH, P("x"))


def test_a_mesh_alone_replicates(tree_path: Path) -> None:
    found = treering.load(tree_path, mesh=MESH)
    assert set(specs(found).values()) == {P()}
    assert_same(jax.device_get(found["dense"]), jax.device_get(TREE["dense"]))


def test_rules(tree_path: Path) -> None:
    rules = ((r"kernel$", P("x", "y")), (re.compile("bias|host"), P("y")), ("norm", P()))
    found = treering.load(tree_path, shardings=rules, mesh=MESH)
    assert specs(found) == {
        "dense/bias": P("y"),
        "dense/kernel": P("x", "y"),
        "host": P("y"),
        "norm/0": P(),
        "norm/1": P(),
    }
    assert_same(jax.device_get(found["dense"]), jax.device_get(TREE["dense"]))


def test_rules_as_a_tree_of_specs(tree_path: Path) -> None:
    params = {"dense": TREE["dense"]}
    by_rule = match_partition_rules([("kernel", P("x", "y")), ("bias", P())], params)
    found = treering.load(tree_path, only="dense", shardings=by_rule, mesh=MESH)
    assert specs(found) == {"dense/kernel": P("x", "y"), "dense/bias": P()}


def test_a_leaf_without_a_rule_is_named(tree_path: Path) -> None:
    with pytest.raises(MismatchError, match="norm/0") as caught:
        treering.load(tree_path, shardings=[("dense", P())], mesh=MESH)
    assert [line.split(":")[0] for line in caught.value.differences] == ["norm/0", "host"]


def test_a_prefix_tree(tree_path: Path) -> None:
    rows = NamedSharding(MESH, P("x"))
    found = treering.load(
        tree_path, shardings={"dense": {"kernel": rows, "bias": None}, "norm": P(), "host": rows}, mesh=MESH
    )
    assert found["dense"]["kernel"].sharding == rows
    assert found["dense"]["bias"].devices() == {jax.devices()[0]}
    assert found["norm"][1].sharding == NamedSharding(MESH, P())
    assert found["host"].sharding == rows


class Axis(enum.Enum):
    """A key that files know by its text."""

    ROWS = 1


@pytest.mark.parametrize(
    "key", [("é", 1), (Axis.ROWS, 1), Axis.ROWS, b"raw", "a/b", np.str_("é"), np.int64(3)], ids=repr
)
def test_a_prefix_tree_names_dict_keys_of_any_class(key: Any, path: Path) -> None:
    rows = NamedSharding(MESH, P("x"))
    treering.save(path, {key: {"w": jnp.ones(8)}, "b": jnp.ones(3)})
    like: Any = {key: {"w": jnp.ones(8)}, "b": 0 * jnp.ones(3)}
    found = treering.load(path, like, shardings={key: rows, "b": None})
    assert found[key]["w"].sharding == rows


def test_a_prefix_tree_of_a_deep_tree_costs_little(path: Path) -> None:
    tree: Any = {}
    for _ in range(300):
        tree = {"a": tree, "b": jnp.ones(1)}
    treering.save(path, tree)
    start = time.process_time()
    treering.load(path, shardings={"a": P(), "b": P()}, mesh=MESH)
    assert time.process_time() - start < 3


def test_shardings_of_the_tree_itself(tree_path: Path) -> None:
    like = jax.tree.map(lambda leaf: leaf, TREE)
    like["dense"] = jax.device_put(like["dense"], NamedSharding(MESH, P(None)))
    shardings = jax.tree.map(lambda leaf: leaf.sharding if isinstance(leaf, jax.Array) else None, like)
    found = treering.load(tree_path, TREE, shardings=shardings)
    assert found["dense"]["kernel"].sharding == shardings["dense"]["kernel"]
    assert isinstance(found["host"], np.ndarray), "like asks for numpy"


@pytest.mark.parametrize(
    "shardings",
    [{"dens": None}, {"dense": {"kernel": None, "biass": None}}, {"dense": None}, [None], {"dense": {}}],
    ids=str,
)
def test_a_tree_that_does_not_fit(shardings: Any, tree_path: Path) -> None:
    with pytest.raises(MismatchError, match="shardings"):
        treering.load(tree_path, shardings=shardings)


@pytest.mark.parametrize("shardings", ["x", 3, {"dense": "x", "norm": None, "host": None}, [("a", 3)], MESH], ids=repr)
def test_what_is_no_sharding(shardings: Any, tree_path: Path) -> None:
    with pytest.raises(TreeringError):
        treering.load(tree_path, shardings=shardings)


def test_a_function_of_key_and_aval(tree_path: Path) -> None:
    seen: dict[str, Any] = {}

    def choose(key: str, aval: jax.ShapeDtypeStruct) -> Any:
        seen[key] = aval
        return P("x") if aval.ndim and aval.shape[0] == 8 else None if key.endswith("bias") else jax.devices()[7]

    found = treering.load(tree_path, shardings=choose, mesh=MESH)
    assert list(seen) == ["dense/kernel", "dense/bias", "norm/0", "norm/1", "host"]
    assert all(isinstance(aval, jax.ShapeDtypeStruct) for aval in seen.values())
    assert (seen["dense/kernel"].shape, seen["dense/kernel"].dtype) == ((8, 4), jnp.float32)
    assert found["dense"]["kernel"].sharding == NamedSharding(MESH, P("x"))
    assert found["dense"]["bias"].devices() == {jax.devices()[0]}
    assert found["norm"][1].devices() == {jax.devices()[7]}


def test_an_error_in_the_function_is_the_users(tree_path: Path) -> None:
    def choose(key: str, aval: jax.ShapeDtypeStruct) -> Any:
        raise ZeroDivisionError(key)

    with pytest.raises(ZeroDivisionError, match="dense/kernel"):
        treering.load(tree_path, shardings=choose)


def test_all_misfits_at_once(path: Path) -> None:
    treering.save(path, {"a": jnp.ones(7), "b": jnp.ones((8, 2)), "c": jnp.ones(9), "d": jnp.ones(())})
    with pytest.raises(MismatchError) as caught:
        treering.load(path, shardings=NamedSharding(MESH, P("x")))
    assert [line.split(":")[0] for line in caught.value.differences] == ["a", "c", "d"]
    assert "7" in str(caught.value)
    with pytest.raises(MismatchError, match="no axis 'z'"):
        treering.load(path, only="b", shardings=P("z"), mesh=MESH)


def test_shardings_win_over_those_of_like(tree_path: Path) -> None:
    like = {"kernel": jax.device_put(TREE["dense"]["kernel"], jax.devices()[1]), "bias": jnp.zeros(4)}
    rows = NamedSharding(MESH, P("y"))
    found = treering.load(tree_path, like, at="dense", shardings=rows)
    assert found["kernel"].sharding == found["bias"].sharding == rows


def test_cast_and_another_mesh_together(tree_path: Path) -> None:
    rows = NamedSharding(MESH, P("y", "x"))
    like = {"kernel": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16, sharding=rows)}
    found = treering.load(tree_path, like, at="dense", only="kernel", cast=True)["kernel"]
    assert found.sharding == rows
    assert_same(np.asarray(found), np.asarray(TREE["dense"]["kernel"]).astype(jnp.bfloat16))


def test_a_number_becomes_an_array_on_the_mesh(tree_path: Path) -> None:
    like = {"step": jax.device_put(jnp.int32(0), NamedSharding(MESH, P()))}
    found = treering.load(tree_path, like, only="step", cast=True)["step"]
    assert found.sharding == like["step"].sharding
    assert int(found) == 3


def test_wide_arrays_stay_on_the_host_and_say_so(path: Path) -> None:
    with jax.enable_x64(True):
        treering.save(path, {"w": jnp.arange(8.0), "n": np.arange(8), "i": jnp.arange(8, dtype="int32")})
    found = treering.load(path)
    assert [type(found[key]).__name__ for key in "wn"] == ["ndarray", "ndarray"]
    assert_same(found["w"], np.arange(8.0))
    with pytest.warns(KeptOnHostWarning, match=r"w \(float64\)") as said:
        found = treering.load(path, shardings=NamedSharding(MESH, P("x")))
    assert "n (int64)" in str(said[0].message)  # one of numpy would have become an array of jax, too
    with pytest.warns(KeptOnHostWarning) as said:
        treering.load(path, shardings={"w": NamedSharding(MESH, P("x")), "n": None, "i": None})
    assert "n (int64)" not in str(said[0].message)
    assert_same(found["w"], np.arange(8.0))
    assert isinstance(found["i"], jax.Array)
    with jax.enable_x64(True):
        found = treering.load(path, shardings=NamedSharding(MESH, P("x")))
        assert {leaf.sharding.spec for leaf in jax.tree.leaves(found)} == {P("x")}
        assert_same(jax.device_get(found["w"]), np.arange(8.0))


# -------------------------------------------------------------------------------------------------- bytes that are read


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What is read into arrays: offset and count."""
    return spans_read(monkeypatch)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("before", "after"), [*itertools.product(["replicated", "rows", "turned", "last"], SPREAD)])
def test_no_byte_is_read_twice(before: str, after: str, saved: dict[str, Path], spans: list[tuple[int, int]]) -> None:
    treering.load(saved[before], shardings=SPREAD[after])
    assert sum(count for _, count in spans) == ARRAY.nbytes
    spans.sort()
    assert all(a + count <= b for (a, count), (b, _) in itertools.pairwise(spans))


def test_sharded_results_can_be_computed_with_and_donated(saved: dict[str, Path]) -> None:
    for after in ("rows", "turned", "replicated", "partly replicated", "single"):
        found = treering.load(saved["both"], shardings=SPREAD[after])["w"]
        kept = jax.jit(lambda x: x * 1)(found)
        donated = jax.jit(lambda x: x + 1, donate_argnums=0)(found)
        assert_same(np.asarray(donated), ARRAY + 1)
        assert_same(np.asarray(kept), ARRAY)
    assert_same(np.asarray(treering.load(saved["both"])["w"]), ARRAY)
