"""A plan taken over from an earlier save: only where the tree flattens alike, and then it is the plan made anew."""

from __future__ import annotations

import collections
import functools
import gc
import math
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import strategies
from tests.properties.strategies import Box, Pair, Plain, Point, Triple, quick, trees
from treering._arrays import plan_cache
from treering._arrays.plan_cache import KnownStructure, TreePlan, forget, plan_tree
from treering._format.structure import StandIn
from treering._tree.flatten import flatten
from treering._values.processes import Processes
from treering.errors import TreeringError, UnsupportedError


class Two(NamedTuple):
    """Two things."""

    one: Any
    other: Any


class Lying(NamedTuple):
    """A sequence that says nothing true of its length."""

    one: Any
    other: Any

    def __len__(self) -> int:
        return 7


class Likes(type):
    """Classes that say they equal any other."""

    def __eq__(cls, other: object) -> bool:
        return True

    def __hash__(cls) -> int:
        return 7


class Liked(metaclass=Likes):
    """A leaf that treering cannot save as such."""


def known(tree: Any) -> KnownStructure:
    return KnownStructure(tree, flatten(tree))


TREE = {
    "a": [1, (2, {"x": 3, "y": []}), Two(4, {"z": 5})],
    "b": {},
    "c": collections.OrderedDict(p=6, q=[7, 8]),
    "d": ({"x": 9}, {"x": 10}),
    "e": 11,
}


def test_leaves_come_in_the_order_in_which_flatten_meets_them() -> None:
    assert known(TREE).leaves(TREE) == flatten(TREE).leaves == list(range(1, 12))


def test_the_leaves_are_those_of_the_other_tree() -> None:
    other = {**TREE, "d": ({"x": -9}, {"x": -10})}
    assert known(TREE).leaves(other) == [1, 2, 3, 4, 5, 6, 7, 8, -9, -10, 11]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([{"a": 1}, {"b": 2, "c": 3}], [{"a": 1, "b": 2}, {"c": 3}]),
        ([[1], [2, 3]], [[1, 2], [3]]),
        ([[], [1]], [[1], []]),
        ([{}, {"a": 1}], [{"a": 1}, {}]),
        ({"a": {"b": 1}, "c": 2}, {"a": 2, "c": {"b": 1}}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1: "x"}, {True: "x"}),
        ([(1, 2)], [Two(1, 2)]),
        ([1], (1,)),
        ([1], 1),
        (1, [1]),
        ([1, [2]], [[1], 2]),
        ([[[1]]], [[1]]),
        ([1], [1.0]),
        ([1], [Liked()]),
        (collections.OrderedDict(a=1, b=2), collections.OrderedDict(b=2, a=1)),
        (collections.OrderedDict(a=1), {"a": 1}),
    ],
)
def test_another_structure_is_another(one: Any, other: Any) -> None:
    assert known(one).leaves(other) is None
    assert known(one).leaves(one) == flatten(one).leaves


def test_nobody_believes_what_a_class_says_of_itself() -> None:
    tree = [Lying(1, 2), Lying(3, 4)]
    assert flatten(tree).leaves == [1, 2, 3, 4]
    assert known(tree).leaves(tree) in (None, [1, 2, 3, 4])


def test_a_tree_that_is_deeper_is_looked_into_no_deeper() -> None:
    tree: Any = 1
    for _ in range(1000):
        tree = [tree]
    endless: Any = []
    endless.append(endless)
    assert known(tree).leaves(tree) == [1]
    assert known(tree).leaves(endless) is None
    assert known(tree).leaves([tree]) is None


ATTEMPT = "0123456789abcdef"


def print_of(plan: TreePlan) -> dict[str, Any]:
    """All that a save takes from a plan; arrays by their bytes."""
    leaves, layout = plan.leaves, plan.layout(ATTEMPT)
    return {
        "tokens": repr(plan.flat.tokens),
        "keys": plan.flat.keys,
        "kinds": plan.flat.kinds,
        "opaque": repr(plan.flat.opaque),
        "types": repr(leaves.types),
        "leaf types": list(leaves.leaf_types),
        "values": [(number, type(value), repr(value)) for number, value in leaves.values.items()],
        "sources": [
            (number, [(source.box, np.asarray(source.data).tobytes()) for source in sources])
            for number, sources in leaves.sources.items()
        ],
        "meshes": list(leaves.meshes),
        "spread": repr(leaves.spread),
        "chunks": repr(layout.chunks),
        "headers": layout.headers,
        "divided": repr(plan.divided().files(ATTEMPT, [0]).names),
        "processes": plan.processes,
    }


