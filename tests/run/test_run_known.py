"""What a save costs where thousands of steps are kept, and that no step goes because ``run.json`` says so."""

import collections
import contextlib
import functools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import treering as tr
from tests import faults
from tests.drawn import drawn
from tests.run.naive import kept_by, metric_values, policies, stays
from tests.system_calls import CommitGate, commit_gate
from treering._format.run_document import StepNote, add_note, parse_run
from treering._runs import save_step
from treering._runs.folder import RunFolder
from treering._runs.run_state import RunState
from treering._runs.save_step import Order, collect_after
from treering._runs.steps import note_records, records_of, step_path, steps_of
from treering._store.posix.folder import Folder
from treering.errors import ExistsError
from treering.rules import (
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepSteps,
    Policy,
    StepFacts,
    find_deciders,
    removable,
    retained,
)

__all__ = ["commit_gate"]

TREE = {"w": np.arange(10.0)}
RULES = [None, KeepLast(1000), KeepEvery(steps=1) | KeepBest("loss", n=2), KeepEvery(interval=3600) | KeepLast(1000)]


def many(path: Path, count: int) -> Path:
    """Make a run of so many steps: copies of one, as their folders say which they are."""
    with tr.Run(path) as run:
        run.save(1, TREE, metrics={"loss": 0.5})
    for step in range(2, count + 1):
        shutil.copytree(step_path(path, 1), step_path(path, step))
    with RunFolder(path) as folder:
        note_records(folder, records_of(path))
    return path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """How often each call was made that asks the file system for something."""
    made: collections.Counter[str] = collections.Counter()
    lock = threading.Lock()

    def count(name: str, *_: object, **__: object) -> None:
        with lock:
            made[name] += 1

    for name in ("open", "stat", "lstat", "listdir", "scandir", "unlink", "rename", "replace", "rmdir", "mkdir"):
        faults.before(monkeypatch, os, name, functools.partial(count, name))
    return made


@pytest.mark.parametrize("keep", RULES, ids=str)
def test_a_save_costs_the_same_however_many_steps_are_kept(
    tmp_path: Path, keep: Policy | None, calls: collections.Counter[str]
) -> None:
    found = []
    for count in (10, 90):
        run = tr.Run(many(tmp_path / str(count), count), keep=keep)
        run.save(count + 1, TREE, metrics={"loss": 0.25}).result()
        calls.clear()
        run.save(count + 2, TREE, metrics={"loss": 0.125}).result()
        found.append(dict(calls))
        run.close()
    assert found[0] == found[1]
    assert sum(found[0].values()) < 150


