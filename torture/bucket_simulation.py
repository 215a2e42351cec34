"""Programs change checkpoints in a simulated bucket: a virtual clock, and every kind of trouble, all from one seed.

Requests are lost, late, refused and repeated; programs sleep for seconds or days and are killed, anywhere.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import random
from collections.abc import Callable
from typing import Any

from torture import bucket_programs as programs
from torture.bucket_programs import DAY, SOUND, BucketProtocol, World
from torture.simulated_bucket import Actor, Bucket, Save
from torture.simulated_folder import Violation
from treering._store.objects.requests import Answer, Delete, Get, Head, List, Put, Request, Status, Steps, Wait
from treering._values.checkpoint_names import is_data, journal_of

__all__ = ["BucketSimulation"]

_HOUR = 3600.0
_SLEEPS = (1.0, 60.0, 2 * _HOUR, 1.5 * DAY, 4 * DAY)
_DELAYS = (0.1, 10.0, _HOUR, 0.8 * DAY)
_NO_ANSWER = Answer(Status.NO_ANSWER)
_NOTHING = Answer(Status.DONE)
_MOST_STEPS = 16


@dataclasses.dataclass(slots=True, eq=False)
class _Program(Actor):
    """One program that runs."""

    name: str = ""
    steps: Steps[Any] | None = None
    trouble: dict[int, tuple[str, float]] = dataclasses.field(default_factory=dict)
    """What happens at its so many-th request: a kill, a sleep of some seconds, an interrupt."""
    done: int = 0
    alive: bool = True


class BucketSimulation:
    """One schedule, drawn from a seed.

    Attributes:
        counts: what was seen, by name.
    """

    def __init__(self, seed: str, protocol: BucketProtocol = SOUND, _processes: int | None = None) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._random = random.Random(seed)
        self._protocol = protocol
        self._now = 1e9
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._tick = 0
        self._programs: list[_Program] = []
        self._saves = 0
        self._draw()

    # ---------------------------------------------------------------------------------------------------- the schedule

    def _draw(self) -> None:
        chance, choose = self._random.random, self._random.choice
        grace = choose((0.0, _HOUR, _HOUR))
        self._bucket = Bucket(choose(("content", "content", "generation", "serial")), grace, lambda: self._now)
        self._world = World(self._bucket, lambda: self._now, grace, choose((5.0, 60.0)))
        self._slow = choose((0.05, 0.05, 1.0))
        self._failing = 0.0
        style = choose((self._draw_crowd, self._draw_sleepers, self._draw_trap))
        for _ in range(choose((0, 0, 0, 1) if style == self._draw_trap else (0, 1, 2, 3, 4))):
            self._live_through(choose(("save", "save", "save", "remove", "remove", "collect", "orphan")))
        style()
        if chance() < 0.01:
            self._push(self._now + self._random.uniform(0.0, DAY), self._damage, ())

    def _draw_crowd(self) -> None:
        """Start many at once, with all kinds of trouble."""
        chance, choose = self._random.random, self._random.choice
        self._failing = choose((0.0, 0.02, 0.1, 0.3))
        spread = choose((0.5, 0.5, 60.0, 2 * _HOUR, 2 * DAY))
        for _ in range(self._random.randrange(2, 6)):
            program = self._start(choose(_KINDS), self._random.uniform(0.0, choose((spread, spread, 3 * DAY))))
            for _ in range(choose((0, 0, 1, 1, 2))):
                what = choose(("kill", "sleep", "sleep", "deaf", "interrupt"))
                program.trouble[self._random.randrange(choose((6, _MOST_STEPS)))] = (
                    what,
                    choose(_SLEEPS) * (0.5 + chance()),
                )

    def _draw_sleepers(self) -> None:
        """Start a few that sleep for days, somewhere, while others come and go, one at a time."""
        chance, choose = self._random.random, self._random.choice
        self._failing = choose((0.0, 0.0, 0.02))
        longest = choose((2 * _HOUR, 4 * DAY))
        for _ in range(choose((1, 1, 2, 3))):
            program = self._start(choose(_SLEEPERS), self._random.uniform(0.0, 0.5 * longest))
            for _ in range(choose((1, 1, 2))):
                what = choose(("sleep", "sleep", "deaf"))
                program.trouble[self._random.randrange(choose((6, _MOST_STEPS)))] = what, longest * chance()
        for _ in range(self._random.randrange(1, 7)):
            program = self._start(choose(_KINDS), self._random.uniform(0.0, longest))
            if chance() < 0.2:
                program.trouble[self._random.randrange(choose((6, _MOST_STEPS)))] = "kill", 0.0

    def _draw_trap(self) -> None:
        """Start those that a certain mistake would harm: programs asleep where only the order of requests helps."""
        chance, trouble = self._random.random, self._random.randrange
        long = self._random.choice((2 * _HOUR, 4 * DAY))
        match self._random.randrange(10):
            case 0:  # a collector sleeps while it looks; one saver commits, the next one is on its way
                self._live_through("save", whole=True)
                self._start("collect", 0.0).trouble[trouble(1, 6)] = "sleep", long
                self._start("save", 0.3 * long * chance())
                self._start("save", long * (0.3 + 0.4 * chance())).trouble[trouble(4, 10)] = "sleep", long
            case 1:  # a collector sleeps with an empty tombstone before it
                for kind in ("save", "remove", "collect"):
                    self._live_through(kind, whole=True)
                    self._now += 2 * DAY
                self._start("collect", 0.0).trouble[trouble(6, 10)] = "sleep", long
                self._start("save", 0.9 * long * chance())
            case 2:  # a remover sleeps after it has looked
                self._live_through("save", whole=True)
                self._start("remove", 0.0).trouble[trouble(1, 4)] = "sleep", long
                self._start("save", 0.9 * long * chance())
            case 3:  # a saver is interrupted, and another one comes
                self._start("save", 0.0).trouble[trouble(6, 12)] = "interrupt", 0.0
                self._start("save", long * chance())
            case 4:  # a saver sleeps until its marker is old
                self._start("save", 0.0).trouble[trouble(6, 10)] = "sleep", 4 * DAY
                self._start("collect", 2 * DAY)
            case 5:  # a saver and a collector have looked before others came and went
                self._start("save", 0.0).trouble[2] = "sleep", 2000.0
                self._start("save", 100.0).trouble[trouble(6, 9)] = "kill", 0.0
                self._start("collect", 300.0 * (1 + chance())).trouble[3] = "sleep", 2500.0
                self._start("save", 1000.0)
            case 6:  # a saver sleeps until its marker is old, and two collectors sleep while they sweep by age
                self._live_through("save", whole=True)
                self._start("save", 0.0).trouble[trouble(6, 10)] = "sleep", 2 * DAY + long
                for kind in ("collect", "sweep"):
                    first, last = (1, 10) if kind == "collect" else (8, 20)
                    self._start(kind, DAY * (1.5 + chance())).trouble[trouble(first, last)] = "sleep", long * chance()
            case _:  # a saver sleeps while another checkpoint comes and goes at the same place
                program = self._start("save", 0.0)
                program.trouble[3] = "twice", min(long, 0.8 * DAY) * chance()
                program.trouble[trouble(6, 9)] = "sleep", long
                self._start("life", 0.3 * long * chance())
                self._start("collect", long * chance())

    def _live_through(self, kind: str, *, whole: bool = False) -> None:
        """Let one program run alone, to its end or until it is killed, some time before the others."""
        if kind == "orphan":
            save = self._new_save("a/", overwrite=True)
            for name, content in save.files.items():
                self._bucket.perform(Put(name, content), Actor())  # data that came late, or were copied from a disk
            if self._random.random() < 0.5:
                self._bucket.perform(Put(f"a/{journal_of(save.attempt)}", b""), Actor())
        else:
            program = self._new_program(kind)
            steps = program.steps
            program.steps = None
            if steps is not None:
                most = self._random.choice((None, None, None, self._random.randrange(_MOST_STEPS)))
                self._run_alone(program, steps, most=None if whole else most)
        self._now += self._random.choice((0.0, 2 * _HOUR, 2 * DAY))

    def _start(self, kind: str, after: float) -> _Program:
        program = self._new_program(kind)
        self._push(self._now + after, self._step, (program, None))
        return program

    def _new_program(self, kind: str) -> _Program:
        chance = self._random.random
        program = _Program(name=kind)
        world, protocol, place = self._world, self._protocol, "b/" if chance() < 0.1 else "a/"
        match kind:
            case "save":
                program.save = self._new_save(place, overwrite=chance() < 0.7, newer=chance() < 0.04)
                program.steps = programs.save(world, program.save, protocol, probe=chance() < 0.2)
            case "copy":
                program.save = self._new_save("b/", overwrite=chance() < 0.7)
                program.steps = programs.copy(world, "a/", program.save, protocol)
            case "life":
                program.save = self._new_save(place, overwrite=chance() < 0.7)
                program.steps = programs.live(world, program, program.save, protocol)
            case "sweep":
                program.save = self._new_save(place, overwrite=chance() < 0.7)
                program.steps = programs.save_and_sweep(world, program.save, protocol)
            case "remove":
                program.steps = programs.remove(world, program, place, protocol)
            case "collect":
                early, by_age = chance() < 0.5, chance() < 0.7
                program.steps = programs.collect(world, place, protocol, by_age=by_age, markers_first=early)
            case "load":
                program.steps = programs.load(world, place)
            case _:
                program.steps = programs.swap(world, program, "a/left", len(self._programs), protocol)
        self._programs.append(program)
        return program

    def _new_save(self, place: str, *, overwrite: bool, newer: bool = False) -> Save:
        self._saves += 1
        attempt = f"{self._saves:016x}"
        count = self._random.choice((1, 1, 2, 3))
        tree = b"tree %d" % self._saves
        files = {f"{place}data-{attempt}-{i:05d}-of-{count:05d}.safetensors": tree for i in range(count)}
        save = self._bucket.saves[attempt] = Save(attempt, place, overwrite, files, newer)
        return save

    def _damage(self) -> None:
        self.counts["damaged"] += 1
        self._bucket.damage("a/")

    def _push(self, when: float, do: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._tick += 1
        heapq.heappush(self._queue, (when, self._tick, do, arguments))

    # -------------------------------------------------------------------------------------------------------- the world

    def run(self) -> None:
        """Let all of it happen, until every program has ended and every late request has arrived.

        Raises:
            Violation: a rule was broken.
        """
        queue = self._queue
        while queue:
            self._now, _, do, arguments = heapq.heappop(queue)
            do(*arguments)
        self._judge()

    def _step(self, program: _Program, answer: Answer | None, error: BaseException | None = None) -> None:
        """Hand a program its answer, and send its next request on the way."""
        steps = program.steps
        if not program.alive or steps is None:
            return
        try:
            request = steps.throw(error) if error is not None else steps.send(answer)  # type: ignore[arg-type]
        except StopIteration as stop:
            self._end(program, stop.value if isinstance(stop.value, str) else "loaded")
            return
        except Violation:
            raise
        except KeyboardInterrupt:
            self._end(program, "interrupted")
            return
        except OSError:
            self._end(program, "failed")
            return
        if isinstance(request, Wait):
            self._push(self._now + request.seconds * self._random.uniform(0.5, 1.5), self._step, (program, _NOTHING))
            return
        delay = self._random.expovariate(1.0) * self._slow
        if program.done in program.trouble:
            suffered = self._suffer(program, request)
            delay = suffered if suffered < 0.0 else delay + suffered
        program.done += 1
        if program.alive and delay >= 0.0:
            self._push(self._now + delay, self._arrive, (program, request))

    def _suffer(self, program: _Program, request: Request) -> float:
        """Kill a program, interrupt it, or let it sleep; return for how long; a negative time where no answer comes."""
        what, seconds = program.trouble[program.done]
        self.counts[what] += 1
        if what == "sleep":
            return seconds
        if what == "deaf":
            self._push(self._now + self._slow, self._come_late, (program, request))
            self._push(self._now + self._slow + seconds, self._step, (program, _NO_ANSWER))
            return -1.0
        if what == "twice":
            self._push(self._now + seconds, self._come_late, (program, request))
            return 0.0
        program.alive = what != "kill"
        if not isinstance(request, Get | Head | List) and self._random.random() < 0.5:
            self._later(program, request)
        if what == "interrupt":
            program.alive = False  # for this request alone
            self._push(self._now, self._interrupt, (program,))
        return 0.0

    def _interrupt(self, program: _Program) -> None:
        program.alive = True
        self._step(program, None, KeyboardInterrupt())

    def _arrive(self, program: _Program, request: Request) -> None:
        """Let a request arrive, or whatever becomes of it."""
        if self._random.random() >= self._failing:
            self._step(program, self._bucket.perform(request, program))
            return
        if isinstance(request, Get | Head | List):
            self._answer_late(program, _NO_ANSWER)
        elif (isinstance(request, Put | Delete)) and request.condition is not None:
            self._fail_conditional(program, request)
        else:
            self._fail_plain(program, request)

    def _fail_conditional(self, program: _Program, request: Put | Delete) -> None:
        fate = self._random.random()
        perform = self._bucket.perform
        if fate < 0.3:  # done, and the answer is lost
            perform(request, program)
            self._answer_late(program, _NO_ANSWER)
        elif fate < 0.45:  # never done: 409 and 503 too
            self._answer_late(program, _NO_ANSWER)
        elif fate < 0.65:  # much later
            self._later(program, request)
            self._answer_late(program, _NO_ANSWER)
        elif fate < 0.8:  # done, and something on the way does it once more
            answer = perform(request, program)
            self._later(program, request)
            self._step(program, answer)
        elif fate < 0.95:  # the same at once, and the answer is that to the second
            perform(request, program)
            answer = perform(request, program)
            self._step(program, dataclasses.replace(answer, sure=False))
        else:
            self._step(program, None, PermissionError("denied"))

    def _fail_plain(self, program: _Program, request: Request) -> None:
        """Fail a request that the client repeats by itself."""
        fate = self._random.random()
        if fate < 0.4:  # done, answered 503, done again
            self._bucket.perform(request, program)
            self._push(self._now + self._slow, self._arrive, (program, request))
        elif fate < 0.6:  # done, and once more much later
            self._later(program, request)
            self._step(program, self._bucket.perform(request, program))
        elif fate < 0.95:
            if fate < 0.7:
                self._bucket.perform(request, program)
            elif fate < 0.85:
                self._later(program, request)
            self._answer_late(program, _NO_ANSWER)
        else:
            self._step(program, None, PermissionError("denied"))

    def _answer_late(self, program: _Program, answer: Answer) -> None:
        self._push(self._now + self._random.uniform(0.1, 30.0), self._step, (program, answer))

    def _later(self, program: _Program, request: Request) -> None:
        self.counts["late"] += 1
        delay = self._random.choice(_DELAYS) * self._random.random()
        self._push(self._now + delay, self._come_late, (program, request))

    def _come_late(self, program: _Program, request: Request) -> None:
        self._bucket.perform(request, program)

    # ---------------------------------------------------------------------------------------------------------- the end

    def _end(self, program: _Program, result: str) -> None:
        program.steps = None
        self.counts[f"{program.name}: {result}"] += 1
        save = program.save
        if save is not None and result in {"failed", "lost", "exists"}:
            program.refused = True

    def _judge(self) -> None:
        """Judge what was said, then clear up with nothing in the way, and judge what is left."""
        for program in self._programs:
            save = program.save
            if program.refused and save is not None and save.committed:
                raise Violation(f"{save.attempt} is committed though its saver was told that it is not")
        self._failing = 0.0
        for place in ("a/", "b/"):
            if any(name.startswith(place) for name in self._bucket.objects):
                self._clear_up(place)

    def _clear_up(self, place: str) -> None:
        at, world, protocol = self._bucket.places[place], self._world, self._protocol
        readable = at.current is None or not (at.damaged or at.current.newer)
        if readable:
            for _ in range(4):
                self._now += 2 * DAY
                self._run_alone(Actor(), programs.collect(world, place, protocol, by_age=True))
            self._bucket.judge_rest(place)
            tree = self._run_alone(Actor(), programs.load(world, place))
            wanted = "not found" if at.current is None else next(iter(at.current.files.values()))
            if tree != wanted:
                raise Violation(f"{tree!r} is loaded, not {wanted!r}")
        if readable and self._random.random() < 0.75:
            return
        save = self._new_save(place, overwrite=True)
        if (result := self._run_alone(Actor(save=save), programs.save(world, save, protocol))) != "done":
            raise Violation(f"a save with nothing in its way ended as {result}")
        actor = Actor()
        if (result := self._run_alone(actor, programs.remove(world, actor, place, protocol))) != "removed":
            raise Violation(f"a removal with nothing in its way ended as {result}")
        for _ in range(3):
            self._now += 2 * DAY
            self._run_alone(Actor(), programs.collect(world, place, protocol, by_age=True))
        self._bucket.judge_rest(place)
        if left := [name for name in self._bucket.objects if name.startswith(place) and is_data(name)]:
            raise Violation(f"{left} is left over")

    def _run_alone(self, actor: Actor, steps: Steps[Any], most: int | None = None) -> Any:
        """Run a program with nothing in its way, killed after so many requests; return what it returns."""
        answer: Any = None
        done = 0
        while most is None or done < most:
            done += 1
            try:
                request = steps.send(answer)
            except StopIteration as stop:
                return stop.value
            if isinstance(request, Wait):
                self._now += request.seconds
                answer = _NOTHING
            else:
                self._now += self._slow
                answer = self._bucket.perform(request, actor)
        return None


_KINDS = (
    ("save",) * 7 + ("sweep", "remove", "remove") + ("collect",) * 5 + ("load",) * 2 + ("life", "life", "copy", "swap")
)
_SLEEPERS = ("save",) * 5 + ("sweep",) * 2 + ("collect",) * 3 + ("remove", "load", "copy")
