"""What a checkpoint holds of every container: structure, key texts, kinds, static fields."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze
from flax.training.train_state import TrainState
from hypothesis import given

from tests import meshes
from tests.format.indexes import keys_of
from tests.properties.strategies import Box, Chexed, Layer, Pair, Plain, Point, add, quick, trees
from treering._format.index import ARRAY_KINDS, PYTHON_KINDS, Container, ForeignKey, OpaqueLeaf
from treering._tree.flatten import flatten, flatten_like
from treering._values.keys import join_key
from treering.errors import UnsupportedError
from treering.serialization import register_serialization_state


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Config:
    """Nobody registered it."""

    width: int
    table: Any
    unset: Any = dataclasses.field(init=False, repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: Any


class Counter:
    """Only a state-dict handler knows it."""

    def __init__(self, n: Any) -> None:
        self.n = n


class Wrapped:
    """Its handler returns no dict."""

    def __init__(self, value: Any) -> None:
        self.value = value


register_serialization_state(Counter, lambda c: {"n": c.n}, lambda _, state: Counter(state["n"]))
register_serialization_state(Wrapped, lambda w: w.value, lambda _, state: Wrapped(state))


def heads(tree: Any) -> list[Any]:
    """The tokens, short: node, class and keys, or the number of leaves."""
    return [
        token if isinstance(token, int) else (token.node, (token.class_name or "").rpartition(".")[2], token.keys)
        for token in flatten(tree).tokens
    ]


def static(tree: Any, at: int = 0) -> dict[str, Any]:
    """The static fields of one of its containers."""
    containers = [token for token in flatten(tree).tokens if isinstance(token, Container)]
    return dict(containers[at].static)


# ----------------------------------------------------------------------------------------------------------- containers


@pytest.mark.parametrize("leaf", [1, None, "text", np.ones(2)], ids=repr)
def test_a_bare_leaf(leaf: Any) -> None:
    flat = flatten(leaf)
    assert flat.tokens == [1]
    assert flat.keys == [""]
    assert flat.leaves[0] is leaf


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"b": 1, "a": 2}, [("dict", "", ("b", "a")), 2]),
        ([1, 2], [("list", "", (0, 1)), 2]),
        ((1, [2], 3), [("tuple", "", (0, 1, 2)), 1, ("list", "", (0,)), 2]),
        (Pair(1, 2), [("namedtuple", "Pair", ("first", "second")), 2]),
        ({}, [("dict", "", ())]),
        ([(), {"a": []}], [("list", "", (0, 1)), ("tuple", "", ()), ("dict", "", ("a",)), ("list", "", ())]),
        (optax.EmptyState(), [("namedtuple", "EmptyState", ())]),
        (optax.MaskedNode(), [("namedtuple", "MaskedNode", ())]),
        (Point(1, 2), [("other", "Point", ("x", "y")), 2]),
        (Plain(1, 2), [("other", "Plain", ("weight", "bias")), 2]),
        (Chexed(alpha=1, beta=2), [("other", "_Chexed", ("alpha", "beta")), 2]),
        (Box(1, 2), [("other", "Box", ("0", "1")), 2]),
        (collections.OrderedDict(b=1, a=2), [("other", "OrderedDict", ("b", "a")), 2]),
        (collections.defaultdict(int, b=1, a=2), [("other", "defaultdict", ("b", "a")), 2]),
        (freeze({"b": 1, "a": 2}), [("other", "FrozenDict", ("b", "a")), 2]),
        (Frozen((1,)), [("other", "Frozen", ("value",)), ("tuple", "", (0,)), 1]),
        (Config(3, 4), [("other", "Config", ("width", "table")), 2]),
        (Counter(1), [("other", "Counter", ("n",)), 1]),
        (Wrapped([1]), [("other", "Wrapped", ("state",)), ("list", "", (0,)), 1]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_container(tree: Any, expected: list[Any]) -> None:
    assert heads(tree) == expected


def test_a_class_stands_there_by_module_and_qualified_name() -> None:
    (head, _) = flatten(optax.TraceState(1)).tokens
    assert isinstance(head, Container)
    assert head.class_name == f"{optax.TraceState.__module__}.TraceState"


def test_the_leaves_of_a_partial_are_its_arguments() -> None:
    partial = jax.tree_util.Partial(add, 1, scale=2)
    assert flatten(partial).keys == ["args/0", "keywords/scale"]
    assert static(partial) == {"func": ForeignKey("builtins.function", f"{add.__module__}.add")}


def test_an_equinox_model_with_its_activations() -> None:
    flat = flatten(eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0)))
    assert flat.keys == [f"layers/{n}/{name}" for n in (0, 1) for name in ("weight", "bias")] + [
        "activation",
        "final_activation",
    ]
    assert flat.kinds == ["jax"] * 4 + ["opaque"] * 2
    assert flat.opaque[4].text.endswith(".relu")
    assert flat.opaque[5].text == "equinox.nn._mlp.<lambda>"
    head = flat.tokens[0]
    assert isinstance(head, Container)
    assert dict(head.static)["width_size"] == 4
    assert not {"layers", "activation"} & dict(head.static).keys()


def test_a_train_state_keeps_its_functions_as_text() -> None:
    def apply(x: Any) -> Any:
        return x

    state = TrainState.create(apply_fn=apply, params={"w": jnp.ones(2)}, tx=optax.adam(1e-3))
    assert flatten(state).keys == ["step", "params/w", "opt_state/0/count", "opt_state/0/mu/w", "opt_state/0/nu/w"]
    held = static(state)
    assert held.keys() == {"apply_fn", "tx"}
    assert held["apply_fn"].text.endswith("<locals>.apply")
    assert " at 0x" not in held["tx"].text


def test_a_chain_of_optimizers() -> None:
    tx = optax.chain(optax.clip(1.0), optax.masked(optax.adam(1e-3), {"w": True, "b": False}))
    keys = flatten(tx.init({"w": jnp.ones(2), "b": jnp.ones(1)})).keys
    assert "1/inner_state/0/mu/w" in keys
    assert not any(key.endswith("mu/b") for key in keys)


def test_an_nnx_state_and_its_random_streams() -> None:
    flat = flatten(nnx.state(nnx.Rngs(0)))
    assert dict(zip(flat.keys, flat.kinds, strict=True)) == {"default/count/value": "jax", "default/key/value": "key"}


def test_an_nnx_model_itself_flattens_like_its_state() -> None:
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    assert set(flatten(model).keys) == {"bias/value", "kernel/value"}


def test_partitioned_parameters_keep_their_names() -> None:
    boxed: Any = nn.Partitioned(jnp.ones(2), names=("x", None))
    assert flatten({"w": boxed}).keys == ["w/value"]
    assert static({"w": boxed}, 1)["names"] == ("x", None)


def test_equinox_state_of_a_norm() -> None:
    model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    flat = flatten((model, state))
    assert flat.keys == keys_of(flat.tokens)
    assert {"0/weight", "0/axis_name", "1/0", "1/1/0"} <= set(flat.keys)


# ----------------------------------------------------------------------------------------------------------------- keys


def test_dict_keys_keep_their_types() -> None:
    tree = {"a": 0, 1: 0, 2.5: 0, None: 0, (1, ("x",)): 0, b"raw": 0, False: 0}
    head = flatten(tree).tokens[0]
    assert isinstance(head, Container)
    assert head.keys == tuple(tree)
    assert [type(key) for key in head.keys] == [type(key) for key in tree]


def test_keys_of_other_classes_stand_there_as_text() -> None:
    head = flatten({Color.RED: 0, np.int64(7): 0, Level.HIGH: 0, (Color.RED,): 0}).tokens[0]
    assert isinstance(head, Container)
    assert head.keys[:3] == (
        ForeignKey(f"{__name__}.Color", "Color.RED"),
        ForeignKey("numpy.int64", "7"),
        ForeignKey(f"{__name__}.Level", "3"),
    )
    assert head.keys[3].class_name == "builtins.tuple"


def test_digits_of_a_text_are_no_address() -> None:
    keys = [np.str_("0x0123456789"), np.str_("0x9876543210"), ("0x0123456789", Color.RED), ("step at 0x1", Color.RED)]
    head = flatten(dict.fromkeys(keys, 0)).tokens[0]
    assert isinstance(head, Container)
    texts = ["0x0123456789", "0x9876543210", "('0x0123456789', Color.RED)", "('step at 0x1', Color.RED)"]
    assert [key.text for key in head.keys] == texts
    assert flatten({object(): 0}).keys == ["<object>"]


def test_mappings_whose_keys_are_no_text_have_them_beside_their_fields() -> None:
    mappings: list[Any] = [collections.OrderedDict, freeze, functools.partial(collections.defaultdict, list)]
    for mapping in mappings:
        tree = mapping({2: "b", "a": 0})
        head = flatten(tree).tokens[0]
        assert isinstance(head, Container)
        assert head.keys == ("2", "a")
        assert dict(head.static)["keys"] == (2, "a")


def test_key_texts_are_those_of_join_key() -> None:
    names = ["", "a/b", "~", "a~1b", "plain", "\n", "ü", "\ud800"]
    tree = {name: dict.fromkeys(names, 0) for name in names}
    expected = [join_key((name, inner)) for name in names for inner in names]
    assert flatten(tree).keys == expected
    assert flatten(dict.fromkeys(names, 0)).keys == [join_key((name,)) for name in names]


def test_a_long_number_is_a_key_by_its_text() -> None:
    head = flatten({1 << 5000: 0}).tokens[0]
    assert isinstance(head, Container)
    assert head.keys == (ForeignKey("builtins.int", str(1 << 5000)),)


# --------------------------------------------------------------------------------------------------------------- leaves


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [
        (None, "none"),
        (True, "bool"),
        (1 << 80, "int"),
        (1.5, "float"),
        (1j, "complex"),
        ("s", "str"),
        (b"b", "bytes"),
        (bytearray(b"b"), "bytearray"),
        (np.ones(2, ">f4"), "numpy"),
        (np.ones((2, 2)).T[::-1], "numpy"),
        (np.datetime64("2020-01-01"), "numpy scalar"),
        (ml_dtypes.bfloat16(1), "numpy scalar"),
        (np.float64(1), "numpy scalar"),
        (np.bool_(1), "numpy scalar"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_kind_of_host_leaf(leaf: Any, kind: str) -> None:
    for flat in (flatten([leaf, leaf]), flatten_like([leaf, leaf])):
        assert flat.kinds == [kind, kind]
        assert all(held is leaf for held in flat.leaves)
    assert kind in ARRAY_KINDS | PYTHON_KINDS


def test_arrays_of_jax() -> None:
    assert flatten([jnp.ones(2), jax.random.key(0), jax.random.PRNGKey(0)]).kinds == ["jax", "key", "jax"]


def test_a_mapped_array_is_an_array(tmp_path: Any) -> None:
    np.save(tmp_path / "a.npy", np.ones(3))
    assert flatten(np.load(tmp_path / "a.npy", mmap_mode="r")).kinds == ["numpy"]


class Schedule:
    """Callable, and no arrays in it."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, step: int) -> float:
        return self.rate / step


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (math.sqrt, "math.sqrt"),
        (add, f"{add.__module__}.add"),
        (jnp.float32, "jax.numpy.float32"),
        (int, "builtins.int"),
        (np.add, "numpy.add"),
        (functools.partial(add, 3, scale=2), f"functools.partial({add.__module__}.add, 3, scale=2)"),
        (np.dtype("float32"), "dtype('float32')"),
        (jax.jit(add), f"{add.__module__}.add"),
        (Color.RED, "<Color.RED: 1>"),
        (jax.sharding.PartitionSpec("x"), "P('x',)"),
        (math, "math"),
        (Schedule(0.1), f"<{__name__}.Schedule>"),
        (OpaqueLeaf("shop.F", "f"), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_like_can_give_again_is_opaque(leaf: Any, text: str | None) -> None:
    flat = flatten({"f": leaf})
    assert flat.kinds == ["opaque"]
    assert flat.leaves[0] is leaf
    assert flat.opaque == {
        0: leaf if text is None else OpaqueLeaf(f"{type(leaf).__module__}.{type(leaf).__qualname__}", text)
    }


def test_shardings_meshes_and_devices_are_opaque() -> None:
    mesh = meshes.line()
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    assert flatten([mesh, sharding, jax.devices()[0]]).kinds == ["opaque"] * 3


class Settings:
    """Its repr tells of it, and of a function in it."""

    def __init__(self, f: Any) -> None:
        self.f = f

    def __repr__(self) -> str:
        return f"Settings({self.f!r})"


def test_the_address_of_what_lies_inside_is_left_out() -> None:
    assert static(Point(1, 2, Settings(add)))["label"].text == "Settings(<function add>)"  # type: ignore[arg-type]


def test_the_text_of_a_set_is_the_same_in_every_process() -> None:
    names = frozenset(f"name {n}" for n in range(9))
    assert static(Point(1, 2, names))["label"].text == f"frozenset({', '.join(sorted(map(repr, names)))})"  # type: ignore[arg-type]


def test_a_long_text_is_cut() -> None:
    partial = functools.partial(add, "x" * 1000)
    assert len(flatten(partial).opaque[0].text) == 400


def test_a_static_field_that_is_plain_is_kept_whole() -> None:
    assert static(Point(1, 2, "x" * 1000)) == {"label": "x" * 1000}
    assert static(Layer(1, abs, 7)) == {"size": 7}
    assert static(Box(1, 2, ("a", (1.5, None, b"raw", True), add))) == {  # type: ignore[arg-type]
        "aux": ("a", (1.5, None, b"raw", True), ForeignKey("builtins.function", f"{add.__module__}.add"))
    }


# -------------------------------------------------------------------------------------------------------------- targets


def test_an_abstract_array_is_a_leaf_of_a_target_only() -> None:
    like = {"w": jax.ShapeDtypeStruct((2,), jnp.float32), "set": {1}}
    flat = flatten_like(like)
    assert flat.kinds == ["abstract", "opaque"]
    assert flat.leaves[0] is like["w"]


def test_a_target_may_be_made_by_eval_shape() -> None:
    model = eqx.filter_eval_shape(eqx.nn.MLP, 2, 1, 4, 1, key=jax.random.key(0))
    flat, real = flatten_like(model), flatten(eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0)))
    assert flat.tokens == real.tokens
    assert flat.keys == real.keys
    assert set(flat.kinds) == {"abstract", "opaque"}


