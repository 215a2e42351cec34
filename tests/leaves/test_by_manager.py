"""Loading with a manager: it is waited for, and its error is raised."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests import meshes
from tests.trees import assert_same
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves

LINE = meshes.line(axis="d")
TREE: dict[str, Any] = {
    "w": jnp.arange(64.0).reshape(8, 8),
    "half": jnp.ones(8, "bfloat16"),
    "layer.0": jnp.int32(4),
    "narrow": jnp.ones(8, "uint4"),
    "empty": jnp.zeros((0, 8)),
    "host": np.arange(8, dtype="f4"),
    "key": jax.random.key(0),
    "n": 3,
}


class Reader:
    """A manager that could read, as jax's can: treering reads and checks all bytes itself."""

    def __init__(self) -> None:
        self.waited = 0

    def wait_until_finished(self) -> None:
        self.waited += 1

    def deserialize_with_paths(self, shardings: Sequence[Any], paths: Sequence[str]) -> list[Any]:
        raise AssertionError(f"asked for {paths} with {shardings}")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tree_serialize_leaves(tmp_path, TREE)
    return tmp_path


def test_it_is_waited_for_and_reads_nothing(saved: Path) -> None:
    reader = Reader()
    found = tree_deserialize_leaves(saved, LINE, reader, shardings={"w": P("d")})
    assert reader.waited == 1
    assert_same(found, TREE, restored=False)
    assert found["w"].sharding == NamedSharding(LINE, P("d"))
    assert list(found) == list(TREE)


def test_what_went_wrong_before_is_raised_first(saved: Path) -> None:
    class Failed(Reader):
        def wait_until_finished(self) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tree_deserialize_leaves(saved, LINE, Failed())


def test_a_manager_that_only_waits_is_enough(saved: Path) -> None:
    class Waits:
        def wait_until_finished(self) -> None: ...

    assert_same(tree_deserialize_leaves(saved, LINE, Waits()), TREE, restored=False)


@pytest.mark.parametrize("compressor", [None, {"id": "zstd", "level": 1}], ids=["raw", "zstd"])
def test_the_manager_of_jax(compressor: Any, tmp_path: Path) -> None:
    manager = GlobalAsyncCheckpointManager()
    tree_serialize_leaves(tmp_path, TREE, compressor=compressor)
    found = tree_deserialize_leaves(tmp_path, LINE, manager, shardings={"w": P("d")})
    assert_same(found, TREE, restored=False)
    assert found["w"].sharding == NamedSharding(LINE, P("d"))


def test_saved_and_loaded_by_one_manager(tmp_path: Path) -> None:
    manager = GlobalAsyncCheckpointManager()
    tree_serialize_leaves(tmp_path, TREE, manager, prefix="model")
    assert_same(tree_deserialize_leaves(tmp_path, LINE, manager, prefix="model"), TREE, restored=False)
