"""StagedLeaves: what lies in a leaves directory after saves, beside other things, and after refusals."""

import errno
import gc
import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests import faults
from tests.clocks import wait_at_most
from tests.folders import names, open_descriptors
from tests.leaves.folder.directories import (
    INDEX,
    array_text,
    branches_of,
    everything,
    expected,
    fail_moves,
    files,
    load,
    open_leaves,
    pending,
    save,
    stage,
    take_up,
    update_for,
    write,
)
from tests.store import platforms
from treering.errors import (
    BusyError,
    ExistsError,
    FormatError,
    LinkRefusedError,
    NotDirectoryError,
    NotFoundError,
    StoreError,
    UnsupportedError,
)

DEAD = "0123456789abcdef"
OLD = {"a/b": b"treering", "a/c": b"x", "d": b""}
NEW = {"a/b": b"a year has gone", "e/f/g": b"new", "d": b"1234"}


PLATFORMS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "linux": lambda patch: None,
    "no syncfs": platforms.without_syncfs,
    "no locks": platforms.without_locks,
    "no dir_fd": platforms.without_dir_fd,
    "like windows": platforms.like_windows,
}


@pytest.fixture(params=PLATFORMS)
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every way that a platform may lack something."""
    PLATFORMS[request.param](monkeypatch)
    return str(request.param)


@pytest.mark.usefixtures("platform")
class TestEverywhere:
    """What holds whatever the platform lacks."""

    def test_a_first_save_then_an_overwrite(self, tmp_path: Path) -> None:
        path = tmp_path / "runs" / "a"
        save(path, OLD)
        assert load(path) == OLD
        assert everything(path) == expected({"": OLD})
        second = save(path, NEW)
        assert load(path) == NEW
        assert everything(path) == expected({"": NEW})
        assert names(path / ".treering") == [second]
        assert names(path / ".treering" / second) == ["record.json"]

    def test_branches_stand_beside_each_other(self, tmp_path: Path) -> None:
        save(tmp_path, OLD)
        first = save(tmp_path, {"m/a": b"1"}, prefix="m")
        second = save(tmp_path, NEW)
        assert (load(tmp_path), load(tmp_path, "m")) == (NEW, {"m/a": b"1"})
        assert everything(tmp_path) == expected({"": NEW, "m": {"m/a": b"1"}})
        assert names(tmp_path / ".treering") == sorted([first, second])

    @pytest.mark.sampled(7)
    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ({"a": b"12345678"}, {"a/b": b"1", "a/0": b"2"}),
            ({"a/b": b"1", "a/0": b"2"}, {"a": b"12345678"}),
            ({"a/0/x": b"1", "a/0/y": b"2", "a/1": b""}, {"a": b"12345678"}),
        ],
        ids=["leaf to branch", "branch to leaf", "deep branch to leaf"],
    )
    def test_a_leaf_becomes_a_branch_and_the_reverse(
        self, tmp_path: Path, old: dict[str, bytes], new: dict[str, bytes]
    ) -> None:
        save(tmp_path, old)
        save(tmp_path, new)
        assert load(tmp_path) == new
        assert everything(tmp_path) == expected({"": new})

    def test_a_save_without_index_is_moved_where_nothing_is(self, tmp_path: Path) -> None:
        attempt = save(tmp_path, OLD, leave=True)
        assert everything(tmp_path) == sorted([*expected({"": OLD})[:-1], f".treering/{attempt}/pending"])
        take_up(tmp_path)
        assert load(tmp_path) == OLD
        assert everything(tmp_path) == expected({"": OLD})
        assert names(tmp_path / ".treering") == [attempt]

    def test_a_save_without_index_stays_staged_where_something_is(self, tmp_path: Path) -> None:
        save(tmp_path, OLD)
        attempt = save(tmp_path, NEW, leave=True)
        assert load(tmp_path) == OLD
        assert names(tmp_path / ".treering" / attempt) == ["leaves", "pending", "record.json"]
        take_up(tmp_path)
        assert load(tmp_path) == NEW
        assert everything(tmp_path) == expected({"": NEW})
        take_up(tmp_path)  # nothing waits any more
        assert load(tmp_path) == NEW

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("old", [True, False])
    def test_a_save_replaces_one_that_waits(self, tmp_path: Path, old: bool) -> None:
        if old:
            save(tmp_path, {"d": b"0"})
        save(tmp_path, OLD, leave=True)
        attempt = save(tmp_path, NEW)
        assert load(tmp_path) == NEW
        assert everything(tmp_path) == expected({"": NEW})
        assert pending(tmp_path) == []
        assert attempt in names(tmp_path / ".treering")

    def test_leaving_without_commit_is_no_save(self, tmp_path: Path) -> None:
        with stage(tmp_path / "new" / "a") as saving:
            write(saving, OLD)
            saving.close()
        assert names(tmp_path) == []

    def test_what_lies_beside_stays(self, tmp_path: Path) -> None:
        save(tmp_path, OLD)
        users = ["a/b/notes.txt", "a/b/0.bak", "README", "a/b/below/7", "e/mine"]
        for name in users:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(name)
        save(tmp_path, NEW)
        save(tmp_path, {"x": b"1"})
        assert everything(tmp_path) == expected({"": {"x": b"1"}}, users)
        assert all((tmp_path / name).read_text() == name for name in users)

    def test_a_directory_that_is_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to("far/away")  # which is not there yet
        save(tmp_path / "link", OLD)
        save(tmp_path / "link", NEW)
        assert (tmp_path / "link").is_symlink()
        assert load(tmp_path / "far" / "away") == load(tmp_path / "link") == NEW

    def test_an_error_of_the_update_changes_nothing(self, tmp_path: Path) -> None:
        save(tmp_path, OLD)
        before = everything(tmp_path, records=True)

        def fail(old: bytes | None, _: object) -> None:
            raise KeyError(old)

        with stage(tmp_path) as saving:
            write(saving, NEW)
            with pytest.raises(KeyError):
                saving.commit(b"{}", fail)
        assert everything(tmp_path, records=True) == before
        assert load(tmp_path) == OLD

    @pytest.mark.sampled(7)
    @pytest.mark.parametrize("in_the_way", ["e/f/g/0", "e/f/g/.zarray", "e", "e/f/.zarray", "a/b/3", "d/0/mine"])
    def test_what_no_index_lists_is_not_replaced(self, tmp_path: Path, in_the_way: str) -> None:
        save(tmp_path, OLD)
        (tmp_path / in_the_way).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / in_the_way).write_bytes(b"mine")
        before = everything(tmp_path, records=True)
        with pytest.raises(ExistsError, match="where a leaf would go") as caught:
            save(tmp_path, NEW)
        assert str(caught.value.filename).startswith(str(tmp_path))
        assert everything(tmp_path, records=True) == before
        assert load(tmp_path) == OLD
        assert (tmp_path / in_the_way).read_bytes() == b"mine"
        (tmp_path / in_the_way).unlink()
        if in_the_way == "d/0/mine":
            (tmp_path / "d" / "0").rmdir()
        save(tmp_path, NEW)
        assert load(tmp_path) == NEW

    def test_a_replaced_leaf_whose_array_text_is_lost(self, tmp_path: Path) -> None:
        save(tmp_path, OLD)
        (tmp_path / "a" / "b" / ".zarray").unlink()
        (tmp_path / "d" / ".zarray").write_bytes(b"damaged")
        save(tmp_path, {**OLD, "d": b"1"})
        assert load(tmp_path) == {**OLD, "d": b"1"}


PLACES = {
    "attempts": ".treering",
    "folder on the way": "a",
    "leaf": "a/b",
    "chunk": "a/b/0",
    "array text": "a/b/.zarray",
    "index": INDEX,
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dir_fd", [True, False])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("old", [True, False])
def test_links_inside_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, old: bool, dir_fd: bool
) -> None:
    if not dir_fd:
        platforms.without_dir_fd(monkeypatch)
    path, link = tmp_path / "dir", tmp_path / "dir" / PLACES[place]
    far = tmp_path / "far"
    link.parent.mkdir(parents=True, exist_ok=True)
    if old:
        save(path, OLD)
        link.rename(far)
    else:
        far.mkdir()
    link.symlink_to(far)
    before = everything(tmp_path, records=True)
    with pytest.raises(FormatError, match=r"is a link, which may lead anywhere; put a file or folder of its own"):
        save(path, NEW)
    assert everything(tmp_path, records=True) == before
    if old and place != "attempts":
        with pytest.raises(FormatError, match="is a link"):
            load(path)
    link.unlink()
    if old:
        far.rename(link)
    save(path, NEW)
    assert load(path) == NEW


def test_links_beside_are_left_alone(tmp_path: Path) -> None:
    save(tmp_path / "dir", OLD)
    (tmp_path / "far").write_bytes(b"mine")
    (tmp_path / "dir" / "a" / "b" / "link").symlink_to(tmp_path / "far")
    (tmp_path / "dir" / "link").symlink_to(tmp_path)
    save(tmp_path / "dir", {"x": b"1"})
    assert everything(tmp_path / "dir") == expected({"": {"x": b"1"}}, ["a/b/link", "link"])
    assert (tmp_path / "far").read_bytes() == b"mine"


def test_the_order_of_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "dir"
    save(path, {"a/b": b"1234", "a/c": b"x", "d": b""})
    steps: list[str] = []

    def watched(name: str) -> None:
        def call(*args: object, **keywords: object) -> None:
            what = Path(f"/proc/self/fd/{args[0]}").readlink() if isinstance(args[0], int) else Path(str(args[-1]))
            steps.append(f"{name} {what.name}")

        faults.before(monkeypatch, os, name, call)

    for name in ("fsync", "replace", "unlink", "rmdir"):
        watched(name)
    platforms.before_syncfs(
        monkeypatch, lambda number: steps.append(f"sync_file_system {Path(f'/proc/self/fd/{number}').readlink().name}")
    )
    second = save(path, {"a/b": b"12345", "n": b""})
    durable = ["sync_file_system dir", "fsync record.json", f"fsync {second}"]
    committed = ["fsync index", f"replace {INDEX}", "fsync dir"]
    cleared = [f"unlink {name}" for name in ("0", ".zarray", "0", ".zarray", ".zarray")]
    emptied = [["rmdir b", "rmdir c"], ["rmdir a", "rmdir d"]]
    moved = ["replace a", "replace n", "rmdir leaves", "fsync dir"]
    told = [step for step in steps if step not in {"unlink index", "unlink pending", "unlink record.json"}]
    at = len(durable) + len(committed) + len(cleared)
    assert told[:at] == [*durable, *committed, *cleared]
    assert [sorted(told[at : at + 2]), sorted(told[at + 2 : at + 4])] == emptied
    assert [*sorted(told[at + 4 : at + 6]), *told[at + 6 : -1]] == [*moved, *committed]
    assert steps[-1].startswith("rmdir ")  # the superseded attempt


@pytest.mark.parametrize("portable", [False, True])
def test_a_failing_sync_is_a_failed_save_and_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, portable: bool
) -> None:
    save(tmp_path, OLD)
    before = everything(tmp_path, records=True)
    calls: list[int] = []

    def fail(descriptor: int) -> None:
        calls.append(descriptor)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    if portable:
        platforms.without_syncfs(monkeypatch)
    with stage(tmp_path) as saving:
        leaves = write(saving, NEW)
        monkeypatch.setattr(os, "fsync", fail) if portable else platforms.before_syncfs(monkeypatch, fail)
        with pytest.raises(StoreError) as caught:
            saving.commit(b"{}", update_for({"": (saving.attempt, leaves)}))
    assert (caught.value.errno, caught.value.filename, len(calls)) == (errno.EIO, str(tmp_path), 1)
    assert everything(tmp_path, records=True) == before
    assert load(tmp_path) == OLD


def test_many_files_are_synced_one_by_one_where_there_is_no_syncfs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    lock = threading.Lock()

    def fsync(descriptor: int) -> None:
        with lock:
            synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))

    platforms.without_syncfs(monkeypatch)
    faults.before(monkeypatch, os, "fsync", fsync)
    tree = {f"a/{number}": b"12" for number in range(40)}
    with stage(tmp_path) as saving:
        leaves = write(saving, tree)
        staged = str(tmp_path / ".treering" / saving.attempt / "leaves" / "a")
        saving.commit(b"{}", update_for({"": (saving.attempt, leaves)}))
    assert {f"{staged}/{number}{name}" for number in range(40) for name in ("", "/0", "/.zarray")} <= set(synced)


@pytest.mark.parametrize("content", [files(), files(("0", b"1"), ("1", b"2"))], ids=["empty", "two files"])
def test_another_thread_makes_the_folder_of_a_leaf_after_it_was_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any
) -> None:
    made: list[Path] = []

    def make_instead(*_: Any, **__: Any) -> bool:
        if made:
            return False
        made.append(tmp_path / ".treering" / saving.attempt / "leaves" / "a" / "b")
        made[0].mkdir(parents=True)
        return True

    with stage(tmp_path) as saving, monkeypatch.context() as patch:
        faults.fail(patch, os, "mkdir", errno.ENOENT, when=make_instead)
        saving.write("a/b", content)
        assert names(made[0]) == [name for name, _, _ in content]


def test_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, OLD)
    before = everything(tmp_path, records=True)
    with pytest.raises(StoreError, match="are needed") as caught:
        stage(tmp_path, nbytes=1 << 60)
    assert caught.value.errno == errno.ENOSPC
    with stage(tmp_path) as saving, monkeypatch.context() as patch:
        faults.fail(patch, os, "write", errno.ENOSPC)
        for add in (
            lambda: saving.write("a", files(("0", b"1"))),
            lambda: saving.write("b", [("0", [b"1"], 1 << 20)]),
            lambda: saving.commit(b"record", update_for({}), listed=False),
        ):
            with pytest.raises(StoreError, match="free some space; the path is unchanged") as caught:
                add()
            assert caught.value.errno == errno.ENOSPC
    assert everything(tmp_path, records=True) == before


@pytest.mark.parametrize("size", [1, 3, 1 << 20])
def test_buffers_that_hold_another_number_of_bytes(tmp_path: Path, size: int) -> None:
    with stage(tmp_path) as saving, pytest.raises(StoreError, match="announced"):
        saving.write("a", [("0", [b"1", memoryview(b"2")], size)])
    assert everything(tmp_path) == []


@pytest.mark.parametrize("size", [4, 1 << 20])
def test_a_missing_file_of_what_gives_the_bytes_is_told(tmp_path: Path, size: int) -> None:
    def buffers() -> Iterator[bytes]:
        raise FileNotFoundError(errno.ENOENT, "mine")
        yield b""

    with stage(tmp_path) as saving:
        saving.write("a", ())
        with pytest.raises(NotFoundError, match="mine"):
            saving.write("a", [("0", buffers(), size)])


@pytest.mark.parametrize("size", [4, 1 << 20])
def test_nothing_is_written_through_a_link_to_a_folder(tmp_path: Path, size: int) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    with stage(tmp_path / "d") as saving:
        (tmp_path / "d" / ".treering" / saving.attempt / "leaves" / "a").symlink_to(outside)
        with pytest.raises(LinkRefusedError, match="is a link"):
            saving.write("a", [("0", [bytes(size)], size)])
    assert not list(outside.iterdir())


@pytest.mark.parametrize("reason", [errno.EACCES, errno.EROFS])
def test_a_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int) -> None:
    save(tmp_path, OLD)
    faults.fail(monkeypatch, os, "mkdir", reason)
    with pytest.raises(StoreError) as caught:
        save(tmp_path, NEW)
    assert (caught.value.errno, caught.value.filename) == (reason, str(tmp_path))
    assert load(tmp_path) == OLD


@pytest.mark.parametrize("below", ["", "below"])
def test_a_file_at_the_path_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "a").write_bytes(b"mine")
    with pytest.raises(NotDirectoryError):
        save(tmp_path / "a" / below, OLD)
    assert (tmp_path / "a").read_bytes() == b"mine"


@pytest.mark.slow
def test_names_and_paths_that_are_too_long(tmp_path: Path) -> None:
    whole = {"n" * 255 + "/" + "m" * 255: b"1"}
    save(tmp_path, whole)
    assert load(tmp_path) == whole
    with pytest.raises(StoreError) as caught:
        save(tmp_path, {"n" * 256: b"1"})
    assert caught.value.errno == errno.ENAMETOOLONG
    with pytest.raises(UnsupportedError, match="longer path than a system takes"):
        save(tmp_path, {"n/" * 2000 + "n": b"1"})
    assert load(tmp_path) == whole
    deep = {"n/" * 1800 + "n": b"1"}
    save(tmp_path, deep)
    assert load(tmp_path) == deep
    with open_leaves(tmp_path) as directory:
        assert list(directory.unlisted().arrays) == list(deep)
    save(tmp_path, OLD)
    assert everything(tmp_path) == expected({"": OLD})


def test_others_are_waited_for_but_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, OLD)
    entered, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with stage(tmp_path) as saving:
            leaves = write(saving, {"m/a": b"1"})
            change = update_for({"m": (saving.attempt, leaves)})

            def update(old: bytes | None, left: object) -> object:
                entered.set()
                go_on.wait()
                return change(old, frozenset())

            saving.commit(b"{}", update)  # type: ignore[arg-type]

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait()
    with monkeypatch.context() as patch:
        wait_at_most(patch, directory_lock=0.0)
        with pytest.raises(BusyError, match="other processes keep saving there") as caught:
            save(tmp_path, NEW)
    assert (caught.value.errno, caught.value.filename) == (errno.EBUSY, str(tmp_path))
    threading.Timer(0.05, go_on.set).start()
    save(tmp_path, NEW)
    thread.join()
    assert (load(tmp_path), load(tmp_path, "m")) == (NEW, {"m/a": b"1"})


def test_a_directory_that_was_moved_away(tmp_path: Path) -> None:
    save(tmp_path / "a", OLD)
    with stage(tmp_path / "a") as saving:
        leaves = write(saving, NEW)
        (tmp_path / "a").rename(tmp_path / "b")
        with pytest.raises(BusyError, match="moved or removed"):
            saving.commit(b"{}", update_for({"": (saving.attempt, leaves)}))
    assert load(tmp_path / "b") == OLD
    assert names(tmp_path) == ["b"]


def test_what_the_dead_left_is_swept_and_nothing_of_the_living(tmp_path: Path) -> None:
    save(tmp_path, OLD)
    waiting = save(tmp_path, {"m/a": b"1"}, prefix="m", leave=True)
    (tmp_path / ".treering" / DEAD / "leaves" / "x").mkdir(parents=True)
    (tmp_path / ".treering" / DEAD / "leaves" / "x" / "0").write_bytes(b"1")
    (tmp_path / ".treering" / "notes").mkdir()
    with stage(tmp_path) as living:
        assert DEAD not in names(tmp_path / ".treering")  # gone at once: it may be what fills the disk
        (tmp_path / ".treering" / DEAD / "leaves").mkdir(parents=True)
        (tmp_path / ".treering" / DEAD / "record.json").write_bytes(b"")
        leaves = write(living, {"p/a": b"2"})
        attempt = save(tmp_path, NEW)
        assert names(tmp_path / ".treering") == sorted([waiting, attempt, living.attempt, "notes"])
        living.commit(b"", update_for({"p": (living.attempt, leaves)}))
    take_up(tmp_path)
    assert [load(tmp_path, prefix) for prefix in ("", "m", "p")] == [NEW, {"m/a": b"1"}, {"p/a": b"2"}]


def test_a_refused_save_that_finished_a_dead_one_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    save(tmp_path, OLD)
    with monkeypatch.context() as patch:
        fail_moves(patch, OSError(errno.EIO, os.strerror(errno.EIO)))
        with pytest.raises(StoreError, match="the new content is in place"):
            save(tmp_path, NEW)
    with stage(tmp_path) as saving:
        write(saving, {"m/a": b"1"})
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            saving.commit(b"", refused)
    assert saving.attempt not in names(tmp_path / ".treering")
    assert load(tmp_path) == NEW


def test_names_that_a_system_takes_for_the_same_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat

    def folding(path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
        """As on a file system that does not tell capitals from other letters."""
        names = os.listdir(dir_fd) if dir_fd is not None and isinstance(path, str) else []  # noqa: PTH208 - an open folder
        path = next((there for there in names if there.lower() == str(path).lower()), path)
        return real(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)

    save(tmp_path, {"Model/w": b"1"}, prefix="Model")
    save(tmp_path, {"a/W": b"1", "a/x": b"1"}, prefix="a")
    monkeypatch.setattr(os, "stat", folding)
    with pytest.raises(ExistsError, match="the same name in other letters") as caught:
        save(tmp_path, {"model/w": b"2"}, prefix="model")
    assert caught.value.filename == str(tmp_path / "model")
    # What is replaced is not in the way.
    save(tmp_path, {"a/w": b"2", "a/x": b"2"}, prefix="a")
    assert [load(tmp_path, prefix) for prefix in ("Model", "a")] == [{"Model/w": b"1"}, {"a/w": b"2", "a/x": b"2"}]


def test_a_lost_index_does_not_cost_the_records(tmp_path: Path) -> None:
    first = save(tmp_path, OLD)
    (tmp_path / INDEX).unlink()
    unfinished = tmp_path / ".treering" / DEAD
    (unfinished / "leaves").mkdir(parents=True)
    (unfinished / "record.json").write_bytes(b"{}")
    second = save(tmp_path, {"m/a": b"1"}, prefix="m")
    with open_leaves(tmp_path) as directory:
        assert dict(directory.unlisted().records).keys() == {first, second}


def test_a_hostile_index_removes_nothing_outside(tmp_path: Path) -> None:
    path = tmp_path / "dir"
    save(path, OLD)
    text = array_text("f" * 16, b"mine, and mine")
    (tmp_path / ".zarray").write_bytes(text)
    (tmp_path / "0").write_bytes(b"mine")
    (path / "a" / "b" / ".zarray").write_bytes(text)
    branches = branches_of((path / INDEX).read_bytes())
    evil = ["..", "../dir/..", str(tmp_path), ".treering", ".", "a//b", "\0", "a/b"]
    branches[""] |= {"moving": evil, "attempt": "../../.."}
    (path / INDEX).write_text(json.dumps({"branches": branches}))
    save(path, {"m": b"1"}, prefix="m")
    assert names(tmp_path) == [".zarray", "0", "dir"]
    assert names(path) == [".treering", "a", "d", "m", INDEX]


def test_the_index_keeps_its_rights(tmp_path: Path) -> None:
    save(tmp_path, OLD)
    (tmp_path / INDEX).chmod(0o640)
    save(tmp_path, NEW)
    assert stat.S_IMODE((tmp_path / INDEX).stat().st_mode) == 0o640


def test_a_manager_writes_by_itself(tmp_path: Path) -> None:
    saving = stage(tmp_path)
    saving.write("a", ())
    target = tmp_path / ".treering" / saving.attempt / "leaves" / "a" / "b"
    target.mkdir()
    for name, content in (("0", b"1234"), ("1", b"5")):
        (target / name).write_bytes(content)
    saving.write("a/b", files((".zarray", array_text(saving.attempt, b"12345"))))
    update = update_for({"": (saving.attempt, {"a/b": ["0", "1"]})})

    def end() -> None:
        saving.commit(b"{}", update)
        saving.close()

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    assert load(tmp_path) == {"a/b": b"12345"}
    with pytest.raises(RuntimeError, match="has ended"):
        saving.write("a/b", files(("0", b"1")))


def test_few_system_calls_for_a_small_leaf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(name: str) -> None:

        faults.before(monkeypatch, os, name, lambda *args, **keywords: calls.append(name))

    for name in ("open", "close", "write", "mkdir", "stat", "lstat", "fstat", "scandir", "fsync"):
        counted(name)
    with stage(tmp_path) as saving:
        saving.write("a/0", files((".zarray", b"{}"), ("0", b"1")))
        calls.clear()
        for number in range(1, 11):
            saving.write(f"a/{number}", files((".zarray", b"{}"), ("0", b"1")))
        assert calls == ["mkdir", "open", "open", "write", "write", "close", "close"] * 10
        saving.commit(b"{}", update_for({"": (saving.attempt, {})}))
    with open_leaves(tmp_path) as directory:
        directory.open("a/0", ".zarray", None).close()
        calls.clear()
        for number in range(1, 11):
            for name in (".zarray", "0"):
                directory.open(f"a/{number}", name, None).close()
        assert calls == ["open", *["open", "fstat", "close"] * 2] * 10


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    save(tmp_path, OLD)
    load(tmp_path)
    gc.collect()  # what other tests have left is not closed meanwhile
    before = open_descriptors()
    save(tmp_path, {f"{number}/a": b"1" for number in range(200)})
    assert load(tmp_path) is not None
    save(tmp_path, NEW, leave=True)
    take_up(tmp_path)
    assert open_descriptors() == before
