"""What a save in the background holds stays what it was, whatever is donated, written into or deleted meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treering
from tests import faults
from tests.caches import clear_caches
from tests.checkpoint.in_background import PATIENCE, gate, nothing_left, write_by_threads
from tests.checkpoint.together import Together, two
from treering.checkpoint import save_async

__all__ = ["nothing_left", "two"]

DTYPES = ["float32", "bfloat16", "complex64", "int4"]


@contextlib.contextmanager
def held(path: Path, tree: Any) -> Iterator[None]:
    """Save in the background, but write nothing before the block ends."""
    with gate() as closed:
        save_async(path.with_name("first"), {"x": np.zeros(3)}, progress=closed)
        assert closed.reached.wait(PATIENCE)
        pending = save_async(path, tree)
        del tree
        yield
    pending.result(PATIENCE)


def bytes_of(tree: Any) -> list[tuple[str, bytes]]:
    arrays = [
        jax.random.key_data(leaf) if isinstance(leaf, jax.Array) and leaf.dtype.name.startswith("key") else leaf
        for leaf in jax.tree.leaves(tree)
    ]
    return [(np.asarray(array).dtype.name, np.asarray(array).tobytes()) for array in arrays]


@functools.partial(jax.jit, donate_argnums=0)
def step(tree: Any) -> Any:
    return jax.tree.map(lambda x: x * 2 + 1 if x.dtype != bool else ~x, tree)


def spread_over_devices(shape: tuple[int, ...], dtype: str, *axes: str | None) -> jax.Array:
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    return jax.device_put(np.arange(np.prod(shape)).reshape(shape).astype(jnp.dtype(dtype)), sharding)


def arrays(dtype: str) -> dict[str, jax.Array]:
    made = jax.jit(lambda: jnp.arange(1 << 17).astype(dtype))()
    return {
        "made by jax": made,
        "small": jnp.ones((3, 5), dtype),
        "scalar": jnp.ones((), dtype),
        "sharded": spread_over_devices((64, 32), dtype, "x", "y"),
        "half replicated": spread_over_devices((64, 32), dtype, "x"),
        "replicated": spread_over_devices((64, 32), dtype),
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_donation_right_afterwards_changes_nothing(dtype: str, tmp_path: Path) -> None:
    tree = arrays(dtype)
    wanted = bytes_of(jax.tree.map(np.array, tree))
    with held(tmp_path / "x", tree), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            tree = jax.block_until_ready(step(tree))
    assert bytes_of(treering.load(tmp_path / "x", like=arrays(dtype))) == wanted


def test_donation_while_the_result_is_still_computed_changes_nothing(tmp_path: Path) -> None:
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda _, y: y + 1.0, x))
    state = {"w": slow(jnp.zeros(1 << 18))}
    with held(tmp_path / "x", state):
        step(state)
    assert (treering.load(tmp_path / "x")["w"] == 50.0).all()


def test_arrays_on_memory_of_numpy_survive_donation_and_keep_that_memory_as_it_was(tmp_path: Path) -> None:
    room = np.zeros((1 << 18) + 64, np.uint8)
    skip = -room.ctypes.data % 64  # jax takes such memory as it is
    memory = room[skip : skip + (1 << 18)].view(np.float32)
    memory[:] = 3.0
    array = jax.device_put(memory, may_alias=True)
    with held(tmp_path / "x", {"w": array}):
        jax.block_until_ready(step({"w": array}))
    assert (treering.load(tmp_path / "x")["w"] == 3.0).all()
    assert (memory == 3.0).all()


def test_deleting_right_afterwards_changes_nothing(tmp_path: Path) -> None:
    array = jnp.arange(1 << 16)
    with held(tmp_path / "x", {"w": array}):
        array.delete()
        others = [jnp.full(1 << 16, 7) for _ in range(8)]  # whoever gets the memory next writes into it
        jax.block_until_ready(others)
    assert (treering.load(tmp_path / "x")["w"] == np.arange(1 << 16)).all()


def test_writing_into_memory_of_numpy_changes_nothing(tmp_path: Path) -> None:
    plain, turned = np.zeros(1000), np.arange(6.0).reshape(2, 3).T
    scalar, text, short = np.float32(1.5), bytearray(b"x" * 10_000), bytearray(b"abc")
    tree = {"plain": plain, "turned": turned, "part": plain[10:20], "scalar": scalar, "text": text, "short": short}
    with held(tmp_path / "x", tree):
        plain[:] = 1.0
        turned[:] = 1.0
        text[:] = b"y" * 10_000
        short[:] = b"xyz"
    found = treering.load(tmp_path / "x")
    assert (found["plain"] == np.zeros(1000)).all()
    assert (found["part"] == np.zeros(10)).all()
    assert (found["turned"] == np.arange(6.0).reshape(2, 3).T).all()
    assert (found["scalar"], found["text"], found["short"]) == (1.5, bytearray(b"x" * 10_000), bytearray(b"abc"))


def test_a_key_and_its_data_survive_donation(tmp_path: Path) -> None:
    key = jax.random.key(3)
    wanted = np.asarray(jax.random.key_data(key)).tobytes()
    with held(tmp_path / "x", {"key": key}):
        jax.block_until_ready(jax.jit(lambda key: jax.random.split(key)[0], donate_argnums=0)(key))
    assert bytes_of(treering.load(tmp_path / "x"))[0][1] == wanted


@pytest.mark.parametrize("size", [10, 1 << 18])
def test_no_array_is_held_of_which_there_is_a_copy(size: int, tmp_path: Path) -> None:
    """As on an accelerator, numpy does not see the memory of such an array."""
    array = jnp.ones(size, "int4")
    alive = weakref.ref(array)
    with held(tmp_path / "x", {"w": array}):
        del array
        gc.collect()
        assert alive() is None


# ------------------------------------------------------------------------------- memory that is donated and overwritten


@pytest.fixture
def overwriting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A runtime that writes into donated memory although numpy looks at it."""
    jit = jax.jit

    def overwriting_jit(function: Callable[..., Any], *, donate_argnums: int | None = None, **options: Any) -> Any:
        compiled = jit(function, **options)

        def call(array: jax.Array) -> Any:
            result = jax.block_until_ready(compiled(array))
            ctypes.memset(array.unsafe_buffer_pointer(), 1, array.nbytes)
            return result

        return compiled if donate_argnums is None else call

    clear_caches()
    monkeypatch.setattr(jax, "jit", overwriting_jit)
    yield
    clear_caches()


