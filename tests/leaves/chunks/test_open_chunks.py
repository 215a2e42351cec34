"""Open files that are kept for a while: few at a time, none closed in use, none left."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from treering._leaves.chunks import files as chunk_files
from treering._leaves.chunks.files import OpenChunks
from treering._store.posix.reading import LocalFile


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / str(number) for number in range(10)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]))
    return paths


def test_the_last_ones_stay_open_and_all_are_closed_at_the_end(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_files, "_MOST", 3)
    opened: list[LocalFile] = []

    def opener(number: int) -> LocalFile:
        opened.append(LocalFile(files[number]))
        return opened[-1]

    chunks = OpenChunks()
    with chunks:
        for number in (0, 1, 2, 0, 3, 0, 1):
            with chunks.using(number, functools.partial(opener, number)) as file:
                assert file.read(0, 1) == bytes([number])
                assert sum(one._descriptor >= 0 for one in opened) <= 3
        # 1 was the one that had to go when 3 came.
        assert [file.path.name for file in opened] == ["0", "1", "2", "3", "1"]
    assert all(file._descriptor < 0 for file in opened)


def test_a_file_in_use_is_not_closed(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_files, "_MOST", 1)
    chunks = OpenChunks()
    with chunks, chunks.using(0, lambda: LocalFile(files[0])) as first:
        for number in range(1, 5):
            with chunks.using(number, functools.partial(LocalFile, files[number])):
                pass
        assert first.read(0, 1) == b"\0"


def test_another_reading_keeps_them_open(files: list[Path]) -> None:
    chunks = OpenChunks()
    with chunks:
        with chunks, chunks.using(0, lambda: LocalFile(files[0])) as file:
            pass
        assert file._descriptor >= 0
    assert file._descriptor < 0


def test_what_cannot_be_opened_is_not_kept(files: list[Path]) -> None:
    chunks = OpenChunks()

    def refuse() -> LocalFile:
        raise FileNotFoundError

    with chunks:
        with pytest.raises(FileNotFoundError), chunks.using(0, refuse):
            pass
        with chunks.using(0, lambda: LocalFile(files[0])) as file:
            assert file.size == 1
