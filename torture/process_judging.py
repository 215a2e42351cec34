"""What must be after one process of a job was struck: who may say what, and what lies in the folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from torture.judging import fresh, told
from torture.process_jobs import Answer, Said
from torture.process_points import Point
from torture.process_scenes import NEW, OLD, JointScene
from torture.process_workers import Action, Layer

__all__ = ["Case", "judged", "outcome"]

# Words by which an error says that what was saved is there, or may be.
_MAY_BE_THERE: Final = ("known", "in place", "committed")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is attacked, where and how."""

    scene: JointScene
    """The call."""
    layer: Layer
    """What makes a job of the processes."""
    count: int
    """Processes of the job."""
    victim: int
    """Which of them is struck."""
    point: Point
    """Where."""
    action: Action
    """How."""

    @property
    def name(self) -> str:
        """What replays it."""
        return f"{self.scene.name}/{self.layer}/{self.count}/{self.victim}/{self.point.name}/{self.action}"

    @property
    def ends_all(self) -> bool:
        """Whether jax itself ends the others: the process that coordinates its job is killed."""
        return self.layer == "jax" and self.victim == 0 and self.action == "kill"


def judged(case: Case, path: Path, said: list[Said], later: int | None = None) -> list[str]:
    """Say what is wrong, once all have ended who can.

    Args:
        case: the case.
        path: where it was saved.
        said: what the processes have said.
        later: the version that another job has saved meanwhile, if one has.
    """
    wrong = fresh(lambda: list(_wrongs(case, path, said, later)))
    return wrong if isinstance(wrong, list) else [f"the judge failed: {wrong}"]


def outcome(case: Case, path: Path, said: list[Said]) -> str:
    """Return in a few words what became of a case."""
    kinds: dict[str, int] = {}
    for number, one in enumerate(said):
        if number != case.victim:
            word = "dead" if one.answer is None else "done" if one.answer.done else one.answer.error.partition(":")[0]
            kinds[word] = kinds.get(word, 0) + 1
    others = ", ".join(f"{count} {kind}" if count > 1 else kind for kind, count in sorted(kinds.items()))
    if case.scene.loads:
        return others
    new = fresh(lambda: told(lambda: case.scene.found(path))) == case.scene.ledger(NEW)
    return f"{'new' if new else 'old'} state, {others}"


def _wrongs(case: Case, path: Path, said: list[Said], later: int | None) -> Iterator[str]:
    scene = case.scene
    found = told(lambda: scene.found(path))
    before = later or (OLD if scene.loads or scene.old else None)
    new = not scene.loads and found == scene.ledger(NEW)
    if not new and found != (scene.ledger(before) if before else None):
        yield f"neither the state before nor the new one: {found}"
    if not scene.loads and case.action == "slow" and not new:
        yield "not saved"
    if not scene.loads and case.action == "kill" and case.point.done is not None and new != case.point.done:
        yield f"the {'new' if new else 'old'} state is there"
    for number, one in enumerate(said):
        if one.dead and number != case.victim and not case.ends_all:
            yield f"process {number} died"
        if one.answer is not None:
            yield from _wrong_answer(case, number, one.answer, new=new, replaced=later is not None)
    yield from scene.harmed(path)


def _wrong_answer(case: Case, number: int, answer: Answer, *, new: bool, replaced: bool) -> Iterator[str]:
    another = number != case.victim
    if answer.done:
        # What was saved may have been replaced since then.
        if not case.scene.loads and not new and not replaced:
            yield f"process {number} says that it is saved"
        if case.scene.loads and case.action == "kill" and case.point.done is False:
            yield f"process {number} loads without process {case.victim}"
        return
    if case.action == "slow":
        yield f"process {number}, with nothing worse than a slow one: {answer.error}"
    if not answer.ours:
        yield f"process {number} raised no error of ours: {answer.error}"
    if another and case.victim not in answer.named:
        yield f"process {number} does not name process {case.victim}: {answer.error}"
    if another and case.action == "kill" and case.point.done and case.victim != 0:
        yield f"process {number} fails, though nobody was needed any more: {answer.error}"
    if new and not any(words in answer.error for words in _MAY_BE_THERE):
        yield f"process {number} does not say that it may be saved: {answer.error}"
