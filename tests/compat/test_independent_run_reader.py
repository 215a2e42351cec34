"""The specification of runs, held against what treering writes and believes."""

import datetime
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering as tr
from tests.command import inside
from tests.compat import independent_run_reader as referee
from tests.on_disk import signed, step_path, with_note
from tests.system_calls import refuse_removals
from treering.errors import StepPassedOverWarning, StoreError

PAGE = Path(__file__).parents[2] / "docs" / "spec" / "run.md"


def save(run: Path, step: int, **note: Any) -> None:
    described = with_note({"by": "me"}, step=step, saved=1795271101.25 + step, **note)
    tr.save(step_path(run, step), {"w": np.arange(5.0) + step}, metadata=described, overwrite=True)


def facts(run: Path) -> dict[int, tuple[Any, ...]]:
    """What ``treering log`` says."""
    steps = json.loads(inside("log", os.fspath(run), "--json", code=0)[0])["steps"]
    return {
        step["step"]: (
            datetime.datetime.fromisoformat(step["saved"]).timestamp(),
            {name: float(value) for name, value in step["metrics"].items()},
            step["temporary"],
            step["nbytes"],
        )
        for step in steps
    }


def test_the_referee_finds_the_same_steps_and_facts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(run, 7, metrics={"loss": 0.5, "norm": math.inf, "low": -math.inf, "one": 1})
    save(run, 123456789, temporary=True)
    tr.Run(run).gc(dry_run=False)  # writes run.json
    assert list(referee.of_cache(run)) == [7, 123456789]
    tr.save(step_path(run, 8), {"w": 1})
    save(run, 7, metrics={"loss": 0.75})
    (run / "step_9").mkdir()
    (run / "step_00000010").mkdir()
    (run / "step_00000011").symlink_to("step_00000007")
    assert list(referee.indexes(run)) == tr.Run(run).steps() == [7, 8, 123456789]
    wanted = {step: referee.of_note(index) for step, index in referee.indexes(run).items()}
    found = facts(run)
    assert {step: told[1:] for step, told in found.items()} == {step: told[1:] for step, told in wanted.items()}
    assert all(abs(found[step][0] - told[0]) < 1e-5 for step, told in wanted.items())
    assert list(referee.of_cache(run)) == [123456789]  # step 7 was saved anew, and 8 by hand
    tr.Run(run).gc(dry_run=False)
    assert list(referee.of_cache(run)) == [7, 8, 123456789]
    assert {step: told[1:] for step, told in referee.of_cache(run).items()} == {
        step: told[1:] for step, told in wanted.items()
    }


def test_the_referee_knows_what_was_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    run = tr.Run(path)
    for step in (7, 8, 9, 10):
        run.save(step, {"w": np.arange(5.0) + step})
    run.wait(60)
    damaged = step_path(path, 9) / "treering.json"
    damaged.write_bytes(b"damaged")
    refuse_removals(monkeypatch)
    with pytest.raises(StoreError, match="the program is gone"):
        run.save(7, {"w": np.arange(5.0)}, rollback=True).result(60)
    assert list(referee.indexes(path)) == tr.Run(path).steps() == [7]
    save(path, 10)
    assert list(referee.indexes(path)) == tr.Run(path).steps() == [7, 10]
    save(path, 7)
    assert list(referee.indexes(path)) == tr.Run(path).steps() == [7, 8, 9, 10]


def test_the_referee_knows_what_was_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for step in (7, 8, 9, 10):
        save(path, step)
    (step_path(path, 10) / "treering.json").write_bytes(b"damaged")
    for data in step_path(path, 9).glob("data-*"):
        data.unlink()
    with pytest.warns(StepPassedOverWarning):
        tr.Run(path).load(fallback=tr.Fallback())
    assert referee.passed(path) == {9, 10}
    noted = referee.signed((path / ".run.json.resumed").read_bytes(), "treering_resumed")
    (attempt,) = referee.attempt(referee.indexes(path)[8])
    assert noted["resumed"] == [{"step": 8, "attempt": attempt, "count": 1}]
    assert [one.step for one in tr.Run(path, keep=tr.KeepLast(1)).gc() if one.kept] == [8]
    save(path, 9)
    assert referee.passed(path) == {10}
    assert [one.step for one in tr.Run(path, keep=tr.KeepLast(1)).gc() if one.kept] == [9]


def test_what_a_tombstone_proves(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (7, 8):
        save(run, step)
    folder = step_path(run, 7)
    index = folder / "treering.json"
    attempt = json.loads(index.read_bytes())["attempt"]
    index.rename(folder / f".treering.json.{attempt}.removed")
    (folder / "data-0000000000000000-00000-of-00001.safetensors").write_bytes(b"a stranger's")
    (proved,) = referee.removable(folder).items()
    before = {path.name for path in folder.iterdir()}
    tr.Run(run).gc(dry_run=False)
    assert before - {path.name for path in folder.iterdir()} == {proved[0], *proved[1]}


def test_a_branch_says_where_it_comes_from(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(run, 7, temporary=True)
    tr.Run(run).branch(7, tmp_path / "new")
    (index,) = referee.indexes(tmp_path / "new").values()
    note = referee.signed(index.read_bytes(), "treering")["metadata"]["treering"]
    assert note["branch"] == {"run": os.fspath(run), "step": 7}
    assert note["temporary"] is False
    assert referee.of_cache(tmp_path / "new").keys() == {7}


def test_a_damaged_document_is_what_the_page_calls_whole_no_more(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    data = signed("treering_run", '"keep": null, "save_every": null, "steps": []}')
    (run / "run.json").write_bytes(data)
    assert referee.of_cache(run) == {}
    for place in range(len(data)):
        flipped = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        try:
            referee.signed(flipped, "treering_run")
        except (AssertionError, ValueError):
            continue
        raise AssertionError(place)
