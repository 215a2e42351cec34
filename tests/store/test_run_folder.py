"""A run's folder: which names are steps, what hostile folders do not do, and how ``run.json`` is replaced."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.store.checkpoints import open_descriptors, save
from treering._store.posix import open_descriptor
from treering._store.posix.folder import Folder
from treering._store.run_folder import HIGHEST_STEP, RunFolder, step_name, step_of_name
from treering.errors import Format, NotFound, StoreFailed


@given(st.integers(0, HIGHEST_STEP))
def test_each_step_has_one_name(step: int) -> None:
    assert step_of_name(step_name(step)) == step


@pytest.mark.parametrize(
    "name",
    [
        "step_1",
        "step_0000001",
        "step_000000001",
        "step_0100000000",
        "step_9223372036854775808",
        "step_" + "9" * 100,
        "step_" + "0" * 100,
        "step_-0000001",
        "step_+0000001",
        "step_0000000a",
        "step_\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661",
        "step_00000001\n",
        "step_00000001.bak",
        " step_00000001",
        "Step_00000001",
        "step_",
    ],
)
def test_no_other_name_is_a_steps(name: str) -> None:
    assert step_of_name(name) is None


def steps_of(path: Path) -> list[int]:
    with RunFolder(path) as run:
        return run.steps()


def test_steps_ascend_as_numbers(tmp_path: Path) -> None:
    for step in (1_000_000_000, 7, 999_999_999, HIGHEST_STEP, 0):
        save(tmp_path / step_name(step), b"x")
    assert steps_of(tmp_path) == [0, 7, 999_999_999, 1_000_000_000, HIGHEST_STEP]


def test_what_is_no_step_is_left_out(tmp_path: Path) -> None:
    before = open_descriptors()
    save(tmp_path / "run" / "step_00000001", b"x")
    save(tmp_path / "elsewhere", b"x")
    run = tmp_path / "run"
    (run / "step_00000002").mkdir()
    (run / "step_00000003").write_bytes(b"{}")
    (run / "step_00000004").symlink_to(tmp_path / "elsewhere")
    (run / "step_00000005").symlink_to("step_00000005")
    os.mkfifo(run / "step_00000006")
    for number, make in enumerate((Path.mkdir, os.mkfifo, lambda path: path.symlink_to("../step_00000001/x"))):
        folder = run / step_name(10 + number)
        folder.mkdir()
        make(folder / "treering.json")  # type: ignore[operator]
    save(run / "checkpoints", b"x")
    save(run / "step_1", b"x")
    assert steps_of(run) == [1]
    with RunFolder(run) as opened:
        assert opened.folders() == [1, 2, 10, 11, 12]
        for step in (2, 3, 4, 5, 6, 99):
            assert opened.read_head(step) is None
            assert opened.read_index(step) is None
    assert open_descriptors() == before


def test_the_run_itself_may_be_a_link(tmp_path: Path) -> None:
    save(tmp_path / "scratch" / "step_00000001", b"x")
    (tmp_path / "run").symlink_to("scratch")
    assert steps_of(tmp_path / "run") == [1]


def test_a_hub_snapshot_is_a_run_too(tmp_path: Path) -> None:
    """Its files are links to blobs by their hash."""
    run = tmp_path / "snapshots" / "main"
    save(run / "step_00000001", b"x")
    blob = tmp_path / "blobs" / ("a" * 64)
    blob.parent.mkdir()
    (run / "step_00000001" / "treering.json").rename(blob)
    (run / "step_00000001" / "treering.json").symlink_to(f"../../../blobs/{'a' * 64}")
    assert steps_of(run) == [1]


def test_nothing_and_a_file_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nowhere"):
        RunFolder(tmp_path / "nowhere")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreFailed, match="file"):
        RunFolder(tmp_path / "file")


def test_a_step_that_cannot_be_looked_at_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the latest: whoever goes on from an older one would lose it."""
    save(tmp_path / "step_00000001", b"x")
    real = os.stat

    def stat(path: Any, **keywords: Any) -> os.stat_result:
        if str(path).endswith("treering.json"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, **keywords)

    with RunFolder(tmp_path) as run:
        monkeypatch.setattr(os, "stat", stat)
        with pytest.raises(StoreFailed, match="Input/output error"):
            run.steps()


