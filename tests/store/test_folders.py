"""Folders that are read: checkpoints and runs, whose names stay inside of them, and run.json, replaced as a whole."""

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import faults, limits
from tests.folders import open_descriptors
from tests.store.checkpoints import data_names, load, save, steps_of
from tests.store.platforms import without_dir_fd, without_nofollow, without_open_folders
from treering._runs.folder import RunFolder
from treering._store.open_folder import OpenFolder
from treering._store.posix.folder import Folder
from treering._values.checkpoint_names import HIGHEST_STEP, step_name, step_of_name
from treering.errors import (
    CorruptError,
    DataFileMissingError,
    FormatError,
    NotDirectoryError,
    NotFoundError,
    StoreError,
)

HASH = "ab" * 20


@pytest.fixture(params=["dir_fd", "no dir_fd", "no O_NOFOLLOW either"])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With and without what looks names up from an open folder."""
    if request.param != "dir_fd":
        (without_dir_fd if request.param == "no dir_fd" else without_nofollow)(monkeypatch)
    return str(request.param)


def hub_snapshot(repository: Path, below: str = "") -> Path:
    """A checkpoint as the hub's cache stores it: links into ``blobs``."""
    plain = repository / "plain"
    save(plain, b"treering")
    snapshot = repository / "snapshots" / "main" / below
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    up = "../" * len(snapshot.relative_to(repository).parts)
    for number, file in enumerate(sorted(plain.iterdir())):
        blob = f"{number:040x}" if number else f"{number:064x}"
        file.rename(repository / "blobs" / blob)
        (snapshot / file.name).symlink_to(f"{up}blobs/{blob}")
    return snapshot


@pytest.mark.usefixtures("platform")
class TestEverywhere:
    """What holds whatever the platform lacks."""

    def test_a_snapshot_of_the_hub_is_read(self, tmp_path: Path) -> None:
        snapshot = hub_snapshot(tmp_path)
        assert load(snapshot) == b"treering"
        (tmp_path / "link").symlink_to(snapshot)
        assert load(tmp_path / "link") == b"treering"

    def test_a_folder_in_a_snapshot_of_the_hub_is_read(self, tmp_path: Path) -> None:
        assert load(hub_snapshot(tmp_path, "checkpoints/last")) == b"treering"

    @pytest.mark.sampled(5)
    @pytest.mark.parametrize(
        "leads_to",
        [
            "../far.json",
            "../../far.json",
            "../../blobs/far.json",
            f"../../blobs/../{HASH}",
            f"../../../blobs/{HASH}",
            f"../blobs/{HASH}",
            f"../../others/{HASH}",
            "other.json",
        ],
    )
    @pytest.mark.parametrize("within", ["snapshots", "elsewhere"])
    def test_other_links_are_refused(self, tmp_path: Path, leads_to: str, within: str) -> None:
        path = tmp_path / "repository" / within / "main"
        path.mkdir(parents=True)
        target = path / leads_to
        target.resolve().parent.mkdir(exist_ok=True, parents=True)
        target.resolve().write_bytes(b"[[], []]")
        (path / "treering.json").symlink_to(leads_to)
        with OpenFolder(path) as opened, pytest.raises(FormatError, match=r"treering.json' is a link.*cp -L"):
            opened.read_index()
        name = data_names(HASH[:16])[0]
        (path / "treering.json").rename(path / name)
        with OpenFolder(path) as opened, pytest.raises(FormatError, match=f"{name}' is a link"):
            opened.open_files([name])

    def test_a_link_to_blobs_outside_of_a_snapshot_is_refused(self, tmp_path: Path) -> None:
        snapshot = hub_snapshot(tmp_path / "repository")
        (tmp_path / "repository" / "snapshots").rename(tmp_path / "repository" / "elsewhere")
        with pytest.raises(FormatError, match="is a link"):
            load(tmp_path / "repository" / "elsewhere" / snapshot.name)

    @pytest.mark.parametrize("what", ["blobs", "blob"])
    def test_links_behind_the_links_of_the_hub_are_refused(self, tmp_path: Path, what: str) -> None:
        snapshot = hub_snapshot(tmp_path)
        linked = tmp_path / "blobs" if what == "blobs" else (snapshot / "treering.json").resolve()
        linked.rename(tmp_path / "far")
        linked.symlink_to(tmp_path / "far")
        with pytest.raises(FormatError, match="is a link"):
            load(snapshot)

    @pytest.mark.sampled(5)
    @pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "../a", "a\\b", "c:a", "a\0"])
    def test_names_that_lead_elsewhere_are_refused(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "a").write_bytes(b"")
        with OpenFolder(tmp_path) as opened, pytest.raises(CorruptError, match="names a file outside of it"):
            opened.open_files([name])

    def test_a_missing_file_is_told_apart(self, tmp_path: Path) -> None:
        first, second = data_names(save(tmp_path, b"old"))
        (tmp_path / second).unlink()
        with OpenFolder(tmp_path) as opened, pytest.raises(DataFileMissingError, match="is missing in") as caught:
            opened.open_files([first, second])
        assert caught.value.name == second
        assert caught.value.filename == str(tmp_path / second)
        assert isinstance(caught.value, FileNotFoundError)

    @pytest.mark.parametrize("content", [[], ["config.json"], [f"{n}.txt" for n in range(9)]])
    def test_without_an_index_the_hint_says_what_is_there(self, tmp_path: Path, content: list[str]) -> None:
        for name in content:
            (tmp_path / name).write_bytes(b"")
        with OpenFolder(tmp_path) as opened, pytest.raises(NotFoundError, match="there is no checkpoint in") as caught:
            opened.read_index()
        assert (caught.value.hint or "").startswith("it holds" if content else "it is empty")
        assert len(content) < 9 or " and 4 more" in (caught.value.hint or "")

    def test_checkpoints_below_and_unfinished_saves_are_pointed_out(self, tmp_path: Path) -> None:
        save(tmp_path / "step_00000100", b"one")
        with OpenFolder(tmp_path) as opened, pytest.raises(NotFoundError, match="checkpoints in it: 'step_00000100'"):
            opened.read_index()
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / ".treering.json.0123456789abcdef.treering-tmp").write_bytes(b"")
        with OpenFolder(tmp_path / "a") as opened, pytest.raises(NotFoundError, match="a save that is running"):
            opened.read_index()


