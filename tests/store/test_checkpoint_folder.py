"""CheckpointFolder: what lies in the folder after a save, after a failure, after a crash."""

import contextlib
import errno
import fcntl
import json
import os
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import faults
from tests.buckets import Answer, List, Status, install
from tests.folders import names, open_descriptors
from tests.on_disk import vote_name
from tests.store.checkpoints import data_names, folder_at, journal_name, load, names_in, save, write
from tests.store.platforms import PLATFORMS, without_locks
from tests.stores import located, store_at
from treering.errors import BusyError, ExistsError, NotDirectoryError, NotFoundError, StoreError


class Stop(Exception):
    """The error of a program that saves."""


DEAD = "0123456789abcdef"


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
        first = save(path, b"treering")
        assert load(path) == b"treering"
        assert names(path) == sorted([*data_names(first), "treering.json"])
        second = save(path, b"grown by a year", overwrite=True)
        assert load(path) == b"grown by a year"
        assert names(path) == sorted([*data_names(second), "treering.json"])
        assert json.loads((path / "treering.json").read_bytes())[1] == data_names(first)

    @pytest.mark.sampled(5)
    def test_large_files(self, tmp_path: Path) -> None:
        payload = random.Random(1).randbytes(5_000_001)
        save(tmp_path / "a", payload)
        assert load(tmp_path / "a") == payload

    def test_without_overwrite_nothing_changes(self, tmp_path: Path) -> None:
        save(tmp_path / "a", b"old")
        before = names(tmp_path / "a")
        with pytest.raises(ExistsError, match=r"already; pass overwrite=True") as caught, folder_at(tmp_path / "a"):
            pass
        assert caught.value.errno == errno.EEXIST
        assert caught.value.filename == str(tmp_path / "a")
        assert names(tmp_path / "a") == before
        assert load(tmp_path / "a") == b"old"

    @pytest.mark.sampled(5)
    @pytest.mark.parametrize("overwrite", [False, True])
    def test_an_error_leaves_no_trace(self, tmp_path: Path, overwrite: bool) -> None:
        path = tmp_path / "new" / "a"
        if overwrite:
            save(path, b"old")
        before = names(path) if overwrite else None
        with contextlib.suppress(KeyboardInterrupt), folder_at(path, overwrite=overwrite) as saving:
            write(saving, b"new")
            raise KeyboardInterrupt
        if overwrite:
            assert names(path) == before
            assert load(path) == b"old"
        else:
            assert names(tmp_path) == []
        save(path, b"next", overwrite=overwrite)
        assert load(path) == b"next"

    def test_leaving_without_commit_is_no_save(self, tmp_path: Path) -> None:
        with folder_at(tmp_path / "a") as saving:
            write(saving, b"new")
        assert names(tmp_path) == []

    def test_a_second_saver_is_told_to_wait(self, tmp_path: Path) -> None:
        path = tmp_path / "a"
        with folder_at(path) as saving:
            index = write(saving, b"one")
            with pytest.raises(
                BusyError, match="another process is saving to this checkpoint, or another thread of this one"
            ):
                save(path, b"two")
            with pytest.raises(BusyError):
                save(path, b"two", overwrite=True)
            saving.commit(index)
        assert load(path) == b"one"
        save(path, b"three", overwrite=True)
        assert load(path) == b"three"
        assert len(names(path)) == 3

    def test_what_a_dead_first_save_left_is_swept(self, tmp_path: Path) -> None:
        path = tmp_path / "a"
        path.mkdir()
        for name in [journal_name(DEAD), *data_names(DEAD)]:
            (path / name).write_bytes(b"left")
        attempt = save(path, b"new")
        assert names(path) == sorted([*data_names(attempt), "treering.json"])

    def test_what_a_dead_overwrite_left_is_swept_and_nothing_else(self, tmp_path: Path) -> None:
        path = tmp_path / "a"
        save(path, b"old")
        others = ["config.json", "data.safetensors", "data-fedcba9876543210-00000-of-00001.safetensors", ".hidden"]
        for name in [journal_name(DEAD), *data_names(DEAD), *others]:
            (path / name).write_bytes(b"left")
        attempt = save(path, b"new", overwrite=True)
        assert names(path) == sorted([*data_names(attempt), "treering.json", *others])

    def test_an_overwrite_never_touches_what_the_index_does_not_own(self, tmp_path: Path) -> None:
        path = tmp_path / "a"
        save(path, b"old")
        (tmp_path / "outside").write_bytes(b"mine")
        (path / "config.json").write_bytes(b"mine")
        hostile = [["config.json", "../outside", str(tmp_path / "outside"), "..", ""], []]
        (path / "treering.json").write_text(json.dumps(hostile))
        save(path, b"new", overwrite=True)
        assert (path / "config.json").read_bytes() == b"mine"
        assert (tmp_path / "outside").read_bytes() == b"mine"
        assert load(path) == b"new"

    def test_a_damaged_index_is_overwritten_and_its_files_stay(self, tmp_path: Path) -> None:
        path = tmp_path / "a"
        first = save(path, b"old")
        (path / "treering.json").write_bytes(b"{damaged")
        (path / journal_name(first)).write_bytes(b"")
        second = save(path, b"new", overwrite=True)
        assert load(path) == b"new"
        assert names(path) == sorted([*data_names(first), *data_names(second), journal_name(first), "treering.json"])

    def test_the_files_of_a_committed_attempt_survive_its_journal(self, tmp_path: Path) -> None:
        # A copy of a folder in which the commit was cut between its two steps: the names are two files by now.
        path = tmp_path / "a"
        first = save(path, b"old")
        (path / journal_name(first)).write_bytes((path / "treering.json").read_bytes())
        with contextlib.suppress(Stop), folder_at(path, overwrite=True):
            assert journal_name(first) not in names(path)
            raise Stop
        assert load(path) == b"old"

    @pytest.mark.sampled(5)
    @pytest.mark.parametrize("overwrite", [False, True])
    @pytest.mark.parametrize("name", ["notes.txt", ".hidden", "data-0123456789abcdef-00000-of-00001.safetensors"])
    def test_a_foreign_folder_is_refused(self, tmp_path: Path, name: str, overwrite: bool) -> None:
        (tmp_path / name).write_bytes(b"mine")
        with pytest.raises(ExistsError, match=r"is not empty and holds no checkpoint \('.*" + name[1:]):
            save(tmp_path, b"new", overwrite=overwrite)
        assert names(tmp_path) == [name]

    def test_an_empty_folder_is_taken_and_stays_after_an_error(self, tmp_path: Path) -> None:
        path = tmp_path / "a"
        path.mkdir()
        with contextlib.suppress(Stop), folder_at(path):
            raise Stop
        assert names(path) == []
        save(path, b"new")
        assert load(path) == b"new"

    @pytest.mark.parametrize("below", ["", "below"])
    def test_a_file_at_the_path_is_refused(self, tmp_path: Path, below: str) -> None:
        (tmp_path / "a").write_bytes(b"mine")
        with pytest.raises(NotDirectoryError, match="file"):
            save(tmp_path / "a" / below, b"new", overwrite=True)
        assert (tmp_path / "a").read_bytes() == b"mine"

    def test_the_path_may_be_a_link_to_a_folder(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to("far/away")  # which is not there yet
        save(tmp_path / "link", b"old")
        save(tmp_path / "link", b"new", overwrite=True)
        assert (tmp_path / "link").is_symlink()
        assert load(tmp_path / "far" / "away") == load(tmp_path / "link") == b"new"

    def test_a_relative_path_with_a_slash_at_the_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with folder_at(Path("a/./b/")) as saving:
            index = write(saving, b"new")
            monkeypatch.chdir("/")
            saving.commit(index)
        assert load(tmp_path / "a" / "b") == b"new"

    @pytest.mark.sampled(5)
    @pytest.mark.parametrize("what", ["link", "folder"])
    def test_an_index_that_is_no_file_is_refused(self, tmp_path: Path, what: str) -> None:
        index = tmp_path / "a" / "treering.json"
        index.parent.mkdir()
        (tmp_path / "far.json").write_bytes(b"[[], []]")
        index.symlink_to("../far.json") if what == "link" else index.mkdir()
        with pytest.raises(ExistsError, match="not a file of its own"):
            save(tmp_path / "a", b"new", overwrite=True)
        assert names(tmp_path / "a") == ["treering.json"]
        assert (tmp_path / "far.json").read_bytes() == b"[[], []]"

    def test_a_name_of_another_attempt_is_a_mistake(self, tmp_path: Path) -> None:
        with folder_at(tmp_path / "a") as saving:
            for name in (data_names(DEAD)[0], "treering.json", f"../{data_names(saving.attempt)[0]}"):
                with pytest.raises(ValueError, match="not a data file of attempt"):
                    saving.write_file(name, [b""], 0)

    def test_another_size_than_announced_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(StoreError, match="3 bytes, 4 were announced"), folder_at(tmp_path / "a") as saving:
            saving.write_file(data_names(saving.attempt)[0], [b"abc"], 4)
        assert names(tmp_path) == []


def test_the_order_of_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    def watched(name: str) -> None:
        def call(*args: object, **keywords: object) -> None:
            what = Path(f"/proc/self/fd/{args[0]}").readlink() if name == "fsync" else Path(str(args[-1]))
            short = "journal" if "-tmp" in what.name else "data" if "data-" in what.name else what.name
            steps.append(f"{name} {short}")

        faults.before(monkeypatch, os, name, call)

    for name in ("fsync", "link", "replace", "unlink", "mkdir"):
        watched(name)
    top = tmp_path.name
    durable = ["fsync a", "fsync data", "fsync data", "fsync journal", "fsync a"]
    save(tmp_path / "a", b"old")
    assert steps == ["mkdir a", f"fsync {top}", *durable, "link treering.json", "unlink journal", "fsync a"]
    steps.clear()
    save(tmp_path / "a", b"new", overwrite=True)
    assert steps == [*durable, "replace treering.json", "fsync a", "unlink data", "unlink data"]
    steps.clear()
    (tmp_path / "b").mkdir()
    steps.clear()
    save(tmp_path / "b", b"new")
    assert steps[0] == f"fsync {top}"  # whoever made the folder may not have made its name durable


def after(count: int) -> Callable[..., bool]:
    """True from the call of that number on."""
    calls = iter(range(1, 1 << 30))
    return lambda *_: next(calls) >= count


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_commit_whose_answer_is_lost_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool) -> None:
    if overwrite:
        save(tmp_path / "a", b"old")
    for name in ("link", "replace"):
        faults.fail(monkeypatch, os, name, errno.EIO, done=True)
    save(tmp_path / "a", b"new", overwrite=overwrite)
    assert load(tmp_path / "a") == b"new"
    assert len(names(tmp_path / "a")) == 3


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failed_last_sync_says_that_the_content_is_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    path = tmp_path / "a"
    first = save(path, b"old") if overwrite else None
    with folder_at(path, overwrite=overwrite) as saving:
        index = write(saving, b"new")
        faults.fail(monkeypatch, os, "fsync", errno.EIO, when=after(3))
        with pytest.raises(StoreError, match="the new content is in place, but a power cut may undo it") as caught:
            saving.commit(index)
    monkeypatch.undo()
    assert caught.value.filename == str(path)
    assert load(path) == b"new"
    # The old files stay for the case that the power is cut now, and go with the next save.
    assert set(names(path)) == {*data_names(saving.attempt), "treering.json", *(data_names(first) if first else [])}
    third = save(path, b"newer", overwrite=True)
    assert names(path) == sorted([*data_names(third), "treering.json"])


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_a_failed_sync_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, overwrite: bool
) -> None:
    path = tmp_path / "a"
    path.mkdir()
    if overwrite:
        save(path, b"old")
    before = names(path)
    calls: list[int] = []
    fail = after(at)

    def when(*args: int) -> bool:
        calls.append(args[0])
        return fail()

    faults.fail(monkeypatch, os, "fsync", errno.EIO, when=when)
    with pytest.raises(StoreError) as caught:
        save(path, b"new", overwrite=overwrite)
    assert caught.value.errno == errno.EIO
    assert len(calls) == at
    monkeypatch.undo()
    assert names(path) == before
    save(path, b"next", overwrite=overwrite)
    assert load(path) == b"next"


