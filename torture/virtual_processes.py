"""What the simulated processes are, and the protocol that they follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from treering._coordination import two_phase_commit
from treering._coordination.operations import MOST_PAYLOADS, Call, Operation, Operations

__all__ = ["REAL", "Job", "Process", "Protocol"]


class Protocol(NamedTuple):
    """What the virtual processes do."""

    coordinate: Callable[[Call, bytes], Operations] = two_phase_commit.coordinate
    refuse: Callable[[Call, BaseException], Operations] = two_phase_commit.refuse
    participate: Callable[[Call, Callable[[bytes], None]], Operations] = two_phase_commit.participate
    job_name: Callable[[int], str] = lambda number: f"{number:016x}"
    """A name for the job that was started as so many-th."""
    live: Callable[[Call], Collection[str]] = lambda call: call.live_attempts
    """The attempts whose messages process 0 leaves when it enters."""
    counted: Callable[[int, int], int] = lambda own, _: own
    """What a process goes on counting from that found process 0 in a later call: its own number, and that one."""


REAL = Protocol()


@dataclasses.dataclass(slots=True)
class Job:
    """One job: its processes die and are started again together."""

    name: str
    count: int
    calls: int
    timeout: float
    overwrite: bool
    fan_in: int = 32
    """How many processes hand in their votes to one."""
    signature: int = 0
    """Of how many bytes, at least, what process 0 is saving."""
    most_payloads: int = MOST_PAYLOADS
    """How many bytes of payloads one sum holds."""
    differs: tuple[int, int] | None = None
    """A process that saves another tree than the others in one call, and that call."""
    troubled: bool = False
    """Whether anything was done to it that may make a call fail."""


@dataclasses.dataclass(slots=True, eq=False)
class Process:
    """One virtual process."""

    number: int
    """Among all of the schedule."""
    job: Job
    this: int
    """Within its job."""
    trouble: dict[int, tuple[str, float]] = dataclasses.field(default_factory=dict)
    """What happens to it at its so many-th operation: a kill, a pause of some seconds, an interrupt."""
    troubled: bool = False
    alive: bool = True
    call: int = 0
    """Which call of its program it is in, from 1 on; 0 before the first."""
    number_of_call: int = 0
    """What it takes that for."""
    attempt: str = ""
    steps: Operations | None = None
    leads: bool = False
    """Whether it has entered the folder."""
    answer: Any = None
    thrown: BaseException | None = None
    late: Operation | None = None
    """An operation that happens only when its time is over."""
    done: int = 0
    """How many operations it has begun."""
    began: float = 0.0
    allowed: float = 0.0
    """Seconds of the call that were not spent in waiting for others."""
    before_vote: float = 0.0
    """The seconds of the call that were not spent in waiting when it put its vote."""
    gave_up: int = 0
    """The last call that it has told the others to have given up."""
    until: float = 0.0
    """It is paused until then."""
    offset: float = 0.0
    """What its clock shows when the schedule begins."""
    rate: float = 1.0
    """How fast its clock goes."""
    ended: dict[int, float] = dataclasses.field(default_factory=dict)
    """When each of its calls has ended."""
    results: dict[int, BaseException | None] = dataclasses.field(default_factory=dict)
