"""What cannot be saved or loaded by all processes is refused on all of them, and the next save works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering as tr
from tests.multiprocess.jobs import Job, results, run_job, start_job
from tests.multiprocess.refusals import damaged, does_not_come, races, refused
from treering.leaves import tree_serialize_leaves

COUNT = 4


FORMS = ("ckpt", "leaves")


def test_all_processes_hear_of_it(tmp_path: Path) -> None:
    every = results(run_job(refused, COUNT, devices=1, arguments=[str(tmp_path)], timeout=120))
    for form in FORMS:
        for number, said in enumerate(every):
            _check_refusals(number, said[form], form)
            _check_the_rest(number, said[form])
        assert sum(said[form]["done"][-1][1] for said in every if said[form]["done"]) == 24 * 24 * 4
    for number, said in enumerate(every):
        called = [0] if number == 0 else []
        assert said["files"] == {"files": [[number] * 3] * 2, "metadata": {"number": 0}, "called": called}
    assert not list(tmp_path.rglob(".treering-*"))
    assert not list(tmp_path.rglob("*.treering-tmp"))


def _check_the_rest(number: int, said: dict[str, Any]) -> None:
    for good in ("first", "equal", "of process 0", "progress", "this", "host only"):
        assert "error" not in said[good], said[good]
    # What could not be saved left what was there.
    assert said["value"] == [1, 1.0]
    assert said["noise"] == [0] * 5
    assert said["mine"] == [number] * 3
    assert said["host"] == 0
    assert said["last"] == [5, 5.0]
    assert (said["nonsense"]["error"], "timeout" in said["nonsense"]["message"]) == ("UnsupportedError", True)
    assert said["this, of all"]["error"] == "UnsupportedError", said["this, of all"]
    done = [tuple(pair) for pair in said["done"]]
    assert done == sorted(done)
    assert all(done and pair[1] == done[-1][0] for pair in done)


def _check_refusals(number: int, said: dict[str, Any], form: str) -> None:
    def has(case: str, error: str, *words: str) -> None:
        assert said[case].get("error") == error, (number, case, said[case])
        for word in words:
            assert word in said[case]["message"], (number, case, said[case])
        assert said[case]["seconds"] < 50, (number, case, said[case])

    if form == "ckpt":
        has("exists", "ExistsError", "overwrite=True")
    has("other sharding", "MismatchError", "w")
    has("other shape", "MismatchError", "extra")
    has("more leaves", "MismatchError")
    has("unsupported in 1", "UnsupportedError", "when", "date")
    has("unsupported in 0", "UnsupportedError", "when", "date")
    has("differs", "MismatchError", "noise", "2 and 3")
    if number != 1:
        assert "process 1" in said["unsupported in 1"]["message"]
    if number != 0:
        assert "process 0" in said["unsupported in 0"]["message"]
    if number != 2:
        assert "process 2" in said["other sharding"]["message"]


@pytest.mark.slow
def test_damage_that_some_meet_is_raised_by_all(tmp_path: Path) -> None:
    state = {"w": np.arange(24 * 24, dtype=np.float32).reshape(24, 24), "step": 1}
    for where in ("", " bad"):
        tr.save(tmp_path / f"ckpt{where}", state)
        tree_serialize_leaves(tmp_path / f"leaves{where}", state)
    for file in (*(tmp_path / "ckpt bad").glob("data-*"), tmp_path / "leaves bad" / "w" / "0.0"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    every = results(run_job(damaged, 3, devices=1, arguments=[str(tmp_path)]))
    for form in FORMS:
        for number, said in enumerate(every):
            whole, bad, elsewhere, other, again = said[form]
            assert "error" not in whole, whole
            assert bad.get("error") == "CorruptError", bad
            assert elsewhere.get("error") == "NotSharedError", (number, elsewhere)
            assert other.get("error") == "MismatchError", (number, other)
            assert f"load '{form} not there'" in other["message"], other
            assert again.get("result") == whole["result"], again
            assert bad["seconds"] < 50
            assert elsewhere["seconds"] < 50


def _all_say(job: Job, processes: range, text: str) -> None:
    left = set(processes)
    for number, found in job.events():
        if found == text:
            left.discard(number)
        if not left:
            return
    raise AssertionError(f"{left} ended and never said {text!r}")


@pytest.mark.slow
def test_who_does_not_come_is_named_and_the_next_save_works(tmp_path: Path) -> None:
    with start_job(does_not_come, 3, devices=1, arguments=[str(tmp_path)], heartbeat=100) as job:
        for _ in FORMS:
            _all_say(job, range(2), "has given up")
            job.tell(2)
            job.wait_for(2, "has given up")
            for number in range(3):
                job.tell(number)
        every = results(job.wait())
    for form in FORMS:
        for number, both in enumerate(every):
            said = both[form]
            assert "error" not in said["first"], said
            assert said["without"]["error"] == "TimedOutError", said
            assert said["without"]["seconds"] < 20
            assert said["without"]["missing"] == [2], (number, said)
            assert "process 2" in said["without"]["message"]
            assert said["value"] == [1, 1.0], said
            assert "error" not in said["next"], said
            assert said["last"] == [3, 3.0]


@pytest.mark.slow
def test_of_two_jobs_at_one_path_one_wins(tmp_path: Path) -> None:
    rounds = 3
    with (
        start_job(races, 2, devices=1, arguments=[str(tmp_path), 1, rounds], heartbeat=100) as first,
        start_job(races, 2, devices=1, arguments=[str(tmp_path), 2, rounds], heartbeat=100) as second,
    ):
        for one in range(rounds):
            for job in (first, second):
                _all_say(job, range(2), f"ready {one}")
            for number in range(2):
                for job in (first, second):
                    job.tell(number)
        found = [results(first.wait()), results(second.wait())]
    for one in range(rounds):
        ends = [{said[one].get("error", "won") for said in job} for job in found]
        assert all(len(end) == 1 for end in ends), ends
        assert [end for end in ends if end == {"won"}], (ends, found)
        assert len([end for end in ends if end == {"won"}]) == 1, ends
        assert {*ends[0], *ends[1]} <= {"won", "ExistsError", "BusyError"}, found
        winner = 1 + (ends[1] == {"won"})
        assert tr.load(tmp_path / str(one))["step"] == winner
        assert tr.verify(tmp_path / str(one)).ok
