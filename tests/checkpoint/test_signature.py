"""What processes say of their trees before a joint save: what makes a difference, and how it is told."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from treering._arrays.outgoing import DescribedLeaves, describe_leaves
from treering._checkpoint.signature import check_local, check_signature, claim_leaves, local_digests, signature_of
from treering._tree.flatten import Flattened, flatten
from treering._values.processes import Processes
from treering.errors import Mismatch


def seen(tree: Any, this: int = 0) -> tuple[Flattened, DescribedLeaves]:
    flat = flatten(tree)
    return flat, describe_leaves(flat, Processes(this=this, count=4))


def signature(tree: Any, this: int = 0) -> bytes:
    return signature_of(*seen(tree, this))


def compare(mine: Any, theirs: Any) -> None:
    flat, leaves = seen(mine)
    check_signature(flat, leaves, signature(theirs))


@pytest.fixture(autouse=True)
def of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the eight devices be those of four processes."""
    monkeypatch.setattr("treering._arrays.outgoing.process_of", lambda device: device.id // 2)


def put(array: Any, *spec: Any, first: int = 0, stop: int = 8) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[first:stop]), ("x",))
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


ROWS = np.zeros((8, 8), "f4")
ALIKE: dict[str, tuple[Any, Any]] = {
    "values of Python": ({"a": 1, "b": "x", "c": 2.5}, {"a": 5, "b": "yy", "c": -1.0}),
    "values of arrays": (np.zeros(3), np.ones(3)),
    "functions": ({"f": jax.nn.relu}, {"f": jax.nn.gelu}),
    "how a local array is cut": (put(ROWS, "x", stop=2), put(ROWS, stop=1)),
    "specs that say the same": (put(ROWS, "x"), put(ROWS, "x", None)),
}
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "a key": ({"a": 1}, {"b": 1}),
    "a kind": (1, 1.0),
    "numpy or jax": (np.zeros(3, "f4"), jnp.zeros(3)),
    "a dtype": (np.zeros(3, "f4"), np.zeros(3, "i4")),
    "a shape": (np.zeros((2, 3)), np.zeros((3, 2))),
    "an axis": (put(ROWS, "x"), put(ROWS, None, "x")),
    "the owners": (put(ROWS, "x", stop=4), put(ROWS, "x", first=4)),
    "an implementation of keys": (jax.random.key(0), jax.random.key(0, impl="rbg")),
    "an order": ({"a": 1, "b": 1.0}, {"b": 1.0, "a": 1}),
    "a leaf": ([1, 2], [1, 2, 3]),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_makes_no_difference(name: str) -> None:
    compare(*ALIKE[name])


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_makes_a_difference(name: str) -> None:
    one, other = DIFFERENT[name]
    for mine, theirs in ((one, other), (other, one)):
        with pytest.raises(Mismatch, match="tree"):
            compare(mine, theirs)


def test_all_processes_say_the_same() -> None:
    tree = {"a": put(ROWS, "x"), "b": put(ROWS), "c": put(np.zeros((0, 8)), None, "x"), "d": 1}
    assert len({signature(tree, this) for this in range(4)}) == 1
    assert len(signature(tree)) == 8 * 4


def test_the_first_differences_are_named_with_what_they_are_here() -> None:
    mine = {f"k{n:02}": put(ROWS, "x") for n in range(15)} | {"same": 1}
    theirs = {f"k{n:02}": ROWS for n in range(15)} | {"same": 2}
    with pytest.raises(Mismatch) as caught:
        compare(mine, theirs)
    assert "'k00' differs from that of process 0; here it is jax float32 [8, 8], held: [0:1,0:8] by process 0" in str(
        caught.value
    )
    assert "and 5 more" in str(caught.value)
    assert "same" not in str(caught.value)
    assert len(caught.value.differences) == 10


def test_an_array_of_one_process_is_its_own_or_everybodys_as_process_0_has_it() -> None:
    shared = put(np.arange(8.0), "x", first=4, stop=6)
    mine = {"a": shared, "b": 1}
    flat, leaves = seen(mine, 2)
    # Process 0 means this very array: it lies with process 2.
    found = claim_leaves(flat, leaves, signature(mine, 0), 2)
    assert found.held_by(0) == ((((0, 4),), (2,)), (((4, 8),), (2,)))
    assert signature_of(flat, found) == signature(mine, 0)
    # Process 0 has one of its own.
    alone = {"a": put(np.arange(8.0), "x", stop=2), "b": 1}
    assert claim_leaves(flat, leaves, signature(alone, 0), 2) is leaves
    # Something else altogether.
    assert claim_leaves(flat, leaves, signature({"a": put(np.arange(8.0), "x"), "b": 1}, 0), 2) is leaves


def test_what_each_holds_alone_is_compared_by_every_bit() -> None:
    nan = np.array([np.nan, -0.0, 1])
    tree = {
        "same": nan,
        "cut": put(ROWS, "x", stop=2),
        "int": 1,
        "float": 0.0,
        "text": "a" * 5000,
        "key": jax.device_put(jax.random.key(1), jax.devices()[0]),
        "spread": put(ROWS, "x"),
        "f": jax.nn.relu,
    }
    flat, leaves = seen(tree)
    mine = local_digests(flat, leaves)
    assert len(mine) == 8 * 6
    uncut = tree | {"cut": put(ROWS, stop=1), "f": jax.nn.gelu}
    assert local_digests(*seen(uncut)) == mine
    other = tree | {
        "same": -nan,
        "cut": put(ROWS + 1, "x", stop=2),
        "int": 2,
        "float": -0.0,
        "text": "a" * 4999 + "b",
        "key": jax.device_put(jax.random.key(2), jax.devices()[0]),
    }
    theirs = local_digests(*seen(other))
    with pytest.raises(Mismatch) as caught:
        check_local(flat.keys, leaves, [mine, mine, theirs, theirs])
    assert [line.split("'")[1] for line in caught.value.differences] == ["same", "cut", "int", "float", "text", "key"]
    assert all(line.endswith("differs on processes 2 and 3") for line in caught.value.differences)
    check_local(flat.keys, leaves, [mine, mine])


def test_who_has_nothing_to_compare_agrees() -> None:
    tree = {"on 0": put(ROWS, "x", stop=2)}
    flat, leaves = seen(tree)
    assert local_digests(*seen(tree, 3)) == bytes(8)
    check_local(flat.keys, leaves, [local_digests(flat, leaves), bytes(8)])
