"""The system refuses calls of the thread that writes: one, or all from one on, as after a crash of the machine."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

__all__ = ["refused"]

# A close that fails has closed, and a lock goes with its process: both work as ever.
_CALLS = (
    "fchmod", "fstat", "fsync", "ftruncate", "link", "listdir", "lstat", "mkdir", "open", "pread", "preadv", "pwrite",
    "read", "rename", "replace", "rmdir", "scandir", "stat", "unlink", "write",
)  # fmt: skip
# Functions of the C library that Python has no name for, and the error by which they say that the disk refused.
_LIBRARY_CALLS = {"fallocate": errno.ENOSPC, "syncfs": errno.EIO}


class _Function:
    """A function of the C library that may fail; it takes the types of its arguments as one of ctypes does."""

    def __init__(self, name: str, real: Any, has_failed: Callable[[str], bool]) -> None:
        self._name = name
        self._real = real
        self._has_failed = has_failed

    @property
    def argtypes(self) -> Any:
        return self._real.argtypes

    @argtypes.setter
    def argtypes(self, types: Any) -> None:
        self._real.argtypes = types

    def __call__(self, *arguments: Any) -> int:
        if not self._has_failed(self._name):
            return int(self._real(*arguments))
        ctypes.set_errno(_LIBRARY_CALLS[self._name])
        return -1


class _Library:
    """The C library, some of whose functions may fail."""

    def __init__(self, real: Any, has_failed: Callable[[str], bool]) -> None:
        self._real = real
        self._has_failed = has_failed

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        return _Function(name, real, self._has_failed) if name in _LIBRARY_CALLS else real


@contextlib.contextmanager
def refused(first: int, *, all_later: bool) -> Iterator[list[str]]:
    """Let calls of all threads but this one fail; yield the names of those that failed.

    Args:
        first: the number of the call that fails first, from 0 on.
        all_later: whether all that come after it fail too.
    """
    caller = threading.get_ident()
    lock = threading.Lock()
    failed: list[str] = []
    seen = -1

    def has_failed(name: str) -> bool:
        nonlocal seen
        if threading.get_ident() == caller:
            return False
        with lock:
            seen += 1
            fails = seen == first or (all_later and seen > first)
            if fails:
                failed.append(name)
        return fails

    def around(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            if has_failed(name):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*args, **keywords)

        return call

    library = ctypes.CDLL
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda *args, **keywords: _Library(library(*args, **keywords), has_failed))
        for name in _CALLS:
            patch.setattr(os, name, around(name, getattr(os, name)))
        yield failed
