"""Steps of a run as lines and as JSON: columns, long and hostile texts, and what is not known."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from treering._format.diagnosis import Diagnosis, RunDiagnosis, StepDiagnosis
from treering._view.doctor_text import run_doctor_json, run_doctor_lines
from treering._view.plain import cell_width
from treering._view.run_text import (
    RunListing,
    RunStep,
    gc_json,
    gc_lines,
    log_json,
    log_lines,
    step_lines,
    steps_json,
    when_text,
)
from treering._view.tree_text import ASCII, UNICODE

HOSTILE = "\x1b[2J\u202eloss\n"


def step(number: int, **more: Any) -> RunStep:
    members: dict[str, Any] = {"step": number, "path": f"run/{number}", "saved": 60.0 * number, "nbytes": 1024 * number}
    return RunStep(**members | more)


def listing(*steps: RunStep, **more: Any) -> RunListing:
    return RunListing(path="run", steps=steps, **more)


def test_columns_line_up() -> None:
    shown = listing(
        step(1, metrics={"loss": 2.0}),
        step(100, metrics={"loss": 0.123456, "accuracy": 0.5}, seconds=0.25, reasons=("the newest",)),
    )
    head, *rows = list(log_lines(shown, now=6000.0))[2:]
    assert head.split() == ["step", "age", "bytes", "save", "took", "loss", "accuracy", "kept", "by"]
    assert [row.split()[0] for row in rows] == ["100", "1"]
    at = head.index("kept by")
    assert rows[0][at:] == "the newest"
    assert head[: at - 2].endswith("accuracy")
    assert rows[0][: at - 2].endswith(" 0.5")
    assert rows[1].endswith("-")
    assert "0.12346" in rows[0]
    for lines in (list(step_lines(shown)), list(gc_lines(shown, removed=False))[:-1]):
        assert lines[0].index("1.00 KiB") + 8 == lines[1].index("100 KiB") + 7


def test_a_run_without_steps() -> None:
    assert list(step_lines(listing())) == []
    assert list(log_lines(listing(), now=0.0)) == ["run · 0 steps, 0 B", "keep: every step, no rule is noted"]
    assert list(gc_lines(listing(), removed=True)) == ["0 of 0 steps were removed: nothing to do"]
    for lines in (steps_json(listing()), log_json(listing(), now=0.0), gc_json(listing(), removed=False)):
        assert json.loads("".join(lines))["steps"] == []


def test_what_goes_and_why() -> None:
    shown = listing(
        step(1, kept=False, reasons=("no rule keeps it",)),
        step(2, kept=False, temporary=True, reasons=("temporary, and 3 came after it",)),
        step(3, temporary=True, reasons=("the newest",)),
        keep="KeepLast(1)",
        save_every="SaveEvery(steps=2)",
        notes=("one cannot be read",),
    )
    lines = list(log_lines(shown, now=180.0))
    assert lines[1:4] == ["keep: KeepLast(1)", "save every: SaveEvery(steps=2)", "note: one cannot be read"]
    assert lines[5].endswith("the newest (temporary)")
    assert lines[6].endswith("goes: temporary, and 3 came after it")
    assert lines[7].endswith("goes: no rule keeps it")
    *plan, total = gc_lines(shown, removed=False)
    assert [line.split()[0] for line in plan] == ["remove", "remove", "keep"]
    assert total == "2 of 3 steps would be removed, 3.00 KiB; --yes removes them"
    assert list(gc_lines(shown, removed=True))[-1] == "2 of 3 steps removed, 3.00 KiB"
    assert "temporary" in list(step_lines(shown))[2]


def test_many_metrics_are_cut_and_json_has_them_all() -> None:
    metrics = {f"m{number}": float(number) for number in range(9)}
    shown = listing(step(1, metrics=metrics))
    lines = list(log_lines(shown, now=0.0))
    assert lines[-1] == "and the metrics m6, m7, m8: --json has them"
    assert json.loads("".join(log_json(shown, now=0.0)))["steps"][0]["metrics"] == metrics


@pytest.mark.parametrize("look", [UNICODE, ASCII, dataclasses.replace(UNICODE, color=True, width=80)])
def test_hostile_texts_stay_in_their_line(look: Any) -> None:
    shown = listing(
        step(1, metrics={HOSTILE: math.nan}, kept=False, reasons=(HOSTILE,)),
        step(2, metrics={HOSTILE: -math.inf, "重み": 1.0}, reasons=("x" * 10_000,)),
        keep=HOSTILE,
        save_every=HOSTILE,
        notes=(HOSTILE,),
    )
    for lines in (
        step_lines(shown, look),
        log_lines(shown, now=0.0, look=look),
        gc_lines(shown, removed=True, look=look),
    ):
        for line in lines:
            plain = line
            for paint in ("\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[31m"):
                plain = plain.replace(paint, "") if look.color else plain
            assert plain.isprintable(), line
            assert len(plain) < 1000


def test_wide_names_take_their_columns() -> None:
    shown = listing(step(1, metrics={"重み": 1.0}, reasons=("the newest",)))
    head, row = list(log_lines(shown, now=0.0))[2:]
    assert cell_width(head[: head.index("kept by")]) == cell_width(row[: row.index("the newest")])


@pytest.mark.parametrize("saved", [math.inf, math.nan, -1e300, 1e18])
def test_a_time_that_no_calendar_has(saved: float) -> None:
    shown = listing(step(1, saved=saved))
    assert when_text(saved) == "at no known time"
    assert "at no known time" in next(step_lines(shown))
    assert json.loads("".join(steps_json(shown)))["steps"][0]["saved"] is None


def test_a_clock_that_was_set_back_shows_no_age_below_nothing() -> None:
    shown = listing(step(1, saved=1000.0))
    assert json.loads("".join(log_json(shown, now=10.0)))["steps"][0]["age"] == 0.0
    assert "-" not in list(log_lines(shown, now=10.0))[-1].split()[1]


def diagnosis(path: str, *problems: str) -> Diagnosis:
    return Diagnosis(path=path, committed=None, attempts=(), problems=problems, notes=())


def test_doctor_tells_of_at_most_so_many_folders() -> None:
    folders = [
        StepDiagnosis(step=number, found=diagnosis(f"run/{number}", "a file is missing")) for number in range(60)
    ]
    found = RunDiagnosis(path="run", steps=[], nbytes=0, saved=None, folders=folders, notes=())
    lines = list(run_doctor_lines(found))
    assert not found.ok
    assert lines[0] == "'run': a run of 0 steps"
    assert len(lines) == 1 + 2 * 50 + 1
    assert lines[-1] == "and 10 more folders of steps"
    document = json.loads("".join(run_doctor_json(found)))
    assert (document["ok"], document["latest"], len(document["folders"])) == (False, None, 60)
    assert document["folders"][7]["problems"] == ["a file is missing"]
