"""A run of ours converted step by step into another one, and a conversion that was interrupted."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering as tr
from tests.command import inside
from tests.on_disk import step_path
from tests.reads import act_before_conversions
from treering.errors import (
    BusyError,
    CorruptError,
    ExistsError,
    FormatError,
    MismatchError,
    NotFoundError,
    UnsupportedError,
)


def _tree(step: int) -> dict[str, Any]:
    return {"params": {"w": np.arange(300, dtype=np.float32) + step, "b": np.ones(3, np.int8)}, "step": step}


def _save(path: Path, *steps: int, **options: Any) -> None:
    with tr.Run(path, keep=tr.KeepLast(9)) as run:
        for step in steps:
            loss = float("nan") if step == 30 else 1.0 / step
            run.save(step, _tree(step), metrics={"loss": loss}, metadata={"by": f"me at {step}"}, **options)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    _save(path, 10, 20, 30)
    return path


def _index(path: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((step_path(path, step) / "treering.json").read_bytes())
    return found


def _note(path: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = _index(path, step)["metadata"]["treering"]
    return found


def _attempts(path: Path) -> list[str]:
    return [_index(path, step)["attempt"] for step in tr.Run(path).steps()]


def _flip(path: Path) -> Callable[[], int]:
    """Damage a step, and return what repairs it."""
    (file,) = path.glob("data-*")
    before = file.read_bytes()
    data = bytearray(before)
    data[-400] ^= 1
    file.write_bytes(data)
    return lambda: file.write_bytes(before)


def test_every_step_with_all_that_is_known_of_it(run: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    tr.convert(run, new)
    found = tr.Run(new)
    assert found.steps() == [10, 20, 30]
    assert (found.best("loss"), found.metrics(10)) == (20, {"loss": 0.1})
    assert np.isnan(found.metrics(30)["loss"])
    for step in (10, 20, 30):
        assert tr.diff(step_path(run, step), step_path(new, step), values=True).differences == ()
        assert _index(new, step)["metadata"]["by"] == f"me at {step}"
        note = _note(new, step)
        converted = note.pop("converted")
        assert note == _note(run, step)
        assert (converted["path"], converted["step"]) == (str(run), step)
    assert tr.verify(new).ok
    assert json.loads((new / "run.json").read_bytes())["keep"] == "KeepLast(9)"
    attempts = _attempts(new)
    tr.convert(run, new)
    assert _attempts(new) == attempts


def test_a_later_call_adds_the_steps_that_are_new(run: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    tr.convert(run, new)
    attempts = _attempts(new)
    _save(run, 40)
    tr.Run(run, keep=tr.retention.KeepSteps(20, 30, 40)).gc(dry_run=False)
    tr.convert(run, new)
    assert tr.Run(new).steps() == [10, 20, 30, 40]
    assert _attempts(new)[:3] == attempts
    with tr.Run(new) as own:
        own.save(50, _tree(50))
    with pytest.raises(ExistsError, match=r"is another run: its step 50 is none of the steps of .*; convert to"):
        tr.convert(run, new)


def test_the_options_are_about_each_step_and_are_no_others_later(run: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    options: dict[str, Any] = {"at": "params", "only": "w", "dtype": "bfloat16"}
    tr.convert(run, new, **options)
    tr.convert(run, new, **options | {"only": ["w"]})
    for step in (10, 30):
        tree = tr.load(step_path(new, step))
        assert {key: leaf.dtype.name for key, leaf in tree.items()} == {"w": "bfloat16"}
    attempts = _attempts(new)
    with pytest.raises(
        ExistsError, match=r"step 10 of .*/step_00000010' was made of another save .* or with other options"
    ):
        tr.convert(run, new)
    assert _attempts(new) == attempts
    tr.convert(run, new, overwrite=True)
    assert tr.Run(new).load(30)["step"] == 30
    tr.convert(run, new)
    names = tr.KeyMap([tr.KeyRule("params/{n}", "{n}"), tr.KeyRule("step", None)])
    tr.convert(run, tmp_path / "mapped", key_map=names)
    tr.convert(run, tmp_path / "mapped", key_map=names)
    assert sorted(tr.Run(tmp_path / "mapped").load(20)) == ["b", "w"]


def test_a_step_that_was_saved_again_is_not_mixed_with_the_old_one(run: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    tr.convert(run, new)
    _save(run, 30, rollback=True)
    with pytest.raises(ExistsError, match=r"step 30 of .* was made of another save of the step"):
        tr.convert(run, new)
    tr.convert(run, new, overwrite=True)
    assert _note(new, 30)["saved"] == _note(run, 30)["saved"]
    _save(run, 20, rollback=True)
    with pytest.raises(ExistsError, match=r"its step 30 is none of the steps of"):
        tr.convert(run, new, overwrite=True)
    assert tr.Run(new).steps() == [10, 20, 30]


def test_what_is_no_new_run_is_refused(run: Path, tmp_path: Path) -> None:
    cases: list[tuple[str, dict[str, Any], type[Exception], str]] = [
        ("run", {}, UnsupportedError, "is, or lies in, the source"),
        ("run/new", {"overwrite": True}, UnsupportedError, "is, or lies in, the source"),
        ("new.safetensors", {}, UnsupportedError, "is a run, and .* would hold one step; convert one of its steps"),
        ("new", {"to": "hf"}, UnsupportedError, "is a run, and .* would hold one step"),
        ("run/step_00000010", {"overwrite": True}, UnsupportedError, "lies in, the source"),
        ("ckpt", {"overwrite": True}, FormatError, "is a checkpoint, not a run"),
        ("other", {"overwrite": True}, ExistsError, "is another run: its step 5 is none of"),
        ("of another", {"overwrite": True}, ExistsError, "its step 7 is none of"),
    ]
    tr.save(tmp_path / "ckpt", {"w": 1})
    _save(tmp_path / "other", 5)
    _save(tmp_path / "third", 7)
    tr.convert(tmp_path / "third", tmp_path / "of another")
    for target, options, error, problem in cases:
        with pytest.raises(error, match=problem):
            tr.convert(run, tmp_path / target, **options)
    assert tr.Run(tmp_path / "of another").steps() == [7]
    assert not (tmp_path / "new").exists()
    with tr.Run(tmp_path / "empty") as empty:
        empty.save(1, {})
    (step_path(tmp_path / "empty", 1) / "treering.json").unlink()
    with pytest.raises(NotFoundError, match="no step"):
        tr.convert(tmp_path / "empty", tmp_path / "new")


def test_a_step_that_cannot_be_converted_is_named_and_keeps_no_other(run: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    repairs = [_flip(step_path(run, 10)), _flip(step_path(run, 20))]
    with pytest.raises(CorruptError, match=r"^steps 10 and 20 of .* could not be converted; step 10: leaf 'params/w'"):
        tr.convert(run, new)
    assert tr.Run(new).steps() == [30]
    attempts = _attempts(new)
    repairs.pop()()
    with pytest.raises(CorruptError, match=r"^step 10 of .*run' could not be converted: leaf 'params/w'"):
        tr.convert(run, new)
    repairs.pop()()
    tr.convert(run, new)
    assert tr.Run(new).steps() == [10, 20, 30]
    assert _attempts(new)[2:] == attempts
    with pytest.raises(MismatchError, match=r"^steps 10, 20 and 30 of .* could not be converted; step 10: .*'nothing'"):
        tr.convert(run, tmp_path / "none", at="nothing")


def test_a_step_that_goes_meanwhile_is_left_out_and_one_that_is_replaced_is_not_mixed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change: list[Callable[[], object]] = [lambda: _save(run, 30, rollback=True)]

    def change_first(source: Path) -> None:
        if change and os.fspath(source) == os.fspath(step_path(run, 30)):
            change.pop()()

    act_before_conversions(monkeypatch, change_first)
    with pytest.raises(
        BusyError, match=r"^step 30 of .* was not converted: .* was replaced while it was being converted"
    ):
        tr.convert(run, tmp_path / "new")
    change.append((step_path(run, 30) / "treering.json").unlink)
    tr.convert(run, tmp_path / "new")
    assert tr.Run(tmp_path / "new").steps() == [10, 20]


@contextlib.contextmanager
def _dead_from(first: int) -> Iterator[list[str]]:
    """Let all changes fail from one on, as if the process were dead; yield the names of those that failed."""
    failed: list[str] = []
    count = itertools.count(1)

    def around(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            if next(count) >= first:
                failed.append(real.__name__)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*args, **keywords)

        return call

    calls = ("fsync", "ftruncate", "link", "mkdir", "pwrite", "rename", "replace", "rmdir", "unlink", "write")
    with pytest.MonkeyPatch.context() as patch:
        for name in calls:
            patch.setattr(os, name, around(getattr(os, name)))
        yield failed


def test_a_second_call_goes_on_wherever_the_first_one_died(tmp_path: Path) -> None:
    run = tmp_path / "run"
    _save(run, 10, 20)
    seen = set()
    for at in itertools.count(1):
        new = tmp_path / f"new{at}"
        with _dead_from(at) as failed, contextlib.suppress(OSError):
            tr.convert(run, new)
        if not failed:
            break
        done = dict(zip(steps := tr.Run(new).steps(), _attempts(new), strict=True)) if new.exists() else {}
        seen.add(len(done))
        assert list(done) == [10, 20][: len(done)], steps
        tr.convert(run, new)
        found = tr.Run(new)
        assert (found.steps(), found.best("loss")) == ([10, 20], 20)
        assert all(_index(new, step)["attempt"] == attempt for step, attempt in done.items())
        assert tr.verify(new).ok
        assert not [step for step in {10, 20} - done.keys() if len(list(step_path(new, step).iterdir())) > 2]
    assert seen == {0, 1, 2}


def test_the_verb(run: Path, tmp_path: Path) -> None:
    new = os.fspath(tmp_path / "new")
    inside("convert", os.fspath(run), new, "--only", "params/w", code=0)
    assert tr.load(step_path(tmp_path / "new", 20)).keys() == {"params"}
    assert "--overwrite replaces it" in inside("convert", os.fspath(run), new, code=2)[1]
    inside("convert", os.fspath(run), new, "--overwrite", code=0)
    assert tr.Run(new).load()["step"] == 30
    listed = json.loads(inside("ls", new, "--json", code=0)[0])
    assert [step["metrics"]["loss"] for step in listed["steps"]] == [0.1, 0.05, "nan"]
