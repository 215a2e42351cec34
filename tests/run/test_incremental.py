"""Runs whose steps share the files of what did not change."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering as tr
from tests import limits
from tests.command import here
from tests.reads import bytes_read, forbid_memory_of_blocks
from treering.errors import CorruptError, UnsupportedError


@pytest.fixture(autouse=True)
def small_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    limits.lower(monkeypatch, compared_box=1024)


@pytest.fixture(params=["disk", "memory"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a run lies."""
    return str(tmp_path / "run") if request.param == "disk" else f"memory://incremental/{os.urandom(4).hex()}"


def state(step: int) -> dict[str, Any]:
    """A frozen base, a stacked leaf with one layer that is trained, and a count."""
    layers = np.ones((8, 256), np.float32)
    layers[3] += step
    return {"base": np.arange(3000.0), "layers": layers, "step": step}


def assert_state(found: Any, step: int) -> None:
    assert all(np.array_equal(found[key], leaf) for key, leaf in state(step).items())


def files(run: Path, step: int) -> dict[str, int]:
    """The data files of a step, each with the number of the file."""
    return {file.name: file.stat().st_ino for file in (run / f"step_{step:08}").glob("data-*")}


def test_every_step_loads_whatever_went_before(path: str) -> None:
    with tr.Run(path, incremental=True, keep=tr.KeepLast(3)) as run:
        for step in range(10):
            run.save(step, state(step))
        run.wait()
        assert run.steps() == [7, 8, 9]
        for step in run.steps():
            assert_state(run.load(step), step)
        run.delete(7)
        run.delete(9)
        assert_state(run.load(), 8)
    assert tr.verify(path).ok
    with tr.Run(path, incremental=True) as run:  # a new program goes on from what is there
        run.save(20, state(20))
        run.save(9, state(9), rollback=True)
        run.save(10, state(10))
        run.wait()
        assert run.steps() == [8, 9, 10]
        for step in run.steps():
            assert_state(run.load(step), step)
    assert tr.verify(path).ok


def test_what_is_frozen_is_written_once_and_full_every_writes_it_anew(tmp_path: Path) -> None:
    with tr.Run(tmp_path, incremental=True, full_every=4) as run:
        for step in range(5):
            run.save(step, state(step))
    with tr.Run(tmp_path, incremental=True, full_every=4) as run:  # it counts on
        for step in range(5, 9):
            run.save(step, state(step))
    numbers = [set(files(tmp_path, step).values()) for step in range(9)]
    for step in range(1, 9):
        shared = numbers[step] & numbers[step - 1]
        assert bool(shared) == (step not in (4, 8))
        new = sum(file.stat().st_size for file in (tmp_path / f"step_{step:08}").glob("data-*"))
        if shared:
            assert max(file.stat().st_size for file in (tmp_path / f"step_{step:08}").glob("data-*")) > 24000
            assert new < 24000 + 8192 + 2 * 4096 + 1024 + 1
    for step in range(9):
        shutil.copytree(tmp_path / f"step_{step:08}", tmp_path.parent / f"copy {step}")
    shutil.rmtree(tmp_path)
    for step in range(9):
        assert_state(tr.load(tmp_path.parent / f"copy {step}"), step)


def test_a_step_that_is_gone_or_damaged_is_no_base_and_no_error(tmp_path: Path) -> None:
    with tr.Run(tmp_path, incremental=True) as run:
        run.save(1, state(1))
        run.wait()
        (tmp_path / "step_00000001" / "treering.json").write_text("{}")
        run.save(2, state(2))
        run.wait()
        shutil.rmtree(tmp_path / "step_00000002")
        run.save(3, state(3))
        run.wait()
        run.save(4, {"other": np.ones(3)})
        run.wait()
        assert_state(run.load(3), 3)
        assert np.array_equal(run.load(4)["other"], np.ones(3))


def damage(run: Path, step: int) -> None:
    """Change a byte of a leaf that does not change, in the files of one step."""
    for file in (run / f"step_{step:08}").glob("data-*"):
        content = bytearray(file.read_bytes())
        content[4096 + 5] ^= 1
        file.chmod(0o644)
        file.write_bytes(content)


@pytest.mark.parametrize("resumes", ["by itself", "by number", "not at all"])
def test_a_step_that_was_found_damaged_is_no_base(tmp_path: Path, resumes: str) -> None:
    with tr.Run(tmp_path, incremental=True, full_every=1) as run:
        for step in (1, 2):
            run.save(step, state(step))
    damage(tmp_path, 2)
    with tr.Run(tmp_path, incremental=True) as run:
        if resumes == "by itself":
            with pytest.warns(tr.errors.StepPassedOverWarning):
                assert_state(run.load(fallback=True), 1)
        else:
            with pytest.raises(CorruptError):
                run.load()
            if resumes == "by number":
                assert_state(run.load(1), 1)
        run.save(3, state(3))
        run.save(4, state(4))
        run.wait()
        assert {*files(tmp_path, 3).values()} & {*files(tmp_path, 1).values()}
        damage(tmp_path, 4)  # the files that it shares, too
        tr.save(tmp_path / "step_00000001", state(1), overwrite=True)
        with pytest.warns(tr.errors.StepPassedOverWarning):
            assert_state(run.load(fallback=True), 1)
        run.save(5, state(5))
    assert tr.verify(tmp_path / "step_00000005").ok


