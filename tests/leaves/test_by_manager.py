"""Loading through a manager: it is waited for, reads what it can once the bytes are checked, and is not believed."""

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
from treering.errors import CorruptError, UnsupportedError
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
    """A manager that notes what it is asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.waited = 0
        self.asked: list[str] = []

    def wait_until_finished(self) -> None:
        self.waited += 1

    def deserialize_with_paths(self, shardings: Sequence[Any], paths: Sequence[str]) -> list[Any]:
        self.asked += [str(Path(path).relative_to(self.root.absolute())) for path in paths]
        return [
            jax.device_put(TREE[Path(path).name.replace("%2E", ".")], place)
            for path, place in zip(paths, shardings, strict=True)
        ]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tree_serialize_leaves(tmp_path, TREE)
    return tmp_path


def test_the_manager_reads_the_arrays_that_it_can(saved: Path) -> None:
    reader = Reader(saved)
    found = tree_deserialize_leaves(saved, LINE, reader, shardings={"w": P("d")})
    assert reader.waited == 1
    assert reader.asked == ["w", "half", "layer%2E0", "empty"], "zarr has no uint4, and nothing else is a jax array"
    assert_same(found, TREE, restored=False)
    assert found["w"].sharding == NamedSharding(LINE, P("d"))
    assert list(found) == list(TREE)


def test_it_reads_nothing_that_has_no_sharding(saved: Path) -> None:
    reader = Reader(saved)
    assert_same(tree_deserialize_leaves(saved, None, reader), TREE, restored=False)
    assert (reader.waited, reader.asked) == (1, [])


def test_batches_and_callbacks_are_the_same(saved: Path) -> None:
    calls: list[str] = []
    tree_deserialize_leaves(saved, LINE, Reader(saved), chunk_size=2, callback=lambda _, key: calls.append(key))
    assert calls == [key for key in TREE if key != "n"]


def test_bytes_are_checked_before_the_manager_reads_them(saved: Path) -> None:
    data = bytearray((saved / "w" / "0.0").read_bytes())
    data[5] ^= 1
    (saved / "w" / "0.0").write_bytes(data)
    reader = Reader(saved)
    with pytest.raises(CorruptError, match="w"):
        tree_deserialize_leaves(saved, LINE, reader)
    assert reader.asked == []


@pytest.mark.parametrize(
    "change", [lambda array: array.astype("float16"), lambda array: array[:1]], ids=["dtype", "shape"]
)
def test_what_is_another_array_is_refused_by_name(change: Any, saved: Path) -> None:
    class Wrong(Reader):
        def deserialize_with_paths(self, shardings: Sequence[Any], paths: Sequence[str]) -> list[Any]:
            arrays = super().deserialize_with_paths(shardings, paths)
            return [change(arrays[0]), *arrays[1:]]

    with pytest.raises(UnsupportedError, match=r"the manager gave .* for float32\[8, 8\] \(at leaf 'w'\)"):
        tree_deserialize_leaves(saved, LINE, Wrong(saved))


def test_what_went_wrong_before_is_raised_first(saved: Path) -> None:
    class Failed(Reader):
        def wait_until_finished(self) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tree_deserialize_leaves(saved, LINE, Failed(saved))


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
