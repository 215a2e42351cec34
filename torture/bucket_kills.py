"""A process that saves to a bucket in a loop, killed again and again at random times."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import random
import secrets
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Final, Self

import treering
from torture.bucket_accounts import Accounts
from torture.bucket_scenes import judge_steps, look, open_bucket, tree_of, version_in
from torture.bucket_servers import BucketServer

__all__ = ["Killed", "kill_bucket"]

LAST: Final = 2
_PATIENCE: Final = 60.0
_LONGEST_LIFE: Final = 0.6
_ROUNDS_OF_ONE_PLACE: Final = 10
_LARGE: Final = 300_000
_CONTEXT: Final = get_context("forkserver")
_IMPORTED: Final = (
    "jax",
    "obstore.store",
    "torture.bucket_kills",
    "treering._checkpoint.save_folder",
    "treering._checkpoint.load",
    "treering._runs.run_state",
    "treering._store.objects.client",
    "treering._store.objects.connect",
    "treering._store.objects.store",
)


@dataclasses.dataclass(slots=True)
class Killed:
    """What was found.

    Attributes:
        kills: how many processes were killed.
        acknowledged: how many saves had returned before.
        outcomes: what became of the save in flight.
        wrong: what must not be.
    """

    kills: int = 0
    acknowledged: int = 0
    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    wrong: list[str] = dataclasses.field(default_factory=list)


def kill_bucket(servers: Sequence[BucketServer], kills: int, seed: int) -> Killed:
    """Kill savers at random times, and compare what a fresh connection finds with what was acknowledged.

    A child process waits for orders, warm; it begins to save at a word, and is killed a random time later. One kind of
    child overwrites one checkpoint, the other saves steps to a run that keeps two. Each saves on one of the two servers
    by a URL that its environment takes for one on the other as soon as a save has begun.
    """
    _CONTEXT.set_forkserver_preload(list(_IMPORTED))
    source = random.Random(seed)
    judges = [open_bucket(server, f"judge-{secrets.token_hex(4)}", seconds=30.0, patience=60.0) for server in servers]
    killed = Killed()
    places: dict[str, tuple[str, int, int]] = {}
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(_Saver(servers)) for _ in range(2)]
        for number in range(kills):
            kind = "run" if source.random() < 0.5 else "checkpoint"
            if number % _ROUNDS_OF_ONE_PLACE == 0:
                places.clear()
            name, before, account = places.get(kind, (f"kills-{secrets.token_hex(6)}", 0, source.randrange(2)))
            saver = waiting.pop(0)
            waiting.append(stack.enter_context(_Saver(servers)))
            size = source.choice([1000, 1000, _LARGE])
            saver.begin(kind, name, before + 1, size, account)
            time.sleep(source.random() * _LONGEST_LIFE)
            told = saver.kill()
            killed.kills += 1
            killed.acknowledged += len(told)
            last = max([before, *told])
            where = f"kill {number} ({kind}, {last} acknowledged)"
            judge = _judge_run if kind == "run" else _judge_checkpoint
            found, wrong = judge(judges[account] / name, last)
            if (elsewhere := look(functools.partial(treering.load, judges[1 - account] / name))) is not None:
                wrong.append(f"the other server has {elsewhere!r:.200}")
            killed.wrong += [f"{where}: {what}" for what in wrong]
            killed.outcomes["the last acknowledged" if found == last else "the one in flight"] += 1
            # A fresh place after damage, so that it is told once.
            places.pop(kind, None)
            if not wrong:
                places[kind] = (name, found, account)
            if (number + 1) % 50 == 0:
                print(f"{number + 1} of {kills} kills", flush=True)
    return killed


def _judge_checkpoint(path: Any, last: int) -> tuple[int, list[str]]:
    found = look(lambda: _version_of_any_size(treering.load(path)))
    if found not in {last or None, last + 1}:
        return last, [f"found {found!r}"]
    if found and not treering.verify(path):
        return last, ["verify finds damage"]
    return int(found or 0), []


def _judge_run(path: Any, last: int) -> tuple[int, list[str]]:
    latest = look(treering.Run(path).latest)
    if latest not in {last or None, last + 1}:
        return last, [f"the latest step is {latest!r}"]
    newest = int(latest or 0)
    wanted = {step for step in range(newest - LAST + 1, newest + 1) if step > 0}
    return newest, list(judge_steps(path, wanted, set(range(1, newest + 1)), version_of=_version_of_any_size))


def _version_of_any_size(tree: Any) -> int:
    return version_in(tree, len(tree["a"]))


class _Saver:
    """A child that saves when it is told to; a context manager. It is forked from a process that has imported all."""

    def __init__(self, servers: Sequence[BucketServer]) -> None:
        self._mine, theirs = _CONTEXT.Pipe()
        self._child = _CONTEXT.Process(target=_save_in_a_loop, args=(servers, theirs), daemon=True)
        self._child.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def begin(self, kind: str, name: str, version: int, size: int, account: int) -> None:
        """Let it save to a place of one of its servers from that version on."""
        if not self._mine.poll(_PATIENCE) or self._mine.recv() != "ready":
            raise RuntimeError("a saver did not start")
        self._mine.send((kind, name, version, size, account))

    def kill(self) -> list[int]:
        """Kill it, and return the versions that it was told are saved."""
        self._child.kill()
        self._child.join(_PATIENCE)
        told: list[int] = []
        with contextlib.suppress(EOFError, OSError):
            while self._mine.poll():
                said = self._mine.recv()
                if isinstance(said, int):
                    told.append(said)
        self._mine.close()
        return told


def _save_in_a_loop(servers: Sequence[BucketServer], orders: Connection[Any, Any]) -> None:
    """Save version after version as the order says, and tell each one that is acknowledged."""
    accounts = Accounts(servers)
    for number in range(len(servers)):
        with accounts.beginning(number) as begun:
            treering.save(accounts.root / f"warm-{secrets.token_hex(6)}", tree_of(1), progress=begun)
    orders.send("ready")
    kind, name, version, size, account = orders.recv()
    versions = ((number, tree_of(number, size)) for number in itertools.count(version))
    for saved in _saved(accounts, account, accounts.root / name, kind, versions):
        orders.send(saved)


def _saved(
    accounts: Accounts, account: int, path: Any, kind: str, versions: Iterator[tuple[int, dict[str, Any]]]
) -> Iterator[int]:
    if kind == "checkpoint":
        for version, tree in versions:
            with accounts.beginning(account) as begun:
                treering.save(path, tree, overwrite=version > 1, progress=begun)
            yield version
        return
    with accounts.beginning(account):
        run = treering.Run(path, keep=treering.KeepLast(LAST))
    with run:
        for version, tree in versions:
            run.save(version, tree).result()
            yield version
