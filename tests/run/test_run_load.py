"""Loading steps of a run: which, what is waited for, what a missing one says, and steps that go meanwhile."""

from __future__ import annotations

import copy
import errno
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treering as tr
from tests.system_calls import CommitGate, act_before_indexes, commit_gate
from treering.errors import CorruptError, LeavesInitialisedWarning, MismatchError, NotFoundError, UnsupportedError

__all__ = ["commit_gate"]

HALVES = np.zeros(3, np.float16)


def filled(path: Path, *steps: int, **options: Any) -> tr.Run:
    run = tr.Run(path, **options)
    for step in steps:
        run.save(step, {"params": {"w": np.full(3, step, np.float16)}, "step": step}, metrics={"loss": -step})
    run.wait(60)
    return run


def test_all_that_load_can_is_here(tmp_path: Path) -> None:
    run = filled(tmp_path / "run", 1, 2)
    seen: list[tuple[int, int]] = []
    assert run.load()["step"] == 2
    assert run.load(1)["step"] == 1
    assert run.load(1, at="params")["w"].tolist() == [1, 1, 1]
    assert run.load(1, only="**/w")["params"]["w"].tolist() == [1, 1, 1]
    like: dict[str, Any] = {"params": {"v": jax.ShapeDtypeStruct((3,), "float32")}, "step": 0, "extra": 5}
    loaded = run.load(
        1, like, key_map={"params/v": "params/w"}, missing="keep", cast=True, progress=lambda *at: seen.append(at)
    )
    assert (loaded["params"]["v"].dtype, loaded["step"], loaded["extra"]) == (jnp.float32, 1, 5)
    assert seen[-1] == (6, 6)
    assert not run.load(2, mapped=True)["params"]["w"].flags.writeable
    device = jax.devices()[-1]
    assert run.load(2, shardings=device)["params"]["w"].devices() == {device}
    mesh = jax.make_mesh((len(jax.devices()),), ("x",))
    assert run.load(2, mesh=mesh)["params"]["w"].sharding.mesh == mesh
    with pytest.raises(UnsupportedError, match="there is none"):
        run.load(1, cast=True)
    with pytest.raises(UnsupportedError, match="'x' is not a step"):
        run.load("x")  # type: ignore[call-overload]


def test_a_missing_step_names_those_that_are_there(tmp_path: Path) -> None:
    run = filled(tmp_path / "run", 10)
    for ask in (run.load, run.metrics):
        with pytest.raises(NotFoundError, match=r"the run '.*run' has no step 7; it has step 10$"):
            ask(7)
    with pytest.raises(FileNotFoundError, match="has no step 7; it has no step yet"):
        tr.Run(tmp_path / "other").load(7)
    for step in range(11, 30):
        (run.path / f"step_{step:08d}").mkdir()
        for file in (run.path / "step_00000010").iterdir():
            (run.path / f"step_{step:08d}" / file.name).hardlink_to(file)
    with pytest.raises(NotFoundError, match=r"it has steps 10, 11, 12, \.\.\., 25, 26, 27, 28 and 29 \(20 in all\)"):
        run.load(1000)


def test_a_step_that_is_damaged_is_not_passed_over(tmp_path: Path) -> None:
    run = filled(tmp_path / "run", 1, 2)
    index = run.path / "step_00000002" / "treering.json"
    index.write_bytes(index.read_bytes()[:-20])
    assert run.latest() == 2
    for ask in (run.load, lambda: run.metrics(2)):
        with pytest.raises(CorruptError, match="step_00000002"):
            ask()
    assert run.load(1)["step"] == 1


def test_a_step_in_flight_is_waited_for(tmp_path: Path, commit_gate: CommitGate) -> None:
    run = tr.Run(tmp_path / "run")
    run.save(1, {"step": 1})
    with ThreadPoolExecutor(1) as thread:
        loading = thread.submit(run.load, 1)
        try:
            with pytest.raises(TimeoutError):
                loading.result(0.2)
        finally:
            commit_gate.opened.set()
        assert loading.result(60)["step"] == 1


@pytest.mark.parametrize("ask", ["load", "load_or_init"])
def test_a_latest_step_that_goes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: str) -> None:
    filled(tmp_path / "run", 1)
    reader = tr.Run(tmp_path / "run")
    saved: list[int] = []

    def save_behind_the_back() -> None:
        if len(saved) < 2:
            saved.append(len(saved) + 2)
            filled(tmp_path / "run", saved[-1], keep=tr.KeepLast(1))

    looked = act_before_indexes(monkeypatch, save_behind_the_back)
    tree = reader.load() if ask == "load" else reader.load_or_init(lambda: {"params": {"w": HALVES}, "step": 0}).tree
    assert tree["step"] == 3
    assert list(dict.fromkeys(looked)) == ["step_00000001", "step_00000002", "step_00000003"]


