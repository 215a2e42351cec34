"""The rules that a schedule of virtual processes is judged by."""

from __future__ import annotations

import collections

from torture.simulated_folder import SimulatedFolder, Violation
from torture.virtual_processes import Job, Process
from treering._coordination.operations import derive_attempt, parent_of
from treering._values.timing import Timing
from treering.errors import BusyError, ExistsError, ProcessFailedError, TimedOutError, TreeringError

__all__ = ["TIMING", "JudgedSchedule"]

TIMING = Timing(poll_first=0.02, poll_longest=0.5, poll_growth=3.0, linger=3.0)
"""How often virtual processes look, and how long they stay."""
_LOOK = 0.6
"""Seconds until a process has seen a message and answered it: a pause between two looks, and the answer."""


class JudgedSchedule:
    """What was done to the processes of one schedule, what they report, and what is left.

    Attributes:
        counts: what was seen, by name.
        folder: where they save.
    """

    counts: collections.Counter[str]
    folder: SimulatedFolder
    _processes: list[Process]
    _started: int
    _now: float
    _overwrite: bool
    _slow: float
    _stale: float
    _failing: float

    def judge_error(self, process: Process, error: TreeringError) -> None:
        """An error has a reason, and names those who are the reason."""
        job = process.job
        if isinstance(error, ExistsError | BusyError):
            if self._started == 1 and not self.folder.commits:
                raise Violation(f"process {process.this} was refused, and there was no reason: {error}")
            return
        overtaken = self._was_overtaken(job, process.number_of_call)
        if not job.troubled and not overtaken:
            raise Violation(f"nothing was done to the job, and process {process.this} raised: {error!r}")
        accused: tuple[int, ...] = ()
        if isinstance(error, TimedOutError):
            accused = error.missing
        elif isinstance(error, ProcessFailedError):
            accused = error.processes
        elif not process.troubled and not self._failing and "process " not in str(error):
            raise Violation(f"process {process.this} names nobody: {error}")
        if isinstance(error, TimedOutError | ProcessFailedError):
            if not accused:
                raise Violation(f"process {process.this} names nobody: {error}")
            excused = process.troubled or overtaken or self._slow or self._stale or self._failing
            excused = excused or (accused == (0,) and self._is_outpaced(process))
            guilty = (self._is_guilty(job, this, process.call, process.began) for this in accused)
            if not excused and not all(guilty):
                raise Violation(f"process {process.this} names {accused} without reason: {error}")

    def _is_outpaced(self, process: Process) -> bool:
        """Whether process 0 is so much slower that a process may give up before it has decided.

        Its clock may go slower, and at its deadline it looks at the messages of all, however long that takes.
        """
        job, lead = process.job, self._lead_of(process.job)
        patience = 1.1 * job.timeout + min(TIMING.linger, job.timeout / 2)
        looks = lead.allowed - lead.before_vote if lead.call == process.call else 0.0
        return patience / process.rate < job.timeout / lead.rate + looks + _LOOK

    def _was_overtaken(self, job: Job, number: int) -> bool:
        """Whether another saver swept what was said of a call, or of one before it: some processes then come late."""
        return any(derive_attempt(job.name, before) in self.folder.unsaid for before in range(1, number + 1))

    def judge_wait(self, process: Process) -> None:
        """Process 0 does not wait for others that had all given the call up before it came."""
        if self._slow or self._stale or self._failing or process.attempt in self.folder.unheard:
            return  # what they said was swept, or is not seen
        others = [other for other in self._processes if other.job is process.job and other is not process]
        if all(not other.troubled and other.ended.get(process.call, self._now) < process.began for other in others):
            raise Violation("process 0 waits for others that had all given up before it came")

    def _lead_of(self, job: Job) -> Process:
        return next(process for process in self._processes if process.job is job and process.this == 0)

    def _is_guilty(self, job: Job, this: int, call: int, began: float) -> bool:
        """Whether something was done to a process, or it is elsewhere, came late, or has given the call up itself."""
        lead = self._lead_of(job)
        if lead.call == call:
            began = min(began, lead.began)  # it is process 0 that waited for it
        for process in self._processes:
            if process.job is job and process.this == this:
                is_late = process.began > began + job.timeout / 2
                has_failed = process.gave_up == call or process.results.get(call) is not None
                return process.troubled or process.call != call or is_late or has_failed
        return False

    def judge(self) -> None:
        """See what is left when all have ended."""
        folder = self.folder
        if folder.index is not None:
            here = sum(attempt == folder.index for attempt, _ in folder.data)
            if not here:
                raise Violation("the data of the index is gone")
        if not self._overwrite and len(folder.commits) > 1:
            raise Violation(f"{len(folder.commits)} first saves were committed")
        undisturbed = not any(process.job.troubled for process in self._processes)
        if undisturbed and not folder.commits:
            raise Violation("nothing was done to anybody, and nothing was committed")
        if undisturbed:
            self._judge_messages()
        jobs = {id(process.job): process.job for process in self._processes}.values()
        for job in jobs:
            self._judge_names(job)
            if job.differs and derive_attempt(job.name, job.differs[1]) in folder.commits:
                raise Violation(f"call {job.differs[1]} is committed, and process {job.differs[0]} saved another tree")
            if not job.troubled:
                self._judge_agreement(job)

    def _judge_messages(self) -> None:
        """Where every process reports success of every call, no message stays.

        Two things may leave some for the next saver: another saver has swept what process 0 waits for, or departures
        come up through so many processes that it lingers for less.
        """
        if any(error is not None for process in self._processes for error in process.results.values()):
            return
        if self.folder.unsaid or self.folder.unheard or not all(map(self._is_waited_for, self._processes)):
            return
        self.counts["nothing left"] += 1
        if left := self.folder.messages():
            raise Violation(f"all report success, and messages are left: {left}")

    def _is_waited_for(self, process: Process) -> bool:
        """Whether process 0 lingers until a process that sees the decision has left, and those above it."""
        job, this, looks = process.job, process.this, 0
        while this:
            this = parent_of(this, job.fan_in)
            looks += 1
        return looks * _LOOK / process.rate < min(TIMING.linger, job.timeout / 2) / self._lead_of(job).rate

    def _judge_names(self, job: Job) -> None:
        """All that hear of a decision name the same processes; one that hears nothing names process 0."""
        for call in range(1, job.calls + 1):
            named = set()
            for process in self._processes:
                error = process.results.get(call) if process.job is job else None
                if isinstance(error, TimedOutError):
                    named.add(tuple(error.missing))
                elif isinstance(error, ProcessFailedError):
                    named.add(tuple(error.processes))
            if len(named - {(0,)}) > 1:
                raise Violation(f"processes name different ones in call {call}: {sorted(named)}")

    def _judge_agreement(self, job: Job) -> None:
        """In a job that nothing was done to all processes have the same end of each call."""
        ends = [process.results for process in self._processes if process.job is job]
        for number in range(1, job.calls + 1):
            kinds = {type(results[number]).__name__ for results in ends}
            if len(kinds) != 1 and not self._was_overtaken(job, number):
                raise Violation(f"one call ended in different ways: {sorted(kinds)}")
