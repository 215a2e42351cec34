import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering
from tests.checkpoint.in_background import PATIENCE, gate
from treering._background import saves
from treering._background.save_job import SaveJob, SaveStage
from treering.checkpoint import save_async
from treering.errors import Cancelled, Exists, Timeout, TreeringError

FORMS = ("ckpt", "tree.msgpack", "tree.safetensors")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    writer = saves.writer()
    writer.wait(None, PATIENCE)
    assert writer.take_failed() == []


def flight(**more: Any) -> SaveJob:
    asked: dict[str, Any] = {"shown": "x", "run": None, "timeout": 60.0, "nbytes": 0}
    return SaveJob(Path("x"), **{**asked, **more})


def test_a_save_that_goes_well(tmp_path: Path) -> None:
    with gate() as closed:
        pending = save_async(tmp_path / "x", {"x": np.zeros(3)}, progress=closed)
        assert closed.reached.wait(PATIENCE)
        assert not pending.done()
        assert repr(pending) == f"<PendingSave '{tmp_path / 'x'}': writing>"
        for wait in (pending.result, pending.exception):
            with pytest.raises(Timeout, match=r"is not done within 0\.05 s; it goes on"):
                wait(0.05)
        closed.open()
        pending.result(PATIENCE)
    assert pending.done()
    assert pending.exception() is None
    assert repr(pending) == f"<PendingSave '{tmp_path / 'x'}': saved>"
    assert pending.cancel() is False
    pending.result()


def test_a_save_that_fails(tmp_path: Path) -> None:
    treering.save(tmp_path / "x", {"x": 1})
    pending = save_async(tmp_path / "x", {"x": 2})
    assert isinstance(pending.exception(PATIENCE), Exists)
    assert "failed: Exists(" in repr(pending)
    assert pending.cancel() is False
    with pytest.raises(Exists):
        pending.result()


# ---------------------------------------------------------------------------------------------------------- called off


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("there", [False, True])
def test_a_save_that_is_called_off_while_it_waits(tmp_path: Path, form: str, *, there: bool) -> None:
    path = tmp_path / form
    if there:
        treering.save(path, {"x": np.zeros(3)})
    with gate() as closed:
        first = save_async(tmp_path / "first", {"x": np.zeros(3)}, progress=closed)
        pending = save_async(path, {"x": np.ones(3)}, overwrite=True)
        assert pending.cancel()
        assert repr(pending).endswith(": cancelled>")
    with pytest.raises(Cancelled, match=f"the save to '{path}' was cancelled; nothing changed there"):
        pending.result(PATIENCE)
    assert pending.cancel()
    first.result(PATIENCE)
    if there:
        np.testing.assert_array_equal(treering.load(path)["x"], np.zeros(3))
    else:
        assert not path.exists()


@pytest.mark.parametrize("form", ["ckpt", "tree.safetensors"])
def test_a_save_that_is_called_off_while_it_is_written(tmp_path: Path, form: str) -> None:
    path = tmp_path / form
    treering.save(path, {"x": np.zeros(3)})
    with gate() as closed:
        pending = save_async(path, {"x": np.ones(3)}, overwrite=True, progress=closed)
        assert closed.reached.wait(PATIENCE)
        assert pending.cancel()
    assert isinstance(pending.exception(PATIENCE), Cancelled)
    np.testing.assert_array_equal(treering.load(path)["x"], np.zeros(3))
    before = {entry.name for entry in (path if path.is_dir() else tmp_path).iterdir()}
    treering.save(path, {"x": np.zeros(3)}, overwrite=True)
    after = {entry.name for entry in (path if path.is_dir() else tmp_path).iterdir()}
    assert len(before) == len(after)


def test_a_commit_cannot_be_called_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from treering._checkpoint.transaction import CheckpointFolder

    reached, go_on = threading.Event(), threading.Event()
    commit = CheckpointFolder.commit

    def slowly(self: CheckpointFolder, index: bytes) -> None:
        reached.set()
        assert go_on.wait(PATIENCE)
        commit(self, index)

    monkeypatch.setattr(CheckpointFolder, "commit", slowly)
    pending = save_async(tmp_path / "x", {"x": 1})
    try:
        assert reached.wait(PATIENCE)
        assert repr(pending).endswith(": committing>")
        assert pending.cancel() is False
    finally:
        go_on.set()
    pending.result(PATIENCE)
    assert treering.load(tmp_path / "x") == {"x": 1}


