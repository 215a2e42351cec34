"""Power cuts: the disk is copied at the moment a save returns, and at random moments, and the copy is started again."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from torture.images import Disk, disk, missing_reason
from torture.judging import fresh, next_save
from torture.peers import PEERS
from torture.points import Report, chosen, rehearsed
from torture.scenes import OLD, Scene

__all__ = ["power"]

_SCENES = [
    "first, in new folders",
    "overwrite",
    "checkpoint, first, in new folders",
    "checkpoint, overwrite",
    "checkpoint, overwrite, two files",
    "checkpoint, overwrite, large, direct",
    "leaves, first, in new folders",
    "leaves, overwrite beside others",
    "leaves, overwrite, large",
]
_MEMORY = Path("/dev/shm")
_PATIENCE_SECONDS = 120.0
_PEER = [sys.executable, "-W", "ignore", "-m", "torture.peers"]


def power(cuts: int, moments: int, seed: int, peers: int, names: list[str] | None) -> int:
    """Cut ``cuts`` times after and ``moments`` times during saves, ``peers`` times after each other way to save.

    Returns:
        The exit code: 1 when an acknowledged save was lost, when a mixed state was found, or when the controls show
        that nothing would have been seen.
    """
    reason = missing_reason()
    if reason is not None:
        print(f"power cuts: not done, {reason}; `python -m torture kill` shows what a process that dies leaves")
        return 0
    # jax dislikes every fork; no device and no thread has been started here.
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    wrong = 0
    # A disk in memory: what counts is what reaches it, and how fast is of no matter.
    place = str(_MEMORY) if _MEMORY.is_dir() else None
    for scene in chosen(names or _SCENES):
        report = Report()
        with tempfile.TemporaryDirectory(prefix="treering-power-", dir=place) as folder:
            rehearsed(scene, Path(folder, "rehearsal"))
            with disk(Path(folder)) as made:
                _after_saves(scene, made, cuts, report)
            Path(folder, "root").rmdir()
            with disk(Path(folder)) as made:
                _during_saves(scene, made, moments, random.Random(f"{seed}:{scene.name}"), report)
        print(f"{scene.name}: {', '.join(f'{count} {what}' for what, count in sorted(report.outcomes.items()))}")
        wrong += _told(report)
    return 1 if wrong + _controls(peers, place) else 0


def _told(report: Report) -> int:
    print(f"  {len(report.violations)} violations", flush=True)
    for line in report.violations:
        print(f"    {line}")
    return len(report.violations)


def _after_saves(scene: Scene, made: Disk, cuts: int, report: Report) -> None:
    """Cut as soon as a save has returned."""
    path = scene.prepared(made.root / "scene")
    for version in range(OLD + 1, OLD + 1 + cuts):
        if not scene.old:
            path = scene.prepared(made.root / f"scene-{version}")
        # What others put there is theirs to make durable; it also makes each cut see one save alone.
        made.configure()
        with _saver(scene, path, version - 1, go_on=False) as (_, acknowledged):
            if os.read(acknowledged, 1) != b".":
                report.violations.append(f"version {version} was not saved")
                return
            with made.cut() as root:
                found, wrong = _found(scene, root / path.relative_to(made.root))
        there = found == scene.ledger(version)
        _count(report, "acknowledged saves there" if there else "acknowledged saves LOST")
        if not there:
            report.violations.append(f"version {version} was acknowledged, and this was found: {found}")
        report.violations += (f"version {version}: {what}" for what in wrong)


def _during_saves(scene: Scene, made: Disk, moments: int, source: random.Random, report: Report) -> None:
    """Cut while one save follows the other."""
    path = scene.prepared(made.root / "scene")
    if not scene.old:
        scene.save(path, OLD, old=False)
    made.configure()
    with _saver(scene, path, OLD, go_on=True) as (child, acknowledged):
        version = OLD
        os.set_blocking(acknowledged, False)
        for _ in range(moments):
            time.sleep(source.random() * (0.05 + scene.size / 1e7))
            _stop(child)
            with contextlib.suppress(BlockingIOError):
                version += len(os.read(acknowledged, 1 << 16))
            with made.cut() as root:
                os.kill(child, signal.SIGCONT)
                found, wrong = _found(scene, root / path.relative_to(made.root))
            # The first version was put there by the harness; nobody promised anything.
            states = {scene.ledger(version): "cuts found the last acknowledged"}
            states[scene.ledger(version + 1)] = "cuts found the one in flight"
            _count(report, states.get(found, "cuts found SOMETHING ELSE") if found else "cuts found nothing")
            if found not in states and version > OLD:
                report.violations.append(f"{version} acknowledged, and this was found: {found}")
            report.violations += (f"{version} acknowledged: {what}" for what in wrong)


def _found(scene: Scene, path: Path) -> tuple[str | None, list[str]]:
    """Return what a fresh process finds, and what is wrong with the save after that."""
    found: str | None = fresh(functools.partial(scene.found, path))
    wrong = fresh(lambda: list(next_save(scene, path, old=found is not None)))
    return found, wrong if isinstance(wrong, list) else [f"the judge failed: {wrong}"]


@contextlib.contextmanager
def _saver(scene: Scene, path: Path, version: int, *, go_on: bool) -> Iterator[tuple[int, int]]:
    """Save the versions after ``version`` in a child, or only the next one; give the child and its acknowledgements."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            scene.configure()
            while True:
                version += 1
                scene.save(path, version, old=scene.old or go_on)
                os.write(writer, b".")
                if not go_on:
                    signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    try:
        yield child, reader
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)


