"""The door to runs: what a save does and says, what is refused, what waits, and where errors come out."""

from __future__ import annotations

import datetime
import errno
import json
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treering as tr
from tests import faults
from tests.folders import names
from tests.on_disk import step_path
from tests.system_calls import CommitGate, commit_gate, refuse_removals
from treering.errors import (
    ClosedError,
    ExistsError,
    NotFoundError,
    StepsNotSavedWarning,
    StoreError,
    TimedOutError,
    UnsupportedError,
)

__all__ = ["commit_gate"]

TREE = {"w": np.arange(3.0), "step": 0}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tr.Run]:
    with tr.Run(tmp_path / "run") as opened:
        yield opened


def wait_for_the_end(run: tr.Run) -> None:
    """Wait for the end of what is being saved without asking how it ended: saves are written one after the other."""
    tr.save_async(run.path.with_name("later.msgpack"), 1, overwrite=True).result(60)


# ------------------------------------------------------------------------------------------------------------- saving


def test_a_new_run_makes_nothing(tmp_path: Path) -> None:
    run = tr.Run(tmp_path / "deep" / "run", keep=tr.KeepLast(1))
    assert (run.steps(), run.latest(), run.best("loss"), run.gc()) == ([], None, None, [])
    with pytest.raises(NotFoundError, match="no step yet"):
        run.load()
    run.wait()
    run.close()
    assert names(tmp_path) == []


def test_a_step_is_a_checkpoint_that_says_what_it_is(run: tr.Run) -> None:
    before = datetime.datetime.now(datetime.UTC)
    saved = run.save(1200, TREE, metrics={"loss": 0.5, "worst": math.inf}, metadata={"git": "3f2c1ab"})
    assert saved
    assert (saved.step, saved.temporary) == (1200, False)
    saved.result(60)
    assert saved.saved
    step = run.path / "step_00001200"
    assert tr.load(step)["w"].tolist() == [0.0, 1.0, 2.0]
    with tr.open(step) as checkpoint:
        note = dict(checkpoint.metadata["treering"])
        assert checkpoint.metadata["git"] == "3f2c1ab"
    assert before <= datetime.datetime.fromisoformat(note.pop("saved")) <= datetime.datetime.now(datetime.UTC)
    assert note == {"step": 1200, "metrics": {"loss": 0.5, "worst": "inf"}, "temporary": False, "branch": None}
    document = json.loads((run.path / "run.json").read_bytes())
    assert [(one["step"], one["seconds"] > 0) for one in document["steps"]] == [(1200, True)]


def test_a_save_that_is_only_begun_is_not_saved(run: tr.Run, commit_gate: CommitGate) -> None:
    save = run.save(1, {"w": np.zeros(1000)})
    assert (bool(save), save.saved) == (True, False)
    commit_gate.opened.set()
    save.result(60)
    assert (bool(save), save.saved) == (True, True)
    commit_gate.error = OSError(errno.ENOSPC, "no room")
    failed = run.save(2, {"w": np.zeros(1000)})
    assert failed.pending is not None
    assert isinstance(failed.pending.exception(60), StoreError)
    assert (bool(failed), failed.saved) == (True, False)


def test_to_ask_whether_it_is_saved_takes_no_error_away(run: tr.Run, commit_gate: CommitGate) -> None:
    commit_gate.error = OSError(errno.ENOSPC, "no room")
    commit_gate.opened.set()
    failed = run.save(2, {"w": np.zeros(1000)})
    assert failed.pending is not None
    while not failed.pending.done():
        assert not failed.saved
    assert not failed.saved
    with pytest.raises(StoreError, match="no room"):
        run.wait()


def test_what_changes_right_after_a_save_is_not_saved(run: tr.Run, commit_gate: CommitGate) -> None:
    own = np.zeros(1000)
    given = jnp.arange(1000.0)
    run.save(1, {"own": own, "given": given})
    own += 7
    jax.jit(lambda x: x + 1, donate_argnums=0)(given).block_until_ready()
    commit_gate.opened.set()
    run.wait(60)
    loaded = run.load(1)
    assert not loaded["own"].any()
    assert np.asarray(loaded["given"]).tolist() == list(range(1000))


