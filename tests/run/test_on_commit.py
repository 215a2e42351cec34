"""A function that is called for each step once it is durable: at least once, whatever dies, and no save fails of it."""

from __future__ import annotations

import logging
import sys
import threading
import time
from pathlib import Path

import pytest

import treering as tr
from tests.buckets import install
from tests.command import here
from tests.on_disk import signed
from tests.reads import act_before_handed_steps_are_noted
from tests.stores import read_file, write_file
from tests.warm import Programs
from treering.errors import FormatError, NotDirectoryError, TimedOutError, UnsupportedError
from treering.rules import KeepLast
from treering.run import StepCommit

HANDED = ".run.json.handed"


@pytest.fixture(params=["disk", "memory"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a run that does not exist yet."""
    install(monkeypatch, grace=0.0)
    return str(tmp_path / "run") if request.param == "disk" else "memory://bucket/run"


def test_it_is_called_once_for_each_step_with_what_is_known(path: str) -> None:
    done: list[StepCommit] = []
    with tr.Run(path, on_commit=done.append) as run:
        for step in (1, 2, 3):
            run.save(step, {"w": step}, metrics={"loss": 1 / step})
    assert [(one.step, one.path.name, dict(one.metrics)) for one in done] == [
        (step, f"step_{step:08d}", {"loss": 1 / step}) for step in (1, 2, 3)
    ]
    assert all(one.nbytes > 0 and one.digest.startswith("xxh3-128:") for one in done)
    with tr.Run(path, on_commit=done.append) as run:
        run.save(4, {"w": 4})
    assert [one.step for one in done] == [1, 2, 3, 4]


def test_the_step_is_held_until_it_ends_and_no_save_waits_for_it(path: str) -> None:
    go, seen = threading.Event(), []

    def act(commit: StepCommit) -> None:
        assert go.wait(60)
        seen.append((commit.step, tr.load(commit.path)))

    with tr.Run(path, keep=KeepLast(1), on_commit=act) as run:
        for step in (1, 2, 3):
            run.save(step, {"w": step}).result()
        assert run.steps() == [1, 2, 3]
        with pytest.raises(TimedOutError, match="on_commit has not ended for step 1"):
            run.wait(0)
        go.set()
        run.wait()
        assert seen == [(1, {"w": 1}), (2, {"w": 2}), (3, {"w": 3})]
        assert run.steps() == [3]


def test_who_waits_for_it_waits_until_that_is_noted(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    noting, go = threading.Event(), threading.Event()

    def hold_up(*_: object) -> None:
        if threading.current_thread().name == "treering-on-commit":
            noting.set()
            go.wait(60)

    act_before_handed_steps_are_noted(monkeypatch, hold_up)
    run = tr.Run(path, on_commit=lambda _: None)
    run.save(1, {"w": 1}).result()
    assert noting.wait(60)
    waiting = threading.Thread(target=run.wait)
    waiting.start()
    waiting.join(0.2)  # where it does not wait, it has ended long before
    waits = waiting.is_alive()
    go.set()
    waiting.join(60)
    run.close()
    assert waits


def test_its_failure_is_logged_and_it_is_called_again_after_the_next_save(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[tuple[int, str]] = []

    def act(commit: StepCommit) -> None:
        calls.append((commit.step, commit.digest))
        if len(calls) == 1:
            raise OSError("no network")

    with caplog.at_level(logging.ERROR, "treering"), tr.Run(path, on_commit=act) as run:
        run.save(1, {"w": 1}).result()
        run.wait()
        assert "on_commit failed for step 1" in caplog.text
        run.save(2, {"w": 2}).result()
    assert [step for step, _ in calls] == [1, 1, 2]
    assert calls[0] == calls[1]


def test_what_failed_at_the_end_is_found_by_the_next_program(path: str) -> None:
    def fail(commit: StepCommit) -> None:
        raise ValueError(commit)

    with tr.Run(path, on_commit=fail) as run:
        run.save(1, {"w": 1})
        run.save(2, {"w": 2})
    done: list[int] = []
    with tr.Run(path, on_commit=lambda commit: done.append(commit.step)):
        pass
    assert done == [1, 2]


def test_steps_that_were_saved_without_it_are_not_handed_over(path: str) -> None:
    with tr.Run(path) as run:
        run.save(1, {"w": 1})
    done: list[int] = []
    with tr.Run(path, on_commit=lambda commit: done.append(commit.step)) as run:
        run.wait()
        run.save(2, {"w": 2})
    assert done == [2]


def test_what_is_saved_after_the_training_has_gone_back_is_handed_over(path: str) -> None:
    done: list[tuple[int, str]] = []
    with tr.Run(path, on_commit=lambda commit: done.append((commit.step, commit.digest))) as run:
        for step in (1, 2, 3):
            run.save(step, {"w": step}).result()
        run.wait()
        run.save(2, {"w": 22}, rollback=True).result()
        run.save(3, {"w": 33}).result()
    assert [step for step, _ in done] == [1, 2, 3, 2, 3]
    assert len(set(done)) == 5


def test_a_damaged_record_is_said_and_begun_anew(path: str, caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    with tr.Run(path, on_commit=lambda commit: done.append(commit.step)) as run:
        run.save(1, {"w": 1})
    write_file(f"{path}/{HANDED}", read_file(f"{path}/{HANDED}")[:-3])
    again = tr.Run(path, on_commit=lambda commit: done.append(commit.step))
    with caplog.at_level(logging.WARNING, "treering"), again as run:
        run.save(2, {"w": 2})
    assert (done, "only steps that are saved from now on" in caplog.text) == ([1, 2], True)
    write_file(f"{path}/{HANDED}", b'{"treering_handed": 9}\n')
    with pytest.raises(FormatError, match="version 9"):
        tr.Run(path, on_commit=print).save(3, {"w": 3})


def test_without_it_nothing_is_written_for_it(tmp_path: Path) -> None:
    with tr.Run(tmp_path / "run") as run:
        run.save(1, {"w": 1})
    assert not (tmp_path / "run" / HANDED).exists()


def test_other_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="on_commit is 'upload'"):
        tr.Run(tmp_path, on_commit="upload")  # type: ignore[arg-type]


_TRAINING = """
import os, sys, treering as tr
def die(commit):
    print(commit.step, commit.digest, flush=True)
    if commit.step == 2:
        os.kill(os.getpid(), 9)
run = tr.Run(sys.argv[1], keep=tr.KeepLast(2), on_commit=die)
for step in (1, 2):
    run.save(step, {"w": step}).result()
run.wait()
"""


def test_a_training_that_is_killed_before_it_was_done_is_made_up_for(programs: Programs, tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    killed = programs.run("-c", _TRAINING, path)
    assert killed.returncode == -9, killed.stderr
    first, second = killed.stdout.splitlines()
    done: list[str] = []
    with tr.Run(path, keep=KeepLast(2), on_commit=lambda commit: done.append(f"{commit.step} {commit.digest}")) as run:
        run.save(3, {"w": 3})
    assert first.startswith("1 ")
    assert done[0] == second  # the same digest: who has done it already can tell
    assert [one.split()[0] for one in done] == ["2", "3"]


def test_a_step_that_is_saved_anew_while_the_function_runs_is_handed_over_too(path: str) -> None:
    go, began, calls = threading.Event(), threading.Event(), []

    def act(commit: StepCommit) -> None:
        calls.append((commit.step, commit.digest))
        began.set()
        assert go.wait(60)

    with tr.Run(path, on_commit=act) as run:
        run.save(3, {"w": 1}).result()
        assert began.wait(60)
        run.save(3, {"w": 2}, rollback=True).result()
        go.set()
        run.wait()
        assert [step for step, _ in calls] == [3, 3]
        assert len(set(calls)) == 2


def test_gc_leaves_the_steps_that_wait_for_the_function(path: str) -> None:
    go, calls = threading.Event(), list[int]()

    def act(commit: StepCommit) -> None:
        assert go.wait(60)
        calls.append(commit.step)

    with tr.Run(path, keep=KeepLast(1), on_commit=act) as run:
        for step in (1, 2, 3):
            run.save(step, {"w": step}).result()
        assert all(verdict.kept for verdict in run.gc())
        assert all(verdict.kept for verdict in run.gc(dry_run=False))
        assert run.steps() == [1, 2, 3]
        go.set()
        run.wait()
        assert calls == [1, 2, 3]
        assert run.steps() == [3]


def test_gc_of_another_program_leaves_the_steps_that_wait_for_the_function(path: str) -> None:
    def act(_: StepCommit) -> None:
        began.set()
        go.wait(60)

    go, began = threading.Event(), threading.Event()
    running = tr.Run(path, keep=KeepLast(1), on_commit=act)
    for step in (1, 2, 3):
        running.save(step, {"w": step}).result()
    assert began.wait(60)
    other = tr.Run(path, keep=KeepLast(1))
    for verdicts in (other.gc(), other.gc(dry_run=False)):
        assert [verdict.kept for verdict in verdicts] == [True] * 3
        assert verdicts[1].reasons == ("on_commit was not called for it yet",)  # a lease holds the first one, as yet
    assert "on_commit was not called for it yet" in here("gc", path, "--keep-last", "1", "--yes", code=0).stdout
    assert other.steps() == [1, 2, 3]
    go.set()
    running.close()
    assert other.steps() == [3]
    other.save(4, {"w": 4}).result()  # by a program that hands over nothing
    assert other.steps() == [4]


def test_a_record_that_is_damaged_holds_no_step_and_one_of_a_newer_version_all(path: str) -> None:
    with tr.Run(path, on_commit=lambda _: None) as run:
        for step in (1, 2):
            run.save(step, {"w": step}).result()
    whole = read_file(f"{path}/{HANDED}")
    other = tr.Run(path, keep=KeepLast(1))
    write_file(f"{path}/{HANDED}", signed("treering_handed", '"through": 2}', version="2"))
    with pytest.raises(FormatError):
        other.gc(dry_run=False)
    assert other.steps() == [1, 2]
    write_file(f"{path}/{HANDED}", whole.replace(b'"through": 2', b'"through": 0'))
    other.gc(dry_run=False)
    assert other.steps() == [2]


def test_where_going_back_fails_the_later_steps_are_handed_over_all_the_same(path: str) -> None:
    go, began, calls = threading.Event(), threading.Event(), list[int]()

    def act(commit: StepCommit) -> None:
        calls.append(commit.step)
        if commit.step == 3:
            began.set()
            assert go.wait(60)

    with tr.Run(path, keep=KeepLast(1), on_commit=act) as run:
        for step in (1, 2, 3, 4):
            run.save(step, {"w": step}).result()
        assert began.wait(60)
        with pytest.raises(UnsupportedError):
            run.save(2, {"w": object()}, rollback=True)
        run.save(5, {"w": 5}).result()
        go.set()
    assert set(calls) == {1, 2, 3, 4, 5}
    assert run.steps() == [5]


def test_a_record_that_is_too_large_is_not_read_to_its_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []
    with tr.Run(tmp_path / "run") as run:
        run.save(1, {"w": 1})
    with (tmp_path / "run" / HANDED).open("wb") as file:
        file.truncate(1 << 40)
    with (
        caplog.at_level(logging.WARNING, "treering"),
        tr.Run(run.path, on_commit=lambda c: calls.append(c.step)) as run,
    ):
        run.save(2, {"w": 2})
    assert "only steps that are saved from now on are handed to on_commit" in caplog.text
    assert calls == [2]


def test_a_failed_save_is_raised_to_the_training_and_not_to_the_function(tmp_path: Path) -> None:
    go, loaded = threading.Event(), list[object]()

    def act(commit: StepCommit) -> None:
        assert go.wait(60)
        loaded.append(run.load(commit.step))
        run.wait()

    run = tr.Run(tmp_path / "run", on_commit=act)
    run.save(1, {"w": 1}).result()
    (tmp_path / "run" / "step_00000002").write_text("a file is in the way")
    failed = run.save(2, {"w": 2})
    assert failed.pending is not None
    while not failed.pending.done():
        pass
    go.set()
    assert run._state.calls is not None
    run._state.calls.wait(time.monotonic() + 60)
    assert loaded == [{"w": 1}]
    with pytest.raises(NotDirectoryError, match="the earlier save"):
        run.close()


def test_a_function_that_exits_ends_nothing(path: str) -> None:
    calls: list[int] = []

    def act(commit: StepCommit) -> None:
        calls.append(commit.step)
        if commit.step == 1 and calls.count(1) == 1:
            sys.exit(0)

    with tr.Run(path, on_commit=act) as run:
        for step in (1, 2, 3):
            run.save(step, {"w": step}).result()
        run.wait(60)
    assert set(calls) == {1, 2, 3}
    with tr.Run(path, on_commit=act) as run:
        run.save(4, {"w": 4})
    assert (calls.count(1), calls[-1]) == (2, 4)
