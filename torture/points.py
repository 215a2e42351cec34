"""Every fault at every call of a save: what is found afterwards is the old file or the new one, whole."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from torture.children import Answer, in_child
from torture.faults import Fault, Injector, Kind
from treering._store import direct, writing
from treering.serialization import load_from_file, save_to_file, to_bytes

__all__ = ["SCENES", "Report", "Scene", "content", "judge", "prepared", "rehearsed", "save_new", "sweep", "tree"]

_LEFT = ".state.msgpack.0123456789abcdef.treering-tmp"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One kind of save."""

    name: str
    """What people call it."""
    size: int
    """Bytes of the largest leaf."""
    old: bool
    """A file is there already."""
    straight: bool
    """Past the page cache, through a ring that is much smaller than the file."""
    folder: str = ""
    """Missing folders on the way."""
    link: bool = False
    """The path is a link to the file."""
    leftover: bool = False
    """A writer died here before."""


SCENES = (
    Scene(name="first", size=300, old=False, straight=False),
    Scene(name="first, in new folders", size=300, old=False, straight=False, folder="runs/a"),
    Scene(name="overwrite", size=300, old=True, straight=False),
    Scene(name="overwrite through a link", size=300, old=True, straight=False, link=True),
    Scene(name="overwrite after a crash", size=300, old=True, straight=False, leftover=True),
    Scene(name="overwrite, large, page cache", size=1_300_000, old=True, straight=False),
    Scene(name="overwrite, large, direct", size=1_300_000, old=True, straight=True),
    Scene(name="first, large, direct", size=1_300_000, old=False, straight=True),
)


@dataclasses.dataclass(slots=True, kw_only=True)
class Report:
    """What a sweep found."""

    points: dict[str, int] = dataclasses.field(default_factory=dict)
    """How many faults struck, by kind."""
    outcomes: dict[str, int] = dataclasses.field(default_factory=dict)
    """What became of the saves."""
    violations: list[str] = dataclasses.field(default_factory=list)
    """What must not be."""

    def count(self, kind: str, answer: Answer) -> None:
        """Count one fault and what became of its save."""
        outcome = "acknowledged" if answer.acknowledged else "error" if answer.error else "killed"
        self.points[kind] = self.points.get(kind, 0) + 1
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1


def tree(scene: Scene, version: int) -> dict[str, object]:
    """Return the state of a version: numpy only, so that no device is ever started."""
    noise = np.random.default_rng(version).integers(0, 256, scene.size, np.uint8)
    return {
        "step": version,
        "params": {"kernel": noise, "bias": np.full(7, version, np.float32)},
        "name": "s" * version,
    }


@functools.lru_cache(maxsize=4)
def content(scene: Scene, version: int) -> bytes:
    """Return the bytes of the file of a version."""
    return to_bytes(tree(scene, version))


def prepared(scene: Scene, base: Path) -> Path:
    """Make a fresh folder for the scene and return the path to save to."""
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir()
    path = base / scene.folder / "state.msgpack"
    if scene.link:
        (base / "far").mkdir()
        path.symlink_to("far/state.msgpack")
    if scene.old:
        path.write_bytes(content(scene, 1))
    if scene.leftover:
        (base / _LEFT).write_bytes(content(scene, 2)[:100])
    return path


def save_new(scene: Scene, path: Path, injector: Injector | None) -> None:
    """Save version 2, in a child."""
    writing.DIRECT_FROM = 0 if scene.straight else 1 << 62
    writing.FREE_SHARE = 0
    direct.BLOCK_BYTES = 128 << 10
    if injector is not None:
        injector.install()
    save_to_file(tree(scene, 2), path)


def judge(scene: Scene, path: Path, answer: Answer, *, killed: bool) -> Iterator[str]:
    """Yield what is wrong with what a save left at ``path``."""
    found = path.read_bytes() if path.exists() else None
    old = content(scene, 1) if scene.old else None
    if found not in (old, content(scene, 2)):
        yield f"neither the old nor the new file: {None if found is None else len(found)} bytes"
    if answer.acknowledged and found != content(scene, 2):
        yield "acknowledged, and not there"
    if answer.hung:
        yield "hung"
    if not answer.ours:
        yield f"not our error, or the file is not named: {answer.error}"
    if answer.kept:
        yield f"kept {answer.kept}"
    if scene.link and not path.is_symlink():
        yield "the link is gone"
    if not killed and not scene.leftover:
        left = [entry.name for entry in path.resolve().parent.glob(".*.treering-tmp")]
        if left:
            yield f"left {left} behind"
    yield from _next_save(scene, path)


def _next_save(scene: Scene, path: Path) -> Iterator[str]:
    target = path.resolve()
    try:
        save_to_file(tree(scene, 3), path)
    except OSError as error:
        yield f"the next save failed: {error}"
        return
    if path.read_bytes() != content(scene, 3):
        yield "the next save wrote something else"
    elif (names := [entry.name for entry in target.parent.iterdir()]) != [target.name] and not scene.link:
        yield f"the next save left {names}"


def rehearsed(scene: Scene, base: Path) -> list[str]:
    """Return the calls of an undisturbed save.

    Raises:
        RuntimeError: the save fails undisturbed, or its file does not load.
    """
    path = prepared(scene, base)
    injector = Injector(None)
    answer = in_child(functools.partial(save_new, scene, path, injector), path, injector.calls)
    if not answer.acknowledged or path.read_bytes() != content(scene, 2):
        raise RuntimeError(f"{scene.name}: the undisturbed save failed: {answer.error}")
    if load_from_file({"step": 0, "params": {"kernel": 0, "bias": 0}, "name": ""}, path)["step"] != 2:
        raise RuntimeError(f"{scene.name}: the file does not load")
    return answer.calls


def sweep(scene: Scene, base: Path, report: Report, kinds: Iterable[Kind] = Kind) -> None:
    """Let every fault strike at every call of one scene."""
    gc.freeze()  # children that collect nothing copy fewer pages
    calls = rehearsed(scene, base)
    for kind in kinds:
        for at, call in enumerate(calls, 1):
            if not kind.applies_to(call):
                continue
            path = prepared(scene, base)
            injector = Injector(Fault(kind=kind, at=at))
            answer = in_child(functools.partial(save_new, scene, path, injector), path, injector.calls)
            report.count(kind.value, answer)
            killed = kind in {Kind.KILL_BEFORE, Kind.KILL_AFTER}
            for wrong in judge(scene, path, answer, killed=killed):
                report.violations.append(f"{scene.name}: {kind.value} at call {at} ({call}): {wrong}")


def main() -> None:
    """Sweep the scenes named on the command line and print one JSON object: scene -> counts and violations.

    A kill after one call and a kill before the next differ by nothing that lasts, so the first kind is left out here.
    """
    kinds = [kind for kind in Kind if kind is not Kind.KILL_AFTER]
    found: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for scene in SCENES:
            if scene.name in sys.argv[1:]:
                report = Report()
                sweep(scene, Path(folder, "scene"), report, kinds)
                found[scene.name] = dataclasses.asdict(report)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