def outcome(tree: Any) -> Any:
    try:
        return print_of(plan_tree(tree))
    except TreeringError as error:
        return type(error), str(error)


def assert_never_wrong(one: Any, other: Any) -> None:
    """Plan one, and then the other with what is known of the first; it has to be the plan of somebody who forgot."""
    forget()
    wanted = outcome(other)
    forget()
    outcome(one)
    assert outcome(other) == wanted


def any_of(value: Any) -> Any:
    """Return what no annotation allows here, and no program is kept from writing."""
    return value


def over(*axes: str | tuple[str, ...] | None) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(jax.make_mesh((4, 2), ("x", "y")), jax.sharding.PartitionSpec(*axes))


@functools.cache
def families() -> tuple[tuple[Any, ...], ...]:
    """Leaves that are easily taken for each other."""
    row = np.arange(8.0, dtype="f4")
    return (
        (1, True, 1.0, 1 + 0j, "1", b"1", np.int64(1), np.int32(1), np.bool_(True), np.array(1), jnp.array(1), None),
        (0.0, -0.0, math.nan, math.inf, 0, False, None, "", b"", bytearray()),
        ("x" * 4096, "x" * 4097, "x" * 4098, b"x" * 4097, bytearray(b"x" * 4097), "é" * 2049, "\ud800" * 5000),
        (row, row.astype(">f4"), row[::-1], row.reshape(2, 4), row.astype("f8"), row.astype("M8[s]"), row[:0]),
        (
            row,
            jnp.asarray(row),
            jax.device_put(row, jax.devices()[1]),
            jnp.asarray(row, "bfloat16"),
            jnp.asarray(row[:4]),
        ),
        (jnp.asarray(1.5), jnp.asarray(2.5) * 1, jax.jit(lambda: 1.5)(), jnp.float32(1.5), 1.5),
        tuple(
            jax.device_put(row.reshape(8, 1), sharding)
            for sharding in (over("x"), over(("x", "y")), over(), over("x", None), over("y"), over(None, None))
        ),
        (
            jax.random.key(1),
            jax.random.key(2, impl="rbg"),
            jax.random.split(jax.random.key(1), 2),
            jax.random.PRNGKey(1),
        ),
        (abs, math.sqrt, jnp.tanh, jax.nn.relu, functools.partial(math.pow, 2), functools.partial(math.pow, 3), None),
        (np.datetime64(1, "s"), np.datetime64(1, "D"), np.timedelta64(1, "s"), np.float16(1), jnp.bfloat16(1)),
    )


def _mapping(make: Any) -> Any:
    return lambda items: make((f"k{number}", item) for number, item in enumerate(items))


Tuple3 = collections.namedtuple("Tuple3", ["first", "second", "third"])  # noqa: PYI024

