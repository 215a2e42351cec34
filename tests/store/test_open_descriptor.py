"""A descriptor is closed once, whatever drops it, and never under a number that others have by then."""

import errno
import os
import re
from pathlib import Path

import pytest

import treering
from treering._store.posix.folder import Folder
from treering._store.posix.open_descriptor import OpenDescriptor

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
    real, calls = os.close, []

    def close(number: int) -> None:
        real(number)
        calls.append(number)
        if len(calls) == 1:
            raise OSError(errno.EIO, "refused")

    monkeypatch.setattr(os, "close", close)
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
    some = file.open_each(os.open, [tmp_path / "a", tmp_path / "b"], [os.O_RDONLY] * 2)
    with pytest.raises(FileNotFoundError):
        file.open_each(os.open, [tmp_path / "c", tmp_path / "none"], [os.O_RDONLY] * 2)
    numbers = [file.number, *some, some[-1] + 1]
    assert all(map(is_open, numbers))
    file.close()
    assert not any(map(is_open, numbers))


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
    for ask in (folder.names, folder.folders, lambda: folder.find("x")):
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
    assert found == ["_store/posix/open_descriptor.py: os.open("]
