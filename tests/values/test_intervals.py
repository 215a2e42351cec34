"""Stretches of time, as they are given and as they are written."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treering._values.human import interval_of, interval_text
from treering.errors import UnsupportedError


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
