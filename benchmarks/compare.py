"""Run benchmarks of an older checkout and of this one in turns, and compare what treering takes in both.

``python -m benchmarks.compare OLD NAME [NAME ...] [--turns N] [--ours] [--cpu] [-- OPTION ...]``: OLD is the top of
another checkout, the NAMEs are those of ``python -m benchmarks``, and what follows ``--`` goes to each of its runs.
Each turn runs both checkouts, the one and the other first in alternation. A row is worse where this checkout took
longer in every turn; the exit status is then 1. The cases of other libraries run too: where they differ as much, the
machine does. With ``--ours`` they are left out, which takes a fraction of the time. With ``--cpu`` the processor time
of the measuring process, of all its threads, stands in the place of seconds: other programs change it little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import ratio

__all__ = ["main"]

_HERE = Path(__file__).parents[1]
_OURS = """
import benchmarks.suite as suite
wanted = suite._wanted

def ours(group, options):
    mine = tuple(case for case in group.cases if case.name.startswith("treering"))
    object.__setattr__(group, "cases", mine)
    return bool(mine) and wanted(group, options)

suite._wanted, suite._verdicts = ours, lambda *_: ()
"""
"""Leaves out the cases of other libraries, in a checkout that may know no such option."""
_CPU = "import time\ntime.perf_counter = time.process_time\n"
_MAIN = "from benchmarks.__main__ import main\nraise SystemExit(main())\n"
_Row = tuple[str, str, str, str, str]
"""Benchmark, workload, kind of leaves, group, case."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line for each row; 1 if a row is worse."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=sys.modules[__name__].__doc__)
    parser.add_argument("old", type=Path, help="the top of the older checkout")
    parser.add_argument("names", nargs="+", help="benchmarks to run")
    parser.add_argument("--turns", type=int, default=5, help="how often both are run (default 5)")
    parser.add_argument("--ours", action="store_true", help="leave the cases of other libraries out")
    parser.add_argument("--cpu", action="store_true", help="compare processor time")
    given, options = parser.parse_known_args(arguments)
    options = [option for option in options if option != "--"]
    program = (_CPU if given.cpu else "") + (_OURS if given.ours else "") + _MAIN
    count, worse, alone = 0, 0, list[str]()
    for name in given.names:
        before: dict[_Row, list[float]] = defaultdict(list)
        after: dict[_Row, list[float]] = defaultdict(list)
        for turn in range(given.turns):
            pair = [(given.old.resolve(), before), (_HERE, after)]
            for checkout, rows in pair if turn % 2 else pair[::-1]:
                for row, seconds in _measure(checkout, program, name, options).items():
                    rows[row].append(seconds)
        for row in sorted(before.keys() & after.keys()):
            change = ratio(after[row], before[row])
            bad = change.least > 1 and row[-1].startswith("treering")
            worse += bad
            print(
                f"{'WORSE' if bad else 'ok   '} {' | '.join(row)}: {statistics.median(after[row]):.4g} s, "
                f"{change.median:.2f} [{change.least:.2f}-{change.greatest:.2f}] of before",
                flush=True,
            )
        count += len(before.keys() & after.keys())
        alone += sorted(map(" | ".join, before.keys() ^ after.keys()))
    print(f"{count} rows, {worse} worse; only in one checkout: {alone or 'none'}")
    return 1 if worse else 0


def _measure(checkout: Path, program: str, name: str, options: Sequence[str]) -> dict[_Row, float]:
    """Run one benchmark of a checkout once and return the median seconds of each case."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(checkout / "src"), str(checkout)])}
    command = [sys.executable, "-c", program, name, "--json", "--no-memory", "--rounds", "1", *options]
    done = subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return {
        (name, job["workload"], job["leaves"], job["group"], outcome["case"]): statistics.median(outcome["seconds"])
        for job in report["jobs"]
        for outcome in job["outcomes"]
    }


if __name__ == "__main__":
    raise SystemExit(main())
