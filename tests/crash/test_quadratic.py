"""Input built to be quadratic at each reader: four times the bytes take four times the time, and some more."""

from __future__ import annotations

import pytest

from torture.quadratic import CASES, timed

COLLIDING = ("checkpoint: colliding pairs", "checkpoint: boxes that collide", "checkpoint: types that collide")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_reader_takes_time_in_proportion(name: str) -> None:
    took = timed(name, doors=False)
    assert took.linear, took


@pytest.mark.slow
@pytest.mark.parametrize("name", [*COLLIDING, "safetensors: colliding shapes", "msgpack: colliding ints"])
def test_all_doors_take_time_in_proportion(name: str) -> None:
    took = timed(name, doors=True)
    assert took.linear, took
