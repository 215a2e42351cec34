"""A run that warns of failed saves goes on training; one that was not told to raises, as ever."""

from __future__ import annotations

import errno
import gc
import html
import os
import re
import subprocess
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import treering as tr
from tests import buckets, faults
from tests.jobs import be_process
from tests.system_calls import CommitGate, commit_gate, refuse_removals
from tests.warm import Programs
from treering.errors import (
    ExistsError,
    FormatError,
    NotDirectoryError,
    SaveFailedWarning,
    SavesFailedError,
    StoreError,
    UnsupportedError,
)

__all__ = ["commit_gate"]

TREE = {"w": np.arange(3, dtype=np.float32)}


def block(run: tr.Run, *steps: int) -> list[Path]:
    """Put a file where steps would go: their saves fail in the background."""
    run.path.mkdir(parents=True, exist_ok=True)
    places = [run.path / f"step_{step:08d}" for step in steps]
    for place in places:
        place.write_text("mine")
    return places


def end(saved: tr.run.StepSave) -> None:
    """Wait for the end of a save without asking how it ended."""
    assert saved.pending is not None
    while not saved.pending.done():
        pass


def fails(run: tr.Run, step: int) -> None:
    """Save a step in vain."""
    (place,) = block(run, step)
    end(run.save(step, TREE))
    place.unlink()


def warned(step: int, number: int = 1) -> Any:
    """Expect the one warning of a failed save."""
    in_a_row = rf" \({number} in a row\)" if number > 1 else ""
    text = rf"(?s)the save of step {step} of the run '.*' failed{in_a_row}:\s+NotDirectoryError: could not write .*"
    return pytest.warns(SaveFailedWarning, match=text)


def test_training_goes_on_and_each_failure_is_a_warning_at_the_next_call(tmp_path: Path) -> None:
    run = tr.Run(tmp_path / "run", keep=tr.KeepLast(2), on_save_error="warn")
    run.save(1, TREE)
    run.save(2, TREE)
    block(run, 3)
    end(run.save(3, TREE))
    with warned(3) as caught:
        run.save(4, TREE).result()
    (one,) = caught
    assert one.filename == __file__
    # What failed is none of the last two steps.
    assert run.steps() == [2, 4]
    assert run.status().failures == 0
    assert isinstance(run.status().last_error, NotDirectoryError)
    run.close()


def test_a_bucket_that_refuses_is_warned_of_too(monkeypatch: pytest.MonkeyPatch) -> None:
    buckets.install(monkeypatch)
    run = tr.Run("memory://failures/run", keep=tr.KeepLast(1), on_save_error="warn")
    run.save(1, TREE).result()
    with monkeypatch.context() as patch:
        faults.fail(patch, buckets.MemoryBucket, "perform", PermissionError(errno.EACCES, "the key has expired"))
        with warnings.catch_warnings(record=True, action="always") as caught:
            saved = run.save(2, TREE)
            if saved:
                end(saved)
            run.wait()
    assert [one.category for one in caught] == [SaveFailedWarning]
    assert "the key has expired" in str(caught[0].message)
    run.save(3, TREE).result()
    assert run.steps() == [3]
    run.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("call", ["wait", "close", "load", "gc", "leave", "branch", "delete", "load_or_init"])
def test_every_call_that_waits_warns(tmp_path: Path, call: str) -> None:
    run = tr.Run(tmp_path / "run", on_save_error="warn")
    run.save(1, TREE).result()
    fails(run, 2)
    calls: dict[str, Callable[[], object]] = {
        "wait": run.wait,
        "close": run.close,
        "load": run.load,
        "load_or_init": lambda: run.load_or_init(lambda: {"w": jnp.zeros(3)}),
        "gc": lambda: run.gc(dry_run=False),
        "leave": lambda: run.__exit__(None, None, None),
        "branch": lambda: run.branch(1, tmp_path / "other"),
        "delete": lambda: run.delete(1),
    }
    with warned(2) as caught:
        calls[call]()
    assert len(caught) == 1
    run.close()
    run = tr.Run(tmp_path / "run", on_save_error="warn")
    run.save(3, TREE).result()  # the end of this program has nothing to tell