CONTAINERS = (
    list,
    tuple,
    _mapping(dict),
    _mapping(collections.OrderedDict),
    _mapping(lambda pairs: dict(reversed(list(pairs)))),
    _mapping(lambda pairs: collections.defaultdict(list, pairs)),
    _mapping(lambda pairs: collections.defaultdict(dict, pairs)),
    lambda items: dict(enumerate(items)),
    lambda items: {str(number): item for number, item in enumerate(items)},
    lambda items: {float(number): item for number, item in enumerate(items)},
    lambda items: dict(zip([-0.0, True, None, b"3"], items, strict=False)),
    lambda items: dict(zip([0.0, 1, "None", "3"], items, strict=False)),
    lambda items: {(number, "a"): item for number, item in enumerate(items)},
    lambda items: Pair(items[0], items[1:]),
    lambda items: Triple(items[0], items[1:2], items[2:]),
    lambda items: Tuple3(items[0], items[1:2], items[2:]),
    lambda items: Point(items[0], items[1:]),
    lambda items: Point(items[0], items[1:], label="other"),
    lambda items: Plain(items[0], items[1:]),
    lambda items: Plain(items[0], items[1:], name=any_of(1)),
    lambda items: Plain(items[0], items[1:], name=any_of(True)),
    lambda items: Box(items[0], items[1:]),
    lambda items: Box(items[0], items[1:], note=any_of(0.0)),
    lambda items: Box(items[0], items[1:], note=any_of(-0.0)),
    lambda items: jax.tree_util.Partial(strategies.add, *items),
    lambda items: jax.tree_util.Partial(abs, *items),
    lambda items: StandIn("a.B", {str(number): item for number, item in enumerate(items)}),
    lambda items: StandIn("a.C", {str(number): item for number, item in enumerate(items)}, {"rate": 1}),
    lambda items: StandIn("a.C", {str(number): item for number, item in enumerate(items)}, {"rate": True}),
)


@st.composite
def pairs(draw: st.DrawFn, levels: int = 3) -> tuple[Any, Any]:
    """Two trees that differ in one or two places, or in none; where they do not, they hold the same objects."""
    if levels == 0 or draw(st.integers(0, 3)) == 0:
        family = draw(st.sampled_from(families()))
        one = draw(st.sampled_from(family))
        return one, draw(st.sampled_from(family)) if draw(st.integers(0, 4)) == 0 else one
    children = [draw(pairs(levels - 1)) for _ in range(draw(st.integers(1, 4)))]
    make = draw(st.sampled_from(CONTAINERS))
    other = draw(st.sampled_from(CONTAINERS)) if draw(st.integers(0, 9)) == 0 else make
    ones, others = [one for one, _ in children], [other for _, other in children]
    if draw(st.integers(0, 9)) == 0:
        others = others[:-1] if draw(st.booleans()) and len(others) > 1 else [*others, 1]
    return make(ones), other(others)


@quick(60)
@given(pairs())
def test_trees_that_are_easily_taken_for_each_other(pair: tuple[Any, Any]) -> None:
    assert_never_wrong(*pair)
    assert_never_wrong(*reversed(pair))


@quick(30)
@given(trees(), trees())
def test_any_trees(one: Any, other: Any) -> None:
    assert_never_wrong(one, other)
    assert_never_wrong(one, one)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", range(10))
def test_each_leaf_against_each_of_its_family(place: int) -> None:
    family = families()[place]
    for one in family:
        for other in family:
            assert_never_wrong({"a": [one], "b": 2}, {"a": [other], "b": 2})


def test_each_container_against_each() -> None:
    for items in ([1, np.zeros(3), None], [1, 2, 3]):
        for make in CONTAINERS:
            for other in CONTAINERS:
                assert_never_wrong([make(items)], [other(items)])


