"""The votes of a joint save come in through a tree: each process collects those of a few others and hands on their sum.

Process ``p`` collects for the processes ``fan_in * p + 1`` to ``fan_in * (p + 1)``; up to 33 processes, process 0
collects for all. The tree carries votes and departures only while all goes well. Process 0 looks at each message itself
at its deadline, and once the attempt has failed, so that no process in between decides which ones are missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Generator, Iterable, Iterator
from typing import Any, Final

from treering._coordination import operations
from treering._coordination.messages import Failure, SumMessage, VoteMessage, VoteStage
from treering._coordination.operations import Call, Operation, Operations
from treering._values.checkpoint_names import arrival_name, departure_name, sum_name, vote_name
from treering.errors import CorruptError

_ALL: Final = 8
"""Up to how many missing messages a process looks at all of them at once."""
_GLANCE: Final = 3
"""At how many it looks where more are missing."""
_LINGERS_FOR: Final = 256
"""Of how many processes the departures fit into the time that process 0 lingers; for more it waits longer."""


class Votes:
    """What has come in for one process from those that hand in to it.

    Attributes:
        payloads: what process 0 needs for the commit, by process.
        failures: why processes failed.
        waiting: the processes whose message is missing, and what was read in its place.

    Args:
        call: the call.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._fan_in = call.timing.fan_in
        self.payloads: dict[int, bytes] = {}
        self.failures: dict[int, Failure] = {}
        self.waiting: dict[int, VoteMessage | SumMessage | CorruptError | None] = dict.fromkeys(
            children_of(call.processes.this, call.processes.count, self._fan_in)
        )

    def look(self) -> Generator[Operation, Any, bool]:
        """Look at some of the messages that are missing; return whether more are likely to be there."""
        found = 0
        for process in (some := choose_some(self.waiting)):
            del self.waiting[process]  # those not seen now are looked at before it is looked at again
            found += yield from (self._look_at_sum(process) if self._collects(process) else self._look_at_vote(process))
        return 2 * found > len(some)

    def look_at_all(self) -> Operations:
        """Look at the vote of each process that is missing, also of those that would come through another one."""
        for top in tuple(self.waiting):
            del self.waiting[top]
            yield from self._look_directly(top)
        for process, read in tuple(self.waiting.items()):
            if read is None:
                name = arrival_name(self._call.attempt, process)
                self.waiting[process] = operations.decode_or_error(VoteMessage.decode, (yield operations.Get(name)))

    def put_sum(self, own: bytes) -> Operations:
        """Hand on what has come in, with the own payload."""
        payloads = {self._call.processes.this: own, **self.payloads}
        if self.failures or sum(map(len, payloads.values())) > self._call.most_payloads:
            payloads = {}
        message = SumMessage(payloads=payloads, failures=self.failures)
        yield operations.Put(sum_name(self._call.attempt, self._call.processes.this), message.encode())

    def _collects(self, process: int) -> bool:
        return bool(children_of(process, self._call.processes.count, self._fan_in))

    def _look_at_sum(self, process: int) -> Generator[Operation, Any, bool]:
        name = sum_name(self._call.attempt, process)
        read = operations.decode_or_error(SumMessage.decode, (yield operations.Get(name)))
        if not isinstance(read, SumMessage):
            self.waiting[process] = read
            return False
        below = set(subtree_of(process, self._call.processes.count, self._fan_in))
        if read.failures.keys() <= below and (read.failures or read.payloads.keys() == below):
            self.failures |= read.failures
            self.payloads |= read.payloads
        elif read.payloads or read.failures:
            self.waiting[process] = CorruptError("it speaks for other processes than those that hand in to it")
            return False
        else:
            yield from self._look_directly(process)
            return self.waiting.keys().isdisjoint(below)
        return True

    def _look_directly(self, top: int) -> Operations:
        for process in subtree_of(top, self._call.processes.count, self._fan_in):
            yield from self._look_at_vote(process)

    def _look_at_vote(self, process: int) -> Generator[Operation, Any, bool]:
        name = vote_name(self._call.attempt, process)
        vote = operations.decode_or_error(VoteMessage.decode, (yield operations.Get(name)))
        if isinstance(vote, VoteMessage) and vote.failure is not None:
            self.failures[process] = attribute(vote.failure, process, vote.who)
        elif isinstance(vote, VoteMessage) and vote.stage is VoteStage.PREPARED:
            self.payloads[process] = vote.payload
        else:
            self.waiting[process] = vote
            return False
        return True


