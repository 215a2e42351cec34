"""A million schedules of a protocol of many programs, each drawn from a seed and judged."""

from __future__ import annotations

import collections
import multiprocessing
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torture.bucket_programs import SOUND, BucketProtocol
from torture.bucket_simulation import BucketSimulation
from torture.file_simulation import FILES, FileProtocol, FileSimulation
from torture.memory_simulation import MemorySimulation
from torture.simulated_folder import Violation
from torture.simulation import Simulation
from torture.virtual_processes import REAL, Protocol

__all__ = ["STORES", "Found", "schedules", "tried"]

STORES: dict[str, tuple[Callable[..., Any], Any]] = {
    "folder": (Simulation, REAL),
    "memory": (MemorySimulation, REAL),
    "bucket": (BucketSimulation, SOUND),
    "file": (FileSimulation, FILES),
}
"""What is saved into, and the protocol that is followed: processes save together into a folder with locks, or into the
memory store, where versions alone decide; or many programs change a bucket whose requests get lost and come late, or
save one single file in it.
"""

_BATCH = 500
_SHOWN = 20


class Found(NamedTuple):
    """What some schedules have shown."""

    counts: collections.Counter[str]
    """How often each outcome was seen."""
    violations: list[tuple[int, str]]
    """Number of each schedule in which a rule was broken, and what it was."""


def tried(
    seed: int,
    numbers: range,
    *,
    processes: int | None = None,
    protocol: Protocol | BucketProtocol | FileProtocol | None = None,
    enough: int | None = None,
    store: str = "folder",
) -> Found:
    """Run the schedules of these numbers; stop when enough of them broke a rule."""
    found = Found(collections.Counter(), [])
    simulate, sound = STORES[store]
    for number in numbers:
        found.counts["schedules"] += 1
        try:
            simulation = simulate(f"{seed}:{number}", protocol or sound, processes)
            simulation.run()
            found.counts.update(simulation.counts)
        except Violation as error:
            found.violations.append((number, str(error)))
        if enough is not None and len(found.violations) >= enough:
            break
    return found


def _tried_batch(batch: tuple[int, range, int | None, str]) -> Found:
    seed, numbers, processes, store = batch
    return tried(seed, numbers, processes=processes, store=store)


def schedules(count: int, seed: int, first: int, processes: int | None, jobs: int, *, store: str) -> int:
    """Run that many schedules, say what was seen, and return 0 when no rule was broken."""
    print(f"{count} schedules of seed {seed} over the {store} store, {jobs} at once", flush=True)
    start = time.monotonic()
    counts: collections.Counter[str] = collections.Counter()
    broken: list[tuple[int, str]] = []
    shown = start
    batches = [
        (seed, range(number, min(number + _BATCH, first + count)), processes, store)
        for number in range(first, first + count, _BATCH)
    ]
    for found in _all_found(batches, jobs):
        counts += found.counts
        for number, text in found.violations[: max(0, _SHOWN - len(broken))]:
            print(f"schedule {number}: {text}", flush=True)
            again = f"--seed {seed} --first {number} --schedules 1"
            again += f" --processes {processes}" if processes else ""
            again += f" --store {store}" if store != "folder" else ""
            print(f"  again: python -m torture schedules {again}", flush=True)
        broken += found.violations
        if time.monotonic() - shown > 60:
            shown = time.monotonic()
            print(f"{counts['schedules']} schedules, {len(broken)} violations", flush=True)
    seconds = time.monotonic() - start
    done = counts.pop("schedules")
    for name, number in counts.most_common():
        print(f"  {number:>10}  {name}")
    print(f"{done} schedules in {seconds:.0f} s ({done / seconds:.0f} a second), seed {seed}")
    print(f"{len(broken)} violations")
    return int(bool(broken))


def _all_found(batches: list[tuple[int, range, int | None, str]], jobs: int) -> Iterator[Found]:
    if jobs == 1:
        yield from map(_tried_batch, batches)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(_tried_batch, batches)
