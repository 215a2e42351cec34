"""``...`` in ``like``: what was saved there comes back as it was, a leaf or a branch, wherever ``like`` is taken."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treering as tr
from tests import meshes
from tests.trees import assert_unchanged
from treering.errors import MismatchError

load: Any = tr.load  # what is loaded has the type of `like`, of `...` too
load_async: Any = tr.load_async


class Pair(NamedTuple):
    x: Any
    y: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    weight: Any
    bias: Any


TREE: dict[str, Any] = {
    "params": {
        "layers": [Layer(jnp.ones((8, 4)), jnp.zeros(4)), Layer(jnp.full((8, 4), 2.0), jnp.ones(4))],
        "n": np.arange(3),
    },
    "opt": (Pair(1.5, "text"), [None, {"a/b": np.float32(2), "": 1}], ()),
    "key": jax.random.key(0),
    "f": jnp.sin,
    "step": 7,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tr.save(tmp_path / "ckpt", TREE)
    return tmp_path / "ckpt"


def test_the_whole_tree(path: Path) -> None:
    assert_unchanged(load(path, ...), load(path))
    assert_unchanged(load(path, ..., at="opt/1"), TREE["opt"][1])


def test_leaves_and_branches_at_any_depth(path: Path) -> None:
    like = {
        "params": {"layers": [Layer(..., jnp.zeros(4)), ...], "n": ...},
        "opt": (Pair(..., "x"), ..., ...),
        "key": ..., "f": jnp.sin, "step": ...,
    }  # fmt: skip
    found = load(path, like)
    saved = load(path)
    assert isinstance(found["params"]["layers"][0], Layer)
    assert_unchanged(found["params"]["layers"][0].weight, TREE["params"]["layers"][0].weight)
    assert isinstance(found["params"]["layers"][1], tr.checkpoint.StandIn)
    assert_unchanged(found["params"]["layers"][1], saved["params"]["layers"][1])
    assert_unchanged(found["opt"], TREE["opt"])
    assert_unchanged(found["params"]["n"], TREE["params"]["n"])
    assert_unchanged(found["key"], TREE["key"])
    assert (found["step"], found["f"]) == (7, jnp.sin)
    assert isinstance(load(path, {"f": ...}, extra="ignore")["f"], tr.checkpoint.OpaqueLeaf)


def test_what_is_not_there_is_missing(path: Path) -> None:
    with pytest.raises(MismatchError, match=r"nothing: missing, `like` has `\.\.\.`"):
        load(path, {"nothing": ...}, extra="ignore")
    with pytest.raises(MismatchError, match=r"nothing: missing, `like` has `\.\.\.`"):
        load(path, {"nothing": ..., "step": 0}, extra="ignore", missing="keep")
    with pytest.raises(MismatchError, match=r"step: unexpected"):
        load(path, {name: ... for name in TREE if name != "step"})


def test_shardings_place_it(path: Path) -> None:
    split = NamedSharding(meshes.line(), P("x"))
    found = load(
        path, {"params": ...}, extra="ignore",
        shardings=lambda key, aval: split if key.endswith("weight") else None,
    )  # fmt: skip
    assert [layer.weight.sharding for layer in found["params"]["layers"]] == [split, split]
    assert isinstance(found["params"]["n"], np.ndarray)
    tree = load(
        path,
        {"params": ...},
        extra="ignore",
        shardings={"params": {"layers": split, "n": None}},
        only="params/layers/*/weight",
    )
    assert tree["params"]["layers"][0]["weight"].sharding == split


def test_renamed_branches_and_parts(path: Path) -> None:
    found = load(
        path,
        {"p": ..., "first": ..., "s": 0},
        key_map={"p": "params/layers/1", "first": "opt/0/x", "s": "step"},
        extra="ignore",
    )
    assert found["p"].bias.tolist() == [1, 1, 1, 1]
    assert (found["first"], found["s"]) == (1.5, 7)
    found = load(path, {"layers": ..., "n": ...}, at="params", only=["n", "layers/1/bias"])
    assert found["layers"] == {1: {"bias": pytest.approx([1, 1, 1, 1])}}
    with pytest.raises(MismatchError, match=r"like.*has no such key"):
        load(path, {"params": ...}, key_map={"params/n": "step"}, extra="ignore")


def test_below_the_empty_key(tmp_path: Path) -> None:
    tree = {"": {"b": 1, "": 2}, "a": {"c": 3}}
    tr.save(tmp_path / "a", tree)
    assert load(tmp_path / "a", {"": ..., "a": ...}) == tree
    assert load(tmp_path / "a", {"x": {"": ...}}, key_map={"x/": ""}) == {"x": {"": tree}}
    assert load(tmp_path / "a", {"": ...}, key_map={"~": "a"}, extra="ignore") == {"": tree["a"]}


def test_it_is_no_cast_and_no_check(path: Path) -> None:
    like = {"params": {"layers": ..., "n": np.zeros(3, "i2")}}
    found = load(path, like, extra="ignore", cast=True)
    assert found["params"]["n"].dtype == np.int16
    assert found["params"]["layers"][0].weight.dtype == jnp.float32


def test_in_a_run_and_over_each_other(tmp_path: Path) -> None:
    with tr.Run(tmp_path / "run") as run:
        run.save(1, TREE)
        found = run.load(like={"params": ..., "opt": ..., "key": ..., "step": 0, "f": jnp.sin})
        assert_unchanged(found["opt"], TREE["opt"])
        assert_unchanged(run.load(1, ...), run.load(1))
    tr.save(tmp_path / "over", {"step": 8, "lora": {"a": jnp.ones(2)}})
    both = [tmp_path / "run", tmp_path / "over"]
    found = load(both, {"step": ..., "lora": ..., "opt": ...}, extra="ignore")
    assert found["step"] == 8
    assert_unchanged(found["opt"], TREE["opt"])
    assert load_async(both, {"lora": ...}, extra="ignore").result()["lora"]["a"].tolist() == [1, 1]


class Counter:
    """An iterator that gives its state."""

    def __init__(self) -> None:
        self.state: Any = {"at": 3, "seen": [1, (2, np.ones(2))]}

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state["at"]


def test_beside_items_that_keep_their_own_state(tmp_path: Path) -> None:
    def tree(data: Any) -> Any:
        return {"data": {"train": data, "n": 5}, "params": TREE["params"], "key": TREE["key"]}

    tr.save(tmp_path / "each", tree(tr.each({"at": 3})))
    found = load(tmp_path / "each", {**dict.fromkeys(("key", "params"), ...), "data": {"train": tr.each(None), "n": 0}})
    assert found["data"]["train"].item == {"at": 3}
    assert_unchanged(found["params"], load(tmp_path / "each", at="params"))
    with tr.Run(tmp_path / "run") as run:
        run.save(1, tree(Counter())).result()
        data = Counter()
        wanted: Any = {"params": ..., "key": ..., "data": {"train": data, "n": ...}}
        found = run.load(1, wanted)
        assert data.state == 3
        assert_unchanged(found["params"], run.load(1, at="params"))
        assert found["data"]["n"] == 5


def test_in_other_forms(tmp_path: Path) -> None:
    state = {"a": {"w": np.ones(2, "f4"), "b": np.zeros(3, "f4")}, "c": np.arange(2)}
    tr.save(tmp_path / "x.safetensors", state)
    tr.save(tmp_path / "x.msgpack", state)
    tr.leaves.tree_serialize_leaves(tmp_path / "leaves", state)
    for name in ("x.safetensors", "x.msgpack", "leaves"):
        found = load(tmp_path / name, {"a": ..., "c": np.zeros(2, int)})
        assert found["a"]["b"].tolist() == [0, 0, 0], name
    target: Any = {"a": ..., "c": np.zeros(2, int)}
    assert tr.leaves.tree_deserialize_leaves(tmp_path / "leaves", target=target)["a"]["w"][0] == 1


def test_many_of_them_take_one_look_at_the_tree(tmp_path: Path) -> None:
    state = {f"l{n}": {"w": np.full(2, n), "b": n} for n in range(3000)}
    tr.save(tmp_path / "ckpt", state)
    found = load(tmp_path / "ckpt", dict.fromkeys(state, ...))
    assert found["l2999"]["b"] == 2999
    assert found["l17"]["w"].tolist() == [17, 17]
