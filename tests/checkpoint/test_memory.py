"""Memory beside the arrays: at most 64 MiB while saving, 5 % of the result while loading, whatever the layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("peaks.py")
ROOT = Path(__file__).parents[2]
MIB = 1 << 20
SIZE = 160 * MIB

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")]


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """What each job took."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("peaks"))],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {run["name"]: run for run in map(json.loads, done.stdout.splitlines())}


def test_saving_takes_little_beside_the_arrays(peaks: dict[str, dict[str, int]]) -> None:
    runs = {name: run["extra"] // MIB for name, run in peaks.items() if name.startswith("save")}
    assert len(runs) == 10
    assert {name: extra for name, extra in runs.items() if extra > 64} == {}


def test_saving_keeps_nothing(peaks: dict[str, dict[str, int]]) -> None:
    runs = {name: run["kept"] // MIB for name, run in peaks.items() if name.startswith("save")}
    assert {name: kept for name, kept in runs.items() if kept > 24} == {}


def test_loading_takes_the_result_and_little_more(peaks: dict[str, dict[str, int]]) -> None:
    runs = {name: run["extra"] / SIZE for name, run in peaks.items() if name.startswith("load")}
    assert len(runs) == 8
    # The many small arrays of one load come to 5 % by what the allocator keeps of each.
    assert {name: extra for name, extra in runs.items() if not 0.9 < extra <= 1.06} == {}


def test_a_slice_takes_what_it_is(peaks: dict[str, dict[str, int]]) -> None:
    assert peaks["slice a column"]["extra"] < 16 * MIB
    assert peaks["slice by steps"]["extra"] < 16 * MIB
