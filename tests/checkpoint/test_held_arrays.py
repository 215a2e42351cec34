"""``save(base=)`` of arrays that this process saved before, as on a device into whose memory only jax writes.

Here that device is the processor's, so a test can do what no program can there: write into an array behind jax's back.
What was written so and is not in the new checkpoint was not looked at.
"""

from __future__ import annotations

import errno
import gc
import os
import shutil
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treering as tr
from tests import faults, limits
from tests.checkpoint.in_background import gate
from tests.reads import act_on_snapshots
from treering._arrays.host import OTHER_WRITERS, only_jax_writes
from treering.errors import NotFoundError

Save = Callable[..., Any]


@pytest.fixture(autouse=True)
def own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves of more than a KiB are compared in parts, and nobody else is said to write into arrays on CPU."""
    limits.lower(monkeypatch, compared_box=1024, other_writers={"cpu": ()})


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The numbers of the leaves that each snapshot copied."""
    found: list[list[int]] = []
    act_on_snapshots(monkeypatch, lambda _, copied: found.append(copied))
    return found


def save_later(path: Any, tree: Any, **options: Any) -> None:
    tr.save_async(path, tree, **options).result()


both = pytest.mark.parametrize("save", [tr.save, save_later])


def aliased(nbytes: int = 4096) -> tuple[np.ndarray[Any, Any], jax.Array]:
    """Memory, and a jax array that is a view of it."""
    room = np.zeros(nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    memory = room[start : start + nbytes].view(np.float32)
    array = jax.device_put(memory, may_alias=True)
    memory += 1
    assert np.asarray(array).all()
    memory -= 1
    return memory, array


def as_saved(path: Any, key: str = "frozen") -> bool:
    """Whether nothing of what was written behind jax's back is there."""
    found: np.ndarray[Any, Any] = np.asarray(tr.load(path)[key])
    return not found.any()


def first_of(path: Path) -> Path:
    """Save a tree with digests, as the first save of a chain; return the folder."""
    tr.save(path / "none", {"other": np.ones(3)})
    return path / "none"


@both
@pytest.mark.parametrize("place", ["disk", "memory"])
def test_what_is_held_is_neither_compared_nor_copied(
    tmp_path: Path, save: Save, place: str, copied: list[list[int]]
) -> None:
    root = tmp_path if place == "disk" else f"memory://held/{os.urandom(4).hex()}"
    memory, array = aliased()
    tr.save(f"{root}/0", {"other": np.ones(3)})
    for step in range(1, 5):
        save(f"{root}/{step}", {"frozen": array, "trained": jnp.full(300, step)}, base=f"{root}/{step - 1}")
        memory += 1
    for step in range(1, 5):
        assert tr.verify(f"{root}/{step}").ok
        assert as_saved(f"{root}/{step}")
        assert (tr.load(f"{root}/{step}")["trained"] == step).all()
    # At the second save the frozen part lies in one file with what has changed, and is more than half of it.
    assert copied == ([[0, 1], [1], [1], [1]] if save is save_later else [])


@both
def test_another_array_with_the_same_bytes_is_compared(tmp_path: Path, save: Save) -> None:
    memory, array = aliased()
    save(tmp_path / "a", {"frozen": array}, base=first_of(tmp_path))
    save(tmp_path / "b", {"frozen": jnp.array(array)}, base=tmp_path / "a")
    memory += 1
    save(tmp_path / "c", {"frozen": jnp.array(array)}, base=tmp_path / "b")
    assert as_saved(tmp_path / "b")
    assert not as_saved(tmp_path / "c")


@both
def test_a_donated_array_comes_back_as_another_one(tmp_path: Path, save: Save) -> None:
    step = jax.jit(lambda tree: tree | {"trained": tree["trained"] + 1}, donate_argnums=0)
    tree = step({"frozen": jnp.arange(3000.0), "trained": jnp.zeros(300)})
    base = first_of(tmp_path)
    for number in range(4):
        save(tmp_path / f"{number}", tree, base=base)
        base, before = tmp_path / f"{number}", tree["frozen"]
        tree = step(tree)
        assert before.is_deleted()
    for number in range(4):
        found = tr.load(tmp_path / f"{number}")
        assert np.array_equal(found["frozen"], np.arange(3000.0))
        assert (np.asarray(found["trained"]) == number + 1).all()


@both
def test_another_dtype_or_another_tree_is_compared(tmp_path: Path, save: Save) -> None:
    memory, array = aliased()
    save(tmp_path / "a", {"frozen": array}, base=first_of(tmp_path))
    memory += 1
    save(tmp_path / "b", {"frozen": array}, base=tmp_path / "a", dtype="float16")
    save(tmp_path / "c", {"frozen": array[None]}, base=tmp_path / "a")
    save(tmp_path / "d", {"deeper": {"frozen": array}}, base=tmp_path / "a")
    found = [tr.load(tmp_path / name) for name in "bcd"]
    assert all((np.asarray(leaf) == 1).all() for leaf in jax.tree.leaves(found))
    save(tmp_path / "e", {"frozen": array}, base=tmp_path / "b", dtype="float16")
    assert (np.asarray(tr.load(tmp_path / "e")["frozen"]) == 1).all()
    assert tr.load(tmp_path / "e")["frozen"].dtype == jnp.float16


@both
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P()])
def test_arrays_over_several_devices(tmp_path: Path, save: Save, spec: Any, copied: list[list[int]]) -> None:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    rows = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    tree = {"frozen": jax.device_put(rows, NamedSharding(mesh, spec))}
    save(tmp_path / "a", tree, base=first_of(tmp_path))
    save(tmp_path / "b", tree, base=tmp_path / "a")
    elsewhere = {"frozen": jax.device_put(rows, NamedSharding(mesh, P(("x",), None)))}
    save(tmp_path / "c", elsewhere, base=tmp_path / "b")
    assert copied == ([[0], [], [0]] if save is save_later else [])
    for name in "abc":
        assert np.array_equal(tr.load(tmp_path / name)["frozen"], rows)
        assert tr.verify(tmp_path / name).ok


