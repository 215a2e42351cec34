"""A run whose newest steps are damaged: what is loaded in their place, what is told, and what is kept afterwards."""

from __future__ import annotations

import errno
import json
import os
import secrets
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import treering as tr
from tests import faults
from tests.command import inside
from tests.drawn import drawn
from tests.on_disk import signed, step_path
from tests.reads import act_before_looks, fail_steps
from tests.stores import MemoryTestPath
from treering.errors import (
    CorruptError,
    ExistsError,
    FormatError,
    MismatchError,
    NotFoundError,
    StepPassedOverWarning,
    StoreError,
    UnsupportedError,
)
from treering.retention import Policy, StepFacts

NOTED = ".run.json.resumed"


@pytest.fixture(params=["disk", "memory"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder for a run, on disk and in memory."""
    if request.param == "disk":
        return tmp_path / "run"
    elsewhere: Any = MemoryTestPath(f"memory://fallback-{tmp_path.name}/run")
    return elsewhere


def tree(step: int) -> dict[str, Any]:
    return {"w": jnp.full(64, step), "more": {"b": np.arange(9.0) + step}, "step": step}


def save(path: Path, *steps: int, **options: Any) -> tr.Run:
    with tr.Run(path, **options) as run:
        for step in steps:
            run.save(step, tree(step), metrics={"loss": 1.0 / (step + 1)})
    return run


def flip(data: bytes) -> bytes:
    return data[:-3] + bytes([data[-3] ^ 4]) + data[-2:]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "flip": flip,
    "flip in the middle": lambda data: (
        data[: len(data) // 2] + flip(data[len(data) // 2 :][:9]) + data[len(data) // 2 + 9 :]
    ),
    "flip of the first line": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "cut": lambda data: data[: len(data) // 2],
    "emptied": lambda _: b"",
    "grown": lambda data: data + b"\0",
}


def hurt(path: Path, step: int, kind: str = "flip", *, index: bool = False) -> Path:
    """Damage a file of a step; return it."""
    files = [file for file in step_path(path, step).iterdir() if (file.name == "treering.json") == index]
    [file] = [one for one in files if one.name.startswith(("treering.json", "data-"))]
    if kind == "removed":
        file.unlink()
    else:
        file.write_bytes(DAMAGE[kind](file.read_bytes()))
    return file


def resume(path: Path, fallback: Any = True, **options: Any) -> tuple[tr.Run, int, str]:
    """Resume a run; return it, the step, and what was warned of."""
    run = tr.Run(path, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = run.load_or_init(lambda: tree(0), fallback=fallback)
    assert resumed.step is not None
    assert int(resumed.tree["w"][0]) == resumed.step == resumed.tree["step"]
    assert all(one.category is StepPassedOverWarning for one in caught)
    return run, resumed.step, "".join(str(one.message) for one in caught)


# ------------------------------------------------------------------------------------------------------- what is loaded


@pytest.mark.sampled(5)
@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("kind", [*DAMAGE, "removed"])
def test_the_newest_whole_step_is_loaded_and_the_damage_is_told(path: Path, kind: str, index: bool) -> None:
    save(path, 1, 2, 3)
    file = hurt(path, 3, kind, index=index)
    if index and kind == "removed":  # a folder without an index is no step, as ever
        assert resume(path)[1:] == (2, "")
        return
    where = r"the damage is in '.*step_0*3'.* fallback=True goes back to the newest step that is whole"
    with pytest.raises(CorruptError, match=where):
        tr.Run(path).load()
    with pytest.raises(CorruptError, match=where):
        tr.Run(path).load_or_init(lambda: tree(0))
    before = {one.name: one.read_bytes() for one in step_path(path, 3).iterdir()}
    _, step, told = resume(path)
    assert step == 2
    assert "from step 2, not from" in told
    assert "step 3: " in told
    assert "fallback=True" not in told  # it is what happens
    assert file.name in told
    if not index and kind == "flip":
        assert "leaf 'more/b' is damaged" in told or "leaf 'w' is damaged" in told
    with pytest.warns(StepPassedOverWarning, match="step 3"):
        assert int(tr.Run(path).load(fallback=True)["step"]) == 2
    assert {one.name: one.read_bytes() for one in step_path(path, 3).iterdir()} == before  # nothing bad is removed


def test_several_damaged_steps_are_passed_over_and_each_is_named(path: Path) -> None:
    save(path, 1, 2, 3, 4)
    for step in (2, 3, 4):
        hurt(path, step, index=step == 3)
    _, step, told = resume(path)
    assert step == 1
    assert told.index("step 4: ") < told.index("step 3: ") < told.index("step 2: ")


def test_where_all_are_damaged_nothing_is_begun_anew(path: Path) -> None:
    save(path, 1, 2)
    files = [hurt(path, step) for step in (1, 2)]
    for resumes in (lambda run: run.load(fallback=True), lambda run: run.load_or_init(lambda: tree(0), fallback=True)):
        with pytest.raises(CorruptError, match=r"no step of the run .* can be used") as caught:
            resumes(tr.Run(path))
        assert all(file.name in str(caught.value) for file in files)
        assert "step 1: " in str(caught.value)
        assert "step 2: " in str(caught.value)


@settings(max_examples=drawn(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    damaged=st.lists(st.sampled_from([None, None, "data", "index"]), min_size=1, max_size=6),
    last=st.integers(1, 3),
    ahead=st.integers(-30, 15),
)
def test_whatever_is_damaged_the_newest_whole_step_is_found_and_good_ones_stay(
    tmp_path: Path, damaged: list[str | None], last: int, ahead: int
) -> None:
    path = tmp_path / secrets.token_hex(4)
    steps = [10 * number for number in range(1, len(damaged) + 1)]
    save(path, *steps)
    bad = {step for step, what in zip(steps, damaged, strict=True) if what is not None}
    for step, what in zip(steps, damaged, strict=True):
        if what is not None:
            hurt(path, step, index=what == "index")
    whole = [step for step in steps if step not in bad]
    if not whole:
        with pytest.raises(CorruptError, match="no step of the run"):
            tr.Run(path).load(fallback=True)
        return
    run, step, _ = resume(path, keep=tr.KeepLast(last))
    assert step == whole[-1]
    later = max(steps) + ahead
    if later <= step:
        later = step + 5
    with run:
        run.save(later, tree(later))
    passed = {each for each in bad if each > step}  # of earlier ones, in which nobody looked, nothing is known
    known = sorted({*(each for each in steps if each not in passed), later})
    unread = {each for each, what in zip(steps, damaged, strict=True) if what == "index"}
    there = set(run.steps())
    assert {step, later} & there == {later, *([step] if last > 1 else [])}
    assert passed - {later} <= there
    assert unread - {later} <= there
    assert there - unread - passed <= set(known)
    assert resume(path)[1] == later


def test_where_nothing_was_saved_a_run_begins_and_a_load_says_so(path: Path) -> None:
    assert tr.Run(path).load_or_init(lambda: tree(0), fallback=True).step is None
    with pytest.raises(NotFoundError, match="has no step yet"):
        tr.Run(path).load(fallback=True)
    assert not path.exists()


def test_whole_steps_are_loaded_as_without_it_and_nothing_is_written(path: Path) -> None:
    save(path, 1, 2)
    before = sorted(one.name for one in path.iterdir())
    assert resume(path)[1:] == (2, "")
    assert sorted(one.name for one in path.iterdir()) == before


# --------------------------------------------------------------------------------------------- what is no reason for it


def test_a_template_that_does_not_fit_is_no_reason_to_go_back(path: Path) -> None:
    save(path, 1, 2)
    with pytest.raises(MismatchError, match="found int32"):
        tr.Run(path).load(like={**tree(0), "w": jnp.ones(64)}, fallback=True)
    with pytest.raises(MismatchError, match="not_there"):
        tr.Run(path).load(at="not_there", fallback=True)


def test_a_step_of_a_newer_version_is_whole_and_no_reason_to_go_back(path: Path) -> None:
    save(path, 1, 2)
    newer = signed("treering", '"leaves": []}\n', version="99")
    (step_path(path, 2) / "treering.json").write_bytes(newer)
    with pytest.raises(FormatError, match="newer treering"):
        tr.Run(path).load(fallback=True)


@pytest.mark.parametrize("reason", [errno.EACCES, errno.EMFILE, errno.ESTALE, errno.ETIMEDOUT])
def test_a_refusal_is_no_reason_to_go_back(tmp_path: Path, reason: int, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "run", 1, 2)
    _fail_reads_of(monkeypatch, tmp_path / "run", reason=reason)
    with pytest.raises(StoreError) as caught:
        tr.Run(tmp_path / "run").load(fallback=True)
    assert caught.value.errno == reason


@pytest.mark.parametrize("reason", [errno.EIO, errno.EBADMSG])
def test_bytes_that_the_disk_refuses_twice_are_damage(
    tmp_path: Path, reason: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "run", 1, 2)
    refused = _fail_reads_of(monkeypatch, tmp_path / "run", reason=reason, times=1)
    assert resume(tmp_path / "run")[1:] == (2, "")
    assert refused == [0]
    refused[0] = 10**6
    _, step, told = resume(tmp_path / "run")
    assert step == 1
    assert os.strerror(reason) in told


def test_a_server_that_gives_no_answer_says_nothing_of_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path: Any = MemoryTestPath(f"memory://no-answer-{tmp_path.name}/run")
    save(path, 1, 2)
    lost = StoreError.of(OSError(errno.EIO, "no answer"), path, "read")
    fail_steps(monkeypatch, lost, name="step_00000002")
    with pytest.raises(StoreError, match="no answer"):
        tr.Run(path).load(fallback=True)


def _fail_reads_of(patch: pytest.MonkeyPatch, run: Path, *, reason: int, times: int = 10**6) -> list[int]:
    """Let the system refuse to open the data of step 2 so many times; return how many are left."""
    left = [times]
    names = {file.name for file in step_path(run, 2).iterdir() if file.name.startswith("data-")}

    def refuses(name: Any, *_: Any, **__: Any) -> bool:
        refused = os.path.basename(os.fsdecode(name)) in names and left[0] > 0  # noqa: PTH119 - as the system has it
        left[0] -= refused
        return refused

    faults.fail(patch, os, "open", reason, when=refuses)
    return left


def test_what_makes_no_sense_is_refused(path: Path) -> None:
    run = save(path, 1)
    wrong: Any = 3
    with pytest.raises(UnsupportedError, match="fallback=3 is neither"):
        run.load(fallback=wrong)
    with pytest.raises(UnsupportedError, match="a step is given"):
        run.load(1, fallback=True)
    with pytest.raises(UnsupportedError, match="max_attempts is 0"):
        tr.Fallback(max_attempts=0)


# ----------------------------------------------------------------------------------------------------- saves afterwards


def test_the_training_goes_on_and_replaces_the_damaged_step_when_it_comes_to_it(path: Path) -> None:
    save(path, 10, 20, 30)
    hurt(path, 30)
    run, step, _ = resume(path, keep=tr.KeepLast(2))
    assert step == 20
    with run:
        run.save(25, tree(25)).result()
        assert run.steps() == [20, 25, 30]  # the damaged one counts for no rule, and stays
        run.save(28, tree(28)).result()
        assert run.steps() == [25, 28, 30]
        assert "replaces step 30" in run.save(30, tree(30)).reason
        with pytest.raises(ExistsError):
            run.save(30, tree(30))
        with pytest.raises(ExistsError):
            run.save(29, tree(29))
        run.save(31, tree(31)).result()
    assert run.steps() == [30, 31]
    assert tr.verify(path).ok
    assert int(tr.Run(path).load()["step"]) == 31


def test_a_training_that_passes_the_damaged_step_leaves_it_where_it_is(path: Path) -> None:
    save(path, 10, 20, 30)
    hurt(path, 30, index=True)
    run, _, _ = resume(path, keep=tr.KeepLast(1))
    with run:
        for step in (25, 35, 45):
            run.save(step, tree(step))
    assert run.steps() == [30, 45]
    # A program that knows nothing of it goes by what was noted.
    save(path, 55, keep=tr.KeepLast(1))
    assert tr.Run(path).steps() == [30, 55]
    tr.Run(path).delete(30)
    assert tr.Run(path).steps() == [55]


@pytest.mark.parametrize("index", [False, True])
def test_what_is_known_to_be_damaged_counts_for_no_rule_and_is_shown(path: Path, index: bool) -> None:
    save(path, 10, 20, 30)
    hurt(path, 30, "flip", index=index)
    run, _, _ = resume(path)
    last = tr.Run(path, keep=tr.KeepLast(1))
    assert [(one.step, one.kept) for one in last.gc()] == [(10, False), (20, True)]
    if not index:
        assert run.metrics(30) == {"loss": 1 / 31}
    assert run.best("loss") == 20
    if "memory" not in str(path):
        said = inside("log", str(path), code=0)[0]
        assert "passed over" in said or "cannot be read" in said
        said = inside("doctor", str(path), code=int(index))[0]
        assert "the latest is 30" in said
        assert "passed over at a resume, and kept by no rule and by none removed: step 30" in said
        inside("gc", str(path), "--keep-last", "1", "--yes", code=0)
        assert run.steps() == [20, 30]
        if not index:
            inside("rm", str(path), "30", code=0)
            assert run.steps() == [20]


def test_a_step_that_was_repaired_is_loaded_and_counts_again(path: Path) -> None:
    save(path, 10, 20)
    file = hurt(path, 20)
    resume(path)
    assert json.loads((path / NOTED).read_bytes())["passed"][0]["step"] == 20
    file.write_bytes(flip(file.read_bytes()))
    assert resume(path)[1:] == (20, "")
    assert json.loads((path / NOTED).read_bytes())["passed"] == []
    assert [one.step for one in tr.Run(path, keep=tr.KeepLast(1)).gc() if one.kept] == [20]


def test_a_part_of_a_damaged_step_may_be_loaded_and_proves_nothing_of_the_rest(path: Path) -> None:
    save(path, 10, 20)
    hurt(path, 20)
    resume(path)
    noted = (path / NOTED).read_bytes()
    for options in ({"at": "step"}, {"only": "step"}, {"like": {"step": 0}, "extra": "ignore"}):
        found: Any = tr.Run(path).load(fallback=True, **options)
        assert found in (20, {"step": 20})
        assert (path / NOTED).read_bytes() == noted


def test_a_damaged_note_of_it_removes_nothing_and_is_written_again(path: Path) -> None:
    save(path, 10, 20, 30)
    hurt(path, 30)
    resume(path)
    (path / NOTED).write_bytes(b"{}")
    with pytest.raises(CorruptError, match="resumed"):
        tr.Run(path, keep=tr.KeepLast(1)).gc(dry_run=False)
    assert tr.Run(path).steps() == [10, 20, 30]
    run, step, _ = resume(path, keep=tr.KeepLast(1))
    assert step == 20
    with run:
        run.save(40, tree(40))
    assert run.steps() == [30, 40]


def test_rules_of_when_to_save_count_from_the_step_that_was_loaded(path: Path) -> None:
    save(path, 10, 20, 300)
    hurt(path, 300)
    run, _, _ = resume(path, save_every=tr.SaveEvery(steps=10))
    with run:
        assert not run.save(21, tree(21))
        assert not run.save(29, tree(29))
        assert run.save(31, tree(31))  # 30 was not offered
    assert run.steps() == [10, 20, 31, 300]


class KeepNothing(Policy):
    """A rule that keeps no step."""

    def kept(self, facts: Any) -> dict[int, tuple[str, ...]]:
        assert all(isinstance(fact, StepFacts) for fact in facts)
        return {}


def test_the_step_that_was_loaded_stays_until_a_newer_one_is_found_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(path, 10, 20)
    run, step, _ = resume(path, keep=KeepNothing())
    assert step == 20
    kept = {one.step: one.reasons for one in run.gc() if one.kept}
    assert kept[20][0] == "the newest"
    # The first save afterwards is damaged on its way, as by a disk that lies.
    act_before_looks(monkeypatch, lambda root, number: hurt(root, number, "cut"))
    with pytest.raises(CorruptError, match="cut short"):
        run.save(30, tree(30)).result()
    assert run.steps() == [20, 30]
    monkeypatch.undo()
    run.save(40, tree(40)).result()
    run.close()
    assert 20 not in run.steps()
    assert run.steps()[-1] == 40


@pytest.mark.parametrize("ending", ["wait", "close"])
def test_it_stays_too_where_steps_were_spared_for_another_reason(
    path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(path, 10, 20)
    run, step, _ = resume(path, keep=tr.KeepLast(1), on_commit=lambda _: time.sleep(0.3))
    assert step == 20
    act_before_looks(monkeypatch, lambda root, number: hurt(root, number, "cut"))
    for later in (30, 40):
        with pytest.raises(CorruptError, match="cut short"):
            run.save(later, tree(later)).result()
    getattr(run, ending)()
    assert 20 in run.steps()
    run.close()


def test_what_is_saved_next_shares_no_file_of_a_step_that_was_passed_over(path: Path) -> None:
    frozen = {"frozen": np.arange(300_000.0)}
    for step in (10, 20):
        with tr.Run(path, incremental=True, full_every=1) as run:
            run.save(step, tree(step) | frozen)
    hurt(path, 20, "flip in the middle")
    run = tr.Run(path, incremental=True, keep=tr.KeepLast(1))
    with pytest.warns(StepPassedOverWarning):
        resumed = run.load_or_init(lambda: tree(0) | frozen, fallback=True)
    assert resumed.step == 10
    with run:
        run.save(30, resumed.tree)
    assert run.steps() == [20, 30]
    assert np.array_equal(tr.Run(path).load(30)["frozen"], frozen["frozen"])
    # A program that resumes from a step that it names does not go by the damaged one either.
    run.delete(30)
    with tr.Run(path, incremental=True) as run:
        run.save(25, tree(25) | frozen, rollback=True)
    assert np.array_equal(tr.Run(path).load(25)["frozen"], frozen["frozen"])


def test_without_fallback_no_step_is_held_and_nothing_is_looked_at(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    act_before_looks(monkeypatch, lambda _, number: looked.append(number))
    save(path, 10, 20)
    run = tr.Run(path, keep=tr.KeepLast(1))
    with run:
        run.load()
        run.save(30, tree(30))
    assert (run.steps(), looked) == ([30], [])


# ----------------------------------------------------------------------------------------------------- steps that crash


def test_without_fallback_an_error_of_the_program_comes_as_it_is(path: Path) -> None:
    class WithoutTextError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def fail(*_: object) -> None:
        raise WithoutTextError

    with tr.Run(path) as run:
        run.save(1, {"w": np.zeros(3)})
        with pytest.raises(WithoutTextError):
            run.load(like={"w": np.zeros(3)}, progress=fail)


def test_a_step_is_passed_over_once_it_was_resumed_too_often(path: Path) -> None:
    save(path, 10, 20, 30)
    fallback = tr.Fallback(max_attempts=2)
    assert tr.Run(path).attempts(30) == 0
    for tries in (1, 2):
        assert resume(path, fallback)[1:] == (30, "")
        assert tr.Run(path).attempts(30) == tries
    run, step, told = resume(path, fallback, keep=tr.KeepLast(1))
    assert step == 20
    assert "step 30: it was resumed 2 times, and no newer step was saved" in told
    assert (run.attempts(30), run.attempts(20)) == (2, 1)
    with run:
        run.save(25, tree(25)).result()
    assert run.steps() == [25, 30]
    assert run.attempts(30) == 2  # 25 is no newer step than that
    run, step, told = resume(path, fallback, keep=tr.KeepLast(1))
    assert step == 25
    assert "step 30" in told
    with run:
        run.save(30, tree(30)).result()  # saved anew: it was never resumed
    assert run.attempts(30) == 0
    assert resume(path, fallback)[1:] == (30, "")


def test_more_attempts_may_be_given_later_and_true_counts_none(path: Path) -> None:
    save(path, 10, 20)
    for _ in range(2):
        resume(path, tr.Fallback(max_attempts=2))
    assert resume(path, tr.Fallback(max_attempts=2))[1] == 10
    assert resume(path, tr.Fallback(max_attempts=3))[1:] == (20, "")
    before = (path / NOTED).read_bytes()
    assert resume(path, fallback=True)[1:] == (20, "")
    assert (path / NOTED).read_bytes() == before
    assert tr.Run(path).attempts(20) == 3


def test_a_newer_step_ends_the_count(path: Path) -> None:
    save(path, 10)
    run, _, _ = resume(path, tr.Fallback())
    assert run.attempts(10) == 1
    with run:
        run.save(20, tree(20))
    assert run.attempts(10) == 0
    with pytest.raises(NotFoundError, match="has no step 15; it has steps 10 and 20"):
        run.attempts(15)
    resume(path, tr.Fallback())
    assert [one["step"] for one in json.loads((path / NOTED).read_bytes())["resumed"]] == [20]


def test_where_every_step_was_tried_too_often_it_says_so(path: Path) -> None:
    save(path, 10)
    resume(path, tr.Fallback(max_attempts=1))
    with pytest.raises(CorruptError, match="step 10: it was resumed 1 time, and no newer step was saved"):
        tr.Run(path).load_or_init(lambda: tree(0), fallback=tr.Fallback(max_attempts=1))
    assert int(tr.Run(path).load(10)["step"]) == 10


@pytest.mark.parametrize("reason", [errno.EROFS, errno.EACCES])
def test_who_may_not_write_resumes_all_the_same_but_counts_nothing(
    tmp_path: Path, reason: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "run", 10, 20)
    hurt(tmp_path / "run", 20)
    faults.fail(monkeypatch, os, "replace", reason)
    _, step, told = resume(tmp_path / "run")
    assert (step, "step 20: " in told) == (10, True)
    with pytest.raises(StoreError, match="resumed"):
        tr.Run(tmp_path / "run").load(fallback=tr.Fallback())


def test_a_count_that_cannot_be_noted_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "run", 10)
    faults.fail(monkeypatch, os, "replace", errno.ENOSPC)
    with pytest.raises(StoreError, match="resumed"):
        tr.Run(tmp_path / "run").load(fallback=tr.Fallback())