def test_without_looking_up_from_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treering._store.posix.folder.FROM_DESCRIPTOR", False)
    monkeypatch.setattr(open_descriptor, "open_folder", lambda path: Path(path).stat() and None)
    save(tmp_path / "run" / "step_00000001", b"x")
    (tmp_path / "run" / "step_00000002").symlink_to("step_00000001")
    with RunFolder(tmp_path / "run") as run:
        assert run.steps() == [1]
        assert run.open_step(2) is None
        assert run.open_step(3) is None
        assert run.read_head(1) is not None


class TestTheDocument:
    def test_it_is_replaced_as_a_whole(self, tmp_path: Path) -> None:
        before = open_descriptors()
        with RunFolder(tmp_path) as run:
            assert run.read_document() is None
            run.replace_document(b"one")
            run.replace_document(b"another")
            assert run.read_document() == b"another"
        assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
        assert open_descriptors() == before

    @pytest.mark.parametrize("what", ["link", "dangling link", "folder", "pipe"])
    def test_what_is_no_file_is_neither_read_nor_replaced(self, tmp_path: Path, what: str) -> None:
        run = tmp_path / "run"
        run.mkdir()
        precious = tmp_path / "precious"
        if what == "link":
            precious.write_bytes(b"mine")
        if what == "folder":
            (run / "run.json").mkdir()
        elif what == "pipe":
            os.mkfifo(run / "run.json")
        else:
            (run / "run.json").symlink_to(precious)
        with RunFolder(run) as opened:
            assert opened.read_document() is None
            with pytest.raises(Format, match=r"run\.json"):
                opened.replace_document(b"ours")
        assert precious.exists() == (what == "link")
        assert what != "link" or precious.read_bytes() == b"mine"
        assert [path.name for path in run.iterdir()] == ["run.json"]

    def test_a_huge_one_is_not_read(self, tmp_path: Path) -> None:
        with (tmp_path / "run.json").open("wb") as file:
            file.truncate(1 << 40)
        with RunFolder(tmp_path) as run:
            assert run.read_document() is None
            run.replace_document(b"ours")
            assert run.read_document() == b"ours"

    def test_an_error_leaves_the_old_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(descriptor: int, data: memoryview) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with RunFolder(tmp_path) as run:
            run.replace_document(b"old")
            monkeypatch.setattr("treering._store.posix.store.write_all", refuse)
            with pytest.raises(StoreFailed, match=r"run\.json.*No space left"):
                run.replace_document(b"new")
            assert run.read_document() == b"old"
        assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


class TestLinks:
    def test_a_second_name(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        (tmp_path / "a" / "x").write_bytes(b"x")
        with Folder(str(tmp_path / "a")) as one, Folder(str(tmp_path / "b")) as other:
            assert other.link_from(one, "x")
            assert not other.link_from(one, "nothing")
            with pytest.raises(FileExistsError):
                other.link_from(one, "x")
        assert (tmp_path / "b" / "x").samefile(tmp_path / "a" / "x")

    def test_of_a_link_there_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "x").symlink_to("/etc/hostname")
        with Folder(str(tmp_path / "a")) as one, Folder(str(tmp_path)) as other:
            assert not other.link_from(one, "x")
        assert not (tmp_path / "x").is_symlink()

    @pytest.mark.parametrize("reason", [errno.EXDEV, errno.EPERM, errno.EMLINK])
    def test_where_there_can_be_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int) -> None:
        def refuse(*names: object, **keywords: object) -> None:
            raise OSError(reason, os.strerror(reason))

        (tmp_path / "x").write_bytes(b"x")
        monkeypatch.setattr(os, "link", refuse)
        with Folder(str(tmp_path)) as folder:
            assert not folder.link_from(folder, "x")