def _stop(child: int) -> None:
    """Stop all threads of a process and wait until they stand: none of them is inside a call then."""
    os.kill(child, signal.SIGSTOP)
    end = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < end:
        states = [stat.read_text().rpartition(")")[2].split()[0] for stat in Path(f"/proc/{child}/task").glob("*/stat")]
        if set(states) == {"T"}:
            return
        time.sleep(0.001)
    raise RuntimeError("the saver does not stop")


def _count(report: Report, what: str) -> None:
    report.outcomes[what] = report.outcomes.get(what, 0) + 1


def _controls(rounds: int, place: str | None) -> int:
    """Cut after the saves of others; return 1 when that shows nothing, for then the cuts above show nothing either."""
    if not rounds:
        return 0
    blind = 0
    for name in PEERS:
        outcomes = Counter(_peer_after_save(name, place) for _ in range(rounds))
        there = outcomes.pop("there", 0)
        print(f"control, {name}: {there} of {rounds} acknowledged saves there")
        for outcome, count in outcomes.items():
            print(f"  {count} {outcome}", flush=True)
        # These two say what the harness sees: the one must be lost, the other there.
        if (name == "write, fsync, rename" and there) or ("fsync of the folder" in name and there != rounds):
            print("  the harness does not see what it should")
            blind = 1
    return blind


def _peer_after_save(name: str, place: str | None) -> str:
    """Return "there", or what was found instead; for the doubting, the same disk is cut again after a sync."""
    with tempfile.TemporaryDirectory(prefix="treering-power-", dir=place) as folder, disk(Path(folder)) as made:
        command = [*_PEER, "save", name, str(made.root / "saved")]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as saver:
            try:
                if saver.stdout is None or saver.stdout.readline() != b"saved\n":
                    return "not installed" if saver.wait() == 3 else "did not save"
                _stop(saver.pid)
                found = _peer_found(name, made)
                made.configure()
                durable = _peer_found(name, made)
            finally:
                saver.kill()
        return found if durable == "there" else f"no cut at all shows it: {durable}"


def _peer_found(name: str, made: Disk) -> str:
    with made.cut() as root:
        command = [*_PEER, "look", name, str(root / "saved")]
        looked = subprocess.run(command, capture_output=True, text=True, check=False)
        said = looked.stdout.strip().splitlines() or ["lost: the look failed"]
        return said[-1].replace(str(root), "")[:200]
