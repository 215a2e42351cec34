"""Print what was measured: tables for people, one JSON document for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby

from benchmarks.measure import Spread, ratio, spread
from benchmarks.suite import Goal, Job, Outcome, Report, Verdict

__all__ = ["as_json", "as_text", "table"]

_MIB = 1 << 20


def as_json(report: Report) -> str:
    """The whole report as one JSON document; times in seconds, sizes in bytes."""
    return json.dumps(asdict(report), indent=1)


def as_text(report: Report) -> str:
    """Tables by workload, then the goals, then what was wrong."""
    lines = [f"{report.benchmark}: {report.title}"]
    lines += [f"  {name}: {value}" for name, value in report.machine.items()]
    for (workload, title, leaves), jobs in groupby(report.jobs, key=lambda job: (job.workload, job.title, job.leaves)):
        lines += ["", f"{workload} with {leaves} leaves ({title})", ""]
        lines += table(_HEAD, [row for job in jobs for row in _rows(job, report.verdicts)])
    if report.verdicts:
        lines += ["", "Goals", ""]
        lines += table(_GOAL_HEAD, [_goal_row(verdict) for verdict in report.verdicts])
        met = sum(verdict.met for verdict in report.verdicts)
        lines += ["", f"{met} of {len(report.verdicts)} met"]
    if report.size != 1:
        lines += ["", f"Sizes were scaled by {report.size:g}; the goals are about factor 1."]
    if report.wrong:
        lines += ["", "WRONG RESULTS: these figures are worth nothing.", *(f"  {fault}" for fault in report.wrong)]
    return "\n".join(lines)


_HEAD = ("case", "treering", "against", "its time", "ratio [least-most]", "goal", "met")
_GOAL_HEAD = ("row", "workload", "leaves", "case", "goal", "measured [least-most]", "met")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell, in Markdown's form."""
    cells = [head, *rows]
    widths = [max(len(row[index]) for row in cells) for index in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return lines


def _rows(job: Job, verdicts: Sequence[Verdict]) -> list[tuple[str, ...]]:
    """One row for each case that we are compared with, and one row for each peak."""
    us = job.outcomes[0]
    rows = []
    shown = _time(spread(us.seconds))
    for other in job.outcomes[1:]:
        if other.limit:
            kind, value = "times", ratio(us.seconds, other.seconds)
        else:
            kind, value = "faster", ratio(other.seconds, us.seconds)
        unit = " x its time" if other.limit else " x faster"
        goal, met = _goal(job, verdicts, kind, other.case)
        rows.append((job.group, shown, other.case, _time(spread(other.seconds)), _ratio(value) + unit, goal, met))
        shown = ""
    if shown:
        rows.append((job.group, shown, "", "", "", *_goal(job, verdicts, "seconds", None)))
    elif (alone := _goal(job, verdicts, "seconds", None)) != ("", ""):
        rows.append((job.group, "", "the goal", "", "", *alone))
    return rows + _count_rows(job, verdicts) + _peak_rows(job, verdicts)


def _count_rows(job: Job, verdicts: Sequence[Verdict]) -> list[tuple[str, ...]]:
    """What each case counted."""
    counted = [(outcome.case, _count(spread(outcome.counts))) for outcome in job.outcomes if outcome.counts]
    name = f"{job.group}: {job.unit}"
    rows: list[tuple[str, ...]] = []
    for case, shown in counted:
        if case == job.outcomes[0].case:
            rows.append((name, shown, "", "", "", *_goal(job, verdicts, "count", None)))
        else:
            rows.append((name, "", case, shown, "", *_goal(job, verdicts, "count over", case)))
    return rows


def _peak_rows(job: Job, verdicts: Sequence[Verdict]) -> list[tuple[str, ...]]:
    """Peak memory of each case, over the bytes of the arrays."""
    us = job.outcomes[0]
    if us.peak is None:
        return []
    goal, met = _goal(job, verdicts, "peak share", None)
    if not goal:
        goal, met = _goal(job, verdicts, "peak bytes", None)
    peers = [other for other in job.outcomes[1:] if other.peak is not None]
    rows: list[tuple[str, ...]] = [(f"{job.group}: peak", _memory(us, job.nbytes), "", "", "", goal, met)]
    rows += [(f"{job.group}: peak", "", peer.case, _memory(peer, job.nbytes), "", "", "") for peer in peers]
    return rows


def _memory(outcome: Outcome, nbytes: int) -> str:
    """Peak extra in MiB and as a share; file pages, which are page cache, are said apart."""
    peak = outcome.peak
    assert peak is not None  # asked before
    text = f"{peak.extra / _MIB:.1f} MiB = {peak.extra / nbytes:.3f}x"
    return text + f" ({peak.mapped / _MIB:.0f} file pages)" if peak.mapped > _MIB else text


def _goal(job: Job, verdicts: Sequence[Verdict], kind: str, against: str | None) -> tuple[str, str]:
    """The goal's text and whether it is met; two empty texts if there is none."""
    for verdict in verdicts:
        goal = verdict.goal
        here = (goal.workload, goal.group, verdict.leaves) == (job.workload, job.group, job.leaves)
        if here and (goal.kind, goal.against) == (kind, against):
            return _bound(goal), _yes(verdict.met)
    return "", ""


def _goal_row(verdict: Verdict) -> tuple[str, ...]:
    """One line of the closing list."""
    goal = verdict.goal
    measured = _measured(goal, verdict.value)
    return str(goal.row), goal.workload, verdict.leaves, goal.group, _bound(goal), measured, _yes(verdict.met)


def _measured(goal: Goal, value: Spread) -> str:
    """A measured value in the goal's unit."""
    match goal.kind:
        case "seconds":
            return _time(value)
        case "peak bytes":
            return f"{value.median / _MIB:.1f} MiB"
        case "peak share":
            return f"{value.median:.4f}x"
        case "count" | "count over":
            return _count(value)
        case "faster" | "times":
            return f"{_ratio(value)} x"


def _bound(goal: Goal) -> str:
    """A goal in words."""
    match goal.kind:
        case "faster":
            return f">= {goal.bound:g}x {'faster than' if goal.bound > 1 else 'the speed of'} {goal.against}"
        case "times":
            return f"<= {goal.bound:g}x the time of {goal.against}"
        case "peak share":
            return f"peak <= {goal.bound:g}x the bytes"
        case "peak bytes":
            return f"peak <= {goal.bound / _MIB:g} MiB"
        case "seconds":
            return f"<= {goal.bound * 1000:g} ms"
        case "count":
            return f"<= {goal.bound:g}"
        case "count over":
            return f"<= {goal.bound:g} + that of {goal.against}"


def _count(value: Spread) -> str:
    """A count; with its spread where it has one."""
    numbers = [f"{each:.4g}" for each in (value.median, value.least, value.greatest)]
    return numbers[0] if numbers[1] == numbers[2] else f"{numbers[0]} [{numbers[1]}-{numbers[2]}]"


def _yes(met: bool) -> str:
    return "yes" if met else "NO"


def _time(value: Spread) -> str:
    """Seconds, or milliseconds below a tenth of one: median and spread."""
    scale, unit = (1.0, "s") if value.median >= 0.1 else (1000.0, "ms")
    numbers = [_figure(each * scale) for each in (value.median, value.least, value.greatest)]
    return f"{numbers[0]} {unit} [{numbers[1]}-{numbers[2]}]"


def _ratio(value: Spread) -> str:
    return f"{_figure(value.median)} [{_figure(value.least)}-{_figure(value.greatest)}]"


def _figure(value: float) -> str:
    """Three figures, never an exponent."""
    return f"{value:.{max(0, 3 - len(str(int(value))))}f}"
