"""A training loop that is killed again and again, and goes on from what it left."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import os
import random
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePath
from typing import Any, Final, Self

import treering
from torture.bucket_servers import open_seaweed
from torture.children import compile_once
from torture.judging import fresh, told
from torture.process_jobs import Job
from torture.run_ledger import Ledger, Rules, differences
from torture.run_training import BEST, EVERY, LAST, fingerprint_of, frozen, place_of, reference, train
from treering._store.open_folder import OpenFolder
from treering._store.resolve import located

__all__ = ["Killer", "kill_runs", "litter"]

_FOREIGN: Final = {"notes.txt": b"mine", "step_3/treering.json": b"{}", "step_00000003.bak/data": b"", "plots/1": b"?"}
_PATIENCE: Final = 120.0
# The span from which the moment of the kill is drawn, in seconds from the first step of the loop, or from the first
# save that was acknowledged.
_SPANS: Final = (0.05, 0.2, 0.6)


@dataclasses.dataclass(slots=True)
class _Found:
    """What an onlooker finds."""

    steps: dict[int, int]
    problems: list[str]
    litter: list[str]


def kill_runs(rounds: int, seed: int, *, incremental: bool = False, bucket: bool = False) -> int:
    """Kill a loop so many times and print what was found.

    Args:
        rounds: how many times.
        seed: for the random times.
        incremental: whether its steps share what did not change.
        bucket: whether it saves in a bucket of a real server, which is a process of its own.

    Returns:
        The exit code: 1 when something was lost or left behind.
    """
    # jax dislikes every fork; no device and no thread has been started here.
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    with (
        tempfile.TemporaryDirectory(prefix="treering-run-") as folder,
        _bucket_beside(Path(folder)) if bucket else contextlib.nullcontext() as url,
        Killer(Path(folder), seed, incremental=incremental, url=url) as killer,
    ):
        compile_once(Path(folder, "compiled"))
        for number in range(rounds):
            killer.round(number)
            if (number + 1) % 50 == 0:
                print(f"{number + 1} of {rounds} kills", flush=True)
        killer.ends_well(rounds)
        print(f"a training loop, killed at random times (seed {seed}): " + _counted(killer.outcomes))
        shared = f", {killer.shared} shared files found" if incremental else ""
        print(f"  {killer.acknowledged} saves acknowledged, {killer.newest} steps trained{shared}")
        print(f"  {len(killer.violations)} violations")
        for line in killer.violations:
            print(f"    {line}")
        return 1 if killer.violations else 0


@contextlib.contextmanager
def _bucket_beside(folder: Path) -> Iterator[str]:
    """Start a server in a child, let the environment lead to it, and yield the URL of its bucket.

    obstore is used in children alone: its threads do not live on in a fork.
    """
    home = folder / "bucket"
    home.mkdir()
    with Job(1, _Serving(), folder / "log") as job:
        job.tell(os.fspath(home))
        job.ended([0], _PATIENCE)
        answer = job.said[0].answer
        if answer is None or answer.found is None:
            raise RuntimeError(f"the server of the bucket failed: {answer}")
        told = json.loads(answer.found)
        os.environ.update(told["environment"])
        yield told["url"]
        job.tell("")
        job.ended([0], _PATIENCE)


class _Serving:
    """The work of the process that starts the server, in the folder that it is told, and ends it at an empty word."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()

    def __call__(self, number: int, command: str, tell: Callable[[str], None]) -> str | None:  # noqa: ARG002 - as Job asks
        if not command:
            self._open.close()
            return None
        server = self._open.enter_context(open_seaweed(Path(command)))
        return json.dumps({"url": server.url, "environment": server.environment()})


