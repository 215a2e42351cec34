"""Virtual processes that carry out the steps of a joint save in turn, with a clock that only sleeping moves."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

from treering._coordination.operations import (
    Call,
    Commit,
    Get,
    Now,
    Operation,
    Operations,
    PrepareData,
    Put,
    Remove,
    Rollback,
    Sleep,
)
from treering._coordination.two_phase_commit import coordinate, participate
from treering._values.processes import Processes
from treering._values.timing import Timing
from treering.errors import MismatchError

JOB = "0123456789abcdef"
SIGNATURE = b"signature"


class Killed(Exception):
    """A process is no more."""


def call_of(this: int, count: int, *, number: int = 1, timeout: float = 60.0, fan_in: int = 32) -> Call:
    return Call(
        job=JOB,
        number=number,
        processes=Processes(this=this, count=count),
        timeout=timeout,
        doing="save 'ckpt'",
        who=f"host {this}, pid 7{this}",
        timing=Timing(fan_in=fan_in),
    )


def check(signature: bytes) -> None:
    if signature != SIGNATURE:
        raise MismatchError("leaf 'a' differs")


@dataclasses.dataclass
class Virtual:
    """One process: its steps, and what goes wrong in them."""

    steps: Operations
    this: int
    prepare: Callable[[], bytes]
    at: float = 0.0
    """When it goes on."""
    before: Callable[[Operation], None] = lambda step: None
    """Called before each step; what it raises is thrown into the steps, `Killed` ends them."""
    ended: bool = False
    error: BaseException | None = None


class Meeting:
    """A folder of notes, a clock, and what was done."""

    def __init__(self) -> None:
        self.notes: dict[str, bytes] = {}
        self.now = 0.0
        self.done: list[tuple[int, str]] = []
        """What was done, in order: process, and ``prepare``, ``commit``, ``roll back`` or the name of a message."""
        self.reads: collections.Counter[int] = collections.Counter()
        """How many messages each process has read."""
        self.parts: tuple[bytes, ...] | None = None
        self.processes: dict[int, Virtual] = {}

    def add(self, this: int, steps: Operations, *, at: float = 0.0, **more: Any) -> Virtual:
        virtual = Virtual(steps, this, **({"prepare": lambda: b"part %d" % this} | more), at=at)
        self.processes[this] = virtual
        return virtual

    def lead(self, count: int, *, number: int = 1, timeout: float = 60.0, fan_in: int = 32, **more: Any) -> Virtual:
        call = call_of(0, count, number=number, timeout=timeout, fan_in=fan_in)
        call = dataclasses.replace(call, **more.pop("call", {}))
        return self.add(0, coordinate(call, more.pop("signature", SIGNATURE)), **more)

    def follow(
        self, this: int, count: int, *, number: int = 1, timeout: float = 60.0, fan_in: int = 32, **more: Any
    ) -> Virtual:
        checked = more.pop("check", check)
        call = call_of(this, count, number=number, timeout=timeout, fan_in=fan_in)
        call = dataclasses.replace(call, **more.pop("call", {}))
        return self.add(this, participate(call, checked), **more)

    def run(self) -> dict[int, BaseException | None]:
        """Let all of them end; return what each raised."""
        while alive := [virtual for virtual in self.processes.values() if not virtual.ended]:
            virtual = min(alive, key=lambda one: one.at)
            self.now = max(self.now, virtual.at)
            self.advance(virtual)
        return {this: virtual.error for this, virtual in self.processes.items()}

    def advance(self, virtual: Virtual) -> None:
        answer: Any = None
        thrown: BaseException | None = None
        while True:
            try:
                step = virtual.steps.send(answer) if thrown is None else virtual.steps.throw(thrown)
            except StopIteration:
                virtual.ended = True
                return
            except BaseException as error:  # noqa: BLE001 - tests look at it
                virtual.ended, virtual.error = True, error
                return
            answer = thrown = None
            try:
                virtual.before(step)
                if isinstance(step, Sleep):
                    virtual.at = self.now + step.seconds
                    return
                answer = self.do(virtual, step)
            except Killed as error:
                virtual.ended, virtual.error = True, error
                return
            except BaseException as error:  # noqa: BLE001 - goes into the steps
                thrown = error

    def do(self, virtual: Virtual, step: Operation) -> Any:
        match step:
            case Get(name):
                self.reads[virtual.this] += 1
                return self.notes.get(name)
            case Put(name, data):
                self.done.append((virtual.this, name))
                self.notes[name] = data
            case Remove(names):
                for name in names:
                    self.notes.pop(name, None)
            case Now():
                return self.now
            case PrepareData():
                self.done.append((virtual.this, "prepare"))
                return virtual.prepare()
            case Commit(parts):
                self.done.append((virtual.this, "commit"))
                self.parts = parts
            case Rollback():
                self.done.append((virtual.this, "roll back"))
        return None

    def who(self, what: str) -> list[int]:
        """The processes that did something, in order."""
        return [this for this, did in self.done if did == what]
