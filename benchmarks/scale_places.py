"""The saves of `benchmarks.scale_processes` on a disk and in SeaweedFS, and the table of what they cost."""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import table
from benchmarks.scale_processes import RealFigures, RealSetting, calls_of_saves, price_of, run_saves
from torture.bucket_servers import open_seaweed

__all__ = ["PlaceFigures", "measure_places", "place_lines"]

_HEAD = ("place", "processes", "writing", "all back after [least-most]", "requests", "1,000 saves", "system calls")
_MOST_CALLS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceFigures:
    """What saves cost in one place."""

    place: str
    """What to call it."""
    setting: RealSetting
    """The saves."""
    figures: RealFigures
    """Times and requests."""
    calls: dict[str, float] | None
    """System calls of one save of all processes by name, while ``strace`` counts them; None without it."""


def measure_places(processes: int, writing: float, saves: int, folder: Path) -> tuple[list[PlaceFigures], list[str]]:
    """Measure saves on the disk of a folder and in SeaweedFS; also return what is missing here."""
    found, missing = [], []
    for name, opened in (("disk", _disk(folder)), ("SeaweedFS", _seaweed(folder))):
        try:
            with opened as (place, environment):
                setting = RealSetting(processes=processes, writing=writing, saves=saves, place=place)
                print(f"{name}: {saves} saves by {processes} processes", file=sys.stderr, flush=True)
                figures = run_saves(setting, environment)
                calls = None if figures.faults else calls_of_saves(setting, environment)
        except RuntimeError as error:  # there is no such program
            missing.append(f"{name}: {error}")
            continue
        if calls is None:
            missing.append(f"{name}: no system calls, as there is no strace here or a save failed")
        found.append(PlaceFigures(place=name, setting=setting, figures=figures, calls=calls))
    return found, missing


@contextlib.contextmanager
def _disk(folder: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    yield str(folder / "saved"), {}


@contextlib.contextmanager
def _seaweed(folder: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    data = folder / "seaweed"
    data.mkdir()
    with open_seaweed(data) as server:
        yield f"{server.url}/saved", server.environment()


def place_lines(found: Sequence[PlaceFigures], missing: Sequence[str]) -> list[str]:
    """Return the lines of the report."""
    lines = ["scale: real processes, a save of no data", "", *table(_HEAD, map(_row, found)), ""]
    for each in found:
        if each.calls:
            most = list(each.calls.items())[:_MOST_CALLS]
            shown = ", ".join(f"{name} {count / each.setting.processes:.0f}" for name, count in most)
            lines.append(f"{each.place}: system calls of a process in one save, most of them {shown}")
        lines += [f"{each.place}: {fault}" for fault in each.figures.faults]
    return [*lines, *missing]


def _row(each: PlaceFigures) -> tuple[str, ...]:
    figures, setting = each.figures, each.setting
    after = figures.after
    requests = figures.requests
    calls = each.calls
    return (
        each.place,
        f"{setting.processes}",
        f"{setting.writing:g} s",
        f"{statistics.median(after):.3f} s [{min(after):.3f}-{max(after):.3f}]" if after else "",
        ", ".join(f"{count:,.0f} {kind.upper()}" for kind, count in requests.items()),
        f"{1000 * price_of(requests):.2f} USD" if requests else "",
        f"{sum(calls.values()):,.0f}, {sum(calls.values()) / setting.processes:,.0f} a process" if calls else "",
    )