def choose_some(waiting: Collection[int]) -> list[int]:
    """Return at which processes to look next: those that were not looked at for the longest time.

    Example:
        >>> choose_some(range(1, 8)), choose_some(range(1, 33))
        ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3])
    """
    return list(waiting)[: _GLANCE if len(waiting) > _ALL else _ALL]


def attribute(failure: Failure, process: int, who: str) -> Failure:
    """Return why a process failed, in wire form.

    A process that has given up waiting for another is the one that is missing now.

    Example:
        >>> late = Failure(name="TimedOutError", message="process 0 did not arrive", missing=(0,))
        >>> attribute(late, 3, "host").missing
        (3,)
    """
    told = failure.attribute_to(operations.describe_process(process, who))
    return dataclasses.replace(told, missing=(process,) if told.missing else ())


def put_failure(call: Call, failure: Failure) -> Operations:
    """Hand on why this process failed, at once: also in the place of those above, which may be at work for long."""
    this = process = call.processes.this
    message = SumMessage(failures={this: attribute(failure, this, call.who)}).encode()
    while process:
        if process != this or children_of(this, call.processes.count, call.timing.fan_in):
            yield operations.Put(sum_name(call.attempt, process), message)
        process = parent_of(process, call.timing.fan_in)


def await_departures(
    call: Call, processes: Iterable[int], repeat: Operation | None = None, *, every: float = 0.0
) -> Generator[Operation, Any, tuple[int, ...] | None]:
    """Wait until processes have left, but not long; return those that were waited for, None where some have not left.

    Args:
        call: the call.
        processes: those that are waited for.
        repeat: what is carried out first, and again while processes are missing; an error of it is no reason to end.
        every: after how many seconds it is carried out again.
    """
    waiting = dict.fromkeys(processes)
    waited = dict(waiting)
    pause = operations.poll_intervals(call, collects=True)
    now = yield operations.NOW
    # Only process 0 can wait for more than fit into that time.
    patience = 1.0 if call.processes.this else max(1.0, call.processes.count / _LINGERS_FOR)
    due, end = now, now + call.linger * patience
    while True:
        if repeat is not None and now >= due:
            with contextlib.suppress(OSError):
                yield repeat
            due = now + every
        found = 0
        for process in (some := choose_some(waiting)):
            del waiting[process]
            name = departure_name(call.attempt, process)
            left = operations.decode_or_error(VoteMessage.decode, (yield operations.Get(name)))
            if not isinstance(left, VoteMessage):
                waiting[process] = None
                continue
            found += 1
            if left.stage is VoteStage.FAILED:  # it gave up and waited for none of those that hand in to it
                below = dict.fromkeys(children_of(process, call.processes.count, call.timing.fan_in))
                waiting |= {one: None for one in below if one not in waited}
                waited |= below
        if not waiting:
            return tuple(waited)
        if 2 * found <= len(some):  # else more are likely to be there, and are looked at although the time is over
            if now >= end:
                return None
            yield operations.Sleep(min(next(pause), end - now))
        now = yield operations.NOW


def messages_of(call: Call, processes: Iterable[int]) -> tuple[str, ...]:
    """Return the names of all messages of some processes."""
    attempt, count, fan_in = call.attempt, call.processes.count, call.timing.fan_in
    names: list[str] = []
    for process in processes:
        names += (arrival_name(attempt, process), vote_name(attempt, process), departure_name(attempt, process))
        if process and children_of(process, count, fan_in):
            names.append(sum_name(attempt, process))
    return tuple(names)


def parent_of(process: int, fan_in: int) -> int:
    """Return the process that collects the vote of another; of process 0 there is none, and 0 stands for it.

    Example:
        >>> parent_of(32, 32), parent_of(33, 32)
        (0, 1)
    """
    return max(process - 1, 0) // fan_in


def children_of(process: int, count: int, fan_in: int) -> range:
    """Return the processes whose votes a process collects.

    Example:
        >>> children_of(0, 34, 32), children_of(1, 34, 32), children_of(2, 34, 32)
        (range(1, 33), range(33, 34), range(34, 34))
    """
    first = fan_in * process + 1
    return range(min(first, count), min(first + fan_in, count))


def subtree_of(process: int, count: int, fan_in: int) -> Iterator[int]:
    """Yield a process and all whose votes go through it.

    Example:
        >>> list(subtree_of(1, 12, 2))
        [1, 3, 4, 7, 8, 9, 10]
    """
    level = range(process, process + 1)
    while level:
        yield from level
        level = range(children_of(level[0], count, fan_in).start, children_of(level[-1], count, fan_in).stop)
