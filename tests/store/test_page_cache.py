"""Writes past the page cache, by a ring of threads, and through it, where the disk begins before the write ends."""

import _thread
import ctypes
import errno
import fcntl
import mmap
import os
import queue
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import faults, limits
from tests.folders import names
from treering._store import crew
from treering._store.pieces import Buffer
from treering._store.posix import descriptors, writing
from treering._store.posix.writing import replace_file
from treering.errors import NotFoundError, StoreError

MIB = 1 << 20
CONTENT = random.Random(0).randbytes(21 * MIB + 33)


@pytest.fixture(autouse=True)
def everything_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    limits.write_past_the_cache(monkeypatch)


USUAL = writing.DIRECT_FROM, writing.FREE_SHARE


@pytest.fixture
def as_usual(everything_direct: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files go past the cache where they are large, and memory is not free for them."""
    limits.write_past_the_cache(monkeypatch, above=USUAL[0], free_share=USUAL[1])


def save_direct(path: Path) -> None:
    replace_file(path, [CONTENT[:7], memoryview(CONTENT)[7:]], len(CONTENT))


def is_saved(path: Path) -> bool:
    return path.read_bytes() == CONTENT and names(path.parent) == [path.name]


def test_short_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[: max(1, len(data) // 2)], offset))
    save_direct(tmp_path / "a.bin")
    assert is_saved(tmp_path / "a.bin")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("at", [0, 4 * MIB, 20 * MIB])
@pytest.mark.parametrize("reason", [errno.EIO, errno.ENOSPC, errno.EINVAL])
def test_an_error_of_a_thread_is_the_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, reason: int
) -> None:
    def fail(descriptor: int, data: memoryview, offset: int) -> None:
        if offset == at:
            raise OSError(reason, os.strerror(reason))

    (tmp_path / "a.bin").write_bytes(b"old")
    faults.before(monkeypatch, os, "pwrite", fail)
    threads = set(threading.enumerate())
    with pytest.raises(StoreError, match=r"a\.bin") as caught:
        save_direct(tmp_path / "a.bin")
    assert caught.value.errno == reason
    assert set(threading.enumerate()) <= threads
    assert (tmp_path / "a.bin").read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


def test_after_an_error_the_source_is_not_asked_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def buffers() -> Iterator[bytes]:
        for number in range(1000):
            asked.append(number)
            yield bytes(MIB)

    faults.fail(monkeypatch, os, "pwrite", errno.EIO)
    with pytest.raises(StoreError):
        replace_file(tmp_path / "a.bin", buffers(), 1000 * MIB)
    assert len(asked) <= 2 * (writing.BLOCKS + 2)


def test_an_error_that_is_no_os_error_arrives_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.fail(monkeypatch, os, "pwrite", MemoryError())
    with pytest.raises(MemoryError):
        save_direct(tmp_path / "a.bin")
    assert names(tmp_path) == []


def test_a_write_that_takes_nothing_is_no_endless_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.answer(monkeypatch, os, "pwrite", 0)
    with pytest.raises(StoreError, match="accepts no more bytes"):
        save_direct(tmp_path / "a.bin")
    limits.write_past_the_cache(monkeypatch, above=1 << 62)
    faults.answer(monkeypatch, os, "write", 0)
    with pytest.raises(StoreError, match="accepts no more bytes"):
        save_direct(tmp_path / "a.bin")
    assert names(tmp_path) == []


def test_a_file_system_that_refuses_direct_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.fail(monkeypatch, fcntl, "fcntl", errno.EINVAL)
    save_direct(tmp_path / "a.bin")
    assert is_saved(tmp_path / "a.bin")


def test_a_file_system_that_takes_the_flag_and_refuses_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[int] = []

    def refuse(descriptor: int, data: memoryview, offset: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")

    faults.before(monkeypatch, os, "pwrite", refuse)
    save_direct(tmp_path / "a.bin")
    assert refused
    assert is_saved(tmp_path / "a.bin")


def test_another_error_of_the_flag_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.fail(monkeypatch, fcntl, "fcntl", errno.EIO)
    with pytest.raises(StoreError, match="Input/output"):
        save_direct(tmp_path / "a.bin")
    assert names(tmp_path) == []


def test_a_platform_without_direct_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    save_direct(tmp_path / "a.bin")
    assert is_saved(tmp_path / "a.bin")


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_nothing_can_be_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    class Library:
        def __init__(self, name: str | None, *, use_errno: bool) -> None:
            pass

    monkeypatch.setattr(ctypes, "CDLL", Library)
    monkeypatch.setattr(sys, "platform", platform)
    save_direct(tmp_path / "a.bin")
    assert is_saved(tmp_path / "a.bin")


@pytest.mark.parametrize(("reason", "fatal"), [(errno.EOPNOTSUPP, False), (errno.EINTR, False), (errno.ENOSPC, True)])
def test_what_reserving_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int, fatal: bool) -> None:
    class Library:
        def __init__(self, name: str | None, *, use_errno: bool) -> None:
            self.fallocate = Fallocate()

    class Fallocate:
        def __call__(self, *args: int) -> int:
            ctypes.set_errno(reason)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", Library)
    if fatal:
        with pytest.raises(StoreError, match="free some space"):
            save_direct(tmp_path / "a.bin")
        assert names(tmp_path) == []
    else:
        save_direct(tmp_path / "a.bin")
        assert is_saved(tmp_path / "a.bin")


@pytest.mark.parametrize("given", [0, 1])
def test_a_system_that_gives_no_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: int) -> None:
    start, left = _thread.start_new_thread, [None] * given

    def start_some(*arguments: Any) -> int:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        return start(*arguments)

    monkeypatch.setattr(_thread, "start_new_thread", start_some)
    save_direct(tmp_path / "a.bin")
    assert is_saved(tmp_path / "a.bin")


def test_without_threads_errors_arrive_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, data: memoryview, offset: int) -> None:
        if offset >= 4 * MIB:
            raise OSError(errno.EIO, "Input/output error")

    limits.lower(monkeypatch, writing_threads=0)
    faults.before(monkeypatch, os, "pwrite", fail)
    with pytest.raises(StoreError, match="Input/output"):
        save_direct(tmp_path / "a.bin")


def test_a_kernel_without_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    save_direct(tmp_path / "a.bin")
    assert is_saved(tmp_path / "a.bin")


def test_an_interrupt_while_joining_waits_for_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    release, ended = threading.Event(), list[int]()

    class Interrupting(queue.SimpleQueue[None]):
        interrupts = 2

        def get(self, block: bool = True, timeout: float | None = None) -> None:
            if self.interrupts:
                self.interrupts -= 1
                raise KeyboardInterrupt
            release.set()
            super().get(block, timeout)

    monkeypatch.setattr(queue, "SimpleQueue", Interrupting)
    with pytest.raises(KeyboardInterrupt), crew.ThreadPool(lambda: ended.append(release.wait()), 2):
        pass
    assert len(ended) == 2


LIMITED = """
import pathlib, resource, sys
from treering._store.posix import writing
from treering.errors import StoreError
resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, 5 << 20))
for start in (0, 1 << 62):
    writing.DIRECT_FROM = start
    writing.FREE_SHARE = 0
    try:
        writing.replace_file(pathlib.Path(sys.argv[1]), [bytes(9 << 20)], 9 << 20)
    except StoreError as error:
        print(error.errno, error)
