"""A state for each process in jobs of real processes: each gets its own back; another number asks merge and split."""

from __future__ import annotations

from pathlib import Path

import pytest

import treering as tr
from tests.multiprocess.each_states import (
    fails_to_give_a_state,
    loads_what_others_saved,
    merge,
    saves_and_loads,
    saves_for_another_job,
    split,
)
from tests.multiprocess.jobs import Crews, results


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_process_gets_its_own_state_back(tmp_path: Path, crews: Crews, count: int) -> None:
    every = results(crews.run(saves_and_loads, count, devices=1, arguments=[str(tmp_path)], timeout=120))
    for number, one in enumerate(every):
        assert one["same"] == [True] * 4, one
        assert one["wanted"][3:5] == ["ü" * number, {"process": number}]
        assert len(one["wanted"][0]) == 24 // count - number - 1
    # What is large of all states lies in one file, whatever the number of processes; what is small in the index.
    files = sorted(path.name for path in (tmp_path / "save").iterdir())
    assert len(files) == 1 + count + 1, files
    assert tr.verify(tmp_path / "save").ok
    assert [state["name"] for state in tr.load(tmp_path / "save")["data"]["a"]] == ["ü" * n for n in range(count)]
    with tr.open(tmp_path / "save") as checkpoint:
        assert checkpoint["data/a/processes"] == count


def test_another_number_of_processes_asks_merge_and_split(tmp_path: Path, crews: Crews) -> None:
    path = str(tmp_path / "ckpt")
    results(crews.run(saves_for_another_job, 2, devices=1, arguments=[path], timeout=120))
    left = sorted(row for state in tr.load(path)["data"]["a"] for row in state["left"])
    # Joint to alone, and to a job of more.
    alone = tr.load(path, like={"data": {"a": tr.each(None, merge=merge)}}, extra="ignore")
    assert list(alone["data"]["a"].item["left"]) == left
    wanted = split(merge(list(tr.load(path)["data"]["a"])), 3)
    every = results(crews.run(loads_what_others_saved, 3, devices=1, arguments=[path], timeout=120))
    assert [one["left"] for one in every] == [list(part["left"]) for part in wanted]
    assert sorted(row for one in every for row in one["left"]) == left


def test_without_merge_and_split_all_hear_which_item_and_both_counts(tmp_path: Path, crews: Crews) -> None:
    path = str(tmp_path / "ckpt")
    tr.save(path, {"data": {"a": tr.each({"left": (1, 2)})}, "step": 7})
    every = results(crews.run(loads_what_others_saved, 2, devices=1, arguments=[path, False], timeout=120))
    for one in every:
        assert one["told"]["error"] == "MismatchError", one
        assert "'data/a'" in one["told"]["message"]
        assert "the states of 1 process, and here 2 processes" in one["told"]["message"]
        assert "split" in one["told"]["message"]
        assert len(one["left"]) == 12  # nothing was given to it


def test_where_one_cannot_give_its_state_all_hear_of_it(tmp_path: Path, crews: Crews) -> None:
    zero, one = results(crews.run(fails_to_give_a_state, 2, devices=1, arguments=[str(tmp_path)], timeout=120))
    assert [said.get("error") for said in one] == ["ZeroDivisionError", "UnsupportedError", "UnsupportedError", None]
    assert [said.get("error") for said in zero] == ["ProcessFailedError", "UnsupportedError", "UnsupportedError", None]
    assert all("process 1" in said["message"] for said in zero[:3])
    assert "leaf 'data'" in one[1]["message"]
    assert "numpy.asarray(x)" in one[1]["message"]
    assert "more than 1048576" in one[2]["message"]
    assert len(tr.load(tmp_path / "odd")["data"]) == 2


def test_damaged_states_are_an_error_on_all_and_nothing_is_given_to_an_iterator(tmp_path: Path, crews: Crews) -> None:
    path = tmp_path / "ckpt"
    results(crews.run(saves_for_another_job, 2, devices=1, arguments=[str(path)], timeout=120))
    (states,) = path.glob("data-*-00002-of-00003.safetensors")  # of process 0 and 1 the arrays, then the states
    data = bytearray(states.read_bytes())
    data[-1] ^= 1
    states.write_bytes(data)
    for one in results(crews.run(loads_what_others_saved, 2, devices=1, arguments=[str(path)], timeout=120)):
        assert one["told"]["error"] == "CorruptError", one
        assert one["told"]["seconds"] < 60
        assert len(one["left"]) == 12
