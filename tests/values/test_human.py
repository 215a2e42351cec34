"""What people read: numbers and stretches of time with three digits, numbers of processes, lines of the log."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treering._values.arguments import timeout_seconds
from treering._values.human import (
    bytes_text,
    count_text,
    duration_text,
    interval_of,
    interval_text,
    pluralize,
    rate_text,
)
from treering._values.processes import Processes, format_processes
from treering._values.telemetry import EVENTS, TRAFFIC, phase, report
from treering._values.timing import DEFAULT_TIMEOUT
from treering.errors import UnsupportedError

UNITS = {"B": 0, "KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4, "PiB": 5, "EiB": 6}


@pytest.mark.parametrize(
    ("count", "wanted"),
    [
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10_240, "10.0 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (1024**3, "1.00 GiB"),
        (5000 * 1024**6, "5000 EiB"),
    ],
)
def test_bytes(count: int, wanted: str) -> None:
    assert bytes_text(count) == wanted


@given(st.integers(0, 2**63))
def test_bytes_are_right_to_half_a_percent(count: int) -> None:
    number, unit = bytes_text(count).split()
    assert float(number) * 1024 ** UNITS[unit] == pytest.approx(count, rel=0.0051)
    assert len(number) <= 4


@pytest.mark.parametrize(
    ("count", "wanted"), [(0, "0"), (999, "999"), (1000, "1.00 K"), (999_999, "1.00 M"), (117_400_000, "117 M")]
)
def test_counts(count: int, wanted: str) -> None:
    assert count_text(count) == wanted


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        (0, "0 µs"),
        (0.9996, "1.00 s"),
        (59.96, "1 min 0 s"),
        (3599.7, "1 h 0 min"),
        (86399, "1 d 0 h"),
        (90_000, "1 d 1 h"),
    ],
)
def test_durations(seconds: float, wanted: str) -> None:
    assert duration_text(seconds) == wanted


def test_rates() -> None:
    assert rate_text(10**9, 2.0) == "500 MB/s"
    assert rate_text(10, 20.0) == "0.50 B/s"
    assert rate_text(10, 0) == "-"


@pytest.mark.parametrize(
    ("things", "one"),
    [
        ("leaves", "1 leaf"),
        ("axes", "1 axis"),
        ("more boxes", "1 more box"),
        ("processes", "1 process"),
        ("indices", "1 index"),
        ("bytes were", "1 byte was"),
        ("leaves lie", "1 leaf lies"),
        ("leaves differ", "1 leaf differs"),
        ("arrays are", "1 array is"),
    ],
)
def test_one_is_singular(things: str, one: str) -> None:
    assert pluralize(1, things) == one
    assert pluralize(0, things) == f"0 {things}"


@given(st.timedeltas(min_value=timedelta(microseconds=1)))
def test_the_text_is_the_stretch(interval: timedelta) -> None:
    if interval < timedelta(days=10_000):  # beyond, a float of seconds has no microseconds
        assert eval(interval_text(interval), {"timedelta": timedelta}) == interval


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (timedelta(days=2), "timedelta(days=2)"),
        (timedelta(hours=36), "timedelta(hours=36)"),
        (timedelta(minutes=90), "timedelta(minutes=90)"),
        (timedelta(seconds=61), "timedelta(seconds=61)"),
        (timedelta(milliseconds=250), "timedelta(seconds=0.25)"),
        (timedelta(microseconds=1), "timedelta(seconds=1e-06)"),
    ],
)
def test_the_text_has_the_largest_unit_that_fits(interval: timedelta, text: str) -> None:
    assert interval_text(interval) == text


def test_seconds_and_a_timedelta_are_the_same() -> None:
    assert (
        interval_of(90, "interval") == interval_of(90.0, "interval") == interval_of(timedelta(seconds=90), "interval")
    )


@pytest.mark.parametrize(
    "given", [0, -1, True, "10", None, float("nan"), float("inf"), 1e300, timedelta(), timedelta(seconds=-1), 1e-9]
)
def test_what_is_no_stretch_is_refused_by_its_name(given: Any) -> None:
    with pytest.raises(UnsupportedError, match="interval"):
        interval_of(given, "interval")


# ------------------------------------------------------------------------------------------------ numbers of processes


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([0], "process 0"),
        ([3, 1], "processes 1 and 3"),
        ([1, 2], "processes 1 and 2"),
        ([1, 2, 3], "processes 1-3"),
        ([9, 1, 2, 3, 9], "processes 1-3 and 9"),
        (
            range(0, 60, 2),
            "processes 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36 and 11 more",
        ),
    ],
)
def test_named(numbers: list[int], text: str) -> None:
    assert format_processes(numbers) == text


def test_process_0_leads_and_the_others_are_all_but_this_one() -> None:
    assert Processes(this=0, count=1).others == ()
    assert Processes(this=0, count=2).is_coordinator
    assert not Processes(this=1, count=2).is_coordinator
    assert Processes(this=1, count=4).others == (0, 2, 3)


def test_the_argument_wins_over_the_environment() -> None:
    assert timeout_seconds(5, {"TREERING_TIMEOUT_S": "7"}) == 5.0
    assert timeout_seconds(None, {"TREERING_TIMEOUT_S": "7.5"}) == 7.5
    assert timeout_seconds(None, {"TREERING_TIMEOUT_S": ""}) == DEFAULT_TIMEOUT
    assert timeout_seconds(None, {}) == 600.0


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf"), True, "soon"])
def test_what_is_no_time_is_refused_by_its_name(wrong: object) -> None:
    with pytest.raises(UnsupportedError, match=r"timeout is .*positive number of seconds"):
        timeout_seconds(wrong, {})  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="TREERING_TIMEOUT_S is"):
        timeout_seconds(None, {"TREERING_TIMEOUT_S": "-3"})


# ----------------------------------------------------------------------------------------------------- lines of the log


def test_an_operation_is_one_line_and_a_phase_another(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "treering"), report("save", "a\x1bb"), phase("save/write"):
        pass
    with pytest.raises(KeyError), caplog.at_level(logging.INFO, "treering"), report("load", "c"), phase("load/read"):
        raise KeyError("x")
    shown = [(record.levelname, re.sub(r"\d[\d.]* \S+$", "T", record.getMessage())) for record in caplog.records]
    assert shown == [
        ("DEBUG", "save/write: T"),
        ("INFO", r"save 'a\x1bb': done in T"),
        ("INFO", "load 'c': KeyError after T"),
    ]


def test_listeners_of_jax_hear_of_what_succeeded(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[tuple[str, float]] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        heard.append((event, duration_secs))
        if event == "/treering/remove":
            raise ValueError("a bad listener")

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with report("save", "a"), phase("save/write"):
            pass
        with pytest.raises(KeyError), report("load", "a"):
            raise KeyError("x")
        with report("remove", "a"):
            pass
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert [event for event, _ in heard] == ["/treering/save/write", "/treering/save", "/treering/remove"]
    assert all(0 <= seconds < 10 for _, seconds in heard)
    assert "a listener of jax.monitoring raised" in caplog.text


def test_it_is_silent_where_logging_is_not_configured_and_needs_no_jax() -> None:
    program = """