def test_a_run_knows_what_it_saved(tmp_path: Path, copied: list[list[int]]) -> None:
    memory, array = aliased()
    with tr.Run(tmp_path / "run", incremental=True, full_every=3) as run:
        for step in range(1, 6):
            run.save(step, {"frozen": array, "trained": jnp.full(300, step)})
            run.wait()
            memory += 1
    # The first and the fourth write everything.
    assert copied == [[0, 1], [1], [1], [0, 1], [1]]
    found = [np.asarray(tr.load(tmp_path / "run" / f"step_{step:08}")["frozen"])[0] for step in range(1, 6)]
    assert found == [0, 0, 0, 3, 3]


def test_no_array_lives_longer_for_it(tmp_path: Path) -> None:
    tree = {"frozen": jnp.arange(3000.0) + 1}
    there = weakref.ref(tree["frozen"])
    tr.save(tmp_path / "a", tree, base=first_of(tmp_path))
    save_later(tmp_path / "b", tree, base=tmp_path / "a")
    with gate() as held:
        tr.save_async(tmp_path / "before", {"w": np.ones(3)}, progress=held)
        pending = tr.save_async(tmp_path / "c", tree, base=tmp_path / "b")
        del tree
        gc.collect()
        assert there() is None  # while the save is in flight, too
        held.open()
        pending.result()
    assert np.array_equal(tr.load(tmp_path / "c")["frozen"], np.arange(3000.0) + 1)


@pytest.mark.parametrize("array", ["there", "deleted"])
@pytest.mark.parametrize("base", ["there", "not to be linked", "gone"])
def test_what_was_not_copied_is_found_when_it_has_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, array: str, base: str, copied: list[list[int]]
) -> None:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    spread = jax.device_put(np.arange(4096.0).reshape(64, 64), NamedSharding(mesh, P("x")))
    tree = {"spread": spread, "frozen": jnp.arange(3000.0), "trained": jnp.zeros(30)}
    wanted = jax.tree.map(np.array, tree)
    with tr.Run(tmp_path / "run", incremental=True) as run:
        run.save(1, tree)
        run.wait()
        if base == "not to be linked":
            faults.fail(monkeypatch, os, "link", errno.EMLINK, when=lambda old, new, **_: "data-" in str(new))
        with gate() as held:
            tr.save_async(tmp_path / "before", {"w": np.ones(3)}, progress=held)
            pending = run.save(2, tree)
            if array == "deleted":
                for leaf in jax.tree.leaves(tree):
                    leaf.delete()
            if base == "gone":
                shutil.rmtree(tmp_path / "run" / "step_00000001")
            held.open()
            if (array, base) == ("deleted", "gone"):
                with pytest.raises(NotFoundError, match=r"was deleted.*at leaf 'spread'.*keep the checkpoint"):
                    pending.result()
                return
            pending.result()
    assert copied[-1] == []
    found = tr.load(tmp_path / "run" / "step_00000002")
    assert all(np.array_equal(found[key], leaf) for key, leaf in wanted.items())
    assert tr.verify(tmp_path / "run" / "step_00000002").ok


def test_a_file_of_which_little_is_used_is_copied_from_the_device_in_time(
    tmp_path: Path, copied: list[list[int]]
) -> None:
    frozen = jnp.arange(300.0)
    tr.save(tmp_path / "a", {"frozen": frozen, "trained": jnp.zeros(3000)}, base=first_of(tmp_path))
    save_later(tmp_path / "b", {"frozen": frozen, "trained": jnp.ones(3000)}, base=tmp_path / "a")
    save_later(tmp_path / "c", {"frozen": frozen, "trained": jnp.zeros(3000)}, base=tmp_path / "b")
    assert copied == [[0, 1], [1]]
    assert np.array_equal(tr.load(tmp_path / "c")["frozen"], np.arange(300.0))


def on(platform: str, memory: str | None = "device") -> Any:
    """Stand for an array on a device that is not here."""
    sharding = SimpleNamespace(device_set=[SimpleNamespace(platform=platform)], memory_kind=memory)
    return SimpleNamespace(sharding=sharding)


def test_where_it_is_certain_that_only_jax_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    limits.lower(monkeypatch, other_writers=OTHER_WRITERS)
    for name in OTHER_WRITERS["gpu"]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert not only_jax_writes(jnp.zeros(3))
    assert only_jax_writes(on("tpu"))
    assert only_jax_writes(on("gpu"))
    assert not only_jax_writes(on("gpu", "pinned_host"))
    assert not only_jax_writes(on("tpu", "unpinned_host"))
    assert not only_jax_writes(on("another"))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    assert not only_jax_writes(on("gpu"))
    assert only_jax_writes(on("tpu"))
