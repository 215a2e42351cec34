"""Paths in the memory of this process that tests may look at as they look at those on disk."""

from __future__ import annotations

import errno
import fnmatch
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from treering._store import resolve
from treering._store.api import Kind
from treering._store.memory import MemoryPath, MemoryStore
from treering._store.resolve import find_at, open_file, store_at, write_file


class MemoryTestPath(MemoryPath):
    """A path in memory with the methods of ``pathlib.Path`` that need no file system."""

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
        write_file(self, [bytes(data)], len(data))
        return len(data)

    def write_text(self, text: str, encoding: str = "utf-8") -> int:
        return self.write_bytes(text.encode(encoding))

    def touch(self) -> None:
        if not self.exists():
            self.write_bytes(b"")

    def mkdir(self, mode: int = 0o777, *, parents: bool = False, exist_ok: bool = False) -> None:
        if self.exists() and not exist_ok:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self))
        if parents and not self.parent.exists():
            self.parent.mkdir(parents=True)
        store_at(self).make()

    def iterdir(self) -> Iterator[MemoryTestPath]:
        store = store_at(self)
        store.open()
        return (self / name for name in store.names())

    def rglob(self, pattern: str) -> Iterator[MemoryTestPath]:
        for path in self.iterdir():
            if fnmatch.fnmatch(path.name, pattern):
                yield path
            if path.is_dir():
                yield from path.rglob(pattern)

    def glob(self, pattern: str) -> Iterator[MemoryTestPath]:
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
        store_at(self).drop()

    def rename(self, target: MemoryTestPath) -> MemoryTestPath:
        if self.is_file():
            target.write_bytes(self.read_bytes())
            self.unlink()
        else:
            target.mkdir(exist_ok=True)
            for path in list(self.iterdir()):
                path.rename(target / path.name)
            store_at(self).drop()
        return target

    replace = rename

    def stat(self) -> SimpleNamespace:
        found = find_at(self)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return SimpleNamespace(st_size=found.size, st_mtime=found.modified, st_mtime_ns=found.version)

    def absolute(self) -> MemoryTestPath:
        return self

    resolve = absolute

    def forget(self) -> None:
        """Remove all that is at the path and below."""
        store = store_at(self)
        assert isinstance(store, MemoryStore)
        for name in list(store.names()):
            (self / name).forget()
        store.drop()
        store_at(self.parent).remove(self.name)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the paths in memory that treering hands back, such as that of a run, ones that tests can look at."""
    monkeypatch.setattr(resolve, "MemoryPath", MemoryTestPath)