@pytest.mark.usefixtures("overwriting")
def test_a_runtime_that_overwrites_donated_memory_is_noticed(tmp_path: Path) -> None:
    array = jnp.arange(1 << 16)
    with held(tmp_path / "x", {"w": array}):
        jax.jit(lambda x: x * 2, donate_argnums=0)(array)
    assert (treering.load(tmp_path / "x")["w"] == np.arange(1 << 16)).all()


def test_without_such_a_runtime_nothing_is_copied(tmp_path: Path) -> None:
    clear_caches()
    array = jnp.arange(1 << 16)
    with held(tmp_path / "x", {"w": array}):
        ctypes.memset(array.unsafe_buffer_pointer(), 1, array.nbytes)
    assert (treering.load(tmp_path / "x")["w"] == 0x01010101).all()


# ------------------------------------------------------------------------ arrays whose memory numpy does not see itself


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Which copies were begun, and which asked for, by threads."""
    found: list[tuple[str, int]] = []
    kind: Any = type(jnp.zeros(1))

    def watch(name: str, what: str) -> None:

        faults.before(
            monkeypatch, kind, name, lambda array, *arguments, **options: found.append((what, threading.get_ident()))
        )

    watch("copy_to_host_async", "begun")
    watch("__array__", "wait")
    return found


def test_all_copies_are_begun_before_the_first_is_waited_for(tmp_path: Path, calls: list[tuple[str, int]]) -> None:
    tree = {
        "a": jnp.arange(5).astype("int4"),
        "b": spread_over_devices((64, 32), "int4", "x", "y"),
        "c": np.arange(3),
        "d": 1,
    }
    with held(tmp_path / "x", tree):
        seen = [what for what, _ in calls]
    assert seen == ["begun"] * 9 + ["wait"] * 9


def test_an_array_that_stands_in_a_tree_twice_is_fetched_once(tmp_path: Path, calls: list[tuple[str, int]]) -> None:
    array = jnp.arange(5).astype("int4")
    with held(tmp_path / "x", {"a": array, "b": array}):
        assert [what for what, _ in calls].count("begun") == 1
    found = treering.load(tmp_path / "x")
    assert found["a"].tolist() == found["b"].tolist() == list(range(5))


def test_only_what_a_process_writes_is_fetched(
    tmp_path: Path, two: Together, calls: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_by_threads(monkeypatch)
    shared = spread_over_devices((64, 32), "int4", "x")
    everywhere = spread_over_devices((64, 32), "int4")  # each process writes a half of it
    alone = {process: jnp.arange(5).astype("int4") for process in range(2)}
    assert two.save(
        tmp_path / "x",
        lambda process: {"alone": alone[process], "everywhere": everywhere, "shared": shared},
        save=lambda path, tree: save_async(path, tree).result(PATIENCE),
    ) == [None, None]
    # Four boxes, each on two devices of one process, and two halves; what each has alone is written by process 0.
    begun = [thread for what, thread in calls if what == "begun"]
    assert sorted(begun.count(thread) for thread in set(begun)) == [3, 4]
    found = treering.load(tmp_path / "x")
    assert found["alone"].tolist() == list(range(5))
    assert (found["everywhere"] == everywhere).all()
