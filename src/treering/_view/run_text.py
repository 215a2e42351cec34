"""The steps of a run as lines for people and as JSON for programs: what is known of each, and which a rule keeps."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Iterator, Sequence
from typing import Any

from treering._format.run_document import StepFacts
from treering._printable import printable, show_path
from treering._values.human import bytes_text, duration_text, pluralize
from treering._values.outline import Outline, OutlineRow
from treering._view.plain import align, cut, json_document, members_of, visible
from treering._view.tree_text import BOLD, DIM, RED, UNICODE, Style

_MOST_OUTLINED = 100
_LONGEST = 200
_MOST_METRICS = 6
_FEWEST_POINTS, _MOST_POINTS = 3, 60
_NO_RULE = "no rule keeps it"
_GAP = "  "


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunStep(StepFacts):
    """What is known of one step of a run, and what its rules say of it."""

    path: str
    """Its folder, which is a checkpoint."""
    seconds: float | None = None
    """How long its save took; None where the run has not noted it."""
    kept: bool = True
    """Whether a rule keeps it."""
    reasons: tuple[str, ...] = ()
    """The rules that keep it, or why it goes."""
    held: str = ""
    """Who holds it, and until when; empty where nobody does."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunListing:
    """What stands in a run's folder."""

    path: str
    """The folder, as it was given."""
    steps: Sequence[RunStep]
    """Its steps, the oldest first."""
    keep: str | None = None
    """Which steps are kept, as Python writes that rule; None where all are."""
    save_every: str | None = None
    """When steps are saved, as Python writes that rule; None where it is at each call."""
    notes: Sequence[str] = ()
    """What is good to know, a sentence each."""
    form: str = "run"
    """What it is; of another program's steps their form."""

    @property
    def nbytes(self) -> int:
        """Bytes of all steps together."""
        return sum(step.nbytes for step in self.steps)


def step_lines(listing: RunListing, style: Style = UNICODE) -> Iterator[str]:
    """Write the steps of a run as lines without line ends, the oldest first: number, when it was saved, bytes.

    Example:
        >>> step = RunStep(step=1200, path="run/step_00001200", saved=0.0, nbytes=2048, metrics={"loss": 0.25})
        >>> for line in step_lines(RunListing(path="run", steps=[step])):
        ...     print(line)
        1200  1970-01-01 00:00:00 UTC  2.00 KiB  loss 0.25
    """
    rows = []
    for step in listing.steps:
        told = [f"{visible(name, _LONGEST, style.ellipsis)} {value:.5g}" for name, value in step.metrics.items()]
        told += ["temporary"] if step.temporary else []
        told += [_shown_text(step.held, style)] if step.held else []
        rows.append((str(step.step), when_text(step.saved), bytes_text(step.nbytes), ", ".join(told)))
    return (_GAP.join(cells).rstrip() for cells in align(rows, right=(0, 2)))


def log_lines(listing: RunListing, *, now: float, style: Style = UNICODE) -> Iterator[str]:
    """Write what is known of a run and of each step as lines without line ends, the newest step first.

    Args:
        listing: the run.
        now: the time, in seconds since 1970.
        style: how it is drawn.

    Example:
        >>> step = RunStep(step=1200, path="run/step_00001200", saved=0.0, nbytes=2048, seconds=0.5,
        ...     metrics={"loss": 0.25}, reasons=("newest",))
        >>> for line in log_lines(RunListing(path="run", steps=[step], keep="KeepLast(2)"), now=90.0):
        ...     print(line)
        run · 1 step, 2.00 KiB
        keep: KeepLast(2)
        step         age     bytes  save took  loss  kept by
        1200  1 min 30 s  2.00 KiB     500 ms  0.25  newest
    """
    title, count = show_path(listing.path), pluralize(len(listing.steps), "steps", ",")
    head = f"{visible(title, _LONGEST, style.ellipsis)} {style.dot} {count}, {bytes_text(listing.nbytes)}"
    yield style.paint(BOLD, head)
    yield from (f"{label}: {_shown_text(text, style)}" for label, text in rule_notes(listing))
    if not listing.steps:
        return
    rows, shown, left = log_table(listing, now=now, style=style)
    for name, points, first, last in metric_curves(listing.steps, shown):
        title = visible(name, _LONGEST, style.ellipsis)
        yield style.paint(DIM, f"{title}: ") + f"{draw_curve(points, style)}  {first:.5g} to {last:.5g}"
    for place, cells in enumerate(align(rows, right=range(len(shown) + 4))):
        going = place > 0 and not listing.steps[-place].kept
        yield style.paint(DIM if going or not place else "", _GAP.join(cells).rstrip())
    if left:
        more = ", ".join(visible(name, _LONGEST, style.ellipsis) for name in left)
        yield f"and the metrics {more}: --json has them"


def rule_notes(listing: RunListing) -> Iterator[tuple[str, str]]:
    """Say by which rules steps of a run are saved and stay, and what else is good to know, each with a label.

    Example:
        >>> list(rule_notes(RunListing(path="run", steps=[], keep="KeepLast(2)")))
        [('keep', 'KeepLast(2)')]
    """
    yield "keep", listing.keep or "every step, no rule is noted"
    if listing.save_every is not None:
        yield "save every", listing.save_every
    yield from (("note", note) for note in listing.notes)


