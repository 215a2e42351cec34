"""What strict=True says, item by item."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.properties.strategies import Layer, Pair, Plain, Point
from treering import serialization
from treering.errors import MismatchError


def differences(target: Any, saved: Any) -> list[str]:
    with pytest.raises(MismatchError) as caught:
        serialization.from_bytes(target, serialization.to_bytes(saved), strict=True)
    assert isinstance(caught.value, ValueError)
    for line in caught.value.differences[:10]:
        assert line in str(caught.value)
    return list(caught.value.differences)


def test_all_differences_are_told_at_once_with_wanted_and_found() -> None:
    target = {"a": np.zeros((3,), np.float32), "b": {"c": np.zeros(2, np.int8), "d": 1}, "e": [1, 2]}
    saved = {"a": np.zeros((4,), np.float32), "b": {"c": np.zeros(2, np.int16), "x": 1}, "e": [1, 2, 3]}
    found = differences(target, saved)
    assert len(found) == 5
    told = {line.partition(":")[0]: line for line in found}
    assert set(told) == {"a", "b/c", "b/d", "b/x", "e/2"}
    assert "3" in told["a"]
    assert "4" in told["a"]
    assert "int8" in told["b/c"]
    assert "int16" in told["b/c"]


@pytest.mark.parametrize(
    ("target", "saved"),
    [
        ([1, 2], [1]),
        ((1,), (1, 2)),
        (Pair(1, 2), {"first": 1}),
        (Point(1, 2), {"x": 1, "y": 2, "z": 3}),
        (Plain(1, 2), {"weight": 1}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": True}, {"a": 1}),
        ({"a": "1"}, {"a": b"1"}),
        ({"a": None}, {"a": 0}),
        ({"a": np.float32(1)}, {"a": np.float64(1)}),
        ({"a": {}}, {"a": {"b": 1}}),
        ({"a": {"b": 1}}, {"a": {}}),
        ({"a": {"b": 1}}, {"a": 1}),
        ({"a": 1}, {"a": {"b": 1}}),
        ({"a": np.zeros(0)}, {"a": np.zeros((0, 2))}),
        ({"a": np.zeros(())}, {"a": np.zeros(1)}),
        (np.zeros(2), np.zeros(3)),
    ],
    ids=lambda tree: f"{type(tree).__name__} {tree}",
)
def test_one_difference_is_one_line(target: Any, saved: Any) -> None:
    assert len(differences(target, saved)) == 1


@pytest.mark.parametrize(
    ("target", "saved"),
    [
        (jax.ShapeDtypeStruct((2,), jnp.bfloat16), jnp.ones(2, jnp.bfloat16)),
        (jnp.ones(2), np.ones(2, np.float32)),
        (np.ones(2, ">f4"), np.ones(2, "<f4")),
        ({3: 1}, {"3": 2}),
        ([1, 2], {"0": 5, "1": 6}),
        (Layer(np.ones(1), abs, 1), Layer(np.zeros(1), len, 1)),
        ({"k": jax.random.key(0)}, {"k": jax.random.key(1)}),
        (Pair(1, {}), {"name": "Pair", "fields": {"0": "first", "1": "second"}, "values": {"0": 7, "1": {}}}),
    ],
    ids=[
        "abstract",
        "jax for numpy",
        "byte order",
        "int key",
        "list as dict",
        "other function",
        "typed key",
        "old namedtuple",
    ],
)
def test_what_only_looks_different_passes(target: Any, saved: Any) -> None:
    serialization.from_bytes(target, serialization.to_bytes(saved), strict=True)


def test_a_near_match_is_suggested() -> None:
    found = differences({"dense_kernel": 1}, {"dense_kernal": 1})
    assert any("dense_kernal" in line for line in found if line.startswith("dense_kernel:"))


def test_a_thousand_differences_are_all_kept_and_the_message_stays_short() -> None:
    target = {f"k{number}": np.zeros(number + 1) for number in range(1000)}
    saved = {f"k{number}": np.zeros(number + 2) for number in range(1000)}
    with pytest.raises(MismatchError) as caught:
        serialization.from_bytes(target, serialization.to_bytes(saved), strict=True)
    assert len(caught.value.differences) == 1000
    assert len(str(caught.value)) < 5000


def test_strict_without_a_target_accepts_nothing_by_accident() -> None:
    """None as target asks for the bare state dict; there is nothing to be strict about."""
    assert serialization.from_bytes(None, serialization.to_bytes(None), strict=True) is None


def test_an_error_travels_between_processes() -> None:
    import pickle

    with pytest.raises(MismatchError) as caught:
        serialization.from_bytes({"a": 1}, serialization.to_bytes({"a": "text"}), strict=True)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.differences == caught.value.differences
