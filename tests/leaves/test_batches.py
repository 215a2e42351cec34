"""``chunk_size``: arrays come a batch at a time, callbacks run after each, and nothing of a batch outlives them."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests import faults, meshes
from tests.trees import assert_same
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves

COUNT = 7
# Larger than what is read together with its neighbours, and than what jax may share.
TREE = {f"w{number}": jnp.full((300, 300), number, "float32") for number in range(COUNT)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tree_serialize_leaves(tmp_path, TREE | {"host": np.arange(100_000), "text": "long " * 4000, "n": 3})
    return tmp_path


@pytest.mark.sampled(5)
@pytest.mark.parametrize("chunk_size", [None, 0, -1, 1, 2, 3, 8, 1000, np.int64(2)])
def test_every_size_gives_the_same_tree(chunk_size: Any, saved: Path) -> None:
    wanted = tree_deserialize_leaves(saved)
    assert_same(tree_deserialize_leaves(saved, chunk_size=chunk_size), wanted, restored=False)
    calls: list[str] = []
    tree_deserialize_leaves(saved, chunk_size=chunk_size, callback=lambda _, key: calls.append(key))
    assert calls == [*TREE, "host"]


def test_callbacks_run_after_each_batch(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []

    def noted(name: Any, *arguments: Any, **options: Any) -> None:
        if Path(name).name[0].isdigit():  # a chunk file
            events.append("read")

    faults.before(monkeypatch, os, "open", noted)
    tree_deserialize_leaves(saved, chunk_size=3, callback=lambda _, key: events.append(key))
    # A long text lies in files like an array, and is none.
    three = ["read"] * 3
    assert events == [*three, "w0", "w1", "w2", *three, "w3", "w4", "w5", *three, "w6", "host"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("where", ["default device", "mesh", "numpy"])
@pytest.mark.parametrize("chunk_size", [1, 2])
def test_a_batch_is_gone_before_the_next_one_is_read(
    where: str, chunk_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree_serialize_leaves(tmp_path, jax.tree.map(np.asarray, TREE) if where == "numpy" else TREE)
    mesh = meshes.line(4)
    shardings = NamedSharding(mesh, P("x")) if where == "mesh" else None
    alive: list[weakref.ref[Any]] = []
    at_reads: list[int] = []
    begins = True

    def counted(descriptor: int, buffers: Any, *where: Any) -> None:
        nonlocal begins
        if begins:  # a batch
            begins = False
            gc.collect()
            at_reads.append(sum(array() is not None for array in alive))
        # What is read, too: jax may take its memory as it is.
        memory = buffers[0].obj
        while isinstance(getattr(memory, "base", None), np.ndarray):
            memory = memory.base
        alive.append(weakref.ref(memory))

    def forgotten(array: Any, _key: str) -> None:
        nonlocal begins
        begins = True
        alive.append(weakref.ref(array))

    faults.before(monkeypatch, os, "preadv", counted)
    found = tree_deserialize_leaves(tmp_path, shardings=shardings, chunk_size=chunk_size, callback=forgotten)
    assert found == dict.fromkeys(TREE)
    assert len(at_reads) == -(-COUNT // chunk_size)
    assert len(alive) >= 2 * COUNT - (COUNT if where == "numpy" else 0)
    assert at_reads == [0] * len(at_reads)


def test_arrays_that_the_callback_returns_stay(saved: Path) -> None:
    found = tree_deserialize_leaves(saved, chunk_size=2, callback=lambda array, _: array)
    assert_same(found, tree_deserialize_leaves(saved), restored=False)
