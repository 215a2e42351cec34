"""Numbers and stretches of time for people: three digits, never a rounding that jumps over its unit."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treering._values.human import (
    bytes_text,
    count_text,
    duration_text,
    interval_of,
    interval_text,
    pluralize,
    rate_text,
)
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