def test_donated_arrays_may_stand_in_a_target() -> None:
    array = jnp.ones(2)
    array.delete()
    assert flatten_like([array]).kinds == ["jax"]


# ----------------------------------------------------------------------------------------------------------- properties


@quick(150)
@given(trees())
def test_the_structure_tells_the_keys(tree: Any) -> None:
    flat = flatten(tree)
    assert keys_of(flat.tokens) == flat.keys
    assert len(set(flat.keys)) == len(flat.keys) == len(flat.leaves) == len(flat.kinds)
    assert flat.opaque.keys() == {number for number, kind in enumerate(flat.kinds) if kind == "opaque"}
    runs = [type(token) is int for token in flat.tokens]
    assert not any(a and b for a, b in itertools.pairwise(runs))
    like = flatten_like(tree)
    assert (like.tokens, like.keys, like.kinds) == (flat.tokens, flat.keys, flat.kinds)


def test_it_is_deterministic_and_touches_nothing() -> None:
    tree = {"b": [np.ones(2), {"x": None}], "a": (1, Point(1, 2))}
    first, second = flatten(tree), flatten(tree)
    assert first.tokens == second.tokens
    assert all(a is b for a, b in zip(first.leaves, second.leaves, strict=True))


def test_a_tree_of_1024_levels() -> None:
    tree: Any = 7
    for _ in range(1024):
        tree = [tree]
    flat = flatten(tree)
    assert flat.keys == ["/".join("0" * 1024)]
    assert keys_of(flat.tokens) == flat.keys


@pytest.mark.parametrize("walk", [flatten, flatten_like])
def test_a_tree_that_holds_itself_is_refused(walk: Callable[[Any], object]) -> None:
    tree: list[Any] = [1, 2]
    tree += [tree, tree]
    with pytest.raises(UnsupportedError, match="hold itself"):
        walk(tree)
