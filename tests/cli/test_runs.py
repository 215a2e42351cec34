"""The command line on runs: ls, log, gc, verify, doctor, and the verbs that take the latest step."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering as tr
from tests import clocks
from tests.cli.runs import BEGAN, a_run, add_step
from tests.cli.test_doctor import A, dead
from tests.command import imported_by, inside, treering
from tests.on_disk import INDEX, RUN_DOCUMENT, locked, tombstone_name


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return a_run(tmp_path / "run", 1, 2, 3, keep="KeepLast(2)")


def told(*arguments: str, code: int = 0) -> dict[str, Any]:
    """What a verb says to programs."""
    answer: dict[str, Any] = json.loads(inside(*arguments, "--json", code=code)[0])
    return answer


def flip(path: Path) -> None:
    """Flip a bit in the middle of a step's data."""
    file = next(path.glob("data-*"))
    data = bytearray(file.read_bytes())
    data[-400] ^= 1
    file.write_bytes(data)


def test_ls_lists_the_steps_and_with_globs_leaves_of_the_latest(run: Path) -> None:
    out, err = inside("ls", str(run), code=0)
    assert [line.split()[:4] for line in out.splitlines()] == [
        [str(step), "2023-11-14", f"22:{13 + step}:20", "UTC"] for step in (1, 2, 3)
    ]
    assert "loss 2.5" in out
    assert err == ""
    found = told("ls", str(run))
    assert (found["schema"], found["form"]) == ("treering.ls/1", "run")
    assert [(step["step"], step["metrics"]["loss"]) for step in found["steps"]] == [(1, 5.0), (2, 10 / 3), (3, 2.5)]
    assert found["steps"][0]["path"] == str(run / "step_00000001")
    out, err = inside("ls", str(run), "s*", code=0)
    assert out.split() == ["step", "int", "3", "8", "B"]
    assert err == f"note: {str(run)!r} is a run; this is its latest step, step_00000003\n"