def test_old_files_that_stay_are_listed_until_they_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = save(tmp_path, b"one")
    with monkeypatch.context() as patch:
        faults.fail(patch, os, "unlink", errno.EIO, when=lambda name, **_: name.startswith("data-"))
        second = save(tmp_path, b"two", overwrite=True)
    assert set(data_names(first)) < set(names(tmp_path))
    with folder_at(tmp_path, overwrite=True) as saving:
        assert saving.superseded == (*data_names(second), *data_names(first))
        saving.commit(write(saving, b"three"))
    assert names(tmp_path) == sorted([*data_names(saving.attempt), "treering.json"])


def test_data_that_cannot_be_removed_keeps_the_journal_that_proves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    with monkeypatch.context() as patch:
        faults.fail(patch, os, "unlink", errno.EIO, when=lambda name, **_: name.startswith("data-"))
        with contextlib.suppress(Stop), folder_at(path) as saving:
            write(saving, b"new")
            raise Stop
    assert names(path) == sorted([journal_name(saving.attempt), *data_names(saving.attempt)])
    attempt = save(path, b"next")
    assert names(path) == sorted([*data_names(attempt), "treering.json"])


def test_a_power_cut_between_the_two_steps_of_a_commit(tmp_path: Path) -> None:
    first = save(tmp_path, b"old")
    os.link(tmp_path / "treering.json", tmp_path / journal_name(first))
    with pytest.raises(ExistsError):
        save(tmp_path, b"new")
    assert load(tmp_path) == b"old"
    with contextlib.suppress(Stop), folder_at(tmp_path, overwrite=True):
        assert journal_name(first) not in names(tmp_path)
        raise Stop
    assert load(tmp_path) == b"old"