class Killer:
    """Rounds of one loop in one folder, or at one URL of a bucket, a context manager.

    Attributes:
        violations: what must not be.
        outcomes: what became of the rounds.
        acknowledged: how many saves were acknowledged.
        shared: how many data files of a step were found to be those of another step, all looks together.
    """

    def __init__(self, folder: Path, seed: int, *, incremental: bool = False, url: str | None = None) -> None:
        self._incremental = incremental
        self.violations: list[str] = []
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.acknowledged = 0
        self.shared = 0
        self._path = os.fspath(folder / "run") if url is None else f"{url}/run"
        self._log = folder / "log"
        self._seed = seed
        self._before: dict[int, int] = {}
        self._branch = 0
        for name, content in _FOREIGN.items() if url is None else ():
            Path(self._path, name).parent.mkdir(parents=True, exist_ok=True)
            Path(self._path, name).write_bytes(content)
        self._oracle = _Oracle(self._log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._oracle.close()

    @property
    def newest(self) -> int:
        """The newest step that is there."""
        return max(self._before, default=0)

    def round(self, number: int) -> None:
        """Let the loop train and kill it; now and then let it end well afterwards."""
        source = random.Random(f"{self._seed}:{number}")
        asked = self._asked(source)
        with Job(1, _trains, self._log) as job:
            job.tell(json.dumps(asked))
            after = source.choice(["", "begun", "acknowledged", "acknowledged"])
            job.until(lambda job: _has_told(job, after) or job.said[0].answer is not None, _PATIENCE)
            self._listen(job, source.random() * (source.choice(_SPANS) if after else 1.0))
            job.signal(0, signal.SIGKILL)
            job.until(lambda job: job.said[0].dead, _PATIENCE)
            answer, events = job.said[0].answer, job.said[0].events
        if answer is not None:
            self.violations.append(f"round {number} ({asked}): the loop ended: {answer.error}")
        self._judge(f"round {number} ({asked})", events)
        if source.random() < 0.4:
            self.ends_well(number)

    def ends_well(self, number: int) -> None:
        """Let the loop save a few times and end by itself: everything is swept then."""
        source = random.Random(f"{self._seed}:{number}:ends well")
        asked = self._asked(source) | {"every": 1, "steps": source.randint(1, 3)}
        where = f"after round {number} ({asked})"
        with Job(1, _trains, self._log) as job:
            job.tell(json.dumps(asked))
            job.ended([0], _PATIENCE)
            answer, events = job.said[0].answer, job.said[0].events
        if answer is None or not answer.done:
            self.violations.append(f"{where}: the next run failed: {answer.error if answer else 'no answer'}")
        before, ledger = self._before, Ledger.of(events)
        found = self._judge(where, events)
        has = ledger.after(before, self._rules(before, ledger))
        if problem := differences(has, has, found.steps):
            self.violations.append(f"{where}: {problem}")
        if found.litter:
            self.violations.append(f"{where}: left {found.litter}")

    def _asked(self, source: random.Random) -> dict[str, Any]:
        older = sorted(self._before)[:-1]
        back = source.choice(older) if older and source.random() < 0.12 else None
        self._branch += back is not None
        listens = source.choice(["at once", "now and then", "thread"])
        every = source.choice([1, 1, 2, 5])
        asked: dict[str, Any] = {"path": self._path, "branch": self._branch, "back": back, "every": every}
        asked |= {"listens": listens, "steps": None}
        return asked | {"incremental": True} if self._incremental else asked

    def _listen(self, job: Job, seconds: float) -> None:
        job.until(lambda job: job.said[0].answer is not None, seconds)

    def _judge(self, where: str, events: list[str]) -> _Found:
        """Look at what is there and compare it with what was told; go on from it."""
        looked = fresh(lambda: _look(self._path))
        if not isinstance(looked, dict):
            self.violations.append(f"{where}: {looked}")
            return _Found(self._before, [], [])
        steps = {int(step): value for step, value in looked["steps"].items()}
        found = _Found({step: branch for step, (_, branch, _) in steps.items()}, looked["problems"], looked["litter"])
        ledger = Ledger.of(events)
        self.acknowledged += ledger.acknowledged
        self.shared += looked["shared"]
        rules = self._rules({**self._before, **found.steps}, ledger)
        wrong = [*found.problems, *ledger.wrong(self._before, found.steps, rules)]
        for step, (print_, _, loss) in steps.items():
            if [print_, loss] != self._oracle.after(step):
                wrong.append(f"step {step} holds other bits")
        newest = max(steps, default=None)
        lowest = min(steps, key=rules.loss, default=None)
        if [looked["latest"], looked["best"]] != [newest, lowest]:
            wrong.append(f"latest {looked['latest']}, best {looked['best']}; there are {sorted(steps)}")
        self.violations += (f"{where}: {what}; told {events[-8:]}" for what in wrong)
        self.outcomes[_outcome(ledger, self._before, found)] += 1
        self._before = found.steps
        return found

    def _rules(self, steps: dict[int, int], ledger: Ledger) -> Rules:
        self._oracle.learn({*steps, *(save.step for save in ledger.saves)})
        return Rules(last=LAST, every=EVERY, best=BEST, loss=lambda step: float(self._oracle.after(step)[1]))


class _Oracle:
    """Knows what each step of the training is, from a process that trains without files."""

    def __init__(self, log: Path) -> None:
        self._known: dict[int, list[Any]] = {}
        self._job = Job(1, _Reference(), log)

    def learn(self, steps: set[int]) -> None:
        """Ask for steps."""
        unknown = sorted(steps - self._known.keys())
        if unknown:
            self._job.tell(json.dumps(unknown))
            self._job.ended([0], _PATIENCE)
            answer = self._job.said[0].answer
            if answer is None or answer.found is None:
                raise RuntimeError(f"the training without files failed: {answer}")
            self._known.update(zip(unknown, json.loads(answer.found), strict=True))

    def after(self, step: int) -> list[Any]:
        """Return the fingerprint and the loss of a step."""
        return self._known[step]

    def close(self) -> None:
        self._job.close()


class _Reference:
    """The work of the process that trains without files."""

    def __init__(self) -> None:
        self._after: Callable[[int], tuple[str, float]] | None = None

    def __call__(self, number: int, command: str, tell: Callable[[str], None]) -> str:  # noqa: ARG002 - as Job asks
        self._after = self._after or reference()
        return json.dumps([self._after(step) for step in json.loads(command)])


def _trains(number: int, command: str, tell: Callable[[str], None]) -> None:  # noqa: ARG001 - as Job asks
    train(command, tell)


def _has_told(job: Job, word: str) -> bool:
    return not word or any(line.startswith(word) for line in job.said[0].events)


def _look(text: str) -> dict[str, Any]:
    """Load and verify every step, as somebody who comes later; in a folder, look for what is left behind as well."""
    path = place_of(text)
    run = treering.Run(path)
    problems = []
    if isinstance(path, Path):
        harmed = [name for name, content in _FOREIGN.items() if _is_harmed(path, name, content)]
        problems = [f"{name} of somebody else is gone" for name in harmed]
    steps: dict[int, Any] = {}
    for step in run.steps():
        tree = run.load(step)
        loss = float(run.metrics(step)["loss"])
        steps[step] = [fingerprint_of(tree), tree["config"]["branch"], loss if math.isfinite(loss) else str(loss)]
        if "frozen" in tree and tree["frozen"].tobytes() != frozen().tobytes():
            problems.append(f"step {step} holds other bits of what never changed")
        verified = treering.verify(path / f"step_{step:08d}")
        if not verified:
            problems.append(f"step {step} loads, but verify says: {verified}")
    best = run.best("loss") if steps else None
    # A second name has the version of the first; so has a copy where versions go by content, for no two headers are
    # equal that were written.
    versions = {(step, version) for step in steps for version in _versions_of_data(path / f"step_{step:08d}")}
    return {
        "shared": len(versions) - len({version for _, version in versions}),
        "steps": steps,
        "latest": run.latest(),
        "best": best,
        "problems": problems,
        "litter": told(lambda: litter(path, _FOREIGN)) if isinstance(path, Path) else [],
    }


def _versions_of_data(path: PurePath) -> list[object]:
    with OpenFolder(located(path)) as folder:
        return [entry.version for entry in folder.store.list() if entry.name.startswith("data-")]


def _is_harmed(path: Path, name: str, content: bytes) -> bool:
    return not (path / name).is_file() or (path / name).read_bytes() != content


def litter(path: Path, foreign: Iterable[str]) -> list[str]:
    """Return the names in a run's folder that are neither of a step nor of those files of others."""
    left = []
    others = {name.partition("/")[0] for name in foreign}
    for entry in sorted(path.iterdir()):
        if entry.name in others or entry.name == "run.json":
            continue
        names = {found.name for found in entry.iterdir()} if entry.is_dir() else set()
        if "treering.json" not in names:
            left += [entry.name, *(f"{entry.name}/{name}" for name in sorted(names))]
            continue
        index = json.loads((entry / "treering.json").read_bytes())
        known = {"treering.json", *(file["name"] for file in index["files"]), *index["replaces"]}
        left += [f"{entry.name}/{name}" for name in sorted(names - known)]
    return left


def _outcome(ledger: Ledger, before: dict[int, int], found: _Found) -> str:
    if not ledger.begun:
        return "killed before its first step"
    if not ledger.saves:
        return "killed before its first save"
    newest = ledger.saves[-1].step
    if found.steps.keys() == before.keys():
        return "nothing was saved yet"
    if ledger.acknowledged == len(ledger.saves):
        return "all saves acknowledged"
    return "the one in flight is there" if newest in found.steps else "the one in flight is not there"


def _counted(outcomes: collections.Counter[str]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
