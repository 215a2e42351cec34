"""The blocks that are read are exactly those that hold a wanted byte, and finding them is cheap."""

from __future__ import annotations

import itertools
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treering._plan.load import covering_ranges
from treering._values.boxes import Box, slices, whole


@st.composite
def boxes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    starts = [draw(st.integers(0, length)) for length in shape]
    return tuple((start, draw(st.integers(start, length))) for start, length in zip(starts, shape, strict=True))


Case = tuple[Box, list[Box], tuple[int, ...] | None]


@st.composite
def chunks_and_wanted(draw: st.DrawFn) -> Case:
    shape = draw(st.lists(st.integers(0, 12), max_size=4).map(tuple))
    steps = draw(st.none() | st.tuples(*(st.integers(1, 9) for _ in shape)))
    return draw(boxes_of(shape)), draw(st.lists(boxes_of(shape), max_size=3)), steps


@given(chunks_and_wanted(), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 8, 16, 64, 1024]))
def test_exactly_the_blocks_with_a_wanted_byte(case: Case, itemsize: int, block: int) -> None:
    chunk, wanted, steps = case
    everything = np.zeros((*(stop for _, stop in chunk), itemsize), bool)
    for box in wanted:
        within = tuple((start, min(stop, end)) for (start, stop), (_, end) in zip(box, chunk, strict=True))
        everything[slices(within, steps)] = True
    touched = everything[slices(chunk)]
    nbytes = touched.size
    blocks = {place // block for place in np.flatnonzero(touched.ravel())}
    ranges = covering_ranges(chunk, wanted, itemsize, block, steps)
    assert all(start < stop for start, stop in ranges)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges)), "neighbours are joined"
    assert all(start % block == 0 and (stop % block == 0 or stop == nbytes) for start, stop in ranges)
    assert {place // block for start, stop in ranges for place in range(start, stop)} == blocks


def test_the_whole_chunk_is_one_range() -> None:
    chunk = ((2, 4), (0, 1000))
    assert covering_ranges(chunk, [chunk], 4, 64) == [(0, 8000)]
    assert covering_ranges(chunk, [((0, 9), (0, 1000))], 4, 64) == [(0, 8000)]
    assert covering_ranges((), [()], 8, 65536) == [(0, 8)]


def test_nothing_wanted_is_nothing_read() -> None:
    assert covering_ranges(((0, 0), (0, 3)), [((0, 0), (0, 3))], 4, 64) == []
    assert covering_ranges(((0, 4),), [], 4, 64) == []
    assert covering_ranges(((0, 4),), [((4, 8),), ((2, 2),)], 4, 64) == []


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((1 << 20, 1 << 8), ((0, 1 << 20), (0, 1))),  # a million runs in a million rows
        ((1 << 10, 1 << 10, 1 << 8), ((0, 1 << 10), (0, 1 << 10), (3, 5))),
        ((2,) * 28, ((0, 2),) * 27 + ((1, 2),)),
        ((1 << 40, 1 << 10), ((0, 1 << 20), (0, 1))),  # of a leaf that no machine holds
    ],
)
def test_a_million_small_runs_cost_no_list(shape: tuple[int, ...], wanted: Box) -> None:
    tracemalloc.start()
    ranges = covering_ranges(whole(shape), [wanted], 4, 1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(ranges) == 1
    assert peak < 1 << 16


def test_runs_far_apart_cost_at_most_the_blocks() -> None:
    shape, itemsize, block = (64, 4, 512, 128), 4, 65536
    wanted = ((0, 64), (0, 4), (0, 2), (0, 128))  # 1 KiB of each 256 KiB
    ranges = covering_ranges(whole(shape), [wanted], itemsize, block)
    assert len(ranges) == 64 * 4
    assert sum(stop - start for start, stop in ranges) == math.prod(shape) * itemsize // 4
