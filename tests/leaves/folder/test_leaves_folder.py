"""LeavesFolder: files of leaves wherever they are, small ones at once; what is refused, and how all become durable."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import faults
from tests.leaves.folder.directories import (
    INDEX,
    branches_of,
    commit_pending,
    everything,
    expected,
    fail_moves,
    load,
    save,
    stage,
    write,
)
from tests.store.platforms import without_dir_fd
from treering._store.leaves_api import Update
from treering._store.leaves_folder.leaves_folder import LeavesFolder
from treering._store.posix import descriptors
from treering._store.posix.folder import Folder
from treering._store.posix.folder_tree import FolderTree
from treering._values.leaves_names import attempt_folder
from treering.errors import (
    CorruptError,
    DataFileMissingError,
    LinkRefusedError,
    NotDirectoryError,
    NotFoundError,
    StoreError,
)
from treering.leaves import index_leaves

ATTEMPT = "0123456789abcdef"


def put(path: Path, name: str, content: bytes) -> None:
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).write_bytes(content)


def content(directory: LeavesFolder, folder: str, name: str, attempt: str | None) -> bytes:
    with directory.open(folder, name, attempt) as file:
        return file.read(0, file.size)


def test_staged_files_come_first_and_key_paths_second(tmp_path: Path) -> None:
    put(tmp_path, "a/b/0", b"old")
    put(tmp_path, "a/b/1", b"moved")
    put(tmp_path, f".treering/{ATTEMPT}/leaves/a/b/0", b"staged")
    with LeavesFolder(tmp_path) as directory:
        assert content(directory, "a/b", "0", None) == b"old"
        assert content(directory, "a/b", "0", ATTEMPT) == b"staged"
        assert content(directory, "a/b", "1", ATTEMPT) == b"moved"
        with pytest.raises(DataFileMissingError, match="is missing") as caught:
            directory.open("a/b", "2", ATTEMPT)
        assert (caught.value.name, caught.value.filename) == ("2", str(tmp_path / "a" / "b" / "2"))


def test_folders_that_were_replaced_meanwhile_are_found(tmp_path: Path) -> None:
    put(tmp_path, "a/b/c/0", b"old")
    with LeavesFolder(tmp_path) as directory:
        assert content(directory, "a/b/c", "0", None) == b"old"
        (tmp_path / "a").rename(tmp_path / "gone")
        (tmp_path / "gone" / "b" / "c" / "0").unlink()
        put(tmp_path, "a/b/c/0", b"new")
        assert content(directory, "a/b/c", "0", None) == b"new"


def test_a_leaf_that_became_a_branch_misses_its_files(tmp_path: Path) -> None:
    put(tmp_path, "a/0/0", b"1")
    put(tmp_path, "b", b"1")
    with LeavesFolder(tmp_path) as directory:
        for folder, name in (("a", "0"), ("b", "0"), ("b/c", "0")):
            with pytest.raises(DataFileMissingError):
                directory.open(folder, name, None)


def test_a_chunk_in_a_folder_of_its_own(tmp_path: Path) -> None:
    put(tmp_path, "a/0/1", b"chunk")
    with LeavesFolder(tmp_path) as directory:
        assert content(directory, "a", "0/1", None) == b"chunk"


@pytest.mark.parametrize("text", ["..", "a/../b", "/etc", "a//b", ".", "a/", "\0", ".treering", ".treering/x"])
def test_texts_that_lead_elsewhere(tmp_path: Path, text: str) -> None:
    with LeavesFolder(tmp_path) as directory:
        with pytest.raises(CorruptError, match="not a folder of a leaf"):
            directory.open(text, "0", None)
        with pytest.raises(CorruptError, match="not a folder of a leaf"):
            directory.open("a", text, None)
        with pytest.raises(CorruptError, match="not an attempt"):
            directory.open("a", "0", text)
        with pytest.raises(CorruptError, match="without a name"):
            directory.open("a", "", None)


@pytest.mark.parametrize("link", ["a", "a/b", "a/b/0", ".treering", f".treering/{ATTEMPT}"])
def test_links_are_refused(tmp_path: Path, link: str) -> None:
    path, far = tmp_path / "dir", tmp_path / "far"
    put(path, "a/b/0", b"1")
    put(path, f".treering/{ATTEMPT}/leaves/a/b/0", b"1")
    (path / link).rename(far)
    (path / link).symlink_to(far)
    attempt = ATTEMPT if link.startswith(".treering") else None
    with LeavesFolder(path) as directory, pytest.raises(LinkRefusedError, match=r"is a link, which may lead anywhere"):
        directory.open("a/b", "0", attempt)


def test_other_things_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "0")
    with LeavesFolder(tmp_path) as directory, pytest.raises(StoreError, match="a pipe") as caught:
        directory.open("a", "0", None)
    assert caught.value.errno == errno.EINVAL


def test_records_and_what_waits(tmp_path: Path) -> None:
    first = save(tmp_path, {"a": b"1"})
    second = save(tmp_path, {"m/a": b"1"}, prefix="m", leave=True)
    (tmp_path / ".treering" / "notes").mkdir()
    (tmp_path / ".treering" / ATTEMPT).write_bytes(b"not a folder")
    with stage(tmp_path) as living, LeavesFolder(tmp_path) as directory:
        write(living, {"b": b"1"})
        pending, records, _ = directory.unlisted()
        assert {attempt: json.loads(text)[1] for attempt, text in records} == {first: "", second: "m"}
        assert pending == {second}


def test_a_record_that_is_larger_than_any_takes_no_memory(tmp_path: Path) -> None:
    record = tmp_path / ".treering" / save(tmp_path, {"a": b"1"}) / "record.json"
    os.truncate(record, 1 << 42)
    with LeavesFolder(tmp_path) as directory:
        assert [text for _, text in directory.unlisted().records] == [b""]


def test_array_folders(tmp_path: Path) -> None:
    for name in ("b/c/.zarray", "b/a/.zarray", "b/a/0/.zarray", "a/.zarray", ".hidden/.zarray", "d/0", "a.b/.zarray"):
        put(tmp_path, name, b"")
    put(tmp_path, f".treering/{ATTEMPT}/leaves/x/.zarray", b"")
    for name in (
        f"b/other/{INDEX}",
        "b/other/w/.zarray",
        "lost/.treering/x",
        "lost/w/.zarray",
        "z/.zgroup",
        "z/w/.zarray",
    ):
        put(tmp_path, name, b"")  # leaves directories of their own, and a group
    (tmp_path / "link").symlink_to(tmp_path / "b")
    (tmp_path / "d" / ".zarray").symlink_to(tmp_path / "a" / ".zarray")
    with LeavesFolder(tmp_path) as directory:
        assert list(directory.unlisted().arrays) == [".hidden", "a", "a.b", "b/a", "b/c"]


def test_what_is_there_instead_of_an_index(tmp_path: Path) -> None:
    def told() -> str:
        with LeavesFolder(tmp_path) as directory, pytest.raises(NotFoundError) as caught:
            directory.read_index()
        assert caught.value.filename == str(tmp_path / INDEX)
        assert isinstance(caught.value, FileNotFoundError)
        return str(caught.value)

    assert told() == f"there is no leaves directory in {str(tmp_path)!r}: it has no {INDEX!r}; it is empty"
    put(tmp_path, "notes.txt", b"")
    assert told().endswith("it holds 'notes.txt'")
    put(tmp_path, f"run/{INDEX}", b"")
    assert told().endswith("there are leaves directories in it: 'run'")
    put(tmp_path, "a/b/.zarray", b"")
    assert told().endswith("it holds arrays: treering.leaves.index_leaves makes an index of them")
    put(tmp_path, "treering.json", b"")
    assert told().endswith("that is a checkpoint, which treering.load reads")


def test_an_index_that_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "far.json").write_bytes(b"{}")
    (tmp_path / INDEX).symlink_to("far.json")
    with LeavesFolder(tmp_path) as directory, pytest.raises(LinkRefusedError, match="is a link"):
        directory.read_index()
    (tmp_path / INDEX).unlink()
    (tmp_path / INDEX).mkdir()
    with LeavesFolder(tmp_path) as directory, pytest.raises(StoreError, match="Is a directory"):
        directory.read_index()


def test_nothing_or_a_file_at_the_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotFoundError):
        LeavesFolder(tmp_path / "nothing")
    with pytest.raises(NotDirectoryError):
        LeavesFolder(tmp_path / "file")
    with pytest.raises(NotFoundError):
        index_leaves(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_a_change_that_is_none_changes_nothing(tmp_path: Path) -> None:
    put(tmp_path, "notes.txt", b"")
    seen: list[bytes | None] = []
    commit_pending(tmp_path, seen.append)
    assert seen == [None]
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]


def test_a_dead_move_is_finished_before_anything_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, {"a": b"12345678", "b": b"1"})
    with monkeypatch.context() as patch:
        fail_moves(patch, ZeroDivisionError())
        with pytest.raises(ZeroDivisionError):
            save(tmp_path, {"a": b"new", "c": b"1"})
    moving = branches_of((tmp_path / INDEX).read_bytes())[""]
    assert sorted(moving["moving"]) == ["a", "b"]
    with LeavesFolder(tmp_path) as directory:
        assert content(directory, "a", "0", moving["attempt"]) == b"new"
    seen: list[bytes | None] = []
    commit_pending(tmp_path, seen.append)
    assert "moving" not in branches_of(seen[0])[""]
    assert (tmp_path / INDEX).read_bytes() == seen[0]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".treering", "a", "c", INDEX]
    assert not (tmp_path.joinpath(*attempt_folder(moving["attempt"])) / "leaves").exists()


def test_ending_a_dead_move_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        fail_moves(patch, ZeroDivisionError())
        with pytest.raises(ZeroDivisionError):
            save(tmp_path, {"a": b"new"})

    def refuse(index: bytes | None, _: object) -> Update:
        raise KeyError(index)

    with stage(tmp_path) as saving:
        write(saving, {"b": b"1"})
        with pytest.raises(KeyError):
            saving.commit(b"{}", refuse)
    assert load(tmp_path) == {"a": b"new"}
    assert everything(tmp_path) == expected({"": {"a": b"new"}})
    assert saving.attempt not in [entry.name for entry in (tmp_path / ".treering").iterdir()]


@pytest.fixture(params=[True, False], ids=["from descriptors", "by paths"])
def leaves(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    if not request.param:
        without_dir_fd(monkeypatch)
    for number in range(3):
        place = tmp_path / "a" / f"n{number}"
        place.mkdir(parents=True)
        (place / ".zarray").write_bytes(b"{}")
        (place / "0").write_bytes(bytes(number))
    return tmp_path


def test_each_file_comes_up_to_one_byte_more(leaves: Path) -> None:
    with LeavesFolder(leaves) as directory:
        assert directory.read_each([("a/n2", [(".zarray", 9), ("0", 2)], None)]) == [[b"{}", b"\0\0"]]
        assert directory.read_each([("a/n2", [("0", 1), (".zarray", 0)], None)]) == [[b"\0\0", b"{"]]
        assert directory.read_each([("a/n2", [("0", 0)], None)]) == [[b"\0"]]
        assert directory.read_each([("a/n0", [("0", 5)], None)]) == [[b""]]


def test_files_beside_the_index_have_no_folder(leaves: Path) -> None:
    (leaves / "0").write_bytes(b"x")
    with LeavesFolder(leaves) as directory:
        assert directory.read_each([("", [("0", 5)], None)]) == [[b"x"]]


def test_staged_files_come_first_and_both_of_one_place(leaves: Path) -> None:
    staged = leaves / ".treering" / ATTEMPT / "leaves" / "a" / "n1"
    staged.mkdir(parents=True)
    (staged / ".zarray").write_bytes(b"new")
    with LeavesFolder(leaves) as directory:
        assert directory.read_each([("a/n1", [(".zarray", 9)], ATTEMPT)]) == [[b"new"]]
        assert directory.read_each([("a/n1", [(".zarray", 9), ("0", 9)], ATTEMPT)]) == [[b"{}", b"\0"]]
        assert directory.read_each([("a/n2", [(".zarray", 9)], ATTEMPT)]) == [[b"{}"]]


@pytest.mark.parametrize("way", ["a/n9", "b", "a/n1/0"])
def test_of_what_is_not_there_nothing_is_returned(leaves: Path, way: str) -> None:
    with LeavesFolder(leaves) as directory:
        assert directory.read_each([(way, [("1", 5)], None), ("a/n2", [("0", 5)], None)]) == [None, [b"\0\0"]]


def test_links_to_small_files_are_refused(leaves: Path) -> None:
    (leaves / "a" / "n0" / "1").symlink_to(leaves / "a" / "n1" / "0")
    (leaves / "b").symlink_to(leaves / "a")
    with LeavesFolder(leaves) as directory:
        for way, name in (("a/n0", "1"), ("b/n0", "0"), ("b", "0")):
            with pytest.raises(LinkRefusedError, match="link"):
                directory.read_each([(way, [(name, 5)], None)])


def test_a_folder_in_the_place_of_a_file(leaves: Path) -> None:
    with LeavesFolder(leaves) as directory:
        assert directory.read_each([("a", [("n1", 5)], None)]) == [None]


def test_a_pipe_is_not_waited_for(leaves: Path) -> None:
    os.mkfifo(leaves / "a" / "n0" / "1")
    with LeavesFolder(leaves) as directory:
        assert directory.read_each([("a/n0", [("1", 5)], None)]) == [[b""]]


def test_no_way_leads_out(leaves: Path) -> None:
    with LeavesFolder(leaves) as directory:
        for way in ("../a", "a/../a", "/a", ".treering/x"):
            with pytest.raises(CorruptError):
                directory.read_each([(way, [("0", 5)], None)])


def test_nothing_stays_open(leaves: Path) -> None:
    before = len(list(Path("/dev/fd").iterdir()))
    with LeavesFolder(leaves) as directory:
        for number in range(3):
            directory.read_each([(f"a/n{number}", [("0", 9), (".zarray", 9)], None)])
            assert directory.read_each([(f"a/n{number}", [("0", 9), ("1", 9)], None)]) == [None]
    assert len(list(Path("/dev/fd").iterdir())) == before


def test_a_file_goes_where_it_is_meant_to_however_deep(tmp_path: Path) -> None:
    # Deeper than the number of folders that stay open: the way to the one closes those on the way to the other.
    parts, to = ("staged", *"a" * 99), ("moved", *"a" * 99)
    put(tmp_path, "/".join((*parts, "0")), b"1")
    tmp_path.joinpath(*to).mkdir(parents=True)
    with FolderTree(Folder(str(tmp_path)), str(tmp_path)) as tree:
        tree.replace(parts, "0", to, "0")
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [tmp_path.joinpath(*to, "0")]


linux = pytest.mark.skipif(sys.platform != "linux", reason="there is no syncfs")


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[FolderTree]:
    with FolderTree(Folder(str(tmp_path)), str(tmp_path)) as tree:
        yield tree


@linux
@pytest.mark.parametrize(("release", "trusted"), [("5.7.19-generic", False), ("4.18.0", False), ("odd", False)])
def test_kernels_that_keep_errors_to_themselves(
    monkeypatch: pytest.MonkeyPatch, tree: FolderTree, release: str, trusted: bool
) -> None:
    faults.answer(monkeypatch, os, "uname", SimpleNamespace(release=release))
    assert tree.root.descriptor is not None
    assert descriptors.sync_file_system(tree.root.descriptor) is trusted


@linux
def test_file_systems_that_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    faults.answer(monkeypatch, os, "uname", SimpleNamespace(release="6.1.0"))
    with Folder("/proc") as folder:
        assert folder.descriptor is not None
        assert not descriptors.sync_file_system(folder.descriptor)


@linux
def test_file_systems_that_are_known(monkeypatch: pytest.MonkeyPatch, tree: FolderTree) -> None:
    assert tree.root.descriptor is not None
    faults.answer(monkeypatch, descriptors, "_syncs_as_a_whole", True)
    assert descriptors.sync_file_system(tree.root.descriptor)
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        descriptors.sync_file_system(-1)
    assert caught.value.errno == errno.EBADF


@pytest.mark.parametrize("whole", [True, False])
def test_what_was_written_is_synced_and_the_way_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree: FolderTree, whole: bool
) -> None:
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c" / "0").write_bytes(b"1")
    (tmp_path / "a" / "beside").write_bytes(b"1")
    (tmp_path / "a" / "b" / "link").symlink_to("../beside")
    synced: list[str] = []
    faults.before(
        monkeypatch, os, "fsync", lambda number: synced.append(str(Path(f"/proc/self/fd/{number}").readlink()))
    )
    faults.answer(monkeypatch, descriptors, "sync_file_system", whole)
    tree.sync_written(("a", "b"), [(("c",), ["0"])])
    below = ["", "/a", "/a/b", "/a/b/c", "/a/b/c/0"]
    assert sorted(synced) == ([] if whole else [f"{tmp_path}{name}" for name in below])


@pytest.mark.parametrize("count", [1, 40])
def test_an_error_of_any_folder_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree: FolderTree, count: int
) -> None:
    folders = [(str(number),) for number in range(count)]
    for (name,) in folders:
        (tmp_path / name).mkdir()

    faults.answer(monkeypatch, descriptors, "sync_file_system", False)
    tree.sync_folders(folders)
    faults.fail(monkeypatch, os, "fsync", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        tree.sync_folders(folders)
