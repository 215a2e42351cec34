"""Time cases in turns and keep every round, so that ratios are taken between neighbours in time.

A machine drifts: its disk by a factor of two within a minute. A ratio is therefore taken inside each
round, between cases that ran seconds apart, and the median and the spread of those ratios are reported.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

__all__ = [
    "Case",
    "Group",
    "ReadyMemory",
    "Rounds",
    "Spread",
    "Turn",
    "Work",
    "copy_bytes",
    "equal_bytes",
    "interleave",
    "once",
    "ratio",
    "spread",
    "trim_heap",
]

Work: TypeAlias = Callable[[], Any]

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memcpy.restype = ctypes.c_void_p


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to do one job."""

    name: str
    """Who does it: treering, a peer, or a limit of the machine."""
    begin: Callable[[], Work]
    """Makes fresh input, not timed; calling what it returns is timed."""
    check: Callable[[Any], str | None]
    """Says what is wrong with a result, or None; not timed."""
    limit: bool = False
    """True for what the machine can do at best: compared as 'times of it', not as 'times faster'."""
    count: Callable[[Any], float] | None = None
    """Counts something in a result, in the group's unit; not timed."""
    seconds: Callable[[Any], float] | None = None
    """Tells from a result what its time was, where that is not all the time that the work took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Cases that do the same job and are timed in turns; the first one is ours."""

    name: str
    """The job."""
    cases: tuple[Case, ...]
    """Ours first."""
    between: Callable[[], None] | None = None
    """Cleans up before each round, not timed."""
    room: int = 0
    """Bytes of memory that the hungriest case takes; they are kept ready for it (``ReadyMemory``)."""
    repeats: int = 1
    """Rounds for each round asked for; short cases need more of them."""
    once: bool = False
    """One round, however many were asked for: what is counted is the same each time."""
    peaks: bool = True
    """Whether memory is measured too."""
    unit: str | None = None
    """What the cases count; None when they count nothing."""

    def case(self, name: str) -> Case:
        """The case of this name.

        Raises:
            KeyError: there is none.
        """
        for case in self.cases:
            if case.name == name:
                return case
        raise KeyError(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One case, run once."""

    seconds: float
    """How long it took."""
    count: float | None
    """What it counted; None when it counts nothing."""
    fault: str | None
    """What is wrong with its result, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """All turns of a group."""

    seconds: dict[str, list[float]]
    """Time of each round, by the name of the case."""
    counts: dict[str, list[float]]
    """What was counted in each round, by the name of the case; empty lists for cases that count nothing."""
    wrong: list[str]
    """Everything that was wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A median with the least and the greatest."""

    median: float
    """The middle one of the values."""
    least: float
    """The smallest value."""
    greatest: float
    """The largest value."""


def spread(values: Sequence[float]) -> Spread:
    """Median, least and greatest of at least one value."""
    return Spread(median=statistics.median(values), least=min(values), greatest=max(values))


def ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Spread of above/below, round by round.

    Example:
        >>> ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0])
        Spread(median=2.0, least=1.0, greatest=3.0)
    """
    return spread([a / b for a, b in zip(above, below, strict=True)])


def interleave(
    group: Group,
    rounds: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    report: Callable[[str], None] = lambda _: None,
) -> Rounds:
    """Time every case of the group in turns.

    The case that comes first moves on by one each round, so that no case always has the same place.
    """
    seconds: dict[str, list[float]] = {case.name: [] for case in group.cases}
    counts: dict[str, list[float]] = {case.name: [] for case in group.cases}
    wrong: list[str] = []
    ready = ReadyMemory(group.room)
    for turn in range(rounds):
        if group.between is not None:
            group.between()
        first = turn % len(group.cases)
        for case in (*group.cases[first:], *group.cases[:first]):
            done = once(case, ready, clock)
            seconds[case.name].append(done.seconds)
            if done.count is not None:
                counts[case.name].append(done.count)
            if done.fault is not None:
                wrong.append(f"{group.name}, {case.name}, round {turn + 1}: {done.fault}")
        shown = ", ".join(f"{name} {each[-1]:.4g}" for name, each in seconds.items())
        report(f"{group.name} {turn + 1}/{rounds}: {shown}")
    ready.release()
    return Rounds(seconds=seconds, counts=counts, wrong=wrong)


def once(case: Case, ready: ReadyMemory, clock: Callable[[], float]) -> Turn:
    """Run a case once under the clock.

    Before the clock starts nothing is left to pay for the case before: its garbage is collected, its heap is given
    back, its writes are flushed.
    """
    ready.take()
    work = case.begin()
    gc.collect()
    trim_heap()
    os.sync()
    ready.release()
    start = clock()
    result = work()
    taken = clock() - start
    if case.seconds is not None:
        taken = case.seconds(result)
    return Turn(seconds=taken, count=None if case.count is None else case.count(result), fault=case.check(result))


class ReadyMemory:
    """Free memory that the machine really has, let go at the moment when a case may want it.

    A virtual machine may hand its free memory back to the host (free page reporting). The first touch of such a page
    costs up to 30 times as much, 3 s for a gigabyte, and strikes whoever comes first. So that much memory is held and
    touched while nothing is timed, and freed just before the clock starts.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: mmap.mmap | None = None

    def take(self) -> None:
        """Hold the memory, every page of it touched; huge pages where the system has them."""
        if self._held is None and self._size and hasattr(mmap, "MAP_PRIVATE"):
            self._held = mmap.mmap(-1, self._size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._held.madvise(mmap.MADV_HUGEPAGE)
            for start in range(0, self._size, mmap.PAGESIZE):
                self._held[start] = 1

    def release(self) -> None:
        """Let the memory go."""
        if self._held is not None:
            self._held.close()
            self._held = None


def trim_heap() -> None:
    """Give freed heap memory back to the system, where the C library can (glibc)."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)


def _span(buffer: Any) -> tuple[int, int]:
    """Address and length of a contiguous buffer or array."""
    array = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
    if not array.flags.c_contiguous:
        raise ValueError("only contiguous memory has an address")
    return array.ctypes.data, array.nbytes


def equal_bytes(left: Any, right: Any) -> bool:
    """Whether two contiguous buffers or arrays hold the same bytes, compared in place."""
    (left_at, left_size), (right_at, right_size) = _span(left), _span(right)
    return left_size == right_size and _libc.memcmp(left_at, right_at, left_size) == 0


def copy_bytes(target: Any, source: Any) -> None:
    """One memcpy of the source into the target, in this thread.

    Raises:
        ValueError: the target is too small.
    """
    (target_at, room), (source_at, size) = _span(target), _span(source)
    if size > room:
        raise ValueError(f"{size} bytes do not fit into {room}")
    _libc.memcpy(target_at, source_at, size)
