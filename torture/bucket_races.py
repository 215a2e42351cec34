"""Savers, overwriters, readers and a collector at one place of a bucket at once."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import treering
from torture.bucket_accounts import Accounts
from torture.bucket_scenes import WrongArrays, look, open_bucket, tree_of, version_in
from torture.bucket_servers import BucketServer
from treering.errors import BusyError, ExistsError, NotFoundError, TreeringError

__all__ = ["Raced", "race"]

SAVERS: Final = 8
OVERWRITERS: Final = 3
READERS: Final = 2
_WAYS: Final = 4
_TIMES: Final = 3
_LONGEST: Final = 120.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Save:
    version: int
    begun: float
    ended: float
    is_sure: bool
    """It was acknowledged; otherwise its error says that it may be there."""


@dataclasses.dataclass(slots=True)
class Raced:
    """What was found.

    Attributes:
        races: how many there were.
        saves: how many saves were acknowledged.
        reads: how many loads returned a tree.
        outcomes: what the others were told.
        wrong: what must not be.
    """

    races: int = 0
    saves: int = 0
    reads: int = 0
    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    wrong: list[str] = dataclasses.field(default_factory=list)


def race(servers: Sequence[BucketServer], races: int) -> Raced:
    """Run so many races, two at once at a new place of each server, and judge each by what it was told and found.

    Of four savers one uses the URL of the bucket, which is the same for both servers: the environment says which one.
    """
    raced = Raced()
    accounts = Accounts(servers)
    fields = [_Field.of(server, accounts, number) for number, server in enumerate(servers)]
    for field in fields:  # the first save to a bucket asks whether it heeds conditions
        for number in range(_WAYS):
            with field.reached(number) as (root, begun):
                treering.save(root / f"warm-{secrets.token_hex(6)}", tree_of(1), progress=begun)
    for number in range(0, races, len(fields)):
        name = f"races-{secrets.token_hex(6)}"
        both = [_Race(field, name) for field in fields]
        threads = [threading.Thread(target=one.run) for one in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one in both:
            raced.races += 1
            raced.saves += sum(save.is_sure for save in one.saves)
            raced.reads += len(one.reads)
            raced.outcomes += one.outcomes
            raced.wrong += [f"race {number}: {what}" for what in one.wrong]
        if raced.races % 50 == 0:
            print(f"{raced.races} of {races} races", flush=True)
    return raced


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    """Where one of two races takes place."""

    accounts: Accounts
    account: int
    roots: Sequence[Any]
    first: int
    """The versions of its saves begin here: nobody reads those of the other one."""

    @classmethod
    def of(cls, server: BucketServer, accounts: Accounts, number: int) -> _Field:
        names = [f"racer-{number}-{way}-{secrets.token_hex(4)}" for way in range(_WAYS - 1)]
        roots = [open_bucket(server, name, seconds=30.0, patience=60.0) for name in names]
        return cls(accounts, number, roots, 10_000 * number)

    @contextlib.contextmanager
    def reached(self, number: int) -> Iterator[tuple[Any, Any]]:
        """Yield the bucket as one of its users reaches it, and what to pass as ``progress``."""
        if number % _WAYS < len(self.roots):
            yield self.roots[number % _WAYS], None
        else:
            with self.accounts.beginning(self.account) as begun:
                yield self.accounts.root, begun


class _Race:
    """One race in a run's folder, at its step 1."""

    def __init__(self, field: _Field, name: str) -> None:
        self.saves: list[_Save] = []
        self.reads: list[tuple[int, float]] = []
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self._field = field
        self._name = name
        self._over = threading.Event()
        self._start = threading.Barrier(SAVERS + OVERWRITERS + READERS + 1)

    def run(self) -> None:
        """Let all go at once, wait for them, and judge."""
        works: Sequence[Callable[[int], None]] = [self._save] * SAVERS + [self._overwrite] * OVERWRITERS
        ending = self._threads(works)
        lasting = self._threads([*[self._read] * READERS, self._collect])
        deadline = time.monotonic() + _LONGEST
        for thread in (*ending, *lasting):
            thread.start()
        for thread in ending:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._over.set()
        for thread in lasting:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in (*ending, *lasting)):
            self.wrong.append(f"it hangs for more than {_LONGEST:.0f} s")
        self._judge()

    def _threads(self, works: Sequence[Callable[[int], None]]) -> list[threading.Thread]:
        return [threading.Thread(target=self._guard, args=(work, n), daemon=True) for n, work in enumerate(works)]

    @contextlib.contextmanager
    def _path(self, number: int) -> Iterator[tuple[Any, Any]]:
        with self._field.reached(number) as (root, begun):
            yield root / self._name / "step_00000001", begun

    def _guard(self, work: Callable[[int], None], number: int) -> None:
        self._start.wait()
        try:
            work(number)
        except WrongArrays as error:
            self.wrong.append(f"a wrong array: {error}")
        except Exception as error:  # noqa: BLE001 - the judge is told
            self.wrong.append(f"{type(error).__name__}: {error}")

    def _attempt(self, number: int, version: int, *, overwrite: bool) -> None:
        begun = time.monotonic()
        try:
            with self._path(number) as (path, begins):
                treering.save(path, tree_of(version), overwrite=overwrite, progress=begins)
        except (ExistsError, BusyError) as error:
            self.outcomes[f"told {type(error).__name__}"] += 1
        except TreeringError as error:
            self.outcomes[f"told {type(error).__name__}"] += 1
            self.saves.append(_Save(version, begun, time.monotonic(), is_sure=False))
        else:
            self.saves.append(_Save(version, begun, time.monotonic(), is_sure=True))

    def _save(self, number: int) -> None:
        self._attempt(number, self._field.first + number + 1, overwrite=False)

    def _overwrite(self, number: int) -> None:
        for again in range(_TIMES):
            self._attempt(number, self._field.first + 100 * (again + 1) + number, overwrite=True)

    def _read(self, number: int) -> None:
        while not self._over.is_set():
            begun = time.monotonic()
            try:
                with self._path(number + _WAYS - 1) as (path, begins):
                    version = version_in(treering.load(path, progress=begins))
            except (NotFoundError, BusyError) as error:
                self.outcomes[f"a load was told {type(error).__name__}"] += 1
                time.sleep(0.002)
            else:
                self.reads.append((version, begun))

    def _collect(self, _: int) -> None:
        with self._field.reached(_WAYS - 1) as (root, _):
            run = treering.Run(root / self._name, keep=treering.KeepLast(1))
        while not self._over.is_set():
            try:
                run.gc(dry_run=False)
            except (NotFoundError, BusyError) as error:
                self.outcomes[f"gc was told {type(error).__name__}"] += 1
            time.sleep(0.005)

    def _judge(self) -> None:
        """Compare what was read, and what is there at the end, with the order in which saves were acknowledged."""
        first = [save for save in self.saves if save.is_sure and save.version - self._field.first <= SAVERS]
        if len(first) > 1:
            self.wrong.append(f"{len(first)} savers were told that they are the first")
        end = time.monotonic()
        path = self._field.roots[0] / self._name / "step_00000001"
        last = look(lambda: version_in(treering.load(path)))
        if any(save.is_sure for save in self.saves) or last is not None:
            self.reads.append((last, end))
        by_version = {save.version: save for save in self.saves}
        for version, begun in self.reads:
            found = by_version.get(version)
            if found is None:
                self.wrong.append(f"{version!r} was read, which nobody saved")
                continue
            for other in self.saves:
                # A save that began after this one had ended, and ended before the load began.
                if other.is_sure and other.begun > found.ended and other.ended < begun:
                    self.wrong.append(f"{version} was read after {other.version} had replaced it")
        if look(lambda: bool(treering.verify(path))) is False:
            self.wrong.append("verify finds damage at the end")
