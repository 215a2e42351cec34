"""Data that grain reads, in jobs of several processes: after a resume each gets the batches that it would have read."""

from __future__ import annotations

from pathlib import Path

import grain
import numpy as np
import pytest

import treering as tr
from tests.multiprocess.grain_workers import PIPELINES, begins, elastic, goes_on, reads_elastic
from tests.multiprocess.jobs import Crews, results, run_job


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_process_goes_on_with_the_batches_it_would_have_read(tmp_path: Path, crews: Crews, count: int) -> None:
    arguments = [str(tmp_path), 5]
    wanted = results(crews.run(begins, count, devices=1, arguments=arguments, timeout=150))
    # Other processes than those that saved, as after a restart.
    found = results(run_job(goes_on, count, devices=1, arguments=arguments, timeout=150))
    assert found == wanted
    for name in PIPELINES:
        assert len({tuple(one[name]) for one in wanted}) == count, name  # each had other data
    for name in PIPELINES:
        states = tr.load(tmp_path / name)["data"]["train"]
        assert len(states) == count
        assert states[0] != states[1], name


def test_one_process_goes_on_too(tmp_path: Path) -> None:
    for name, make in PIPELINES.items():
        data = make(0, 1)
        for _ in range(7):
            next(data)
        tr.save(tmp_path / name, {"data": tr.each(data)})
        wanted = [next(data) for _ in range(5)]
        back = make(0, 1)
        tr.load(tmp_path / name, like={"data": tr.each(back)})
        assert [one.tolist() for one in wanted] == [next(back).tolist() for _ in range(5)]


@pytest.mark.parametrize("counts", [(2, 1), pytest.param((2, 4, 1), marks=pytest.mark.slow)])
def test_the_elastic_iterator_goes_on_in_any_number_of_processes(
    tmp_path: Path, crews: Crews, counts: tuple[int, ...]
) -> None:
    assert isinstance(elastic(0, 1), grain.DatasetIterator)
    alone = elastic(0, 1)
    wanted = [np.asarray(next(alone)).tolist() for _ in range(4 * len(counts))]
    taken: list[list[list[int]]] = [[], []]  # by itself, and marked
    for count in counts:
        every = results(crews.run(reads_elastic, count, devices=1, arguments=[str(tmp_path), 4], timeout=120))
        for way, batches in enumerate(taken):
            # Process n of them reads every count-th row of a batch of all.
            batches += [sorted(row for one in every for row in one[way][step]) for step in range(4)]
    assert taken == [[sorted(batch) for batch in wanted]] * 2