def test_the_journal_of_a_living_writer_on_another_machine_is_respected(tmp_path: Path) -> None:
    save(tmp_path, b"old")
    with folder_at(tmp_path, overwrite=True) as far:
        index = write(far, b"far")
        # Its lock of the folder is not seen here: network file systems lock folders for one machine only.
        lock, far._transaction._locked = far._transaction._locked, None  # type: ignore[attr-defined]
        lock.unlock()
        with pytest.raises(BusyError, match="another process is saving"):
            save(tmp_path, b"near", overwrite=True)
        far.commit(index)
    assert load(tmp_path) == b"far"


def test_of_two_first_savers_without_a_common_lock_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with folder_at(path) as one:
        index = write(one, b"one")
        (path / "treering.json").write_bytes(b"[[], []]")  # the other was faster
        with pytest.raises(ExistsError, match="overwrite=True"):
            one.commit(index)
    assert names(path) == ["treering.json"]


def test_a_saver_whose_journal_was_swept_commits_nothing(tmp_path: Path) -> None:
    save(tmp_path, b"old")
    with folder_at(tmp_path, overwrite=True) as saving:
        index = write(saving, b"new")
        (tmp_path / journal_name(saving.attempt)).unlink()
        with pytest.raises(BusyError, match="removed the new files"):
            saving.commit(index)
    assert load(tmp_path) == b"old"


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_is_moved_away_is_not_committed(tmp_path: Path, replaced: bool) -> None:
    path = tmp_path / "a"
    with folder_at(path) as saving:
        index = write(saving, b"new")
        path.rename(tmp_path / "b")
        if replaced:
            save(path, b"other")
        with pytest.raises(BusyError, match="moved or removed the folder"):
            saving.commit(index)
    assert names(tmp_path / "b") == []
    assert not replaced or load(path) == b"other"


