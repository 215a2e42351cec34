"""replace_file: what lies at the path afterwards, and beside it."""

import os
import random
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.listing import names
from treering._store.pieces import Buffer
from treering._store.posix import descriptors, writing
from treering._store.posix.writing import replace_file
from treering.errors import NotFound, StoreFailed, TreeringError

MIB = 1 << 20


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@pytest.fixture(params=["direct", "page cache"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every file takes the direct way, or none does."""
    monkeypatch.setattr(writing, "DIRECT_FROM", 0 if request.param == "direct" else 1 << 62)
    monkeypatch.setattr(writing, "FREE_SHARE", 0)
    return str(request.param)


SIZES = [0, 1, 511, 4095, 4096, 4097, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 16 * MIB, 19 * MIB + 77]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", SIZES)
def test_the_content_is_the_concatenation(tmp_path: Path, size: int) -> None:
    content = noise(size)
    cuts = sorted(random.Random(1).randrange(size + 1) for _ in range(7))
    buffers = [memoryview(content)[a:b] for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
    replace_file(tmp_path / "a.bin", iter(buffers), size)
    assert (tmp_path / "a.bin").read_bytes() == content
    assert names(tmp_path) == ["a.bin"]


@pytest.mark.usefixtures("way")
def test_ten_thousand_small_buffers(tmp_path: Path) -> None:
    buffers = [noise(size % 3000) for size in range(10_000)]
    content = b"".join(buffers)
    replace_file(tmp_path / "a.bin", buffers, len(content))
    assert (tmp_path / "a.bin").read_bytes() == content


def test_buffers_of_every_kind(tmp_path: Path) -> None:
    import array

    numbers = array.array("d", range(20_000))
    buffers: list[Buffer] = [b"ab", bytearray(b"cd"), memoryview(numbers), memoryview(numbers)[:0], memoryview(b"ef")]
    replace_file(tmp_path / "a.bin", buffers, 6 + 8 * 20_000)
    assert (tmp_path / "a.bin").read_bytes() == b"abcd" + numbers.tobytes() + b"ef"


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("announced", [0, 5 * MIB - 1, 5 * MIB + 1, 50 * MIB])
def test_another_size_than_announced_changes_nothing(tmp_path: Path, announced: int) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with pytest.raises(StoreFailed, match=r"buffers hold .*announced") as caught:
        replace_file(path, [noise(5 * MIB)], announced)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), NotFound("the source is gone"), ValueError("no such leaf")])
def test_an_error_of_the_source_passes_and_changes_nothing(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def buffers() -> Iterator[bytes]:
        yield noise(3 * MIB)
        raise error

    with pytest.raises(type(error)) as caught:
        replace_file(path, buffers(), 9 * MIB)
    assert caught.value is error
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


def test_missing_folders_are_made_and_every_new_name_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    replace_file(tmp_path / "a" / "b" / "c.bin", [b"new"], 3)
    assert (tmp_path / "a" / "b" / "c.bin").read_bytes() == b"new"
    folder = str(tmp_path)
    assert synced[:2] == [folder, f"{folder}/a"]
    assert synced[2].startswith(f"{folder}/a/b/.c.bin.")
    assert synced[3:] == [f"{folder}/a/b"]


def test_the_content_is_durable_before_the_name_and_the_name_before_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("write", "pwrite", "ftruncate", "fsync", "replace"):
        real = getattr(os, name)

        def record(*args: object, real: object = real, name: str = name) -> object:
            calls.append(name)
            return real(*args)  # type: ignore[operator]

        monkeypatch.setattr(os, name, record)
    monkeypatch.setattr(writing, "DIRECT_FROM", MIB)
    monkeypatch.setattr(writing, "FREE_SHARE", 0)
    replace_file(tmp_path / "a.bin", [noise(100)], 100)
    assert calls == ["write", "fsync", "replace", "fsync"]
    calls.clear()
    replace_file(tmp_path / "a.bin", [noise(3 * MIB)], 3 * MIB)
    assert calls == ["pwrite", "pwrite", "ftruncate", "fsync", "replace", "fsync"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o755])
def test_permission_bits_are_kept(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    path.chmod(mode)
    replace_file(path, [b"new"], 3)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert path.read_bytes() == b"new"


def test_a_new_file_gets_the_bits_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        replace_file(tmp_path / "a.bin", [b"new"], 3)
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

    def refused(descriptor: int, owner: int, group: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(descriptors, "is_at", lambda descriptor, path: True)
    monkeypatch.setattr(os, "fstat", stranger)
    monkeypatch.setattr(os, "fchown", refused)
    replace_file(path, [b"new"], 3)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_write_protected_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(PermissionError, match="write-protected") as caught:
        replace_file(path, [b"new"], 3)
    assert isinstance(caught.value, StoreFailed)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "real.bin").write_bytes(b"old")
    (tmp_path / "step.bin").symlink_to("far/real.bin")
    (tmp_path / "latest.bin").symlink_to("step.bin")
    replace_file(tmp_path / "latest.bin", [b"new"], 3)
    assert str((tmp_path / "latest.bin").readlink()) == "step.bin"
    assert str((tmp_path / "step.bin").readlink()) == "far/real.bin"
    assert (tmp_path / "far" / "real.bin").read_bytes() == b"new"
    assert names(tmp_path) == ["far", "latest.bin", "step.bin"]


def test_a_link_to_nothing_gets_a_target(tmp_path: Path) -> None:
    (tmp_path / "latest.bin").symlink_to("not/yet.bin")
    replace_file(tmp_path / "latest.bin", [b"new"], 3)
    assert (tmp_path / "latest.bin").is_symlink()
    assert (tmp_path / "not" / "yet.bin").read_bytes() == b"new"


def test_a_circle_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(StoreFailed, match="cannot be followed"):
        replace_file(tmp_path / "a", [b"new"], 3)
    assert names(tmp_path) == ["a", "b"]


def test_a_link_that_cannot_be_read_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real.bin").write_bytes(b"old")
    (tmp_path / "latest.bin").symlink_to("real.bin")

    def fail(path: str) -> str:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "readlink", fail)
        with pytest.raises(StoreFailed, match=re.escape(str(tmp_path / "latest.bin"))):
            replace_file(tmp_path / "latest.bin", [b"new"], 3)
    assert (tmp_path / "latest.bin").is_symlink()
    assert (tmp_path / "real.bin").read_bytes() == b"old"


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="pass the name of a file") as caught:
        replace_file(tmp_path, [b"new"], 3)
    assert isinstance(caught.value, StoreFailed)
    assert names(tmp_path) == []


def test_a_pipe_is_refused_and_nobody_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreFailed, match="not a file"):
        replace_file(tmp_path / "pipe", [b"new"], 3)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    for path in (tmp_path / "a" / "b.bin", tmp_path / "a" / "b" / "c.bin"):
        with pytest.raises(NotADirectoryError) as caught:
            replace_file(path, [b"new"], 3)
        assert isinstance(caught.value, StoreFailed)
    assert (tmp_path / "a").read_bytes() == b"old"


def test_names_that_are_no_names(tmp_path: Path) -> None:
    for name in ("a\0b", "\ud800"):
        with pytest.raises(StoreFailed, match="cannot be the name of a file"):
            replace_file(tmp_path / name, [b"new"], 3)
    with pytest.raises(StoreFailed, match="too long"):
        replace_file(tmp_path / ("n" * 256), [b"new"], 3)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["with space.bin", "größe-数-🌲.bin", ".hidden", "-dash", "new\nline", "a" * 255, "数" * 85, "*?[a]"]
)
def test_unusual_names(tmp_path: Path, name: str) -> None:
    for content in (b"old", b"newer"):
        replace_file(tmp_path / name, [content], len(content))
        assert (tmp_path / name).read_bytes() == content
        assert names(tmp_path) == [name]


def test_a_relative_path_counts_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    replace_file(Path("a.bin"), [b"new"], 3)
    replace_file(Path("sub/../b/c.bin"), [b"new"], 3)
    assert (tmp_path / "a.bin").read_bytes() == b"new"
    assert Path("b/c.bin").read_bytes() == b"new"


def test_very_deep_new_folders(tmp_path: Path) -> None:
    path = tmp_path.joinpath(*["d"] * 300, "a.bin")
    replace_file(path, [b"new"], 3)
    assert path.read_bytes() == b"new"


def test_a_disk_that_is_clearly_too_small_is_seen_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def never(descriptor: int, data: memoryview) -> int:
        raise AssertionError

    monkeypatch.setattr(os, "write", never)
    with pytest.raises(
        StoreFailed, match=r"needed, \d+ bytes.* are free; free some space; the path is unchanged"
    ) as caught:
        replace_file(path, iter([]), 1 << 60)
    assert caught.value.errno == 28
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


def test_a_file_system_that_cannot_tell_its_room_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> os.statvfs_result:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "fstatvfs", refuse)
    replace_file(tmp_path / "a.bin", [b"new"], 3)
    monkeypatch.delattr(os, "fstatvfs")
    replace_file(tmp_path / "a.bin", [b"newer"], 5)
    assert (tmp_path / "a.bin").read_bytes() == b"newer"


def test_a_failed_sync_of_the_folder_says_that_the_new_content_is_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    real = os.fsync
    asked: list[bool] = []

    def fsync(descriptor: int) -> None:
        folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        asked.append(folder)
        if folder:
            raise OSError(5, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StoreFailed, match=r"could not make durable.*new content is in place") as caught:
        replace_file(path, [b"new"], 3)
    assert asked == [False, True]
    assert caught.value.errno == 5
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["a.bin"]


def test_a_failed_sync_of_the_file_fails_the_save_and_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    asked: list[int] = []

    def fsync(descriptor: int) -> None:
        asked.append(descriptor)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StoreFailed, match="could not write"):
        replace_file(path, [b"new"], 3)
    assert len(asked) == 1
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


def test_a_file_system_that_keeps_no_folders_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(22, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    replace_file(tmp_path / "a.bin", [b"new"], 3)
    assert (tmp_path / "a.bin").read_bytes() == b"new"


def test_a_platform_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows: nothing is swept, nothing direct, the file is closed before it is renamed."""
    monkeypatch.setattr(descriptors, "fcntl", None)
    monkeypatch.setattr(writing, "DIRECT_FROM", 0)
    monkeypatch.setattr(writing, "FREE_SHARE", 0)
    path = tmp_path / "a.bin"
    left = tmp_path / f".a.bin.{'0' * 16}.treering-tmp"
    left.write_bytes(b"left")
    for content in (noise(3 * MIB), b"newer"):
        replace_file(path, [content], len(content))
        assert path.read_bytes() == content
    with pytest.raises(TreeringError):
        replace_file(path, [b"new"], 4)
    assert names(tmp_path) == [left.name, "a.bin"]


def test_descriptors_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = names("/proc/self/fd")
    monkeypatch.setattr(writing, "DIRECT_FROM", MIB)
    monkeypatch.setattr(writing, "FREE_SHARE", 0)
    for size, announced in ((3, 3), (3, 4), (3 * MIB, 3 * MIB), (3 * MIB, 4 * MIB)):
        try:
            replace_file(tmp_path / "a.bin", [noise(size)], announced)
        except StoreFailed:
            assert size != announced
    assert names("/proc/self/fd") == before
