"""save_to_file at a path: what lies there afterwards, and beside it."""

import contextlib
import errno
import os
import random
import re
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import faults
from tests.folders import names
from tests.limits import write_past_the_cache
from tests.store.platforms import without_fcntl
from treering.errors import StoreError
from treering.serialization import save_to_file, to_bytes

MIB = 1 << 20
NEW, NEWER = {"a": "new"}, {"a": "newer"}


def fail(*_: object) -> None:
    raise OSError(5, "Input/output error")


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@pytest.mark.parametrize("way", [write_past_the_cache, lambda patch: None], ids=["direct", "page cache"])
def test_ten_thousand_small_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Callable[[pytest.MonkeyPatch], None]
) -> None:
    way(monkeypatch)
    tree = {str(size): noise(size % 3000) for size in range(10_000)}
    save_to_file(tree, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == to_bytes(tree)


def test_missing_folders_are_made_and_every_new_name_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []

    faults.before(
        monkeypatch, os, "fsync", lambda descriptor: synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
    )
    save_to_file(NEW, tmp_path / "a" / "b" / "c.bin")
    assert (tmp_path / "a" / "b" / "c.bin").read_bytes() == to_bytes(NEW)
    folder = str(tmp_path)
    assert synced[:2] == [folder, f"{folder}/a"]
    assert synced[2].startswith(f"{folder}/a/b/.c.bin.")
    assert synced[3:] == [f"{folder}/a/b"]


def test_the_content_is_durable_before_the_name_and_the_name_before_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("write", "pwrite", "ftruncate", "fsync", "replace"):
        faults.before(monkeypatch, os, name, lambda *_, name=name: calls.append(name))
    save_to_file(noise(100), tmp_path / "a.bin")
    assert calls == ["write", "fsync", "replace", "fsync"]
    calls.clear()
    write_past_the_cache(monkeypatch)
    save_to_file(noise(3 * MIB), tmp_path / "a.bin")
    assert calls == ["pwrite", "pwrite", "ftruncate", "fsync", "replace", "fsync"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o755])
def test_permission_bits_are_kept(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    path.chmod(mode)
    save_to_file(NEW, path)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert path.read_bytes() == to_bytes(NEW)


def test_a_new_file_gets_the_bits_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_to_file(NEW, tmp_path / "a.bin")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.bin").stat().st_mode) == 0o640


def test_another_group_gets_no_more_than_everybody_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    path.chmod(0o664)
    real = os.fstat

    def stranger(descriptor: int) -> os.stat_result:
        found = real(descriptor)
        return os.stat_result([*found[:5], found.st_gid + 1, *found[6:10]])

    monkeypatch.setattr(os, "fstat", stranger)
    faults.fail(monkeypatch, os, "fchown", errno.EPERM)
    save_to_file(NEW, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_write_protected_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    faults.answer(monkeypatch, os, "access", False)
    with pytest.raises(PermissionError, match="write-protected") as caught:
        save_to_file(NEW, path)
    assert isinstance(caught.value, StoreError)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "real.bin").write_bytes(b"old")
    (tmp_path / "step.bin").symlink_to("far/real.bin")
    (tmp_path / "latest.bin").symlink_to("step.bin")
    save_to_file(NEW, tmp_path / "latest.bin")
    assert str((tmp_path / "latest.bin").readlink()) == "step.bin"
    assert str((tmp_path / "step.bin").readlink()) == "far/real.bin"
    assert (tmp_path / "far" / "real.bin").read_bytes() == to_bytes(NEW)
    assert names(tmp_path) == ["far", "latest.bin", "step.bin"]


def test_a_link_to_nothing_gets_a_target(tmp_path: Path) -> None:
    (tmp_path / "latest.bin").symlink_to("not/yet.bin")
    save_to_file(NEW, tmp_path / "latest.bin")
    assert (tmp_path / "latest.bin").is_symlink()
    assert (tmp_path / "not" / "yet.bin").read_bytes() == to_bytes(NEW)


def test_a_circle_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(StoreError, match="cannot be followed"):
        save_to_file(NEW, tmp_path / "a")
    assert names(tmp_path) == ["a", "b"]


def test_a_link_that_cannot_be_read_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real.bin").write_bytes(b"old")
    (tmp_path / "latest.bin").symlink_to("real.bin")

    with monkeypatch.context() as patch:
        faults.fail(patch, os, "readlink", errno.EIO)
        with pytest.raises(StoreError, match=re.escape(str(tmp_path / "latest.bin"))):
            save_to_file(NEW, tmp_path / "latest.bin")
    assert (tmp_path / "latest.bin").is_symlink()
    assert (tmp_path / "real.bin").read_bytes() == b"old"


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="pass the name of a file") as caught:
        save_to_file(NEW, tmp_path)
    assert isinstance(caught.value, StoreError)
    assert names(tmp_path) == []


