"""What a look at a folder found out: what is committed there, and what became of other attempts to save."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence


class Life(enum.StrEnum):
    """Whether a process still works on an attempt."""

    IN_FLIGHT = "in flight"
    """A process does."""
    DEAD = "dead"
    """None does: its processes have ended."""
    UNKNOWN = "unknown"
    """That cannot be told from here: it was written on another machine, or in another container."""
    OVER = "over"
    """It is committed or given up; messages about it are left, or it is a save that waits for its index."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """How far one process of a joint save is, as its message says."""

    process: int
    """Its number in the job."""
    stage: str
    """"at work", "written", "failed" or "seen"; "missing" where it has left no message, "unreadable" where its message
    cannot be read."""
    who: str | None
    """Host and number of the process, as in "node7, pid 4711"; None where that is not known."""
    age: float | None
    """Seconds since it said so, by the clocks of this machine and of the file system."""
    problem: str | None = None
    """Why it failed."""
    late: float | None = None
    """Seconds since the save began, of a process that has not voted and did not fail."""
    nbytes: int | None = None
    """Bytes in data files of its own, where their names tell whose they are."""
    through: int | None = None
    """The process that collects its vote; None where it is process 0."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An attempt to save that is not, or not only, the committed state."""

    attempt: str
    """Its 16 hexadecimal digits."""
    form: str
    """"checkpoint", "leaves", or "notes" where nothing but messages is left of it."""
    life: Life
    """Whether a process works on it."""
    reason: str
    """Why that is known, or what it is, as the end of a sentence that begins with the attempt."""
    advice: str
    """What to do."""
    files: int
    """How many files of it lie there that no index needs."""
    nbytes: int
    """Their bytes."""
    age: float | None
    """Seconds since the last of them was changed, by the clocks of this machine and of the file system."""
    who: str | None = None
    """Host and number of the process that leads it; None where that is not known."""
    number: int | None = None
    """Which joint save of its job it is, from 1 on."""
    processes: Sequence[ProcessState] = ()
    """What the processes of a joint save say."""
    outcome: str | None = None
    """What process 0 says became of it."""

    @property
    def needs_attention(self) -> bool:
        """Whether it holds bytes that nobody works with."""
        return self.nbytes > 0 and self.life in {Life.DEAD, Life.UNKNOWN}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A state that can be loaded."""

    form: str
    """"checkpoint" or "leaves"."""
    attempts: Sequence[str]
    """The save that it is of; in a leaves directory those of its prefixes, as far as treering wrote them."""
    at: str | None
    """When it was saved, as its index says."""
    by: str | None
    """Which program saved it, as its index says."""
    processes: int
    """How many processes saved it."""
    files: int
    """How many files its index names, itself included."""
    nbytes: int
    """Their bytes together, as the index says."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What stands in a folder.

    Example:
        >>> found = Diagnosis(path="ckpt", committed=None, attempts=(), problems=("a file is missing",), notes=())
        >>> found.ok
        False
    """

    path: str
    """The folder, as it was given."""
    committed: Committed | None
    """What can be loaded; None where nothing can."""
    attempts: Sequence[Attempt]
    """Other attempts, those in flight first."""
    problems: Sequence[str]
    """What is wrong, a sentence each."""
    notes: Sequence[str]
    """What is good to know, a sentence each."""
    waits_for_readers: bool = False
    """Whether it is a removed checkpoint whose data stay for readers, and nothing else."""

    @property
    def ok(self) -> bool:
        """Whether nothing has to be done."""
        return not self.problems and not any(attempt.needs_attention for attempt in self.attempts)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepDiagnosis:
    """What stands in the folder of one step of a run."""

    step: int
    """Its number."""
    found: Diagnosis
    """What is in it."""

    @property
    def has_something_to_tell(self) -> bool:
        """Whether there is more in it than a checkpoint."""
        return bool(self.found.problems or self.found.attempts) or self.found.committed is None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunDiagnosis:
    """What stands in a run's folder."""

    path: str
    """The folder, as it was given."""
    steps: Sequence[int]
    """The steps that can be loaded, ascending."""
    nbytes: int
    """Bytes of their files together."""
    saved: float | None
    """When the latest was saved, in seconds since 1970; None where there is none."""
    folders: Sequence[StepDiagnosis]
    """What is in each step's folder, also in those that cannot be loaded."""
    notes: Sequence[str]
    """What is good to know, a sentence each."""

    @property
    def ok(self) -> bool:
        """Whether nothing has to be done."""
        return all(folder.found.ok for folder in self.folders)