def test_where_a_warning_is_an_error_each_failure_is_told(tmp_path: Path, commit_gate: CommitGate) -> None:
    commit_gate.error = OSError(errno.ENOSPC, "no room")
    run = tr.Run(tmp_path / "run", on_save_error="warn")
    for step in (1, 2):
        run.save(step, TREE)
    commit_gate.opened.set()
    told = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", SaveFailedWarning)
        for _ in range(3):
            try:
                run.wait()
            except SaveFailedWarning as error:
                told.append(re.findall(r"step (\d)", str(error))[0])
    assert told == ["1", "2"]
    commit_gate.error = None
    run.save(3, TREE).result()  # the end of this program has nothing to tell
    run.close()


def test_too_many_in_a_row_raise_with_the_last_cause_and_a_success_begins_anew(tmp_path: Path) -> None:
    run = tr.Run(tmp_path / "run", on_save_error="warn", max_failures=2)
    fails(run, 1)
    with warned(1):
        run.save(2, TREE).result()
    fails(run, 3)
    with warned(3):
        fails(run, 4)
    text = r"2 saves of the run '.*' failed in a row; the last, of step 4: NotDirectoryError.*; the newest step is 2"
    with warned(4, 2), pytest.raises(SavesFailedError, match=text) as error:
        run.save(5, TREE)
    assert isinstance(error.value.__cause__, NotDirectoryError)
    assert run.status().failures == 2
    run.save(5, TREE).result()  # it was told once
    assert (run.status().failures, run.status().step) == (0, 5)
    run.close()


def test_wait_raises_where_it_was_the_last_of_too_many(tmp_path: Path) -> None:
    run = tr.Run(tmp_path / "run", on_save_error="warn", max_failures=1)
    fails(run, 1)
    with warned(1), pytest.raises(SavesFailedError, match="nothing was saved before"):
        run.wait()
    run.close()


def test_what_fails_while_a_save_begins_is_warned_of_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tr.Run(tmp_path / "run", on_save_error="warn", max_failures=2)
    run.save(1, TREE).result()

    class Data:
        def get_state(self) -> Any:
            raise OSError(errno.EIO, "the server of the data is gone")

        def set_state(self, state: Any) -> None: ...

    with pytest.warns(SaveFailedWarning, match=r"(?s)the save of step 2 of .* failed:\s+OSError: .*server of the data"):
        saved = run.save(2, {"data": Data()})
    assert (bool(saved), saved.saved) == (False, False)
    assert saved.reason.startswith("it failed: OSError")
    with pytest.raises(OSError, match="server of the data"):
        saved.result()
    with pytest.warns(SaveFailedWarning, match=r"\(2 in a row\)"), pytest.raises(SavesFailedError):
        run.save(3, {"data": Data()})
    run.save(4, TREE).result()
    run.close()


def test_a_failed_save_holds_no_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tr.Run(tmp_path / "run", on_save_error="warn")
    array = np.zeros(1000)
    gone = weakref.ref(array)
    with monkeypatch.context() as patch:
        faults.fail(patch, os, "listdir", errno.EIO)
        faults.fail(patch, os, "scandir", errno.EIO)
        faults.fail(patch, os, "open", errno.EIO)
        with pytest.warns(SaveFailedWarning):
            run.save(1, {"w": array})
    assert run.status().failures == 1
    del array
    gc.collect()
    assert gone() is None
    run.save(2, TREE).result()
    run.close()


def test_calls_that_are_wrong_raise_all_the_same(tmp_path: Path) -> None:
    run = tr.Run(tmp_path / "run", on_save_error="warn")
    run.save(2, TREE).result()
    for step, tree, wishes in [
        (2, TREE, {}),
        (1, TREE, {}),
        (3, {"odd": object()}, {}),
        (3, TREE, {"metrics": {"loss": "text"}}),
        (-1, TREE, {}),
        ("3", TREE, {}),
    ]:
        with pytest.raises((ExistsError, UnsupportedError)):
            run.save(step, tree, **wishes)  # type: ignore[arg-type]
    assert run.status().failures == 0
    run.close()
    tr.save(tmp_path / "ckpt", TREE)
    with pytest.raises(FormatError):
        tr.Run(tmp_path / "ckpt", on_save_error="warn").save(1, TREE)


def test_arguments_without_meaning_are_refused(tmp_path: Path) -> None:
    for wishes, text in [
        ({"on_save_error": "ignore"}, 'must be "raise" or "warn"'),
        ({"max_failures": 2}, 'pass on_save_error="warn" too'),
        ({"on_save_error": "warn", "max_failures": 0}, "a number of 1 or more"),
        ({"on_save_error": "warn", "max_failures": True}, "a number of 1 or more"),
    ]:
        with pytest.raises(UnsupportedError, match=re.escape(text)):
            tr.Run(tmp_path / "run", **wishes)  # type: ignore[arg-type]


