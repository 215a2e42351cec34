"""Virtual processes save together: the real steps, a virtual clock, every kind of trouble, all from one seed."""

from __future__ import annotations

import collections
import dataclasses
import errno
import functools
import heapq
import random
from collections.abc import Callable

from torture.judged_schedules import TIMING, JudgedSchedule
from torture.simulated_folder import SimulatedFolder, Violation
from torture.virtual_processes import Job, Process, Protocol
from treering._coordination import messages
from treering._coordination.operations import (
    Call,
    Commit,
    Get,
    MakeFolder,
    Now,
    Operation,
    Operations,
    OutOfStep,
    PrepareData,
    Put,
    Remove,
    Rollback,
    Sleep,
)
from treering._values.checkpoint_names import vote_name
from treering._values.processes import Processes
from treering._values.timing import Timing
from treering.errors import BusyError, ExistsError, MismatchError, StoreError, TimedOutError, TreeringError

__all__ = ["Simulation", "payload_of", "signature_of"]

# The same notes are read a hundred times over, by many processes of which each would read them once.
messages.VoteMessage.decode = functools.lru_cache(maxsize=256)(messages.VoteMessage.decode)  # type: ignore[method-assign]
messages.SumMessage.decode = functools.lru_cache(maxsize=256)(messages.SumMessage.decode)  # type: ignore[method-assign]
messages.DecisionMessage.decode = functools.lru_cache(maxsize=256)(messages.DecisionMessage.decode)  # type: ignore[method-assign]

_MOST_STEPS = 45
_LONG_SIGNATURE = 1100
"""Bytes of a signature that goes into a message of its own."""
_TWO_PAYLOADS = 60
"""Bytes that hold two payloads, and not three."""


@functools.cache
def _timing(fan_in: int) -> Timing:
    return dataclasses.replace(TIMING, fan_in=fan_in)


