"""``save(base=)`` of arrays that this process saved before, as on a device into whose memory only jax writes.

Here that device is the processor's, so a test can do what no program can there: write into an array behind jax's back.
What was written so and is not in the new checkpoint was not looked at.
"""

from __future__ import annotations

import errno
import gc
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
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
from tests.command import here
from tests.reads import act_on_snapshots
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
def test_a_relative_path_is_known_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Save) -> None:
    monkeypatch.chdir(tmp_path)
    memory, array = aliased()
    tr.save("0", {"other": np.ones(3)})
    for step in (1, 2):
        save(f"{step}", {"frozen": array, "trained": jnp.full(300, step)}, base=f"{step - 1}")
        memory += 1
    assert as_saved("2")


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


@pytest.mark.sampled(5)
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


def test_status_counts_what_was_copied(tmp_path: Path) -> None:
    tree, another = frozen_tree(), frozen_tree(1.0)
    with tr.Run(tmp_path / "run", incremental=True) as run:
        run.save(1, tree).result()
        # What is held is left on its device; an array that has the same bytes is copied and compared.
        for step, saved, copied in ((2, tree | {"trained": jnp.ones(30)}, 120), (3, another, 120 + 12_000)):
            with gate() as held:
                before = tr.save_async(tmp_path / f"before {step}", {"w": np.ones(3)}, progress=held)
                pending = run.save(step, saved)
                assert (run.status().saves_in_flight, run.status().bytes_in_flight) == (1, copied)
                held.open()
                before.result()
                pending.result()
        assert run.status().bytes_in_flight == 0


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


@pytest.mark.sampled(5)
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


# ------------------------------------------------------------------------------- others change the base, or the array


def another_program(path: Path, what: str) -> None:
    """Let another program put something else where the base was."""
    shutil.rmtree(path)
    frozen = np.arange(3000.0, dtype=np.float32)
    other: dict[str, Any] = {
        "other bytes": {"frozen": frozen + 1, "trained": np.zeros(30, np.float32)},
        "other shape": {"frozen": frozen[:7], "trained": np.zeros(30, np.float32)},
        "other dtype": {"frozen": frozen.astype(np.int32), "trained": np.zeros(30, np.float32)},
        "other keys": {"another": frozen},
        "the same": {"frozen": frozen, "trained": np.zeros(30, np.float32)},
    }
    tr.save(path, other[what])


OTHERS = ["other bytes", "other shape", "other dtype", "other keys", "the same"]


def frozen_tree(trained: float = 0.0) -> dict[str, jax.Array]:
    return {"frozen": jnp.arange(3000.0), "trained": jnp.full(30, trained)}


def check(path: Path, trained: float) -> None:
    found = tr.load(path)
    assert np.array_equal(found["frozen"], np.arange(3000.0))
    assert (np.asarray(found["trained"]) == trained).all()
    assert tr.verify(path).ok


@pytest.mark.sampled(7)
@pytest.mark.parametrize("when", ["before the call", "while it waits"])
@pytest.mark.parametrize("array", ["there", "deleted"])
@pytest.mark.parametrize("what", OTHERS)
def test_another_program_saves_where_the_base_was(tmp_path: Path, what: str, array: str, when: str) -> None:
    tree = frozen_tree()
    tr.save(tmp_path / "a", tree, base=first_of(tmp_path))
    with gate() as held:
        tr.save_async(tmp_path / "before", {"w": np.ones(3)}, progress=held)
        if when == "before the call":
            another_program(tmp_path / "a", what)
        pending = tr.save_async(tmp_path / "b", tree | {"trained": jnp.ones(30)}, base=tmp_path / "a")
        if when != "before the call":
            another_program(tmp_path / "a", what)
        if array == "deleted":
            tree["frozen"].delete()
        held.open()
        if (array, when) == ("deleted", "while it waits") and what != "the same":
            with pytest.raises(NotFoundError, match=r"was deleted.*at leaf 'frozen'.*keep the checkpoint"):
                pending.result()
            assert not (tmp_path / "b" / "treering.json").exists()
        else:
            pending.result()
            check(tmp_path / "b", 1.0)
    tree = frozen_tree(2.0)
    tr.save(tmp_path / "c", tree, base=tmp_path / "a")  # nothing of it is believed afterwards
    check(tmp_path / "c", 2.0)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("how", ["delete", "gc", "rollback"])
