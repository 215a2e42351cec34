"""Input built to be quadratic at each reader: four times the bytes take four times the time, and some more."""

from __future__ import annotations

import pytest

from torture.quadratic import CASES, timed

# `python -m torture quadratic` reads twice as much.
SIZES = (1 << 19, 1 << 21)

# The records of leaves directories have the tree of a checkpoint. That attack reads these too, and the other half.
READERS = [name for name in CASES if not name.startswith(("record: ", "leaves: "))][::2]
DOORS = ("checkpoint: colliding pairs", "safetensors: colliding shapes", "msgpack: colliding ints")


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_a_reader_takes_time_in_proportion(name: str) -> None:
    took = timed(name, doors=False, sizes=SIZES)
    assert took.linear, took


@pytest.mark.slow
@pytest.mark.parametrize("name", DOORS)
def test_all_doors_take_time_in_proportion(name: str) -> None:
    took = timed(name, doors=True, sizes=SIZES)
    assert took.linear, took
