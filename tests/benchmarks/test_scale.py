"""The benchmark of many virtual processes: counts that a reader can check, and the same figures each time."""

from __future__ import annotations

import base64
import dataclasses
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks import scale, scale_simulation
from benchmarks.__main__ import main
from benchmarks.scale_places import PlaceFigures, place_lines
from benchmarks.scale_processes import RealFigures, RealSetting, calls_of_saves, price_of, run_saves, summed_calls
from benchmarks.scale_simulation import BUCKET_COST, Setting, simulate
from treering._coordination import messages, operations
from treering._coordination.operations import Call, Operations

SMALL = Setting(processes=4, cost=0.0005, writing=1.0)


class RemoveAll(NamedTuple):
    """An operation that the simulation does not know."""

    names: tuple[str, ...]


def test_every_process_is_back_and_the_same_save_costs_the_same() -> None:
    found = simulate(SMALL)
    assert found == simulate(SMALL)
    assert found != simulate(dataclasses.replace(SMALL, seed=1))
    assert not found.failed
    assert 0 < found.after < 1
    assert found.most_reads >= found.mean_reads > 1
    assert found.created >= 1
    assert found.busiest > 0
    assert found.rate > 0


def test_slow_operations_end_later() -> None:
    slow = simulate(dataclasses.replace(SMALL, cost=0.02))
    assert slow.after > simulate(SMALL).after + 0.02


@pytest.mark.parametrize(("cost", "turns"), [(0.002, 32), (BUCKET_COST, 2)])
def test_operations_cost_by_the_names_that_they_are_about(
    monkeypatch: pytest.MonkeyPatch, cost: float, turns: int
) -> None:
    def lead(call: Call, signature: bytes) -> Operations:
        prepare = base64.b64encode(signature)
        yield operations.Put("prepare", prepare)
        payload = yield operations.PREPARE_DATA
        yield operations.NOW
        yield operations.Sleep(1.0)
        yield operations.Put("payloads of all", base64.b64encode(payload))
        assert (yield operations.Get("prepare")) == prepare
        assert (yield operations.Get("vote of 1")) == b"prepared"
        yield RemoveAll(tuple(f"vote of {process}" for process in range(32)))  # type: ignore[misc]
        assert (yield operations.Get("vote of 1")) is None
        del call

    def follow(call: Call, check: object) -> Operations:
        yield operations.Put(f"vote of {call.processes.this}", b"prepared")
        yield operations.PREPARE_DATA
        del check

    monkeypatch.setattr(scale_simulation, "coordinate", lead)
    monkeypatch.setattr(scale_simulation, "participate", follow)
    found = simulate(Setting(processes=2, cost=cost, writing=0.0))
    assert (found.mean_reads, found.most_reads, found.created, found.removed) == (1.5, 3, 1.5, 16.0)
    assert found.after == pytest.approx(1.0 + cost * (4 + turns), abs=0.021)  # the other one began up to 20 ms later
    # Process 0 wrote the signature, which is free, and read it again.
    assert found.most_bytes == len(base64.b64encode(bytes(8 * scale_simulation.LEAVES))) + len(b"prepared")


def test_messages_are_decoded_as_before_afterwards() -> None:
    before = vars(messages.VoteMessage)["decode"]
    simulate(SMALL)
    assert vars(messages.VoteMessage)["decode"] is before


def test_goals_are_about_a_thousand_processes() -> None:
    setting = Setting(processes=1024, cost=0.002, writing=10.0)
    assert [goal.what for goal in scale.GOALS if goal.fits(setting)] == [
        "reads of a process, mean",
        "reads of any one process",
        "KiB of messages of any one process",
        "s until all are back",
    ]
    found = dataclasses.replace(simulate(SMALL), setting=setting, mean_reads=40.0)
    mean = scale.GOALS[0]
    assert mean.met(found)
    assert not mean.met(dataclasses.replace(found, mean_reads=40.1))
    assert not mean.met(dataclasses.replace(found, failed=1))
    assert not any(goal.fits(SMALL) for goal in scale.GOALS)


def test_the_command_prints_tables_curves_and_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["scale", "--processes", "2,4", "--costs", "0.5", "--writing", "10"]
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert "| 4         | 0.5 ms    | 10 s" in shown
    assert "seconds until all are back; 10 s of writing; an operation takes a 0.5 ms" in shown
    assert main([*asked, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [each["setting"]["processes"] for each in document["figures"]] == [2, 4]
    assert document["goals"] == []


def test_a_chart_has_a_mark_for_each_value() -> None:
    assert scale.draw([2, 64], {"a": [0.1, 1.0], "b": [0.1, 0.5]}) == [
        "     1 |               a",
        "       |               b",
        "       |",
        "   0.1 |      ab",
        "       +----------------",
        "               2      64",
    ]


@pytest.mark.benchmark
@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace counts system calls here")
def test_real_processes_save_and_their_system_calls_are_counted(tmp_path: Path) -> None:
    setting = RealSetting(processes=2, writing=0.05, saves=2, place=str(tmp_path / "saved"))
    found = run_saves(setting, {})
    assert found.faults == ()
    assert len(found.after) == 2
    assert all(0 < after < 60 for after in found.after)
    assert found.requests == {}
    assert len([path for path in (tmp_path / "saved").rglob("*") if path.is_file()]) >= 3  # one for each save
    calls = calls_of_saves(setting, {})
    assert calls is not None
    assert calls["openat"] > 2


def test_a_failed_save_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "saved").write_bytes(b"no folder")
    found = run_saves(RealSetting(processes=1, writing=0.0, saves=1, place=str(tmp_path / "saved")), {})
    assert found.after == ()
    assert [fault.partition(":")[0] for fault in found.faults] == ["save 0, process 0"]


def test_requests_have_a_price_and_places_a_row() -> None:
    figures = RealFigures(after=(0.5, 0.25, 1.0), requests={"Get": 1000.0, "Put": 200.0, "Delete": 66.0})
    setting = RealSetting(processes=64, writing=10.0, saves=3, place="s3://bucket")
    found = PlaceFigures(place="SeaweedFS", setting=setting, figures=figures, calls={"read": 640.0, "openat": 64.0})
    assert price_of(figures.requests) == pytest.approx(0.0014)
    *_, row, _, calls, missing = place_lines([found], ["disk: nothing"])
    assert "| 0.500 s [0.250-1.000]       | 1,000 GET, 200 PUT, 66 DELETE | 1.40 USD" in row
    assert "704, 11 a process" in row
    assert calls.endswith("most of them read 10, openat 1")
    assert missing == "disk: nothing"


def test_system_calls_are_read_from_the_summary_of_strace() -> None:
    summary = """% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 60.00    0.000003           3         7         2 openat
 40.00    0.000002           2         5           read
------ ----------- ----------- --------- --------- ----------------
100.00    0.000005                    12         2 total
"""
    assert summed_calls(summary) == {"openat": 7, "read": 5}
