"""Processes save arrays that each of them holds since the step before: they are not copied, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import treering as tr
from tests.multiprocess.held_arrays import saves_steps
from tests.multiprocess.jobs import Crews, results

_BOTH = ["frozen", "trained"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_each_process_leaves_what_it_holds_on_its_devices(crews: Crews, tmp_path: Path, count: int) -> None:
    for one in results(crews.run(saves_steps, count, devices=2, arguments=[str(tmp_path)])):
        found = [[key for key in copied if key != "everywhere"] for copied in one["copied"]]
        assert found == [_BOTH, ["trained"], ["trained"], ["trained"], ["trained"], _BOTH]
    items = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    for step in range(1, 7):
        path = tmp_path / "run" / f"step_{step:08}"
        found = tr.load(path)
        assert np.array_equal(found["frozen"], items)
        assert np.array_equal(found["everywhere"], items + 1)
        assert np.array_equal(found["local"], np.arange(30.0))
        assert np.array_equal(found["trained"], items[:, :4] + step)
        assert tr.verify(path).ok
