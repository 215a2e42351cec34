"""Every fault at every call of the removal of a step; a program, so that its children are cheap to fork.

``python -m tests.store.removal_points 1 "KILL_BEFORE EIO EIO_AFTER ENOSPC EMFILE SHORT"`` does all of it.
"""

import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.on_disk import step_path
from tests.store import checkpoints
from tests.store.checkpoints import attempt_of, load, save_step, steps_of, tidy
from torture.children import Answer, in_child
from torture.faults import Fault, Injector, Kind
from treering.errors import TreeringError

STEPS = (10, 20, 30)
REMOVED = 20
USERS = {"notes.txt": b"by hand", "logs/a.txt": b"by hand", "step_20/x": b"by hand", "step_00000030/mine": b"by hand"}
MORE_USERS = {"step_00000020/mine": b"by hand", f"step_00000020/data-{'9' * 16}-00000-of-00001.safetensors": b"?"}
DEAD = "0123456789abcdef"


def remove(run: Path) -> bool:
    return checkpoints.remove(run, REMOVED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """One removal."""

    name: str
    act: Callable[[Path], Any] = remove
    users: bool = False
    """Files of somebody else lie in the step's folder too."""
    replaced: bool = False
    """The step replaced another, whose files could not be removed then."""
    leftover: bool = False
    """A save of this step died before."""
    cut_short: bool = False
    """The step was removed before, but for its files."""
    saved_anew: bool = False
    """And saved again since, by one who could not remove them."""

    def prepared(self, base: Path) -> Path:
        """Make the run anew, from a copy that was made once: copies wait for no disk."""
        run, first = base / "run", base / "first"
        if not first.exists():
            self.furnish(first)
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(first, run)
        return run

    def furnish(self, run: Path) -> None:
        for step in STEPS:
            save_step(run, step, payload(step))
        for name, content in {**USERS, **(MORE_USERS if self.users else {})}.items():
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (run / name).write_bytes(content)
        folder = step_path(run, REMOVED)
        index = folder / "treering.json"
        if self.replaced:
            files, _ = json.loads(index.read_text())
            (folder / f"data-{DEAD}-00000-of-00001.safetensors").write_bytes(b"old")
            index.write_text(json.dumps([files, [f"data-{DEAD}-00000-of-00001.safetensors"]]))
        if self.leftover:
            (folder / f".treering.json.{DEAD}.treering-tmp").write_bytes(b"")
            (folder / f"data-{DEAD}-00000-of-00001.safetensors").write_bytes(b"died")
        if self.cut_short:
            live = index.read_bytes()
            index.rename(folder / f".treering.json.{attempt_of(live)}.removed")
        if self.saved_anew:
            shutil.copytree(step_path(run, 10), folder, dirs_exist_ok=True)

    def wrong_after(self, run: Path, answer: Answer, *, killed: bool) -> Iterator[str]:
        gone = REMOVED not in steps_of(run)
        if answer.acknowledged and self.act is remove and not gone:
            yield "acknowledged, and still there"
        if answer.hung or answer.kept or not (answer.ours or killed):
            yield f"{answer}"
        yield from self.wrong(run)
        try:
            tidy(run)
            yield from self.wrong(run)
            if not gone and not (self.act is tidy and self.cut_short and not self.saved_anew):
                remove(run)
            yield from (f"{name} is left" for name in self.litter(run))
            if not self.users:
                save_step(run, REMOVED, payload(5))
        except TreeringError as error:
            yield f"the next one fails: {error}"

    def wrong(self, run: Path) -> Iterator[str]:
        """What must hold whatever happened: a step is whole or not there, and nobody else's file is gone."""
        there = steps_of(run)
        if not set(STEPS) - {REMOVED} <= set(there) <= set(STEPS):
            yield f"the steps are {there}"
        for step in there:
            wanted = payload(10 if self.saved_anew and step == REMOVED else step)
            try:
                if load(step_path(run, step)) != wanted:
                    yield f"step {step} holds something else"
            except TreeringError as error:
                yield f"step {step} counts, and is not whole: {error}"
        for name, content in {**USERS, **(MORE_USERS if self.users else {})}.items():
            if not (run / name).is_file() or (run / name).read_bytes() != content:
                yield f"{name} is harmed"

    def litter(self, run: Path) -> list[str]:
        folder = step_path(run, REMOVED)
        users = {Path(name).name for name in MORE_USERS} if self.users else set()
        if not folder.exists():
            return []
        return sorted({path.name for path in folder.iterdir()} - users) or ([] if users else ["the folder"])


def payload(step: int) -> bytes:
    return bytes([step]) * (step * 3)


SCENES = (
    Scene(name="removed"),
    Scene(name="among files", users=True),
    Scene(name="with what it replaced", replaced=True),
    Scene(name="with what died", leftover=True),
    Scene(name="finished", act=tidy, cut_short=True),
    Scene(name="finished among files", act=tidy, cut_short=True, users=True),
    Scene(name="finished beside a new one", act=tidy, cut_short=True, saved_anew=True),
    Scene(name="swept", act=tidy, leftover=True),
)


def sweep(scene: Scene, base: Path, kinds: list[Kind], stride: int) -> tuple[int, list[str]]:
    """Return at how many calls something struck, and what was wrong then."""

    def struck(injector: Injector) -> Answer:
        def act() -> None:
            injector.install()
            scene.act(run)

        run = scene.prepared(base)
        return in_child(act, run, injector.calls)

    calls = struck(Injector(None)).calls
    found: list[str] = []
    points = 0
    for number, kind in enumerate(kinds):
        for at, call in enumerate(calls, 1):
            if kind.applies_to(call) and not (at + number) % stride:
                answer = struck(Injector(Fault(kind=kind, at=at)))
                points += 1
                wrong = scene.wrong_after(base / "run", answer, killed=kind is Kind.KILL_BEFORE)
                found += [f"{kind.value} at call {at} ({call}): {line}" for line in wrong]
    return points, found


def main() -> None:
    """Sweep every few calls of each scene, and print what was found."""
    stride, kinds = sys.argv[1:]
    for scene in SCENES:
        with tempfile.TemporaryDirectory() as folder:
            points, wrong = sweep(scene, Path(folder, "base"), [Kind[kind] for kind in kinds.split()], int(stride))
        sys.stdout.write(json.dumps([scene.name, points, wrong]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