def test_a_step_that_was_passed_over_by_another_program_is_no_base(tmp_path: Path) -> None:
    with tr.Run(tmp_path, incremental=True, full_every=1) as run:
        for step in (1, 2):
            run.save(step, state(step))
    damage(tmp_path, 2)
    with tr.Run(tmp_path) as run, pytest.warns(tr.errors.StepPassedOverWarning):
        run.load(fallback=True)
    with tr.Run(tmp_path, incremental=True) as run:
        run.save(3, state(3))
    assert tr.verify(tmp_path / "step_00000003").ok
    assert {*files(tmp_path, 3).values()} & {*files(tmp_path, 1).values()}


def test_a_plain_save_counts_as_the_first_of_a_chain(tmp_path: Path) -> None:
    with tr.Run(tmp_path) as run:
        run.save(1, state(1))
    with tr.Run(tmp_path, incremental=True, full_every=1) as run:
        run.save(2, state(2))
    assert not {*files(tmp_path, 1).values()} & {*files(tmp_path, 2).values()}


def test_branches_share_and_are_whole(tmp_path: Path) -> None:
    with tr.Run(tmp_path / "a", incremental=True) as run:
        for step in range(3):
            run.save(step, state(step))
        run.wait()
        branch = run.branch(1, tmp_path / "b")
    with tr.Run(tmp_path / "b", incremental=True) as branch:
        branch.save(5, state(5))
        branch.wait()
    assert set(files(tmp_path / "b", 5).values()) & set(files(tmp_path / "a", 0).values())
    shutil.rmtree(tmp_path / "a")
    with tr.Run(tmp_path / "b") as branch:
        assert_state(branch.load(1), 1)
        assert_state(branch.load(5), 5)
    assert tr.verify(tmp_path / "b").ok


def test_other_values_of_the_options_are_refused(tmp_path: Path) -> None:
    wrong: list[dict[str, Any]] = [
        {"full_every": 3}, {"incremental": True, "full_every": 0}, {"incremental": True, "full_every": True},
        {"incremental": "yes"}, {"incremental": True, "full_every": 1.5},
    ]  # fmt: skip
    for options in wrong:
        with pytest.raises(UnsupportedError, match=r"full_every is a number of saves"):
            tr.Run(tmp_path, **options)


def test_a_run_is_verified_by_reading_each_shared_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tr.Run(tmp_path, incremental=True) as run:
        for step in range(5):
            run.save(step, state(step))
    read = bytes_read(monkeypatch)
    found = tr.verify(tmp_path)
    assert found.ok
    assert found.nbytes == 5 * (24000 + 8192)
    assert sum(read) == 24000 + 8192 + 4 * 1024


def test_nothing_is_remembered_of_files_that_no_other_step_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tr.Run(tmp_path) as run:
        run.save(1, state(1))
        run.save(2, state(2))
    forbid_memory_of_blocks(monkeypatch)
    assert tr.verify(tmp_path).ok


def test_damage_to_a_shared_file_names_all_steps_that_share_it(tmp_path: Path) -> None:
    with tr.Run(tmp_path, incremental=True) as run:
        for step in range(4):
            run.save(step, state(step))
    (file,) = (tmp_path / "step_00000000").glob("data-*")
    file.chmod(0o644)
    content = bytearray(file.read_bytes())
    content[4096 + 5] ^= 1
    file.write_bytes(content)
    damaged = {Path(finding.file).parts[0] for finding in tr.verify(tmp_path).findings}
    assert damaged == {f"step_{step:08}" for step in range(4)}
    assert {finding.key for finding in tr.verify(tmp_path).findings} == {"base"}
    with tr.Run(tmp_path, incremental=True, full_every=1) as run:
        run.save(9, state(9))
    assert tr.verify(tmp_path / "step_00000009").ok


def test_du_says_what_the_steps_share(tmp_path: Path) -> None:
    with tr.Run(tmp_path / "plain") as run:
        run.save(1, state(1))
        run.save(2, state(2))
    assert "on the disk" not in here("du", str(tmp_path / "plain"), code=0).stdout
    with tr.Run(tmp_path / "run", incremental=True) as run:
        for step in range(4):
            run.save(step, state(step))
    last = here("du", str(tmp_path / "run"), code=0).stdout.splitlines()[-1]
    assert last == (
        "data files of 4 steps: 157 KiB by their names, 50.4 KiB on the disk, 5.00 KiB of these in step 3 alone"
    )
