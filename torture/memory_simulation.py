"""Virtual processes save together over the memory store, which proves of nobody that it lives.

Their clocks differ, they sleep in the middle of a save for a minute and wake when others have gone on, and requests
come late or twice.
"""

from __future__ import annotations

import contextlib
import errno
import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeAlias, cast

from torture.simulated_folder import Violation
from torture.simulated_store import Request, SimulatedSave, WatchedStore
from torture.simulation import Simulation, payload_of, signature_of
from torture.virtual_processes import Process
from treering._coordination.message_board import FolderMessageBoard
from treering._coordination.operations import Call, Commit, Operation, Operations, Put, Remove, Rollback
from treering.errors import StoreError, TreeringError

__all__ = ["MemorySimulation"]

_Requests: TypeAlias = Generator[Operation | Request, Any, None]

_LONGEST_SLEEP = 60.0
_LATEST = 20.0


class MemorySimulation(Simulation):
    """One schedule over the memory store, drawn from a seed."""

    folder: WatchedStore  # type: ignore[assignment]

    def _draw_world(self) -> bool:
        chance = self._random.random
        self.folder = WatchedStore()
        self._late = chance() < 0.5  # whether lost requests may come later
        self._twice = 0.1 * chance() if chance() < 0.25 else 0.0
        return False

    def _start_job(self, count: int, *, calls: int, at: float) -> None:
        self._stale = 0.0  # what was written is read: buckets promise that
        if self._twice:
            self._failing = self._failing or 1e-9  # a message may be older than the one before it
        super()._start_job(count, calls=calls, at=at)
        for process in self._processes[-count:]:
            process.offset = self._random.uniform(-1e6, 1e6)
            process.rate = self._random.uniform(0.8, 1.25)
            for step, (what, seconds) in process.trouble.items():
                if what == "pause" and self._random.random() < 0.5:
                    process.trouble[step] = what, seconds + self._random.uniform(0.0, _LONGEST_SLEEP)

    # ------------------------------------------------------------------------------------------------- the coordinator

    def _coordinate(self, process: Process, call: Call) -> Operations:
        return cast("Operations", self._save(process, call))

    def _save(self, process: Process, call: Call) -> _Requests:
        save = SimulatedSave(self.folder, call.attempt, self._protocol.live(call), overwrite=process.job.overwrite)
        try:
            yield from save.enter()
        except GeneratorExit:
            raise
        except BaseException as error:
            yield from _close(save)
            yield from self._protocol.refuse(call, error)
            raise
        try:
            yield from self._run_coordinator(process, call, save)
        except GeneratorExit:
            raise
        except BaseException:
            yield from _close(save)
            raise
        yield from _close(save)

    def _run_coordinator(self, process: Process, call: Call, save: SimulatedSave) -> _Requests:
        """Do what the protocol says, with the requests of the save in the place of what it asks of a participant."""
        steps = self._protocol.coordinate(call, signature_of(process))
        answer: Any = None
        thrown: BaseException | None = None
        while True:
            try:
                operation = steps.send(answer) if thrown is None else steps.throw(thrown)
            except StopIteration:
                return
            answer = thrown = None
            if type(operation) is Commit and operation.parts != _wanted_parts(process):
                raise Violation(f"attempt {call.attempt} is committed with {operation.parts}")
            try:
                if type(operation) is Commit:
                    yield from save.commit(process.job.count)
                elif type(operation) is Rollback:
                    save.alone = True
                else:
                    answer = yield operation
            except GeneratorExit:
                raise
            except BaseException as error:  # noqa: BLE001 - goes into the protocol
                thrown = error

    # ------------------------------------------------------------------------------------------------------- requests

    def _perform(self, process: Process, operation: Operation | Request) -> None:
        process.answer = None
        match operation:
            case Request():
                self._request(process, operation)
            case Put(name, data):
                self._note_vote(process, name, data)
                self._send(process, self._failing, lambda: self.folder.put(name, data))
            case Remove(names):
                for one in names:
                    self._send(process, self._failing, functools.partial(self.folder.remove, one))
            case Rollback():
                attempt, this = process.attempt, process.this
                self._send(process, self._breaking, lambda: self.folder.remove_data(attempt, this))
            case _:
                super()._perform(process, operation)

    def _request(self, process: Process, request: Request) -> None:
        try:
            if request.lose is not None and self._random.random() < self._breaking:
                process.troubled = True
                self._lose(request.late or request.do)
                request.lose()
            request.do()
        except (TreeringError, OSError) as error:
            process.thrown = error
        else:
            if request.late is not None:
                self._repeat(request.late)

    def _work(self, process: Process) -> None:
        attempt, this = process.attempt, process.this
        if self._random.random() < self._breaking:
            process.troubled = True
            process.thrown = StoreError("no answer came")
            self._lose(lambda: self.folder.add_late(attempt, this))
            return
        self.folder.add_data(attempt, this)
        process.answer = payload_of(process, this)

    def _read(self, name: str) -> bytes | None:
        if self._failing and self._random.random() < self._failing:
            return None
        return FolderMessageBoard(self.folder).get(name)

    def _send(self, process: Process, failing: float, do: Callable[[], object]) -> None:
        """Make a request whose answer may get lost."""
        if failing and self._random.random() < failing:
            process.thrown = OSError(errno.EIO, "the answer is lost")
            self._lose(do)
        else:
            do()
            self._repeat(do)

    def _lose(self, do: Callable[[], object]) -> None:
        """Do it now, later, or never; its process does not hear which."""
        fate = self._random.random()
        if fate < 0.4:
            _try(do)
        elif fate < 0.8 and self._late:
            self._later(do)

    def _repeat(self, do: Callable[[], object]) -> None:
        if self._twice and self._random.random() < self._twice:
            self._later(do)

    def _later(self, do: Callable[[], object]) -> None:
        self.counts["late"] += 1
        self._push(self._now + self._random.uniform(0.0, _LATEST), lambda: _try(do))


def _close(save: SimulatedSave) -> Iterator[Request]:
    """End it, also where an interrupt comes between."""
    for request in save.close():
        while True:
            try:
                yield request
            except KeyboardInterrupt:
                continue
            break


def _try(do: Callable[[], object]) -> None:
    with contextlib.suppress(TreeringError, OSError):
        do()


def _wanted_parts(process: Process) -> tuple[bytes, ...]:
    return tuple(payload_of(process, this) for this in range(process.job.count))