@pytest.mark.parametrize("moved", [False, True])
def test_a_folder_that_goes_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: bool
) -> None:
    """A saver that fails removes the folder that it made; whoever moves it takes nothing of the save along."""
    path = tmp_path / "new" / "a"
    times = iter(range(100))

    def flock(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX and (number := next(times)) < 3:
            if moved:
                path.rename(tmp_path / f"moved {number}")
            else:
                path.rmdir()
                path.parent.rmdir()

    faults.before(monkeypatch, fcntl, "flock", flock)
    save(path, b"new")
    assert load(path) == b"new"
    assert [names(place) for place in tmp_path.glob("moved *")] == [[]] * (3 if moved else 0)


def test_a_folder_that_vanishes_after_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    real = os.listdir
    times = iter(range(100))

    def listdir(where: int) -> list[str]:
        found = real(where)
        if next(times) < 2:
            path.rmdir()
        return found

    monkeypatch.setattr(os, "listdir", listdir)
    save(path, b"new")
    assert load(path) == b"new"


def test_a_folder_that_always_vanishes_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"

    def flock(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX:
            path.rmdir()

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(BusyError, match="disappears repeatedly"):
        save(path, b"new")
    assert names(tmp_path) == []


# The child here does nothing but wait; jax, which another test may have imported, warns of every fork.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning", "ignore:This process:DeprecationWarning")
def test_a_lock_is_given_back_though_a_forked_child_lives_on(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with folder_at(tmp_path / "a") as saving:
        child = os.fork()
        if child == 0:
            try:
                os.read(reader, 1)
            finally:
                os._exit(0)
        saving.commit(write(saving, b"old"))
    save(tmp_path / "a", b"new", overwrite=True)
    os.write(writer, b"!")
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
    assert load(tmp_path / "a") == b"new"


def test_without_locks_the_lock_file_of_a_crash_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_locks(monkeypatch)
    save(tmp_path, b"old")
    (tmp_path / ".treering.lock").write_bytes(b"")
    with pytest.raises(BusyError, match=r"another process is saving .*; remove '.treering.lock' there if none is"):
        save(tmp_path, b"new", overwrite=True)
    assert load(tmp_path) == b"old"
    (tmp_path / ".treering.lock").unlink()
    save(tmp_path, b"new", overwrite=True)
    assert len(names(tmp_path)) == 3


def test_rights_of_new_and_old_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save(tmp_path / "a", b"old")
        modes = {stat.S_IMODE(entry.stat().st_mode) for entry in (tmp_path / "a").iterdir()}
        assert modes == {0o640}
        (tmp_path / "a" / "treering.json").chmod(0o600)
        save(tmp_path / "a", b"new", overwrite=True)
    finally:
        os.umask(before)
    # What was closed to others stays closed.
    assert {stat.S_IMODE(entry.stat().st_mode) for entry in (tmp_path / "a").iterdir()} == {0o600}


def test_a_write_protected_checkpoint_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, b"old")
    faults.answer(monkeypatch, os, "access", False)  # root may write anything
    with pytest.raises(PermissionError, match="write-protected"):
        save(tmp_path, b"new", overwrite=True)
    assert load(tmp_path) == b"old"


def test_a_folder_that_may_not_be_written_is_refused_before_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, b"old")

    faults.fail(monkeypatch, os, "open", errno.EACCES, when=lambda path, flags, *args, **keywords: flags & os.O_CREAT)
    with pytest.raises(PermissionError, match="must be readable and writable"), folder_at(tmp_path, overwrite=True):
        pytest.fail("it began")
    assert load(tmp_path) == b"old"


def test_too_little_space_is_refused_before_work(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"needed.*; free some space$") as caught, folder_at(tmp_path / "a") as saving:
        saving.require_space(1 << 60)
    assert caught.value.errno == errno.ENOSPC
    assert names(tmp_path) == []


def test_no_room_is_told_in_units_and_says_that_the_old_checkpoint_stays(tmp_path: Path) -> None:
    save(tmp_path / "a", b"old")
    wanted = r"1152921504606846976 bytes \(1.00 EiB\) are needed, .*; free some space; the path is unchanged"
    with pytest.raises(StoreError, match=wanted), folder_at(tmp_path / "a", overwrite=True) as saving:
        saving.require_space(1 << 60)
    assert load(tmp_path / "a") == b"old"


def test_a_read_only_file_system_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, b"old")
    faults.answer(monkeypatch, os, "access", False)
    room = SimpleNamespace(f_flag=os.ST_RDONLY, f_blocks=1 << 40, f_bfree=1 << 40, f_frsize=1)
    faults.answer(monkeypatch, os, "fstatvfs", room)
    with pytest.raises(StoreError, match="Read-only file system; use a folder on a file system that") as caught:
        save(tmp_path, b"new", overwrite=True)
    assert caught.value.errno == errno.EROFS
    assert load(tmp_path) == b"old"


