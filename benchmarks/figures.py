"""The figures that README and the pages give, each taken from a run that is kept in ``benchmarks/results``.

A page marks a figure with the place where it was measured, so that a page cannot say what no run has shown:

    <!-- figure: checkpoint; B; load; safetensors; times -->0.71x<!-- end -->

Between the semicolons stand the benchmark, the workload (and the kind of leaves, where there are two: ``A numpy``),
the group, the case, and what of it is meant, one of ``KINDS``. ``docs/draw_figures.py`` writes what is between the
comments.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import ratio

__all__ = [
    "KINDS", "RESULTS", "case", "duration", "figure", "kept", "machine", "median_time", "size", "times",
    "wrong",
]  # fmt: skip

RESULTS = Path(__file__).with_name("results")
_MIB = 1 << 20


def kept() -> list[str]:
    """The names of the benchmarks of which a run is kept."""
    return sorted(path.stem for path in RESULTS.glob("*.json"))


@functools.cache
def _report(benchmark: str) -> Any:
    """The kept run of a benchmark."""
    return json.loads((RESULTS / f"{benchmark}.json").read_text(encoding="utf-8"))


def machine(benchmark: str) -> dict[str, str]:
    """When, where and by which command the kept run of a benchmark was made."""
    found: dict[str, str] = _report(benchmark)["machine"]
    return found


def wrong(benchmark: str) -> list[str]:
    """The results of the kept run that were not what they should be."""
    return list(_report(benchmark)["wrong"])


def size(benchmark: str) -> float:
    """The factor on the bytes of each workload in the kept run; 1 where it was measured as the pages tell of it."""
    return float(_report(benchmark)["size"])


def _job(benchmark: str, workload: str, group: str) -> Any:
    """One group on one workload, ``A`` or ``A numpy``.

    Raises:
        KeyError: it was not measured, or with two kinds of leaves and the workload does not say which.
    """
    name, _, leaves = workload.partition(" ")
    found = [
        job
        for job in _report(benchmark)["jobs"]
        if (job["workload"], job["group"]) == (name, group) and leaves in ("", job["leaves"])
    ]
    if len(found) != 1:
        raise KeyError(f"{benchmark}.json has {len(found)} groups {group!r} of {workload}, not one")
    return found[0]


def case(benchmark: str, workload: str, group: str, name: str) -> Any:
    """What was measured of one case.

    Raises:
        KeyError: it was not measured.
    """
    for each in _job(benchmark, workload, group)["outcomes"]:
        if each["case"] == name:
            return each
    raise KeyError(f"{benchmark}.json has no case {name!r} in the group {group!r} of {workload}")


def median_time(benchmark: str, workload: str, group: str, name: str) -> float:
    """The median time of a case in seconds."""
    return statistics.median(case(benchmark, workload, group, name)["seconds"])


def times(benchmark: str, workload: str, group: str, name: str) -> float:
    """How many times as long as treering a case took: the median of the ratios of each round."""
    ours = _job(benchmark, workload, group)["outcomes"][0]
    return ratio(case(benchmark, workload, group, name)["seconds"], ours["seconds"]).median


def duration(value: float) -> str:
    """A time in two figures, in the unit that suits it.

    Example:
        >>> [duration(value) for value in (25.94, 2.249, 0.592, 0.0541, 0.00399, 0.0000213)]
        ['26 s', '2.2 s', '0.59 s', '54 ms', '4.0 ms', '21 us']
    """
    unit, scale = ("s", 1.0) if value >= 0.0995 else ("ms", 1e3) if value >= 0.000995 else ("us", 1e6)
    return f"{_two(value * scale)} {unit}"


def _two(value: float) -> str:
    """Two figures, or all of those before the point; never an exponent."""
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 0.995 else f"{value:.2f}"


def _leaves(job: Any) -> int:
    """How many leaves a workload has, which its title says: ``many leaves of 1 KiB: 10,000 leaves, 9.8 MiB``."""
    return int(job["title"].rpartition(" leaves,")[0].rpartition(" ")[2].replace(",", ""))


KINDS: dict[str, Callable[[Any, Any], str]] = {
    "time": lambda case, _: duration(statistics.median(case["seconds"])),
    "time of a leaf": lambda case, job: duration(statistics.median(case["seconds"]) / _leaves(job)),
    # What others take over what treering takes, and for what only adds to treering's own time the reverse.
    "times": lambda case, job: f"{_two(ratio(case['seconds'], job['outcomes'][0]['seconds']).median)}x",
    "share": lambda case, job: f"{ratio(job['outcomes'][0]['seconds'], case['seconds']).median:.2f}x",
    "memory": lambda case, _: f"{_two(case['peak']['extra'] / _MIB)} MiB",
    "memory over bytes": lambda case, job: f"{case['peak']['extra'] / job['nbytes']:.3f}x",
    "count": lambda case, _: f"{statistics.median(case['counts']):g}",
}
"""What a figure can say of a case, as the text that stands on the page."""


def figure(place: str) -> str:
    """The text of the figure at a place, as a page marks it.

    Raises:
        KeyError: that was not measured.
        ValueError: the place does not have these five parts.
    """
    benchmark, workload, group, name, kind = (part.strip() for part in place.split(";"))
    return KINDS[kind](case(benchmark, workload, group, name), _job(benchmark, workload, group))
