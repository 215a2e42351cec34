"""Staged files: who may remove which, and what a race between writers and sweepers ends in."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.listing import names
from treering._store.posix import descriptors, stage
from treering._store.posix.writing import replace_file
from treering.errors import StoreFailed

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
    replace_file(tmp_path / "a.bin", [b"new"], 3)
    assert names(tmp_path) == sorted([*others, "a.bin"])


def test_a_live_writer_keeps_its_staged_file(tmp_path: Path) -> None:
    staged = tmp_path / staged_name("a.bin")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(staged)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        replace_file(tmp_path / "a.bin", [b"new"], 3)
        assert staged.exists()
        holder.kill()
    replace_file(tmp_path / "a.bin", [b"newer"], 5)
    assert names(tmp_path) == ["a.bin"]


def test_two_saves_in_one_process_leave_each_other_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"

    def buffers() -> Iterator[bytes]:
        yield b"outer "
        replace_file(path, [b"inner"], 5)
        assert path.read_bytes() == b"inner"
        yield b"new"

    replace_file(path, buffers(), 9)
    assert path.read_bytes() == b"outer new"
    assert names(tmp_path) == ["a.bin"]


def test_a_link_or_pipe_with_the_name_of_a_leftover_harms_nobody(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    (tmp_path / staged_name("a.bin", "1" * 16)).symlink_to(precious)
    os.mkfifo(tmp_path / staged_name("a.bin", "2" * 16))
    (tmp_path / staged_name("a.bin", "3" * 16)).mkdir()
    replace_file(tmp_path / "a.bin", [b"new"], 3)
    assert precious.read_bytes() == b"precious"
    assert (tmp_path / "a.bin").read_bytes() == b"new"


def test_a_sweep_that_fails_does_not_fail_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / staged_name("a.bin")).write_bytes(b"left")

    def refuse(path: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", refuse)
        replace_file(tmp_path / "a.bin", [b"new"], 3)
    with monkeypatch.context() as patch:
        patch.setattr(stage, "_sweep_one", refuse)
        replace_file(tmp_path / "a.bin", [b"newer"], 5)
    assert (tmp_path / "a.bin").read_bytes() == b"newer"


@pytest.mark.parametrize("moment", ["holds the lock", "has removed it"])
def test_a_sweeper_between_creation_and_lock_costs_one_more_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    real = descriptors.lock
    met: list[str] = []

    def lock(descriptor: int) -> bool | None:
        if not met:
            met.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
            if moment == "holds the lock":
                return False
            Path(met[0]).unlink()
        return real(descriptor)

    monkeypatch.setattr(descriptors, "lock", lock)
    replace_file(tmp_path / "a.bin", [b"new"], 3)
    assert len(met) == 1
    assert names(tmp_path) == ["a.bin"]
    assert (tmp_path / "a.bin").read_bytes() == b"new"


def test_a_sweeper_that_never_tires_is_an_error_at_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "lock", lambda descriptor: False)
    with pytest.raises(StoreFailed, match="keep removing"):
        replace_file(tmp_path / "a.bin", [b"new"], 3)
    assert names(tmp_path) == []


def test_a_file_system_without_locks_sweeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / staged_name("a.bin")).write_bytes(b"left")

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    replace_file(tmp_path / "a.bin", [b"new"], 3)
    assert names(tmp_path) == [staged_name("a.bin"), "a.bin"]


def test_a_lock_that_fails_for_another_reason_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StoreFailed, match="Input/output"):
        replace_file(tmp_path / "a.bin", [b"new"], 3)
    assert names(tmp_path) == []


def test_the_staged_name_is_never_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real = os.replace

    def replace(source: str, target: str) -> None:
        seen.append(Path(source).name)
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    for name in ("a", "n" * 255, "é" * 127, "🌲" * 63):
        replace_file(tmp_path / name, [b"new"], 3)
        staged = seen.pop()
        assert len(os.fsencode(staged)) <= 255
        assert name.startswith(staged[1 : -len(".0123456789abcdef.treering-tmp")])


def test_a_rename_whose_answer_is_lost_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.bin").write_bytes(b"old")
    real = os.replace

    def replace(old: str, new: str) -> None:
        real(old, new)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "replace", replace)
    replace_file(tmp_path / "a.bin", [b"new"], 3)
    assert (tmp_path / "a.bin").read_bytes() == b"new"
    assert names(tmp_path) == ["a.bin"]
