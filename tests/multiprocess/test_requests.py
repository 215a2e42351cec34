"""Requests of each process of a job that loads from a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocess.jobs import Crews, results
from tests.multiprocess.requests import loads

_LARGE = 12
# In what process 0 or one program wrote alone, and where columns are wanted of rows, the parts of large leaves that
# one process reads are more than 1 MiB apart.
_APART = {"saved: columns", "foreign.safetensors: rows", "foreign.safetensors: columns"}


@pytest.mark.parametrize("count", [2, 4])
def test_each_process_asks_as_often_as_its_bytes_take(count: int, crews: Crews, tmp_path: Path) -> None:
    for found in results(crews.run(loads, count, arguments=[str(tmp_path)], timeout=180)):
        assert len(found) == 6
        for name, one in found.items():
            most = one["wanted"] / (8 << 20) + 4 * one["opened"] + 6 + _LARGE * (name in _APART)
            assert one["asked"] <= most, (name, one)
            if name not in _APART:
                assert one["received"] <= 1.05 * one["wanted"] + one["opened"] * (256 << 10), (name, one)