def test_the_order_of_keys() -> None:
    assert_never_wrong({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert_never_wrong({"a": np.zeros(3), "b": np.ones(3)}, {"b": np.ones(3), "a": np.zeros(3)})
    assert_never_wrong({1: 1, 0: 2}, {0: 2, 1: 1})


# ------------------------------------------------------------------------------------------------- what is taken over


def state(scale: float) -> dict[str, Any]:
    return {
        "params": {"w": jnp.full((8, 4), scale), "b": np.full(3, scale)},
        "opt": (Pair(jnp.zeros((8, 4)) + scale, None), [Point(jax.device_put(np.full((8, 2), scale), over("x")), 1)]),
        "step": int(scale),
        "name": "run",
        "key": jax.random.key(int(scale)),
        "loss": np.float32(scale),
        "act": jax.nn.relu,
        "text": "x" * 5000,
    }


def test_the_next_state_of_a_loop_takes_the_plan_over_with_its_own_values() -> None:
    forget()
    first = plan_tree(state(1.0))
    second = plan_tree(state(2.0))
    assert second._common is first._common
    forget()
    assert print_of(second) == print_of(plan_tree(state(2.0)))


def _calls(work: Callable[[], Any]) -> int:
    """Count calls of Python functions and of functions in C: unlike seconds, they are the same each time."""
    count = 0

    def counted(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def _laid_out(tree: Any) -> Any:
    return plan_tree(tree).layout(ATTEMPT)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("kind", "leaves"),
    [
        ("numpy", 150),
        ("numpy", 1000),
        ("numpy", 10_000),
        ("jax", 200),
        ("jax", 1000),
        pytest.param("jax", 10_000, marks=pytest.mark.slow),
        ("sharded", 150),
    ],
)
def test_a_second_plan_takes_a_tenth_of_the_first(kind: str, leaves: int) -> None:
    arrays = {"numpy": np.zeros(4), "jax": jnp.zeros(4), "sharded": jax.device_put(np.zeros(8), over("x"))}
    first, second = (
        {f"layer {number}": {f"w{n}": arrays[kind] + 0 for n in range(50)} for number in range(leaves // 50)}
        for _ in range(2)
    )
    forget()
    plan_tree([]).layout(ATTEMPT)  # whatever is imported, is
    once, again = (_calls(functools.partial(_laid_out, tree)) for tree in (first, second))
    assert 10 * again <= once


def test_a_few_structures_are_kept_and_the_one_that_was_used_last_is_found_first() -> None:
    forget()
    plans = [plan_tree([0] * number) for number in range(1, 5)]
    assert plan_tree([0])._common is plans[0]._common
    plan_tree([0] * 9)  # the second one is the one that was not used for longest
    assert plan_tree([0])._common is plans[0]._common
    assert plan_tree([0, 0])._common is not plans[1]._common
    assert len(plan_cache._ENTRIES) == plan_cache._KEPT


def test_no_leaf_is_held() -> None:
    forget()
    tree = state(1.0)
    held = [weakref.ref(leaf) for leaf in (tree["params"]["w"], tree["params"]["b"], tree["key"], tree["opt"][0].first)]
    plan_tree(tree).layout(ATTEMPT)
    del tree
    gc.collect()
    assert [leaf() for leaf in held] == [None] * len(held)


def test_other_processes_plan_anew() -> None:
    forget()
    tree = {"w": np.zeros(8)}
    alone = plan_tree(tree)
    both = plan_tree(tree, Processes(this=1, count=2))
    assert both._common is not alone._common
    assert plan_tree(tree, Processes(this=1, count=2))._common is both._common
    assert plan_tree(tree, Processes(this=0, count=2))._common is not both._common


def test_an_array_that_was_deleted_meanwhile_is_refused_by_name() -> None:
    forget()
    tree = {"a": jnp.zeros(3), "b": jnp.ones(3)}
    plan_tree(tree)
    tree["b"].delete()
    with pytest.raises(UnsupportedError, match="the array has been deleted"):
        plan_tree(tree)


def test_a_class_that_was_registered_meanwhile_is_opened() -> None:
    forget()

    class Late:
        def __call__(self) -> None: ...

        value = 3

    late = Late()
    assert plan_tree([late, 1]).flat.kinds == ["opaque", "int"]
    jax.tree_util.register_pytree_node(Late, lambda x: ((x.value,), None), lambda _, children: children[0])
    assert plan_tree([late, 1]).flat.kinds == ["int", "int"]


def test_a_function_that_closes_over_an_array_since_then_is_refused() -> None:
    forget()
    held: Any = 1

    def function() -> Any:
        return held

    plan_tree([function])
    held = jnp.zeros(3)
    with pytest.raises(UnsupportedError, match="holds arrays where jax cannot see them"):
        plan_tree([function])


def test_static_fields_that_change_in_place_are_seen() -> None:
    forget()
    box = Box(1, 2, note=["a"])  # type: ignore[arg-type]
    first = print_of(plan_tree(box))
    box.note.append("b")  # type: ignore[attr-defined]
    assert print_of(plan_tree(box))["tokens"] != first["tokens"]


def test_a_deep_tree_is_no_deeper_for_a_second_plan() -> None:
    forget()
    tree: Any = 1
    for _ in range(1000):
        tree = [tree]
    first = plan_tree(tree)
    assert plan_tree(tree)._common is first._common
