"""How the processes of a job save together: who says what when, who waits for whom, and when data may be removed.

Pure: the steps of process 0 (`leading`, `refused`) and of the others (`following`) are generators that yield operations and
are sent the answers. `treering._store.joint` carries them out on a real folder, ``python -m torture schedules`` in a world
of its own with kills, pauses and lost answers. ``docs/design/store.md`` says why each step is where it is.

The rules that everything rests on:

- Process 0 commits only when every process has said that its data is durable.
- Whoever has said so removes its data only when process 0 says that the attempt failed and was not committed.
- Process 0 says so only if it never asked for the commit. If the commit itself failed, nobody but process 0, who can look,
  removes anything.
- Every wait has a deadline, and whoever gives up tells the others first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import platform
from collections.abc import Callable, Generator, Iterator
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias

from treering._store.checkpoint_names import begin_note, part_note, verdict_note
from treering._store.note_text import Begin, Failure, Part, Stage, Verdict
from treering._values.processes import Processes, named
from treering.errors import Corrupt, StoreFailed, Timeout, TreeringError

__all__ = [
    "Call",
    "Commit",
    "Get",
    "Now",
    "Operation",
    "OutOfStep",
    "Pace",
    "Put",
    "Remove",
    "Sleep",
    "Steps",
    "Withdraw",
    "Work",
    "attempt_of",
    "following",
    "leading",
    "refused",
]


# Tuples: the simulation makes a hundred million of them.
class Put(NamedTuple):
    """Make ``data`` the content of a note."""

    name: str
    data: bytes


class Get(NamedTuple):
    """Read a note; answered with its content, or None where it is not there or cannot be read now."""

    name: str


class Remove(NamedTuple):
    """Remove a note."""

    name: str


class Sleep(NamedTuple):
    """Wait so many seconds."""

    seconds: float


class Now(NamedTuple):
    """Ask what time it is; answered in seconds."""


class Work(NamedTuple):
    """Write the own data and make it durable; answered with what process 0 needs for the commit."""


class Commit(NamedTuple):
    """Commit; only process 0 is asked."""

    parts: tuple[bytes, ...]
    """What the work of each process has answered, in order."""


class Withdraw(NamedTuple):
    """Remove the own data, if any was written.

    Process 0 is asked when all others have left: it may then remove whatever there is of the attempt, unless it finds
    that the commit did happen. Where it is not asked, what proves that the attempt's data are leftovers has to stay.
    """


Operation: TypeAlias = Put | Get | Remove | Sleep | Now | Work | Commit | Withdraw
Steps: TypeAlias = Generator[Operation, Any, None]


class Pace(NamedTuple):
    """How often one looks, and how long one stays for those who are late."""

    first: float = 0.001
    """Seconds of the first pause between two looks."""
    most: float = 0.05
    """Seconds of the longest."""
    growth: float = 1.5
    """How much longer each is than the one before."""
    linger: float = 5.0
    """Seconds that process 0 stays to see that all have read its verdict."""


class OutOfStep(Timeout):
    """Process 0 has gone on to a later call.

    Attributes:
        number: that call.
    """

    number: int = 0


def attempt_of(job: str, number: int) -> str:
    """Return the attempt of one call of a job, which all its processes know without talking.

    Example:
        >>> attempt_of("0123456789abcdef", 1)
        '15f0cdbf8bb18a3b'
    """
    return hashlib.sha256(f"{job} {number}".encode()).hexdigest()[:16]


def _this_one() -> str:
    return f"{platform.node() or 'this machine'}, pid {os.getpid()}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One joint save, seen by one of the processes.

    Example:
        >>> call = Call(job="0123456789abcdef", number=1, processes=Processes(this=0, count=2), timeout=60, doing="save 'x'")
        >>> call.attempt == attempt_of("0123456789abcdef", 1)
        True
    """

    job: str
    """16 hexadecimal digits that all processes agreed on."""
    number: int
    """How many joint saves the process has made, this one included."""
    processes: Processes
    """Which one this is, of how many."""
    timeout: float
    """Seconds to wait at one point for others."""
    doing: str
    """What it does, for messages: ``save '/x/ckpt'``."""
    who: str = dataclasses.field(default_factory=_this_one)
    """Where this process runs, for the messages of others."""
    pace: Pace = Pace()
    """How often it looks."""

    @property
    def attempt(self) -> str:
        """The attempt of this call."""
        return attempt_of(self.job, self.number)


def leading(call: Call, signature: bytes) -> Steps:
    """Yield the steps of process 0, which has entered the folder.

    Args:
        call: the call.
        signature: what this process is saving; the others compare.

    Raises:
        Timeout: others did not come, or did not end their work. Nothing was saved.
        TreeringError: another process failed, or this one; the class is that of its error, `ProcessFailed` where it was
            none of ours. Nothing was saved, unless the commit itself failed and says otherwise.
    """
    raise NotImplementedError


def refused(call: Call, error: BaseException) -> Steps:
    """Yield the steps of process 0 where it could not enter the folder: the others are told why."""
    raise NotImplementedError


def following(call: Call, check: Callable[[bytes], None]) -> Steps:
    """Yield the steps of every other process.

    Args:
        call: the call.
        check: compares what this process is saving with the signature of process 0, and raises what is wrong.

    Raises:
        OutOfStep: process 0 has gone on to a later call.
        Timeout: process 0 or another one did not come. If this process had done its part, it may have been committed;
            the message says so.
        TreeringError: another process failed, or this one.
    """
    raise NotImplementedError
