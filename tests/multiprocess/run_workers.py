"""Loops of two processes that save to one run: what ends them, and what they find afterwards."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import treering as tr
from treering.errors import (
    CorruptError,
    LeavesInitialisedWarning,
    MismatchError,
    NotSharedError,
    ProcessFailedError,
    StepPassedOverWarning,
)

__all__ = ["all_of_it", "ends_for_good"]

ROWS = PartitionSpec("x")
_LONGEST = 60.0


def _fresh() -> dict[str, Any]:
    return {"w": jnp.zeros((8, 4)), "count": jnp.int32(0)}


@jax.jit
def _trained(state: dict[str, Any]) -> dict[str, Any]:
    return {"w": state["w"] + 1, "count": state["count"] + 1}


def _looped(run: tr.Run, kill: tuple[int, int], until: Any) -> list[Any]:
    """Train until it is time; one process sends itself a signal at step 7. Return what was saved."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    step, state = run.load_or_init(_fresh, shardings=[("w", ROWS), ("count", PartitionSpec())], mesh=mesh)
    saved: list[Any] = []
    number = step or 0
    deadline = time.monotonic() + _LONGEST
    pause = threading.Event()
    while not until(saved) and time.monotonic() < deadline:
        number += 1
        state = _trained(state)
        if (number, jax.process_index()) == (7, kill[0]):
            os.kill(os.getpid(), kill[1])
        done = run.save(number, state)
        if done:
            saved.append([number, done.temporary, done.reason])
        pause.wait(0.002)
    return saved


def ends_by_signal(path: str) -> Any:
    """Process 1 gets a signal: both save one more step, and both hear the signal."""
    caught: list[int] = []
    signal.signal(signal.SIGUSR1, lambda signum, frame: caught.append(signum))
    with tr.Run(path, keep=tr.KeepLast(2), save_every=tr.SaveEvery(steps=5) | tr.SaveEvery(interval=3600)) as run:
        run.save_on_signal(signal.SIGUSR1)
        saved = _looped(run, (1, signal.SIGUSR1), lambda saved: caught)
    return [saved, caught == [signal.SIGUSR1], tr.Run(path).steps()]


def hears_of_jax(path: str) -> Any:
    """Process 0 gets the signal that jax listens to: both save the same step, and go on."""
    with tr.Run(path, save_every=tr.SaveEvery(steps=100_000)) as run:
        run.save_on_signal(signal.SIGUSR2)
        return _looped(run, (0, signal.SIGTERM), bool)


def resumes(path: str) -> Any:
    """What is stored is loaded on its sharding over both processes, the rest initialised there."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    rows, everywhere = NamedSharding(mesh, ROWS), NamedSharding(mesh, PartitionSpec())
    wanted = {"w": rows, "count": everywhere, "new": rows}
    with warnings.catch_warnings(action="ignore", category=LeavesInitialisedWarning):
        resumed = tr.Run(path).load_or_init(lambda: {**_fresh(), "new": jnp.arange(8)}, shardings=wanted)
    step, tree = resumed
    for name, sharding in wanted.items():
        assert tree[name].sharding == sharding
    for shard in tree["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, np.full((8 // jax.device_count(), 4), step))
    for shard in tree["new"].addressable_shards:
        np.testing.assert_array_equal(shard.data, np.arange(8)[shard.index])
    return [step, int(tree["count"]), list(resumed.initialised)]


def all_of_it(folder: str) -> Any:
    """One after the other, in one job."""
    path = f"{folder}/run"
    return [ends_by_signal(path), resumes(path), hears_of_jax(f"{folder}/other")]


def ends_for_good(path: str) -> None:
    """Process 1 gets the signal that ends a program: it ends both, after a last step."""
    with tr.Run(path) as run:
        run.save_on_signal(signal.SIGTERM)
        _looped(run, (1, signal.SIGTERM), lambda saved: False)


class Count:
    """An iterator whose state is one number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def get_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def saves_iterators(folder: str) -> tuple[str, list[int], int]:
    """Save iterators that differ, then equal ones; return the error of the first, the steps, and what came back."""
    told = ""
    with tr.Run(folder, timeout=60) as run:
        try:
            run.save(1, {"data": {"train": Count(jax.process_index())}, "mine": jax.process_index()}).result()
        except MismatchError as error:
            told = str(error)
        run.save(2, {"data": {"train": Count(5)}, "mine": jax.process_index()}).result()
        back: Any = run.load(like={"data": {"train": Count(0)}, "mine": 0})
    return told, run.steps(), back["data"]["train"].count