def test_a_pipe_is_refused_and_nobody_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreError, match="not a file"):
        save_to_file(NEW, tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    for path in (tmp_path / "a" / "b.bin", tmp_path / "a" / "b" / "c.bin"):
        with pytest.raises(NotADirectoryError) as caught:
            save_to_file(NEW, path)
        assert isinstance(caught.value, StoreError)
    assert (tmp_path / "a").read_bytes() == b"old"


def test_names_that_are_no_names(tmp_path: Path) -> None:
    for name in ("a\0b", "\ud800"):
        with pytest.raises(StoreError, match="cannot be the name of a file"):
            save_to_file(NEW, tmp_path / name)
    with pytest.raises(StoreError, match="too long"):
        save_to_file(NEW, tmp_path / ("n" * 256))
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["with space.bin", "größe-数-🌲.bin", ".hidden", "-dash", "new\nline", "a" * 255, "数" * 85, "*?[a]"]
)
def test_unusual_names(tmp_path: Path, name: str) -> None:
    for content in (NEW, NEWER):
        save_to_file(content, tmp_path / name)
        assert (tmp_path / name).read_bytes() == to_bytes(content)
        assert names(tmp_path) == [name]


def test_a_relative_path_counts_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_to_file(NEW, Path("a.bin"))
    save_to_file(NEW, Path("sub/../b/c.bin"))
    assert (tmp_path / "a.bin").read_bytes() == to_bytes(NEW)
    assert Path("b/c.bin").read_bytes() == to_bytes(NEW)


def test_very_deep_new_folders(tmp_path: Path) -> None:
    path = tmp_path.joinpath(*["d"] * 300, "a.bin")
    save_to_file(NEW, path)
    assert path.read_bytes() == to_bytes(NEW)


def test_a_disk_that_is_clearly_too_small_is_seen_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    full = SimpleNamespace(f_blocks=1 << 40, f_bfree=0, f_frsize=4096)
    faults.answer(monkeypatch, os, "fstatvfs", full)
    faults.fail(monkeypatch, os, "write", AssertionError())
    with pytest.raises(
        StoreError, match=r"needed, \d+ bytes.* are free; free some space; the path is unchanged"
    ) as caught:
        save_to_file(NEW, path)
    assert caught.value.errno == 28
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


def test_a_file_system_that_cannot_tell_its_room_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.fail(monkeypatch, os, "fstatvfs", errno.ENOSYS)
    save_to_file(NEW, tmp_path / "a.bin")
    monkeypatch.delattr(os, "fstatvfs")
    save_to_file(NEWER, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == to_bytes(NEWER)


def test_a_failed_sync_of_the_folder_says_that_the_new_content_is_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    asked: list[bool] = []

    def fsync(descriptor: int) -> None:
        folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        asked.append(folder)
        if folder:
            raise OSError(5, "Input/output error")

    faults.before(monkeypatch, os, "fsync", fsync)
    with pytest.raises(StoreError, match=r"could not make durable.*new content is in place") as caught:
        save_to_file(NEW, path)
    assert asked == [False, True]
    assert caught.value.errno == 5
    assert caught.value.filename == str(path)
    assert path.read_bytes() == to_bytes(NEW)
    assert names(tmp_path) == ["a.bin"]


def test_a_failed_sync_of_the_file_fails_the_save_and_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    asked: list[int] = []

    faults.fail(monkeypatch, os, "fsync", errno.EIO)
    faults.before(monkeypatch, os, "fsync", asked.append)
    with pytest.raises(StoreError, match="could not write"):
        save_to_file(NEW, path)
    assert len(asked) == 1
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


def test_a_file_system_that_keeps_no_folders_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    faults.fail(
        monkeypatch, os, "fsync", errno.EINVAL, when=lambda descriptor: stat.S_ISDIR(os.fstat(descriptor).st_mode)
    )
    save_to_file(NEW, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == to_bytes(NEW)


def test_a_platform_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows: nothing is swept, nothing direct, the file is closed before it is renamed."""
    without_fcntl(monkeypatch)
    write_past_the_cache(monkeypatch)
    path = tmp_path / "a.bin"
    left = tmp_path / f".a.bin.{'0' * 16}.treering-tmp"
    left.write_bytes(b"left")
    for content in (noise(3 * MIB), b"newer"):
        save_to_file(content, path)
        assert path.read_bytes() == to_bytes(content)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(StoreError):
            save_to_file(NEW, path)
    assert path.read_bytes() == to_bytes(b"newer")
    assert names(tmp_path) == [left.name, "a.bin"]


def test_descriptors_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = names("/proc/self/fd")
    for way in (lambda patch: None, write_past_the_cache):
        way(monkeypatch)
        for content in (NEW, noise(3 * MIB)):
            save_to_file(content, tmp_path / "a.bin")
            with monkeypatch.context() as patch, contextlib.suppress(StoreError):
                patch.setattr(os, "fsync", fail)
                save_to_file(content, tmp_path / "a.bin")
                pytest.fail("it did not fail")
    assert names("/proc/self/fd") == before
