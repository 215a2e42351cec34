"""Files that are read, and the descriptors they are read by: exact bytes or an error, and each is closed once."""

import contextlib
import errno
import mmap
import os
import random
import re
from pathlib import Path

import pytest

import treering
from tests import faults, limits
from tests.folders import names
from treering import serialization
from treering._store.posix.descriptors import OpenDescriptor
from treering._store.posix.folder import Folder
from treering._store.posix.reading import LocalFile
from treering.errors import CorruptError, NoMemoryError, NotFoundError, StoreError

CONTENT = random.Random(0).randbytes(200_000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "a.bin").write_bytes(CONTENT)
    return tmp_path / "a.bin"


@pytest.fixture(params=["by position", "by seeking"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pieces and two threads for small files; with and without the calls that Windows lacks."""
    limits.lower(monkeypatch, read_piece=1000, two_readers_from=3000)
    if request.param == "by seeking":
        monkeypatch.delattr(os, "pread")
        monkeypatch.delattr(os, "preadv")


@pytest.mark.usefixtures("system")
def test_reading_by_position(path: Path) -> None:
    with LocalFile(path) as file:
        assert file.size == len(CONTENT)
        for offset, count in ((0, 0), (0, 1), (5, 100_000), (199_999, 1), (200_000, 0), (0, 200_000)):
            assert file.read(offset, count) == CONTENT[offset : offset + count]


@pytest.mark.skipif(not hasattr(os, "pread"), reason="it reads by seeking")
def test_more_bytes_than_the_memory_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.msgpack.gz"
    path.write_bytes(serialization.to_compressed_bytes({"w": CONTENT}))
    size = path.stat().st_size
    faults.fail(monkeypatch, os, "pread", MemoryError(), when=lambda _, count, at: count == size)
    for read in (treering.load, treering.open, treering.verify, treering.inspect):
        with pytest.raises(NoMemoryError, match=r"there is not enough memory for 195 KiB of '.*a\.msgpack\.gz'"):
            read(path)


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize(
    ("offset", "count"), [(0, 200_001), (200_000, 1), (1 << 62, 1), (0, 1 << 62), (-1, 1), (1, -1)]
)
def test_bytes_that_are_not_there(path: Path, offset: int, count: int) -> None:
    with LocalFile(path) as file:
        with pytest.raises(CorruptError, match="cut short") as caught:
            file.read(offset, count)
        assert caught.value.offset is not None
        if count == 1:
            with pytest.raises(CorruptError, match="cut short"):
                file.read_into([(0, memoryview(bytearray(5))), (offset, memoryview(bytearray(1)))])


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize("total", [0, 900, 2999, 150_000])
def test_filling_buffers(path: Path, total: int) -> None:
    import array

    places = random.Random(total)
    jobs = [(0, memoryview(bytearray(0))), (8, memoryview(array.array("d", bytes(80))))]
    while total > 0:
        count = places.randrange(1, 40_000)
        jobs.append((places.randrange(len(CONTENT) - count), memoryview(bytearray(count))))
        total -= count
    with LocalFile(path) as file:
        file.read_into(jobs)
    for offset, view in jobs:
        assert view.tobytes() == CONTENT[offset : offset + view.nbytes]


@pytest.mark.usefixtures("system")
def test_short_reads_go_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(os, "pread"):
        pread, preadv = os.pread, os.preadv
        monkeypatch.setattr(os, "pread", lambda fd, count, at: pread(fd, max(1, count // 3), at))
        monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][: len(views[0]) // 3 or 1]], at))
    else:
        read = os.read
        monkeypatch.setattr(os, "read", lambda fd, count: read(fd, max(1, count // 3)))
    buffer = bytearray(10_000)
    with LocalFile(path) as file:
        assert file.read(3, 10_000) == CONTENT[3:10_003]
        file.read_into([(70, memoryview(buffer))])
    assert buffer == CONTENT[70:10_070]


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="the system has no such call")
def test_buffers_that_follow_each_other_are_one_call(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    faults.before(monkeypatch, os, "preadv", lambda _, views, __: counts.append(len(views)))
    preadv = os.preadv
    rooms = [bytearray(7) for _ in range(3000)]
    with LocalFile(path) as file:
        file.read_into(
            [(7 * number + 50_000 * (number >= 1500), memoryview(room)) for number, room in enumerate(rooms)]
        )
    assert counts == [1024, 476, 1024, 476]
    assert b"".join(rooms) == CONTENT[:10_500] + CONTENT[60_500:71_000]
    counts.clear()
    # What comes short ends inside a buffer.
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:5]], at))
    with LocalFile(path) as file:
        file.read_into([(7 * number, memoryview(room)) for number, room in enumerate(rooms[:3])])
    assert len(counts) == 6
    assert b"".join(rooms[:3]) == CONTENT[:21]


@pytest.mark.usefixtures("system")
def test_a_file_that_shrinks_while_open(path: Path) -> None:
    with LocalFile(path) as file:
        os.truncate(path, 5000)
        with pytest.raises(CorruptError, match="cut short") as caught:
            file.read(4000, 2000)
        assert caught.value.offset == 5000
        with pytest.raises(CorruptError, match="cut short") as caught:
            file.read_into([(0, memoryview(bytearray(100_000)))])
        assert caught.value.offset is not None
        assert caught.value.offset >= 5000
        with pytest.raises(CorruptError, match="cut short") as caught:
            file.map()
        assert caught.value.offset == 5000


@pytest.mark.usefixtures("system")
def test_an_error_of_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalFile(path) as file:
        for name in ("pread", "preadv", "read"):
            if hasattr(os, name):
                faults.fail(monkeypatch, os, name, errno.EIO)
        for ask in (lambda: file.read(0, 5), lambda: file.read_into([(0, memoryview(bytearray(9000)))])):
            with pytest.raises(StoreError, match=r"could not read.*a\.bin") as caught:
                ask()
            assert caught.value.errno == errno.EIO
        monkeypatch.undo()


def test_an_interrupt_arrives(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.fail(monkeypatch, os, "preadv", KeyboardInterrupt())
    with LocalFile(path) as file, pytest.raises(KeyboardInterrupt):
        file.read_into([(0, memoryview(bytearray(9000)))])


def test_mapping(path: Path) -> None:
    with LocalFile(path) as file:
        mapping = file.map()
    assert mapping[:] == CONTENT
    with pytest.raises(TypeError):
        mapping[0] = 1
    mapping.close()


def test_an_error_of_mapping(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.fail(monkeypatch, mmap, "mmap", errno.ENOMEM)
    with LocalFile(path) as file, pytest.raises(StoreError, match="could not map"):
        file.map()


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with LocalFile(tmp_path / "empty") as file:
        assert file.size == 0
        assert file.read(0, 0) == b""
        file.read_into([])
        with pytest.raises(CorruptError, match="empty"):
            file.map()


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"could not read.*missing"):
        LocalFile(tmp_path / "missing")
    with pytest.raises(IsADirectoryError) as caught:
        LocalFile(tmp_path)
    assert isinstance(caught.value, StoreError)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreError, match="not a file"):
        LocalFile(tmp_path / "pipe")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        LocalFile(tmp_path / "file" / "a.bin")
    with pytest.raises(StoreError, match="cannot be the name"):
        LocalFile(tmp_path / "a\0b")


def test_descriptors_are_given_back(path: Path, tmp_path: Path) -> None:
    before = names("/proc/self/fd")
    with LocalFile(path) as file:
        file.close()
    with pytest.raises(IsADirectoryError):
        LocalFile(tmp_path)
    assert names("/proc/self/fd") == before


SOURCE = Path(treering.__file__).parent


def opened(path: Path) -> OpenDescriptor:
    return OpenDescriptor(os.open, path, os.O_RDONLY)


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def test_a_dropped_one_is_closed(tmp_path: Path) -> None:
    file = opened(tmp_path)
    number = file.number
    assert is_open(number)
    del file
    assert not is_open(number)


def test_it_is_closed_once(tmp_path: Path) -> None:
    file = opened(tmp_path)
    number = file.number
    file.close()
    assert file.number == -1
    other = os.open(tmp_path, os.O_RDONLY)  # the system gives the lowest free number
    assert other == number
    file.close()
    file.close()
    del file
    assert is_open(other)
    os.close(other)


def test_one_that_does_not_close_well_keeps_no_other_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def is_first(number: int) -> bool:
        calls.append(number)
        return len(calls) == 1

    faults.fail(monkeypatch, os, "close", OSError(errno.EIO, "refused"), when=is_first, done=True)
    with pytest.raises(OSError, match="refused"), OpenDescriptor() as files:
        numbers = files.open_each(os.open, [tmp_path] * 3, [os.O_RDONLY] * 3)
    assert sorted(calls) == sorted(numbers)


def test_what_cannot_be_opened_is_not_closed(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        opened(tmp_path / "none")
    file = OpenDescriptor()
    file.close()
    assert file.number == -1


def test_several_are_closed_together_also_where_one_cannot_be_opened(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).touch()
    file = opened(tmp_path)
    numbers = []

    def noted(path: Path) -> int:
        numbers.append(os.open(path, os.O_RDONLY))
        return numbers[-1]

    assert file.open_each(noted, [tmp_path / "a", tmp_path / "b"]) == numbers
    with pytest.raises(FileNotFoundError):
        file.open_each(noted, [tmp_path / "c", tmp_path / "none"])
    # Threads of other tests may get a number that is free again, so what lies behind it is compared.
    held = {number: lies_behind(number) for number in (file.number, *numbers)}
    assert None not in held.values()
    file.close()
    assert not [number for number, inode in held.items() if lies_behind(number) == inode]


def lies_behind(number: int) -> int | None:
    """Return the inode of an open descriptor; None of one that is not open."""
    with contextlib.suppress(OSError):
        return os.fstat(number).st_ino
    return None


def test_the_first_error_is_told(tmp_path: Path) -> None:
    def leave(error: Exception) -> None:
        with opened(tmp_path) as file:
            os.close(file.number)
            raise error

    with pytest.raises(KeyError):
        leave(KeyError())
    with pytest.raises(OSError, match="Bad file descriptor"), opened(tmp_path) as file:
        os.close(file.number)


def test_closing_gives_the_lock_back_though_a_child_has_the_file(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    child = os.dup(first.number)  # of the same open file, as in a child
    assert first.lock()
    assert second.lock() is False
    first.close()
    assert second.lock()
    os.close(child)


def test_a_closed_folder_is_not_the_current_one(tmp_path: Path) -> None:
    with Folder(str(tmp_path)) as folder:
        pass
    for ask in (folder.names, folder.scan, lambda: folder.find("x")):
        with pytest.raises(OSError, match="Bad file descriptor") as caught:
            ask()
        assert caught.value.errno == errno.EBADF


LOSABLE = {"os.open", "os.close", "os.dup", "threading.Condition", "threading.Event", "threading.Thread"}
EXEMPT = ("_cli", "testing.py")  # they end with their process, or are a user's test


def test_no_module_takes_what_an_interrupt_can_lose() -> None:
    taken = re.compile("|".join(rf"(?<![\w.]){re.escape(name)}\(" for name in LOSABLE))
    found = [
        f"{path.relative_to(SOURCE)}: {one[0]}"
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).parts[0] not in EXEMPT
        for one in taken.finditer(path.read_text())
    ]
    # The text that explains what is wrong with it.
    assert found == ["_store/posix/descriptors.py: os.open("]