def _resumed(path: str, *, joint: bool, fallback: Any) -> list[Any]:
    """Resume a run; return the step, the least and the greatest number of this process's part, and what was told."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    placed: dict[str, Any] = {"shardings": [("w", ROWS), ("count", PartitionSpec())], "mesh": mesh} if joint else {}
    run = tr.Run(path, timeout=60)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StepPassedOverWarning)
        if joint:
            step, tree = run.load_or_init(_fresh, **placed, fallback=fallback)
        else:
            tree = run.load(fallback=fallback)
            step = int(tree["count"])
    shards = [np.asarray(shard.data) for shard in tree["w"].addressable_shards]
    told = [str(one.message) for one in caught if one.category is StepPassedOverWarning]
    return [step, float(min(map(np.min, shards))), float(max(map(np.max, shards))), told]


def goes_back(folder: str, joint: bool) -> list[Any]:
    """Resume a run of which each process sees its own copy, and only one sees the damage."""
    path = f"{folder}/{jax.process_index()}/run"
    ways = True, tr.Fallback(max_attempts=1), tr.Fallback(max_attempts=1)
    return [_resumed(path, joint=joint, fallback=fallback) for fallback in ways]


def goes_on_after_damage(path: str) -> list[Any]:
    """Resume past damage that all see, and save on: below the damaged step, in its place, and after it."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    run = tr.Run(path, keep=tr.KeepLast(1), timeout=60)
    with warnings.catch_warnings(action="ignore", category=StepPassedOverWarning):
        step, state = run.load_or_init(
            _fresh, shardings=[("w", ROWS), ("count", PartitionSpec())], mesh=mesh, fallback=True
        )
    seen: list[Any] = [step]
    with run:
        for number in (25, 30, 31):
            run.save(number, state)
            run.wait()
            seen.append(run.steps())
    return seen


def breaks_off_on_the_way_back(path: str) -> list[Any]:
    """Resume past damage; process 1 fails at the older step by itself. Return what was raised, and what goes on."""
    calls: list[int] = []

    def init() -> dict[str, Any]:
        calls.append(1)
        if jax.process_index() and len(calls) > 1:
            raise ValueError("no memory left for the model")
        return _fresh()

    run, told = tr.Run(path, timeout=60), ""
    try:
        run.load_or_init(init, fallback=tr.Fallback())
    except (ValueError, ProcessFailedError) as error:
        told = f"{type(error).__name__}: {error}"
    with warnings.catch_warnings(action="ignore", category=StepPassedOverWarning):
        step, _ = run.load_or_init(_fresh, fallback=tr.Fallback())
    return [told, step, run.attempts(20)]


def searches(own: str, roots: list[str], fallback: bool) -> list[Any]:
    """Resume a run with further roots, and save a step; return what was found, the error, and the steps afterwards."""
    run = tr.Run(own, search=[roots[jax.process_index()]], timeout=60)
    try:
        step, state = run.load_or_init(_fresh, fallback=fallback)
    except NotSharedError as error:
        return ["refused", list(error.processes)]
    with run:
        run.save((step or 0) + 1, state)
    return [step, int(state["count"]), run.steps(), run.latest()]


def finds_nothing_whole(folder: str) -> str:
    """Resume a run all of whose steps one process sees damaged."""
    try:
        tr.Run(f"{folder}/{jax.process_index()}/run", timeout=60).load_or_init(_fresh, fallback=True)
    except CorruptError as error:
        return str(error)
    return "began anew"


def follows(path: str) -> Any:
    """Save together, follow together, and call a function on process 0 alone."""
    called: list[int] = []
    run = tr.Run(path, keep=tr.KeepLast(1), timeout=_LONGEST, on_commit=lambda commit: called.append(commit.step))
    for number in (1, 2):
        run.save(number, _fresh()).result(_LONGEST)
    run.wait()
    kept = run.steps()
    seen: list[Any] = []
    watch = tr.Run(path, timeout=_LONGEST).watch(hold=True, timeout=0)
    for step in watch:
        seen.append(step)
        if step < 4:
            run.save(step + 2, _fresh()).result(_LONGEST)
            run.wait()
            seen.append(run.steps())
    with run.hold(4):  # each process by itself
        run.close()
    return [called, kept, seen]
