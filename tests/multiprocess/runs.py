"""Workers of `test_runs`: processes that go through a run together, and some of them see or do something else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treering as tr
from tests.multiprocess.meetings import told
from tests.multiprocess.refusals import tree
from tests.reads import act_before_steps
from tests.system_calls import hide_names, refuse_removals
from treering.errors import NotFoundError

_GENEROUS = 60.0


class Data:
    """An iterator over data that goes on from a state; where it is broken it gives none."""

    def __init__(self, position: int, *, broken: bool = False) -> None:
        self.position = position
        self._broken = broken

    def get_state(self) -> dict[str, int]:
        if self._broken:
            raise ZeroDivisionError("the pipe burst")
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def goes_through(folder: str) -> dict[str, Any]:
    """Make every call of a run; what one process cannot do, all hear of."""
    number = jax.process_index()
    run = tr.Run(f"{folder}/run", timeout=_GENEROUS)
    found: dict[str, Any] = {}

    def note(name: str, work: Callable[[], Any]) -> None:
        found[name] = told(work)

    def saved(step: int, **items: Any) -> None:
        run.save(step, {"state": tree(step), **items}, metrics={"loss": 1 / step}).result(_GENEROUS)

    note("nothing there", run.load)
    note("begin", lambda: saved(1, data=Data(10)))
    note("broken on 1", lambda: saved(2, data=Data(20, broken=number == 1)))
    note("once more", lambda: saved(2, data=Data(20)))
    note("odd metric on 1", lambda: run.save(3, tree(3), metrics={"m": "text" if number else 1}).result(_GENEROUS))
    note("and again", lambda: saved(3, data=Data(30)))
    note("older", lambda: saved(2, data=Data(20)))
    with pytest.MonkeyPatch.context() as patch:
        if number == 1:  # its view of the file system is behind
            hide_names(patch, "step_0000000[2-9]")
        data = Data(0)
        like: dict[str, Any] = {"state": tree(), "data": data}
        note("latest", lambda: int(run.load(like=like)["state"]["step"]))
        found["position"] = data.position
        note("missing", lambda: run.load(7))
    note("verdicts", lambda: _verdicts(tr.Run(run.path, keep=tr.KeepLast(1), timeout=_GENEROUS)))
    note("steps", run.steps)
    note("branch", lambda: run.branch(3, f"{folder}/other").steps())
    note("branch again", lambda: run.branch(3, f"{folder}/other"))
    note("from the branch", lambda: _resumed(tr.Run(f"{folder}/other", timeout=_GENEROUS)))
    return found


def _verdicts(run: tr.Run) -> list[Any]:
    return [[verdict.step, verdict.kept] for verdict in run.gc(dry_run=False)]


def _resumed(run: tr.Run) -> list[Any]:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    rows = NamedSharding(mesh, PartitionSpec("x"))

    def init() -> dict[str, Any]:
        state = {"w": jnp.zeros((24, 24)), "step": 0}
        return {"state": state, "data": {"position": 0}, "new": jnp.ones(8)}

    resumed = run.load_or_init(init, shardings=lambda key, aval: rows if aval.shape else None)
    new = np.asarray(resumed.tree["new"].addressable_shards[0].data)
    return [resumed.step, list(resumed.initialised), new.tolist(), resumed.tree["state"]["step"]]


def shares_files(folder: str) -> list[Any]:
    """Save steps of which a part changes, with process 1 once where the base is gone from its view; load them."""
    number = jax.process_index()
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    wanted = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    with tr.Run(f"{folder}/run", incremental=True, full_every=4, timeout=_GENEROUS) as run:
        for step in range(6):
            wanted[step] += 1
            values = wanted.copy()
            state = {
                "rows": jax.make_array_from_callback(values.shape, rows, values.__getitem__),
                "frozen": np.arange(1000.0), "step": step,
            }  # fmt: skip
            with pytest.MonkeyPatch.context() as patch:
                if step == 2 and number == 1:
                    hide_names(patch, "step_0000000[01]")
                run.save(step, state).result(_GENEROUS)
        found = [run.load(step) for step in run.steps()]
    local = [np.asarray(tree["rows"].addressable_shards[0].data).sum() for tree in found]
    return [[tree["step"] for tree in found], [float(tree["frozen"].sum()) for tree in found], list(map(float, local))]


def fails_afterwards(folder: str) -> list[dict[str, Any]]:
    """Let process 0 fail at what comes after a commit: only it knows, and tells the others at the next call."""
    run = tr.Run(f"{folder}/run", keep=tr.KeepLast(1), timeout=_GENEROUS)

    def wait_for_the_end() -> None:
        """Wait for the end of what is being saved without asking how it ended: saves are written one by one."""
        path = f"{folder}/own {jax.process_index()}"
        tr.save_async(path, 1, overwrite=True, processes="this").result(_GENEROUS)

    found = [told(lambda: run.save(1, tree(1)).result(_GENEROUS))]
    with pytest.MonkeyPatch.context() as patch:
        refuse_removals(patch)
        run.save(2, tree(2))
        wait_for_the_end()
        found.append(told(lambda: run.load(like=tree())))
        found.append(told(lambda: int(run.load(like=tree())["step"])))
        run.save(3, tree(3))
        wait_for_the_end()
    found.append(told(lambda: run.save(4, tree(4)).result(_GENEROUS)))
    found.append(told(lambda: run.save(4, tree(4)).result(_GENEROUS)))
    run.wait(_GENEROUS)
    return [*found, told(run.steps)]


def counts_from_what_process_0_sees(folder: str) -> list[bool]:
    """Decide from the latest step, of which process 1 does not know yet."""
    path = f"{folder}/run"
    with tr.Run(path, timeout=_GENEROUS) as run:
        run.save(9, tree(9))
    with pytest.MonkeyPatch.context() as patch, tr.Run(path, save_every=tr.SaveEvery(steps=10)) as run:
        if jax.process_index() == 1:
            hide_names(patch, "step_00000009")
        return [bool(run.save(step, tree(step))) for step in (11, 12, 13)]


def loads_beside_a_trainer(folder: str, victim: int) -> dict[str, dict[str, Any]]:
    """Load the latest step by every door, while a newer one comes and the one that is read goes, seen by one first."""
    number = jax.process_index()
    run = tr.Run(f"{folder}/run", timeout=_GENEROUS)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    crossed = NamedSharding(mesh, PartitionSpec(None, "x"))
    shardings = {"state": {"w": crossed, "step": None}, "data": None}
    data = Data(0)

    def init() -> dict[str, Any]:
        return {"state": {"w": jnp.zeros((24, 24)), "step": 0}, "data": data}

    like = {"state": {"w": jax.ShapeDtypeStruct((24, 24), np.float32), "step": 0}, "data": data}
    doors: dict[str, Callable[[], Any]] = {
        "each by itself": lambda: run.load()["state"],
        "into a tree": lambda: run.load(like=like)["state"],
        "together": lambda: run.load(like=like, shardings=shardings)["state"],
        "init": lambda: run.load_or_init(init).tree["state"],
        "init together": lambda: run.load_or_init(init, mesh=mesh).tree["state"],
    }
    found: dict[str, dict[str, Any]] = {}
    for step, (name, load) in enumerate(doors.items(), 1):
        for one in (2 * step, 2 * step + 1):
            run.save(one, {"state": tree(one), "data": Data(one)}).result(_GENEROUS)
        with pytest.MonkeyPatch.context() as patch:
            _train_while_reading(patch, run, 2 * step + 1, is_here=number == victim)
            found[name] = told(lambda load=load: int(load()["step"]))  # type: ignore[misc]
        found[name]["position"] = data.position
    with pytest.MonkeyPatch.context() as patch:
        if number == victim:
            act_before_steps(patch, _find_nothing)
        found["found by some"] = told(lambda: int(run.load()["state"]["step"]))
    return found


def _find_nothing() -> None:
    raise NotFoundError("nothing is there")


def _train_while_reading(patch: pytest.MonkeyPatch, run: tr.Run, newest: int, *, is_here: bool) -> None:
    """Hide the newest step until a tree is opened first; then let it be there, and the one before it be gone."""
    before, after = (run.path / f"step_{step:08d}" for step in (newest - 1, newest))
    hidden = run.path.parent / f"hidden {newest}"
    if is_here:
        after.rename(hidden)
    multihost_utils.sync_global_devices(f"hidden {newest}")

    def come_and_go() -> None:
        if is_here and hidden.exists():
            hidden.rename(after)
            shutil.rmtree(before)

    act_before_steps(patch, come_and_go)
