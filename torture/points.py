"""Every fault at every call of a save: what is found afterwards is the old state or the new one, whole."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from torture.checkpoint_scenes import BUT, CHECKPOINTS
from torture.children import Answer, in_child
from torture.faults import Fault, Injector, Kind
from torture.file_scenes import FILES
from torture.judging import NEW, fresh, judge
from torture.leaves_scenes import LEAVES
from torture.scenes import Scene

__all__ = ["SCENES", "Report", "chosen", "rehearsed", "save_new", "sweep", "sweep_load", "tell"]

SCENES: tuple[Scene, ...] = (*FILES, *CHECKPOINTS, *LEAVES)


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


def chosen(names: list[str] | None) -> list[Scene]:
    """Return the scenes of those names, or all."""
    return [scene for scene in SCENES if names is None or scene.name in names]


def tell(what: str, report: Report) -> None:
    """Print a report; nothing when nothing was done."""
    if not report.points:
        return
    points = ", ".join(f"{count} {kind}" for kind, count in sorted(report.points.items()))
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(report.outcomes.items()))
    print(f"{what}: {points}")
    print(f"  {outcomes}")
    print(f"  {len(report.violations)} violations")
    for line in report.violations:
        print(f"    {line}")


def save_new(scene: Scene, path: Path, injector: Injector | None) -> None:
    """Save the version that is attacked, in a child."""
    scene.configure()
    if injector is not None:
        injector.install()
    scene.save(path, NEW, old=scene.old)


def rehearsed(scene: Scene, base: Path) -> list[str]:
    """Return the calls of an undisturbed save.

    Raises:
        RuntimeError: the save fails undisturbed, or what it saved does not load.
    """
    # Once in this process: what is imported or cached at the first time is no part of the others.
    path = scene.prepared(base)
    scene.save(path, NEW, old=scene.old)
    scene.found(path)
    path = scene.prepared(base)
    injector = Injector(None)
    answer = in_child(functools.partial(save_new, scene, path, injector), path, injector.calls)
    found = fresh(functools.partial(scene.found, path))
    if not answer.acknowledged or found != scene.ledger(NEW):
        raise RuntimeError(f"{scene.name}: the undisturbed save failed: {answer.error or found}")
    return answer.calls


def sweep(scene: Scene, base: Path, report: Report, kinds: Iterable[Kind] = Kind, *, stride: int = 1) -> None:
    """Let every fault strike at every call of one scene, or at every few calls, other ones for each kind."""
    calls = rehearsed(scene, base)
    gc.collect()
    gc.freeze()  # children that collect nothing copy fewer pages
    for number, kind in enumerate(kinds):
        for at, call in enumerate(calls, 1):
            if not kind.applies_to(call) or (at + number) % stride:
                continue
            path = scene.prepared(base)
            injector = Injector(Fault(kind=kind, at=at))
            answer = in_child(functools.partial(save_new, scene, path, injector), path, injector.calls)
            report.count(kind.value, answer)
            killed = kind in {Kind.KILL_BEFORE, Kind.KILL_AFTER}
            for wrong in judge(scene, path, answer, killed=killed, call=call):
                report.violations.append(f"{scene.name}: {kind.value} at call {at} ({call}): {wrong}")


def sweep_load(scene: Scene, base: Path, report: Report) -> None:
    """Let every error strike at every call of a load: it gives what was saved, or our error."""
    path = scene.prepared(base)
    scene.save(path, NEW, old=scene.old)
    load = functools.partial(_load, scene, path)
    load(None)
    rehearsal = Injector(None)
    calls = in_child(functools.partial(load, rehearsal), path, rehearsal.calls).calls
    for kind in (Kind.EIO, Kind.EMFILE, Kind.SHORT):
        for at, call in enumerate(calls, 1):
            if kind.applies_to(call):
                injector = Injector(Fault(kind=kind, at=at))
                answer = in_child(functools.partial(load, injector), path, injector.calls)
                report.count(kind.value, answer)
                where = f"{scene.name}, loaded: {kind.value} at call {at} ({call})"
                if answer.hung or answer.kept or not answer.ours:
                    report.violations.append(f"{where}: {answer}")
                if not answer.acknowledged and not answer.error:
                    report.violations.append(f"{where}: something else was loaded, or another error raised")


def _load(scene: Scene, path: Path, injector: Injector | None) -> None:
    if injector is not None:
        injector.install()
    found = scene.found(path)
    # A file that verify cannot read is a finding, not an error.
    if found != scene.ledger(NEW) and not str(found).startswith(BUT):
        raise AssertionError("another state")


def main() -> None:
    """Sweep the scenes named on the command line and print one JSON object: scene -> counts and violations.

    The first argument is the stride: 1 for every call.

    A kill after one call and a kill before the next differ by nothing that lasts, so the first kind is left out here.
    """
    kinds = [kind for kind in Kind if kind is not Kind.KILL_AFTER]
    found: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for scene in SCENES:
            if scene.name in sys.argv[2:]:
                report = Report()
                sweep(scene, Path(folder, "scene"), report, kinds, stride=int(sys.argv[1]))
                found[scene.name] = dataclasses.asdict(report)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
