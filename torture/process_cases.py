"""One case: strike a process of a job at a point, listen to the others, look at what is there, go on."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterable
from pathlib import Path

from torture.judging import fresh, told
from torture.process_jobs import Job, Said
from torture.process_judging import Case, judged, outcome
from torture.process_points import Point
from torture.process_scenes import NEW, OLD, JointScene
from torture.process_workers import Layer, Worker, armed, joined, loading, saving

__all__ = ["Patience", "Result", "attacked", "rehearsed"]

# Nobody is struck here: however busy the machine is, this is enough.
_UNDISTURBED_SECONDS = 120.0
# What all processes of a job raise, once, when one of them had missed a meeting.
_GIVEN_UP = "the others had given up"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds."""

    deadline: float
    """What the calls are told to wait for others."""
    slow: float
    """How long a slow process stands still."""
    slack: float
    """What a loaded machine may add."""

    @property
    def longest(self) -> float:
        """After so many seconds each of the others has to have ended: three waits, the last of them lengthened."""
        return 3.1 * self.deadline + 10.0 + self.slack


@dataclasses.dataclass(slots=True, kw_only=True)
class Result:
    """What became of a case."""

    outcome: str = ""
    """In a few words."""
    wrong: list[str] = dataclasses.field(default_factory=list)
    """What must not be."""
    seconds: float = 0.0
    """How long the last of the others took."""


def rehearsed(scene: JointScene, layer: Layer, count: int, points: Iterable[Point], base: Path) -> list[str]:
    """Save or load undisturbed; return what is wrong, a point that nobody came by included."""
    path = scene.prepared(base)
    every = list(points)
    with _started(scene, layer, path, count) as job:
        for number in range(count):
            job.tell(armed([point for point in every if point.concerns(number, count)], "pass", 0.0), [number])
        wrong = _failures(job, range(count))
        job.tell(_call(scene, _UNDISTURBED_SECONDS))
        wrong += _failures(job, range(count))
        for number in range(count):
            missed = [p.name for p in every if p.concerns(number, count) and p.name not in job.said[number].events]
            wrong += [f"process {number} of {count} never came to {name!r}" for name in missed]
    found = fresh(lambda: [told(lambda: scene.found(path)), scene.litter(path)])
    if found != [scene.ledger(OLD if scene.loads else NEW), []]:
        wrong.append(f"found {found}")
    return [f"{scene.name}/{layer}/{count}, undisturbed: {what}" for what in wrong]


def attacked(case: Case, base: Path, patience: Patience) -> Result:
    """Run one case."""
    path = case.scene.prepared(base)
    result = Result()
    others = [number for number in range(case.count) if number != case.victim]
    with _started(case.scene, case.layer, path, case.count) as job:
        if case.scene.loads:
            # Once undisturbed: what is compiled at the first time takes longer than a deadline on a busy machine.
            job.tell(loading(OLD, timeout=_UNDISTURBED_SECONDS))
            result.wrong += _failures(job, range(case.count))
        job.tell(armed([case.point], case.action, patience.slow), [case.victim])
        result.wrong += _failures(job, [case.victim])
        job.tell(_call(case.scene, patience.deadline))
        waited = range(case.count) if case.action == "slow" else others
        if not job.ended(waited, patience.longest):
            hung = [number for number in waited if not (job.said[number].answer or job.said[number].dead)]
            result.wrong.append(f"still waiting after {patience.longest:.1f} s: {hung}")
            return result
        if not job.until(lambda job: case.point.name in job.said[case.victim].events, patience.slack):
            result.wrong.append(f"the victim never came to the point: {_shown(job.said[case.victim])}")
            return result
        result.seconds = max((answer.seconds for number in others if (answer := job.said[number].answer)), default=0.0)
        result.wrong += judged(case, path, job.said)
        if case.action in ("pause", "outlive"):
            later = _meanwhile(case, path, patience, result) if case.action == "outlive" else None
            job.signal(case.victim, signal.SIGCONT)
            if not job.ended([case.victim], patience.longest):
                result.wrong.append("the victim did not end after it had come back")
                return result
            result.wrong += (f"the victim came back, then: {what}" for what in judged(case, path, job.said, later))
        result.outcome = outcome(case, path, job.said)
        if case.action in ("pause", "slow") and case.point.again:
            result.wrong += _next(case.scene, path, job, NEW + 1, "of the same job")
    if case.action != "slow":
        with _started(case.scene, case.layer, path, case.count) as job:
            result.wrong += _next(case.scene, path, job, NEW + 2, "of a new job")
    return result


def _meanwhile(case: Case, path: Path, patience: Patience, result: Result) -> int | None:
    """Let another job save while the victim stands still; return the version, None where the victim keeps it out."""
    version = NEW + 1
    with _started(case.scene, case.layer, path, case.count) as job:
        there = fresh(lambda: case.scene.found(path)) is not None
        job.tell(saving(version, old=there, timeout=patience.deadline))
        wrong = _failures(job, range(case.count))
        # A process 0 that stands still holds its locks.
        if wrong and case.victim == 0 and (answer := job.said[0].answer) and "BusyError" in answer.error:
            return None
        result.wrong += (f"the save of another job meanwhile: {what}" for what in wrong)
    return None if wrong else version


def _call(scene: JointScene, deadline: float) -> str:
    """Return the command for the call that is attacked."""
    return loading(OLD, timeout=deadline) if scene.loads else saving(NEW, old=scene.old, timeout=deadline)


def _started(scene: JointScene, layer: Layer, path: Path, count: int) -> Job:
    job = Job(count, Worker(scene, path), path.parent.with_suffix(".log"))
    job.tell(joined(layer, count))
    failed = _failures(job, range(count))
    if failed:
        job.close()
        raise RuntimeError(f"the job did not start: {failed}")
    return job


def _failures(job: Job, numbers: Iterable[int]) -> list[str]:
    """Wait for processes that must succeed; say which did not."""
    wanted = list(numbers)
    job.ended(wanted, _UNDISTURBED_SECONDS)
    said = {number: job.said[number] for number in wanted}
    return [f"process {number}: {_shown(one)}" for number, one in said.items() if not (one.answer and one.answer.done)]


def _next(scene: JointScene, path: Path, job: Job, version: int, whose: str) -> list[str]:
    """Save once more, and load that, with nobody disturbed."""
    old = fresh(lambda: scene.found(path)) is not None
    job.tell(saving(version, old=old, timeout=_UNDISTURBED_SECONDS))
    wrong = _failures(job, range(job.count))
    if wrong and all(one.answer and _GIVEN_UP in one.answer.error for one in job.said):
        # Those that had given up and the one that came back hear of each other; then they are at one call again.
        job.tell(saving(version, old=old, timeout=_UNDISTURBED_SECONDS))
        wrong = _failures(job, range(job.count))
    if scene.loads and not wrong:
        job.tell(loading(version, timeout=_UNDISTURBED_SECONDS))
        wrong = _failures(job, range(job.count))
    found = fresh(lambda: [told(lambda: scene.found(path)), scene.litter(path), scene.harmed(path)])
    if not wrong and found[0] != scene.ledger(version):
        wrong.append(f"found {found[0]}")
    if not wrong and found[1]:
        wrong.append(f"left {found[1]}")
    return [f"the next save {whose}: {what}" for what in [*wrong, *found[2]]]


def _shown(said: Said) -> str:
    return "died" if said.dead else said.answer.error if said.answer else "no answer"
