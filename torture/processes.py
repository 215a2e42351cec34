"""Processes of a job that are killed, paused and slowed at each named point of their joint saves and loads."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib
import itertools
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import treering
from torture.children import compile_once
from torture.process_cases import Patience, Result, attacked, rehearsed
from torture.process_jobs import Job
from torture.process_judging import Case
from torture.process_scenes import SCENES
from torture.process_table import points_of
from torture.process_workers import ACTIONS, LAYERS
from treering._values import timing
from treering._values.timing import Timing

__all__ = ["COUNTS", "cases", "processes"]

COUNTS = (2, 4)
_LONGEST_CASE = 900.0
_EVERY = 100


def processes(options: argparse.Namespace) -> int:
    """Run all cases, or those that are asked for, and print what was found.

    Returns:
        The exit code: 1 when a rule was broken, or a point was never reached.
    """
    # jax dislikes every fork; no device and no thread has been started here.
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    _import_all()
    # Who stands still may hold a lock: that its minute passes is no news. Of four processes one collects for another,
    # and the messages of two lie in a folder of their own.
    timing.current = Timing(directory_lock=5.0, fan_in=2, fan_out=2)
    begun = time.monotonic()
    todo = [case for case in cases(options.count or COUNTS) if _is_wanted(case, options)]
    if not todo:
        names = ", ".join(sorted({scene.name for scene in SCENES}))
        print(f"nothing is called so; the scenes are {names}")
        return 2
    patience = Patience(deadline=options.deadline, slow=options.deadline / 4, slack=10.0)
    with tempfile.TemporaryDirectory(prefix="treering-processes-") as folder:
        compile_once(Path(folder, "compiled"))
        wrong = _rehearse(todo, Path(folder))
        results = [] if wrong else _run(todo, Path(folder), patience, options.at_once)
    _tell(todo, results)
    wrong += [f"{case.name}: {what}" for case, result in zip(todo, results, strict=False) for what in result.wrong]
    longest = max((result.seconds for result in results), default=0.0)
    print(f"{len(results)} cases in {time.monotonic() - begun:.0f} s; nobody waited longer than {longest:.1f} s")
    print(f"  {len(wrong)} violations")
    for line in wrong:
        print(f"    {line}")
    if results and wrong:
        print("  one of them again: python -m torture processes --replay NAME, what stands before the colon")
    return 1 if wrong or not results else 0


def _import_all() -> None:
    """Import now what would be imported at first use: once, and not in each of thousands of processes."""
    for found in pkgutil.walk_packages(treering.__path__, "treering."):
        importlib.import_module(found.name)
    # What jax imports when it first compiles is asked of a process of its own, for jax starts threads with that.
    ask = "import jax, sys; jax.jit(abs)(1); print(*sys.modules, sep='\\n')"
    for name in subprocess.run([sys.executable, "-c", ask], check=True, capture_output=True, text=True).stdout.split():
        if name.startswith("jaxlib.") and name not in sys.modules:
            importlib.import_module(name)


def _is_wanted(case: Case, options: argparse.Namespace) -> bool:
    if options.replay is not None:
        return case.name == options.replay
    asked = (
        (options.scene, case.scene.name),
        (options.layer, case.layer),
        (options.point, case.point.name),
        (options.action, case.action),
    )
    return all(wanted is None or value in wanted for wanted, value in asked)


def cases(counts: Sequence[int]) -> Iterator[Case]:
    """Yield every point x every process that comes by there x every action."""
    for scene in SCENES:
        for layer, count in itertools.product(LAYERS, counts):
            sized = dataclasses.replace(scene, count=count)
            for point in points_of(scene, layer):
                for victim in (number for number in range(count) if point.concerns(number, count)):
                    for action in ACTIONS:
                        yield Case(scene=sized, layer=layer, count=count, victim=victim, point=point, action=action)


def _rehearse(todo: Sequence[Case], folder: Path) -> list[str]:
    """Run each scene undisturbed, once for each number of processes: every point must be reached."""
    wrong: list[str] = []
    scenes = {(case.scene.name, case.layer, case.count): case.scene for case in todo}
    for (_, layer, count), scene in scenes.items():
        wrong += rehearsed(scene, layer, count, points_of(scene, layer), folder / "rehearsal")
    return wrong


def _run(todo: Sequence[Case], folder: Path, patience: Patience, at_once: int) -> list[Result]:
    """Run cases side by side, each in a process that forks the job: most of their time they wait."""

    def work(number: int, command: str, tell: Callable[[str], None]) -> str:  # noqa: ARG001 - as Job asks
        return json.dumps(dataclasses.asdict(attacked(todo[int(command)], folder / f"{os.getpid()}", patience)))

    results: dict[int, Result] = {}
    running: dict[int, int] = {}
    waiting = collections.deque(range(len(todo)))
    with Job(min(at_once, len(todo)), work, folder / "log") as pool:
        while waiting or running:
            for runner in range(pool.count):
                if runner not in running and waiting and not pool.said[runner].dead:
                    running[runner] = waiting.popleft()
                    pool.tell(str(running[runner]), [runner])
            pool.until(lambda pool: any(pool.said[r].answer or pool.said[r].dead for r in running), _LONGEST_CASE)
            for runner, number in list(running.items()):
                answer = pool.said[runner].answer
                if answer is None and not pool.said[runner].dead:
                    continue
                del running[runner]
                if answer is not None and answer.found is not None:
                    results[number] = Result(**json.loads(answer.found))
                else:
                    results[number] = Result(wrong=[f"the case broke: {answer.error if answer else 'its runner died'}"])
                for what in results[number].wrong:
                    print(f"VIOLATION {todo[number].name}: {what}", flush=True)
                if len(results) % _EVERY == 0:
                    print(f"{len(results)} of {len(todo)} cases", flush=True)
    return [results[number] for number in range(len(todo))]


def _tell(todo: Sequence[Case], results: Sequence[Result]) -> None:
    """Print what became of the cases, point by point."""
    table: dict[tuple[str, str], collections.Counter[str]] = {}
    for case, result in zip(todo, results, strict=False):
        who = "process 0" if case.victim == 0 else "another"
        row = table.setdefault((case.scene.name, f"{who} {case.action}: {case.point.name}"), collections.Counter())
        row[result.outcome or "broken"] += 1
    last = ""
    for (scene, what), row in table.items():
        if scene != last:
            print(f"{scene}:")
            last = scene
        print(f"  {what}: " + "; ".join(f"{count} x {outcome}" for outcome, count in sorted(row.items())))