def test_files_once_open_stay_whole_during_an_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save(path, b"treering")
    with OpenFolder(path) as opened:
        files = opened.open_files(json.loads(opened.read_index())[0])
        save(path, b"something other", overwrite=True)
        assert b"".join(file.read(0, file.size) for file in files.values()) == b"treering"
        with pytest.raises(DataFileMissingError):
            opened.open_files(files)
        # The newer index names files that are there.
        newer = opened.open_files(json.loads(opened.read_index())[0])
        assert b"".join(file.read(0, file.size) for file in newer.values()) == b"something other"
    for file in [*files.values(), *newer.values()]:
        file.close()


def test_a_folder_once_open_is_the_one_that_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save(path, b"treering")
    with OpenFolder(path) as opened:
        path.rename(tmp_path / "b")
        save(path, b"another")
        (file, *_) = opened.open_files(json.loads(opened.read_index())[0]).values()
        assert file.read(0, 4) == b"tree"


def test_a_reader_takes_no_lock(tmp_path: Path) -> None:
    save(tmp_path / "a", b"old")
    with OpenFolder(tmp_path / "a") as opened:
        opened.read_index()
        save(tmp_path / "a", b"new", overwrite=True)


def test_nothing_and_a_file_at_the_path(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        OpenFolder(tmp_path / "a")
    assert caught.value.filename == str(tmp_path / "a")
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(NotDirectoryError, match="it is a file"):
        OpenFolder(tmp_path / "a")


def test_an_index_is_not_endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits.lower(monkeypatch, largest_document=7)
    (tmp_path / "treering.json").write_bytes(b"12345678")
    with OpenFolder(tmp_path) as opened, pytest.raises(FormatError, match="8 bytes: no index is that large"):
        opened.read_index()


def test_a_pipe_or_a_folder_in_the_place_of_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "treering.json")
    (tmp_path / "data").mkdir()
    with OpenFolder(tmp_path) as opened:
        with pytest.raises(StoreError, match="not a file"):
            opened.read_index()
        with pytest.raises(IsADirectoryError):
            opened.open_files(["data"])


def test_all_or_none_are_open(tmp_path: Path) -> None:
    first, _ = data_names(save(tmp_path, b"old"))
    before = open_descriptors()
    with OpenFolder(tmp_path) as opened:
        with pytest.raises(DataFileMissingError):
            opened.open_files([first, "nothing"])
        assert open_descriptors() == before + 1
        files = opened.open_files([first, first])
        assert list(files) == [first]
        files[first].close()
    assert open_descriptors() == before


def test_what_is_there_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.fail(monkeypatch, os, "listdir", errno.EIO)
    with OpenFolder(tmp_path) as opened, pytest.raises(NotFoundError, match="the content cannot be read"):
        opened.read_index()


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
    with pytest.raises(NotFoundError, match="nowhere"):
        RunFolder(tmp_path / "nowhere")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="file"):
        RunFolder(tmp_path / "file")


def test_a_step_that_cannot_be_looked_at_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the latest: whoever goes on from an older one would lose it."""
    save(tmp_path / "step_00000001", b"x")

    with RunFolder(tmp_path) as run:
        faults.fail(
            monkeypatch, os, "stat", errno.EIO, when=lambda path, **keywords: str(path).endswith("treering.json")
        )
        with pytest.raises(StoreError, match="Input/output error"):
            run.steps()


def test_without_looking_up_from_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_open_folders(monkeypatch)
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
            with pytest.raises(FormatError, match=r"run\.json"):
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
        with RunFolder(tmp_path) as run:
            run.replace_document(b"old")
            faults.fail(monkeypatch, os, "write", errno.ENOSPC)
            with pytest.raises(StoreError, match=r"run\.json.*No space left"):
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
        (tmp_path / "x").write_bytes(b"x")
        faults.fail(monkeypatch, os, "link", reason)
        with Folder(str(tmp_path)) as folder:
            assert not folder.link_from(folder, "x")
