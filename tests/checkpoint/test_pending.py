import math
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import treering
from tests.checkpoint.in_background import PATIENCE, Elsewhere, gate, nothing_left
from tests.system_calls import CommitGate, commit_gate
from tests.warm import Programs
from treering.checkpoint import save_async
from treering.errors import CancelledError, ExistsError, StoreError, TimedOutError, TreeringError, UnsupportedError

__all__ = ["commit_gate", "nothing_left"]

FORMS = ("ckpt", "tree.msgpack", "tree.safetensors")


def test_a_save_that_goes_well(tmp_path: Path) -> None:
    with gate() as closed:
        pending = save_async(tmp_path / "x", {"x": np.zeros(3)}, progress=closed)
        assert closed.reached.wait(PATIENCE)
        assert not pending.done()
        assert repr(pending) == f"<PendingSave '{tmp_path / 'x'}': writing>"
        for wait in (pending.result, pending.exception):
            with pytest.raises(TimedOutError, match=r"is not done within 0\.05 s; it goes on"):
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
    assert isinstance(pending.exception(PATIENCE), ExistsError)
    assert "failed: ExistsError(" in repr(pending)
    assert pending.cancel() is False
    with pytest.raises(ExistsError):
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
    with pytest.raises(CancelledError, match=f"the save to '{path}' was cancelled; nothing changed there"):
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
    assert isinstance(pending.exception(PATIENCE), CancelledError)
    np.testing.assert_array_equal(treering.load(path)["x"], np.zeros(3))
    before = {entry.name for entry in (path if path.is_dir() else tmp_path).iterdir()}
    treering.save(path, {"x": np.zeros(3)}, overwrite=True)
    after = {entry.name for entry in (path if path.is_dir() else tmp_path).iterdir()}
    assert len(before) == len(after)


def test_a_commit_cannot_be_called_off(tmp_path: Path, commit_gate: CommitGate) -> None:
    pending = save_async(tmp_path / "x", {"x": 1})
    assert commit_gate.reached.wait(PATIENCE)
    assert repr(pending).endswith(": committing>")
    assert pending.cancel() is False
    commit_gate.opened.set()
    pending.result(PATIENCE)
    assert pending.cancel() is False
    assert treering.load(tmp_path / "x") == {"x": 1}


def test_a_save_that_is_called_off_after_its_last_byte_is_not_committed(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        told.append((done, total))
        if done == total:
            assert pending.cancel()

    with gate() as closed:
        save_async(tmp_path / "first", {"x": np.zeros(3)}, progress=closed)
        pending = save_async(tmp_path / "x", {"x": np.zeros(3)}, progress=progress)
    assert isinstance(pending.exception(PATIENCE), CancelledError)
    assert told == [(24, 24)]
    assert not (tmp_path / "x").exists()


def test_another_error_than_the_cancel_is_told(tmp_path: Path) -> None:
    def progress(done: int, total: int) -> None:
        assert pending.cancel()
        raise OSError(28, "full")

    with gate() as closed:
        save_async(tmp_path / "first", {"x": np.zeros(3)}, progress=closed)
        pending = save_async(tmp_path / "x", {"x": np.zeros(3)}, progress=progress)
    with pytest.raises(StoreError, match=r"the earlier save to .* failed: .*full"):
        treering.load(tmp_path / "x")


def test_whoever_calls_off_knows_and_is_not_told_again(tmp_path: Path) -> None:
    with gate() as closed:
        save_async(tmp_path / "first", {"x": np.zeros(3)}, progress=closed)
        assert save_async(tmp_path / "x", {"x": 1}).cancel()
    save_async(tmp_path / "x", {"x": 2}).result(PATIENCE)


# ------------------------------------------------------------------------------------------------------------ progress


def test_progress_puts_the_end_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part takes 40 of the 60 seconds after which a save that does nothing is given up."""
    clock = time.monotonic
    late = 0.0
    steps = threading.Semaphore(0), threading.Semaphore(0)

    def progress(done: int, total: int) -> None:
        nonlocal late
        steps[0].release()
        assert steps[1].acquire(timeout=PATIENCE)
        late += 40

    monkeypatch.setattr(time, "monotonic", lambda: clock() + late)
    pending = save_async(tmp_path / "x", [np.zeros(20_000) for _ in range(4)], progress=progress, timeout=60)
    for _ in range(4):
        assert steps[0].acquire(timeout=PATIENCE)
        waiting = Elsewhere(lambda: treering.load(tmp_path / "x"))
        assert waiting.is_on(0.02)
        steps[1].release()
    pending.result(PATIENCE)
    assert late == 160
    waiting.end()


# --------------------------------------------------------------------------------------------------------------- forks

FORK = """
import os, sys, threading
import numpy as np
import treering
from treering.checkpoint import save_async
from treering.errors import TreeringError

folder = sys.argv[1]
reached, go_on = threading.Event(), threading.Event()

def progress(done, total):
    reached.set()
    assert go_on.wait(60)

treering.save(folder + "/failed", {"x": 1})
save_async(folder + "/failed", {"x": 1})
save_async(folder + "/other", {"x": 1}).result(60)  # saves are written one after the other
pending = save_async(folder + "/parent", {"x": np.zeros(3)}, progress=progress)
assert reached.wait(60)
to_child, from_parent = os.pipe()
pid = os.fork()
if pid == 0:
    # Neither the saves of the parent are here, which would be waited for at the end, nor their errors.
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
        treering.load(folder + "/failed")
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
def test_a_fork_has_nothing_to_do_with_the_saves_of_its_parent(programs: Programs, tmp_path: Path) -> None:
    done = programs.run("-W", "ignore", "-c", FORK, str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert treering.load(tmp_path / "parent") == {"x": 4}
    assert treering.load(tmp_path / "child") == {"x": 2}
    assert treering.load(tmp_path / "end of child") == {"x": 3}


def test_the_owner_is_asked_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pending = save_async(tmp_path / "x", {"x": 1})
    pending.result(PATIENCE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 0)
        with pytest.raises(TreeringError, match="belongs to process"):
            pending.cancel()


def test_how_long_to_wait_is_a_number(tmp_path: Path) -> None:
    pending, run = save_async(tmp_path / "x", {"x": 1}), treering.Run(tmp_path / "run")
    loading = treering.load_async(tmp_path / "x")
    for wait in (pending.result, pending.exception, loading.result, run.wait):
        for wrong in ("5", math.nan):
            with pytest.raises(UnsupportedError, match=f"timeout is {wrong!r}, but must be a number of seconds; None"):
                wait(wrong)  # type: ignore[arg-type]
        for given in (np.float32(PATIENCE), math.inf, 1e300):
            wait(given)  # type: ignore[arg-type]
    run.close()
