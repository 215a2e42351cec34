"""Programs save a single file in a simulated bucket again and again: few contents that recur, and versions that may.

Requests are lost, late, refused and done twice; programs sleep and are killed, anywhere. What a saver was told holds:
what was acknowledged is not undone by a save that had ended before, and what was refused is never there.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from torture.simulated_folder import Violation
from treering._store.api import Outcome
from treering._store.objects.protocol import put_file
from treering._store.objects.requests import (
    Absent,
    Answer,
    Get,
    Head,
    Listed,
    ObjectVersion,
    Put,
    Request,
    Status,
    Steps,
    Wait,
)

__all__ = ["FILES", "FileProtocol", "FileSimulation"]

_NAME = "a.msgpack"
_DAY = 86400.0
_DELAYS = (1.0, 10.0, 3600.0, 0.8 * _DAY)
_SPANS = (5.0, 60.0, 60.0, 3600.0, _DAY)
_NO_ANSWER = Answer(Status.NO_ANSWER)
_MISSING = Answer(Status.MISSING)
_REFUSED = Answer(Status.REFUSED)
_UNSURE = Answer(Status.REFUSED, sure=False)
_NOTHING = Answer(Status.DONE)


class FileProtocol(NamedTuple):
    """How a single file is put."""

    put: Callable[..., Steps[Outcome]] = put_file
    nonce: bool = True
    """Whether the bytes of each save are others, also where the tree is the same."""


FILES = FileProtocol()


@dataclasses.dataclass(slots=True, eq=False)
class _Save:
    """One call that saves the file."""

    number: int
    content: int
    """Which of few trees it is."""
    new: bool
    trouble: dict[int, tuple[str, float]]
    """What happens at its so many-th request: a kill, an interrupt, a sleep, or an answer that does not come."""
    steps: Steps[Outcome] | None = None
    began: float = 0.0
    done: int = 0
    alive: bool = True
    ended: float | None = None
    landed: bool = False
    """Whether its bytes were there."""
    refused: bool = False
    """Whether its caller was told that it has not happened."""


class FileSimulation:
    """One schedule, drawn from a seed.

    Attributes:
        counts: what was seen, by name.
    """

    def __init__(self, seed: str, protocol: FileProtocol = FILES, _processes: int | None = None) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._random = random.Random(seed)
        self._protocol = protocol
        self._now = 0.0
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._tick = 0
        self._there: tuple[bytes, Listed, int] | None = None
        self._serial = 0
        self._last_begun = -1.0
        """When the last save of those began that were acknowledged."""
        self._saves: list[_Save] = []
        self._draw()

    def _draw(self) -> None:
        chance, choose = self._random.random, self._random.choice
        self._kind = choose(("content", "content", "generation", "serial"))
        self._failing = choose((0.0, 0.1, 0.4))
        self._slow = choose((0.05, 0.05, 1.0))
        self._patience = choose((3.0, 60.0))
        span, contents = choose(_SPANS), choose((2, 2, 3))
        for number in range(int(3 + 5 * chance())):
            trouble = {}
            if chance() < 0.5:
                what = choose(("kill", "kill", "interrupt", "sleep", "deaf", "twice"))
                trouble[int(4 * chance())] = what, choose(_DELAYS) * chance()
            save = _Save(number, int(contents * chance()), chance() < 0.1, trouble)
            self._saves.append(save)
            self._push(span * chance(), self._begin, (save,))

    def _push(self, when: float, do: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self._tick += 1
        heapq.heappush(self._queue, (when, self._tick, do, arguments))

    # ------------------------------------------------------------------------------------------------------ the savers

    def run(self) -> None:
        """Let all of it happen, until every save has ended and every late request has arrived.

        Raises:
            Violation: a rule was broken.
        """
        queue = self._queue
        while queue:
            self._now, _, do, arguments = heapq.heappop(queue)
            do(*arguments)
        self._failing = 0.0
        self._saves.append(last := _Save(len(self._saves), 0, False, {}))
        self._begin(last)
        while queue:
            self._now, _, do, arguments = heapq.heappop(queue)
            do(*arguments)
        if not last.landed or self._there is None or self._there[2] != last.number:
            raise Violation("a save with nothing in its way is not there")

    def _begin(self, save: _Save) -> None:
        save.began, deadline = self._now, self._now + self._patience
        data = b"%d %d" % (save.content, save.number if self._protocol.nonce else 0)
        save.steps = self._protocol.put(_NAME, data, lambda: self._now > deadline, new=save.new)
        self._step(save, None)

    def _step(self, save: _Save, answer: Answer | None, error: BaseException | None = None) -> None:
        """Hand a saver its answer, and send its next request on the way."""
        steps = save.steps
        if steps is None or not save.alive:
            return
        try:
            request = steps.send(answer) if error is None else steps.throw(error)  # type: ignore[arg-type]
        except StopIteration as stop:
            self._end(save, stop.value)
            return
        except KeyboardInterrupt:
            self._end(save, None)
            return
        except OSError:
            self._end(save, Outcome.LOST)
            return
        if isinstance(request, Wait):
            self._push(self._now + request.seconds, self._step, (save, _NOTHING))
            return
        delay = self._slow * self._random.random()
        number = save.done
        save.done += 1
        if number in save.trouble:
            self._suffer(save, request, *save.trouble[number])
        else:
            self._push(self._now + delay, self._arrive, (save, request))

    def _suffer(self, save: _Save, request: Request, what: str, seconds: float) -> None:
        """Do something to a saver that makes a request."""
        self.counts[what] += 1
        late = self._now + self._slow + seconds
        if what == "twice":  # once more behind it: a refusal of the first one would not be sure otherwise
            self._push(late, self._perform, (save, request))
            self._push(self._now + self._slow, self._answer, (save, request))
            return
        if what == "sleep":
            self._push(late, self._arrive, (save, request))
            return
        if self._random.random() < 0.7:
            self._push(late, self._perform, (save, request))
        if what == "deaf":
            self._push(self._now + 2 * self._patience * self._random.random(), self._step, (save, _NO_ANSWER))
        elif what == "interrupt":
            self._push(self._now, self._step, (save, None, KeyboardInterrupt()))
        else:
            save.alive, save.ended = False, self._now

    def _answer(self, save: _Save, request: Request) -> None:
        self._step(save, self._perform(save, request))

    def _arrive(self, save: _Save, request: Request) -> None:
        """Let a request arrive, or whatever becomes of it."""
        if self._random.random() >= self._failing:
            self._step(save, self._perform(save, request))
            return
        soon = self._now + 10.0 * self._random.random()
        late = self._now + self._random.choice(_DELAYS) * self._random.random()
        fate = self._random.random()
        if fate < 0.3:  # done, and the answer is lost
            self._perform(save, request)
            self._push(soon, self._step, (save, _NO_ANSWER))
        elif fate < 0.45:  # never done
            self._push(soon, self._step, (save, _NO_ANSWER))
        elif fate < 0.65:  # much later
            self._push(late, self._perform, (save, request))
            self._push(soon, self._step, (save, _NO_ANSWER))
        elif fate < 0.8:  # done, and something on the way does it once more
            self._push(late, self._perform, (save, request))
            self._step(save, self._perform(save, request))
        elif fate < 0.95:  # the same at once, and the answer is that to the second
            self._perform(save, request)
            answer = self._perform(save, request)
            self._step(save, _UNSURE if answer is _REFUSED else answer)
        else:
            self._step(save, None, PermissionError("denied"))

    def _end(self, save: _Save, outcome: Outcome | None) -> None:
        save.steps, save.ended = None, self._now
        self.counts["interrupted" if outcome is None else outcome.value] += 1
        if outcome is None or outcome is Outcome.UNKNOWN:
            return
        if outcome is Outcome.LOST:
            save.refused = True
            if save.landed:
                raise Violation(f"save {save.number} is there though its caller was told that it is not")
            return
        self._last_begun = max(self._last_begun, save.began)
        holder = save if self._there is None else self._saves[self._there[2]]
        if holder.ended is not None and holder.ended < save.began:
            raise Violation(f"save {save.number} is acknowledged, and what is there is of one that had ended before it")
        if not save.landed and holder.content != save.content:
            raise Violation(f"save {save.number} is acknowledged and was never there")

    # ------------------------------------------------------------------------------------------------------ the bucket

    def _perform(self, save: _Save, request: Request) -> Answer:
        """Do what a request asks for, now; a change of the file is judged."""
        there = self._there
        if isinstance(request, Put):
            condition = request.condition
            if condition is Absent.ABSENT:
                if there is not None:
                    return _REFUSED
            elif condition is not None and (there is None or there[1].version != condition):
                return _REFUSED
            self._judge(save)
            self._serial += 1
            found = Listed(_NAME, len(request.data), self._now, self._version_of(request.data))
            self._there = request.data, found, save.number
            return Answer(Status.DONE, found=found)
        if there is None:
            return _MISSING
        if isinstance(request, Get):
            return Answer(Status.DONE, there[0], there[1])
        if not isinstance(request, Head):
            raise Violation(f"{request} is no request of one that saves a file")
        return Answer(Status.DONE, found=there[1])

    def _version_of(self, data: bytes) -> ObjectVersion:
        if self._kind == "content":
            return ObjectVersion(data.decode())
        return ObjectVersion("e", str(self._serial)) if self._kind == "generation" else ObjectVersion(str(self._serial))

    def _judge(self, save: _Save) -> None:
        """A request that comes when its save has ended may undo none that began after that and was acknowledged."""
        save.landed = True
        if save.refused:
            raise Violation(f"save {save.number} is there though its caller was told that it is not")
        if save.ended is None:
            return
        self.counts["late"] += 1
        if save.new and self._there is not None:
            raise Violation(f"save {save.number} replaces another, and was to be new")
        if save.ended < self._last_begun:
            raise Violation(f"a late request of save {save.number} undoes an acknowledged one that began after it")
