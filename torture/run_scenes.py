"""Saves in the background: of a checkpoint, and of steps of a run that removes others afterwards."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar, Final

import treering
from torture.checkpoint_scenes import BUT, CheckpointScene
from torture.children import PATIENCE_SECONDS
from torture.run_kills import litter
from torture.scenes import OLD, Scene, fingerprint, state

__all__ = ["IN_BACKGROUND", "BackgroundScene", "RunScene"]

# A version that nobody looks for.
_OTHER: Final = 9
_FOREIGN: Final = {"notes.txt": b"mine", "plots/1": b"?"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundScene(CheckpointScene):
    """``treering.save_async`` into a folder."""

    def begin(self, path: Path, version: int, *, old: bool) -> Any:
        """Begin a save and return what one waits for."""
        return treering.save_async(path, state(self.size, version), overwrite=old)

    def go_on(self, path: Path) -> None:
        """Do what a program does next, that never asked how the save ended.

        Raises:
            AssertionError: nothing was saved, and nobody says so.
        """
        if (path / "treering.json").exists():
            treering.load(path)
            return
        treering.save_async(path, {})
        raise AssertionError("the next save begins as if nothing had happened")

    def save(self, path: Path, version: int, *, old: bool) -> None:
        """Save a version, and wait for it."""
        self.begin(path, version, old=old).result(PATIENCE_SECONDS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunScene(Scene):
    """``Run.save`` of a step; after its commit the step before it has to go."""

    back: bool = False
    """The step that is saved takes the place of itself and of a later one: another branch."""

    target: ClassVar[str] = "run"
    entries: ClassVar[int] = 20

    def furnish(self, path: Path) -> None:
        """Put the old steps there, and files of others."""
        for name, content in _FOREIGN.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
        if not self.old:
            return
        # One process that lives on prepares hundreds of these: no thread of a save may be left in it.
        later = {OLD + 1: _OTHER, OLD + 2: OLD} if self.back else {OLD: OLD}
        for step, version in later.items():
            facts = {"step": step, "saved": f"2026-01-01T00:00:{step:02d}Z", "metrics": {}, "temporary": False}
            place = path / f"step_{step:08d}"
            treering.save(place, state(self.size, version), metadata={"treering": {**facts, "branch": None}})

    def begin(self, path: Path, version: int, *, old: bool) -> Any:  # noqa: ARG002 - as the other scene's
        """Begin a save and return what one waits for."""
        run = treering.Run(path, keep=treering.KeepLast(1))
        back = self.back and version <= (run.latest() or 0)
        return run.save(version, state(self.size, version), rollback=back).pending

    def go_on(self, path: Path) -> None:
        """Do what a program does next, that never asked how the save ended.

        Raises:
            AssertionError: nothing was saved, and nobody says so.
        """
        run = treering.Run(path)
        if run.steps():
            run.load()
            return
        run.save(OLD, {})
        raise AssertionError("the next save begins as if nothing had happened")

    def save(self, path: Path, version: int, *, old: bool) -> None:
        """Save a version as the step of that number, and wait for it."""
        self.begin(path, version, old=old).result(PATIENCE_SECONDS)

    def ledger(self, version: int) -> str:
        """Return the fingerprint of the state itself."""
        return fingerprint(state(self.size, version))

    def found(self, path: Path) -> str | None:
        """Load the latest step and verify, which must agree."""
        run = treering.Run(path)
        step = run.latest()
        if step is None:
            return None
        tree: Any = run.load()
        if self.back and fingerprint(tree) == self.ledger(OLD):
            # Of one branch or of the other: with the latest step of the old one go the steps before it.
            mixed = [each for each in run.steps()[:-1] if fingerprint(run.load(each)) != self.ledger(_OTHER)]
            if mixed:
                return f"{BUT} before the latest step, which is of the old branch, steps {mixed} are of the new one"
        verified = treering.verify(path / f"step_{step:08d}")
        return fingerprint(tree) if verified else f"{BUT} {verified}"

    def litter(self, path: Path) -> list[str]:
        """Return what is not of the latest step, and not somebody else's."""
        if not path.exists():
            return []
        older = [f"step {step}" for step in treering.Run(path).steps()[:-1]]
        return older + litter(path, _FOREIGN)

    def harmed(self, path: Path) -> list[str]:
        """Say which files of others are gone or changed."""
        return [
            f"{name} of somebody else is gone"
            for name, content in _FOREIGN.items()
            if not (path / name).exists() or (path / name).read_bytes() != content
        ]


IN_BACKGROUND: Final = (
    BackgroundScene(name="background, first"),
    BackgroundScene(name="background, overwrite", old=True),
    BackgroundScene(name="background, overwrite after a crash", old=True, leftover=True),
    BackgroundScene(name="background, overwrite, large, direct", size=1_300_000, old=True, straight=True),
    RunScene(name="run, first step"),
    RunScene(name="run, next step", old=True),
    RunScene(name="run, another branch", old=True, back=True),
)
