"""A million schedules of the protocol by which processes save together, each drawn from a seed and judged."""

from __future__ import annotations

import collections
import multiprocessing
import time
from collections.abc import Iterator
from typing import NamedTuple

from torture.simulated_folder import Violation
from torture.simulation import run_schedule
from torture.virtual_processes import REAL, Protocol

__all__ = ["Found", "schedules", "tried"]

_BATCH = 500
_SHOWN = 20


class Found(NamedTuple):
    """What some schedules have shown."""

    counts: collections.Counter[str]
    """How often each outcome was seen."""
    violations: list[tuple[int, str]]
    """Number of each schedule in which a rule was broken, and what it was."""


def tried(
    seed: int, numbers: range, *, processes: int | None = None, protocol: Protocol = REAL, enough: int | None = None
) -> Found:
    """Run the schedules of these numbers; stop when enough of them broke a rule."""
    found = Found(collections.Counter(), [])
    for number in numbers:
        found.counts["schedules"] += 1
        try:
            found.counts.update(run_schedule(f"{seed}:{number}", processes=processes, protocol=protocol))
        except Violation as error:
            found.violations.append((number, str(error)))
        if enough is not None and len(found.violations) >= enough:
            break
    return found


def _tried_batch(batch: tuple[int, range, int | None]) -> Found:
    seed, numbers, processes = batch
    return tried(seed, numbers, processes=processes)


def schedules(count: int, seed: int, first: int, processes: int | None, jobs: int) -> int:
    """Run that many schedules, say what was seen, and return 0 when no rule was broken."""
    print(f"{count} schedules of seed {seed}, {jobs} at once", flush=True)
    start = time.monotonic()
    counts: collections.Counter[str] = collections.Counter()
    broken: list[tuple[int, str]] = []
    shown = start
    batches = [
        (seed, range(number, min(number + _BATCH, first + count)), processes)
        for number in range(first, first + count, _BATCH)
    ]
    for found in _all_found(batches, jobs):
        counts += found.counts
        for number, text in found.violations[: max(0, _SHOWN - len(broken))]:
            print(f"schedule {number}: {text}", flush=True)
            again = f"--seed {seed} --first {number} --schedules 1"
            again += f" --processes {processes}" if processes else ""
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


def _all_found(batches: list[tuple[int, range, int | None]], jobs: int) -> Iterator[Found]:
    if jobs == 1:
        yield from map(_tried_batch, batches)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(_tried_batch, batches)
