"""Workers of `test_failures`: loops that go on when a save of theirs fails, and that a signal reaches between saves."""

from __future__ import annotations

import errno
import os
import signal
import threading
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import treering as tr
from tests import faults
from tests.multiprocess.jobs import say
from tests.multiprocess.meetings import meetings_seen, time_limits_seen
from tests.multiprocess.refusals import tree
from treering.errors import SaveFailedWarning, TreeringError

_GENEROUS = 60.0


class Data:
    """An iterator that cannot give its state on one process."""

    def __init__(self, *, broken: bool) -> None:
        self._broken = broken

    def get_state(self) -> dict[str, int]:
        if self._broken:
            raise OSError(errno.EIO, "the pipe burst")
        return {"position": 1}

    def set_state(self, state: dict[str, int]) -> None: ...


def goes_on(folder: str) -> list[list[Any]]:
    """Train over failing saves of one process; return what each call warned of, raised and counted."""
    last = jax.process_index() == jax.process_count() - 1
    run = tr.Run(f"{folder}/run", keep=tr.KeepLast(2), timeout=_GENEROUS, on_save_error="warn", max_failures=2)
    # The processes need each other in each step, as in a training: one that raised alone would hold up the rest.
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    state = jax.device_put(jnp.zeros(jax.device_count()), NamedSharding(mesh, PartitionSpec("x")))
    train = jax.jit(lambda state: state + state.sum() + 1)
    found: list[list[Any]] = []

    def save(step: int, *, full: bool = False, broken: bool = False) -> None:
        nonlocal state
        state = jax.block_until_ready(train(state))
        raised = None
        with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("always", SaveFailedWarning)
            if full and last:
                faults.fail(patch, os, "fsync", errno.ENOSPC)
            try:
                saved = run.save(step, {"state": tree(step), "data": Data(broken=broken and last)})
                while saved.pending is not None and not saved.pending.done():
                    pass
            except TreeringError as error:
                raised = type(error).__name__
        found.append([step, [str(one.message) for one in caught], raised, run.status().failures])

    save(1)
    save(2, full=True)
    save(3)
    save(4, broken=True)
    save(5)
    save(6, full=True)
    save(7, broken=True)
    save(8)
    save(9)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always", SaveFailedWarning)
        run.wait(_GENEROUS)
    return [*found, [run.steps(), run.status().step, float(state.sum())]]


def tells_the_others(folder: str) -> list[list[Any]]:
    """Let the last process alone have had too many failures: it hears less than the others, so to speak."""
    last = jax.process_index() == jax.process_count() - 1
    most = 1 if last else 5
    run = tr.Run(f"{folder}/other", timeout=_GENEROUS, on_save_error="warn", max_failures=most)
    found: list[list[Any]] = []
    for step in range(1, 5):
        raised = None
        with warnings.catch_warnings(action="ignore"), pytest.MonkeyPatch.context() as patch:
            if last and step == 1:
                faults.fail(patch, os, "fsync", errno.ENOSPC)
            try:
                saved = run.save(step, tree(step))
                while saved.pending is not None and not saved.pending.done():
                    pass
            except TreeringError as error:
                raised = type(error).__name__
        found.append([step, raised])
    run.close()
    return [*found, run.steps()]


def _evaluates(run: tr.Run, signum: int) -> tuple[int, int, tr.run.Preemption, int]:
    """Ask between saves until something is heard; the last process gets a signal. Return where, what, and meetings."""
    this, last = jax.process_index(), jax.process_count() - 1
    pause = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        meetings = meetings_seen(patch)
        for step in range(10_000):
            for batch in range(3):
                if (step, batch, this) == (5, 1, last):
                    os.kill(os.getpid(), signum)
                heard = run.preempted(step, batch=batch)
                assert run.preempted(step, batch=batch) is heard
                if heard:
                    return step, batch, heard, len(meetings)
                pause.wait(0.002 * (1 + this))
    raise AssertionError("nothing was heard")


def hears_between_saves(folder: str) -> list[Any]:
    """Hear of another process's signal in an evaluation, save a last step with that deadline, and hear the signal."""
    caught: list[int] = []
    signal.signal(signal.SIGUSR1, lambda signum, frame: caught.append(signum))
    with tr.Run(f"{folder}/run", save_every=tr.SaveEvery(steps=100_000), timeout=_GENEROUS) as run:
        run.save_on_signal(signal.SIGUSR1, grace=50)
        step, batch, heard, meetings = _evaluates(run, signal.SIGUSR1)
        left = heard.seconds_left
        with pytest.MonkeyPatch.context() as patch:
            limits = time_limits_seen(patch)
            saved = run.save(step, tree(step))
        told = [saved.saved, saved.reason, caught == [signal.SIGUSR1]]
        after = bool(run.save(step + 1, tree(step + 1)))
    is_bounded = left is not None and 30 < limits[0] <= left <= 50
    return [[step, batch, heard.reason, meetings, is_bounded], told, after, tr.Run(f"{folder}/run").steps()]


def ends_between_saves(folder: str) -> None:
    """Hear of the signal that ends programs, which treering's handler took from jax's; save a last step, and end."""
    run = tr.Run(f"{folder}/run", save_every=tr.SaveEvery(steps=100_000), timeout=_GENEROUS)
    run.save_on_signal(signal.SIGTERM)
    step, batch, heard, meetings = _evaluates(run, signal.SIGTERM)
    say(f"{step} {batch} {meetings} {heard.seconds_left}")
    run.save(step, tree(step))


def hears_of_jax_between_saves(folder: str) -> list[Any]:
    """Hear what jax heard, without a handler of treering's."""
    with tr.Run(f"{folder}/run", save_every=tr.SaveEvery(steps=100_000), timeout=_GENEROUS) as run:
        step, batch, heard, meetings = _evaluates(run, signal.SIGTERM)
        saved = run.save(step, tree(step))
        return [step, batch, heard.reason, meetings, saved.saved, bool(run.save(step + 1, tree(step + 1)))]


def cannot_hear(folder: str) -> str:
    """Ask where a handler of the program took the place of jax's."""
    before = signal.signal(signal.SIGTERM, lambda signum, frame: None)
    try:
        with tr.Run(f"{folder}/run") as run:
            run.save_on_signal(signal.SIGUSR1)
            try:
                run.preempted(1)
            except TreeringError as error:
                return f"{type(error).__name__}: {error}"
    finally:
        signal.signal(signal.SIGTERM, before)
    return "nothing"