import sys
from treering._values.telemetry import EVENTS, TRAFFIC, phase, report
with report("save", "a"):
    pass
assert "jax" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


PAGE = Path(__file__).parents[2] / "docs" / "guides" / "telemetry.md"


def test_the_page_lists_every_event_with_its_unit() -> None:
    rows = re.findall(
        r"^\| `/treering/(.*?)` \| (.*?) \| (.*?) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert [(name, how, unit.strip(), meaning) for name, how, unit, meaning in rows] == [
        (name, *kind) for name, kind in EVENTS.items()
    ]


def test_a_phase_tells_of_the_bytes_that_it_moved_and_the_operation_of_all(caplog: pytest.LogCaptureFixture) -> None:
    heard: dict[str, float] = {}

    def listen(event: str, value: float, **_: str | int) -> None:
        heard[event] = value

    jax.monitoring.register_scalar_listener(listen)
    try:
        with caplog.at_level(logging.DEBUG, "treering"), report("save", "a"):
            TRAFFIC.add(requests=3, retries=1, sent=7)
            with phase("save/write") as moved:
                moved.nbytes = 3072
            with phase("save/commit"):
                pass
    finally:
        jax.monitoring.unregister_scalar_listener(listen)
    assert heard["/treering/save/bytes"] == 3072
    assert heard["/treering/save/throughput"] > 3072
    assert [heard[f"/treering/{name}"] for name in ("requests", "retries", "sent", "received")] == [3, 1, 7, 0]
    lines = [record.getMessage() for record in caplog.records]
    assert [bool(re.search(r", 3.00 KiB \([\d.]+ \w+/s\)", line)) for line in lines] == [True, False, True]
