"""The latest step of a run, read while steps come and go."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.cli.runs import a_run, add_step
from treering._format.run_document import RunDocument, encode_run
from treering._runs.steps import latest_step, of_latest
from treering._store.run_folder import RUN_DOCUMENT
from treering.errors import Corrupt, NotFound


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return a_run(tmp_path / "run", 1, 2)


def test_a_step_that_goes_while_it_is_read_has_a_newer_one(run: Path) -> None:
    seen = []

    def read(path: str | os.PathLike[str]) -> str:
        seen.append(Path(path).name)
        if len(seen) == 1:
            add_step(run, 3)
            shutil.rmtree(run / "step_00000002")
            raise NotFound("it went")
        return seen[-1]

    assert of_latest(run, read) == "step_00000003"
    assert seen == ["step_00000002", "step_00000003"]


def test_what_is_missing_for_good_is_told(run: Path) -> None:
    def read(path: str | os.PathLike[str]) -> None:
        raise NotFound(f"{path!s} lacks a file")

    with pytest.raises(NotFound, match="step_00000002 lacks a file"):
        of_latest(run, read)


def test_damage_is_told_at_once(run: Path) -> None:
    def read(_: str | os.PathLike[str]) -> None:
        raise Corrupt("it is damaged")

    with pytest.raises(Corrupt):
        of_latest(run, read)


def test_a_run_without_steps(tmp_path: Path) -> None:
    (tmp_path / RUN_DOCUMENT).write_bytes(encode_run(RunDocument()))
    with pytest.raises(NotFound, match="has no step yet"):
        latest_step(tmp_path)
    with pytest.raises(NotFound, match="has no step yet"):
        of_latest(tmp_path, str)
