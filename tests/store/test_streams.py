"""write_stream: the caller's file, whatever it is, gets all the bytes or an error."""

import gzip
import io
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from treering._store.posix.writing import write_stream
from treering.errors import NotFound, StoreFailed, Unsupported

BUFFERS = [b"header", random.Random(0).randbytes(300_000), b"", b"tail"]
CONTENT = b"".join(BUFFERS)


def test_a_real_file_is_flushed_and_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with (tmp_path / "a.bin").open("wb") as file:
        file.write(b"before ")
        write_stream(file, BUFFERS)
        assert synced == [file.fileno()]
        assert (tmp_path / "a.bin").read_bytes() == b"before " + CONTENT


def test_files_in_memory_and_in_other_files(tmp_path: Path) -> None:
    memory = io.BytesIO()
    write_stream(memory, BUFFERS)
    assert memory.getvalue() == CONTENT
    with gzip.open(tmp_path / "a.gz", "wb") as packed:
        write_stream(packed, BUFFERS)  # type: ignore[arg-type]
    assert gzip.decompress((tmp_path / "a.gz").read_bytes()) == CONTENT


def test_a_raw_file_that_takes_little_at_a_time(tmp_path: Path) -> None:
    class Slow(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data[:1000]))

    with Slow(tmp_path / "a.bin", "wb") as file:
        write_stream(file, BUFFERS)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_pipe_is_not_synced() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as end, os.fdopen(writer, "wb") as start:
        write_stream(start, [b"through"])
        assert end.read(7) == b"through"


def test_a_pipe_that_is_full_and_does_not_wait() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    full = pytest.raises(StoreFailed, match="accepts no more bytes")
    with os.fdopen(reader, "rb"), os.fdopen(writer, "wb", buffering=0) as start, full:
        write_stream(start, [bytes(1 << 20)])


def test_objects_of_the_callers_own() -> None:
    class Least:
        def __init__(self) -> None:
            self.parts: list[bytes] = []

        def write(self, data: memoryview) -> None:
            self.parts.append(bytes(data))

    class NamedByNumber(Least):
        name = 3

        def fileno(self) -> int:
            raise io.UnsupportedOperation

        def flush(self) -> None:
            raise OSError(5, "Input/output error")

    least = Least()
    write_stream(least, BUFFERS)  # type: ignore[arg-type]
    assert b"".join(least.parts) == CONTENT
    with pytest.raises(StoreFailed, match="could not write '<NamedByNumber>': Input/output error"):
        write_stream(NamedByNumber(), BUFFERS)  # type: ignore[arg-type]


def test_text_is_refused_before_anything_is_written() -> None:
    file = io.StringIO()
    with pytest.raises(Unsupported, match="'wb'"):
        write_stream(file, BUFFERS)  # type: ignore[arg-type]
    assert file.getvalue() == ""


def test_errors_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with (tmp_path / "a.bin").open("wb") as file, pytest.raises(StoreFailed, match=r"a\.bin") as caught:
        write_stream(file, BUFFERS)
    assert caught.value.errno == 5


def test_an_error_of_the_source_passes() -> None:
    def buffers() -> Iterator[bytes]:
        yield b"a"
        raise NotFound("the source is gone")

    with pytest.raises(NotFound, match="source"):
        write_stream(io.BytesIO(), buffers())


def test_a_file_that_is_only_read(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"old")
    with (tmp_path / "a.bin").open("rb") as file, pytest.raises(StoreFailed):
        write_stream(file, [b"new"])
