"""Arrays on several devices as one run of bytes, and host copies that nobody keeps."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import treering
from tests import faults
from treering.errors import UnsupportedError
from treering.serialization import from_bytes, to_bytes


def spread(array: np.ndarray[Any, Any], spec: PartitionSpec) -> jax.Array:
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    return jax.device_put(array, NamedSharding(mesh, spec))


@pytest.fixture(autouse=True)
def _eight_devices() -> None:
    assert len(jax.devices()) >= 8


@pytest.mark.sampled(5)
@pytest.mark.parametrize("spec", [PartitionSpec("x", "y"), PartitionSpec("y", "x"), PartitionSpec(None, ("x", "y"))])
@pytest.mark.parametrize("shape", [(16, 24), (1304, 1816)], ids=["small", "several slabs that end in rows"])
def test_devices_hold_one_run_of_bytes(spec: PartitionSpec, shape: tuple[int, int], tmp_path: Path) -> None:
    whole = np.arange(shape[0] * shape[1], dtype=np.int32).reshape(shape)
    array = spread(whole, spec)
    path = tmp_path / "one.safetensors"
    treering.save(path, {"w": array})
    assert path.read_bytes().endswith(whole.tobytes())
    assert np.array_equal(treering.load(path)["w"], whole)
    data = to_bytes({"w": array})
    assert whole.tobytes() in data
    assert np.array_equal(from_bytes(None, data)["w"], whole)


def test_no_guard_is_lifted_where_numpy_sees_the_memory_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lifted: list[str] = []

    faults.before(monkeypatch, jax, "transfer_guard_device_to_host", lifted.append)
    treering.save(tmp_path / "a", [np.zeros(3), jnp.zeros(3), jnp.zeros(3, jnp.bfloat16), jnp.zeros(1 << 18)])
    assert not lifted  # it would take a third of the time of saving many small leaves
    treering.save(tmp_path / "b", [jnp.zeros(3, "int4")])
    assert lifted == ["allow"]


def test_jax_keeps_no_copy_of_what_was_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # int4 is unpacked for numpy: a copy, also on CPU, that jax keeps with the array that was asked for it.
    array = jnp.ones(1 << 18, jnp.int4)
    asked: list[Any] = []

    faults.before(monkeypatch, np, "asarray", lambda what, *arguments, **options: asked.append(what))
    treering.save(tmp_path / "a", {"w": array})
    fetched = [what for what in asked if isinstance(what, jax.Array) and what.size == array.size]
    assert fetched
    assert all(what is not array for what in fetched)


def test_an_array_that_changes_between_two_readings_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    treering.save(path, {"w": np.zeros(3)})
    before = path.read_bytes()
    changing = np.zeros(1 << 20, np.uint8)

    def touch(done: int, total: int) -> None:
        del total
        if done:
            changing[-1] += 1

    tree = {"a": np.zeros(1 << 20, np.uint16), "w": changing}
    with pytest.raises(UnsupportedError, match="changed while it was being saved"):
        treering.save(path, tree, overwrite=True, progress=touch)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]
