"""Going back to an earlier step: what was saved later is gone with the commit, whenever the loop dies."""

from __future__ import annotations

import errno
import itertools
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering as tr
from tests import faults
from tests.buckets import Answer, Put, Request, Status, install, no_patience
from tests.command import inside
from tests.folders import names
from tests.on_disk import LEFT_DOCUMENT, attempt_of, signed, step_path
from tests.reads import act_before_list_is_put
from tests.system_calls import refuse_removals
from treering.errors import ExistsError, FormatError, NotFoundError, StoreError
from treering.rules import KeepLast
from treering.run import Lease


def fill(path: Path) -> None:
    with tr.Run(path) as run:
        for step in (10, 20, 30, 40):
            run.save(step, {"step": step}, metrics={"loss": 1 / step})


def steps_of(path: Path) -> list[int]:
    return tr.Run(path).steps()


def write_left(path: Path, **members: Any) -> None:
    """Write a list of steps that are left behind."""
    (path / LEFT_DOCUMENT).write_bytes(signed("treering_left", json.dumps(members)[1:]))


@pytest.fixture
def cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose loop went back from step 40 to step 20, and died right after the commit."""
    path = tmp_path / "run"
    fill(path)

    with monkeypatch.context() as patch:
        refuse_removals(patch)
        with pytest.raises(StoreError, match="the program is gone"):
            tr.Run(path).save(20, {"step": 21}, rollback=True).result(60)
    assert {"step_00000030", "step_00000040", LEFT_DOCUMENT} <= set(names(path))
    return path


def test_the_latest_step_is_of_the_new_branch(cut: Path) -> None:
    run = tr.Run(cut)
    assert (run.steps(), run.latest(), run.best("loss")) == ([10, 20], 20, 10)
    assert run.load() == {"step": 21}
    assert tr.load(cut) == {"step": 21}
    step, tree = run.load_or_init(lambda: {"step": 0})
    assert (step, tree) == (20, {"step": 21})
    with pytest.raises(NotFoundError, match=r"has no step 40; it has steps 10 and 20"):
        run.load(40)
    with pytest.raises(NotFoundError, match="has no step 30"):
        run.branch(30, cut.with_name("new"))
    with pytest.raises(NotFoundError, match="has no step 30"):
        run.metrics(30)
    assert tr.verify(cut)


def test_the_command_line_knows(cut: Path) -> None:
    assert "step 30" not in inside("log", str(cut), code=0)[0]
    said = inside("doctor", str(cut), code=0)[0]
    assert "steps 30 and 40 were left behind when step 20 was saved" in said.replace("\n", " ")


@pytest.mark.parametrize("step", [25, 30, 45])
def test_the_next_save_finishes_it(cut: Path, step: int) -> None:
    with tr.Run(cut) as run:
        run.save(step, {"step": step})
    assert steps_of(cut) == [10, 20, step]
    assert set(names(cut)) == {"run.json", "step_00000010", "step_00000020", f"step_{step:08d}"}
    assert run.load(step) == {"step": step}


def test_gc_finishes_it(cut: Path) -> None:
    assert [verdict.step for verdict in tr.Run(cut).gc()] == [10, 20]
    assert LEFT_DOCUMENT in names(cut)
    tr.Run(cut, keep=KeepLast(1)).gc(dry_run=False)
    assert set(names(cut)) == {"run.json", "step_00000020"}


def test_going_back_further_finishes_it_first(cut: Path) -> None:
    with tr.Run(cut) as run:
        assert run.save(10, {"step": 11}, rollback=True).reason.endswith("it removes the later step 20")
    assert (set(names(cut)), run.load()) == ({"run.json", "step_00000010"}, {"step": 11})


def test_a_step_that_was_saved_anew_is_there(cut: Path) -> None:
    # By another program that does not know of runs.
    tr.save(step_path(cut, 40), {"step": 41}, overwrite=True)
    assert steps_of(cut) == [10, 20, 40]
    with tr.Run(cut) as run:
        run.save(50, {"step": 50})
    assert (steps_of(cut), run.load(40)) == ([10, 20, 40, 50], {"step": 41})


def test_a_list_whose_save_was_never_committed_means_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    fill(path)
    left = [{"step": step, "attempt": attempt_of(step_path(path, step))} for step in (30, 40)]
    write_left(path, step=20, mark="0" * 16, left=left)
    assert steps_of(path) == [10, 20, 30, 40]
    with tr.Run(path) as run:
        run.save(50, {"step": 50})
    assert (steps_of(path), LEFT_DOCUMENT in names(path)) == ([10, 20, 30, 40, 50], False)


def let_fail(monkeypatch: pytest.MonkeyPatch, where: str, before: Callable[[], object]) -> None:
    """Let a save of a step fail where it makes a file whose name has this part, or gives it that name."""

    def fails(path: object, *, makes: bool = True) -> bool:
        found = makes and where in Path(str(path)).name
        if found:
            before()
        return found

    error = OSError(errno.ENOSPC, "no room")
    faults.fail(
        monkeypatch, os, "open", error, when=lambda path, flags, *_, **__: fails(path, makes=bool(flags & os.O_CREAT))
    )
    for name in ("replace", "link"):
        faults.fail(monkeypatch, os, name, error, when=lambda _, new, **__: fails(new))


@pytest.mark.parametrize("where", [".treering.json.", "data-"])
def test_a_save_that_fails_takes_its_list_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    path = tmp_path / "run"
    fill(path)
    listed: list[bool] = []
    with monkeypatch.context() as patch:
        let_fail(patch, where, lambda: listed.append(LEFT_DOCUMENT in names(path)))
        with pytest.raises(StoreError, match="no room"):
            tr.Run(path).save(20, {"w": np.arange(9), "step": 21}, rollback=True).result(60)
    assert listed[0]
    assert set(names(path)) == {"run.json", *(f"step_{step:08d}" for step in (10, 20, 30, 40))}
    assert steps_of(path) == [10, 20, 30, 40]


def test_nobody_drops_the_list_of_another_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    fill(path)
    other = {"step": 10, "mark": "0" * 16, "left": [{"step": 20, "attempt": attempt_of(step_path(path, 20))}]}
    with monkeypatch.context() as patch:
        let_fail(patch, "data-", lambda: write_left(path, **other))
        with pytest.raises(StoreError, match="no room"):
            tr.Run(path).save(20, {"w": np.arange(9)}, rollback=True).result(60)
    assert json.loads((path / LEFT_DOCUMENT).read_bytes())["mark"] == "0" * 16
    assert steps_of(path) == [10, 20, 30, 40]


def test_one_that_was_not_written_to_its_end_means_nothing(cut: Path) -> None:
    document = cut / LEFT_DOCUMENT
    document.write_bytes(document.read_bytes()[:-5])
    assert steps_of(cut) == [10, 20, 30, 40]


def test_a_newer_list_is_not_passed_over(cut: Path) -> None:
    document = cut / LEFT_DOCUMENT
    document.write_bytes(b'{"treering_left": 3, "new": 1}\n')
    with pytest.raises(FormatError, match=r"run/\.run\.json\.left.* version 3"):
        steps_of(cut)


def test_a_damaged_step_is_left_behind_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    fill(path)
    index = step_path(path, 30) / "treering.json"
    index.write_bytes(b"damaged")
    refuse_removals(monkeypatch)
    with pytest.raises(StoreError):
        tr.Run(path).save(20, {"step": 21}, rollback=True).result(60)
    assert steps_of(path) == [10, 20]
    assert tr.verify(path).ok
    index.write_bytes(b"damaged in another way")
    assert steps_of(path) == [10, 20]
    monkeypatch.undo()
    tr.Run(path).gc(dry_run=False)
    assert not index.exists()


def test_the_step_that_hides_others_stays_while_they_do(cut: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        refuse_removals(patch)
        with pytest.raises(StoreError):
            tr.Run(cut, keep=KeepLast(1) | tr.retention.KeepSteps(10)).gc(dry_run=False)
    assert steps_of(cut) == [10, 20]
    with monkeypatch.context() as patch, tr.Run(cut, keep=KeepLast(1)) as run:
        refuse_removals(patch, *(attempt_of(step_path(cut, step)) for step in (30, 40)))
        with pytest.raises(StoreError):
            run.save(50, {"step": 50}).result(60)
        assert steps_of(cut) == [20, 50]  # 20 should have gone
    tr.Run(cut, keep=KeepLast(1)).gc(dry_run=False)
    assert set(names(cut)) == {"run.json", "step_00000050"}


def test_what_cannot_be_written_down_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    fill(path)
    (path / LEFT_DOCUMENT).mkdir()
    with pytest.raises(StoreError, match=r"\.run\.json\.left"):
        tr.Run(path).save(20, {"step": 21}, rollback=True)
    assert steps_of(path) == [10, 20, 30, 40]
    assert tr.Run(path).load(20) == {"step": 20}
    (path / LEFT_DOCUMENT).rmdir()
    write_left(path, step=20, mark="0" * 16, left=[{"step": 30, "attempt": None}])
    with tr.Run(path) as run:
        run.save(20, {"step": 21}, rollback=True)
    assert (steps_of(path), LEFT_DOCUMENT in names(path)) == ([10, 20], False)


def is_index(request: Request, step: int) -> bool:
    """Tell whether a request puts the index of a step, not what stands in its place before."""
    return (
        isinstance(request, Put) and request.name.endswith(f"{step:08d}/treering.json") and b'"digest"' in request.data
    )


@pytest.mark.parametrize("rollback", [False, True])
def test_a_step_in_flight_to_a_bucket_is_there(monkeypatch: pytest.MonkeyPatch, *, rollback: bool) -> None:
    bucket, put, go = install(monkeypatch, grace=0.0), threading.Event(), threading.Event()
    with tr.Run("memory://bucket/run") as run:
        for step in (1, 10):
            run.save(step, {"step": step}).result()

        kept: list[Request] = []

        def meet(request: Request) -> None:
            if kept and not put.is_set() and threading.current_thread() is not threading.main_thread():
                put.set()
                assert go.wait(60)
            kept.extend([request] * (isinstance(request, Put) and request.name.endswith("00000020/treering.json")))

        bucket.meet = meet
        run.save(20, {"step": 20})
        assert put.wait(60)  # what keeps its place lies there alone, as what is left of a removed step does
        threading.Timer(0.1, go.set).start()
        if rollback:
            run.save(15, {"step": 16}, rollback=True).result()
            assert (run.steps(), run.load()) == ([1, 10, 15], {"step": 16})
        else:
            with pytest.raises(ExistsError, match="older than its latest step, 20"):
                run.save(15, {"step": 16})
            assert run.steps() == [1, 10, 20]


def test_the_list_stays_where_the_commit_may_yet_come(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = install(monkeypatch, grace=0.0)
    run = tr.Run("memory://bucket/run")
    for step in (1, 2, 3):
        run.save(step, {"step": step}).result()
    late: list[Request] = []
    unanswered = iter(range(2))

    def meet(request: Request) -> Answer | None:
        if is_index(request, 2):
            late.append(request)
        return Answer(Status.NO_ANSWER) if late and next(unanswered, None) is not None else None

    with monkeypatch.context() as patch:
        no_patience(patch)
        bucket.meet = meet
        with pytest.raises(StoreError, match="it may yet be in place"):
            run.save(2, {"step": 20}, rollback=True).result()
    bucket.meet = lambda _: None
    assert (run.steps(), run.load()) == ([1, 2, 3], {"step": 3})
    assert bucket.answer(late[0]).status is Status.DONE
    assert (run.steps(), run.load()) == ([1, 2], {"step": 20})


@pytest.mark.parametrize("place", ["disk", "memory"])
@pytest.mark.parametrize("release", [False, True])
def test_who_holds_meanwhile_fails_no_rollback(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, release: bool
) -> None:
    install(monkeypatch, grace=0.0)
    path = str(tmp_path / "run") if place == "disk" else "memory://bucket/run"
    run, other = tr.Run(path), tr.Run(path)
    for step in (1, 2, 3):
        run.save(step, {"step": step}).result()
    lease = other.hold(2) if release else None
    actions = [lambda: lease.release() if lease is not None else other.hold(2)]
    act_before_list_is_put(monkeypatch, lambda: actions and actions.pop()())
    run.save(2, {"step": 20}, rollback=True).result()
    assert not actions
    assert (run.steps(), run.load()) == ([1, 2], {"step": 20})


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_an_error_of_the_disk_before_the_commit_leaves_no_list(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tr.Run(tmp_path / "run")
    for step in (1, 2, 3):
        run.save(step, {"step": step}).result()
    numbers = itertools.count()
    with monkeypatch.context() as patch:
        when = None if name == "replace" else lambda _: next(numbers) > 2
        faults.fail(patch, os, name, errno.EIO, when=when)
        with pytest.raises(StoreError, match="Input/output error"):
            run.save(2, {"step": 20}, rollback=True).result()
    assert not [each.name for each in (tmp_path / "run").iterdir() if "left" in each.name]
    assert (run.steps(), run.load()) == ([1, 2, 3], {"step": 3})


def test_a_list_that_cannot_be_read_back_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tr.Run(tmp_path / "run")
    for step in (1, 2, 3):
        run.save(step, {"step": step}).result()
    real, failed = os.pread, list[int]()

    def pread(number: int, nbytes: int, offset: int) -> bytes:
        data = real(number, nbytes, offset)
        if b"treering_left" in data and not failed:
            failed.append(number)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return data

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", pread)
        with pytest.raises(StoreError, match="Input/output error"):
            run.save(2, {"step": 20}, rollback=True).result()
    assert failed
    assert not [each.name for each in (tmp_path / "run").iterdir() if "left" in each.name]
    assert (run.steps(), run.load()) == ([1, 2, 3], {"step": 3})


def test_who_holds_while_a_list_is_half_written_does_not_replace_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, other = tr.Run(tmp_path / "run"), tr.Run(tmp_path / "run")
    for step in (1, 2, 3):
        run.save(step, {"step": step}).result()
    real, torn = os.write, list[int]()

    def write(number: int, data: bytes) -> int:
        if torn or b"treering_left" not in bytes(data[:64]):
            return real(number, data)
        torn.append(real(number, data[:20]))
        other.hold(3)
        return torn[0]

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        run.save(2, {"step": 20}, rollback=True).result()
    assert torn
    assert (tr.Run(tmp_path / "run").steps(), run.load()) == ([1, 2], {"step": 20})


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_who_holds_while_a_list_is_removed_keeps_its_step(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, grace=0.0)
    path = str(tmp_path / "run") if place == "disk" else "memory://bucket/run"
    run, other = tr.Run(path), tr.Run(path)
    for step in (1, 2, 3, 4):
        run.save(step, {"step": step}).result()
    held: list[Lease] = []

    def hold() -> None:
        if not held:
            held.append(other.hold(2))

    with monkeypatch.context() as patch:
        act_before_list_is_put(patch, hold, gone=True)
        run.save(3, {"step": 30}, rollback=True).result()
        run.save(3, {"step": 31}, rollback=True).result()
    assert held
    run.save(1, {"step": 10}, rollback=True).result()
    assert tr.load(held[0].path) == {"step": 2}
    held[0].release()
