"""Command line: ``python -m benchmarks scale [--quick] [--processes N,N] [--costs MS,MS] [--writing S,S] [--json]``.

What the messages of a joint save cost by the number of processes: the real protocol in `benchmarks.scale_simulation`;
with ``--real`` in real processes, by `benchmarks.scale_places`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import table
from benchmarks.scale_places import measure_places, place_lines
from benchmarks.scale_simulation import LEAVES, Figures, Setting, simulate

__all__ = ["GOALS", "Goal", "draw", "main"]

_PROCESSES = (2, 4, 8, 16, 32, 64, 256, 1024, 4096)
_COSTS = (0.05, 0.5, 2.0, 50.0)
_WRITING = (1.0, 10.0, 60.0)
_QUICK = ((2, 32, 1024), (0.5, 2.0), (10.0,))
"""Processes, milliseconds and seconds of ``--quick``: every goal that is about a time is in it."""
_DRAWN = 10.0
"""Seconds of writing in the curves."""
_MARKS = "abcdefgh"
_ROWS_A_DECADE = 3

_HEAD = (
    "processes",
    "operation",
    "writing",
    "reads: mean",
    "most",
    "KiB: mean",
    "most",
    "created",
    "removed",
    "all back after",
    "operations/s",
    "busiest second",
    "failed",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What treering wants to reach with 1,024 processes and 10 s of writing."""

    what: str
    """What is counted."""
    bound: float
    """It is at most that."""
    value: Callable[[Figures], float]
    """What was counted."""
    cost: float | None = None
    """The milliseconds of an operation that it is about; None for all of them."""

    def fits(self, setting: Setting) -> bool:
        """Whether the goal is about a setting."""
        return (setting.processes, setting.writing) == (1024, 10.0) and self.cost in {None, _milliseconds(setting)}

    def met(self, figures: Figures) -> bool:
        """Whether a save reaches the goal; one that failed does not."""
        return not figures.failed and self.value(figures) <= self.bound


GOALS = (
    Goal(what="reads of a process, mean", bound=40, value=lambda figures: figures.mean_reads),
    Goal(what="reads of any one process", bound=200, value=lambda figures: figures.most_reads),
    Goal(what="KiB of messages of any one process", bound=64, value=lambda figures: figures.most_bytes / 1024),
    Goal(what="s until all are back", bound=1.0, value=lambda figures: figures.after, cost=0.5),
    Goal(what="s until all are back", bound=2.5, value=lambda figures: figures.after, cost=2.0),
)


