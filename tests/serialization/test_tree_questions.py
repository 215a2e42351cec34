"""treering.tree and the two questions about a tree: map with paths, sizes, information, validation."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.properties.strategies import Box, Pair, Plain, Point
from tests.trees import assert_same, assert_same_structure
from treering import serialization
from treering.errors import TreeringError
from treering.tree import tree_bytes, tree_map_with_path, tree_size

TREE = {"a": np.zeros((2, 3), np.float32), "b": [jnp.ones(4, jnp.bfloat16), 7, None], "c": Pair("text", np.int8(1))}


def test_paths_are_tuples_of_text() -> None:
    seen: dict[tuple[str, ...], Any] = {}

    def note(path: tuple[str, ...], leaf: Any) -> Any:
        seen[path] = leaf
        return leaf

    tree_map_with_path(note, {"a/b": {3: [1, Pair(2, Plain(4, 5))]}, "z": Box(6, 7)})
    assert seen == {
        ("a/b", "3", "0"): 1,
        ("a/b", "3", "1", "first"): 2,
        ("a/b", "3", "1", "second", "weight"): 4,
        ("a/b", "3", "1", "second", "bias"): 5,
        ("z", "0"): 6,
        ("z", "1"): 7,
    }


@pytest.mark.parametrize(
    "tree",
    [
        {"b": 1, "a": (2, [3])},
        Point(1, {"x": 2}, "label"),
        collections.OrderedDict(b=1, a=2),
        Plain(1, 2, "name"),
        {3: 1, 1: 2},
        [],
        5,
        Pair(1, (2,)),
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_mapping_keeps_types_and_order(tree: Any) -> None:
    mapped = tree_map_with_path(lambda path, leaf: leaf, tree)
    assert_same(mapped, tree, restored=False)
    assert_same_structure(mapped, tree)


def test_a_root_leaf_has_the_empty_path() -> None:
    assert tree_map_with_path(lambda path, leaf: (path, leaf), 5) == ((), 5)


def test_is_leaf_stops_early() -> None:
    tree = {"a": [1, 2], "b": 3}
    assert tree_map_with_path(lambda path, leaf: leaf, tree, is_leaf=lambda x: isinstance(x, list)) == tree
    shown = tree_map_with_path(lambda path, leaf: "/".join(path), tree, is_leaf=lambda x: isinstance(x, list))
    assert shown == {"a": "a", "b": "b"}


def test_an_error_of_the_function_passes_through() -> None:
    def fail(path: tuple[str, ...], leaf: Any) -> Any:
        raise ZeroDivisionError(path)

    with pytest.raises(ZeroDivisionError):
        tree_map_with_path(fail, {"a": 1})


def test_a_deep_tree_is_mapped() -> None:
    tree: Any = 7
    for _ in range(5000):
        tree = [tree]
    mapped = tree_map_with_path(lambda path, leaf: len(path), tree)
    while isinstance(mapped, list):
        (mapped,) = mapped
    assert mapped == 5000


def test_a_tree_that_holds_itself_is_told() -> None:
    tree: dict[str, Any] = {"w": 1, "inner": [{}]}
    tree["inner"][0]["again"] = tree["inner"]
    with pytest.raises(TreeringError, match="a list holds itself") as caught:
        tree_map_with_path(lambda path, leaf: leaf, tree)
    assert caught.value.path == ("inner", "0", "again")
    twice = {"a": (), "b": [(), ((),)]}
    twice["c"] = twice["b"]
    assert tree_map_with_path(lambda path, leaf: leaf, twice) == twice


def test_a_target_and_a_state_that_hold_themselves_are_told() -> None:
    tree: dict[str, Any] = {}
    tree["again"] = tree
    with pytest.raises(TreeringError, match="deep"):
        serialization.from_state_dict(tree, tree)


@pytest.mark.parametrize(
    ("tree", "elements", "nbytes"),
    [
        (np.zeros((2, 3), np.float32), 6, 24),
        (jnp.zeros((4,), jnp.bfloat16), 4, 8),
        (np.zeros((), np.int8), 1, 1),
        (np.zeros((0, 5)), 0, 0),
        (np.float16(1), 1, 2),
        (1, 1, 8),
        (1.5, 1, 8),
        (True, 1, 1),
        (1j, 1, 16),
        ({}, 0, 0),
        (None, 0, 0),
        ([np.zeros(2, np.int16), {"a": np.zeros(3, np.uint8)}, 1], 6, 15),
        (jax.ShapeDtypeStruct((10, 10), jnp.float32), 100, 400),
        (Point(np.zeros(2, np.int8), 0, "static"), 3, 10),
    ],
    ids=str,
)
def test_size_and_bytes(tree: Any, elements: int, nbytes: int) -> None:
    assert tree_size(tree) == elements
    assert tree_bytes(tree) == nbytes


def test_typed_keys_count_as_keys_and_weigh_as_their_data() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    assert tree_size(keys) == 3
    assert tree_bytes(keys) == jax.random.key_data(keys).nbytes


def test_trees_with_keys_of_mixed_types_are_counted() -> None:
    tree = {1: np.zeros(2, np.int8), "a": np.zeros(3, np.int8)}
    assert tree_size(tree) == 5
    assert tree_bytes(tree) == 5


# ---------------------------------------------------------------------------------------------------------- information


def test_information_has_eformers_members() -> None:
    info = serialization.get_serialization_info({"w": np.zeros((2, 3), np.float32), "b": [jnp.ones(4, jnp.int8)]})
    assert set(info) == {"num_leaves", "tree_structure", "total_elements", "memory_bytes", "is_serializable", "dtypes"}
    assert info["num_leaves"] == 2
    assert info["total_elements"] == 10
    assert info["memory_bytes"] == 28
    assert info["is_serializable"] is True
    assert set(info["dtypes"]) == {"float32", "int8"}
    assert "w" in info["tree_structure"]


def test_information_takes_python_numbers_text_and_what_cannot_be_saved() -> None:
    info = serialization.get_serialization_info({"s": 3, "t": "text", "f": abs})
    assert info["num_leaves"] == 3
    assert info["is_serializable"] is False


def test_information_takes_keys_of_mixed_types() -> None:
    assert serialization.get_serialization_info({1: 2, "a": 3})["num_leaves"] == 2


def test_information_takes_a_deep_tree() -> None:
    tree: Any = np.zeros(3, np.int8)
    for _ in range(20_000):
        tree = {"a": tree}
    info = serialization.get_serialization_info(tree)
    assert (info["num_leaves"], info["total_elements"], info["is_serializable"]) == (1, 3, True)


def test_validation_is_a_pair_of_bool_and_list() -> None:
    assert serialization.validate_serializable(TREE) == (True, [])
    valid, issues = serialization.validate_serializable({"a": {"f": abs}, "b": {1: {2}, "x": [2**70]}})
    assert valid is False
    assert len(issues) == 3
    for path in ("a/f", "b/1", "b/x/0"):
        assert sum(path in issue for issue in issues) == 1


def test_validation_tells_structural_problems_in_all_branches() -> None:
    valid, issues = serialization.validate_serializable({"x": {1: 0, "1": 1}, "y": {2}})
    assert valid is False
    assert len(issues) == 2


def test_validation_does_not_change_or_copy_the_tree() -> None:
    tree = {"a": np.zeros(10), "b": jnp.ones(3)}
    serialization.validate_serializable(tree)
    assert list(tree) == ["a", "b"]
    assert isinstance(tree["b"], jax.Array)