def test_log_tells_age_save_time_metrics_and_which_rule_keeps_a_step(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks.stop_clock(monkeypatch, BEGAN + 60 * 3 + 90)
    lines = inside("log", str(run), code=0)[0].splitlines()
    assert lines[0].startswith(f"{run} · 3 steps, ")
    assert lines[1] == "keep: KeepLast(2)"
    assert lines[2] == "loss: █▃▁  5 to 2.5"
    assert lines[3].split() == ["step", "age", "bytes", "save", "took", "loss", "kept", "by"]
    assert lines[4].startswith("   3  1 min 30 s")
    assert lines[4].endswith("500 ms     2.5  the newest; KeepLast(2)")
    assert lines[6].endswith("5  goes: no rule keeps it")
    for earlier in (0.25, -60.0):  # the clock of a bucket may be ahead
        clocks.stop_clock(monkeypatch, BEGAN + 60 * 3 + earlier)
        assert inside("log", str(run), code=0)[0].splitlines()[4].startswith("   3  under 1 s")
    clocks.stop_clock(monkeypatch, BEGAN + 60 * 3 + 90)
    found = told("log", str(run))
    assert [(step["step"], step["age"], step["kept"]) for step in found["steps"]] == [
        (3, 90.0, True),
        (2, 150.0, True),
        (1, 210.0, False),
    ]
    assert found["steps"][0]["seconds"] == 0.5
    assert found["keep"] == "KeepLast(2)"
    assert found["steps"][1]["reasons"] == ["KeepLast(2)"]


def test_log_of_a_rule_from_the_future_shows_the_steps(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", 1, 2, keep="KeepWise(7)")
    assert "note: the retention rules cannot be read: 'KeepWise(7)'" in inside("log", str(run), code=0)[0]
    assert "this version" in inside("gc", str(run), code=2)[1]


def test_log_and_gc_want_a_run(run: Path, tmp_path: Path) -> None:
    for verb in ("log", "gc"):
        assert "is not a run" in inside(verb, str(run / "step_00000001"), code=2)[1]
        assert "nope" in inside(verb, str(tmp_path / "nope"), code=2)[1]


def test_gc_plans_and_removes_only_with_yes(run: Path) -> None:
    out = inside("gc", str(run), code=0)[0].splitlines()
    assert [line.split()[:2] for line in out[:3]] == [["remove", "1"], ["keep", "2"], ["keep", "3"]]
    assert out[-1].startswith("1 of 3 steps would be removed, ")
    assert tr.Run(run).steps() == [1, 2, 3]
    found = told("gc", str(run), "--yes")
    assert (found["going"], found["removed"], found["keep"]) == (1, True, "KeepLast(2)")
    assert tr.Run(run).steps() == [2, 3]
    assert inside("gc", str(run), "--yes", code=0)[0].splitlines()[-1] == "0 of 2 steps were removed: nothing to do"


def test_gc_takes_rules_that_are_joined(run: Path) -> None:
    found = told("gc", str(run), "--keep-last", "1", "--keep-every", "2", "--keep-best", "loss:min", "--keep-step", "1")
    assert {step["step"]: step["reasons"] for step in found["steps"]} == {
        1: ["KeepSteps(1)"],
        2: ["KeepEvery(steps=2)"],
        3: ["the newest", "KeepBest('loss', mode='min')", "KeepLast(1)"],
    }
    found = told("gc", str(run), "--keep", "KeepBest('loss', mode='max')")
    assert [step["step"] for step in found["steps"] if not step["kept"]] == [2]
    for rules in ("KeepLast(0)", "KeepLast", "KeepLast(3) & KeepLast(2)", "__import__('os')", "", "KeepLast(**{})"):
        assert "rule" in inside("gc", str(run), "--keep", rules, code=2)[1]


def test_gc_wants_to_be_told_which_value_is_best(run: Path) -> None:
    for given in ("loss", "loss:", ":max", "loss:best", "loss:MAX"):
        err = inside("gc", str(run), "--keep-best", given, "--yes", code=2)[1]
        assert "does not say which value is best: METRIC:min or METRIC:max" in err
    assert tr.Run(run).steps() == [1, 2, 3]
    with tr.Run(run) as more:
        more.save(4, {"w": 1.5}, metrics={"val:acc": 0.9})
        more.save(5, {"w": 1.5}, metrics={"val:acc": 0.1})
        more.save(6, {"w": 1.5}, metrics={"val:acc": 0.2})
    out = inside("gc", str(run), "--keep-best", "val:acc:max", "--yes", code=0)[0]
    assert "KeepBest('val:acc', mode='max')" in out
    assert tr.Run(run).steps() == [4, 6]


@pytest.mark.parametrize("rule", [("--keep-best", "los:max"), ("--keep", "KeepLast(1) | KeepBest('los')")])
def test_gc_refuses_a_metric_that_no_step_has(run: Path, rule: tuple[str, str]) -> None:
    err = inside("gc", str(run), *rule, "--yes", code=2)[1]
    assert "has the metric 'los'" in err
    assert "did you mean 'loss'?" in err
    assert tr.Run(run).steps() == [1, 2, 3]


def test_log_notes_a_rule_that_goes_by_a_metric_of_no_step(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", 1, keep="KeepBest('los')")
    told = "note: no step has the metric 'los' (is it 'loss'?), so KeepBest('los') keeps all"
    assert told in inside("log", str(run), code=0)[0]


def test_verify_names_the_step(run: Path) -> None:
    assert "is whole: 3 steps, 6 leaves" in inside("verify", str(run), code=0)[0]
    flip(run / "step_00000002")
    out = inside("verify", str(run), code=1)[0]
    assert "leaf 'w' is damaged" in out
    assert "of step_00000002/data-" in out
    (run / "step_00000001" / INDEX).write_bytes(b"{}")
    findings = told("verify", str(run), code=1)["findings"]
    assert [(each["key"], each["file"].split("-")[0]) for each in findings] == [
        (None, "step_00000001/treering.json"),
        ("w", "step_00000002/data"),
    ]


def test_a_damaged_run_json_is_a_note(run: Path) -> None:
    (run / RUN_DOCUMENT).write_bytes(b"{")
    assert "run.json cannot be used" in inside("verify", str(run), code=0)[0]
    assert "run.json cannot be used" in inside("doctor", str(run), code=0)[0]
    (run / RUN_DOCUMENT).unlink()
    assert "is whole: 3 steps" in inside("verify", str(run), code=0)[0]
    found = told("log", str(run))
    assert (found["keep"], found["notes"]) == (None, ["there is no run.json; the next save rebuilds it from the steps"])


def test_verify_passes_over_a_step_that_goes_meanwhile(run: Path) -> None:
    seen = []

    def gone(done: int, total: int) -> None:
        seen.append((done, total))
        if (run / "step_00000002").exists():
            shutil.rmtree(run / "step_00000002")

    found = tr.verify(run, progress=gone)
    assert (found.ok, found.steps) == (True, 2)
    assert all(done <= total for done, total in seen)
    assert seen == sorted(seen)


def test_doctor_tells_of_the_steps_with_something_to_do(run: Path) -> None:
    out = inside("doctor", str(run), code=0)[0]
    assert out.startswith(f"{str(run)!r}: a run of 3 steps, ")
    assert len(out.splitlines()) == 1
    dead(run / "step_00000004")
    found = told("doctor", str(run), code=1)
    assert (found["ok"], found["latest"], found["steps"]) == (False, 3, [1, 2, 3])
    broken = found["folders"][-1]
    assert (broken["step"], broken["committed"], broken["attempts"][0]["attempt"]) == (4, None, A)
    out = inside("doctor", str(run), code=1)[0]
    assert "step_00000004" in out
    assert "step_00000002" not in out


def test_doctor_of_a_run_whose_first_save_was_killed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    dead(run / "step_00000004")
    found = told("doctor", str(run), code=1)
    assert (found["steps"], found["latest"], found["folders"][0]["step"]) == ([], None, 4)
    assert "a run of 0 steps" in inside("doctor", str(run), code=1)[0]


def test_doctor_tells_of_a_removal_that_was_cut_short(run: Path) -> None:
    step = run / "step_00000001"
    attempt = next(step.glob("data-*")).name.split("-")[1]
    (step / INDEX).rename(step / tombstone_name(attempt))
    found = told("doctor", str(run), code=1)["folders"][0]
    assert (found["step"], found["attempts"][0]["life"]) == (1, "dead")
    assert found["attempts"][0]["reason"] == "its removal was interrupted"
    next(step.glob("data-*")).unlink()
    out = inside("doctor", str(run), code=0)[0]
    assert f"note: the removal of a checkpoint here was interrupted: {tombstone_name(attempt)!r} is removed last" in out
    inside("gc", str(run), "--keep-last", "9", "--yes", code=0)
    assert len(inside("doctor", str(run), code=0)[0].splitlines()) == 1
    assert not step.exists()


def test_a_removal_that_is_under_way_is_not_taken_for_a_dead_one(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = run / "step_00000001"
    (step / INDEX).rename(step / tombstone_name(next(step.glob("data-*")).name.split("-")[1]))
    read_text, looks = Path.read_text, []
    with contextlib.ExitStack() as remover:

        def read(path: Path, *arguments: Any, **options: Any) -> str:
            text = read_text(path, *arguments, **options)
            if path == Path("/proc/locks"):
                looks.append(path)
                if len(looks) == 1:  # the process that removes it takes the lock just after the first look at the locks
                    remover.enter_context(locked(step))
            return text

        monkeypatch.setattr(Path, "read_text", read)
        found = told("doctor", str(step))
    assert len(looks) > 1
    assert found["ok"]
    assert [attempt["life"] for attempt in found["attempts"]] == ["in flight"]


def test_gc_says_which_step_could_not_go(run: Path) -> None:
    with locked(run / "step_00000001"):
        out = inside("gc", str(run), "--yes", code=1)[0]
    assert "keep    1" in out
    assert "another process is saving to it" in out
    assert "0 of 3 steps were removed" in out
    assert tr.Run(run).steps() == [1, 2, 3]


def test_other_verbs_take_the_latest_step_and_say_so(run: Path) -> None:
    said = f"note: {str(run)!r} is a run; this is its latest step, step_00000003\n"
    out, err = inside("inspect", str(run), code=0)
    assert err == said
    assert out.startswith(f"{run / 'step_00000003'} ")
    assert inside("cat", str(run), "step", code=0) == ("3\n", said)
    out, err = inside("du", str(run), code=0)
    assert (err, "w" in out) == (said, True)
    out, err = inside("diff", str(run / "step_00000001"), str(run), code=1)
    assert err == said
    assert "step: value: 1 in A, 3 in B" in out


def test_the_same_in_python(run: Path) -> None:
    assert tr.inspect(run).leaves["step"].value == 3
    assert [each.key for each in tr.diff(run / "step_00000001", run) if each.key == "step"] == ["step"]
    assert np.array_equal(tr.load(run)["w"], np.arange(100.0) + 3)
    assert tr.verify(run).steps == 3


def test_hostile_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    run = tmp_path / "run"
    add_step(run, 1, metrics={"\x1b[31m": float("nan"), "a": float("-inf")})
    for verb in ("ls", "log"):
        out = inside(verb, str(run), code=0)[0]
        assert "\x1b" not in out
        assert "nan" in out
        assert "-inf" in out
        json.loads(inside(verb, str(run), "--json", code=0)[0])


def test_hostile_paths_do_not_reach_the_terminal(tmp_path: Path) -> None:
    run, more = a_run(tmp_path / "run\x1b[31m", 1, 2), tmp_path / "more\x1b[31m"
    checkpoint = run / "step_00000001"
    for arguments in (
        ["cp", run, more],
        ["cp", checkpoint, f"{more}.copy"],
        ["convert", checkpoint, f"{more}.new"],
        ["report", run, "-o", f"{more}.html"],
        ["rm", run, 1],
    ):
        out, err = inside(*map(str, arguments), code=0)
        assert "\\x1b[31m" in out
        assert "\x1b" not in out + err


def test_json_says_who_holds_a_step(run: Path) -> None:
    with tr.Run(run) as reader, reader.hold(2):
        for verb in ("ls", "log"):
            held = {step["step"]: step["held"] for step in told(verb, str(run))["steps"]}
            assert (held[1], held[3]) == (None, None)
            assert "process" in held[2]


def test_doctor_of_a_run_whose_last_step_was_removed(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", 1)
    inside("rm", str(run), "1", code=0)
    assert inside("doctor", str(run), code=0)[0].startswith(f"{str(run)!r}: a run of 0 steps\n")
    assert told("doctor", str(run))["steps"] == []


def test_log_starts_without_jax_and_numpy(run: Path) -> None:
    for verb in ("ls", "log", "gc", "inspect", "doctor"):
        assert not {"jax", "numpy", "ml_dtypes"} & imported_by(verb, str(run))
    assert treering("log", str(run), code=0).stderr == ""


def test_log_draws_many_values_in_one_line_and_what_is_no_number(tmp_path: Path) -> None:
    with tr.Run(tmp_path / "run") as run:
        for step in range(70):
            run.save(step, {"w": step}, metrics={"loss": math.nan if step == 69 else 1.7e308 * (-1) ** step})
    curve = inside("log", str(tmp_path / "run"), code=0)[0].splitlines()[2]
    assert re.fullmatch(r"loss: [▁█]{59}x  1.7e\+308 to nan", curve)
