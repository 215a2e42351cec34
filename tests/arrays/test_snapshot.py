"""What a snapshot holds stays what it was: whatever is donated, written into or deleted right afterwards."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import warnings
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treering._arrays import snapshot
from treering._arrays.buffers import aligned_bytes
from treering._arrays.outgoing import DescribedLeaves, describe_leaves
from treering._checkpoint.plan_cache import plan_tree
from treering._tree.flatten import flatten

DTYPES = ["float32", "bfloat16", "complex64", "int4"]


def described(tree: Any) -> DescribedLeaves:
    return describe_leaves(flatten(tree))


def bytes_of(leaves: DescribedLeaves) -> dict[int, list[bytes]]:
    return {
        number: [np.asarray(source.data).tobytes() for source in sources] for number, sources in leaves.sources.items()
    }


@functools.partial(jax.jit, donate_argnums=0)
def step(tree: Any) -> Any:
    return jax.tree.map(lambda x: x * 2 + 1 if x.dtype != bool else ~x, tree)


def spread_over_devices(shape: tuple[int, ...], dtype: str, *axes: str | None) -> jax.Array:
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    return jax.device_put(np.arange(np.prod(shape)).reshape(shape).astype(jnp.dtype(dtype)), sharding)


def arrays(dtype: str) -> dict[str, jax.Array]:
    made = jax.jit(lambda: jnp.arange(1 << 16).astype(dtype))()
    return {
        "made by jax": made,
        "small": jnp.ones((3, 5), dtype),
        "scalar": jnp.ones((), dtype),
        "sharded": spread_over_devices((64, 32), dtype, "x", "y"),
        "half replicated": spread_over_devices((64, 32), dtype, "x"),
        "replicated": spread_over_devices((64, 32), dtype),
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_donation_right_afterwards_changes_nothing(dtype: str) -> None:
    tree = arrays(dtype)
    wanted = bytes_of(described(tree))
    held = snapshot.snapshot(described(tree))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            tree = jax.block_until_ready(step(tree))
    assert bytes_of(held) == wanted


def test_donation_while_the_result_is_still_computed_changes_nothing() -> None:
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda _, y: y + 1.0, x))
    state = {"w": slow(jnp.zeros(1 << 18))}
    held = snapshot.snapshot(described(state))
    step(state)
    assert (held.data_of(0, None) == 50.0).all()


def test_arrays_on_memory_of_numpy_survive_donation_and_keep_that_memory_as_it_was() -> None:
    memory = aligned_bytes(1 << 18).view(np.float32)
    memory[:] = 3.0
    array = jax.device_put(memory, may_alias=True)
    held = snapshot.snapshot(described({"w": array}))
    jax.block_until_ready(step({"w": array}))
    assert (held.data_of(0, None) == 3.0).all()
    assert (memory == 3.0).all()


def test_deleting_right_afterwards_changes_nothing() -> None:
    array = jnp.arange(1 << 16)
    held = snapshot.snapshot(described({"w": array}))
    array.delete()
    others = [jnp.full(1 << 16, 7) for _ in range(8)]  # whoever gets the memory next writes into it
    jax.block_until_ready(others)
    assert (held.data_of(0, None) == np.arange(1 << 16)).all()


def test_writing_into_memory_of_numpy_changes_nothing() -> None:
    plain, turned = np.zeros(1000), np.arange(6.0).reshape(2, 3).T
    scalar, text, short = np.float32(1.5), bytearray(b"x" * 10_000), bytearray(b"abc")
    tree = {"plain": plain, "turned": turned, "part": plain[10:20], "scalar": scalar, "text": text, "short": short}
    wanted = bytes_of(described(tree))
    held = snapshot.snapshot(described(tree))
    plain[:] = 1.0
    turned[:] = 1.0
    text[:] = b"y" * 10_000
    short[:] = b"xyz"
    assert bytes_of(held) == wanted
    assert held.values == {5: bytearray(b"abc")}


def test_a_key_and_its_data_survive_donation() -> None:
    key = jax.random.key(3)
    wanted = np.asarray(jax.random.key_data(key)).tobytes()
    held = snapshot.snapshot(described({"key": key}))
    jax.block_until_ready(jax.jit(lambda key: jax.random.split(key)[0], donate_argnums=0)(key))
    assert bytes_of(held) == {0: [wanted]}


def test_no_array_of_a_device_is_held_after_the_snapshot_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "is_view", lambda _: False)
    monkeypatch.setattr(snapshot._HostCopy, "wait", lambda coming: np.array(coming._handle))  # on CPU numpy has views
    array = jnp.arange(1 << 16)
    alive = weakref.ref(array)
    plan = plan_tree({"w": array}).snapshot()
    del array
    gc.collect()
    assert alive() is None
    assert type(plan.leaves.data_of(0, None)) is np.ndarray


def test_views_are_copied_where_the_runtime_gives_donated_memory_away(monkeypatch: pytest.MonkeyPatch) -> None:
    array = jnp.arange(1 << 16)
    monkeypatch.setattr(snapshot, "views_survive", lambda: True)
    view = snapshot.snapshot(described({"w": array})).data_of(0, None)
    assert np.shares_memory(view, np.asarray(array))
    monkeypatch.setattr(snapshot, "views_survive", lambda: False)
    copied = snapshot.snapshot(described({"w": array})).data_of(0, None)
    assert not np.shares_memory(copied, np.asarray(array))
    assert (copied == view).all()


def test_the_probe_notices_a_runtime_that_overwrites_donated_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert snapshot.views_survive.__wrapped__()

    def overwrite(array: jax.Array) -> None:
        ctypes.memset(array.unsafe_buffer_pointer(), 1, array.nbytes)

    monkeypatch.setattr(snapshot, "_donate", overwrite)
    assert not snapshot.views_survive.__wrapped__()


class FakeDevice:
    """Takes note of which copies to the host were begun and awaited, in which order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, int]] = []
        numbers: dict[int, int] = {}
        fake = self

        class Coming:
            def __init__(self, array: jax.Array) -> None:
                self.number = numbers.setdefault(len(numbers), len(numbers))
                self.array = array
                fake.calls.append(("begun", self.number))

            def wait(self) -> Any:
                fake.calls.append(("wait", self.number))
                return np.array(self.array)

        monkeypatch.setattr(snapshot, "is_view", lambda _: False)
        monkeypatch.setattr(snapshot, "_HostCopy", Coming)


