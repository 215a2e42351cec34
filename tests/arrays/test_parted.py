"""Arrays on several devices as one run of bytes, and host copies that nobody keeps."""

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import treering
from treering._arrays import parted
from treering._arrays.parted import BoxedArray, host_blocks, to_host
from treering.errors import Unsupported


def spread(array: np.ndarray[Any, Any], spec: PartitionSpec) -> jax.Array:
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    return jax.device_put(array, NamedSharding(mesh, spec))


@pytest.fixture(autouse=True)
def _eight_devices() -> None:
    assert len(jax.devices()) >= 8


@pytest.mark.parametrize("spec", [PartitionSpec("x", "y"), PartitionSpec("y", "x"), PartitionSpec(None, ("x", "y"))])
@pytest.mark.parametrize("slab", [4, 100, 1 << 20])
def test_any_stretch_of_items(spec: PartitionSpec, slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parted, "_SLAB_BYTES", slab)
    whole = np.arange(16 * 24, dtype=np.int32).reshape(16, 24)
    array = spread(whole, spec)
    for start, stop in itertools.combinations((0, 1, 23, 24, 25, 200, 383, 384), 2):
        found = b"".join(host_blocks(array, start, stop))
        assert found == whole.reshape(-1)[start:stop].tobytes()


def test_jax_keeps_no_copy_of_what_was_fetched() -> None:
    # int4 is unpacked for numpy: a copy, also on CPU.
    array = jnp.ones(1 << 18, jnp.int4)
    fetched = to_host(array)
    kept, again = np.asarray(array), np.asarray(array)
    assert np.shares_memory(kept, again)
    assert not np.shares_memory(fetched, kept)
    assert np.array_equal(fetched, kept)


def test_no_guard_is_lifted_where_numpy_sees_the_memory_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    lifted: list[str] = []
    lift = jax.transfer_guard_device_to_host

    def counted(how: str) -> Any:
        lifted.append(how)
        return lift(how)

    monkeypatch.setattr(jax, "transfer_guard_device_to_host", counted)
    for array in (np.zeros(3), jnp.zeros(3), jnp.zeros(3, jnp.bfloat16), jnp.zeros(1 << 18)):
        to_host(array)
    assert not lifted  # it would take a third of the time of saving many small leaves
    to_host(jnp.zeros(3, "int4"))
    assert lifted == ["allow"]


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
    with pytest.raises(Unsupported, match="changed while it was being saved"):
        treering.save(path, tree, overwrite=True, progress=touch)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]


def test_parts_of_numpy_arrays() -> None:
    left, right = np.array([[1], [3]], ">u2"), np.array([[2], [4]], ">u2")
    halves = BoxedArray((2, 2), [(((0, 2), (0, 1)), left), (((0, 2), (1, 2)), right)])
    assert b"".join(halves.blocks(0, 4)) == np.array([1, 2, 3, 4], "<u2").tobytes()
