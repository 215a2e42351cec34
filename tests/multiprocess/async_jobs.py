"""Workers of `test_async_jobs`: processes that save in the background, and one of them is struck."""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import treering as tr
from tests.multiprocess.jobs import hear, say
from tests.multiprocess.meetings import told
from tests.multiprocess.refusals import tree
from torture.process_points import Point, install

_GENEROUS = 60.0
_ANSWER = "@answer "


def answer_of(text: str) -> dict[str, Any] | None:
    """Return what a worker answered; None where it said something else."""
    said: dict[str, Any] | None = json.loads(text.removeprefix(_ANSWER)) if text.startswith(_ANSWER) else None
    return said


def obeys(folder: str) -> None:
    """Do what the test says, one command after the other, and answer each."""
    obey(_COMMANDS, folder)


def obey(commands: Mapping[str, Callable[..., Any]], folder: str) -> None:
    """Carry out the commands of the test by their names until it says that there are no more."""
    while (command := json.loads(hear()))["do"] != "end":
        say(_ANSWER + json.dumps(told(functools.partial(commands[command.pop("do")], Path(folder), **command))))


def arm(folder: Path, *, point: dict[str, Any], action: str | Callable[[], None]) -> None:
    """Stand still for good, die, or do something, the next time that this process comes to a point."""
    struck = False

    def act() -> None:
        nonlocal struck
        if not struck:
            struck = True
            say(f"at {point['name']}")
            if callable(action):
                action()
            elif action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                # To this thread: of a signal to the process another thread may be told, while this one goes on.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    install(Point(**point), act)


def _step(folder: Path, *, number: int, timeout: float = _GENEROUS) -> None:
    """Save a step of a run and wait for it."""
    tr.Run(folder / "run", keep=tr.KeepLast(2), timeout=timeout).save(number, tree(number)).result()


def _checkpoint(folder: Path, *, number: int, timeout: float = _GENEROUS) -> None:
    """Save a checkpoint in the background and wait for it."""
    tr.save_async(folder / "ckpt", tree(number), overwrite=True, timeout=timeout).result()


_COMMANDS: dict[str, Callable[..., Any]] = {"arm": arm, "run": _step, "ckpt": _checkpoint}


def trains(folder: str) -> dict[str, Any]:
    """Save every step of a loop that gives its buffers away, some to other paths; what is asked for later is there."""
    base = Path(folder)
    move = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    arrays = {"w": tree(0)["w"]}
    own = np.zeros(5)
    with tr.Run(base / "run", keep=tr.KeepLast(2), timeout=_GENEROUS) as run:
        saved, aside = [], []
        for step in range(1, 6):
            arrays = move(arrays)
            own += 1
            saved.append(run.save(step, {"own": own, "step": step, **arrays}, metrics={"loss": 1 / step}))
            aside.append(tr.save_async(base / f"aside {step}", {"step": step, **arrays}, timeout=_GENEROUS))
            own += 1000
            own -= 1000
        arrays = move(arrays)
        own += 1000
        run.wait(_GENEROUS)
        done = [one.pending is not None and one.pending.done() for one in saved]
        for pending in aside:
            pending.result(_GENEROUS)
    found = tr.Run(base / "run", timeout=_GENEROUS)
    return {"done": done, "steps": found.steps(), "latest": found.latest(), "best": found.best("loss")}


def refused(folder: str) -> list[dict[str, Any]]:
    """Let process 1 bring what cannot be saved, and process 0 what cannot be committed; then save."""
    base, number = Path(folder), jax.process_index()
    run = tr.Run(base / "run", timeout=_GENEROUS)
    odd: dict[str, Any] = {"odd": object()} if number == 1 else {"odd": 1}

    def save(step: int, what: Any, **options: Any) -> dict[str, Any]:
        return told(lambda: run.save(step, what, **options).result(_GENEROUS))

    found = [save(1, tree(1)), save(2, tree(2) | odd), save(2, tree(2)), save(2, tree(2)), save(1, tree(1))]
    found.append(save(2, tree(20), rollback=True))
    return [*found, told(lambda: [run.steps(), float(np.asarray(tr.load(base / "run" / "step_00000002")["w"])[0, 0])])]


def not_asked(folder: str) -> list[Any]:
    """Let the last process stay away from a save whose result nobody asks for: the next save says so."""
    last = jax.process_index() == jax.process_count() - 1
    run = tr.Run(Path(folder) / "run", timeout=_GENEROUS)
    found: list[Any] = [told(lambda: run.save(1, tree(1)).result(_GENEROUS))]
    impatient = tr.Run(Path(folder) / "run", timeout=3)
    if last:
        say("stays away")
        hear()
        found.append(told(lambda: impatient.save(2, tree(2)).result(_GENEROUS)))
        found.append(told(lambda: run.save(3, tree(3)).result(_GENEROUS)))
    else:
        saved = impatient.save(2, tree(2))
        found.append(told(lambda: saved.result(0.01)))
        while saved.pending is not None and not saved.pending.done():
            jax.block_until_ready(jax.numpy.zeros(1000) + 1)
        found.append(told(lambda: run.save(3, tree(3))))
        say("has heard")
        hear()
    return [*found, told(lambda: run.save(4, tree(4)).result(_GENEROUS)), told(run.latest)]