def main(arguments: Sequence[str]) -> int:
    """Simulate every setting and print the figures, the curves and the goals; 1 if a save failed."""
    parser = _parser()
    given = parser.parse_args(arguments)
    processes, costs, writing = _QUICK if given.quick else (_PROCESSES, _COSTS, _WRITING)
    settings = [
        Setting(processes=count, cost=cost / 1000, writing=seconds, seed=given.seed)
        for seconds in given.writing or writing
        for cost in given.costs or costs
        for count in given.processes or processes
    ]
    if given.real:
        return _measure_real(given)
    found = [_simulated(setting) for setting in settings]
    if given.json:
        print(json.dumps({"benchmark": "scale", "figures": list(map(asdict, found)), "goals": _verdicts(found)}))
    else:
        print("\n".join(_report(found)))
    return 1 if any(figures.failed for figures in found) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks scale", description=sys.modules[__name__].__doc__)
    parser.add_argument("--quick", action="store_true", help="few settings: some seconds")
    parser.add_argument("--processes", type=_numbers(int), help="how many, with commas between")
    parser.add_argument("--costs", type=_numbers(float), help="milliseconds of an operation, with commas between")
    parser.add_argument("--writing", type=_numbers(float), help="seconds of writing, with commas between")
    parser.add_argument(
        "--real", action="store_true", help="64 real processes, 10 s of writing, on a disk and a bucket"
    )
    parser.add_argument("--saves", type=int, default=5, help="saves of --real (default 5)")
    parser.add_argument("--dir", type=Path, help="folder on the disk of --real (default: a temporary one)")
    parser.add_argument("--seed", type=int, default=0, help="of the shares of the processes (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    return parser


def _measure_real(given: argparse.Namespace) -> int:
    """Measure real processes; 1 if a save failed."""
    quick = (8, 1.0) if given.quick else (64, 10.0)
    (processes, *_), (writing, *_) = given.processes or quick[:1], given.writing or quick[1:]
    with tempfile.TemporaryDirectory(prefix="benchmarks-", dir=given.dir) as folder:
        found, missing = measure_places(processes, writing, given.saves, Path(folder))
    if given.json:
        print(json.dumps({"benchmark": "scale", "places": list(map(asdict, found)), "missing": missing}))
    else:
        print("\n".join(place_lines(found, missing)))
    return 1 if any(each.figures.faults for each in found) else 0


def _numbers(kind: Callable[[str], float]) -> Callable[[str], tuple[float, ...]]:
    return lambda text: tuple(map(kind, text.split(",")))


def _simulated(setting: Setting) -> Figures:
    start = time.process_time()
    figures = simulate(setting)
    shown = f"{setting.processes} processes, {_milliseconds(setting):g} ms, {setting.writing:g} s"
    print(f"{shown}: {time.process_time() - start:.1f} s of processor time", file=sys.stderr, flush=True)
    return figures


def _report(found: Sequence[Figures]) -> list[str]:
    lines = [f"scale: the messages of a joint save of {LEAVES:,} leaves, simulated", ""]
    lines += table(_HEAD, map(_row, found))
    drawn = [figures for figures in found if figures.setting.writing == _DRAWN]
    if len({figures.setting.processes for figures in drawn}) > 1:
        lines += ["", *_curve(drawn, "seconds until all are back", lambda figures: figures.after)]
        lines += ["", *_curve(drawn, "reads of a process, mean", lambda figures: figures.mean_reads)]
    if verdicts := _verdicts(found):
        lines += ["", "Goals for 1,024 processes, 10 s of writing", ""]
        lines += table(("what", "operation", "goal", "measured", "met"), map(_goal_row, verdicts))
        lines += ["", f"{sum(each['met'] for each in verdicts)} of {len(verdicts)} met"]
    return lines


def _row(figures: Figures) -> tuple[str, ...]:
    setting = figures.setting
    return (
        f"{setting.processes:,}",
        f"{_milliseconds(setting):g} ms",
        f"{setting.writing:g} s",
        f"{figures.mean_reads:.1f}",
        f"{figures.most_reads:,}",
        f"{figures.mean_bytes / 1024:,.1f}",
        f"{figures.most_bytes / 1024:,.1f}",
        f"{figures.created:.2f}",
        f"{figures.removed:.2f}",
        f"{figures.after:.3f} s",
        f"{figures.rate:,.0f}",
        f"{figures.busiest:,}",
        f"{figures.failed:,}" if figures.failed else "",
    )


def _goal_row(verdict: Mapping[str, Any]) -> tuple[str, ...]:
    met = "yes" if verdict["met"] else "NO"
    return verdict["what"], f"{verdict['cost']:g} ms", f"<= {verdict['bound']:g}", _figure(verdict["value"]), met


def _verdicts(found: Iterable[Figures]) -> list[dict[str, Any]]:
    return [
        {
            "what": goal.what,
            "cost": _milliseconds(figures.setting),
            "bound": goal.bound,
            "value": goal.value(figures),
            "met": goal.met(figures),
        }
        for goal in GOALS
        for figures in found
        if goal.fits(figures.setting)
    ]


def _curve(found: Sequence[Figures], title: str, value: Callable[[Figures], float]) -> list[str]:
    """One curve over the number of processes for each cost of an operation."""
    counts = sorted({figures.setting.processes for figures in found})
    costs = sorted({_milliseconds(figures.setting) for figures in found})
    values = {(figures.setting.processes, _milliseconds(figures.setting)): value(figures) for figures in found}
    series = {mark: [values[count, cost] for count in counts] for mark, cost in zip(_MARKS, costs, strict=False)}
    legend = ", ".join(f"{mark} {cost:g} ms" for mark, cost in zip(_MARKS, costs, strict=False))
    return [f"{title}; {_DRAWN:g} s of writing; an operation takes {legend}", "", *draw(counts, series)]


def draw(columns: Sequence[int], series: Mapping[str, Sequence[float]]) -> list[str]:
    """Return a chart with logarithmic axes: one row for each third of a decade, one mark for each series.

    Example:
        >>> for line in draw([2, 64], {"a": [0.1, 1.0], "b": [0.1, 0.5]}):
        ...     print(line)
             1 |               a
               |               b
               |
           0.1 |      ab
               +----------------
                       2      64
    """
    levels = {mark: [_level(value) for value in values] for mark, values in series.items()}
    used = [level for each in levels.values() for level in each]
    first = math.floor(min(used) / _ROWS_A_DECADE) * _ROWS_A_DECADE
    lines = []
    for level in range(max(used), first - 1, -1):
        label = f"{10 ** (level // _ROWS_A_DECADE):g}" if level % _ROWS_A_DECADE == 0 else ""
        cells = ("".join(mark for mark in levels if levels[mark][at] == level) for at in range(len(columns)))
        lines.append(f"{label:>6} |{''.join(f'{cell:>8}' for cell in cells)}".rstrip())
    lines.append(f"{'':6} +{'-' * 8 * len(columns)}")
    lines.append(f"{'':6}  {''.join(f'{column:>8,}' for column in columns)}")
    return lines


def _level(value: float) -> int:
    return round(_ROWS_A_DECADE * math.log10(max(value, 1e-4)))


def _milliseconds(setting: Setting) -> float:
    return round(setting.cost * 1000, 6)


def _figure(value: float) -> str:
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