def test_without_the_option_the_next_call_raises_and_status_counts(tmp_path: Path) -> None:
    run = tr.Run(tmp_path / "run")
    fails(run, 1)
    assert run.status().failures == 1
    with pytest.raises(NotDirectoryError, match="the earlier save to"):
        run.save(2, TREE)
    run.save(2, TREE).result()
    assert run.status().failures == 0
    run.close()


def test_a_step_is_saved_also_where_what_follows_fails(tmp_path: Path) -> None:
    run = tr.Run(tmp_path / "run", keep=tr.KeepLast(1), on_save_error="warn", max_failures=1)
    run.save(1, TREE).result()
    with pytest.MonkeyPatch.context() as patch:
        refuse_removals(patch)
        end(run.save(2, TREE))
    assert (run.status().step, run.status().failures) == (2, 0)
    with pytest.warns(SaveFailedWarning, match="step 2 of the run .* is saved, but what follows a save failed"):
        run.wait()
    run.save(3, TREE).result()
    assert run.steps() == [3]
    run.close()


def test_others_of_a_job_warn_where_process_0_does_not_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follower = tr.Run(tmp_path / "run", keep=tr.KeepLast(1), on_save_error="warn")
    with tr.Run(tmp_path / "run") as run:
        follower.save(1, TREE).result()
        run.save(2, TREE)
    (tmp_path / "run" / "run.json").unlink()  # it ended before it noted what stays
    be_process(monkeypatch, 1, 2)
    with pytest.warns(SaveFailedWarning, match="process 0 has not removed step 1"):
        follower.wait(0.1)


def test_steps_that_are_tried_again_wait_until_they_are_due(tmp_path: Path) -> None:
    run = tr.Run(tmp_path / "run", on_save_error="warn", save_every=tr.SaveEvery(steps=10))
    (tmp_path / "run").write_text("a file")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        errors = [run.save(step, TREE).error for step in range(1, 25)]
    assert [step for step, error in enumerate(errors, 1) if error is not None] == [1, 10, 20]
    assert [one.category for one in caught] == [SaveFailedWarning] * 3
    (tmp_path / "run").unlink()
    run.save(30, TREE).result()
    run.close()


def test_a_signal_goes_on_after_a_last_step_that_failed(tmp_path: Path) -> None:
    import signal

    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda signum, frame: heard.append(signum))
    try:
        run = tr.Run(tmp_path / "run", on_save_error="warn")
        run.save_on_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        block(run, 1)
        with warned(1):
            run.save(1, TREE)
        assert heard == [signal.SIGUSR1]
        run.save(2, TREE).result()
        run.close()
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("how", ["status", "memory", "load"])
def test_status_says_what_is_durable(tmp_path: Path, how: str) -> None:
    path: Any = f"memory://status-{os.getpid()}/run" if how == "memory" else tmp_path / "run"
    run = tr.Run(path)
    assert str(run.status()) == "no durable step yet; no save in flight"
    run.save(7, TREE).result()
    if how == "load":
        run.close()
        run = tr.Run(path)
        run.load_or_init(lambda: {"w": jnp.zeros(3)})
    status = run.status()
    assert (status.step, status.failures, status.saves_in_flight, status.bytes_in_flight) == (7, 0, 0, 0)
    assert status.seconds is not None
    assert 0 <= status.seconds < 60
    assert re.fullmatch(r"newest durable step 7, [\d.]+ \S+ old; no save in flight", str(status))
    assert str(status) in html.unescape(status._repr_html_())
    run.close()


def test_status_counts_what_is_in_flight_and_asks_the_system_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tr.Run(tmp_path / "run")
    run.save(1, TREE).result()
    seen: list[tr.run.RunStatus] = []

    def look(done: int, total: int) -> None:
        seen.append(run.status())

    run.save(2, {"w": np.zeros(1000)}, progress=look).result()
    assert (seen[0].saves_in_flight, seen[0].step) == (1, 1)
    assert 8000 <= seen[0].bytes_in_flight < 9000
    with monkeypatch.context() as patch:
        for name in ("open", "stat", "lstat", "listdir", "scandir", "replace"):
            faults.fail(patch, os, name, AssertionError())
        assert run.status().step == 2


