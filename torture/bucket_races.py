"""Savers, overwriters, readers and a collector at one place of a bucket at once."""

from __future__ import annotations

import collections
import dataclasses
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import treering
from torture.bucket_scenes import WrongArrays, look, open_bucket, tree_of, version_in
from torture.bucket_servers import BucketServer
from treering.errors import Busy, Exists, NotFound, TreeringError

__all__ = ["Raced", "race"]

SAVERS: Final = 8
OVERWRITERS: Final = 3
READERS: Final = 2
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


def race(server: BucketServer, races: int) -> Raced:
    """Run so many races, each at a new place, and judge each by what its saves were told and its loads found."""
    raced = Raced()
    roots = [
        open_bucket(server, f"racer-{number}-{secrets.token_hex(4)}", seconds=30.0, patience=60.0)
        for number in range(4)
    ]
    for root in roots:  # the first save to a bucket asks whether it heeds conditions
        treering.save(root / f"warm-{secrets.token_hex(6)}", tree_of(1))
    for number in range(races):
        one = _Race(roots, f"races-{secrets.token_hex(6)}")
        one.run()
        raced.races += 1
        raced.saves += sum(save.is_sure for save in one.saves)
        raced.reads += len(one.reads)
        raced.outcomes += one.outcomes
        raced.wrong += [f"race {number}: {what}" for what in one.wrong]
        if (number + 1) % 50 == 0:
            print(f"{number + 1} of {races} races", flush=True)
    return raced


class _Race:
    """One race in a run's folder, at its step 1."""

    def __init__(self, roots: Sequence[Any], name: str) -> None:
        self.saves: list[_Save] = []
        self.reads: list[tuple[int, float]] = []
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self._roots = roots
        self._name = name
        self._over = threading.Event()
        self._start = threading.Barrier(SAVERS + OVERWRITERS + READERS + 1)

    def run(self) -> None:
        """Let all go at once, wait for them, and judge."""
        works: Sequence[Callable[[int], None]] = [self._save] * SAVERS + [self._overwrite] * OVERWRITERS
        ending = self._threads(works)
        lasting = self._threads([self._read] * READERS + [self._collect])
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

    def _path(self, number: int) -> Any:
        return self._roots[number % len(self._roots)] / self._name / "step_00000001"

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
            treering.save(self._path(number), tree_of(version), overwrite=overwrite)
        except (Exists, Busy) as error:
            self.outcomes[f"told {type(error).__name__}"] += 1
        except TreeringError as error:
            self.outcomes[f"told {type(error).__name__}"] += 1
            self.saves.append(_Save(version, begun, time.monotonic(), is_sure=False))
        else:
            self.saves.append(_Save(version, begun, time.monotonic(), is_sure=True))

    def _save(self, number: int) -> None:
        self._attempt(number, number + 1, overwrite=False)

    def _overwrite(self, number: int) -> None:
        for again in range(_TIMES):
            self._attempt(number, 100 * (again + 1) + number, overwrite=True)

    def _read(self, number: int) -> None:
        while not self._over.is_set():
            begun = time.monotonic()
            try:
                version = version_in(treering.load(self._path(number)))
            except (NotFound, Busy) as error:
                self.outcomes[f"a load was told {type(error).__name__}"] += 1
                time.sleep(0.002)
            else:
                self.reads.append((version, begun))

    def _collect(self, number: int) -> None:
        run = treering.Run(self._roots[number % len(self._roots)] / self._name, keep=treering.KeepLast(1))
        while not self._over.is_set():
            try:
                run.gc(dry_run=False)
            except (NotFound, Busy) as error:
                self.outcomes[f"gc was told {type(error).__name__}"] += 1
            time.sleep(0.005)

    def _judge(self) -> None:
        """Compare what was read, and what is there at the end, with the order in which saves were acknowledged."""
        first = [save for save in self.saves if save.is_sure and save.version <= SAVERS]
        if len(first) > 1:
            self.wrong.append(f"{len(first)} savers were told that they are the first")
        end = time.monotonic()
        last = look(lambda: version_in(treering.load(self._path(0))))
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
        if look(lambda: bool(treering.verify(self._path(0)))) is False:
            self.wrong.append("verify finds damage at the end")