class Simulation(JudgedSchedule):
    """One schedule, drawn from a seed.

    Attributes:
        counts: what was seen, by name.
    """

    def __init__(self, seed: str, protocol: Protocol, processes: int | None) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._random = random.Random(seed)
        self._protocol = protocol
        self._now = 0.0
        self._queue: list[tuple[float, int, Process | Callable[[], None]]] = []
        self._tick = 0
        self._processes: list[Process] = []
        self._started = 0
        self._draw(processes)

    # ---------------------------------------------------------------------------------------------------- the schedule

    def _draw(self, processes: int | None) -> None:
        chance = self._random.random
        for_leaves = self._draw_world()
        self._swift = 1.0 - 0.5 * chance()  # the share of operations that take no time
        self._slow = 0.1 if chance() < 0.3 else 0.0
        self._stale = 0.3 * chance() if chance() < 0.25 else 0.0
        self._failing = 0.1 * chance() if chance() < 0.25 else 0.0
        self._breaking = 0.3 * chance() if chance() < 0.3 else 0.0  # of work and commit
        self._overwrite = for_leaves or chance() < 0.75
        jobs = 2 if chance() < 0.3 else 1
        for _ in range(jobs):
            count = processes or (self._random.randrange(9, 33) if chance() < 0.01 else self._random.choice(_COUNTS))
            calls = self._random.randrange(3, 7) if chance() < 0.05 else self._random.choice((1, 1, 1, 2))
            self._start_job(count, calls=calls, at=0.0)
        if chance() < 0.25:
            self._push(self._random.uniform(0.0, 8.0), self._restart)

    def _draw_world(self) -> bool:
        """Make the folder; tell whether it is a leaves directory."""
        chance = self._random.random
        for_leaves = chance() < 0.25
        self.folder = SimulatedFolder(locks_are_seen=chance() < 0.8, for_leaves=for_leaves, is_there=chance() < 0.5)
        return for_leaves

    def _start_job(self, count: int, *, calls: int, at: float) -> None:
        job = Job(
            name=self._protocol.job_name(self._started),
            count=count,
            calls=calls,
            timeout=self._random.choice((1.5, 3.0)),
            overwrite=self._overwrite,
            fan_in=self._random.choice((1, 2, 2, 3, 32)),
        )
        self._started += 1
        self._draw_messages(job)
        if self._slow or self._stale or self._failing or self._breaking:
            job.troubled = True
        hurt = self._random.choice((0, 0, 0, 1, 1, 2))
        for this in range(count):
            process = Process(number=len(self._processes), job=job, this=this)
            self._processes.append(process)
            if job.differs and this == job.differs[0]:
                process.troubled = job.troubled = True
            late = at + self._random.random() * self._random.choice((0.01, 0.1, 0.5))
            if self._random.random() < 0.05:
                late += self._random.uniform(0.0, 3 * job.timeout)
                process.troubled = job.troubled = True
            self._push(late, process)
        for process in self._random.sample(self._processes[-count:], min(hurt, count)):
            what = self._random.choice(("kill", "pause", "pause", "interrupt"))
            process.trouble[self._random.randrange(_MOST_STEPS)] = what, self._random.uniform(0.0, 4 * job.timeout)

    def _draw_messages(self, job: Job) -> None:
        """Draw how long messages are, and whether a process saves another tree than the others."""
        chance = self._random.random
        if chance() < 0.25:
            job.signature = _LONG_SIGNATURE
            self.counts["long signatures"] += 1
        if job.count > job.fan_in + 1 and chance() < 0.25:
            job.most_payloads = self._random.choice((0, 0, _TWO_PAYLOADS))
            self.counts["sums without payloads"] += 1
        if job.count > 1 and chance() < 0.06:
            job.differs = self._random.randrange(1, job.count), self._random.randint(1, job.calls)

    def _push(self, when: float, process: Process | Callable[[], None]) -> None:
        self._tick += 1
        heapq.heappush(self._queue, (when, self._tick, process))

    # -------------------------------------------------------------------------------------------------------- the world

    def run(self) -> None:
        """Let all of it happen, until every process has ended.

        Raises:
            Violation: a rule was broken.
        """
        while self._queue:
            self._now, _, process = heapq.heappop(self._queue)
            if not isinstance(process, Process):
                process()
            elif process.alive:
                if process.until > self._now:
                    self._push(process.until, process)
                else:
                    self._advance(process)
        self.judge()
        self.folder.save_alone()

    def _restart(self) -> None:
        """Kill a job, but for a process or two that are out of reach, and start it again."""
        job = self._random.choice(self._processes).job
        job.troubled = True
        reached = self._random.choice((1.0, 1.0, 0.7))
        for process in self._processes:
            if process.job is job:
                process.troubled = True
                if process.alive and self._random.random() < reached:
                    self._kill(process)
        self.counts["restarted"] += 1
        count = job.count if self._random.random() < 0.7 else self._random.choice(_COUNTS)
        self._start_job(count, calls=job.calls, at=self._now + self._random.choice((0.0, 0.1, 3.0)))

    def _kill(self, process: Process) -> None:
        process.alive = False
        process.troubled = process.job.troubled = True
        self.folder.release(process.number)
        self.counts["killed"] += 1

    # ---------------------------------------------------------------------------------------------------- one process

    def _advance(self, process: Process) -> None:
        """Let one process go on until it has to wait."""
        if process.late is not None:
            late, process.late = process.late, None
            self._perform(process, late)
        if process.steps is None:
            self._enter(process)
        while (operation := self._next(process)) is not None and self._at_once(process, operation):
            pass

    def _next(self, process: Process) -> Operation | None:
        """Ask a process for its next operation; None when it has ended its call."""
        steps = process.steps
        if steps is None:
            return None
        while True:
            thrown, process.thrown = process.thrown, None
            try:
                operation = steps.send(process.answer) if thrown is None else steps.throw(thrown)
            except StopIteration:
                self._end(process, None)
                return None
            except (TreeringError, KeyboardInterrupt) as error:
                self._end(process, error)
                return None
            process.answer = None
            if type(operation) is not Now:
                return operation
            process.answer = process.offset + self._now * process.rate

    def _at_once(self, process: Process, operation: Operation) -> bool:
        """Do an operation that takes no time, and return True; else begin with it."""
        process.done += 1
        if process.done in process.trouble:
            self._suffer(process)
            if not process.alive:
                return False
            if process.thrown is not None:
                return True
        if type(operation) is Sleep:
            self._push(self._now + operation.seconds / process.rate, process)
            return False
        wait = 0.0
        chance = self._random.random
        if type(operation) is PrepareData:
            wait = chance() * 0.5
        elif chance() >= self._swift:
            wait = chance() * 0.02
            if self._slow and chance() < self._slow:
                wait += chance()
        if not wait and process.until <= self._now:
            self._perform(process, operation)
            return True
        process.allowed += wait
        if chance() < 0.5:
            process.late = operation
        else:
            self._perform(process, operation)
        self._push(self._now + wait, process)
        return False

    def _suffer(self, process: Process) -> None:
        """Do to a process what was drawn for it."""
        what, seconds = process.trouble[process.done]
        process.troubled = process.job.troubled = True
        if what == "kill":
            self._kill(process)
        elif what == "pause":
            process.until = self._now + seconds
            process.allowed += seconds
            self.counts["paused"] += 1
        else:
            process.thrown = KeyboardInterrupt()
            self.counts["interrupted"] += 1

    def _enter(self, process: Process) -> None:
        """Begin the next call."""
        job = process.job
        process.call += 1
        process.number_of_call += 1
        call = Call(
            job=job.name,
            number=process.number_of_call,
            processes=Processes(this=process.this, count=job.count),
            timeout=job.timeout,
            doing="save 'ckpt'",
            who=f"host {process.number}, pid {process.number}",
            timing=_timing(job.fan_in),
            most_payloads=job.most_payloads,
        )
        process.attempt = call.attempt
        process.began, process.allowed, process.before_vote = self._now, 0.0, 0.0
        process.answer = process.thrown = None
        process.leads = False
        if process.this:
            process.steps = self._protocol.participate(call, functools.partial(_check, process))
            return
        process.steps = self._coordinate(process, call)

    def _coordinate(self, process: Process, call: Call) -> Operations:
        """Return the operations of process 0."""
        job = process.job
        unheard = frozenset(self.folder.unheard)
        try:
            self.folder.enter(process.number, call.attempt, self._protocol.live(call), overwrite=job.overwrite)
        except (BusyError, ExistsError) as error:
            return _then(self._protocol.refuse(call, error), error)
        finally:
            self.folder.unheard -= call.live_attempts - unheard  # what it sweeps itself is no excuse
        process.leads = True
        return self._protocol.coordinate(call, signature_of(process))

    # ----------------------------------------------------------------------------------------------- what operations do

    def _perform(self, process: Process, operation: Operation) -> None:
        if type(operation) is Get:  # most of them
            process.answer = self._read(operation.name)
            return
        folder, chance = self.folder, self._random.random
        process.answer = None
        match operation:
            case Put(name, data):
                self._put(process, name, data)
            case MakeFolder():
                folder.is_there = True
            case Remove(names):
                for name in names:
                    folder.remove(name)
                if self._failing and chance() < self._failing:
                    process.thrown = OSError(errno.EIO, "the answer is lost")
            case PrepareData():
                self._work(process)
            case Commit(parts):
                self._commit(process, parts)
            case Rollback():
                if process.leads:
                    folder.withdraw_all(process.attempt)
                elif chance() >= self._breaking:
                    folder.remove_data(process.attempt, process.this)

    def _note_vote(self, process: Process, name: str, data: bytes) -> None:
        """Keep for the judge when a process votes, and that it votes for no save."""
        if name == vote_name(process.attempt, process.this):
            process.before_vote = process.allowed
            if messages.VoteMessage.decode(data).failure is not None:
                process.gave_up = process.call

    def _put(self, process: Process, name: str, data: bytes) -> None:
        self._note_vote(process, name, data)
        lost = self._failing and self._random.random() < self._failing
        try:
            if not lost or self._random.random() < 0.5:
                self.folder.put(name, data)
        except FileNotFoundError as error:
            process.thrown = error
        if lost:
            process.thrown = OSError(errno.EIO, "the answer is lost")

    def _read(self, name: str) -> bytes | None:
        if self._stale and self._random.random() < self._stale:
            return self.folder.older.get(name)
        if self._failing and self._random.random() < self._failing:
            return None
        return self.folder.notes.get(name)

    def _work(self, process: Process) -> None:
        fails = self._random.random() < self._breaking
        if not fails or self._random.random() < 0.5:
            self.folder.add_data(process.attempt, process.this)
        if fails:
            process.troubled = True
            process.thrown = StoreError("no space left on device")
        else:
            process.answer = payload_of(process, process.this)

    def _commit(self, process: Process, parts: tuple[bytes, ...]) -> None:
        wanted = tuple(payload_of(process, this) for this in range(process.job.count))
        chance = self._random.random
        fails = chance() < self._breaking
        if fails:
            process.troubled = True
        try:
            if not fails or chance() < 0.5:
                self.folder.commit(process.attempt, parts, wanted, tidy=chance() < 0.9)
        except (BusyError, ExistsError) as error:
            process.thrown = error
            return
        if fails:
            process.thrown = StoreError("perhaps it is in place")

    # ------------------------------------------------------------------------------------------------------- judgement

    def _end(self, process: Process, error: BaseException | None) -> None:
        """End a call, and see whether its end is a good one."""
        if process.leads:
            self.folder.leave(process.number, process.attempt)
        process.steps = None
        process.results[process.call] = error
        process.ended[process.call] = self._now
        self.counts[_outcome(error)] += 1
        if isinstance(error, OutOfStep):
            process.number_of_call = self._protocol.counted(process.number_of_call, error.number)
        if error is None and process.attempt not in self.folder.commits:
            raise Violation(f"process {process.this} reports success of {process.attempt}, which was never committed")
        took = self._now - process.began - process.allowed
        bound = (3.1 * process.job.timeout + 3 * TIMING.linger) / process.rate
        if took > bound:
            raise Violation(f"process {process.this} waited {took:.1f} s, its deadlines are {bound:.1f} s")
        if isinstance(error, TreeringError):
            self.judge_error(process, error)
        if isinstance(error, TimedOutError) and process.this == 0 and took > process.job.timeout / 2:
            self.judge_wait(process)
        if process.call < process.job.calls:
            self._push(self._now + self._random.random() * 0.2, process)


