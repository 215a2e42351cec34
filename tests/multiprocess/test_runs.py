"""A run of several real processes: process 0 looks into the folder for all, and nobody fails alone."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering as tr
from tests.multiprocess.jobs import Crews, results
from tests.multiprocess.runs import (
    counts_from_what_process_0_sees,
    fails_afterwards,
    goes_through,
    loads_beside_a_trainer,
    shares_files,
)


def check_what_all_found(zero: dict[str, Any], one: dict[str, Any]) -> None:
    """Judge what two processes found that went through a run."""
    for found in (zero, one):
        assert found["nothing there"]["error"] == "NotFoundError"
        for name in ("begin", "once more", "and again"):
            assert "error" not in found[name], (name, found[name])
        assert found["older"]["error"] == "ExistsError"
        assert "older than its latest step, 3" in found["older"]["message"]
        assert found["latest"].get("result") == 3, found["latest"]
        assert found["position"] == 30
        assert found["missing"]["error"] == "NotFoundError"
        assert found["verdicts"].get("result") == [[1, False], [2, False], [3, True]], found["verdicts"]
        assert found["steps"]["result"] == [3]
        assert found["branch"].get("result") == [3], found["branch"]
        assert found["branch again"]["error"] == "ExistsError"
        assert found["from the branch"].get("result") == [3, ["new"], [1.0] * 4, 3], found["from the branch"]
        assert all(said["seconds"] < 30 for said in found.values() if isinstance(said, dict)), found
    assert one["broken on 1"]["error"] == "ZeroDivisionError"
    assert zero["broken on 1"]["error"] == "ProcessFailedError"
    assert "process 1" in zero["broken on 1"]["message"]
    assert "the pipe burst" in zero["broken on 1"]["message"]
    assert one["odd metric on 1"]["error"] == zero["odd metric on 1"]["error"] == "UnsupportedError"


def test_all_go_through_a_run(tmp_path: Path, crews: Crews) -> None:
    zero, one = results(crews.run(goes_through, 2, devices=1, arguments=[str(tmp_path)], timeout=120))
    check_what_all_found(zero, one)
    # What each process holds by itself is that of process 0.
    assert tr.load(tmp_path / "other" / "step_00000003")["data"] == {"position": 30}


def test_the_steps_of_a_job_share_files_and_are_whole(tmp_path: Path, crews: Crews) -> None:
    every = results(crews.run(shares_files, 2, devices=2, arguments=[str(tmp_path)], timeout=120))
    for number, (steps, sums, _) in enumerate(every):
        assert steps == list(range(6)), number
        assert sums == [499500.0] * 6
    steps = [tmp_path / "run" / f"step_{step:08}" for step in range(6)]
    wanted = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    for step, path in enumerate(steps):
        wanted[step] += 1
        assert tr.verify(path).ok
        found = tr.load(path)
        assert np.array_equal(found["rows"], wanted)
        assert found["step"] == step
    numbers = [{file.stat().st_ino for file in path.glob("data-*")} for path in steps]
    assert [bool(one & other) for one, other in pairwise(numbers)] == [True, True, True, False, True]


def test_what_only_process_0_knows_all_are_told(tmp_path: Path, crews: Crews) -> None:
    zero, one = results(crews.run(fails_afterwards, 2, devices=1, arguments=[str(tmp_path)], timeout=120))
    for found in (zero, one):
        good, load, again, late, once_more, steps = found
        assert "error" not in good, good
        assert (load["error"], "the program is gone" in load["message"]) == ("StoreError", True), load
        assert again.get("result") == 2, again
        assert (late["error"], "the program is gone" in late["message"]) == ("StoreError", True), late
        assert "error" not in once_more, once_more
        assert steps["result"] == [4]
    assert "process 0" in one[1]["message"]


@pytest.mark.parametrize("victim", [0, 1])
def test_where_one_begins_again_on_a_newer_step_all_do(tmp_path: Path, crews: Crews, victim: int) -> None:
    arguments = [str(tmp_path), victim]
    zero, one = results(crews.run(loads_beside_a_trainer, 2, devices=1, arguments=arguments, timeout=120))
    for found in (zero, one):
        apart = found.pop("found by some")
        assert (apart["error"], apart.get("processes")) == ("NotSharedError", [victim]), apart
        assert [said.get("result") for said in found.values()] == [3, 5, 7, 9, 11], found
        assert [said["position"] for said in found.values()] == [0, 5, 7, 9, 11], found


@pytest.mark.slow
def test_all_count_from_the_step_that_process_0_sees(tmp_path: Path, crews: Crews) -> None:
    arguments = [str(tmp_path)]
    every = results(crews.run(counts_from_what_process_0_sees, 2, devices=1, arguments=arguments, timeout=120))
    assert every == [[True, False, False]] * 2
