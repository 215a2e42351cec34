"""Jobs of several forked processes: each does what it is told, tells how that went, and where it is meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import select
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from treering.errors import ProcessFailedError, TimedOutError, TreeringError

__all__ = ["Answer", "Job", "Said", "names"]

_NUMBERS = re.compile(r"process(?:es)? ((?:\d+(?:-\d+)?)(?:(?:, | and )\d+(?:-\d+)?)*)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How one call of one process ended."""

    done: bool
    """It returned."""
    error: str = ""
    """Class and message of what it raised."""
    ours: bool = True
    """That is a TreeringError."""
    named: tuple[int, ...] = ()
    """The processes that the error names, in its attributes or its message."""
    found: str | None = None
    """What it returned, as text."""
    seconds: float = 0.0
    """How long it took."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Said:
    """What one process has said since it was last told to do something."""

    events: list[str] = dataclasses.field(default_factory=list)
    """The points that it has reached."""
    answer: Answer | None = None
    """How its call ended."""
    dead: bool = False
    """It is no more."""


def names(text: str) -> tuple[int, ...]:
    """Return the numbers of the processes that a message names.

    Example:
        >>> names("no sign of processes 2, 4-6 and 9"), names("gone: process 1")
        ((2, 4, 5, 6, 9), (1,))
    """
    found: set[int] = set()
    for match in _NUMBERS.finditer(text):
        for run in re.split(", | and ", match[1]):
            first, _, last = run.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


class Job:
    """Forked processes, one for each number; a context manager that leaves none of them behind.

    Args:
        count: how many.
        work: what a process does: gets its number, the command, and a function that tells of an event. It returns
            text, or nothing.
        log: where their standard output goes.
    """

    def __init__(self, count: int, work: Callable[[int, str, Callable[[str], None]], str | None], log: Path) -> None:
        self.count = count
        self._work = work
        self._pids: list[int] = []
        self._commands: list[int] = []
        self._answers: list[int] = []
        self._pending: list[bytes] = []
        self._ended: set[int] = set()
        self.said: list[Said] = []
        for number in range(count):
            self._fork(number, log)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all of them."""
        for number in range(self.count):
            self.signal(number, signal.SIGKILL)
            os.close(self._commands[number])
            os.close(self._answers[number])
            self._reap(number)

    def tell(self, command: str, numbers: Iterable[int] | None = None) -> None:
        """Tell processes to do something; what they said before is forgotten."""
        for number in range(self.count) if numbers is None else numbers:
            if not self.said[number].dead:
                self.said[number] = Said()
                with contextlib.suppress(BrokenPipeError):
                    os.write(self._commands[number], command.encode() + b"\n")

    def signal(self, number: int, what: int) -> None:
        """Send a signal to one of them, unless it is known to have ended."""
        if number not in self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[number], what)

    def until(self, enough: Callable[[Job], bool], seconds: float) -> bool:
        """Listen until that is enough; False when the time is over before."""
        end = time.monotonic() + seconds
        while not enough(self):
            living = [self._answers[number] for number in range(self.count) if not self.said[number].dead]
            left = end - time.monotonic()
            if left <= 0 or not living:
                return False
            for reader in select.select(living, [], [], left)[0]:
                self._hear(self._answers.index(reader))
        return True

    def ended(self, numbers: Iterable[int], seconds: float) -> bool:
        """Listen until these have answered or died; False when the time is over before."""
        wanted = list(numbers)
        return self.until(
            lambda job: all(job.said[number].dead or job.said[number].answer for number in wanted), seconds
        )

    def _hear(self, number: int) -> None:
        part = os.read(self._answers[number], 1 << 16)
        said = self.said[number]
        if not part:
            said.dead = True
            self._reap(number)
            return
        *lines, rest = (self._pending[number] + part).split(b"\n")
        self._pending[number] = rest
        for line in lines:
            value: Any = json.loads(line)
            if isinstance(value, str):
                said.events.append(value)
            else:
                said.answer = Answer(**{**value, "named": tuple(value["named"])})

    def _reap(self, number: int) -> None:
        if number not in self._ended:
            self._ended.add(number)
            os.waitpid(self._pids[number], 0)

    def _fork(self, number: int, log: Path) -> None:
        command, commands = os.pipe()
        answers, answer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(commands)
                os.close(answers)
                output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                os.dup2(output, 1)
                os.dup2(output, 2)
                _serve(self._work, number, command, answer)
            finally:
                os._exit(0)
        os.close(command)
        os.close(answer)
        self._pids.append(pid)
        self._commands.append(commands)
        self._answers.append(answers)
        self._pending.append(b"")
        self.said.append(Said())


def _serve(
    work: Callable[[int, str, Callable[[str], None]], str | None], number: int, commands: int, answers: int
) -> None:
    """Do one command after the other until there are no more."""

    def tell(event: str) -> None:
        os.write(answers, json.dumps(event).encode() + b"\n")

    with os.fdopen(commands) as lines:
        for line in lines:
            begun = time.monotonic()
            try:
                answer = Answer(done=True, found=work(number, line.rstrip("\n"), tell))
            except Exception as error:  # noqa: BLE001 - whatever it is, the judge has to know
                answer = _failed(error)
            answer = dataclasses.replace(answer, seconds=time.monotonic() - begun)
            os.write(answers, json.dumps(dataclasses.asdict(answer)).encode() + b"\n")


def _failed(error: Exception) -> Answer:
    told = set(names(str(error)))
    if isinstance(error, TimedOutError):
        told.update(error.missing)
    if isinstance(error, ProcessFailedError):
        told.update(error.processes)
    ours = isinstance(error, TreeringError)
    return Answer(done=False, error=f"{type(error).__name__}: {error}", ours=ours, named=tuple(sorted(told)))
