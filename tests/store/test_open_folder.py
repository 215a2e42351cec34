"""OpenFolder: reading stays inside the folder, and a save at the same time takes nothing away."""

import errno
import json
import os
from pathlib import Path

import pytest

from tests.store.checkpoints import data_names, load, open_descriptors, save
from treering._store import open_folder
from treering._store.failures import DataFileMissing
from treering._store.open_folder import OpenFolder
from treering._store.posix import folder
from treering.errors import Corrupt, Format, NotDirectory, NotFound, StoreFailed

HASH = "ab" * 20


@pytest.fixture(params=["dir_fd", "no dir_fd", "no O_NOFOLLOW either"])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With and without what looks names up from an open folder."""
    if request.param != "dir_fd":
        monkeypatch.setattr(folder, "FROM_DESCRIPTOR", False)
    if request.param == "no O_NOFOLLOW either":
        monkeypatch.delattr(os, "O_NOFOLLOW")
        monkeypatch.setattr(folder, "CAREFUL", os.O_CLOEXEC)
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
        with OpenFolder(path) as opened, pytest.raises(Format, match=r"treering.json' is a link.*cp -L"):
            opened.read_index()
        name = data_names(HASH[:16])[0]
        (path / "treering.json").rename(path / name)
        with OpenFolder(path) as opened, pytest.raises(Format, match=f"{name}' is a link"):
            opened.open_files([name])

    def test_a_link_to_blobs_outside_of_a_snapshot_is_refused(self, tmp_path: Path) -> None:
        snapshot = hub_snapshot(tmp_path / "repository")
        (tmp_path / "repository" / "snapshots").rename(tmp_path / "repository" / "elsewhere")
        with pytest.raises(Format, match="is a link"):
            load(tmp_path / "repository" / "elsewhere" / snapshot.name)

    @pytest.mark.parametrize("what", ["blobs", "blob"])
    def test_links_behind_the_links_of_the_hub_are_refused(self, tmp_path: Path, what: str) -> None:
        snapshot = hub_snapshot(tmp_path)
        linked = tmp_path / "blobs" if what == "blobs" else (snapshot / "treering.json").resolve()
        linked.rename(tmp_path / "far")
        linked.symlink_to(tmp_path / "far")
        with pytest.raises(Format, match="is a link"):
            load(snapshot)

    @pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "../a", "a\\b", "c:a", "a\0"])
    def test_names_that_lead_elsewhere_are_refused(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "a").write_bytes(b"")
        with OpenFolder(tmp_path) as opened, pytest.raises(Corrupt, match="names a file outside of it"):
            opened.open_files([name])

    def test_a_missing_file_is_told_apart(self, tmp_path: Path) -> None:
        first, second = data_names(save(tmp_path, b"old"))
        (tmp_path / second).unlink()
        with OpenFolder(tmp_path) as opened, pytest.raises(DataFileMissing, match="is missing in") as caught:
            opened.open_files([first, second])
        assert caught.value.name == second
        assert caught.value.filename == str(tmp_path / second)
        assert isinstance(caught.value, FileNotFoundError)

    @pytest.mark.parametrize("content", [[], ["config.json"], [f"{n}.txt" for n in range(9)]])
    def test_without_an_index_the_hint_says_what_is_there(self, tmp_path: Path, content: list[str]) -> None:
        for name in content:
            (tmp_path / name).write_bytes(b"")
        with OpenFolder(tmp_path) as opened, pytest.raises(NotFound, match="there is no checkpoint in") as caught:
            opened.read_index()
        assert (caught.value.hint or "").startswith("it holds" if content else "it is empty")
        assert len(content) < 9 or " and 4 more" in (caught.value.hint or "")

    def test_checkpoints_below_and_unfinished_saves_are_pointed_out(self, tmp_path: Path) -> None:
        save(tmp_path / "step_00000100", b"one")
        with OpenFolder(tmp_path) as opened, pytest.raises(NotFound, match="checkpoints in it: 'step_00000100'"):
            opened.read_index()
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / ".treering.json.0123456789abcdef.treering-tmp").write_bytes(b"")
        with OpenFolder(tmp_path / "a") as opened, pytest.raises(NotFound, match="a save that is running"):
            opened.read_index()


def test_files_once_open_stay_whole_during_an_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save(path, b"treering")
    with OpenFolder(path) as opened:
        files = opened.open_files(json.loads(opened.read_index())[0])
        save(path, b"something other", overwrite=True)
        assert b"".join(file.read(0, file.size) for file in files.values()) == b"treering"
        with pytest.raises(DataFileMissing):
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
    with pytest.raises(NotFound) as caught:
        OpenFolder(tmp_path / "a")
    assert caught.value.filename == str(tmp_path / "a")
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(NotDirectory, match="it is a file"):
        OpenFolder(tmp_path / "a")


def test_an_index_is_not_endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_folder, "LARGEST_DOCUMENT", 7)
    (tmp_path / "treering.json").write_bytes(b"12345678")
    with OpenFolder(tmp_path) as opened, pytest.raises(Format, match="8 bytes: no index is that large"):
        opened.read_index()


def test_a_pipe_or_a_folder_in_the_place_of_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "treering.json")
    (tmp_path / "data").mkdir()
    with OpenFolder(tmp_path) as opened:
        with pytest.raises(StoreFailed, match="not a file"):
            opened.read_index()
        with pytest.raises(IsADirectoryError):
            opened.open_files(["data"])


def test_all_or_none_are_open(tmp_path: Path) -> None:
    first, _ = data_names(save(tmp_path, b"old"))
    before = open_descriptors()
    with OpenFolder(tmp_path) as opened:
        with pytest.raises(DataFileMissing):
            opened.open_files([first, "nothing"])
        assert open_descriptors() == before + 1
        files = opened.open_files([first, first])
        assert list(files) == [first]
        files[first].close()
    assert open_descriptors() == before


def test_what_is_there_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(where: int) -> list[str]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "listdir", refused)
    with OpenFolder(tmp_path) as opened, pytest.raises(NotFound, match="the content cannot be read"):
        opened.read_index()