def test_whoever_calls_off_knows_and_is_not_told_again(tmp_path: Path) -> None:
    with gate() as closed:
        save_async(tmp_path / "first", {"x": np.zeros(3)}, progress=closed)
        assert save_async(tmp_path / "x", {"x": 1}).cancel()
    saves.wait_for(tmp_path / "x", PATIENCE)
    save_async(tmp_path / "x", {"x": 2}).result(PATIENCE)


# -------------------------------------------------------------------------------------------------- a flight by itself


def test_it_is_called_off_once() -> None:
    one = flight()
    one.begin()
    one.move()
    assert one.cancel()
    with pytest.raises(Cancelled):
        one.pause(0)
    one.pause(0)  # the steps that tell others of it
    one.progress(None)(1, 2)
    with pytest.raises(Cancelled):
        one.claim()
    one.end(Cancelled("x"))
    assert one.told


def test_what_is_claimed_is_not_called_off() -> None:
    one = flight()
    one.begin()
    one.claim()
    assert one.stage is SaveStage.COMMITTING
    assert not one.cancel()
    one.move()
    one.end(None)
    assert not one.cancel()


def test_another_error_than_the_cancel_is_told() -> None:
    one = flight()
    one.begin()
    assert one.cancel()
    one.end(OSError("full"))
    assert not one.told


def test_progress_puts_the_end_off() -> None:
    one = flight(timeout=0.0)
    assert one.stalled()
    said: list[tuple[int, int]] = []
    other = flight(timeout=60.0)
    other.moved_at -= 100
    assert other.stalled()
    other.progress(lambda done, total: said.append((done, total)))(1, 2)
    assert not other.stalled()
    assert said == [(1, 2)]


# --------------------------------------------------------------------------------------------------------------- forks

FORK = """
import os, sys, threading
import numpy as np
import treering
from treering._background import saves
from treering.checkpoint import save_async
from treering.errors import TreeringError

folder = sys.argv[1]
reached, go_on = threading.Event(), threading.Event()

def progress(done, total):
    reached.set()
    assert go_on.wait(60)

treering.save(folder + "/failed", {"x": 1})
save_async(folder + "/failed", {"x": 1})
saves.wait_for(folder + "/failed", 60)
pending = save_async(folder + "/parent", {"x": np.zeros(3)}, progress=progress)
assert reached.wait(60)
to_child, from_parent = os.pipe()
pid = os.fork()
if pid == 0:
    # Neither the saves of the parent are here nor their errors.
    assert saves.in_flight(folder + "/parent") == []
    assert treering.load(folder + "/failed") == {"x": 1}
    for call in (pending.result, pending.exception, pending.done, pending.cancel):
        try:
            call()
        except TreeringError as error:
            assert "belongs to process" in str(error), error
        else:
            raise AssertionError(call)
    save_async(folder + "/child", {"x": 2}).result(60)
    save_async(folder + "/end of child", {"x": 3})
    os.read(to_child, 1)  # this process holds copies of all descriptors until then
    sys.exit(0)
try:
    go_on.set()
    pending.result(60)
    # The lock of the folder is free, though the child has the descriptor that was locked.
    treering.save(folder + "/parent", {"x": 4}, overwrite=True)
    try:
        saves.raise_unreported(folder + "/failed")
    except FileExistsError:
        pass
    else:
        raise AssertionError("the parent was not told")
finally:
    os.write(from_parent, b"x")
    _, status = os.waitpid(pid, 0)
assert status == 0, status
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no forks")
def test_a_fork_has_nothing_to_do_with_the_saves_of_its_parent(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK, str(tmp_path)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert treering.load(tmp_path / "parent") == {"x": 4}
    assert treering.load(tmp_path / "child") == {"x": 2}
    assert treering.load(tmp_path / "end of child") == {"x": 3}


def test_the_owner_is_asked_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    one = flight()
    monkeypatch.setattr(os, "getpid", lambda: 0)
    with pytest.raises(TreeringError, match="belongs to process"):
        one.cancel()
