"""A tree without the program that made it: exact where Python knows the type, a stand-in elsewhere."""

from __future__ import annotations

import collections
import copy
import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from flax.core import freeze
from hypothesis import given

from tests.format.indexes import keys_of
from tests.properties.strategies import Box, Layer, Pair, Plain, Point, Triple, quick, trees
from tests.trees import assert_same_structure, fingerprint
from treering._format.index import Container, ForeignKey, OpaqueLeaf, Token
from treering._format.structure import _MAKERS, StandIn, build, class_name, iter_runs, register_node
from treering._tree.flatten import flatten
from treering._tree.likeness import static_differences
from treering.errors import FormatError, UnsupportedError


def there_and_back(tree: Any) -> Any:
    """Build it from its tokens, with the opaque leaves that a file would give."""
    flat = flatten(tree)
    return build(flat.tokens, [flat.opaque.get(number, leaf) for number, leaf in enumerate(flat.leaves)])


@pytest.fixture
def registry() -> Iterator[None]:
    before = dict(_MAKERS)
    yield
    _MAKERS.clear()
    _MAKERS.update(before)


# ------------------------------------------------------------------------------------------------------------ exact


@pytest.mark.parametrize(
    "tree",
    [
        {"b": 1, "a": [2, (3, None)]},
        {1: "a", "b": 0, (1, b"x"): 2, None: 3, 2.5: 4},
        [],
        (),
        {},
        [[], {}, ((),)],
        7,
        None,
        collections.OrderedDict([("b", 1), ("a", 2)]),
        collections.OrderedDict([(2, 1), (1, {"x": 2})]),
    ],
    ids=repr,
)
def test_what_python_knows_comes_back_exactly(tree: Any) -> None:
    assert fingerprint(there_and_back(tree)) == fingerprint(tree)


@quick(150)
@given(trees())
def test_a_built_tree_is_saved_again_as_what_it_was(tree: Any) -> None:
    flat = flatten(tree)
    again = flatten(there_and_back(tree))
    assert again.keys == flat.keys
    assert again.kinds == flat.kinds
    assert static_differences(flat.tokens, again.tokens) == []
    assert again.opaque == flat.opaque
    assert fingerprint(again.tokens) == fingerprint(flat.tokens)
    assert all(a is b for a, b, kind in zip(flat.leaves, again.leaves, flat.kinds, strict=True) if kind != "opaque")


# ------------------------------------------------------------------------------------------------------- namedtuples


def test_a_namedtuple_comes_back_with_its_name_and_fields() -> None:
    state = there_and_back(optax.TraceState(trace={"w": 1}))
    assert repr(state) == "TraceState(trace={'w': 1})"
    assert type(state) is not optax.TraceState
    assert class_name(type(state)) == class_name(optax.TraceState)
    assert isinstance(state, tuple)


def test_the_same_name_and_fields_are_the_same_class() -> None:
    first, second = there_and_back([Pair(1, 2), Pair(3, 4)])
    assert type(first) is type(second)
    assert type(there_and_back(Pair(5, 6))) is type(first)
    assert type(there_and_back(Triple(1, 2, 3))) is not type(first)
    assert_same_structure(first, second)


def test_a_made_namedtuple_has_no_room_for_more() -> None:
    assert there_and_back(optax.EmptyState()) == ()


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("m.Pair", ("a", "class")),
        ("m.Pair", ("_a",)),
        ("m.Pair", ("größe",)),
        ("m.Pär", ("a",)),
        ("m.P(", ("a",)),
        ("m.", ("a",)),
        ("", ("a",)),
        ("m.Pair", ("a b",)),
        ("m.Pair", ("a=__import__('os').system('x')",)),
        ("m.class", ("a",)),
        ("m.Pair", ("a", "a\n")),
    ],
)
def test_a_name_that_python_could_not_write_is_a_stand_in(name: str, fields: tuple[str, ...]) -> None:
    built = build([Container(node="namedtuple", keys=fields, class_name=name), len(fields)], list(fields))
    assert type(built) is StandIn
    assert built.class_name == name
    assert tuple(built.fields) == fields


def test_a_flood_of_namedtuples_is_refused() -> None:
    heads: list[Token] = [Container(node="list", keys=tuple(range(5000)))]
    for number in range(5000):
        heads += [Container(node="namedtuple", keys=("a",), class_name=f"m.Flood{number}"), 1]
    with pytest.raises(UnsupportedError, match="4096"):
        build(heads, [0] * 5000)


# ----------------------------------------------------------------------------------------------------------- stand-ins


def test_a_class_comes_back_as_a_stand_in() -> None:
    built = there_and_back({"p": Point(1, {"b": 2}, "mine")})["p"]
    assert type(built) is StandIn
    assert built.class_name == class_name(Point)
    assert (built.x, built["y"], built.label) == (1, {"b": 2}, "mine")
    assert dict(built) == built.fields == {"x": 1, "y": {"b": 2}}
    assert built.static == {"label": "mine"}
    assert repr(built) == f"StandIn('{class_name(Point)}', x=1, y={{'b': 2}}; label='mine')"
    assert repr(StandIn("m.C", {})) == "StandIn('m.C')"
    with pytest.raises(AttributeError, match="Point has no field 'z'; load with like="):
        _ = built.z
    with pytest.raises(KeyError):
        built["z"]


