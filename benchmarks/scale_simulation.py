"""Joint saves of thousands of virtual processes: the real protocol, a virtual clock, operations that take a given time.

Each operation takes that time for each name that it reads, writes or removes, and has its effect at the end of it. A
bucket serves up to 16 names of one operation at once. Nothing waits for a processor, a network or another's operation.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import heapq
import random
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from treering._coordination import messages
from treering._coordination.operations import Call, Get, Now, Operation, Operations, PrepareData, Sleep
from treering._coordination.two_phase_commit import coordinate, participate
from treering._values.processes import Processes
from treering.errors import TreeringError

__all__ = ["BUCKET_COST", "LEAVES", "Figures", "Setting", "simulate"]

LEAVES = 1_000
"""Leaves of the tree; each has 8 bytes in the signature, and a checksum of 8 bytes."""
BUCKET_COST = 0.05
"""Seconds from which on an operation is a request to a bucket."""

_AT_ONCE = 16
_TIMEOUT = 600.0
_LATEST_START = 0.02
_LEAST_SHARE = 0.7
_REMEMBERED = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One joint save."""

    processes: int
    """How many there are."""
    cost: float
    """Seconds that one operation on the store takes."""
    writing: float
    """Seconds of writing; each process takes a share of 0.7 to 1.0 of them."""
    seed: int = 0
    """Of the shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What the messages of one joint save cost."""

    setting: Setting
    """The save."""
    mean_reads: float
    """Messages that a process asked for, whether they were there or not."""
    most_reads: int
    """The same of the process with the most."""
    mean_bytes: float
    """Bytes of messages that a process read and wrote, beside the signature once and the payload that it handed in; of
    process 0 beside the payloads of all."""
    most_bytes: int
    """The same of the process with the most."""
    created: float
    """Messages that a process wrote; all over the number of processes."""
    removed: float
    """Messages that a process removed; the same."""
    after: float
    """Seconds from the end of the slowest writer to the return of the last process."""
    rate: float
    """Operations a second of all processes, over the whole save."""
    busiest: int
    """The most operations that ended within one second of the clock."""
    failed: int
    """Processes that raised, because a deadline passed."""


@dataclass(slots=True, eq=False)
class _Process:
    """One virtual process."""

    steps: Operations
    writes: float
    """Seconds of writing."""
    payload: bytes
    pending: Operation | None = None
    """What it does until its next turn."""
    reads: int = 0
    moved: int = 0
    """Bytes of messages."""
    signature: int = 0
    """Those of them that are the signature, where it was there for the first time."""
    handed_in: int = 0
    """Those of them that are the own payload, in the same way."""
    written: int = 0
    removed: int = 0


def simulate(setting: Setting) -> Figures:
    """Run one save, and return what it cost."""
    with _remembered_messages():
        return _Save(setting).run()


