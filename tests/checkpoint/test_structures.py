"""Trees of every library through ``save`` and ``load``: with ``like`` as they were, without it what Python knows."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze
from flax.training.train_state import TrainState

import treering
from tests import warm
from tests.properties.strategies import Box, Chexed, Pair, Plain, Point, add
from tests.trees import assert_same, assert_same_structure
from treering.errors import MismatchError, StaticFieldsDifferWarning, UnsupportedError
from treering.leaves import tree_serialize_leaves
from treering.serialization import from_bytes, to_bytes, to_compressed_bytes


@dataclasses.dataclass
class Config:
    """Nobody registered it."""

    width: int
    table: Any


class Counter:
    """Only a state-dict handler knows it."""

    def __init__(self, n: Any) -> None:
        self.n = n


treering.serialization.register_serialization_state(
    Counter, lambda c: {"n": c.n}, lambda _, state: Counter(state["n"]), override=True
)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


def mlp(seed: int, activation: Callable[..., Any] = jax.nn.relu) -> eqx.nn.MLP:
    return eqx.nn.MLP(2, 1, 4, 2, activation=activation, key=jax.random.key(seed))


def train_state(seed: int) -> TrainState:
    model = nn.Dense(3)
    params = model.init(jax.random.key(seed), jnp.ones((1, 2)))
    tx = optax.chain(optax.clip(1.0), optax.adam(optax.cosine_decay_schedule(1e-3, 100)))
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


TREES: dict[str, Callable[[int], Any]] = {
    "an equinox model": mlp,
    "an equinox norm": lambda seed: eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch"),
    "a train state": train_state,
    "adam": lambda seed: optax.adam(1e-3).init({"w": jnp.full(3, float(seed))}),
    "a chain of optimizers": lambda seed: optax.chain(
        optax.masked(optax.adam(1e-3), {"w": True, "b": False}), optax.MultiSteps(optax.sgd(0.1), 2)
    ).init({"w": jnp.full(3, float(seed)), "b": jnp.ones(1)}),
    "hyperparameters": lambda seed: optax.inject_hyperparams(optax.adam)(learning_rate=0.1 + seed).init(jnp.ones(2)),
    "an nnx state": lambda seed: nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(seed))),
    "nnx streams": lambda seed: nnx.state(nnx.Rngs(params=seed, dropout=1)),
    "partitioned": lambda seed: {"w": nn.Partitioned(jnp.full(4, float(seed)), names=("x", None))},
    "a frozen dict": lambda seed: freeze({"b": {"z": jnp.full(2, float(seed))}, "a": 1, "c": None}),
    "a flax struct": lambda seed: Point(seed, {"y": np.ones(seed)}, "label"),
    "a chex dataclass": lambda seed: Chexed(alpha=seed, beta=[jnp.ones(1)]),
    "a registered dataclass": lambda seed: Plain(np.full(2, seed), None, "name"),
    "a node without names": lambda seed: Box(seed, Box(np.float32(seed), "text")),
    "a Partial": lambda seed: jax.tree_util.Partial(add, jnp.full(2, float(seed)), scale=seed),
    "namedtuples": lambda seed: Pair(seed, [Pair(None, np.arange(seed))]),
    "a frozen dict of numbers": lambda seed: freeze({2: {1: np.full(2, seed)}, 1: None}),
    "ordered": lambda seed: collections.OrderedDict([("z", seed), (3, np.ones(1)), ("a", None)]),
    "default": lambda seed: collections.defaultdict(list, b=[seed], a=[]),
    "keys": lambda seed: {"a": seed, 1: 2, None: 3, (1, b"x"): 4, 2.5: 5, Color.RED: 6, True if seed < 0 else "t": 7},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


# ----------------------------------------------------------------------------------------------------------- with like


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", TREES)
def test_like_gives_the_tree_back(name: str, path: Path) -> None:
    saved = TREES[name](3)
    treering.save(path, saved)
    result = treering.load(path, saved)
    assert_same(result, saved, restored=False)
    if name != "keys":  # which jax cannot sort
        assert_same_structure(result, saved)


@pytest.mark.parametrize("name", ["an equinox model", "adam", "an nnx state", "partitioned", "a Partial"])
def test_another_instance_is_a_target(name: str, path: Path) -> None:
    saved, like = TREES[name](3), TREES[name](4)
    treering.save(path, saved)
    result = treering.load(path, like)
    assert_same(
        jax.tree.leaves(eqx.filter(result, eqx.is_array)),
        jax.tree.leaves(eqx.filter(saved, eqx.is_array)),
        restored=False,
    )
    assert_same_structure(eqx.filter(result, eqx.is_array), eqx.filter(like, eqx.is_array))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", TREES)
def test_each_part_fits_into_like(name: str, path: Path) -> None:
    """A container that loses children keeps its class and static fields, so nothing is told of it."""
    saved, like = TREES[name](3), TREES[name](3)
    treering.save(path, {"x": saved})
    with treering.open(path) as opened:
        branches = {"/".join(key.split("/")[:end]) for key in opened for end in range(1, key.count("/") + 2)}
    for branch in sorted(branches):
        found = treering.load(path, {"x": like}, only=branch, missing="keep")
        assert_same(found, {"x": saved}, restored=False)
        assert treering.load(path, only=branch) is not None


def test_of_a_part_what_differs_is_said(path: Path) -> None:
    treering.save(path, Point(1, 2, "saved"))
    with pytest.warns(StaticFieldsDifferWarning, match="label of .*: saved 'saved', like has 'like'"):
        assert treering.load(path, Point(0, 5, "like"), only="x", missing="keep") == Point(1, 5, "like")


def test_a_thinned_container_comes_back_as_a_dict_with_its_own_keys(path: Path) -> None:
    treering.save(path, {"n": Pair(1, 2), "l": [1, 2], "o": freeze({3: 1, "a": 2}), "p": Point(1, 2)})
    part = {"n": {"first": 1}, "l": {1: 2}, "o": {3: 1}, "p": {"x": 1}}
    only = ["n/first", "l/1", "o/3", "p/x"]
    assert treering.load(path, only=only) == part
    assert treering.load(path, part, only=only) == part


def test_a_model_computes_the_same(path: Path) -> None:
    treering.save(path, mlp(0))
    result = treering.load(path, mlp(1))
    x = jnp.ones(2)
    np.testing.assert_array_equal(result(x), mlp(0)(x))


def test_an_abstract_model_is_a_target(path: Path) -> None:
    treering.save(path, mlp(0))
    result = treering.load(path, eqx.filter_eval_shape(mlp, 1))
    np.testing.assert_array_equal(result(jnp.ones(2)), mlp(0)(jnp.ones(2)))


def test_a_train_state_goes_on_where_it_stopped(path: Path) -> None:
    state = train_state(0).apply_gradients(grads=jax.tree.map(jnp.ones_like, train_state(0).params))
    treering.save(path, state)
    resumed = treering.load(path, train_state(1).replace(step=0))
    assert resumed.step == 1
    gradients = jax.tree.map(jnp.ones_like, state.params)
    assert_same(
        resumed.apply_gradients(grads=gradients).params, state.apply_gradients(grads=gradients).params, restored=False
    )


def test_an_nnx_model_is_updated(path: Path) -> None:
    saved, other = (nnx.Linear(2, 3, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    treering.save(path, nnx.state(saved))
    nnx.update(other, treering.load(path, nnx.state(other)))
    np.testing.assert_array_equal(other(jnp.ones(2)), saved(jnp.ones(2)))


def test_a_whole_nnx_model_is_a_tree_too(path: Path) -> None:
    saved, other = (nnx.Linear(2, 3, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    treering.save(path, saved)
    np.testing.assert_array_equal(treering.load(path, other)(jnp.ones(2)), saved(jnp.ones(2)))


def test_dataclasses_and_handlers(path: Path) -> None:
    treering.save(path, {"config": Config(3, [np.ones(2)]), "count": Counter({"deep": 7})})
    like: dict[str, Any] = {"config": Config(0, [np.zeros(2)]), "count": Counter({"deep": 0})}
    result = treering.load(path, like)
    assert type(result["config"]) is Config
    assert result["config"].width == 3
    assert_same(result["config"].table, [np.ones(2)])
    assert result["count"].n == {"deep": 7}


def test_missing_leaves_of_a_model_are_kept(path: Path) -> None:
    treering.save(path, {"w": jnp.ones(2)})
    like = {"w": jnp.zeros(2), "head": mlp(0)}
    result = treering.load(path, like, missing="keep")
    assert_same(result["w"], jnp.ones(2), restored=False)
    assert_same(result["head"], like["head"], restored=False)


# ------------------------------------------------------------------------------------------------- what differs is said


def test_the_same_functions_and_fields_say_nothing(path: Path) -> None:
    treering.save(path, mlp(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        treering.load(path, mlp(1))


def test_another_function_is_said_and_that_of_like_is_taken(path: Path) -> None:
    treering.save(path, mlp(0, jax.nn.relu))
    with pytest.warns(StaticFieldsDifferWarning, match=r"activation.*relu.*gelu"):
        result = treering.load(path, mlp(0, jax.nn.gelu))
    assert result.activation is jax.nn.gelu


def test_another_static_field_is_said_and_that_of_like_is_taken(path: Path) -> None:
    treering.save(path, {"a": [Point(1, 2, "saved")]})
    with pytest.warns(StaticFieldsDifferWarning, match=r"a/0: label .*'saved'.*'like'") as caught:
        result = treering.load(path, {"a": [Point(0, 0, "like")]})
    assert result == {"a": [Point(1, 2, "like")]}
    assert caught[0].filename == __file__


def test_another_class_is_said(path: Path) -> None:
    treering.save(path, {"p": [1, 2]})
    with pytest.warns(StaticFieldsDifferWarning, match="p: saved as list, like has tuple"):
        assert treering.load(path, {"p": (0, 0)}) == {"p": (1, 2)}


def test_a_setting_comes_from_like_and_a_change_is_said(path: Path) -> None:
    treering.save(path, {"color": Color.RED})
    assert treering.load(path, {"color": Color.RED}) == {"color": Color.RED}
    with pytest.warns(StaticFieldsDifferWarning, match="color"):
        assert treering.load(path, {"color": Color.BLUE}) == {"color": Color.BLUE}


# -------------------------------------------------------------------------------------------------------- without like


def test_without_like_python_knows_what_it_knows(path: Path) -> None:
    tree = {"b": [1, (2.5, None)], "a": {"n": np.arange(3), 5: jnp.ones(2)}, "t": optax.TraceState({"w": jnp.ones(1)})}
    treering.save(path, tree)
    result = treering.load(path)
    assert list(result) == ["b", "a", "t"]
    assert_same(result["b"], tree["b"], restored=False)
    assert_same(result["a"], tree["a"], restored=False)
    assert type(result["t"]).__name__ == "TraceState"
    assert_same(result["t"].trace, {"w": jnp.ones(1)}, restored=False)


def test_without_like_classes_are_stand_ins_that_jax_maps_over(path: Path) -> None:
    treering.save(path, mlp(0))
    model = treering.load(path)
    assert type(model) is treering.checkpoint.StandIn
    assert model.class_name == "equinox.nn._mlp.MLP"
    assert (model.in_size, model.width_size) == (2, 4)
    assert model.activation.text.endswith("relu")
    assert_same(model.layers[0].weight, mlp(0).layers[0].weight, restored=False)
    counted = jax.tree.map(lambda leaf: getattr(leaf, "size", 0), model)
    assert counted.layers[0].weight == 8
    assert_same(treering.load(path, model).layers, model.layers, restored=False)
    treering.save(path, model, overwrite=True)
    assert_same(treering.load(path, mlp(1)), mlp(0), restored=False)


def test_a_program_without_the_libraries_reads_it_all(path: Path) -> None:
    treering.save(path, {"model": mlp(0), "state": train_state(0), "nnx": nnx.state(nnx.Rngs(0)), "box": Box(1, 2)})
    program = """