# ---------------------------------------------------------------------------------------------- the end of a program


def ended(programs: Programs, program: str, path: Path) -> subprocess.CompletedProcess[str]:
    head = "import os, sys, warnings, treering as tr\nrun = tr.Run(sys.argv[1], on_save_error='warn')\n"
    return programs.run("-c", head + program, str(path))


_FAILED = (
    "treering: the save to '{path}/step_00000002' failed, and no later one of its run was saved: NotDirectoryError"
)


@pytest.mark.parametrize("close", ["", "run.wait()", "run.close()", "warnings.simplefilter('ignore'); run.close()"])
def test_a_program_whose_last_save_failed_does_not_end_well(programs: Programs, tmp_path: Path, close: str) -> None:
    program = f"run.save(1, 7).result()\nopen(run.path / 'step_00000002', 'w').close()\nrun.save(2, 8)\n{close}\n"
    found = ended(programs, program, tmp_path / "run")
    assert found.returncode == 1, found.stderr
    assert found.stderr.count(_FAILED.format(path=tmp_path / "run")) == 1
    assert ("SaveFailedWarning" in found.stderr) is (close.startswith("run"))


@pytest.mark.parametrize("rest", ["run.save(3, 9)", "run.save(3, 9); run.close()"])
def test_a_program_whose_last_save_came_through_ends_well(programs: Programs, tmp_path: Path, rest: str) -> None:
    program = f"open(run.path / 'step_00000002', 'w').close()\nrun.save(2, 8).pending.exception\n{rest}\n"
    found = ended(programs, f"run.path.mkdir()\n{program}", tmp_path / "run")
    assert found.returncode == 0, found.stderr
    assert "treering:" not in found.stderr
    assert tr.Run(tmp_path / "run").steps() == [3]


def test_a_program_that_asked_for_the_error_was_told(programs: Programs, tmp_path: Path) -> None:
    program = """
run.path.mkdir()
open(run.path / 'step_00000002', 'w').close()
try:
    run.save(2, 8).result()
except tr.errors.TreeringError as error:
    print("told", flush=True)
run.close()
"""
    found = ended(programs, program, tmp_path / "run")
    assert (found.returncode, found.stdout) == (0, "told\n"), found.stderr
    assert "Warning" not in found.stderr


def test_a_full_disk_is_a_failed_save(tmp_path: Path) -> None:
    run = tr.Run(tmp_path / "run", on_save_error="warn")
    with pytest.MonkeyPatch.context() as patch:
        faults.fail(patch, os, "fsync", errno.ENOSPC)
        end(run.save(1, TREE))
    error = run.status().last_error
    assert isinstance(error, StoreError)
    assert error.errno == errno.ENOSPC
    with pytest.warns(SaveFailedWarning, match="No space left on device"):
        run.save(2, TREE).result()
    assert run.steps() == [2]
    run.close()


def test_a_save_that_could_not_begin_while_an_earlier_one_was_written_is_told_at_the_end(
    programs: Programs, tmp_path: Path
) -> None:
    script = """
import sys, threading, warnings
import treering as tr
from tests.checkpoint.in_background import commits_wait

class Broken:
    def get_state(self):
        raise OSError("the pipe burst")
    def set_state(self, state):
        pass

warnings.simplefilter("ignore")
go = threading.Event()
commits_wait(go)
run = tr.Run(sys.argv[1], on_save_error="warn")
first = run.save(10, {"w": 1.5})
assert not run.save(20, {"data": Broken()})
go.set()
run.close()
assert first.saved and run.steps() == [10] and run.status().failures == 1
"""
    done = programs.run("-c", script, str(tmp_path / "run"))
    assert done.returncode == 1
    assert re.search(r"step_00000020' failed, and no later one of its run was saved: OSError: the pipe", done.stderr)


def test_a_warning_that_is_raised_as_an_error_is_a_failure_too_for_others_of_a_job_hear_no_class(
    tmp_path: Path,
) -> None:
    class Odd:
        def get_state(self) -> Any:
            raise DeprecationWarning("this iterator is old")

        def set_state(self, state: Any) -> None: ...

    run = tr.Run(tmp_path / "run", on_save_error="warn")
    with pytest.warns(SaveFailedWarning, match="DeprecationWarning: this iterator is old"):
        run.save(1, {"data": Odd()})
    run.save(2, TREE).result()
    run.close()
