"""Interrupts at random moments of every public function: nothing stays locked or open, nothing hangs.

A batch runs in a process of its own, on a file system in memory. Three kinds of interrupt strike, one at a time: a real
signal after random microseconds; an exception at the n-th place where Python would handle a signal; and one after the
n-th system call. Lines are no such places: Python handles signals where a function begins, where a loop turns, and
after a call of C.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

__all__ = ["interrupts"]

_BATCH: Final = 500
_BATCH_SECONDS: Final = 1800.0
_ROOT: Final = Path(__file__).parents[1]


def interrupts(count: int, seed: int, processes: int, scenes: list[str] | None) -> int:
    """Strike ``count`` times and print what came of it; 0 when nothing was violated."""
    print(f"{count} interrupts, seed {seed}", flush=True)
    begun = time.monotonic()
    sizes = [min(_BATCH, count - start) for start in range(0, count, _BATCH)]
    seeds = [random.Random(f"{seed} {number}").getrandbits(32) for number in range(len(sizes))]
    table: collections.Counter[str] = collections.Counter()
    violations: list[str] = []
    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        for done in pool.map(lambda size, drawn: _batch(size, drawn, scenes), sizes, seeds):
            table.update(done["outcomes"])
            violations += done["violations"]
            for violation in done["violations"]:
                print(violation, flush=True)
            print(f"{sum(table.values())} in {time.monotonic() - begun:.0f} s", flush=True)
    for outcome, times in sorted(table.items()):
        print(f"{times:8} {outcome}")
    print(f"{sum(table.values())} interrupts in {time.monotonic() - begun:.0f} s\n{len(violations)} violations")
    return 1 if violations else 0


def _batch(count: int, seed: int, scenes: list[str] | None) -> dict[str, list[str]]:
    """Run one batch; a process that hangs or dies is a violation."""
    order = json.dumps({"count": count, "seed": seed, "scenes": scenes})
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(_ROOT)])}
    command = [sys.executable, "-m", "torture.interrupted", order]
    answer: dict[str, list[str]] = {"outcomes": [], "violations": []}
    try:
        done = subprocess.run(
            command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False, timeout=_BATCH_SECONDS
        )
    except subprocess.TimeoutExpired:
        answer["violations"].append(f"batch {order} did not end")
        return answer
    for line in done.stdout.splitlines():
        with contextlib.suppress(ValueError):
            kind, text = json.loads(line)
            answer[kind].append(text)
    if done.returncode:
        answer["violations"].append(f"batch {order} ended with {done.returncode}\n{done.stderr[-8000:]}")
    return answer
