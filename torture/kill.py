"""Kills: at every call, at every system call, and at random times while one save follows the other."""

from __future__ import annotations

import functools
import os
import random
import re
import signal
import tempfile
import time
import warnings
from pathlib import Path

from torture.faults import Kind
from torture.judging import fresh
from torture.points import Report, chosen, sweep, tell
from torture.scenes import OLD, Scene
from torture.traced import kill_everywhere, missing_reason

__all__ = ["kill"]

_ATTEMPT = re.compile(r"[0-9a-f]{16}")


def kill(rounds: int, seed: int, names: list[str] | None) -> int:
    """Run all three over the scenes of those names (None: all) and print what was found.

    Returns:
        The exit code: 1 when something was lost.
    """
    # jax dislikes every fork; no device and no thread has been started here.
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    calls, traced, times = Report(), Report(), Report()
    reason = missing_reason()
    scenes = chosen(names)
    with tempfile.TemporaryDirectory(prefix="treering-kill-") as folder:
        base = Path(folder, "scene")
        for scene in scenes:
            sweep(scene, base, calls, (Kind.KILL_BEFORE, Kind.KILL_AFTER))
            if reason is None:
                kill_everywhere(scene, base, traced)
            print(f"{scene.name}: done", flush=True)
        for scene in scenes:
            if scene.old and not scene.link and not scene.leftover:
                _random_kills(scene, base, rounds, random.Random(f"{seed}:{scene.name}"), times)
    tell("every call into os", calls)
    if reason is None:
        tell("every system call (strace)", traced)
    else:
        print(f"every system call: not done, {reason}; the calls into os stand for them")
    tell(f"random times (seed {seed})", times)
    return 1 if calls.violations or traced.violations or times.violations else 0


def _random_kills(scene: Scene, base: Path, rounds: int, source: random.Random, report: Report) -> None:
    """Save version after version in a child, kill it, look; each child goes on from what the last one left."""
    path = scene.prepared(base)
    version = OLD
    for _ in range(rounds):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _save_on_and_on(scene, path, version, writer)
        os.close(writer)
        os.read(reader, 1)  # it has begun
        time.sleep(source.random() * (0.05 + scene.size / 1e7))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        acknowledged = version + _received(reader)
        found = fresh(functools.partial(scene.found, path))
        report.points["kill"] = report.points.get("kill", 0) + 1
        if found == scene.ledger(acknowledged):
            outcome = "the last acknowledged"
            version = acknowledged
        elif found == scene.ledger(acknowledged + 1):
            outcome = "the one in flight"
            version = acknowledged + 1
        else:
            report.violations.append(f"{scene.name}: {acknowledged} acknowledged, found {found}")
            return
        report.outcomes[outcome] = report.outcomes.get(outcome, 0) + 1
        attempts = _with_content(scene, path)
        if scene.sweeps_first and len(attempts) > 1:
            report.violations.append(f"{scene.name}: leftovers of {len(attempts)} attempts at once")
        report.violations += (f"{scene.name}: {what}" for what in scene.harmed(path))


def _with_content(scene: Scene, path: Path) -> set[str]:
    """Return the attempts that left more than an empty file.

    A saver that dies before it has swept leaves its own empty journal beside what the dead one before it left; but
    it sweeps before it writes, so what was written is never that of two.
    """
    folder = path.resolve()
    if not folder.is_dir():
        folder = folder.parent
    names = [name for name in scene.litter(path) if (folder / name).stat().st_size]
    return {match[0] for name in names if (match := _ATTEMPT.search(name))}


def _save_on_and_on(scene: Scene, path: Path, version: int, pipe: int) -> None:
    scene.configure()
    try:
        os.write(pipe, b"!")
        while True:
            version += 1
            scene.save(path, version, old=True)
            os.write(pipe, b".")
    finally:
        os._exit(1)


def _received(reader: int) -> int:
    with os.fdopen(reader, "rb") as file:
        return len(file.read())
