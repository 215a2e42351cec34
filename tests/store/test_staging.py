"""Staged files: who may remove which, and what a race between writers and sweepers ends in."""

import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests import faults
from tests.folders import names
from treering.errors import StoreError
from treering.serialization import save_to_file, to_bytes

NEW, NEWER = {"a": "new"}, {"a": "newer"}
FULL = 51
"""The number of the request ``F_FULLFSYNC`` on macOS."""

HOLDER = """
import fcntl, sys, time
with open(sys.argv[1], "wb") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


def staged_name(name: str, token: str = "0123456789abcdef") -> str:
    return f".{name}.{token}.treering-tmp"


def test_the_leftover_of_a_dead_writer_is_swept_and_nothing_else(tmp_path: Path) -> None:
    left = [staged_name("a.bin"), staged_name("a.bin", "f" * 16)]
    others = [
        staged_name("b.bin"),  # another file's
        staged_name("a.bin", "short"),
        staged_name("a.bin.b.bin"),
        ".a.bin.0123456789abcdef.tmp",  # somebody else's
        "a.bin.0123456789abcdef.treering-tmp",
        "b.bin",
    ]
    for name in left + others:
        (tmp_path / name).write_bytes(b"left")
    save_to_file(NEW, tmp_path / "a.bin")
    assert names(tmp_path) == sorted([*others, "a.bin"])


def test_a_live_writer_keeps_its_staged_file(tmp_path: Path) -> None:
    staged = tmp_path / staged_name("a.bin")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(staged)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        save_to_file(NEW, tmp_path / "a.bin")
        assert staged.exists()
        holder.kill()
    save_to_file(NEWER, tmp_path / "a.bin")
    assert names(tmp_path) == ["a.bin"]


def test_two_saves_in_one_process_leave_each_other_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.bin"
    real = os.write

    def write(descriptor: int, data: memoryview) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", real)
            save_to_file(NEWER, path)
        assert path.read_bytes() == to_bytes(NEWER)

    faults.before(monkeypatch, os, "write", write)
    save_to_file(NEW, path)
    assert path.read_bytes() == to_bytes(NEW)
    assert names(tmp_path) == ["a.bin"]


def test_a_link_or_pipe_with_the_name_of_a_leftover_harms_nobody(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    (tmp_path / staged_name("a.bin", "1" * 16)).symlink_to(precious)
    os.mkfifo(tmp_path / staged_name("a.bin", "2" * 16))
    (tmp_path / staged_name("a.bin", "3" * 16)).mkdir()
    save_to_file(NEW, tmp_path / "a.bin")
    assert precious.read_bytes() == b"precious"
    assert (tmp_path / "a.bin").read_bytes() == to_bytes(NEW)


def test_a_sweep_that_fails_does_not_fail_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / staged_name("a.bin")).write_bytes(b"left")

    refused: list[str] = []

    with monkeypatch.context() as patch:
        faults.fail(patch, os, "listdir", errno.EACCES)
        save_to_file(NEW, tmp_path / "a.bin")

    def refuse_leftovers(path: str, flags: int, *arguments: int, **options: int) -> None:
        if path.endswith(".treering-tmp") and not flags & os.O_CREAT:
            refused.append(path)
            raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        faults.before(patch, os, "open", refuse_leftovers)
        save_to_file(NEWER, tmp_path / "a.bin")
    assert refused == [str(tmp_path / staged_name("a.bin"))]
    assert (tmp_path / "a.bin").read_bytes() == to_bytes(NEWER)


@pytest.mark.parametrize("moment", ["holds the lock", "has removed it"])
def test_a_sweeper_between_creation_and_lock_costs_one_more_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    met: list[str] = []

    def flock(descriptor: int, operation: int) -> None:
        if not met:
            met.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
            if moment == "holds the lock":
                raise BlockingIOError(11, "Resource temporarily unavailable")
            Path(met[0]).unlink()

    faults.before(monkeypatch, fcntl, "flock", flock)
    save_to_file(NEW, tmp_path / "a.bin")
    assert len(met) == 1
    assert names(tmp_path) == ["a.bin"]
    assert (tmp_path / "a.bin").read_bytes() == to_bytes(NEW)


def test_a_sweeper_that_never_tires_is_an_error_at_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.fail(monkeypatch, fcntl, "flock", errno.EAGAIN)
    with pytest.raises(StoreError, match="keep removing"):
        save_to_file(NEW, tmp_path / "a.bin")
    assert names(tmp_path) == []


def test_a_file_system_without_locks_sweeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / staged_name("a.bin")).write_bytes(b"left")

    faults.fail(monkeypatch, fcntl, "flock", errno.EOPNOTSUPP)
    save_to_file(NEW, tmp_path / "a.bin")
    assert names(tmp_path) == [staged_name("a.bin"), "a.bin"]


def test_a_lock_that_fails_for_another_reason_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.fail(monkeypatch, fcntl, "flock", errno.EIO)
    with pytest.raises(StoreError, match="Input/output"):
        save_to_file(NEW, tmp_path / "a.bin")
    assert names(tmp_path) == []


def test_the_staged_name_is_never_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    faults.before(monkeypatch, os, "replace", lambda source, target: seen.append(Path(source).name))
    for name in ("a", "n" * 255, "é" * 127, "🌲" * 63):
        save_to_file(NEW, tmp_path / name)
        staged = seen.pop()
        assert len(os.fsencode(staged)) <= 255
        assert name.startswith(staged[1 : -len(".0123456789abcdef.treering-tmp")])


def test_a_rename_whose_answer_is_lost_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.bin").write_bytes(b"old")
    faults.fail(monkeypatch, os, "replace", errno.EIO, done=True)
    save_to_file(NEW, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == to_bytes(NEW)
    assert names(tmp_path) == ["a.bin"]


def ask_drives(monkeypatch: pytest.MonkeyPatch, refusal: int | None) -> list[int]:
    """Give this system the request by which macOS flushes the drive's own cache; return the list of who asks."""
    asked: list[int] = []
    real = fcntl.fcntl

    def ask(descriptor: int, request: int, argument: int = 0) -> int:
        if request != FULL:
            return real(descriptor, request, argument)
        asked.append(os.fstat(descriptor).st_mode)
        if refusal is not None:
            raise OSError(refusal, os.strerror(refusal))
        return 0

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", FULL, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", ask)
    return asked


def test_a_drive_that_can_be_flushed_is_and_another_one_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real = os.fsync

    def sync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_mode)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    with monkeypatch.context() as patch:
        asked = ask_drives(patch, None)
        save_to_file(NEW, tmp_path / "a.bin")
        assert any(map(stat.S_ISREG, asked))
        assert not any(map(stat.S_ISREG, synced))
    with monkeypatch.context() as patch:
        asked = ask_drives(patch, errno.ENOTSUP)
        save_to_file(NEWER, tmp_path / "b.bin")
        assert any(map(stat.S_ISREG, asked))
        assert any(map(stat.S_ISREG, synced))


def test_a_drive_that_fails_to_flush_is_a_save_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask_drives(monkeypatch, errno.EIO)
    with pytest.raises(StoreError):
        save_to_file(NEW, tmp_path / "a.bin")
    assert names(tmp_path) == []
