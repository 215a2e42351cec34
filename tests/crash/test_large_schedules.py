"""Simulated schedules of large jobs, in which process 0 takes long to look at all messages; and scenes of any job."""

from __future__ import annotations

import numpy as np
import pytest

from torture.process_scenes import values
from torture.schedules import tried


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("seed", "number", "processes"), [(552, 27, 130), (552, 149, 130), (552, 187, 130), (551, 39, 300), (551, 43, 300)]
)
def test_who_waits_for_a_process_0_that_reads_for_long_may_name_it(seed: int, number: int, processes: int) -> None:
    assert tried(seed, range(number, number + 1), processes=processes).violations == []


@pytest.mark.parametrize(
    ("schedules", "processes"),
    [
        (range(4), 130),
        pytest.param(range(4, 40), 130, marks=pytest.mark.slow),
        pytest.param(range(8), 300, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_few_schedules_of_large_jobs(schedules: range, processes: int) -> None:
    assert tried(7, schedules, processes=processes).violations == []


@pytest.mark.parametrize("count", [2, 4, 37, 48])
def test_the_arrays_of_a_scene_can_be_divided_among_the_devices_of_any_job(count: int) -> None:
    for value in values(1, 1 << 15, count)["params"].values():
        assert np.shape(value)[0] % (2 * count) == np.shape(value)[1] % (2 * count) == 0
