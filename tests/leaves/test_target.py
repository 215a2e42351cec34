"""Loading a leaves directory into a target: its containers, dtypes and shardings, and every difference at once."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests import meshes
from tests.trees import assert_same
from treering.errors import MismatchError, StaticFieldsDifferWarning
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves

GOLDEN = Path(__file__).parents[1] / "compat" / "golden" / "eformer"
GRID = meshes.grid(2, 4, axes=("dp", "tp"))


class State(NamedTuple):
    params: Any
    step: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: Any
    name: str = dataclasses.field(default="", metadata={"static": True})


def tree() -> Any:
    return State(params=[{"w": jnp.arange(8.0), "b": None}, Layer(jnp.ones((8, 2)), "a")], step=3)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tree_serialize_leaves(tmp_path, tree())
    tree_serialize_leaves(tmp_path, tree(), prefix="model")
    return tmp_path


@pytest.mark.parametrize("prefix", [None, "model"])
def test_the_containers_are_those_of_the_target(prefix: str | None, saved: Path) -> None:
    found = tree_deserialize_leaves(saved, prefix=prefix, target=tree())
    assert type(found) is State
    assert type(found.params[1]) is Layer
    assert found.params[1].name == "a"
    assert_same(found.params[0], tree().params[0], restored=False)
    abstract = jax.eval_shape(lambda: {"w": jnp.arange(8.0)})
    wanted = State(params=[abstract | {"b": None}, Layer(np.ones((8, 2), "f4"), "a")], step=0)
    found = tree_deserialize_leaves(saved, prefix=prefix, target=wanted)
    assert isinstance(found.params[0]["w"], jax.Array)
    assert type(found.params[1].w) is np.ndarray, "a numpy leaf asks for numpy"
    assert found.step == 3


def test_every_difference_is_told_at_once(saved: Path) -> None:
    wanted = State(params=[{"w": jnp.arange(9.0), "c": 1}, Layer(jnp.ones((8, 2), "i4"), "a")], step=3)
    with pytest.raises(MismatchError, match="4 differences between `target` and the checkpoint") as caught:
        tree_deserialize_leaves(saved, target=wanted)
    assert [line.split(":")[0] for line in caught.value.differences] == [
        "params/0/w",
        "params/0/c",
        "params/1/w",
        "params/0/b",
    ]
    assert "treering.load reads the directory too" in str(caught.value), "cast= and key_map= are no arguments here"


def test_static_fields_that_differ_are_a_warning_at_the_callers_line(saved: Path) -> None:
    wanted = State(params=[{"w": jnp.arange(8.0), "b": None}, Layer(jnp.ones((8, 2)), "other")], step=3)
    with pytest.warns(StaticFieldsDifferWarning, match="'a'") as caught:
        found = tree_deserialize_leaves(saved, target=wanted)
    assert found.params[1].name == "other"
    assert caught[0].filename == __file__
    assert "`target`" in str(caught[0].message)
    assert "like" not in str(caught[0].message)


def test_shardings_of_the_target_count_where_nothing_else_is_said(saved: Path) -> None:
    columns = NamedSharding(GRID, P("tp"))
    wanted = tree()
    wanted.params[0]["w"] = jax.device_put(wanted.params[0]["w"], columns)
    wanted.params[1].w = jax.ShapeDtypeStruct((8, 2), "float32", sharding=NamedSharding(GRID, P("dp")))
    found = tree_deserialize_leaves(saved, target=wanted)
    assert found.params[0]["w"].sharding == columns
    assert found.params[1].w.sharding == NamedSharding(GRID, P("dp"))
    found = tree_deserialize_leaves(saved, GRID, target=wanted, shardings={"params.0.w": P()})
    assert found.params[0]["w"].sharding == NamedSharding(GRID, P())
    assert found.params[1].w.sharding == NamedSharding(GRID, P("dp")), "and a mesh of several axes needs no more"
    found = tree_deserialize_leaves(saved, GRID, target=wanted, partition_rules=[("", P("dp"))])
    assert found.params[0]["w"].sharding == NamedSharding(GRID, P("dp"))


def test_a_target_that_lies_on_one_device_freely_says_nothing(saved: Path) -> None:
    with pytest.raises(MismatchError, match=r"params.0.w, params.1.w"):
        tree_deserialize_leaves(saved, GRID, target=tree())


def test_the_callback_makes_the_leaves_of_the_target_too(saved: Path) -> None:
    found = tree_deserialize_leaves(saved, target=tree(), callback=lambda _, key: key)
    assert found.params[0] == {"w": "params.0.w", "b": None}
    assert found.params[1].w == "params.1.w"


def test_a_tree_of_eformers_comes_back_into_its_lists(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "plain", tmp_path / "plain")
    flat = tree_deserialize_leaves(tmp_path / "plain")
    wanted = flat | {"layers": [flat["layers"][str(number)] for number in range(12)]}
    found = tree_deserialize_leaves(tmp_path / "plain", target=wanted)
    assert type(found["layers"]) is list
    assert_same(found, wanted, restored=False)
    del wanted["step"]
    with pytest.raises(MismatchError, match="step: unexpected"):
        tree_deserialize_leaves(tmp_path / "plain", target=wanted)


def test_64_bit_numpy_in_the_target_needs_no_x64(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        tree_serialize_leaves(tmp_path, {"i": jnp.array([2**40])})
    found = tree_deserialize_leaves(tmp_path, target={"i": np.zeros(1, "i8")})
    assert_same(found, {"i": np.array([2**40])})
