# ruff: noqa: PTH105 - the calls of the system are what tests patch
"""Stores by path, as all of treering finds them, and paths in buckets that tests look at as at those on disk."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import io
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest

from treering._codec.key_document import HEAD_BYTES, is_tombstone
from treering._coordination.message_board import Heartbeat, PathMessageBoard
from treering._leaves.commit import begin_save as begin_leaves
from treering._store import resolve
from treering._store.api import Kind, Reader, Store, Version
from treering._store.crew import Latch
from treering._store.objects.reading import ObjectReader
from treering._store.objects.requests import Client, Delete, Get, List
from treering._store.objects.store import ObjectStore, ObjectTransaction
from treering._store.objects.url import BucketPath, bucket_path
from treering._store.resolve import find_at, located, open_file, opened_store, store_at
from treering._store.resolve import write_file as write_pieces
from treering._values.checkpoint_names import LEFT_DOCUMENT
from treering._values.processes import Processes
from treering.errors import StoreError

__all__ = [
    "BucketTestPath",
    "MemoryTestPath",
    "begin_leaves",
    "copy_to_memory",
    "install",
    "located",
    "names_at",
    "put_messages",
    "read_file",
    "store_at",
    "write_file",
]


def read_file(path: str | os.PathLike[str]) -> bytes:
    """The content of a file, wherever it is."""
    with open_file(located(path)) as file:
        return file.read(0, file.size)


def names_at(path: str | os.PathLike[str]) -> list[str]:
    """The names at a place, wherever it is, those of places below too."""
    with opened_store(path) as store:
        return store.names()


def write_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file, wherever it is."""
    write_pieces(located(path), [data], len(data))


def put_messages(folder: Path, *names: str) -> None:
    """Let messages of a job be in a folder, which is made; those of far processes lie in a folder of messages."""
    store_at(folder).transaction().make()
    board = PathMessageBoard(folder)
    for name in names:
        board.put(name, b"{}")


def wait_for_others(folder: Path, look: Callable[[], None]) -> None:
    """Leave signs of life in a folder, as process 1 of two does that waits for the other; look after each."""
    signs = Heartbeat(Processes(this=1, count=2), PathMessageBoard(folder), "load", 0.1, look=look)
    signs.wait(Latch(), time.monotonic() + 60)


def copy_to_memory(folder: Path, url: str) -> None:
    """Put every file below a folder at its path below a URL of ``memory://``."""
    for file in filter(Path.is_file, folder.rglob("*")):
        write_file(f"{url}/{file.relative_to(folder).as_posix()}", file.read_bytes())


# --------------------------------------------------------------------------------------------- paths in buckets


class _Looking(PurePosixPath):
    """The methods of ``pathlib.Path`` that need no file system."""

    def exists(self) -> bool:
        return find_at(self) is not None

    def is_dir(self) -> bool:
        found = find_at(self)
        return found is not None and found.kind is Kind.PLACE

    def is_file(self) -> bool:
        found = find_at(self)
        return found is not None and found.is_file

    def is_symlink(self) -> bool:
        return False

    def read_bytes(self) -> bytes:
        with open_file(self) as file:
            return file.read(0, file.size)

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def write_bytes(self, data: bytes) -> int:
        if not self.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        write_pieces(self, [bytes(data)], len(data), unique=True)  # no test is about late requests of these
        return len(data)

    def write_text(self, text: str, encoding: str = "utf-8") -> int:
        return self.write_bytes(text.encode(encoding))

    @contextlib.contextmanager
    def open(self, mode: str = "rb") -> Iterator[io.BytesIO]:
        """Open a file for reading, or for changes that it keeps when it is closed."""
        assert mode in {"rb", "r+b", "ab", "wb"}, mode
        file = io.BytesIO(b"" if mode == "wb" else self.read_bytes())
        file.seek(0, io.SEEK_END if mode == "ab" else io.SEEK_SET)
        yield file
        if mode != "rb":
            self.write_bytes(file.getvalue())

    def touch(self) -> None:
        if not self.exists():
            self.write_bytes(b"")

    def mkdir(self, mode: int = 0o777, *, parents: bool = False, exist_ok: bool = False) -> None:
        if self.exists() and not exist_ok:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self))
        if parents and not self.parent.exists():
            self.parent.mkdir(parents=True)
        store_at(self).transaction().make()

    def iterdir(self) -> Iterator[Self]:
        store = store_at(self)
        store.open()
        return (self / name for name in store.names())

    def rglob(self, pattern: str) -> Iterator[Self]:
        for path in self.iterdir():
            if fnmatch.fnmatch(path.name, pattern):
                yield path
            if path.is_dir():
                yield from path.rglob(pattern)

    def glob(self, pattern: str) -> Iterator[Self]:
        first, _, rest = pattern.partition("/")
        for path in self.iterdir():
            if fnmatch.fnmatch(path.name, first):
                yield from path.glob(rest) if rest else [path]

    def unlink(self, *, missing_ok: bool = False) -> None:
        if not missing_ok and not self.is_file():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        store_at(self.parent).remove(self.name)

    def rmdir(self) -> None:
        if list(self.iterdir()):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(self))
        store_at(self).remove("")

    def rename(self, target: Self) -> Self:
        if self.is_file():
            target.write_bytes(self.read_bytes())
            self.unlink()
        else:
            target.mkdir(exist_ok=True)
            for path in list(self.iterdir()):
                path.rename(target / path.name)
            store_at(self).remove("")
        return target

    replace = rename

    def stat(self) -> SimpleNamespace:
        found = find_at(self)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return SimpleNamespace(
            st_size=found.size, st_mtime=found.modified, st_mtime_ns=found.version, st_ino=found.version, st_atime_ns=0
        )

    def absolute(self) -> Self:
        return self

    resolve = absolute

    def forget(self) -> None:
        """Remove all that is at the path and below."""
        store = store_at(self)
        for name in list(store.names()):
            (self / name).forget()
        store.remove("")
        store_at(self.parent).remove(self.name)