import json, sys
for name in ("flax", "optax", "equinox", "chex", "tests"):
    sys.modules[name] = None
import jax, treering
tree = treering.load(sys.argv[1])
print(json.dumps({
    "classes": [tree[name].class_name for name in ("model", "state", "box")],
    "adam": type(tree["state"].opt_state[1][0]).__name__,
    "leaves": len(jax.tree.leaves(tree)),
}))
"""
    done = warm.run("-c", program, str(path))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [name.rpartition(".")[2] for name in answer["classes"]] == ["MLP", "TrainState", "Box"]
    assert answer["adam"] == "ScaleByAdamState"
    with treering.open(path) as checkpoint:
        assert answer["leaves"] == len(checkpoint)


class Spot(NamedTuple):
    x: Any
    y: Any


def test_registered_classes_are_made_again(path: Path) -> None:
    tree = {"p": Point(1, [2], "mine"), "c": Config(3, None), "s": Spot(1, 2), "b": Box(1, 2, "note")}
    treering.save(path, tree)
    # In a process of its own: what is registered stays so.
    program = """
import sys
import treering
from tests.checkpoint.test_structures import Box, Config, Point, Spot, assert_same
for cls in (Point, Config, Spot):
    treering.checkpoint.register_node(cls)
treering.checkpoint.register_node(Box, make=lambda fields, static: Box(fields["0"], fields["1"], static["aux"]))
result = treering.load(sys.argv[1])
tree = {"p": Point(1, [2], "mine"), "c": Config(3, None), "s": Spot(1, 2), "b": Box(1, 2, "note")}
assert (result["p"], result["c"], result["s"]) == (tree["p"], tree["c"], tree["s"])
assert type(result["s"]) is Spot
assert_same(result["b"], tree["b"])
assert result["b"].note == "note"
"""
    done = warm.run("-c", program, str(path))
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------------------------- a part


def test_a_list_that_lost_items_is_a_dict_of_index_to_item(path: Path) -> None:
    treering.save(path, {"layers": [{"w": n, "b": -n} for n in range(4)], "t": (1, 2), "p": Pair(1, 2), "e": {}})
    assert treering.load(path, only="layers/1/*") == {"layers": {1: {"w": 1, "b": -1}}}
    assert treering.load(path, only=["layers/*/w", "t/1"]) == {"layers": [{"w": n} for n in range(4)], "t": {1: 2}}
    assert treering.load(path, only="p/second") == {"p": {"second": 2}}
    assert treering.load(path, only=["t", "e"]) == {"t": (1, 2), "e": {}}


def test_a_subtree_is_the_root(path: Path) -> None:
    treering.save(path, {"a/b": [1, {"x": mlp(0)}], "n": {5: (1, 2)}})
    assert treering.load(path, at="a~1b/0") == 1
    assert treering.load(path, at="n/5") == (1, 2)
    assert_same(treering.load(path, mlp(1), at="a~1b/1/x"), mlp(0), restored=False)
    assert treering.load(path, at="n", only="5/1") == {5: {1: 2}}


def test_a_part_of_a_model_goes_into_a_part_of_another(path: Path) -> None:
    treering.save(path, {"old": mlp(0), "step": 3})
    result = treering.load(path, {"new": mlp(1)}, only="old/**", key_map={"new": "old"})
    assert_same(result["new"], mlp(0), restored=False)


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "bad",
    [{1, 2}, np.array([None]), collections.deque(), {1: 0, "1": 0}, jnp.ones],
    ids=["set", "object array", "deque", "keys alike", "function"],
)
def test_what_cannot_be_saved_is_named_and_nothing_is_written(bad: Any, path: Path) -> None:
    tree = {"good": jnp.ones(2), "bad": [bad]}
    if callable(bad):  # a function is noted by name
        treering.save(path, tree)
        return
    with pytest.raises(UnsupportedError) as caught:
        treering.save(path, tree)
    assert caught.value.path == ("bad", "0")
    assert not path.exists()


def test_a_refused_overwrite_leaves_the_old_one(path: Path) -> None:
    treering.save(path, {"w": 1})
    before = sorted(entry.name for entry in path.iterdir())
    with pytest.raises(UnsupportedError):
        treering.save(path, {"w": {1}}, overwrite=True)
    assert sorted(entry.name for entry in path.iterdir()) == before
    assert treering.load(path) == {"w": 1}


def test_a_traced_tree_is_refused(path: Path) -> None:
    def step(x: jax.Array) -> jax.Array:
        treering.save(path, {"x": x})
        return x

    with pytest.raises(UnsupportedError, match="jit"):
        jax.jit(step)(jnp.ones(2))
    assert not path.exists()


def test_a_deleted_array_is_refused_by_name(path: Path) -> None:
    array = jnp.ones(2)
    array.delete()
    with pytest.raises(UnsupportedError, match="deleted") as caught:
        treering.save(path, {"a": [array]})
    assert caught.value.path == ("a", "0")
    assert not path.exists()


# ------------------------------------------------------------------------------------------------------------- extremes


@pytest.mark.parametrize(
    "leaf",
    [7, None, "text", np.arange(3), jnp.ones(2), b"", "x" * 9999, abs],
    ids=["int", "None", "str", "numpy", "jax", "bytes", "long str", "function"],
)
def test_a_bare_leaf(leaf: Any, path: Path) -> None:
    treering.save(path, leaf)
    assert_same(treering.load(path, leaf), leaf, restored=False)
    if leaf is not abs:
        assert_same(treering.load(path), leaf, restored=False)


@pytest.mark.parametrize("tree", [{}, [], (), [{}, ()], optax.EmptyState()], ids=repr)
def test_a_tree_of_no_leaves(tree: Any, path: Path) -> None:
    treering.save(path, tree)
    assert treering.load(path, tree) == tree
    assert treering.load(path) == tree
    assert [entry.name for entry in path.iterdir()] == ["treering.json"]


def test_none_is_no_namedtuple_without_fields(path: Path) -> None:
    treering.save(path, {"a": None, "w": np.arange(3)})
    with pytest.raises(MismatchError, match="a: unexpected"):
        treering.load(path, {"a": optax.EmptyState(), "w": np.arange(3)})


def test_a_thousand_levels(path: Path) -> None:
    tree: Any = np.arange(3)
    for level in range(1024):
        tree = [tree] if level % 2 else {"a": tree}
    treering.save(path, tree)
    result, like = treering.load(path), treering.load(path, tree)
    for level in reversed(range(1024)):
        result, like = (result[0], like[0]) if level % 2 else (result["a"], like["a"])
    assert_same([result, like], [np.arange(3)] * 2)


def test_ten_thousand_leaves(path: Path) -> None:
    tree = {f"layer_{n}": {"w": np.full(3, n, np.int32), "b": n, "s": str(n)} for n in range(3334)}
    treering.save(path, tree)
    assert_same(treering.load(path), tree)


def test_names_that_look_like_paths_stay_names(path: Path, tmp_path: Path) -> None:
    names = [
        "../up",
        "/etc/passwd",
        "a/b",
        "a~1b",
        "~",
        "",
        ".",
        "..",
        "\0",
        "C:\\x",
        "\ud800",
        "__metadata__",
        "w~[0:1]",
    ]
    tree = {name: {name: np.full(2, number)} for number, name in enumerate(names)}
    treering.save(path, tree)
    assert_same(treering.load(path), tree)
    assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt"]


def _tied(seed: int) -> eqx.nn.Shared:
    key = jax.random.key(seed)
    layers = (eqx.nn.Embedding(4, 3, key=key), eqx.nn.Linear(3, 4, use_bias=False, key=key))
    return eqx.nn.Shared(layers, lambda pair: pair[1].weight, lambda pair: pair[0].weight)


def _assert_tied(found: Any) -> None:
    assert np.array_equal(found()[0].weight, _tied(0)()[0].weight)
    assert found()[1].weight is found()[0].weight


def test_weights_that_layers_of_equinox_share(tmp_path: Path) -> None:
    treering.save(tmp_path / "tied", _tied(0))
    _assert_tied(treering.load(tmp_path / "tied", _tied(1)))
    tree_serialize_leaves(tmp_path / "leaves", {"model": _tied(0)})
    _assert_tied(treering.load(tmp_path / "leaves", {"model": _tied(1)})["model"])


@pytest.mark.parametrize(
    "make", [lambda: _tied(0), lambda: {"model": _tied(0)}, lambda: {"f": max}], ids=["bare", "in a dict", "function"]
)
def test_msgpack_says_how_to_save_what_only_a_folder_keeps(tmp_path: Path, make: Callable[[], Any]) -> None:
    tree = make()
    saves: tuple[Callable[[], object], ...] = (
        lambda: to_bytes(tree), lambda: to_compressed_bytes(tree), lambda: treering.save(tmp_path / "a.msgpack", tree),
    )  # fmt: skip
    for save in saves:
        with pytest.raises(
            UnsupportedError, match=r"save keeps it in a folder; .* as eqx.filter\(tree, eqx.is_array\) does"
        ):
            save()
    with pytest.raises(UnsupportedError, match="save to a folder instead"):
        treering.save(tmp_path / "a.safetensors", tree)
    arrays = eqx.filter(tree, eqx.is_array)
    found = eqx.combine(from_bytes(arrays, to_bytes(arrays)), eqx.filter(tree, eqx.is_array, inverse=True))
    if isinstance(tree, eqx.nn.Shared):
        _assert_tied(found)


@pytest.mark.parametrize("name", ["a.msgpack", "a.npz", "a.safetensors"])
def test_other_forms_name_what_layers_share(tmp_path: Path, name: str) -> None:
    treering.save(tmp_path / "tied", {"model": _tied(0)})
    with pytest.raises(
        UnsupportedError, match=r"(?s)leaf 'model/pytree/1/weight': .*'objects' \(functions and other objects"
    ):
        treering.convert(tmp_path / "tied", tmp_path / name)
    treering.convert(tmp_path / "tied", tmp_path / name, lose=["objects", "structure", "none"])
    leaves = jax.tree.leaves(treering.load(tmp_path / name))
    [weight] = [leaf for leaf in leaves if getattr(leaf, "shape", None) == (4, 3)]
    assert np.array_equal(weight, _tied(0)()[0].weight)
