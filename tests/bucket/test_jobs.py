"""Jobs of real processes that save to a real server together, load from it in another number, and go through a run."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import treering
from tests.command import copy_path
from tests.compat import independent_reader
from tests.multiprocess import trees
from tests.multiprocess.each_states import saves_and_loads
from tests.multiprocess.jobs import results, run_job
from tests.multiprocess.run_workers import follows, saves_iterators
from tests.multiprocess.runs import goes_through
from tests.multiprocess.test_runs import check_what_all_found
from tests.multiprocess.trips import reads, round_trip
from torture.bucket_servers import BucketServer

pytestmark = pytest.mark.bucket


@pytest.fixture
def folder(seaweed: BucketServer, prefix: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in seaweed.environment().items():
        monkeypatch.setenv(name, value)  # the processes of a job inherit it
    return f"{seaweed.url}/{prefix}"


def test_saved_by_two_loaded_and_overwritten_by_three(folder: str, tmp_path: Path) -> None:
    [zero, one] = results(run_job(round_trip, 2, devices=4, arguments=[folder, 2], timeout=120))
    assert (zero["bad"], one["bad"]) == ([], [])
    three = results(run_job(reads, 3, devices=[2, 4, 2], arguments=[[folder], [2], folder, 3], timeout=120))
    assert [found["bad"] for found in three] == [[], [], []]
    assert trees.problems(treering.load(f"{folder}/ckpt"), 3, None) == []
    assert trees.problems(treering.load(f"{folder}/leaves"), 3, None) == []
    # A copy on disk is what each process wrote, in the form that any program can read.
    copy_path(f"{folder}/ckpt", str(tmp_path / "copy"), overwrite=False)
    _, leaves = independent_reader.read(tmp_path / "copy")
    assert leaves["arrays/large"].tobytes() == trees.whole("large", 3).tobytes()


def test_all_go_through_a_run(folder: str) -> None:
    zero, one = results(run_job(goes_through, 2, devices=1, arguments=[folder], timeout=120))
    check_what_all_found(zero, one)
    assert treering.load(f"{folder}/other/step_00000003")["data"] == {"position": 30}


def test_iterators_that_differ_are_refused_on_all_processes(folder: str) -> None:
    for told, steps, count in results(run_job(saves_iterators, 2, devices=1, arguments=[f"{folder}/run"], timeout=120)):
        assert "leaf 'data/train/count' differs on process 1" in told
        assert (steps, count) == ([2], 5)


def test_each_process_gets_its_own_state_back(folder: str) -> None:
    for number, one in enumerate(results(run_job(saves_and_loads, 2, devices=1, arguments=[folder], timeout=120))):
        assert one["same"] == [True] * 4, one
        assert one["wanted"][4] == {"process": number}
    assert treering.verify(f"{folder}/async").ok


def test_all_follow_and_hold_a_run(folder: str) -> None:
    zero, one = results(run_job(follows, 2, devices=1, arguments=[f"{folder}/run"], timeout=150))
    assert (zero[0], one[0]) == ([1, 2, 4], [])
    assert zero[1] == [2]
    assert zero[2] == one[2] == [2, [2, 4], 4]


_EVALUATOR = """
import sys, treering as tr
for step in tr.Run(sys.argv[1]).watch(hold=True):
    print(step, tr.load(f"{sys.argv[1]}/step_{step:08d}")["step"], flush=True)
    sys.stdin.readline()
"""


def test_an_evaluator_in_another_program_holds_the_step_that_it_follows(folder: str) -> None:
    path = f"{folder}/run"
    with treering.Run(path, keep=treering.KeepLast(1)) as run:
        run.save(1, {"step": 1}).result()
        with subprocess.Popen(
            [sys.executable, "-c", _EVALUATOR, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as evaluator:
            assert evaluator.stdin is not None
            assert evaluator.stdout is not None
            assert evaluator.stdout.readline() == "1 1\n"
            run.save(2, {"step": 2}).result()
            run.save(3, {"step": 3}).result()
            run.wait()
            assert run.steps() == [1, 3]
            evaluator.stdin.write("\n")
            evaluator.stdin.flush()
            assert evaluator.stdout.readline() == "3 3\n"
            run.save(4, {"step": 4}).result()
            run.wait()
            assert run.steps() == [3, 4]
            evaluator.send_signal(signal.SIGKILL)
        run.save(5, {"step": 5}).result()
        run.wait()
        assert run.steps() == [3, 5]  # it may only stand still
