"""The latest step of a run, read while steps come and go."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import treering
from tests.cli.runs import a_run, add_step
from tests.on_disk import INDEX, RUN_DOCUMENT, signed, step_path
from tests.system_calls import act_before_indexes
from treering.errors import Corrupt, NotFound


def open_step(run: Path) -> int:
    with treering.open(run) as opened:
        step: Any = opened["step"]
        return int(step)


def compared_step(run: Path) -> int:
    other = run.with_name("other.msgpack")
    treering.save(other, {"step": -1}, overwrite=True)
    return next(int(each.a or 0) for each in treering.diff(run, other) if each.key == "step" and each.what == "value")


READERS: dict[str, Callable[[Path], int]] = {
    "load": lambda run: treering.load(run)["step"],
    "open": open_step,
    "diff": compared_step,
    "inspect": lambda run: treering.inspect(run).leaves["step"].value,
}
readers = pytest.mark.parametrize("read", READERS.values(), ids=READERS)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return a_run(tmp_path / "run", 1, 2)


@readers
def test_a_step_that_goes_while_it_is_read_has_a_newer_one(
    run: Path, read: Callable[[Path], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtake() -> None:
        if not step_path(run, 3).exists():
            add_step(run, 3)
            shutil.rmtree(step_path(run, 2))

    opened = act_before_indexes(monkeypatch, overtake)
    assert read(run) == 3
    assert (opened[0], opened[-1]) == ("step_00000002", "step_00000003")


@readers
def test_what_is_missing_for_good_is_told(
    run: Path, read: Callable[[Path], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    opened = act_before_indexes(monkeypatch, refuse)
    with pytest.raises(NotFound, match="step_00000002"):
        read(run)
    assert opened == ["step_00000002"]


@readers
def test_damage_is_told_at_once(run: Path, read: Callable[[Path], int], monkeypatch: pytest.MonkeyPatch) -> None:
    index = step_path(run, 2) / INDEX
    index.write_bytes(index.read_bytes()[:-20])
    opened = act_before_indexes(monkeypatch, lambda: None)
    with pytest.raises(Corrupt, match="is damaged"):
        read(run)
    assert opened == ["step_00000002"]


@readers
def test_a_run_without_steps(tmp_path: Path, read: Callable[[Path], int]) -> None:
    (tmp_path / RUN_DOCUMENT).write_bytes(signed("treering_run", '"keep": null, "save_every": null, "steps": []}\n'))
    with pytest.raises(NotFound, match="has no step yet"):
        read(tmp_path)