def test_functions_come_back_by_name() -> None:
    built = there_and_back(Layer(1, abs, 3))
    assert built.activation == OpaqueLeaf("builtins.builtin_function_or_method", "builtins.abs")
    assert built.size == 3


def test_mappings_of_other_classes_are_stand_ins_with_their_own_keys() -> None:
    built = there_and_back(freeze({2: {"a": 1}, "x": 0}))
    assert list(built) == [2, "x"]
    assert built[2]["a"] == 1
    assert built.static == {}
    counted = there_and_back(collections.defaultdict(list, a=[1]))
    assert (counted["a"], counted.default_factory.text) == ([1], "builtins.list")


def test_equality_looks_at_class_static_fields_children_and_order() -> None:
    one = StandIn("m.C", {"a": 1, "b": 2}, {"s": 1})
    assert one == StandIn("m.C", {"a": 1, "b": 2}, {"s": 1})
    for other in (
        StandIn("m.D", {"a": 1, "b": 2}, {"s": 1}),
        StandIn("m.C", {"a": 1, "b": 3}, {"s": 1}),
        StandIn("m.C", {"b": 2, "a": 1}, {"s": 1}),
        StandIn("m.C", {"a": 1, "b": 2}, {"s": 2}),
        {"a": 1, "b": 2},
    ):
        assert one != other
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)


def test_names_from_a_file_do_not_answer_for_protocols() -> None:
    hostile = StandIn("m.C", dict.fromkeys(("__deepcopy__", "__array__", "_repr_html_", "fields", "keys"), 1))
    assert copy.deepcopy(hostile) == hostile
    assert pickle.loads(pickle.dumps(hostile)) == hostile
    assert not hasattr(hostile, "__array__")
    assert not hasattr(hostile, "_repr_html_")
    assert hostile["_repr_html_"] == 1
    assert next(iter(hostile.keys())) == "__deepcopy__"


def test_jax_maps_over_stand_ins() -> None:
    built = there_and_back({"m": eqx.nn.Linear(2, 3, key=jax.random.key(0)), "b": Box(1, np.ones(2))})
    doubled = jax.tree.map(lambda x: x * 2, built)
    assert_same_structure(doubled, built)
    assert doubled["b"]["0"] == 2
    np.testing.assert_array_equal(doubled["m"].weight, built["m"].weight * 2)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(built)]
    assert "['m']['weight']" in paths
    assert static_differences(flatten(built).tokens, flatten(doubled).tokens) == []


def test_stand_ins_of_other_static_fields_are_another_structure() -> None:
    one, two, three = (there_and_back(Point(1, 2, label)) for label in ("a", "a", "b"))
    assert_same_structure(one, two)
    with pytest.raises(AssertionError):
        assert_same_structure(one, three)


# --------------------------------------------------------------------------------------------------- registered classes


@dataclasses.dataclass
class Moments:
    first: Any
    second: Any = None


@dataclasses.dataclass
class Derived:
    w: Any
    norm: Any = dataclasses.field(init=False, default=0)


class Spot(NamedTuple):
    x: Any
    y: Any


@pytest.mark.usefixtures("registry")
def test_a_registered_class_is_made_again() -> None:
    tree = {"m": Moments(1, [2]), "p": Point(1, 2, "mine"), "n": Plain(3, 4, "x"), "s": Spot(1, Spot(2, 3))}
    for cls in (Moments, Point, Plain, Spot):
        assert register_node(cls) is cls
    assert there_and_back(tree) == tree
    assert type(there_and_back(tree)["s"].y) is Spot


@pytest.mark.usefixtures("registry")
def test_make_says_how() -> None:
    register_node(Box, make=lambda fields, static: Box(fields["0"], fields["1"], static["aux"]))
    built = there_and_back(Box(1, (2, Box(3, 4)), "mine"))
    assert type(built.right[1]) is Box
    assert (built.left, built.note, built.right[1].right) == (1, "mine", 4)
    register_node(type(freeze({})), make=lambda fields, _: freeze(fields))
    assert there_and_back({"f": freeze({2: {"b": 1}})}) == {"f": freeze({2: {"b": 1}})}


@pytest.mark.usefixtures("registry")
def test_a_class_that_cannot_be_made_says_what_to_do() -> None:
    with pytest.raises(UnsupportedError, match="make="):
        register_node(Box)
    wrong: list[tuple[Any, Any]] = [(3, None), (Moments(1), None), (Box, 3)]
    for cls, make in wrong:
        with pytest.raises(UnsupportedError, match="register_node takes a class, and a function as make=, found"):
            register_node(cls, make)
    register_node(Derived)
    with pytest.raises(UnsupportedError, match=r"norm.*make="):
        there_and_back(Derived(1))
    register_node(eqx.nn.Linear)
    with pytest.raises(UnsupportedError, match="Linear cannot be constructed"):
        there_and_back(eqx.nn.Linear(2, 3, key=jax.random.key(0)))


