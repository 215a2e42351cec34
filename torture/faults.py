"""One fault at the Nth call into the operating system, counted over all threads of this process."""

from __future__ import annotations

import dataclasses
import enum
import errno
import fcntl
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from treering._store.posix import descriptors

__all__ = ["FILE_SYSTEM_FLUSH", "Fault", "Injector", "Kind"]

FILE_SYSTEM_FLUSH: tuple[Any, str] = (descriptors, "sync_file_system")
"""Where treering asks for a flush of a whole file system: ``os`` has no such call."""

# Everything that a save or a load asks of the system, through the modules that it asks.
_CALLS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (
        os,
        (
            "access", "close", "fchmod", "fchown", "fstat", "fstatvfs", "fsync", "ftruncate", "link", "listdir",
            "lstat", "mkdir", "open", "pread", "preadv", "pwrite", "read", "readlink", "replace", "rmdir", "scandir",
            "stat", "statvfs", "unlink", "write",
        ),
    ),
    (fcntl, ("fcntl", "flock")),
    (descriptors, ("reserve", "start_writeback", "sync_file_system")),
)  # fmt: skip
_MOVES = frozenset({"pread", "preadv", "pwrite", "read", "write"})
_TAKES_ROOM = frozenset(
    {"fsync", "ftruncate", "link", "mkdir", "open", "pwrite", "replace", "reserve", "sync_file_system", "write"}
)
_OPENS = frozenset({"listdir", "open", "scandir"})


class Kind(enum.Enum):
    """What happens at the call."""

    KILL_BEFORE = "killed before"
    KILL_AFTER = "killed after"
    EIO = "EIO"
    EIO_AFTER = "done, but EIO"
    ENOSPC = "ENOSPC"
    EMFILE = "EMFILE"
    SHORT = "half of it moved"

    def applies_to(self, call: str) -> bool:
        """Whether the system could do that at this call.

        A ``close`` that fails has closed; an ``open`` that fails has opened nothing.
        """
        match self:
            case Kind.KILL_BEFORE | Kind.KILL_AFTER:
                return True
            case Kind.EIO:
                return call != "close"
            case Kind.EIO_AFTER:
                return call not in {"open", "scandir"} | _MOVES
            case Kind.ENOSPC:
                return call in _TAKES_ROOM
            case Kind.EMFILE:
                return call in _OPENS
            case Kind.SHORT:
                return call in _MOVES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault."""

    kind: Kind
    """What happens."""
    at: int
    """At which call, counted from 1."""

    def strike(self, call: str, real: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Make the call, or what becomes of it."""
        if not self.kind.applies_to(call):  # threads took turns in another order than in the rehearsal
            return real(*args, **keywords)
        match self.kind:
            case Kind.KILL_BEFORE:
                os.kill(os.getpid(), signal.SIGKILL)
            case Kind.KILL_AFTER:
                real(*args, **keywords)
                os.kill(os.getpid(), signal.SIGKILL)
            case Kind.SHORT:
                return real(*_halved(call, *args))
            case Kind.EIO_AFTER:
                real(*args, **keywords)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        reason = {Kind.EIO: errno.EIO, Kind.ENOSPC: errno.ENOSPC, Kind.EMFILE: errno.EMFILE}[self.kind]
        raise OSError(reason, os.strerror(reason))


def _halved(call: str, descriptor: int, what: Any, *place: int) -> tuple[Any, ...]:
    """Return the arguments of a read or write of half as many bytes, but one at least."""
    if call in {"pread", "read"}:
        return descriptor, max(1, what // 2), *place
    if call == "preadv":
        return descriptor, [memoryview(what[0])[: max(1, len(what[0]) // 2)]], *place
    return descriptor, memoryview(what)[: max(1, len(what) // 2)], *place


class Injector:
    """Counts the calls of this process from `install` on, and lets one fault strike. For a child that ends soon.

    Attributes:
        calls: the names of all calls so far.
    """

    def __init__(self, fault: Fault | None) -> None:
        self.calls: list[str] = []
        self._fault = fault
        self._lock = threading.Lock()

    def install(self) -> None:
        """Stand between this process and the system for good."""
        for module, names in _CALLS:
            for name in names:
                setattr(module, name, self._around(name, getattr(module, name)))

    def strikes(self, count: int) -> bool:
        """Whether the fault strikes at this call."""
        return self._fault is not None and count == self._fault.at

    def _around(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            with self._lock:
                self.calls.append(name)
                count = len(self.calls)
            if self._fault is not None and self.strikes(count):
                return self._fault.strike(name, real, args, keywords)
            return real(*args, **keywords)

        return call