def log_table(
    listing: RunListing, *, now: float, style: Style = UNICODE
) -> tuple[list[list[str]], Sequence[str], Sequence[str]]:
    """Return the cells of the table of steps with its head, the newest step first, the metrics in it, and the others.

    Example:
        >>> log_table(RunListing(path="run", steps=[]), now=0.0)
        ([['step', 'age', 'bytes', 'save took', 'kept by']], [], [])
    """
    names = list(dict.fromkeys(name for step in reversed(listing.steps) for name in step.metrics))
    shown = names[:_MOST_METRICS]
    titles = [visible(name, _LONGEST, style.ellipsis) for name in shown]
    rows = [["step", "age", "bytes", "save took", *titles, "kept by"]]
    rows += [_row(step, shown, now, style) for step in reversed(listing.steps)]
    return rows, shown, names[_MOST_METRICS:]


def metric_curves(
    steps: Sequence[RunStep], names: Sequence[str]
) -> Iterator[tuple[str, Sequence[float], float, float]]:
    """Yield how each metric went, the oldest step first: its name, up to 60 values, the first and the last of all.

    Of many steps it is the last of each stretch. A metric that fewer than three steps have is left out.

    Example:
        >>> steps = [RunStep(step=n, path="", saved=0.0, nbytes=0, metrics={"loss": 8.0 / n}) for n in (1, 2, 4)]
        >>> list(metric_curves(steps, ["loss"]))
        [('loss', [8.0, 4.0, 2.0], 8.0, 2.0)]
    """
    for name in names:
        values = [step.metrics[name] for step in steps if name in step.metrics]
        if len(values) >= _FEWEST_POINTS:
            points = [values[-1 - place * len(values) // _MOST_POINTS] for place in range(_MOST_POINTS)][::-1]
            yield name, values if len(values) <= _MOST_POINTS else points, values[0], values[-1]


def draw_curve(values: Sequence[float], style: Style = UNICODE) -> str:
    """Draw numbers as a line of characters, from the smallest to the largest of them.

    Example:
        >>> draw_curve([4.0, 2.0, 1.0, float("nan"), 1.5])
        '█▃▁x▂'
    """
    heights, none = style.heights[:-1], style.heights[-1]
    finite = [value for value in values if math.isfinite(value)]
    low = min(finite, default=0.0) / 2  # of halves, for the difference of two large numbers may be infinite
    step = (max(finite, default=0.0) / 2 - low) / (len(heights) - 1) or 1.0
    return "".join(heights[round((each / 2 - low) / step)] if math.isfinite(each) else none for each in values)


def gc_lines(listing: RunListing, *, removed: bool, style: Style = UNICODE) -> Iterator[str]:
    """Write which steps stay, which go and why, as lines without line ends, the oldest first.

    Args:
        listing: the run, with what its rules say of each step.
        removed: whether those that go are gone; else it is a plan.
        style: how it is drawn.

    Example:
        >>> old = RunStep(step=1, path="run/step_00000001", saved=0.0, nbytes=1024, kept=False)
        >>> new = RunStep(step=2, path="run/step_00000002", saved=9.0, nbytes=1024, reasons=("newest",))
        >>> for line in gc_lines(RunListing(path="run", steps=[old, new]), removed=False):
        ...     print(line)
        remove  1  1.00 KiB  no rule keeps it
        keep    2  1.00 KiB  newest
        1 of 2 steps would be removed, 1.00 KiB; --yes removes them
    """
    rows = []
    for step in listing.steps:
        why = _shown_text("; ".join(step.reasons), style) or ("" if step.kept else _NO_RULE)
        rows.append(("keep  " if step.kept else "remove", str(step.step), bytes_text(step.nbytes), why))
    for step, (verb, *cells) in zip(listing.steps, align(rows, right=(1, 2)), strict=True):
        yield _GAP.join((style.paint("" if step.kept else RED, verb), *cells)).rstrip()
    going = [step for step in listing.steps if not step.kept]
    count = f"{len(going):,} of {pluralize(len(listing.steps), 'steps', ',')}"
    if not going:
        yield f"{count} {'were' if removed else 'would be'} removed: nothing to do"
        return
    size = bytes_text(sum(step.nbytes for step in going))
    yield f"{count} removed, {size}" if removed else f"{count} would be removed, {size}; --yes removes them"


# -------------------------------------------------------------------------------------------------------------- JSON
# The page docs/reference/command-line.md describes every member.


def steps_json(listing: RunListing) -> Iterator[str]:
    """Write the steps of a run as the lines of one JSON object, one step a line, in ASCII.

    Example:
        >>> import json
        >>> step = RunStep(step=7, path="run/step_00000007", saved=0.0, nbytes=9)
        >>> json.loads("".join(steps_json(RunListing(path="run", steps=[step]))))["steps"][0]["saved"]
        '1970-01-01T00:00:00+00:00'
    """
    head = {"schema": "treering.ls/1", "file": listing.path, "form": listing.form, "notes": listing.notes}
    return json_document(head, steps=map(_members, listing.steps))


def log_json(listing: RunListing, *, now: float) -> Iterator[str]:
    """Write all that is known of a run as the lines of one JSON object, the newest step first, in ASCII.

    Example:
        >>> import json
        >>> step = RunStep(step=7, path="run/step_00000007", saved=0.0, nbytes=9, reasons=("newest",))
        >>> found = json.loads("".join(log_json(RunListing(path="run", steps=[step]), now=60.0)))
        >>> found["steps"][0]["age"], found["steps"][0]["reasons"]
        (60.0, ['newest'])
    """
    head = {"schema": "treering.log/1"} | members_of(listing, "path", "keep", "save_every", "nbytes", "notes")
    steps = (
        _members(step) | {"age": max(now - step.saved, 0.0)} | members_of(step, "seconds", "kept", "reasons")
        for step in reversed(listing.steps)
    )
    return json_document(head, steps=steps)


def gc_json(listing: RunListing, *, removed: bool) -> Iterator[str]:
    """Write which steps stay and which go as the lines of one JSON object, the oldest first, in ASCII.

    Example:
        >>> import json
        >>> step = RunStep(step=7, path="run/step_00000007", saved=0.0, nbytes=9, kept=False)
        >>> found = json.loads("".join(gc_json(RunListing(path="run", steps=[step]), removed=False)))
        >>> found["removed"], found["going"], found["steps"][0]["kept"]
        (False, 1, False)
    """
    going = [step for step in listing.steps if not step.kept]
    head = {"schema": "treering.gc/1"} | members_of(listing, "path", "keep", "notes")
    head |= {"removed": removed, "going": len(going), "nbytes": sum(step.nbytes for step in going)}
    steps = (members_of(step, "step", "path", "nbytes", "kept", "reasons") for step in listing.steps)
    return json_document(head, steps=steps)


def _members(step: RunStep) -> dict[str, Any]:
    saved = _utc_time(step.saved)
    found = {
        "saved": None if saved is None else saved.isoformat(),
        "metrics": dict(step.metrics),
        "held": step.held or None,
    }
    return members_of(step, "step", "path", "saved", "nbytes", "metrics", "temporary") | found


# ------------------------------------------------------------------------------------------------------------- cells


def _row(step: RunStep, names: Sequence[str], now: float, style: Style) -> list[str]:
    why = _shown_text("; ".join(step.reasons), style)
    if not step.kept:
        why = f"goes: {why or _NO_RULE}"
    elif step.temporary:
        why = f"{why} (temporary)".lstrip()
    why += f"; {_shown_text(step.held, style)}" if step.held else ""
    metrics = [f"{step.metrics[name]:.5g}" if name in step.metrics else "-" for name in names]
    seconds = int(now - step.saved)
    age = duration_text(float(seconds)) if seconds > 0 else "under 1 s"
    took = "-" if step.seconds is None else duration_text(step.seconds)
    return [str(step.step), age, bytes_text(step.nbytes), took, *metrics, why]


def _shown_text(text: str | None, style: Style) -> str:
    return printable(cut(text or "", _LONGEST, style.ellipsis))


def when_text(seconds: float) -> str:
    """Write a time for people.

    Example:
        >>> when_text(1.5e9), when_text(float("inf"))
        ('2017-07-14 02:40:00 UTC', 'at no known time')
    """
    time = _utc_time(seconds)
    return "at no known time" if time is None else f"{time:%Y-%m-%d %H:%M:%S} UTC"


def _utc_time(seconds: float) -> datetime.datetime | None:
    """Return a date and time; None if no calendar has it, which comes from a damaged clock."""
    try:
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return None


def run_outline(listing: RunListing, *, now: float) -> Outline:
    """Outline a run: its rules, how its metrics went, and a row for each of its newest 100 steps.

    Example:
        >>> step = RunStep(step=7, path="run/step_00000007", saved=0.0, nbytes=2048, metrics={"loss": 0.25})
        >>> [row.cells for row in run_outline(RunListing(path="run", steps=[step]), now=60.0).rows]
        [['7', '1 min 0 s', '2.00 KiB', '-', '0.25', '']]
    """
    (heads, *rows), names, _ = log_table(listing, now=now)
    more = [["", f"and {pluralize(left, 'older steps', ',')}"]] if (left := len(rows) - _MOST_OUTLINED) > 0 else []
    return Outline(
        title=f"Run {show_path(listing.path)}",
        detail=f"{pluralize(len(listing.steps), 'steps', ',')}, {bytes_text(listing.nbytes)}",
        notes=list(rule_notes(listing)),
        curves=[(name, points) for name, points, _, _ in metric_curves(listing.steps, names)],
        heads=heads if listing.steps else (),
        rows=[OutlineRow(1, cells) for cells in [*rows[:_MOST_OUTLINED], *more]],
        right=range(1, len(heads) - 1),
    )