_COUNTS = (2, 2, 2, 2, 3, 3, 4, 5, 6, 8)


def payload_of(process: Process, this: int) -> bytes:
    """What a process has to hand in so that all parts are of one call of the program, which saves one state."""
    return f"{process.attempt} {this} in call {process.call}".encode()


def signature_of(process: Process) -> bytes:
    """What process 0 is saving in the call that a process is in."""
    return f"what {process.attempt} saves".encode().ljust(process.job.signature, b".")


def _check(process: Process, signature: bytes) -> None:
    """Compare what a process is saving with what process 0 is.

    Raises:
        MismatchError: it differs, as was drawn.
        Violation: this is not what process 0 is saving.
    """
    if signature != signature_of(process):
        raise Violation(f"the signature came as {signature!r}")
    if process.job.differs == (process.this, process.call):
        raise MismatchError("leaf 'a' differs")


def _then(steps: Operations, error: BaseException) -> Operations:
    """Tell the others, then raise."""
    yield from steps
    raise error


def _outcome(error: BaseException | None) -> str:
    if error is None:
        return "committed"
    if isinstance(error, OutOfStep):
        return "overtaken"
    if isinstance(error, TimedOutError):
        return "timed out, outcome unknown" if "not known here" in str(error) else "timed out"
    if isinstance(error, ExistsError | BusyError):
        return "refused"
    return type(error).__name__
