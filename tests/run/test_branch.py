"""Steps copied into runs of their own: whole, durable, by hard links where there can be some, or not at all."""

import contextlib
import errno
import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering as tr
from tests import faults
from tests.command import inside
from tests.on_disk import note_step, step_path, with_note
from treering import verify
from treering.errors import CorruptError, ExistsError, NotFoundError, StoreError, TreeringError


def save(path: Path, step: int, **note: Any) -> None:
    tree = {"w": np.arange(1000.0) + step, "name": "x"}
    metadata = with_note({"by": "me"}, step=step, saved=1000.5, metrics={"loss": float("nan")}, **note)
    tr.save(path, tree, metadata=metadata, overwrite=True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    for step in (10, 20):
        save(step_path(path, step), step)
        note_step(path, step)
    return path


def branch(run: Path, new: Path, step: int = 10) -> None:
    tr.Run(run).branch(step, new, keep=tr.KeepLast(3))


def steps_of(run: Path) -> list[int]:
    return tr.Run(run).steps()


def remove(run: Path, step: int) -> None:
    """Remove a step that is not the newest."""
    tr.Run(run, keep=tr.retention.KeepSteps(*set(steps_of(run)) - {step})).gc(dry_run=False)


def files_of(step: Path) -> list[str]:
    """The data files that an index names, those that it replaced too."""
    index = json.loads((step / "treering.json").read_bytes())
    return [*(file["name"] for file in index["files"]), *index["replaces"]]


def temporary(run: Path) -> list[bool]:
    steps = json.loads(inside("ls", os.fspath(run), "--json", code=0)[0])["steps"]
    return [step["temporary"] for step in steps]


def data_of(step: Path) -> list[Path]:
    return sorted(step.glob("data-*"))


def test_a_step_with_its_data_under_a_second_name(run: Path, tmp_path: Path) -> None:
    new = tmp_path / "deep" / "new"
    branch(run, new)
    assert steps_of(new) == [10]
    for one, other in zip(data_of(step_path(run, 10)), data_of(step_path(new, 10)), strict=True):
        assert one.samefile(other)
    assert tr.load(new)["w"][0] == 10
    assert verify(step_path(new, 10)).ok
    with tr.open(step_path(new, 10)) as opened:
        metadata = dict(opened.metadata)
    note = metadata.pop("treering")
    before = with_note({}, step=10, saved=1000.5, metrics={"loss": float("nan")})["treering"]
    assert note == before | {"branch": {"run": os.fspath(run), "step": 10}}
    assert metadata == {"by": "me"}
    assert json.loads((new / "run.json").read_bytes())["keep"] == "KeepLast(3)"
    assert {path.name for path in new.iterdir()} == {"run.json", "step_00000010"}


def test_each_outlives_the_other(run: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        branch(run, tmp_path / f"new{number}")
    with tr.Run(tmp_path / "new1") as new:
        new.save(11, {"w": 1})
    remove(run, 10)
    remove(tmp_path / "new1", 10)
    assert not step_path(tmp_path / "new1", 10).exists()
    assert tr.load(tmp_path / "new2")["w"][0] == 10
    assert steps_of(run) == [20]


def test_a_temporary_step_is_kept_there(run: Path, tmp_path: Path) -> None:
    save(step_path(run, 30), 30, temporary=True)
    branch(run, tmp_path / "new", 30)
    assert temporary(run) == [False, False, True]
    assert temporary(tmp_path / "new") == [False]


def test_a_checkpoint_that_was_saved_by_hand(run: Path, tmp_path: Path) -> None:
    tr.save(step_path(run, 30), {"w": 1})
    branch(run, tmp_path / "new", 30)
    assert tr.load(tmp_path / "new") == {"w": 1}


def test_what_the_step_replaced_is_not_the_branchs(run: Path, tmp_path: Path) -> None:
    save(step_path(run, 10), 10)
    assert len(files_of(step_path(run, 10))) == 2
    branch(run, tmp_path / "new")
    assert len(files_of(step_path(tmp_path / "new", 10))) == 1


@pytest.mark.parametrize("reason", [errno.EXDEV, errno.EPERM])
def test_without_hard_links_the_bytes_are_copied(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    faults.fail(
        monkeypatch,
        os,
        "link",
        reason,
        when=lambda *names, **keywords: keywords["src_dir_fd"] != keywords["dst_dir_fd"],
    )
    branch(run, tmp_path / "new")
    assert tr.load(tmp_path / "new")["w"][0] == 10
    (one,), (other,) = data_of(step_path(run, 10)), data_of(step_path(tmp_path / "new", 10))
    assert one.read_bytes() == other.read_bytes()
    assert not one.samefile(other)


def test_damage_is_not_copied_to_another_store(run: Path) -> None:
    (file,) = data_of(step_path(run, 10))
    data = bytearray(file.read_bytes())
    data[4096] ^= 1
    file.write_bytes(bytes(data))
    with tr.Run(run) as open_run, pytest.raises(CorruptError, match="is damaged"):
        open_run.branch(10, "memory://damaged-branch")
    with tr.Run("memory://damaged-branch") as other:
        assert other.steps() == []


def test_a_missing_step_names_those_that_are_there(run: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no step 15; it has steps 10 and 20"):
        branch(run, tmp_path / "new", 15)
    with pytest.raises(NotFoundError, match="nowhere"):
        branch(tmp_path / "nowhere", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_over_a_run_there_is_no_branch(run: Path, tmp_path: Path) -> None:
    save(step_path(tmp_path / "new", 3), 3)
    for new in (tmp_path / "new", run):
        with pytest.raises(ExistsError, match="is already a run"):
            branch(run, new)
    assert steps_of(tmp_path / "new") == [3]


def test_a_folder_with_files_of_others_is_taken(run: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "log.txt").write_bytes(b"mine")
    branch(run, tmp_path / "new")
    assert steps_of(tmp_path / "new") == [10]


@pytest.mark.parametrize("damage", ["index", "short", "header", "missing", "link"])
def test_a_damaged_step_begins_no_run(run: Path, tmp_path: Path, damage: str) -> None:
    step = step_path(run, 10)
    (data,) = data_of(step)
    if damage == "index":
        (step / "treering.json").write_bytes(b"{")
    elif damage == "short":
        os.truncate(data, 5000)
    elif damage == "header":
        data.write_bytes(data.read_bytes().replace(b"w", b"v", 1))
    else:
        data.rename(tmp_path / "data")
        if damage == "link":
            data.symlink_to(tmp_path / "data")
    with pytest.raises(TreeringError, match="step_00000010"):
        branch(run, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_step_that_goes_meanwhile(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    def late(name: Any, *arguments: Any, **options: Any) -> None:
        if Path(name).name.startswith("data-") and not done:  # the index is read
            done.append(name)
            remove(run, 10)

    faults.before(monkeypatch, os, "open", late)
    with pytest.raises(NotFoundError, match=r"no step 10; .* 20"):
        branch(run, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_a_branch_left_that_died_is_swept_by_the_next(run: Path, tmp_path: Path) -> None:
    (data,) = data_of(step_path(run, 10))
    left = step_path(tmp_path / "new", 10)
    left.mkdir(parents=True)
    (left / f".treering.json.{data.name[5:21]}.treering-tmp").write_bytes(b"")
    os.link(data, left / data.name)
    branch(run, tmp_path / "new")
    assert tr.load(tmp_path / "new")["w"][0] == 10
    assert len(list(left.iterdir())) == 2


def test_every_error_leaves_no_run_or_a_whole_one(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = ("link", "fsync", "replace", "mkdir", "write", "listdir", "stat", "fstat", "pread", "unlink")
    for at in itertools.count(1):
        new = tmp_path / f"new{at}"
        left = at
        with monkeypatch.context() as patch:

            def failing(real: Any) -> Any:
                def call(*args: Any, **keywords: Any) -> Any:
                    nonlocal left
                    left -= 1
                    if left == 0:
                        raise OSError(errno.EIO, os.strerror(errno.EIO))
                    return real(*args, **keywords)

                return call

            for name in calls:
                patch.setattr(os, name, failing(getattr(os, name)))
            with contextlib.suppress(StoreError, NotFoundError):
                branch(run, new)
        if left > 0:
            break
        if new.exists() and steps_of(new):
            assert tr.load(new)["w"][0] == 10
        else:
            branch(run, new)
        assert verify(step_path(new, 10)).ok
        tr.Run(new).gc(dry_run=False)
        assert all("tmp" not in path.name for path in step_path(new, 10).iterdir())
    assert at > 20
    assert tr.load(run)["w"][0] == 20


def test_an_index_of_another_hand_is_refused(run: Path, tmp_path: Path) -> None:
    index = step_path(run, 10) / "treering.json"
    index.write_bytes(index.read_bytes().replace(b'"by":"me"', b'"by":"it"'))
    with pytest.raises(CorruptError, match="digest"):
        branch(run, tmp_path / "new")