@pytest.mark.parametrize("path", ["a\0b", "a" * 300, "\ud800"])
def test_impossible_names(path: str) -> None:
    with pytest.raises(StoreError):
        save(Path(path), b"new")


def test_a_link_that_leads_in_a_circle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(StoreError, match="cannot be followed"):
        save(tmp_path / "a", b"new")


def test_an_index_that_vanishes_after_the_look_is_no_damaged_one(tmp_path: Path) -> None:
    save(tmp_path, b"old")

    def gone(index: bytes) -> list[str]:
        raise NotFoundError("not there")

    with pytest.raises(NotFoundError), folder_at(tmp_path, overwrite=True, names_in=gone):
        pass
    assert load(tmp_path) == b"old"


def test_after_the_block_nothing_can_be_written(tmp_path: Path) -> None:
    with folder_at(tmp_path / "a") as saving:
        index = write(saving, b"new")
        saving.commit(index)
    with pytest.raises(RuntimeError):
        saving.commit(index)
    assert names_in(index)


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    before = open_descriptors()
    save(tmp_path / "a", b"old")
    save(tmp_path / "a", b"new", overwrite=True)
    for _ in range(3):
        with pytest.raises(ExistsError):
            save(tmp_path / "a", b"new")
        with contextlib.suppress(Stop), folder_at(tmp_path / "b"):
            raise Stop
    assert open_descriptors() == before