@pytest.mark.parametrize("keep", RULES, ids=str)
def test_the_first_save_of_a_program_opens_no_other_folder(
    tmp_path: Path, keep: Policy | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = many(tmp_path / "run", 20)
    opened: set[str] = set()

    faults.before(monkeypatch, Folder, "below", lambda folder, name: opened.add(name))
    with tr.Run(path, keep=keep) as run:
        run.save(21, TREE, metrics={"loss": 0.25})
    assert {name for name in opened if name.startswith("step")} <= {"step_00000020", "step_00000021"}
    assert [record.step for record in parse_run((path / "run.json").read_bytes()).steps] == list(range(1, 22))


def test_the_latest_step_costs_one_look(tmp_path: Path, calls: collections.Counter[str]) -> None:
    run = tr.Run(many(tmp_path / "run", 50))
    assert run.latest() == 50
    calls.clear()
    assert run.latest() == 50
    del calls["lstat"]  # one for each folder above the run
    assert sum(calls.values()) < 8


@pytest.mark.parametrize("keep", [KeepLast(2), KeepBest("loss"), KeepEvery(interval=50) | KeepLast(1)], ids=str)
def test_what_goes_and_what_decides_it_is_read(tmp_path: Path, keep: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything else is taken from ``run.json``."""
    path = tmp_path / "run"
    for step in range(1, 9):
        put(path, StepFacts(step=step, saved=60.0 * step, metrics={"loss": step}))
    with RunFolder(path) as folder:
        note_records(folder, records_of(path))
    put(path, StepFacts(step=9, saved=541.0, metrics={"loss": 9.0}))
    facts = records_of(path).steps
    going = removable(keep, facts)
    heads: set[int] = set()

    faults.before(monkeypatch, RunFolder, "read_head", lambda run, step: heads.add(step))
    after(path, 9, keep)
    _, by_value = find_deciders(keep, facts, going)
    assert heads == {*going, *by_value} - {9}


# --------------------------------------------------------------------------------------------- a cache that is wrong

quarters = st.integers(0, 400).map(lambda count: count / 4)
facts_of_steps = st.builds(
    lambda saved, metrics, temporary: {"saved": saved, "metrics": metrics, "temporary": temporary},
    quarters,
    st.dictionaries(st.sampled_from(["loss", "accuracy"]), metric_values, max_size=2),
    st.booleans(),
)
FATES = ["same", "anew", "gone", "new", "index gone"]
histories = st.dictionaries(
    st.integers(0, 30), st.tuples(facts_of_steps, st.sampled_from(FATES), facts_of_steps), min_size=1, max_size=6
)


def put(path: Path, facts: StepFacts) -> None:
    """Save a step with these facts."""
    note = StepNote(step=facts.step, saved=facts.saved, metrics=facts.metrics, temporary=facts.temporary)
    tr.save(step_path(path, facts.step), {"w": 1.5}, metadata=add_note({}, note), overwrite=True)


def after(path: Path, step: int, keep: Policy | None) -> None:
    """Do what follows the commit of a step, as the first save of a program does."""
    collect_after(RunState(path, keep=keep, save_every=None, timeout=None), step, Order(), seconds=0.5)


def at(saved: float, **metrics: float) -> dict[str, Any]:
    return {"saved": saved, "metrics": metrics, "temporary": False}


@settings(max_examples=drawn(8))
@given(history=histories, keep=st.none() | policies)
@example(history={3: (at(0), "same", {}), 5: (at(0), "index gone", {})}, keep=KeepLast(2))
@example(history={3: (at(0, loss=1), "same", {}), 5: (at(0, loss=0), "anew", at(0, loss=9))}, keep=KeepBest("loss"))
@example(history={3: (at(0, loss=5), "anew", at(0, loss=0)), 5: (at(0, loss=1), "same", {})}, keep=KeepBest("loss"))
@example(history={3: (at(0), "anew", at(500)), 5: (at(9), "same", {})}, keep=KeepEvery(interval=60))
def test_no_step_goes_that_its_own_index_lets_stay(history: dict[int, Any], keep: Policy | None) -> None:
    """Whatever happened to the steps since ``run.json`` was written."""
    no_step_goes_wrongly(history, keep)


@pytest.mark.slow
@settings(max_examples=drawn(100))
@given(history=histories, keep=st.none() | policies)
def test_no_step_goes_in_many_histories(history: dict[int, Any], keep: Policy | None) -> None:
    no_step_goes_wrongly(history, keep)


def no_step_goes_wrongly(history: dict[int, Any], keep: Policy | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run")
        for step, (before, fate, _) in history.items():
            if fate != "new":
                put(path, StepFacts(step=step, **before))
        path.mkdir(exist_ok=True)
        with RunFolder(path) as run:
            note_records(run, records_of(path))
        for step, (before, fate, since) in history.items():
            if fate == "gone":
                shutil.rmtree(step_path(path, step))
            elif fate == "index gone":
                (step_path(path, step) / "treering.json").unlink()
            elif fate != "same":
                # Where a step only has to be there, the bytes of its index say that it is the same: this changes them.
                temporary = {} if fate == "new" else {"temporary": before["temporary"]}
                put(path, StepFacts(step=step, **since | temporary))
        put(path, StepFacts(step=40, saved=1000.0))
        truth = records_of(path).steps
        after(path, 40, keep)
        found = set(steps_of(path))
        rules = getattr(keep, "rules", (keep,))
        if not any(isinstance(rule, KeepEvery) and rule.interval is not None for rule in rules):
            assert stays(keep, truth) <= found
        assert found <= {fact.step for fact in truth}
        for fact in truth:
            # By the clock: one that stays was saved at nearly the same time.
            for rule in rules:
                if fact.step not in found and isinstance(rule, KeepEvery) and rule.interval is not None:
                    seconds = rule.interval.total_seconds()
                    near = [other for other in truth if other.step in found and abs(other.saved - fact.saved) < seconds]
                    assert fact.temporary or near
        after(path, 40, keep)
        assert set(steps_of(path)) <= found


def test_two_programs_in_one_run_see_each_other(tmp_path: Path) -> None:
    """A folder that stays, for it holds a file of the user's, is no step that counts."""
    mine = tr.Run(tmp_path / "run", keep=KeepLast(2))
    for step in (1, 2):
        mine.save(step, TREE).result()
    (step_path(mine.path, 2) / "tokenizer.json").write_text("{}")
    with tr.Run(mine.path, keep=KeepLast(1)) as other:
        other.save(3, TREE)
    mine.save(4, TREE).result()
    assert mine.steps() == [3, 4]
    shutil.copytree(step_path(mine.path, 3), step_path(mine.path, 5))  # by hand: run.json knows nothing of it
    mine.save(6, TREE).result()
    assert mine.steps() == [5, 6]
    shutil.rmtree(step_path(mine.path, 5))
    mine.save(7, TREE).result()
    assert mine.steps() == [6, 7]
    mine.close()


@pytest.mark.parametrize(("lost", "saved", "keep"), [(6, 4, KeepLast(1) | KeepSteps(1)), (2, 3, KeepLast(2))])
def test_a_folder_that_lost_its_index_stands_for_no_step(tmp_path: Path, lost: int, saved: int, keep: Policy) -> None:
    """The same program has saved it; a removal that was cut short, or a hand, took its index since."""
    with tr.Run(tmp_path / "run", keep=keep) as run:
        run.save(1, TREE).result()
        run.save(lost, TREE).result()
        (step_path(run.path, lost) / "treering.json").unlink()
        run.save(saved, TREE).result()
        assert run.steps() == [1, saved]


DEEDS = st.tuples(
    st.sampled_from(["mine saves", "other saves", "saved by hand", "index gone", "gone"]), st.integers(1, 6)
)


@pytest.mark.slow
@settings(max_examples=drawn(120))
@given(
    deeds=st.lists(DEEDS, min_size=3, max_size=9),
    keep=st.sampled_from([KeepLast(1), KeepLast(2), KeepLast(1) | KeepSteps(1), KeepLast(2) | KeepEvery(steps=3)]),
)
def test_two_programs_and_a_hand_lose_no_step_that_stays(deeds: list[tuple[str, int]], keep: Policy) -> None:
    """What a program remembers of its steps may be wrong by now: each save goes by what is there."""
    with (
        tempfile.TemporaryDirectory() as folder,
        tr.Run(Path(folder, "run"), keep=keep) as mine,
        tr.Run(Path(folder, "run"), keep=keep) as other,
    ):
        mine.save(0, TREE).result()
        for deed, step in deeds:
            place = step_path(mine.path, step)
            there = records_of(mine.path).steps
            match deed:
                case "saved by hand":
                    with contextlib.suppress(ExistsError):
                        put(mine.path, StepFacts(step=step, saved=1.0))
                case "index gone":
                    (place / "treering.json").unlink(missing_ok=True)
                case "gone":
                    shutil.rmtree(place, ignore_errors=True)
                case _:
                    with contextlib.suppress(ExistsError):
                        (mine if deed == "mine saves" else other).save(step, TREE).result()
                        assert stays(keep, [*there, StepFacts(step=step, saved=2e9)]) <= set(mine.steps())


def test_a_removal_that_died_is_finished_by_the_next_program(tmp_path: Path) -> None:
    """``run.json`` forgets a step before it goes."""
    path = many(tmp_path / "run", 3)
    known: list[list[int]] = []

    def dies(folder: Folder, name: str, new: str) -> None:
        known.append([record.step for record in parse_run((path / "run.json").read_bytes()).steps])
        real(folder, name, new)
        raise KeyboardInterrupt

    put(path, StepFacts(step=4, saved=9.0))
    real = Folder.replace
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Folder, "replace", dies)
        with pytest.raises(KeyboardInterrupt):
            after(path, 4, KeepLast(3))
    assert known == [[2, 3, 4]]
    put(path, StepFacts(step=5, saved=9.0))
    after(path, 5, KeepLast(3))
    assert sorted(found.name for found in path.glob("step*")) == [f"step_{step:08d}" for step in (3, 4, 5)]


def test_a_loop_that_is_faster_than_the_disk_writes_the_document_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = many(tmp_path / "run", 3)
    written: list[bytes] = []

    faults.before(monkeypatch, RunFolder, "replace_document", lambda run, data, **how: written.append(data))
    state = RunState(path, keep=None, save_every=None, timeout=None)
    for step, more in ((4, True), (5, True), (6, False)):
        put(path, StepFacts(step=step, saved=9.0))
        collect_after(state, step, Order(), seconds=0.5, more_follow=more)
    assert [[record.step for record in parse_run(data).steps] for data in written] == [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]


# ---------------------------------------------------------------------------------------------------------- who decides


@given(
    facts=st.lists(
        st.builds(
            lambda step, fields: StepFacts(step=step, **fields), st.integers(0, 40), facts_of_steps
        ), min_size=1, max_size=12, unique_by=lambda fact: fact.step,
    ),
    keep=st.none() | policies,
)  # fmt: skip
def test_the_steps_that_decide_are_enough(facts: list[StepFacts], keep: Policy | None) -> None:
    """Rules that are asked about these and one step that goes say the same of it."""
    going = removable(keep, facts)
    assert going == [verdict.step for verdict in retained(keep, facts) if not verdict.kept]
    needed = set[int]().union(*find_deciders(keep, facts, going))
    enough = [fact for fact in facts if fact.step in needed]
    lasting = [fact for fact in enough if not fact.temporary]
    for fact in facts:
        if fact.step in going and not fact.temporary and keep is not None:
            assert fact.step not in kept_by(keep, [*lasting, fact])


def test_a_rule_of_the_users_own_is_given_the_steps_in_order(tmp_path: Path) -> None:
    class KeepFirst(Policy):
        def kept(self, facts: Any) -> dict[int, tuple[str, ...]]:
            asked.append([fact.step for fact in facts])
            return {facts[0].step: ("first",)}

    asked: list[list[int]] = []
    with tr.Run(tmp_path / "run", keep=KeepFirst()) as run:
        for step in range(5):
            run.save(step, {"w": 1.5})
            run.wait()
    assert run.steps() == [0, 4]
    assert asked
    assert asked == [sorted(steps) for steps in asked]


def test_a_rule_of_the_users_own_is_decided_by_all() -> None:
    class Odd(Policy):
        def kept(self, facts: Any) -> dict[int, tuple[str, ...]]:
            return {fact.step: ("odd",) for fact in facts if fact.step % 2}

    facts = [StepFacts(step=step, saved=0.0) for step in range(5)]
    assert find_deciders(Odd() | KeepSteps(2), facts, removable(Odd() | KeepSteps(2), facts))[1] == set(range(5))


def test_a_save_that_ends_between_two_looks_is_seen(
    tmp_path: Path, commit_gate: CommitGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tr.Run(tmp_path / "run")
    tr.save_async(run.path.with_name("other"), 1)
    assert commit_gate.reached.wait(60)
    saved = run.save(1, {"step": 1})  # waits in line: nothing is in the folder yet

    def end_after(real: Callable[..., Any]) -> Callable[..., Any]:
        def look(path: Any) -> Any:
            found = real(path)
            if threading.current_thread() is threading.main_thread():
                commit_gate.opened.set()
                saved.result()
            return found

        return look

    for name in ("in_flight", "names_in"):
        monkeypatch.setattr(save_step, name, end_after(getattr(save_step, name)))
    with pytest.raises(
        ExistsError, match="step 1 of the run"
    ):  # at once, and not as the error of a save in the background
        run.save(1, {"step": 2})
    run.close()


def test_an_interrupt_after_a_rollback_is_handed_over_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit_gate: CommitGate
) -> None:
    commit_gate.opened.set()
    run = tr.Run(tmp_path / "run")
    for step in (1, 2, 3):
        run.save(step, {"step": step}).result()
    commit_gate.opened.clear()

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        faults.after(patch, save_step, "begin_save", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.save(1, {"step": 10}, rollback=True)
    commit_gate.opened.set()
    run.wait()
    assert (run.steps(), run.load()) == ([1], {"step": 10})


def test_an_interrupt_before_a_save_is_handed_over_does_not_count_as_one(tmp_path: Path) -> None:
    class Interrupting:
        def get_state(self) -> int:
            raise KeyboardInterrupt

        def set_state(self, state: int) -> None:
            raise AssertionError(state)

    run = tr.Run(tmp_path / "run", save_every=tr.SaveEvery(steps=1000))
    run.save(0, {"step": 0})
    with pytest.raises(KeyboardInterrupt):
        run.save(1000, {"data": Interrupting()})
    assert run.save(1001, {"step": 1001})
    run.wait()
    assert run.steps() == [0, 1001]
