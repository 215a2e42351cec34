"""Which process of a job this is, how people read a few of them, and how long one waits for the others."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
import os
import threading
from collections.abc import Iterable, Mapping
from typing import Final

from treering._values.timing import DEFAULT_TIMEOUT
from treering.errors import ProcessFailedError, UnsupportedError

_VARIABLE: Final = "TREERING_TIMEOUT_S"
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


def timeout_seconds(timeout: float | None, environment: Mapping[str, str] = os.environ) -> float:
    """Return how many seconds to wait for other processes: as asked, else ``TREERING_TIMEOUT_S``, else 600.

    Raises:
        UnsupportedError: it is no positive number of seconds.

    Example:
        >>> timeout_seconds(2), timeout_seconds(None, {"TREERING_TIMEOUT_S": "90"}), timeout_seconds(None, {})
        (2.0, 90.0, 600.0)
    """
    given: object = timeout if timeout is not None else environment.get(_VARIABLE) or DEFAULT_TIMEOUT
    name = "timeout" if timeout is not None else _VARIABLE
    try:
        seconds = float(given) if isinstance(given, int | float | str) and not isinstance(given, bool) else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UnsupportedError(f"{name} is {given!r:.100}, but must be a positive number of seconds")
    return min(seconds, threading.TIMEOUT_MAX)  # more than a lock can wait
