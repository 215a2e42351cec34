"""Real processes that save jointly without jax and with hardly any data: into a folder of the disk, and into a bucket.

Each writes nothing and waits as long as its writing would take; process 0 makes and commits a checkpoint that is empty.
They are forked from one that has imported everything and is a process of its own, so that ``strace`` can count.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torture.process_jobs import Job
from treering._arrays.outgoing import describe_leaves
from treering._checkpoint.joint_driver import JointShare, save_jointly
from treering._checkpoint.transaction import CheckpointFolder, JoinedFolder
from treering._coordination.message_board import MessageBoard
from treering._coordination.operations import Call
from treering._store.objects.requests import Answer, Request
from treering._store.resolve import file_path
from treering._tree.flatten import flatten
from treering._values.processes import Processes

__all__ = ["RealFigures", "RealSetting", "calls_of_saves", "price_of", "run_saves", "summed_calls"]

LEAVES = 1_000
_TIMEOUT = 300.0
_LEAST_SHARE = 0.7
_PRICES = {"Put": 5e-6, "List": 5e-6, "Get": 4e-7, "Head": 4e-7, "Delete": 0.0}
"""List prices in US dollars of one request to Amazon S3, as in ``docs/guides/buckets.md``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RealSetting:
    """Saves of one job, one after the other; the first one is not measured."""

    processes: int
    """How many there are."""
    writing: float
    """Seconds of writing; each process waits for a share of 0.7 to 1.0 of them."""
    saves: int
    """How many saves are measured."""
    place: str
    """The folder or URL below which each save has a place of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RealFigures:
    """What the saves cost."""

    after: tuple[float, ...]
    """Seconds of each save from the end of the slowest writer to the return of the last process."""
    requests: dict[str, float]
    """Requests of all processes to the bucket, of a save in the mean, by kind; empty on a disk."""
    faults: tuple[str, ...] = ()
    """What processes raised."""


def price_of(requests: Mapping[str, float]) -> float:
    """Return the list price of requests in US dollars.

    Example:
        >>> price_of({"Put": 200.0, "Get": 1000.0, "Delete": 66.0})
        0.0014
    """
    return round(sum(_PRICES[kind] * count for kind, count in requests.items()), 9)


def run_saves(setting: RealSetting, environment: Mapping[str, str], before: Sequence[str] = ()) -> RealFigures:
    """Run a job in a process of its own and return what it found.

    Args:
        setting: the saves.
        environment: variables that lead to the bucket.
        before: the command that runs the process, such as ``strace``.
    """
    command = [*before, sys.executable, "-m", __spec__.name, json.dumps(asdict(setting))]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env={**os.environ, **environment}
    )
    found = json.loads(done.stdout)
    return RealFigures(after=tuple(found["after"]), requests=found["requests"], faults=tuple(found["faults"]))


def calls_of_saves(setting: RealSetting, environment: Mapping[str, str]) -> dict[str, float] | None:
    """Return the system calls of one save by name: those of several saves without those of none, which only begin.

    None where there is no ``strace``.
    """
    program = shutil.which("strace")
    if program is None:
        return None
    counts = []
    with tempfile.TemporaryDirectory() as folder:
        for number, saves in enumerate((0, setting.saves)):
            summary = Path(folder, str(number))
            some = RealSetting(
                processes=setting.processes,
                writing=setting.writing,
                saves=saves,
                place=f"{setting.place}/traced-{number}",
            )
            run_saves(some, environment, (program, "-f", "-qq", "-c", "-o", os.fspath(summary)))
            counts.append(summed_calls(summary.read_text()))
    begun, all_of_them = counts
    all_of_them.subtract(begun)
    return {name: count / setting.saves for name, count in all_of_them.most_common() if count > 0}


def summed_calls(summary: str) -> Counter[str]:
    """Return how often each system call was made, from what ``strace -c`` writes.

    Example:
        >>> summed_calls("9.1 0.01 3 7 2 openat")
        Counter({'openat': 7})
    """
    rows = (line.split() for line in summary.splitlines())
    return Counter({row[-1]: int(row[3]) for row in rows if len(row) > 4 and row[3].isdigit() and row[-1] != "total"})


# What follows runs in the process that the others are forked from, and in those.


class _Share(JointShare):
    """The share of one process: nothing but a wait."""

    def __init__(self, call: Call, path: Path, writing: float) -> None:
        nothing = flatten({})
        super().__init__(call, nothing, describe_leaves(nothing), compares_local=False)
        self._path = path
        self._writing = writing
        self._folder: CheckpointFolder | None = None
        self.written = 0.0

    def plan(self) -> None:
        """There is nothing to write."""

    def signature(self) -> bytes:
        return bytes(8 * LEAVES)

    def check(self, signature: bytes) -> None:
        if signature != self.signature():
            raise AssertionError("the signature is that of another tree")

    def enter(self, held: contextlib.ExitStack) -> MessageBoard:
        call = self._call
        folder = CheckpointFolder(
            self._path, overwrite=False, names_in=lambda _: [], attempt=call.attempt, live=call.live_attempts
        )
        held.enter_context(contextlib.closing(folder))
        self._folder = held.enter_context(folder)
        return self._folder.board

    def join(self, folder: JoinedFolder, held: contextlib.ExitStack) -> None:
        """Nothing is written."""

    def prepare(self) -> bytes:
        time.sleep(self._writing)
        self.written = time.monotonic()
        return bytes(8 * (1 + max(1, LEAVES // self._call.processes.count)))

    def commit(self, parts: Sequence[bytes]) -> None:
        assert self._folder is not None  # process 0 has entered
        assert len(parts) == self._call.processes.count
        self._folder.commit(b"{}")

    def roll_back(self) -> None:
        if self._folder is not None:
            self._folder.others_are_done()


@dataclass(slots=True)
class _Worker:
    """What a process of the job does; one for each, since processes are forked."""

    setting: RealSetting
    job: str
    requests: Counter[str]

    def __call__(self, number: int, command: str, tell: Callable[[str], None]) -> str:
        """Take part in a save; the command is its number."""
        del tell
        setting, save = self.setting, int(command)
        if save == 0:
            self._count_requests()
        self.requests.clear()
        processes = Processes(this=number, count=setting.processes)
        call = Call(job=self.job, number=save + 1, processes=processes, timeout=_TIMEOUT, doing=f"save {save}")
        path = file_path(f"{setting.place}/{self.job}-{save}")
        share = random.Random(f"{number} {save}").uniform(_LEAST_SHARE, 1.0)
        mine = _Share(call, path, share * setting.writing if save else 0.0)
        save_jointly(call, path, lambda _: mine)
        return json.dumps({"written": mine.written, "back": time.monotonic(), "requests": self.requests})

    def _count_requests(self) -> None:
        """Count what this process asks the bucket for."""
        if "://" in self.setting.place:
            from treering._store.objects.client import ObstoreClient

            perform = ObstoreClient.perform

            def counted(client: ObstoreClient, request: Request) -> Answer:
                self.requests[type(request).__name__] += 1
                return perform(client, request)

            setattr(ObstoreClient, "perform", counted)  # noqa: B010 - mypy lets no method be assigned


def _run(setting: RealSetting) -> RealFigures:
    """Fork the processes and let them save."""
    after: list[float] = []
    requests: Counter[str] = Counter()
    faults: list[str] = []
    worker = _Worker(setting, secrets.token_hex(8), Counter())
    with Job(setting.processes, worker, Path(os.devnull)) as job:
        for save in range(setting.saves + 1):
            job.tell(str(save))
            job.ended(range(setting.processes), 2 * _TIMEOUT)
            answers = [said.answer for said in job.said]
            faults += [
                f"save {save}, process {number}: {each.error if each else 'no answer'}"
                for number, each in enumerate(answers)
                if each is None or not each.done
            ]
            if faults:
                break
            found = [json.loads(each.found) for each in answers if each is not None and each.found is not None]
            if save:
                after.append(max(each["back"] for each in found) - max(each["written"] for each in found))
                requests.update(sum((Counter(each["requests"]) for each in found), Counter()))
    mean = {kind: count / setting.saves for kind, count in requests.most_common()} if after else {}
    return RealFigures(after=tuple(after), requests=mean, faults=tuple(faults))


if __name__ == "__main__":
    print(json.dumps(asdict(_run(RealSetting(**json.loads(sys.argv[1]))))))