class MemoryTestPath(_Looking, BucketPath):
    """A path in memory, which tests may look at, and change, as one on disk."""


_FOLDERS: set[str] = set()
"""Folders that tests have made in buckets, which have none."""


class BucketTestPath(_Looking, BucketPath):
    """A path in a bucket.

    A tombstone, an emptied ``.run.json.left``, and a place in which there is nothing else, are not there: nothing in a
    bucket is ever removed that a late request could bring back.
    """

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def is_dir(self) -> bool:
        return str(self) in _FOLDERS or (super().is_dir() and (not self.key or bool(self._objects())))

    def is_file(self) -> bool:
        return super().is_file() and not self._stands_for_nothing()

    def mkdir(self, mode: int = 0o777, *, parents: bool = False, exist_ok: bool = False) -> None:
        if self.exists() and not exist_ok:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self))
        _FOLDERS.add(str(self))

    def iterdir(self) -> Iterator[Self]:
        if not self.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        made = [type(self)(folder) for folder in _FOLDERS]
        names = dict.fromkeys([*store_at(self).names(), *(one.name for one in made if one.parent == self)])
        return (path for name in names if (path := self / name).exists())

    def rmdir(self) -> None:
        if list(self.iterdir()):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(self))
        self.forget()

    def forget(self) -> None:
        listed = self._client().perform(List(f"{self.key}/", deep=True)).listed
        self._client().perform(Delete((*(found.name for found in listed), self.key)))
        _FOLDERS.difference_update({one for one in _FOLDERS if f"{one}/".startswith(f"{self}/")})

    def _client(self) -> Client:
        store = store_at(self)
        assert isinstance(store, ObjectStore)
        return store.client

    def _objects(self) -> list[str]:
        """Return the names of the objects below that stand for something."""
        listed = self._client().perform(List(f"{self.key}/", deep=True)).listed
        paths = {found.name: BucketTestPath(f"{self.bucket}/{found.name}") for found in listed}
        return [name for name, path in paths.items() if not path._stands_for_nothing()]

    def _stands_for_nothing(self) -> bool:
        data = self._client().perform(Get(self.key, HEAD_BYTES)).data
        return is_tombstone(data) or (self.name == LEFT_DOCUMENT and not data.startswith(b"{"))


