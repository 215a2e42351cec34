"""A run that looks for its newest step in several folders, and saves to its own alone."""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering as tr
from tests import faults
from tests.on_disk import step_path
from tests.run.test_fallback import hurt
from tests.stores import MemoryTestPath
from treering.errors import CorruptError, NotFoundError, StepPassedOverWarning, StoreError, UnsupportedError


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The folder of the run."""
    return tmp_path / "run"


@pytest.fixture(params=["disk", "memory"])
def other(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Another root, on disk or in memory."""
    if request.param == "disk":
        return tmp_path / "other"
    elsewhere: Any = MemoryTestPath(f"memory://search-{tmp_path.name}/run")
    return elsewhere


def save(path: Path, *steps: int, value: int = 0, at: float | None = None, rollback: bool = False) -> None:
    with tr.Run(path) as run:
        if at is not None:
            run._state.now = lambda: at
        for step in steps:
            run.save(step, {"step": step, "value": value, "w": np.arange(9.0) + step}, rollback=rollback)


def loaded(run: tr.Run, **options: Any) -> tuple[int, int]:
    found: Any = run.load(**options)
    return found["step"], found["value"]


def files_of(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_the_newest_step_of_all_roots_is_loaded_and_saves_go_to_the_own_one(own: Path, other: Path) -> None:
    save(own, 10, 20, value=1)
    save(other, 20, 30, value=2)
    before = files_of(other)
    run = tr.Run(own, search=[other], keep=tr.KeepLast(1))
    assert run.latest() == 30
    assert loaded(run) == (30, 2)
    assert run.load_or_init(lambda: {"step": 0, "value": 0, "w": np.zeros(9)}).step == 30
    assert loaded(run, step=20) == (20, 1)  # the own one wins
    assert loaded(run, step=30) == (30, 2)
    assert run.steps() == [10, 20]
    with run:
        run.save(40, {"step": 40, "value": 3})
    assert (run.steps(), run.latest()) == ([40], 40)
    assert loaded(run) == (40, 3)
    assert files_of(other) == before


def test_of_one_step_in_several_roots_the_first_is_taken(own: Path, other: Path, tmp_path: Path) -> None:
    save(other, 30, value=2)
    save(tmp_path / "third", 30, value=3)
    assert loaded(tr.Run(own, search=[tmp_path / "third", other])) == (30, 3)
    assert loaded(tr.Run(own, search=[other, tmp_path / "third"])) == (30, 2)
    save(own, 30, value=1)
    assert loaded(tr.Run(own, search=[other, tmp_path / "third"])) == (30, 1)


def test_roots_that_are_not_there_have_no_steps(own: Path, tmp_path: Path) -> None:
    run = tr.Run(own, search=[tmp_path / "nowhere", own])
    assert run.latest() is None
    assert run.load_or_init(lambda: {"step": 0}).step is None
    with pytest.raises(NotFoundError, match="has no step yet"):
        run.load()
    with pytest.raises(NotFoundError, match="has no step 7"):
        run.load(7)
    save(own, 10)
    assert run.latest() == 10


def test_a_step_that_the_run_went_back_from_does_not_come_back_from_another_root(own: Path, other: Path) -> None:
    save(own, 10, 20, at=1000.0)
    save(other, 10, 20, 30, value=2, at=2000.0)
    run = tr.Run(own, search=[other])
    assert run.latest() == 30
    save(own, 15, value=9, at=3000.0, rollback=True)
    assert tr.Run(own).steps() == [10, 15]
    assert run.latest() == 15
    with pytest.warns(StepPassedOverWarning, match="step 30 of .* left this one behind"):
        assert loaded(run) == (15, 9)
    save(other, 40, value=2, at=4000.0)  # later than that: it is of the new branch, or somebody's intent
    assert run.latest() == 40


def test_a_root_that_cannot_be_reached_is_an_error_unless_fallback_does_without_it(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(own, 10)
    save(tmp_path / "other", 20)
    run = tr.Run(own, search=[tmp_path / "other"])
    faults.fail(monkeypatch, os, "open", errno.ESTALE, when=lambda name, *_, **__: os.fspath(name).endswith("other"))
    for call in (run.latest, run.load):
        with pytest.raises(StoreError, match="fallback=True does without it"):
            call()
    with pytest.warns(StepPassedOverWarning, match="other' was left out: could not read"):
        assert loaded(run, fallback=True) == (10, 0)
    empty = tr.Run(tmp_path / "empty", search=[tmp_path / "other"])
    with pytest.raises(StoreError, match="could not read"):  # never from the beginning
        empty.load_or_init(lambda: {"step": 0}, fallback=True)


def test_fallback_goes_over_all_roots_step_by_step(own: Path, other: Path) -> None:
    save(own, 10, 20, 30, value=1)
    save(other, 20, 30, value=2)
    hurt(own, 30)
    run = tr.Run(own, search=[other])
    with pytest.raises(CorruptError):
        run.load()
    with pytest.warns(StepPassedOverWarning, match="step 30: "):
        assert loaded(run, fallback=True) == (30, 2)  # another copy of the same step
    hurt(other, 30)
    with pytest.warns(StepPassedOverWarning, match="step 30: ") as caught:
        assert loaded(run, fallback=True) == (20, 1)
    assert f"step 30 of '{other}': " in str(caught[0].message)
    with run:
        run.save(30, {"step": 30, "value": 3})
    with warnings.catch_warnings(action="error"):
        assert loaded(run, fallback=True) == (30, 3)


def test_resumes_of_a_step_of_another_root_are_counted_in_the_own_one(own: Path, other: Path) -> None:
    save(other, 20, 30, value=2)
    before = files_of(other)
    run = tr.Run(own, search=[other])
    for _ in range(2):
        assert loaded(run, fallback=tr.Fallback(max_attempts=2)) == (30, 2)
    assert run.attempts(30) == 2
    with pytest.warns(StepPassedOverWarning, match="resumed 2 times"):
        assert loaded(run, fallback=tr.Fallback(max_attempts=2)) == (20, 2)
    assert files_of(other) == before
    with run:
        run.save(25, {"step": 25, "value": 3})
    assert run.steps() == [25]
    assert step_path(own, 25).exists()


def test_one_path_is_no_list_of_roots(own: Path) -> None:
    for wrong in ("other", Path("other")):
        with pytest.raises(UnsupportedError, match="must be a list of paths"):
            tr.Run(own, search=wrong)  # type: ignore[arg-type]
