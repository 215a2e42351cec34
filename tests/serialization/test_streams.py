"""save_to_file into an open file: whatever it is, it gets all the bytes or an error."""

import errno
import gzip
import io
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import faults
from treering.errors import NotFoundError, StoreError, UnsupportedError
from treering.serialization import load_from_file, save_to_file, to_bytes

TREE = {
    "a": b"header",
    "w": np.frombuffer(random.Random(0).randbytes(300_000), "u1"),
    "none": np.zeros(0),
    "z": b"tail",
}
CONTENT = to_bytes(TREE)


def test_a_real_file_is_flushed_and_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with (tmp_path / "a.bin").open("wb") as file:
        file.write(b"before ")
        save_to_file(TREE, file)
        assert synced == [file.fileno()]
        assert (tmp_path / "a.bin").read_bytes() == b"before " + CONTENT


def test_files_in_memory_and_in_other_files(tmp_path: Path) -> None:
    memory = io.BytesIO()
    save_to_file(TREE, memory)
    assert memory.getvalue() == CONTENT
    with gzip.open(tmp_path / "a.gz", "wb") as packed:
        save_to_file(TREE, packed)  # type: ignore[arg-type]
    assert gzip.decompress((tmp_path / "a.gz").read_bytes()) == CONTENT


def test_a_raw_file_that_takes_little_at_a_time(tmp_path: Path) -> None:
    class Slow(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data[:1000]))

    with Slow(tmp_path / "a.bin", "wb") as file:
        save_to_file(TREE, file)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_pipe_is_not_synced() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as end, os.fdopen(writer, "wb") as start:
        save_to_file(7, start)
        assert end.read(1) == to_bytes(7)


def test_a_pipe_that_is_full_and_does_not_wait() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    full = pytest.raises(StoreError, match="accepts no more bytes")
    with os.fdopen(reader, "rb"), os.fdopen(writer, "wb", buffering=0) as start, full:
        save_to_file({"w": np.zeros(1 << 20)}, start)


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
    save_to_file(TREE, least)  # type: ignore[arg-type]
    assert b"".join(least.parts) == CONTENT
    with pytest.raises(StoreError, match="could not write '<NamedByNumber>': Input/output error"):
        save_to_file(TREE, NamedByNumber())  # type: ignore[arg-type]


def test_text_is_refused_before_anything_is_written() -> None:
    file = io.StringIO()
    with pytest.raises(UnsupportedError, match="'wb'"):
        save_to_file(TREE, file)  # type: ignore[arg-type]
    assert file.getvalue() == ""


def test_errors_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.fail(monkeypatch, os, "fsync", errno.EIO)
    with (tmp_path / "a.bin").open("wb") as file, pytest.raises(StoreError, match=r"a\.bin") as caught:
        save_to_file(TREE, file)
    assert caught.value.errno == 5


def test_an_error_of_treering_passes() -> None:
    class Gone(io.BytesIO):
        def write(self, data: Any) -> int:
            raise NotFoundError("the source is gone")

    with pytest.raises(NotFoundError, match=r"^the source is gone$"):
        save_to_file(TREE, Gone())


def test_a_file_that_is_only_read(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"old")
    with (tmp_path / "a.bin").open("rb") as file, pytest.raises(StoreError):
        save_to_file(TREE, file)


def test_a_file_that_is_only_written(tmp_path: Path) -> None:
    with (tmp_path / "a.bin").open("wb") as file, pytest.raises(StoreError, match=r"could not read .*a\.bin"):
        load_from_file(None, file)
