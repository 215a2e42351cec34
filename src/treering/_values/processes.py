"""Which process of a job this is, and how people read a few of them."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterable
from typing import Final

from treering.errors import ProcessFailedError

_SHOWN: Final = 20
_PAIR: Final = 2


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
class Processes:
    """The processes of a job, seen by one of them.

    Example:
        >>> two = Processes(this=1, count=3)
        >>> two.is_coordinator, two.others
        (False, (0, 2))
    """

    this: int
    """Number of this process, from 0 on."""
    count: int
    """How many there are."""

    @property
    def is_coordinator(self) -> bool:
        """Whether this is process 0, which commits."""
        return self.this == 0

    @property
    def others(self) -> tuple[int, ...]:
        """The numbers of the other processes."""
        return tuple(number for number in range(self.count) if number != self.this)


def format_processes(processes: Iterable[int]) -> str:
    """Return numbers of processes for people, runs of three and more in short.

    Example:
        >>> format_processes([2]), format_processes(range(1, 1024)), format_processes([0, 2, 3, 4, 9])
        ('process 2', 'processes 1-1023', 'processes 0, 2-4 and 9')
    """
    numbers = sorted(set(processes))
    if len(numbers) == 1:
        return f"process {numbers[0]}"
    texts: list[str] = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        together = [number for _, number in run]
        texts += [f"{together[0]}-{together[-1]}"] if len(together) > _PAIR else map(str, together)
    if len(texts) > _SHOWN:
        texts = [*texts[: _SHOWN - 1], f"{len(texts) - _SHOWN + 1} more"]
    return "processes " + " and ".join(part for part in (", ".join(texts[:-1]), texts[-1]) if part)


def failure_of(processes: Iterable[int], what: str, hint: str | None = None) -> ProcessFailedError:
    """Return the error that some processes failed, and in what.

    Example:
        >>> failure_of([1, 2], "wrote nothing").processes
        (1, 2)
    """
    failed = tuple(processes)
    error = ProcessFailedError(f"{format_processes(failed)} {what}", hint=hint)
    error.processes = failed
    return error
