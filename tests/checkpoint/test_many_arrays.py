"""Many arrays on one device: the quick way gives what device_put gives, and steps aside where it would not."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

import treering
from tests import faults

DTYPES = (np.float32, ml_dtypes.bfloat16, np.uint8, np.complex64, np.bool_)
COUNTS = (0, 1, 5, 511, 64 * 8 * len(DTYPES) + 7)
MANY = COUNTS[-1]


def arrays(count: int) -> list[np.ndarray[Any, Any]]:
    """Random bits, NaNs of every kind among them."""
    random = np.random.default_rng(count)
    result = []
    for number in range(count):
        dtype = DTYPES[number % len(DTYPES)]
        bits = random.integers(0, 2 if dtype is np.bool_ else 256, 96, np.uint8)
        result.append(bits.view(dtype).reshape(2, -1))
    return result


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    for count in COUNTS:
        treering.save(path / str(count), [jax.device_put(array) for array in arrays(count)])
    return path


def assert_bits(found: list[Any], count: int) -> None:
    given = arrays(count)
    assert [np.asarray(array).tobytes() for array in found] == [array.tobytes() for array in given]
    assert [(array.dtype, array.shape) for array in found] == [(array.dtype, array.shape) for array in given]
    assert all(isinstance(array, jax.Array) for array in found)


@pytest.mark.parametrize("count", COUNTS)
def test_every_bit_arrives_on_the_default_device(saved: Path, count: int) -> None:
    placed = treering.load(saved / str(count))
    assert_bits(placed, count)
    assert {(array.committed, array.weak_type) for array in placed} <= {(False, False)}


@pytest.mark.parametrize("count", [5, MANY])
def test_a_mesh_of_one_device_is_kept_to(saved: Path, count: int) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[-1:]), ("rows",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    placed = treering.load(saved / str(count), shardings=sharding)
    assert {array.sharding for array in placed} == {sharding}
    assert_bits(placed, count)


def test_a_named_device_is_kept_to(saved: Path) -> None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    placed = treering.load(saved / str(MANY), shardings=sharding)
    assert {array.sharding for array in placed} == {sharding}
    assert all(array.committed for array in placed)


@pytest.mark.sampled(5)
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
def test_whatever_jax_is_set_to(
    saved: Path, context: Callable[[], Any], quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    put: list[int] = []

    faults.before(monkeypatch, jax, "device_put", lambda arrays, *arguments, **options: put.append(len(arrays)))
    with context():
        placed = treering.load(saved / str(MANY))
    assert_bits(placed, MANY)
    assert {len(array.sharding.device_set) for array in placed} == {1}
    # Of each dtype 512 take the quick way, and the rest of it stays.
    assert sum(put) == (MANY - 512 * len(DTYPES) if quick else MANY)


def _count_calls(work: Callable[[], object]) -> int:
    """Count how often a function of treering is entered in this thread, generators each time that they go on."""
    calls = 0

    def count(frame: Any, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_globals.get("__name__", "").startswith("treering.")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize("committed", [False, True])
def test_leaves_that_are_alike_are_handled_in_columns(tmp_path: Path, committed: bool) -> None:
    """A leaf more costs next to no calls, and so no objects of ours: what is common to many is there once."""
    device = jax.devices()[0] if committed else None
    few, many = 512, 2048
    calls: dict[int, int] = {}
    for count in (few, many):
        tree = {str(layer): {str(n): np.full(8, n, np.float32) for n in range(64)} for layer in range(count // 64)}
        treering.save(tmp_path / str(count), tree)
        like = jax.device_put(tree, device)
        treering.load(tmp_path / str(count), like)
        calls[count] = _count_calls(lambda count=count, like=like: treering.load(tmp_path / str(count), like))  # type: ignore[misc]
    most = 3.5 if committed else 1.5
    assert (calls[many] - calls[few]) / (many - few) < most, calls