def test_a_latest_step_that_is_not_found_is_not_looked_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = filled(tmp_path / "run", 1)

    def lead_nowhere() -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    looked = act_before_indexes(monkeypatch, lead_nowhere)
    with pytest.raises(NotFoundError):
        run.load()
    assert looked == 2 * ["step_00000001"]


# -------------------------------------------------------------------------------------------------------- load_or_init


def fresh() -> dict[str, Any]:
    return {"params": {"w": jnp.zeros(3, int)}, "step": jnp.zeros((), int)}


def test_the_first_time_all_is_initialised(tmp_path: Path) -> None:
    with tr.Run(tmp_path / "run") as run:
        resumed = run.load_or_init(fresh)
        assert (resumed.step, resumed.initialised) == (None, ("params/w", "step"))
        step, tree = resumed
        assert (step, tree is resumed.tree) == (None, True)
        run.save(4, jax.tree.map(lambda leaf: leaf + 4, tree))
        step, tree = run.load_or_init(fresh)  # in flight, and waited for
        assert (step, tree["params"]["w"].tolist()) == (4, [4, 4, 4])
    assert not (tmp_path / "other").exists()
    assert tr.Run(tmp_path / "other").load_or_init(fresh).step is None


def test_what_is_new_is_initialised(tmp_path: Path) -> None:
    with tr.Run(tmp_path / "run") as run:
        run.save(4, fresh())
    with pytest.warns(LeavesInitialisedWarning, match=r"(?s)^step 4 of .*/run' does not have .*:\n  new$") as caught:
        resumed = run.load_or_init(lambda: {**fresh(), "new": jnp.ones(2)})
    assert caught[0].filename == __file__
    assert (resumed.step, resumed.initialised, resumed.tree["new"].tolist()) == (4, ("new",), [1.0, 1.0])
    with pytest.raises(MismatchError, match="params/w"):
        run.load_or_init(lambda: {**fresh(), "params": {"w": jnp.zeros(4, int)}})


def test_what_a_step_has_too_much_can_be_left_out(tmp_path: Path) -> None:
    with tr.Run(tmp_path / "run") as run:
        run.save(4, {**fresh(), "old": jnp.ones(2)})
    less = {"step": jnp.zeros((), int)}
    with pytest.raises(MismatchError, match=r'old: unexpected[^$]*extra="ignore"'):
        run.load_or_init(fresh)
    assert set(run.load_or_init(fresh, extra="ignore").tree) == {"params", "step"}
    assert run.load(4, less, extra="ignore").keys() == less.keys()
    wrong: Any = "keep"
    for call in (lambda: run.load(4, less, extra=wrong), lambda: run.load_or_init(fresh, extra=wrong)):
        with pytest.raises(UnsupportedError, match=r"extra is .keep., but must be .error. or .ignore."):
            call()


@pytest.mark.parametrize("with_step", [False, True])
@pytest.mark.parametrize("tree", [None, {}, (), {"n": 3}], ids=repr)
def test_a_tree_without_arrays_is_taken_as_it_is(tree: Any, with_step: bool, tmp_path: Path) -> None:
    if with_step:
        with tr.Run(tmp_path / "run") as run:
            run.save(4, tree)
    assert tr.Run(tmp_path / "run").load_or_init(lambda: tree) == (4 if with_step else None, tree)


def test_what_init_fn_does_not_have_is_named(tmp_path: Path) -> None:
    with tr.Run(tmp_path / "run") as run:
        run.save(4, fresh())
    for init_fn in (lambda: None, dict, tuple):
        with pytest.raises(MismatchError, match="params/w: unexpected"):
            run.load_or_init(init_fn)


def test_what_load_or_init_gives_is_a_pair_like_any_other(tmp_path: Path) -> None:
    resumed = tr.Run(tmp_path / "run").load_or_init(lambda: {"count": jnp.ones(())})
    assert isinstance(resumed, tuple)
    assert len(resumed) == 2
    for other in (copy.copy(resumed), pickle.loads(pickle.dumps(resumed))):
        assert (other.step, other.initialised) == (None, ("count",))
