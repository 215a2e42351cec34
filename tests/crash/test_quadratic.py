"""Input built to be quadratic at each reader: four times the bytes take four times the time, and some more."""

from __future__ import annotations

import pytest

from torture.quadratic import CASES, timed

# `python -m torture quadratic` reads twice as much.
SIZES = (1 << 19, 1 << 21)

COLLIDING = ("checkpoint: colliding pairs", "checkpoint: boxes that collide", "checkpoint: types that collide")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(("record: ", "leaves: "))])
def test_a_reader_takes_time_in_proportion(name: str) -> None:
    # The records of leaves directories have the tree of a checkpoint; `python -m torture quadratic` reads these too.
    took = timed(name, doors=False, sizes=SIZES)
    assert took.linear, took


@pytest.mark.slow
@pytest.mark.parametrize("name", [*COLLIDING, "safetensors: colliding shapes", "msgpack: colliding ints"])
def test_all_doors_take_time_in_proportion(name: str) -> None:
    took = timed(name, doors=True, sizes=SIZES)
    assert took.linear, took