def test_what_the_buffers_raise_passes(tmp_path: Path) -> None:
    def buffers() -> Iterator[bytes]:
        yield b"abc"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), folder_at(tmp_path / "a") as saving:
        saving.write_file(data_names(saving.attempt)[0], buffers(), 9)
    assert names(tmp_path) == []


# ------------------------------------------------------------------------------------------ where versions alone decide


def test_data_that_came_after_the_first_listing_is_superseded(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = install(monkeypatch, grace=0.0)
    path = located("memory://late/ckpt")
    first = save(path, b"treering")
    early = [Answer(Status.DONE)]  # the first listing was made before the first save came
    bucket.meet = lambda request: early.pop() if early and isinstance(request, List) else None
    with folder_at(path, overwrite=True) as saving:
        assert not early
        assert sorted(saving.superseded) == data_names(first)
        saving.commit(write(saving, b"newer"))
    assert not {*data_names(first)} & {*store_at(path).names()}


def test_messages_of_an_attempt_that_came_after_the_first_listing_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    path = located("memory://later/ckpt")
    save(path, b"treering")
    store = store_at(path)
    for attempt in (DEAD, "f" * 16):
        store.put(vote_name(attempt, 1), b"{}")
    there = store.read("treering.json")
    assert there is not None
    store.transaction().begin(journal_name(DEAD), there.version)
    kind = type(store)
    whole = kind.names
    monkeypatch.setattr(kind, "names", lambda store: [*{*whole(store)} - {journal_name(DEAD)}])
    with folder_at(path, overwrite=True):
        assert store.find(vote_name(DEAD, 1)) is not None
        assert store.find(vote_name("f" * 16, 1)) is None


@pytest.mark.parametrize("written", [False, True])
def test_an_interrupt_after_the_folder_was_closed_is_raised(
    written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_at(tmp_path / "a")
    struck: list[object] = []

    def strike(*_: object) -> None:
        if not struck:
            struck.append(None)
            raise KeyboardInterrupt

    def fail() -> None:
        with contextlib.closing(folder), folder:
            if written:
                write(folder, b"treering")
            faults.after(monkeypatch, type(store_at(tmp_path)), "close", strike)
            raise Stop

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert struck
    assert not (tmp_path / "a").exists()