"""

LARGE = """
import pathlib, resource, sys
from treering._store.posix import writing
piece = bytes(1 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
writing.replace_file(pathlib.Path(sys.argv[1]), (piece for _ in range(128)), 128 << 20)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)
"""


def run(script: str, path: Path) -> str:
    """Run a script in a fresh process: limits and peaks are a whole process's."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    command = [sys.executable, "-c", script, str(path)]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def test_the_limit_of_the_process_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    lines = run(LIMITED, path).splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(f"{errno.EFBIG} could not write {str(path)!r}")
        assert "ulimit" in line
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


def test_a_large_save_takes_little_memory(tmp_path: Path) -> None:
    assert int(run(LARGE, tmp_path / "a.bin")) < 32 * MIB


@pytest.mark.usefixtures("as_usual")
def test_runs_are_begun_in_order_and_without_gaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    limits.lower(monkeypatch, run_of_writes=3 * MIB, written_piece=1 << 20)

    faults.answer(monkeypatch, descriptors, "start_writeback", True)
    faults.before(monkeypatch, descriptors, "start_writeback", lambda _, *span: asked.append(span))
    data = bytes(range(256)) * (8 * MIB // 256)
    writing.replace_file(tmp_path / "a", [data[: 5 * MIB], data[5 * MIB :]], len(data))
    assert asked == [(0, 3 * MIB), (3 * MIB, 3 * MIB)]
    assert (tmp_path / "a").read_bytes() == data


@pytest.mark.usefixtures("as_usual")
def test_a_system_without_the_request_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    limits.lower(monkeypatch, run_of_writes=MIB, written_piece=1 << 20)

    faults.answer(monkeypatch, descriptors, "start_writeback", False)
    faults.before(monkeypatch, descriptors, "start_writeback", lambda _, offset, __: asked.append(offset))
    writing.replace_file(tmp_path / "a", [bytes(4 * MIB)], 4 * MIB)
    assert asked == [0]
    assert (tmp_path / "a").stat().st_size == 4 * MIB


@pytest.mark.usefixtures("as_usual")
def test_a_disk_that_fails_early_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"old")
    limits.lower(monkeypatch, run_of_writes=MIB)

    faults.fail(monkeypatch, descriptors, "start_writeback", errno.EIO)
    with pytest.raises(StoreError, match="Input/output error"):
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