class Announced(str):
    """A name in a bucket as an argument of a call of the system that is made only for tests to see, or to let fail."""

    __slots__ = ()


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let treering answer with these paths, and its calls to a store be seen as calls of the system.

    A store in a bucket makes no calls of the system. Tests count, hold and refuse those of a store on
    disk; with this, each operation first makes the call by which it is known, on a name there, and that call does
    nothing.
    """
    monkeypatch.setattr(resolve, "bucket_path", lambda url: BucketTestPath(bucket_path(url)))
    for name in ("open", "link", "replace", "unlink"):
        monkeypatch.setattr(os, name, _passing_announced(getattr(os, name)))
    monkeypatch.setattr(os, "preadv", _reading_elsewhere(os.preadv))
    monkeypatch.setattr(ObjectReader, "read_into", _read_by_the_system(ObjectReader.read_into))
    for name, announce in _ANNOUNCEMENTS.items():
        monkeypatch.setattr(ObjectStore, name, _announcing(getattr(ObjectStore, name), announce))
    for name, announce in _ANNOUNCEMENTS_OF_CHANGES.items():
        monkeypatch.setattr(ObjectTransaction, name, _announcing(getattr(ObjectTransaction, name), announce))
    monkeypatch.setattr(os, "truncate", _on_these(os.truncate, _truncate))
    for name in ("rmtree", "copytree", "copy"):
        monkeypatch.setattr(shutil, name, _on_these(getattr(shutil, name), globals()[f"_{name}"]))


def _at(store: Store, name: str) -> Announced:
    return Announced(store.path / name)


def _open_to_read(store: Store, name: str) -> None:
    try:
        os.open(_at(store, name), os.O_RDONLY)
    except OSError as error:
        raise StoreError.of(error, store.path / name, "read") from None


_ANNOUNCEMENTS: dict[str, Callable[..., object]] = {
    "create": lambda store, name, *_: os.open(_at(store, name), os.O_CREAT | os.O_EXCL | os.O_WRONLY),
    "replace": lambda store, name, *_: os.replace(_at(store, f"{name}.new"), _at(store, name)),
    "remove": lambda store, *names: list(map(os.unlink, [_at(store, name) for name in names if name])),
    "open_file": _open_to_read,
    "read": lambda store, name, *_: os.open(_at(store, name), os.O_RDONLY),
}


def _announce_begin(transaction: Any, marker: str, base: Version | None) -> None:
    os.open(_at(transaction._store, marker), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    transaction.announced = os.link if base is None else os.replace, marker


def _announce_commit(transaction: Any, _: bytes) -> None:
    change, marker = transaction.announced
    change(_at(transaction._store, marker), _document_of(transaction))


def _document_of(transaction: Any) -> Announced:
    return _at(transaction._store, PurePosixPath(transaction._key).name)


_ANNOUNCEMENTS_OF_CHANGES: dict[str, Callable[..., object]] = {
    "begin": _announce_begin,
    "commit": _announce_commit,
    "delete": lambda change, _, tombstone: os.replace(_document_of(change), _at(change._store, tombstone)),
}


def _passing_announced(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda name, *more, **options: None if isinstance(name, Announced) else real(name, *more, **options)


def _announcing(real: Callable[..., Any], announce: Callable[..., object]) -> Callable[..., Any]:
    def operate(*arguments: Any, **options: Any) -> Any:
        announce(*arguments)
        return real(*arguments, **options)

    return operate


def _read_by_the_system(real: Callable[..., None]) -> Callable[..., None]:
    def read_into(file: Reader, jobs: Sequence[tuple[int, memoryview]]) -> None:
        for offset, buffer in jobs:
            real(file, [(offset, buffer[:0])] if offset + buffer.nbytes <= file.size else jobs)  # too short: its error
            start = 0
            while start < buffer.nbytes:
                try:
                    start += cast("Any", os).preadv((real, file), [buffer.cast("B")[start:]], offset + start)
                except OSError as error:
                    raise StoreError.of(error, file.path, "read") from None

    return read_into


def _reading_elsewhere(real: Callable[..., int]) -> Callable[..., int]:
    def preadv(descriptor: Any, buffers: Any, offset: int, *flags: int) -> int:
        if isinstance(descriptor, int):
            return real(descriptor, buffers, offset, *flags)
        read_into, file = descriptor
        [buffer] = buffers
        read_into(file, [(offset, buffer)])
        return int(buffer.nbytes)

    return preadv


def _on_these(real: Callable[..., Any], mine: Callable[..., Any]) -> Callable[..., Any]:
    def call(*paths: Any, **options: Any) -> Any:
        return (mine if any(isinstance(path, _Looking) for path in paths) else real)(*paths, **options)

    return call


def _rmtree(path: _Looking, *, ignore_errors: bool = False) -> None:
    if not ignore_errors and not path.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    path.forget()


def _copytree(path: _Looking, new: _Looking, *, dirs_exist_ok: bool = False) -> None:
    new.mkdir(parents=True, exist_ok=dirs_exist_ok)
    for one in path.iterdir():
        (_copytree if one.is_dir() else _copy)(one, new / one.name)


def _copy(path: _Looking, new: _Looking) -> None:
    new.write_bytes(path.read_bytes())


def _truncate(path: _Looking, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])