class _Save:
    """A save by virtual processes."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._messages: dict[str, bytes] = {}
        self._with_signature: dict[str, int] = {}
        self._per_second: Counter[int] = Counter()
        self._written = 0.0
        self._failed = 0
        source = random.Random(f"{setting.seed} {setting.processes} {setting.writing}")
        self._signature = source.randbytes(8 * LEAVES)
        self._processes = [self._make(this, source) for this in range(setting.processes)]
        self._queue = [(source.random() * _LATEST_START, this) for this in range(setting.processes)]
        heapq.heapify(self._queue)

    def _make(self, this: int, source: random.Random) -> _Process:
        count = self._setting.processes
        call = Call(
            job="0123456789abcdef",
            number=1,
            processes=Processes(this=this, count=count),
            timeout=_TIMEOUT,
            doing="save '/checkpoints/run/00001000'",
            who=f"host-{this // 8:04d}.cluster.local, pid {100_000 + this}",
        )
        # How many checksums there are, and a checksum for each leaf of its share.
        payload = source.randbytes(8 * (1 + max(1, LEAVES // count)))
        writes = self._setting.writing * source.uniform(_LEAST_SHARE, 1.0)
        return _Process(participate(call, _ignore) if this else coordinate(call, self._signature), writes, payload)

    def run(self) -> Figures:
        """Let all processes end."""
        queue, now = self._queue, 0.0
        while queue:
            now, this = queue[0]
            process = self._processes[this]
            duration = self._advance(process, now)
            if duration is None:
                heapq.heappop(queue)
            else:
                heapq.heapreplace(queue, (now + duration, this))
        return self._figures(now)

    def _advance(self, process: _Process, now: float) -> float | None:
        """Do what a process was at, and begin with its next operation; return how long that takes, None at its end."""
        operation = process.pending
        answer = None if operation is None else self._perform(process, operation, now)
        send = process.steps.send
        try:
            operation = send(answer)
            while type(operation) is Now:
                operation = send(now)
        except StopIteration:
            return None
        except TreeringError:
            self._failed += 1
            return None
        process.pending = operation
        if type(operation) is Get:  # most of them
            return self._setting.cost
        if type(operation) is Sleep:
            return operation.seconds
        return process.writes if type(operation) is PrepareData else self._cost(len(_names(operation)))

    def _cost(self, names: int) -> float:
        cost = self._setting.cost
        turns = -(-names // _AT_ONCE) if cost >= BUCKET_COST else names
        return cost * max(1, turns)  # the commit and the making of the folder have no names

    def _perform(self, process: _Process, operation: Any, now: float) -> Any:
        if type(operation) is Get:
            self._per_second[int(now)] += 1
            return self._read(process, operation.name)
        if type(operation) is Sleep:
            return None
        if type(operation) is PrepareData:
            self._written = max(self._written, now)
            return process.payload
        names = _names(operation)
        self._per_second[int(now)] += max(1, len(names))
        kind = type(operation).__name__
        if kind.startswith("Get"):
            return tuple(self._read(process, name) for name in names)
        if kind.startswith("Remove"):
            process.removed += len(names)
            for name in names:
                self._messages.pop(name, None)
        elif names:
            process.written += 1
            data: bytes = operation.data
            process.moved += len(data)
            process.handed_in = process.handed_in or _bytes_of(process.payload, data)
            self._messages[names[0]] = data
            if size := _bytes_of(self._signature, data):
                self._with_signature[names[0]] = process.signature = size
        return None

    def _read(self, process: _Process, name: str) -> bytes | None:
        process.reads += 1
        data = self._messages.get(name)
        if data is not None:
            process.moved += len(data)
            if not process.signature:
                process.signature = self._with_signature.get(name, 0)
        return data

    def _figures(self, end: float) -> Figures:
        processes = self._processes
        count = len(processes)
        moved = [process.moved - process.signature - process.handed_in for process in processes]
        moved[0] -= sum(process.handed_in for process in processes[1:])
        return Figures(
            setting=self._setting,
            mean_reads=statistics.fmean(process.reads for process in processes),
            most_reads=max(process.reads for process in processes),
            mean_bytes=statistics.fmean(moved),
            most_bytes=max(moved),
            created=sum(process.written for process in processes) / count,
            removed=sum(process.removed for process in processes) / count,
            after=end - self._written,
            rate=sum(self._per_second.values()) / end,
            busiest=max(self._per_second.values()),
            failed=self._failed,
        )


def _names(operation: Any) -> Sequence[str]:
    """Return the names of the messages that an operation is about, whichever operations there are."""
    if hasattr(operation, "names"):
        return tuple(operation.names)
    return (operation.name,) if hasattr(operation, "name") else ()


def _bytes_of(part: bytes, data: bytes) -> int:
    """Return how many bytes of a message stand for a part of it; 0 where it is not there."""
    if len(data) < len(part):
        return 0
    return next((len(form) for form in (part, base64.b64encode(part)) if form in data), 0)


def _ignore(signature: bytes) -> None:
    """Take the tree of process 0 as the own one."""


@contextlib.contextmanager
def _remembered_messages() -> Iterator[None]:
    """Decode each content of a message once only: what takes real processes microseconds takes one program minutes."""
    with contextlib.ExitStack() as stack:
        for kind in vars(messages).values():
            if isinstance(kind, type) and "decode" in vars(kind):
                stack.callback(setattr, kind, "decode", vars(kind)["decode"])
                setattr(kind, "decode", functools.lru_cache(_REMEMBERED)(getattr(kind, "decode")))  # noqa: B009, B010
        yield
