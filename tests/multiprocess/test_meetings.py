"""Processes that meet before they save or load: they agree, or each learns who did not come."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.multiprocess.jobs import Crews, results, run_job, start_job
from tests.multiprocess.meetings import breaks_off, calls, comes_late, fails_alone, meets, saves_late
from tests.on_disk import heartbeat_name, is_message
from treering import verify


def test_each_gets_what_all_bring(tmp_path: Path) -> None:
    found = results(run_job(meets, 4, devices=[1, 3, 2, 1], arguments=[str(tmp_path)]))
    assert found[0] == {
        "first": [b"0".hex(), b"1".hex(), b"2".hex(), b"3".hex()],
        "longest": [bytes([number]).hex() * 512 for number in range(4)],
        "none": [""] * 4,
        "uneven": ["", "00", "0000", "000000"],
        "x64": [b"a".hex()] * 4,
        "default device": [b"b".hex()] * 4,
        "with mesh": [b"c".hex()] * 4,
        "set_mesh": [b"d".hex()] * 4,
        "guarded": [b"e".hex()] * 4,
        "left": [],
    }
    assert found[1:] == [found[0]] * 3


@pytest.mark.slow
def test_calls_are_counted_and_a_folder_that_not_all_see_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for number in range(4):
        (tmp_path / str(number)).mkdir()
    every = results(run_job(calls, 4, devices=1, arguments=[str(tmp_path)]))
    for number, (apart, partly, refused, first, second, third) in enumerate(every):
        assert (apart["error"], apart["processes"]) == ("NotSharedError", [1, 2, 3])
        assert "processes 1-3 do not see what process 0 writes" in apart["message"]
        assert f"{tmp_path}/{number}/ckpt" in apart["message"]
        assert (partly["error"], partly["processes"]) == ("NotSharedError", [1, 3])
        assert refused["error"] == "NotDirectoryError"
        assert str(tmp_path / "file") in refused["message"]
        assert ("process 0" in refused["message"]) == (number > 0)
        job, _, _, _ = first["result"]
        assert [said["result"][1] for said in (first, second, third)] == [4, 5, 6]
        assert {said["result"][0] for said in (first, second, third)} == {every[0][3]["result"][0]} == {job}
        assert [said["result"][2] for said in (first, second)] == [every[0][at]["result"][2] for at in (3, 4)]
        assert first["result"][3] == number
    # Only the folder of the call that went on is there, without a note.
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "0", "1", "2", "3", "file", "there", "there/ckpt",
    ]  # fmt: skip


@pytest.mark.slow
def test_who_comes_late_to_the_first_call_is_named_and_the_next_call_works(tmp_path: Path) -> None:
    with start_job(comes_late, 3, devices=1, arguments=[str(tmp_path)], heartbeat=100) as job:
        given_up = {0, 1}
        for number, text in job.events():
            if text == "has given up":
                given_up.discard(number)
                if not given_up:
                    break
        job.tell(2)
        job.wait_for(2, "has given up")
        for number in range(3):
            job.tell(number)
        every = results(job.wait())
    for first, _, _ in every[:2]:
        assert (first["error"], first["missing"]) == ("TimedOutError", [2]), first
        assert "process 2 did not arrive within 8 s" in first["message"]
    late = every[2][0]
    assert late["error"] == "TimedOutError"
    assert "process 0 had given up" in late["message"]
    assert late["seconds"] < 10
    for second, third in [found[1:] for found in every]:
        assert (second["result"][1], third["result"][1]) == (2, 3)
        assert second["result"][2] == every[0][1]["result"][2]
    assert [path.name for path in (tmp_path / "ckpt").iterdir()] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "form", "eager"), [(2, "leaves", False), (3, "checkpoint", False), (3, "checkpoint", True)]
)
def test_process_0_that_comes_to_the_first_save_when_all_have_given_up_hears_of_it(
    tmp_path: Path, count: int, form: str, eager: bool
) -> None:
    """The others wait for process 0 to fail as well, or wait in their next save already."""
    others = range(1, count)
    with start_job(saves_late, count, devices=1, arguments=[str(tmp_path), form, 4], heartbeat=100) as job:
        given_up = set(others)
        for number, text in job.events():
            if text == "has given up":
                given_up.discard(number)
                if not given_up:
                    break
        if eager:
            for number in others:
                job.tell(number)
            for number in others:
                note = tmp_path / "deep" / "ckpt" / heartbeat_name(number)
                while b"is given up" in note.read_bytes():
                    time.sleep(0.1)
        job.tell(0)
        job.wait_for(0, "has given up")
        for number in [0] if eager else range(count):
            job.tell(number)
        every = results(job.wait(150))
    for first, _ in every[1:]:
        assert (first["error"], first["missing"]) == ("TimedOutError", [0]), first
    late = every[0][0]
    assert (late["error"], late["missing"]) == ("TimedOutError", list(others)), late
    named = {2: "process 1 ", 3: "processes 1 and 2 "}.get(count, f"processes 1-{count - 1} ")
    assert named in late["message"], late
    assert late["seconds"] < 20, late  # of 60
    for number, (_, second) in enumerate(every):
        assert "error" not in second, (number, second)
    path = tmp_path / "deep" / "ckpt"
    assert [entry.name for entry in path.iterdir() if is_message(entry.name)] == []
    assert verify(path).ok


def test_an_answer_to_another_question_is_none(tmp_path: Path, crews: Crews) -> None:
    zero, one = results(crews.run(fails_alone, 2, devices=1, arguments=[str(tmp_path)]))
    assert one[1]["error"] == "ZeroDivisionError"
    # What process 1 brings to its next call comes to process 0 in the call before.
    for met in (zero[1], one[2]):
        assert "process 0 arrived at a call that the others had given up" in met.get("message", ""), met
    assert zero[-1]["result"] == one[-1]["result"] == ["last", "last"]


@pytest.mark.slow
def test_who_is_killed_is_named(tmp_path: Path) -> None:
    with start_job(breaks_off, 3, devices=1, arguments=[str(tmp_path)], heartbeat=100) as job:
        job.wait_for(1, "waits")
        job.send(1, signal.SIGKILL)
        outcomes = job.wait()
    for number in (0, 2):
        second = outcomes[number].result["second"]
        assert second["error"] in {"TimedOutError", "ProcessFailedError"}
        assert second.get("missing", second.get("processes")) == [1], second
        assert second["seconds"] < 20
        assert "process 1" in second["message"]
