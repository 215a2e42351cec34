"""The system refuses calls of the thread that writes: one, or all from one on, as after a crash of the machine."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from treering._store.posix import descriptors

__all__ = ["refused"]

# A close that fails has closed, and a lock goes with its process: both work as ever.
_CALLS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (
        os,
        (
            "fchmod", "fstat", "fsync", "ftruncate", "link", "listdir", "lstat", "mkdir", "open", "pread", "preadv",
            "pwrite", "read", "rename", "replace", "rmdir", "scandir", "stat", "unlink", "write",
        ),
    ),
    (descriptors, ("reserve", "sync_file_system")),
)  # fmt: skip


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

    def around(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            nonlocal seen
            if threading.get_ident() != caller:
                with lock:
                    seen += 1
                    fails = seen == first or (all_later and seen > first)
                    if fails:
                        failed.append(name)
                if fails:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*args, **keywords)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, names in _CALLS:
            for name in names:
                patch.setattr(module, name, around(name, getattr(module, name)))
        yield failed