@pytest.mark.usefixtures("as_usual")
@pytest.mark.parametrize(("free", "past_the_cache"), [(1 << 40, False), (MIB, True), (None, False)])
def test_only_a_file_too_large_for_free_memory_goes_past_the_cache(
    free: int | None, past_the_cache: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    went: list[int] = []
    limits.write_past_the_cache(monkeypatch, above=MIB, free_share=USUAL[1])
    faults.answer(monkeypatch, descriptors, "free_memory", free)

    faults.answer(monkeypatch, descriptors, "go_direct", False)
    faults.before(monkeypatch, descriptors, "go_direct", went.append)
    writing.replace_file(tmp_path / "a", [bytes(2 * MIB)], 2 * MIB)
    assert bool(went) == past_the_cache
    assert (tmp_path / "a").stat().st_size == 2 * MIB


def test_free_memory_is_a_number_here() -> None:
    assert (descriptors.free_memory() or 1) > 0


# ------------------------------------------------------------------------------------------------------------ both ways


@pytest.fixture(params=["direct", "page cache"])
def way(everything_direct: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every file takes the direct way, or none does."""
    if request.param != "direct":
        limits.write_past_the_cache(monkeypatch, above=1 << 62)
    return str(request.param)


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


SIZES = [0, 1, 511, 4095, 4096, 4097, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 16 * MIB, 19 * MIB + 77]


@pytest.mark.sampled(5)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", SIZES)
def test_the_content_is_the_concatenation(tmp_path: Path, size: int) -> None:
    content = noise(size)
    cuts = sorted(random.Random(1).randrange(size + 1) for _ in range(7))
    buffers = [memoryview(content)[a:b] for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
    replace_file(tmp_path / "a.bin", iter(buffers), size)
    assert (tmp_path / "a.bin").read_bytes() == content
    assert names(tmp_path) == ["a.bin"]


def test_buffers_of_every_kind(tmp_path: Path) -> None:
    import array

    numbers = array.array("d", range(20_000))
    buffers: list[Buffer] = [b"ab", bytearray(b"cd"), memoryview(numbers), memoryview(numbers)[:0], memoryview(b"ef")]
    replace_file(tmp_path / "a.bin", buffers, 6 + 8 * 20_000)
    assert (tmp_path / "a.bin").read_bytes() == b"abcd" + numbers.tobytes() + b"ef"


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("announced", [0, 5 * MIB - 1, 5 * MIB + 1, 50 * MIB])
def test_another_size_than_announced_changes_nothing(tmp_path: Path, announced: int) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with pytest.raises(StoreError, match=r"buffers hold .*announced") as caught:
        replace_file(path, [noise(5 * MIB)], announced)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


@pytest.mark.sampled(5)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), NotFoundError("the source is gone"), ValueError("no such leaf")]
)
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
