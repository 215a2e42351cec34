"""Kills and errors: at every call, at every system call, and at random times while one save follows the other."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
import warnings
from pathlib import Path

from torture.points import SCENES, Report, Scene, content, prepared, sweep, tree
from torture.traced import missing_reason, sweep_traced
from treering._store import direct, writing
from treering.serialization import save_to_file

__all__ = ["kill"]


def kill(rounds: int, seed: int, names: list[str] | None) -> int:
    """Run all three over the scenes of those names (None: all) and print what was found.

    Returns:
        The exit code: 1 when something was lost.
    """
    # jax dislikes every fork; no device and no thread has been started here.
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    calls, traced, times = Report(), Report(), Report()
    reason = missing_reason()
    scenes = [scene for scene in SCENES if names is None or scene.name in names]
    with tempfile.TemporaryDirectory(prefix="treering-kill-") as folder:
        base = Path(folder, "scene")
        for scene in scenes:
            sweep(scene, base, calls)
            if reason is None:
                sweep_traced(scene, base, traced)
            print(f"{scene.name}: done", flush=True)
        for scene in scenes:
            if scene.old and not scene.link and not scene.leftover:
                _random_kills(scene, base, rounds, random.Random(f"{seed}:{scene.name}"), times)
    _tell("every call into os", calls)
    if reason is None:
        _tell("every system call (strace)", traced)
    else:
        print(f"every system call: not done, {reason}; the calls into os stand for them")
    _tell(f"random times (seed {seed})", times)
    return 1 if calls.violations or traced.violations or times.violations else 0


def _random_kills(scene: Scene, base: Path, rounds: int, source: random.Random, report: Report) -> None:
    """Save version after version in a child, kill it, look; each child goes on from what the last one left."""
    path = prepared(scene, base)
    version = 1
    for _ in range(rounds):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _save_on_and_on(scene, path, version, writer)
        os.close(writer)
        os.read(reader, 1)  # it has begun
        time.sleep(source.random() * 0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        acknowledged = version + _received(reader)
        found = path.read_bytes()
        report.points["kill"] = report.points.get("kill", 0) + 1
        if found == content(scene, acknowledged):
            outcome = "the last acknowledged"
            version = acknowledged
        elif found == content(scene, acknowledged + 1):
            outcome = "the one in flight"
            version = acknowledged + 1
        else:
            report.violations.append(f"{scene.name}: {acknowledged} acknowledged, found {len(found)} other bytes")
            return
        report.outcomes[outcome] = report.outcomes.get(outcome, 0) + 1
        left = len(list(path.parent.glob(".*.treering-tmp")))
        if left > 1:
            report.violations.append(f"{scene.name}: {left} leftovers at once")


def _save_on_and_on(scene: Scene, path: Path, version: int, pipe: int) -> None:
    writing.DIRECT_FROM = 0 if scene.straight else 1 << 62
    writing.FREE_SHARE = 0
    direct.BLOCK_BYTES = 128 << 10
    try:
        os.write(pipe, b"!")
        while True:
            version += 1
            save_to_file(tree(scene, version), path)
            os.write(pipe, b".")
    finally:
        os._exit(1)


def _received(reader: int) -> int:
    with os.fdopen(reader, "rb") as file:
        return len(file.read())


def _tell(what: str, report: Report) -> None:
    points = ", ".join(f"{count} {kind}" for kind, count in sorted(report.points.items()))
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(report.outcomes.items()))
    print(f"{what}: {points}")
    print(f"  {outcomes}")
    print(f"  {len(report.violations)} violations")
    for line in report.violations:
        print(f"    {line}")