@pytest.mark.usefixtures("registry")
def test_a_static_field_of_which_only_the_text_is_there_is_not_given_to_a_class() -> None:
    register_node(Point)
    for label in (abs, (abs,), (1, ("a", (abs, 2))), ({"a": 1},)):
        with pytest.raises(UnsupportedError, match=r"only the text of label.*like="):
            there_and_back(Point(1, 2, label))  # type: ignore[arg-type]


def test_no_class_is_imported_because_a_file_names_it() -> None:
    program = """
import sys
from treering._format.index import Container
from treering._format.structure import build, iter_runs
heads = [Container(node="list", keys=(0, 1, 2))]
heads += [Container(node="other", keys=("a",), class_name="wave.Error"), 1]
heads += [Container(node="namedtuple", keys=("a",), class_name="this.Zen"), 1]
heads += [Container(node="other", keys=("a",), class_name="collections.UserDict"), 1]
print(build(heads, [1, 2, 3]), list(iter_runs(heads)))
assert not {"wave", "this", "jax", "numpy"} & set(sys.modules), sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[StandIn('wave.Error', a=1), Zen(a=2), StandIn('collections.UserDict', a=3)]")


# -------------------------------------------------------------------------------------------------- hostile structures

_PAIR = Container(node="list", keys=(0, 1))
_EMPTY = Container(node="dict", keys=())


@pytest.mark.parametrize(
    ("tokens", "leaves"),
    [
        ([], 0),
        ([2], 2),
        ([1, 1], 2),
        ([_PAIR], 0),
        ([_PAIR, 1], 1),
        ([_PAIR, 3], 3),
        ([_PAIR, 2, _EMPTY], 2),
        ([_PAIR, 2, 1], 3),
        ([_EMPTY, _EMPTY], 0),
        ([_EMPTY, 1], 1),
        ([_PAIR, 1 << 70], 2),
    ],
    ids=str,
)
def test_tokens_that_are_no_tree_are_refused(tokens: list[Token], leaves: int) -> None:
    with pytest.raises(FormatError):
        build(tokens, list(range(leaves)))
    with pytest.raises(FormatError):
        keys_of(tokens)


def test_another_number_of_leaves_is_refused() -> None:
    for count in (1, 3):
        with pytest.raises(FormatError):
            build([_PAIR, 2], list(range(count)))


@pytest.mark.parametrize("count", [0, -1])
def test_a_run_of_no_leaves_is_refused(count: int) -> None:
    with pytest.raises(FormatError):
        keys_of([_PAIR, count, 2])
    with pytest.raises(FormatError):
        build([_PAIR, count, 2], [1, 2])


def test_keys_that_are_equal_are_refused() -> None:
    for keys in ((1, True), ("a", "a"), (0.0, -0.0)):
        with pytest.raises(FormatError, match="equal"):
            build([Container(node="dict", keys=keys), 2], [1, 2])


def test_keys_beside_the_fields_that_are_not_theirs_are_a_static_field() -> None:
    head = Container(node="other", keys=("a",), class_name="m.C", static=(("keys", (1, 2)),))
    assert build([head, 1], [7]) == StandIn("m.C", {"a": 7}, {"keys": (1, 2)})


def test_a_structure_that_is_too_deep_is_refused() -> None:
    chain: list[Token] = [Container(node="list", keys=(0,))] * 1025
    with pytest.raises(FormatError, match="1024"):
        build([*chain, 1], [7])
    with pytest.raises(FormatError, match="1024"):
        keys_of([*chain, 1])
    assert keys_of([*chain[1:], 1]) == ["/".join("0" * 1024)]
    assert build([*chain[1:], 1], [7]) is not None


def test_runs_of_leaves_may_be_split_and_may_cross_the_end_of_a_container() -> None:
    split: list[Token] = [_PAIR, _PAIR, 1, 1, 1]
    joined: list[Token] = [_PAIR, _PAIR, 3]
    assert build(split, [1, 2, 3]) == build(joined, [1, 2, 3]) == [[1, 2], 3]
    assert keys_of(split) == keys_of(joined) == ["0/0", "0/1", "1"]


def test_key_texts_cost_nothing_before_they_are_asked_for() -> None:
    # A thousand levels of long names, and a leaf at the end of which nobody asks.
    name = "x" * 100_000
    chain: list[Token] = [Container(node="dict", keys=(name, "end")) for _ in range(1000)]
    above, names = next(iter_runs([*chain, 1001]))
    assert (len(above), names) == (999 * 100_001, [name, "end"])


@pytest.mark.parametrize(
    "key", [ForeignKey("m.Color", "Color.RED"), (1, ("a",)), b"raw", None, 2.5, "a/b~c", "", "~"], ids=repr
)
def test_every_key_comes_back_and_has_its_text(key: Any) -> None:
    head = Container(node="dict", keys=(key,))
    assert build([head, 1], [7]) == {key: 7}
    assert keys_of([head, 1]) == flatten({key: 7}).keys
