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
from tests.command import inside
from tests.on_disk import INDEX, RUN_DOCUMENT, signed, step_path
from tests.system_calls import act_before_indexes
from treering.errors import CorruptError, NotFoundError


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
    opened = act_before_indexes(monkeypatch, lambda: _overtake(run))
    assert read(run) == 3
    assert (opened[0], opened[-1]) == ("step_00000002", "step_00000003")


@pytest.mark.parametrize("verb", [("cat", "step"), ("inspect",), ("ls", "step"), ("du",), ("diff", "other")])
def test_a_verb_takes_the_newer_step_and_names_it(
    run: Path, verb: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    treering.save(run.with_name("other.msgpack"), treering.load(step_path(run, 2)) | {"step": 3})
    act_before_indexes(monkeypatch, lambda: _overtake(run))
    more = (str(run.with_name("other.msgpack")),) if verb[0] == "diff" else verb[1:]
    out, err = inside(verb[0], str(run), *more, code=0)
    assert "this is its latest step, step_00000003" in err
    assert "step_00000002" not in out + err


@pytest.mark.parametrize("verb", ["cp", "convert"])
def test_a_copy_of_a_run_whose_steps_all_go_has_the_newer_one(
    run: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(step_path(run, 1))
    opened = act_before_indexes(monkeypatch, lambda: _overtake(run))
    assert "run, 1 step, " in inside(verb, str(run), f"{run}-copy", code=0)[0]
    assert opened[0] == "step_00000002"
    assert treering.Run(f"{run}-copy").steps() == [3]


def _overtake(run: Path) -> None:
    if not step_path(run, 3).exists():
        add_step(run, 3)
        shutil.rmtree(step_path(run, 2))


@readers
def test_what_is_missing_for_good_is_told(
    run: Path, read: Callable[[Path], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    opened = act_before_indexes(monkeypatch, refuse)
    with pytest.raises(NotFoundError, match="step_00000002"):
        read(run)
    assert opened == ["step_00000002"]


@readers
def test_damage_is_told_at_once(run: Path, read: Callable[[Path], int], monkeypatch: pytest.MonkeyPatch) -> None:
    index = step_path(run, 2) / INDEX
    index.write_bytes(index.read_bytes()[:-20])
    opened = act_before_indexes(monkeypatch, lambda: None)
    with pytest.raises(CorruptError, match="is damaged"):
        read(run)
    assert opened == ["step_00000002"]


@readers
def test_a_run_without_steps(tmp_path: Path, read: Callable[[Path], int]) -> None:
    (tmp_path / RUN_DOCUMENT).write_bytes(signed("treering_run", '"keep": null, "save_every": null, "steps": []}\n'))
    with pytest.raises(NotFoundError, match="has no step yet"):
        read(tmp_path)