@pytest.mark.parametrize("array", ["there", "deleted"])
def test_steps_of_a_run_go_while_a_save_waits(tmp_path: Path, how: str, array: str) -> None:
    """The newest step is the base; whoever removes steps leaves it, or the save says what it lacks."""
    tree, path = frozen_tree(), tmp_path / "run"
    with tr.Run(path, incremental=True, keep=tr.KeepLast(2)) as run:
        for step in (1, 2, 3):
            run.save(step, tree | {"trained": jnp.full(30, step)}).result()
        with gate() as held:
            tr.save_async(tmp_path / "before", {"w": np.ones(3)}, progress=held)
            pending = run.save(4, tree | {"trained": jnp.full(30, 4)})
            if array == "deleted":
                tree["frozen"].delete()
            # What another program does, of which this one does not know.
            if how == "gc":
                here("gc", str(path), "--keep-last", "1", "--yes", code=0)
            elif how == "delete":
                here("rm", str(path), "3", code=0)
            else:
                shutil.rmtree(path / "step_00000003")
                shutil.copytree(path / "step_00000002", path / "step_00000003")  # of the same attempt as step 2
            held.open()
            pending.result()  # step 2 has the same bytes
        check(path / "step_00000004", 4.0)
    for step in tr.Run(path).steps():
        assert tr.verify(path / f"step_{step:08}").ok


@both
@pytest.mark.parametrize("based", [False, True])
def test_an_array_that_was_deleted_is_refused_though_its_bytes_are_known(
    tmp_path: Path, save: Save, based: bool
) -> None:
    tree = frozen_tree()
    save(tmp_path / "a", tree, base=first_of(tmp_path))
    tree["frozen"].delete()
    with pytest.raises((ValueError, RuntimeError), match="deleted"):
        save(tmp_path / "b", tree, **({"base": tmp_path / "a"} if based else {}))
    assert not (tmp_path / "b").exists()


@both
def test_an_array_under_two_keys_and_keys_that_change_places(tmp_path: Path, save: Save) -> None:
    one, two = jnp.arange(3000.0), jnp.arange(3000.0) + 1
    trees = [{"a": one}, {"a": one, "b": one}, {"a": two, "b": one}, {"a": one, "b": two}, {"b": two, "c": two}]
    base = first_of(tmp_path)
    for number, tree in enumerate(trees):
        save(tmp_path / f"{number}", tree, base=base)
        base = tmp_path / f"{number}"
    for number, tree in enumerate(trees):
        found = tr.load(tmp_path / f"{number}")
        assert found.keys() == tree.keys()
        assert all(np.array_equal(found[key], leaf) for key, leaf in tree.items()), number
        assert tr.verify(tmp_path / f"{number}").ok


@both
def test_parts_casts_and_whole_trees_in_turn(tmp_path: Path, save: Save) -> None:
    tree = frozen_tree(0.5)
    ways: list[dict[str, Any]] = [{}, {"only": "frozen"}, {"dtype": "bfloat16"}, {"dtype": {"fro*": "float16"}}, {}]
    base = first_of(tmp_path)
    for number, way in enumerate([*ways, *reversed(ways)]):
        save(tmp_path / f"{number}", tree, base=base, **way)
        base = tmp_path / f"{number}"
        found = tr.load(base)
        for key, leaf in tree.items():
            if key in found:
                wanted = leaf.astype(found[key].dtype)
                assert np.array_equal(np.asarray(found[key]), np.asarray(wanted)), (number, key)
        assert found.keys() == ({"frozen"} if "only" in way else {"frozen", "trained"})
        assert tr.verify(base).ok


def test_a_full_save_in_turn_reads_what_is_held(tmp_path: Path) -> None:
    """Also where another program has taken the turn: the base says how many saves its chain has."""
    tree = frozen_tree()
    with tr.Run(tmp_path / "run", incremental=True, full_every=3) as run:
        for step in (1, 2):
            run.save(step, tree | {"trained": jnp.full(30, step)}).result()
        with tr.Run(tmp_path / "run", incremental=True) as other:
            other.save(3, tree | {"trained": jnp.full(30, 3)}).result()
        run.save(4, tree | {"trained": jnp.full(30, 4)})
        tree["frozen"].delete()
        run.wait()
    for step in (1, 2, 3, 4):
        check(tmp_path / "run" / f"step_{step:08}", step)