def test_elsewhere_all_copies_are_begun_before_the_first_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDevice(monkeypatch)
    tree = {"a": jnp.arange(5), "b": spread_over_devices((64, 32), "float32", "x", "y"), "c": np.arange(3), "d": 1}
    wanted = bytes_of(described(tree))
    held = snapshot.snapshot(described(tree))
    assert [what for what, _ in fake.calls] == ["begun"] * 9 + ["wait"] * 9
    assert sorted(number for what, number in fake.calls if what == "wait") == list(range(9))
    assert bytes_of(held) == wanted


def test_elsewhere_only_what_this_process_writes_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDevice(monkeypatch)
    leaves = described({"a": jnp.arange(5), "b": spread_over_devices((64, 32), "float32", "x"), "c": np.arange(3)})
    boxes = [source.box for source in leaves.sources[1]]
    held = snapshot.snapshot(leaves, [(1, boxes[2])])
    assert fake.calls == [("begun", 0), ("wait", 0)]
    assert [source.box for source in held.sources[1]] == boxes
    assert [source.data is not None for source in held.sources[1]] == [False, False, True, False]
    assert held.sources[0][0].data is None
    assert held.sources[2][0].data is None
    assert list(held.sources) == list(leaves.sources)


@pytest.mark.parametrize("size", [10, 1 << 18])
def test_the_real_way_through_copies_leaves_none_with_the_large_array(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(snapshot, "is_view", lambda _: False)
    tree = {
        "a": jnp.arange(float(size)),
        "b": spread_over_devices((64, 32), "bfloat16", "x", "y"),
        "int4": arrays("int4"),
    }
    wanted = bytes_of(described(tree))
    assert bytes_of(snapshot.snapshot(described(tree))) == wanted


def test_a_box_inside_of_a_shard_is_cut_out_of_a_leaf_that_lies_over_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_view in (True, False):
        monkeypatch.setattr(snapshot, "is_view", lambda _, answer=is_view: answer)
        leaves = described({"w": jnp.arange(10)})
        leaves = dataclasses.replace(leaves, spread={0: ((((0, 10),), (0, 1)),)})
        held = snapshot.snapshot(leaves, [(0, ((2, 4),)), (0, ((6, 9),))])
        assert [(source.box, source.data.tolist()) for source in held.sources[0]] == [
            (((2, 4),), [2, 3]),
            (((6, 9),), [6, 7, 8]),
        ]


def test_an_array_that_stands_in_a_tree_twice_is_fetched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDevice(monkeypatch)
    array = jnp.arange(5)
    held = snapshot.snapshot(described({"a": array, "b": array}))
    assert [what for what, _ in fake.calls].count("begun") == 1
    assert [held.data_of(number, None).tolist() for number in (0, 1)] == [list(range(5))] * 2