def test_save_every_says_which_step_is_next(tmp_path: Path) -> None:
    with tr.Run(tmp_path / "run", save_every=tr.SaveEvery(steps=10)) as run:
        said = {step: run.save(step, TREE) for step in range(1, 26)}
        assert [step for step, saved in said.items() if saved] == [10, 20]
        assert said[25].pending is None
        assert "the next is 30" in said[25].reason
        said[25].result()
        forced = run.save(25, TREE, force=True)
        assert (bool(forced), forced.reason) == (True, "force=True")
    assert run.steps() == [10, 20, 25]


def test_a_resumed_run_counts_from_its_latest_step(tmp_path: Path) -> None:
    with tr.Run(tmp_path / "run") as run:
        run.save(9, TREE)
    with tr.Run(tmp_path / "run", save_every=tr.SaveEvery(steps=10)) as run:
        # Step 10 was not offered since step 9 was saved.
        assert run.save(11, TREE)
        assert not run.save(12, TREE)
        assert run.save(12, TREE, force=True)


def test_old_steps_go_when_a_new_one_is_there(tmp_path: Path) -> None:
    keep = tr.KeepLast(2) | tr.KeepBest("loss") | tr.KeepEvery(steps=4)
    with tr.Run(tmp_path / "run", keep=keep) as run:
        for step, loss in enumerate([0.9, 0.2, 0.5, 0.4, 0.6, 0.7, 0.8], start=1):
            run.save(step, TREE, metrics={"loss": loss})
        run.wait()
        assert run.steps() == [2, 4, 6, 7]
        assert names(run.path) == ["run.json", *(f"step_{step:08d}" for step in (2, 4, 6, 7))]
        assert (run.best("loss"), run.best("loss", "max")) == (2, 7)
        assert run.metrics(6) == {"loss": 0.7}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "value", [1, 1.0, True, np.float32(1), np.int64(1), np.ones(()), jnp.ones(()), jnp.ones((), "bfloat16")]
)
def test_metrics_are_numbers_of_any_make(run: tr.Run, value: Any) -> None:
    run.save(1, TREE, metrics={"m": value}).result(60)
    found = run.metrics(1)
    assert (found, type(found["m"])) == ({"m": 1.0}, float)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_metrics_that_json_has_no_number_for(run: tr.Run, text: str) -> None:
    run.save(1, TREE, metrics={"m": float(text)}).result(60)
    assert str(run.metrics(1)["m"]) == text
    assert text == "nan" or run.best("m") == 1


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"metrics": {"loss": "low"}}, "the metric 'loss' is 'low'"),
        ({"metrics": {"loss": np.ones(2)}}, "metrics are numbers"),
        ({"metrics": {"loss": 1j}}, "metrics are numbers"),
        ({"metrics": {"loss": np.complex64(1)}}, "metrics are numbers"),
        ({"metrics": {"loss": np.str_("1.5")}}, "metrics are numbers"),
        ({"metrics": {"loss": np.zeros((), [("a", "f4")])}}, "is not a number"),
        ({"metrics": {"loss": 10**400}}, "is not a number"),
        ({"metrics": {3: 0.5}}, "names are str"),
        ({"metrics": [0.5]}, "metrics is a list"),
        ({"metadata": {"treering": 1}}, "must not have the member 'treering'"),
        ({"metadata": {"f": abs}}, "metadata"),
        ({"metadata": "text"}, "metadata is a str"),
        ({"step": -1}, "-1 is not a step"),
        ({"step": 1.0}, "1.0 is not a step"),
        ({"step": True}, "True is not a step"),
        ({"step": "1"}, "'1' is not a step"),
        ({"step": 2**63}, r"is not a step; steps are ints from 0 to 2\*\*63 - 1"),
        ({"step": TREE}, r"a dict is not a step; the step is the first argument: run\.save\(step, tree\)"),
        ({"tree": {"x": object()}}, "x"),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once(run: tr.Run, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        run.save(**{"step": 1, "tree": TREE, **arguments})
    run.wait()
    assert not run.path.exists()


@pytest.mark.parametrize("step", [np.int64(7), jnp.asarray(7), np.asarray(7)])
def test_steps_are_ints_of_any_make(run: tr.Run, step: Any) -> None:
    assert type(run.save(step, TREE).step) is int
    assert run.load(step)["step"] == 0
    assert run.metrics(step) == {}


@pytest.mark.parametrize("arguments", [{"keep": 3}, {"save_every": 100}, {"keep": "KeepLast(3)"}, {"timeout": 0}])
def test_what_a_run_cannot_be_made_with(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError):
        tr.Run(tmp_path / "run", **arguments)


def test_the_folder_of_the_program_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tr.Run("run/")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with run:
        run.save(1, TREE)
    assert run.steps() == [1]
    assert names(tmp_path / "elsewhere") == []


# --------------------------------------------------------------------------------------------------------- their order


def test_a_step_that_is_there_is_an_error(run: tr.Run) -> None:
    run.save(1, TREE).result(60)
    with pytest.raises(ExistsError, match=r"step 1 of the run .* is there already; a loop .* begins at 2;"):
        run.save(1, {"w": 2})
    assert run.load(1)["step"] == 0


def test_a_step_that_is_being_saved_is_an_error_once_it_is_there(run: tr.Run, commit_gate: CommitGate) -> None:
    commit_gate.opened.set()
    run.save(1, TREE)
    with pytest.raises(ExistsError, match="is there already"):
        run.save(1, TREE)


def test_a_step_whose_save_fails_is_not_there(run: tr.Run, commit_gate: CommitGate) -> None:
    commit_gate.error = OSError(errno.ENOSPC, "no room")
    commit_gate.opened.set()
    run.save(1, TREE)
    with pytest.raises(StoreError, match="no room"):
        run.save(1, TREE)
    commit_gate.error = None
    run.save(1, TREE)


@pytest.mark.parametrize("again", [False, True])
def test_an_older_step_is_an_error_that_names_the_latest(run: tr.Run, again: bool) -> None:
    run.save(10, TREE)
    run.save(30, TREE)
    if again:  # also in a program that has not saved yet
        run.wait(60)
    other = tr.Run(run.path) if again else run
    with pytest.raises(ExistsError, match=r"step 20 .* older than its latest step, 30; run.branch\(step, path\)"):
        other.save(20, TREE)
    run.wait(60)
    assert run.steps() == [10, 30]


def test_what_others_saved_meanwhile_counts(run: tr.Run) -> None:
    run.save(10, TREE)
    tr.Run(run.path).save(30, TREE)
    with pytest.raises(ExistsError, match="older than its latest step, 30"):
        run.save(20, TREE)
    # A folder without an index is no step.
    (run.path / "step_00000050").mkdir()
    run.save(40, TREE).result(60)
    assert run.steps() == [10, 30, 40]


def test_overwriting_goes_on_from_an_older_step(run: tr.Run) -> None:
    for step in (10, 20, 30, 40):
        run.save(step, TREE | {"step": step})
    saved = run.save(20, TREE | {"step": 21}, rollback=True)
    assert saved.reason.endswith("; it replaces step 20; it removes the later steps 30 and 40")
    run.save(30, TREE | {"step": 31})
    run.wait(60)
    assert run.steps() == [10, 20, 30]
    assert [run.load(step)["step"] for step in (10, 20, 30)] == [10, 21, 31]


def test_overwriting_where_no_such_step_was(run: tr.Run) -> None:
    for step in (10, 30):
        run.save(step, TREE)
    assert run.save(20, TREE, rollback=True).reason.endswith("; it removes the later step 30")
    run.wait(60)
    assert run.steps() == [10, 20]
    assert run.save(40, TREE, rollback=True).reason == "no save_every: each step is saved"


def test_the_later_steps_stay_until_the_older_one_is_there(run: tr.Run, commit_gate: CommitGate) -> None:
    commit_gate.opened.set()
    for step in (10, 20):
        run.save(step, TREE | {"step": step})
    run.wait(60)
    commit_gate.error = OSError(errno.ENOSPC, "no room")
    run.save(10, TREE, rollback=True)
    with pytest.raises(StoreError, match="no room"):
        run.wait(60)
    assert run.steps() == [10, 20]
    assert [run.load(step)["step"] for step in (10, 20)] == [10, 20]


def test_a_step_after_an_overwrite_that_failed_is_older_than_what_is_there(
    run: tr.Run, commit_gate: CommitGate
) -> None:
    commit_gate.opened.set()
    for step in (10, 20):
        run.save(step, TREE)
    run.wait(60)
    commit_gate.error = OSError(errno.ENOSPC, "no room")
    run.save(10, TREE, rollback=True)
    with pytest.raises(StoreError, match="no room"):
        run.save(11, TREE)
    commit_gate.error = None
    with pytest.raises(ExistsError, match="older than its latest step, 20"):
        run.save(11, TREE)
    run.save(10, TREE, rollback=True)
    run.save(11, TREE)
    run.wait(60)
    assert run.steps() == [10, 11]


def test_a_step_that_failed_can_be_saved_again(run: tr.Run, commit_gate: CommitGate) -> None:
    commit_gate.error = OSError(errno.ENOSPC, "no room")
    saved = run.save(1, TREE)
    commit_gate.opened.set()
    with pytest.raises(StoreError, match="no room"):
        saved.result(60)
    commit_gate.error = None
    run.save(1, TREE).result(60)
    assert run.steps() == [1]


def test_a_file_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    run = tr.Run(tmp_path / "run")
    for ask in (run.steps, run.load, lambda: run.save(1, TREE)):
        with pytest.raises(StoreError):
            ask()
    assert (tmp_path / "run").read_text() == "mine"


def test_a_folder_of_a_users_is_no_step(run: tr.Run) -> None:
    folder = run.path / "step_00000001"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    assert run.steps() == []
    with pytest.raises(ExistsError):
        run.save(1, TREE).result(60)
    assert names(folder) == ["notes.txt"]


# -------------------------------------------------------------------------------------- where errors and waits come out


def test_an_error_that_nobody_asked_for_is_raised_by_the_next_save(run: tr.Run, commit_gate: CommitGate) -> None:
    commit_gate.error = OSError(errno.ENOSPC, "no room")
    commit_gate.opened.set()
    run.save(1, TREE)
    wait_for_the_end(run)
    with pytest.raises(StoreError, match=r"the earlier save to .*step_00000001' failed: .*no room"):
        run.save(2, TREE)
    commit_gate.error = None
    run.save(3, TREE)
    run.wait(60)
    assert run.steps() == [3]


def test_an_error_is_raised_also_where_the_next_step_is_not_saved(tmp_path: Path, commit_gate: CommitGate) -> None:
    commit_gate.error = OSError(errno.ENOSPC, "no room")
    commit_gate.opened.set()
    run = tr.Run(tmp_path / "run", save_every=tr.SaveEvery(steps=10))
    run.save(10, TREE)
    wait_for_the_end(run)
    with pytest.raises(StoreError, match="no room"):
        run.save(11, TREE)
    commit_gate.error = None
    assert run.save(12, TREE).reason == "SaveEvery(steps=10): 10 was not saved"  # which is made up for
    assert not run.save(13, TREE)
    run.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ask", ["wait", "close", "load", "load one", "load_or_init", "gc", "branch"])
def test_an_error_is_raised_by_whatever_comes_next(tmp_path: Path, commit_gate: CommitGate, ask: str) -> None:
    commit_gate.opened.set()
    run = tr.Run(tmp_path / "run")
    run.save(1, TREE).result(60)
    commit_gate.error = OSError(errno.ENOSPC, "no room")
    run.save(2, TREE)
    asks: dict[str, Callable[[], object]] = {
        "wait": run.wait,
        "close": run.close,
        "load": run.load,
        "load one": lambda: run.load(2),
        "load_or_init": lambda: run.load_or_init(lambda: {"w": jnp.zeros(3), "step": 0}),
        "gc": lambda: run.gc(dry_run=False),
        "branch": lambda: run.branch(1, tmp_path / "other"),
    }
    with pytest.raises(StoreError, match="no room"):
        asks[ask]()
    assert not (tmp_path / "other").exists()
    run.wait()  # who was told is not told again


def test_what_fails_after_the_commit_is_told_and_the_step_stays(run: tr.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save(0, TREE).result(60)
    run = tr.Run(run.path, keep=tr.KeepLast(1))
    refuse_removals(monkeypatch)
    run.save(1, TREE)
    with pytest.raises(
        StoreError, match=r"step_00000001' is committed; a later part of it failed: .*the program is gone"
    ):
        run.wait(60)
    assert run.steps() == [0, 1]


def test_the_rest_is_done_after_the_commit_and_only_then(
    run: tr.Run, commit_gate: CommitGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_gate.opened.set()
    run.save(0, TREE).result(60)
    run = tr.Run(run.path, keep=tr.KeepLast(1))
    commit_gate.opened.clear()
    seen: list[Any] = []

    def watched(name: Any, new: Any, **options: Any) -> None:
        if os.fspath(new).endswith(".removed"):
            assert saved.pending is not None
            step = tr.load(step_path(run.path, 1), only="step")["step"]
            seen.append((step, threading.current_thread().name, saved.pending.cancel()))

    faults.before(monkeypatch, os, "replace", watched)
    saved = run.save(1, TREE)
    commit_gate.opened.set()
    run.wait(60)
    assert seen == [(0, "treering-saves", False)]
    commit_gate.error = OSError(errno.ENOSPC, "no room")
    run.save(2, TREE)
    with pytest.raises(StoreError, match="no room"):
        run.wait(60)
    assert len(seen) == 1
    assert run.steps() == [1]


def test_waiting_has_an_end(run: tr.Run, commit_gate: CommitGate) -> None:
    run.save(1, TREE)
    with pytest.raises(TimedOutError, match="not done"):
        run.wait(0.05)
    commit_gate.opened.set()
    run.wait(60)
    assert run.steps() == [1]


def test_a_block_waits_at_its_end(tmp_path: Path, commit_gate: CommitGate) -> None:
    with tr.Run(tmp_path / "run") as run:
        run.save(1, TREE)
        assert commit_gate.reached.wait(60)
        assert run.steps() == []
        commit_gate.opened.set()
    assert run.steps() == [1]
    with pytest.raises(ValueError, match="was closed; save inside its `with` block"):
        run.save(2, TREE)
    before = signal.getsignal(signal.SIGUSR2)
    with pytest.raises(ClosedError, match="was closed"):
        run.save_on_signal(signal.SIGUSR2)  # no save would come that notices it
    assert signal.getsignal(signal.SIGUSR2) == before
    assert run.load(1)["step"] == 0
    run.close()


def test_a_block_raises_what_failed(tmp_path: Path, commit_gate: CommitGate) -> None:
    commit_gate.error = OSError(errno.ENOSPC, "no room")
    commit_gate.opened.set()
    with pytest.raises(StoreError, match="no room"), tr.Run(tmp_path / "run") as run:
        run.save(1, TREE)


def test_a_block_that_ends_with_an_error_waits_and_lets_it_pass(tmp_path: Path, commit_gate: CommitGate) -> None:
    def fails(step: int) -> None:
        with tr.Run(tmp_path / "run") as run:
            run.save(step, TREE)
            raise KeyError("mine")

    commit_gate.opened.set()
    with pytest.raises(KeyError) as good:
        fails(1)
    assert tr.Run(tmp_path / "run").steps() == [1]
    assert not hasattr(good.value, "__notes__")
    commit_gate.error = OSError(errno.ENOSPC, "no room")
    with pytest.raises(KeyError) as bad:
        fails(2)
    assert "no room" in "".join(bad.value.__notes__)


# ------------------------------------------------------------------------------------------------------- keeping order


def test_gc_tells_first_and_removes_when_told_to(tmp_path: Path) -> None:
    with tr.Run(tmp_path / "run") as run:
        for step in (1, 2, 3):
            run.save(step, TREE)
    (run.path / "step_00000001" / "notes.txt").write_text("mine")
    last = tr.Run(run.path, keep=tr.KeepLast(1))
    plan = last.gc()
    assert [(verdict.step, verdict.kept) for verdict in plan] == [(1, False), (2, False), (3, True)]
    assert run.steps() == [1, 2, 3]
    assert last.gc(dry_run=False) == plan
    assert run.steps() == [3]
    assert names(run.path) == ["run.json", "step_00000001", "step_00000003"]
    assert names(run.path / "step_00000001") == ["notes.txt"]


def test_a_branch_is_a_run_of_its_own(tmp_path: Path) -> None:
    with tr.Run(tmp_path / "a", keep=tr.KeepLast(5), save_every=tr.SaveEvery(steps=1)) as run:
        for step in (1, 2, 3):
            run.save(step, TREE | {"step": step}, metrics={"loss": step})
        other = run.branch(2, tmp_path / "b")  # of a step that may be in flight
        assert (other.keep, other.save_every) == (run.keep, run.save_every)
        with other:
            other.save(3, TREE | {"step": 33})
        assert (run.steps(), other.steps()) == ([1, 2, 3], [2, 3])
        assert (run.load(3)["step"], other.load(3)["step"], other.metrics(2)) == (3, 33, {"loss": 2.0})
        assert run.branch(2, tmp_path / "c", keep=tr.KeepLast(1)).keep == tr.KeepLast(1)
        with pytest.raises(ExistsError):
            run.branch(1, tmp_path / "b")
        with pytest.raises(NotFoundError, match="it has steps 1, 2 and 3"):
            run.branch(7, tmp_path / "d")
        assert not (tmp_path / "d").exists()


def test_a_run_shows_itself(tmp_path: Path) -> None:
    with tr.Run(tmp_path / "run", keep=tr.KeepLast(2), save_every=tr.SaveEvery(steps=1)) as run:
        run.save(1, TREE, metrics={"a<b": 0.5})
    assert repr(run) == f"Run({str(tmp_path / 'run')!r}, keep=KeepLast(2), save_every=SaveEvery(steps=1))"
    assert "keep: KeepLast(2)" in str(run)
    assert "a<b" in str(run)
    shown = run._repr_html_()
    assert "a&lt;b" in shown or "print(run) asks the bucket for its steps" in shown
    assert "keep: KeepLast(2)\n" in str(tr.Run(run.path))
    assert "keep: every step\n" in str(tr.Run(run.path, save_every=tr.SaveEvery(steps=5)))  # that of this program


# ------------------------------------------------------------------------------------------------------------- signals


@pytest.fixture
def came(tmp_path: Path) -> Iterator[list[list[int]]]:
    """What steps were there each time that the program's own handler of SIGUSR1 was called."""
    seen: list[list[int]] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(tr.Run(tmp_path / "run").steps()))
    yield seen
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_has_its_way_when_the_step_is_durable(tmp_path: Path, came: list[list[int]]) -> None:
    with tr.Run(tmp_path / "run", save_every=tr.SaveEvery(steps=100)) as run:
        run.save_on_signal(signal.SIGUSR1)
        assert not run.save(1, TREE)
        signal.raise_signal(signal.SIGUSR1)
        assert came == []
        saved = run.save(2, TREE)
        assert (saved.saved, saved.reason) == (True, "SIGUSR1 came")
        assert came == [[2]]
        assert not run.save(3, TREE)
        signal.raise_signal(signal.SIGUSR1)
        assert came == [[2], [2]]
        run.save(4, TREE, force=True)


def test_a_signal_is_not_lost_where_its_save_fails(
    tmp_path: Path, came: list[list[int]], commit_gate: CommitGate
) -> None:
    commit_gate.error = OSError(errno.ENOSPC, "no room")
    commit_gate.opened.set()
    with tr.Run(tmp_path / "run", save_every=tr.SaveEvery(steps=100)) as run:
        run.save_on_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(StoreError, match="no room"):
            run.save(1, TREE)
        assert came == []
        commit_gate.error = None
        assert run.save(2, TREE)
        assert came == [[2]]


def test_a_signal_that_met_no_save_has_its_way_at_the_end(tmp_path: Path, came: list[list[int]]) -> None:
    with tr.Run(tmp_path / "run") as run:
        run.save_on_signal(signal.SIGUSR1)
        run.save(1, TREE)
        signal.raise_signal(signal.SIGUSR1)
        assert came == []
    assert came == [[1]]


def _train(path: Path, *, last: bool = False, fails: bool = False) -> None:
    with tr.Run(path, save_every=tr.SaveEvery(steps=10)) as run:
        for step in range(1, 27):
            run.save(step, {"w": 1.5}, force=last and step == 26)
        if fails:
            raise RuntimeError("mine")


def test_a_tail_that_is_not_saved_is_told_at_the_end(tmp_path: Path) -> None:
    with pytest.warns(StepsNotSavedWarning, match=r"21 to 26; run\.save\(26, tree, force=True\)"):
        _train(tmp_path / "a")
    _train(tmp_path / "b", last=True)
    assert tr.Run(tmp_path / "b").latest() == 26
    with pytest.raises(RuntimeError, match="mine"):
        _train(tmp_path / "c", fails=True)


@pytest.mark.parametrize("name", ["r.safetensors", "r.msgpack", "r.MSGPACK", "r.npz", "r.gz"])
def test_a_run_does_not_begin_under_the_name_of_a_file(tmp_path: Path, name: str) -> None:
    with tr.Run(tmp_path / "run") as run:
        run.save(1, {"w": 1.5}).result()
        for refused in (lambda: tr.Run(tmp_path / name).save(1, {"w": 1.5}), lambda: run.branch(1, tmp_path / name)):
            with pytest.raises(UnsupportedError, match=r"has the name of a \.\w+ file, and a run is a folder"):
                refused()
    assert not (tmp_path / name).exists()
    run.path.rename(tmp_path / name)  # as versions of before made
    with tr.Run(tmp_path / name) as there:
        assert there.load() == {"w": 1.5}
        there.save(2, {"w": 2.5})
    assert tr.load(tmp_path / name) == {"w": 2.5}
