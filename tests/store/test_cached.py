"""Writes through the page cache begin to reach the disk before they end."""

import errno
from pathlib import Path

import pytest

from treering._store.posix import descriptors, writing
from treering.errors import StoreFailed

MIB = 1 << 20


def test_runs_are_begun_in_order_and_without_gaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(writing, "_RUN_BYTES", 3 * MIB)
    monkeypatch.setattr(writing, "_PIECE_BYTES", MIB)

    def begin(_: int, offset: int, count: int) -> bool:
        asked.append((offset, count))
        return True

    monkeypatch.setattr(descriptors, "start_writeback", begin)
    data = bytes(range(256)) * (8 * MIB // 256)
    writing.replace_file(tmp_path / "a", [data[: 5 * MIB], data[5 * MIB :]], len(data))
    assert asked == [(0, 3 * MIB), (3 * MIB, 3 * MIB)]
    assert (tmp_path / "a").read_bytes() == data


def test_a_system_without_the_request_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(writing, "_RUN_BYTES", MIB)
    monkeypatch.setattr(writing, "_PIECE_BYTES", MIB)

    def refuse(_: int, offset: int, __: int) -> bool:
        asked.append(offset)
        return False

    monkeypatch.setattr(descriptors, "start_writeback", refuse)
    writing.replace_file(tmp_path / "a", [bytes(4 * MIB)], 4 * MIB)
    assert asked == [0]
    assert (tmp_path / "a").stat().st_size == 4 * MIB


def test_a_disk_that_fails_early_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"old")
    monkeypatch.setattr(writing, "_RUN_BYTES", MIB)

    def fail(*_: int) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(descriptors, "start_writeback", fail)
    with pytest.raises(StoreFailed, match="Input/output error"):
        writing.replace_file(tmp_path / "a", [bytes(4 * MIB)], 4 * MIB)
    assert (tmp_path / "a").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_real_request_is_taken_and_a_closed_file_is_an_error(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        file.write(bytes(MIB))
        file.flush()
        assert isinstance(descriptors.start_writeback(file.fileno(), 0, MIB), bool)
        number = file.fileno()
    with pytest.raises(OSError, match="descriptor"):
        descriptors.start_writeback(number, 0, MIB)


@pytest.mark.parametrize(("free", "past_the_cache"), [(1 << 40, False), (MIB, True), (None, False)])
def test_only_a_file_too_large_for_free_memory_goes_past_the_cache(
    free: int | None, past_the_cache: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    went: list[int] = []
    monkeypatch.setattr(writing, "DIRECT_FROM", MIB)
    monkeypatch.setattr(descriptors, "free_memory", lambda: free)

    def refuse(descriptor: int) -> bool:
        went.append(descriptor)
        return False

    monkeypatch.setattr(descriptors, "go_direct", refuse)
    writing.replace_file(tmp_path / "a", [bytes(2 * MIB)], 2 * MIB)
    assert bool(went) == past_the_cache
    assert (tmp_path / "a").stat().st_size == 2 * MIB


def test_free_memory_is_a_number_here() -> None:
    assert (descriptors.free_memory() or 1) > 0
