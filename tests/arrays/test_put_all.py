"""Many arrays on one device: the quick way gives what device_put gives, and steps aside where it would not."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from treering._arrays import delivered
from treering._arrays.buffers import aligned_bytes
from treering._arrays.delivered import put_all

DTYPES = (np.float32, ml_dtypes.bfloat16, np.uint8, np.complex64, np.bool_)


def arrays(count: int) -> list[np.ndarray[Any, Any]]:
    """Random bits, NaNs of every kind among them."""
    random = np.random.default_rng(count)
    result = []
    for number in range(count):
        dtype = DTYPES[number % len(DTYPES)]
        memory = aligned_bytes(96)
        memory[:] = random.integers(0, 2 if dtype is np.bool_ else 256, 96)
        result.append(memory.view(dtype).reshape(2, -1))
    return result


@pytest.mark.parametrize("count", [0, 1, 511, 64 * 8 * len(DTYPES) + 7])
def test_every_bit_arrives_on_the_default_device(count: int) -> None:
    given = arrays(count)
    placed = put_all(given)
    assert [np.asarray(array).tobytes() for array in placed] == [array.tobytes() for array in given]
    assert [(array.dtype, array.shape) for array in placed] == [(array.dtype, array.shape) for array in given]
    assert {(array.committed, array.weak_type) for array in placed} <= {(False, False)}


@pytest.mark.parametrize("count", [5, 3000])
def test_a_mesh_of_one_device_is_kept_to(count: int) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[-1:]), ("rows",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    given = arrays(count)
    placed = put_all(given, sharding)
    assert {array.sharding for array in placed} == {sharding}
    assert [np.asarray(array).tobytes() for array in placed] == [array.tobytes() for array in given]


def test_a_named_device_is_kept_to() -> None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    placed = put_all(arrays(3000), sharding)
    assert {array.sharding for array in placed} == {sharding}
    assert all(array.committed for array in placed)


@pytest.mark.parametrize(
    ("context", "quick"),
    [
        (contextlib.nullcontext, True),
        (lambda: jax.transfer_guard("disallow"), True),
        (lambda: jax.debug_nans(True), False),
        (lambda: jax.debug_infs(True), False),
        (jax.disable_jit, False),
        (lambda: jax.set_mesh(jax.make_mesh((len(jax.devices()),), ("x",))), False),
    ],
    ids=["plain", "transfer guard", "debug_nans", "debug_infs", "disable_jit", "set_mesh"],
)
def test_whatever_jax_is_set_to(context: Callable[[], Any], quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arrays(3000)
    passed: list[int] = []
    original = delivered._pass

    def watched(*args: Any) -> None:
        passed.extend(args[1])
        original(*args)

    monkeypatch.setattr(delivered, "_pass", watched)
    with context():
        placed = put_all(given)
    assert [np.asarray(array).tobytes() for array in placed] == [array.tobytes() for array in given]
    assert {len(array.sharding.device_set) for array in placed} == {1}
    assert bool(passed) is quick
