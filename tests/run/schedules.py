"""The save schedules of several processes in one thread: each runs up to its meeting, then all hear what each said."""

from __future__ import annotations

import dataclasses
import functools
import signal
from typing import Any

import pytest

from treering._coordination import allgather
from treering._runs.results import Preemption
from treering._runs.schedule import SaveSchedule, Signals
from treering._values.processes import Processes
from treering.rules import Cadence, Decision

__all__ = ["Clock", "Job"]


@dataclasses.dataclass
class Clock:
    """A clock that is told what time it is."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


class Noted(Signals):
    """Signals that come because a test says so; no handler is set."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_for = False
        self.jax_has_told = False
        self.has_told_jax = False

    @property
    def watching(self) -> bool:
        return self.waited_for

    def tell_jax(self) -> None:
        self.has_told_jax = self.has_told_jax or self.noted is not None

    def hear_preemption(self) -> bool:
        news, self.jax_has_told = self.jax_has_told, False
        return news


class _Meets(BaseException):
    """A process is at a meeting; what it brings."""


class Job:
    """Processes that offer the same steps.

    Attributes:
        meetings: the steps at which they met.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, cadence: Cadence | None, count: int, *, watching: bool = False
    ) -> None:
        self.count = count
        self.clocks = [Clock(1000.0 * (number + 1)) for number in range(count)]
        self.signals = [Noted() for _ in range(count)]
        for one in self.signals:
            one.waited_for = watching
        self.schedules = [
            SaveSchedule(cadence, each, gather=functools.partial(self._gather, number), shown="runs/a")
            for number, each in enumerate(self.signals)
        ]
        for one_schedule, clock in zip(self.schedules, self.clocks, strict=True):
            one_schedule._clock = clock
        self.meetings: list[int] = []
        self._rows: list[bytes] | None = None
        patch.setattr(allgather, "allgather", self._gathered)

    def pass_time(self, *seconds: float) -> None:
        """Let time pass; on each process as long as it is said, on all others as long as on the last of those."""
        for number, clock in enumerate(self.clocks):
            clock.now += seconds[min(number, len(seconds) - 1)]

    def send(self, process: int, signum: int = signal.SIGTERM) -> None:
        """Send a signal to a process."""
        self.signals[process].noted = self.signals[process].noted or signum

    def offer(self, *steps: int, latest: int | None = None, force: bool = False) -> list[Decision]:
        """Let every process offer a step, each its own or all the same; return what each decides."""
        steps = steps * self.count if len(steps) == 1 else steps
        brought: list[bytes] = []
        decided: list[Decision] = []
        for number, step in enumerate(steps):
            # What jax has told stays told: the process is asked a second time.
            told = self.signals[number].jax_has_told
            self._rows = None
            try:
                decided.append(self._decide(number, step, latest, force))
            except _Meets as meets:
                brought.append(meets.args[0])
                self.signals[number].jax_has_told = told
        assert len(brought) in (0, self.count), "some processes came to a meeting, others did not"
        if brought:
            self.meetings.append(steps[0])
            self._rows = brought
            decided = [self._decide(number, step, latest, force) for number, step in enumerate(steps)]
        return decided

    def one(self, step: int, **wishes: Any) -> Decision:
        """Let every process offer a step; return what all of them decide."""
        first, *others = self.offer(step, **wishes)
        assert all(other == first for other in others)
        return first

    def ask(self, step: int, batch: int = 0) -> list[Preemption | None]:
        """Let every process ask whether the job is to end soon; nobody may meet."""
        return [
            schedule.preempted(step, batch, Processes(this=number, count=self.count))
            for number, schedule in enumerate(self.schedules)
        ]

    def _decide(self, number: int, step: int, latest: int | None, force: bool) -> Decision:
        processes = Processes(this=number, count=self.count)
        return self.schedules[number].decide(step, processes, latest=lambda: latest, force=force)

    def _gather(self, number: int, said: bytes, doing: str) -> list[bytes]:
        return allgather.allgather_in_order(said, Processes(this=number, count=self.count), doing)

    def _gathered(self, row: bytes) -> list[bytes]:
        if self._rows is None:
            raise _Meets(row)
        return self._rows
