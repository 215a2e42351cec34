"""What processes say of their trees before a joint save: what makes a difference, and how it is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treering
from tests.checkpoint.together import Together, four
from treering.errors import MismatchError

__all__ = ["four"]

TreeOf = Callable[[int], Any]
"""Process -> its tree."""


def put(array: Any, *spec: Any, first: int = 0, stop: int = 8) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[first:stop]), ("x",))
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def local(array: Any, *spec: Any, of: int) -> jax.Array:
    """An array on a device of one process, or cut over both."""
    return put(array, *spec, first=2 * of, stop=2 * of + (2 if spec else 1))


def of_all(tree: Any) -> TreeOf:
    return lambda process: tree


ROWS = np.zeros((8, 8), "f4")
ALIKE: dict[str, tuple[TreeOf, TreeOf]] = {
    "values of Python": (of_all({"a": 1, "b": "x", "c": 2.5}), of_all({"a": 5, "b": "yy", "c": -1.0})),
    "values of arrays": (of_all(np.zeros(3)), of_all(np.ones(3))),
    "functions": (of_all({"f": jax.nn.relu}), of_all({"f": jax.nn.gelu})),
    "how a local array is cut": (lambda process: local(ROWS, "x", of=process), lambda process: local(ROWS, of=process)),
    "specs that say the same": (of_all(put(ROWS, "x")), of_all(put(ROWS, "x", None))),
}
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "a key": ({"a": 1}, {"b": 1}),
    "a kind": (1, 1.0),
    "numpy or jax": (np.zeros(3, "f4"), jnp.zeros(3)),
    "a dtype": (np.zeros(3, "f4"), np.zeros(3, "i4")),
    "a shape": (np.zeros((2, 3)), np.zeros((3, 2))),
    "an axis": (put(ROWS, "x"), put(ROWS, None, "x")),
    "the owners": (put(ROWS, "x", stop=4), put(ROWS, "x", first=4)),
    "all or one": (put(np.arange(8.0), "x"), put(np.arange(8.0), "x", first=4, stop=6)),
    "an implementation of keys": (jax.random.key(0), jax.random.key(0, impl="rbg")),
    "an order": ({"a": 1, "b": 1.0}, {"b": 1.0, "a": 1}),
    "a leaf": ([1, 2], [1, 2, 3]),
}


def writers(path: Path) -> list[int]:
    return [file["process"] for file in json.loads((path / "treering.json").read_bytes())["files"]]


@pytest.mark.parametrize("name", ALIKE)
def test_what_makes_no_difference(name: str, four: Together, tmp_path: Path) -> None:
    mine, theirs = ALIKE[name]
    assert four.save(tmp_path / "x", lambda process: (theirs if process else mine)(process)) == [None] * 4
    jax.tree.map(np.testing.assert_array_equal, treering.load(tmp_path / "x", like=mine(0)), mine(0))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", DIFFERENT)
def test_what_makes_a_difference(name: str, four: Together, tmp_path: Path) -> None:
    for trees in (DIFFERENT[name], DIFFERENT[name][::-1]):
        for other in (1, 3):
            outcomes = four.save(tmp_path / "x", lambda process: trees[process == other])  # noqa: B023 - used at once
            assert [type(outcome) for outcome in outcomes] == [MismatchError] * 4
            assert all("tree" in str(outcome) for outcome in outcomes)
    assert not (tmp_path / "x").exists()


def test_the_first_differences_are_named_with_what_they_are_here(four: Together, tmp_path: Path) -> None:
    mine = {f"k{n:02}": put(ROWS, "x") for n in range(15)} | {"same": 1}
    theirs = {f"k{n:02}": ROWS for n in range(15)} | {"same": 2}
    outcomes = four.save(tmp_path / "x", lambda process: mine if process else theirs)
    # One that hears of another's refusal first has no list of its own.
    outcome = next(outcome for outcome in outcomes if isinstance(outcome, MismatchError) and outcome.differences)
    text = str(outcome)
    assert "'k00' differs from that of process 0; here it is jax float32 [8, 8], held: [0:1,0:8] by process 0" in text
    assert "and 5 more" in text
    assert "same" not in text
    assert len(outcome.differences) == 10


def test_an_array_of_one_process_is_its_own_or_everybodys_as_process_0_has_it(four: Together, tmp_path: Path) -> None:
    shared = {"a": put(np.arange(8.0), "x", first=4, stop=6), "b": 1}
    # Process 0 means this very array: it lies with process 2.
    assert four.save(tmp_path / "x", of_all(shared)) == [None] * 4
    np.testing.assert_array_equal(treering.load(tmp_path / "x")["a"], np.arange(8.0))
    assert writers(tmp_path / "x") == [2]
    # Process 0 has one of its own.
    own = {"a": local(np.arange(8.0) + 1, "x", of=0), "b": 1}
    assert four.save(tmp_path / "y", lambda process: shared if process == 2 else own) == [None] * 4
    np.testing.assert_array_equal(treering.load(tmp_path / "y")["a"], np.arange(8.0) + 1)
    assert writers(tmp_path / "y") == [0]


def test_what_each_holds_alone_is_compared_by_every_bit(four: Together, tmp_path: Path) -> None:
    nan = np.array([np.nan, -0.0, 1])
    spread = put(ROWS, "x")

    def first(process: int) -> dict[str, Any]:
        cut = local(ROWS, "x", of=process) if process < 3 else local(ROWS, of=process)
        return {
            "same": nan,
            "cut": cut,
            "int": 1,
            "float": 0.0,
            "text": "a" * 5000,
            "key": jax.device_put(jax.random.key(1), jax.devices()[2 * process]),
            "spread": spread,
            "f": jax.nn.relu if process < 3 else jax.nn.gelu,
        }

    def other(process: int) -> dict[str, Any]:
        return first(process) | {
            "same": -nan,
            "cut": local(ROWS + 1, "x", of=process),
            "int": 2,
            "float": -0.0,
            "text": "a" * 4999 + "b",
            "key": jax.device_put(jax.random.key(2), jax.devices()[2 * process]),
        }

    outcomes = four.save(tmp_path / "x", lambda process: (first if process < 2 else other)(process), host_local="equal")
    assert [type(outcome) for outcome in outcomes] == [MismatchError] * 4
    assert isinstance(outcomes[0], MismatchError)
    found = outcomes[0].differences
    assert [line.split("'")[1] for line in found] == ["same", "cut", "int", "float", "text", "key"]
    assert all(line.endswith("differs on processes 2 and 3") for line in found)
    assert four.save(tmp_path / "x", first, host_local="equal") == [None] * 4


def test_who_has_nothing_to_compare_agrees(four: Together, tmp_path: Path) -> None:
    tree = {"on 0": local(ROWS, "x", of=0)}
    assert four.save(tmp_path / "x", of_all(tree), host_local="equal") == [None] * 4
    np.testing.assert_array_equal(treering.load(tmp_path / "x")["on 0"], ROWS)
