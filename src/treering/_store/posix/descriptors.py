"""Open files and folders of the system: what is asked of a descriptor, and one that an interrupt cannot lose."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import importlib.util
import itertools
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, Self

from treering._values.human import bytes_text, pluralize

# Windows has none.
fcntl: ModuleType | None = importlib.import_module("fcntl") if importlib.util.find_spec("fcntl") else None

# A file system without this kind of request says one of these.
_NO_SUCH_REQUEST = frozenset({errno.EINVAL, errno.ENOTTY, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK})

_SYNC_FILE_RANGE_WRITE = 2
_KIB = 1024

# File systems whose ``syncfs`` waits for the disk and tells what it refused. Others (FUSE, overlays) may keep that to
# themselves. The numbers: https://man7.org/linux/man-pages/man2/statfs.2.html
_SYNCED_AS_A_WHOLE = frozenset({0xEF53, 0x58465342, 0x9123683E, 0xF2F52010, 0x01021994})  # ext, xfs, btrfs, f2fs, tmpfs
_TELLING_KERNEL = (5, 8)
_STATFS_BYTES = 256

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def lock(descriptor: int) -> bool | None:
    """Take the lock of an open file without waiting.

    Returns:
        True when it is ours now, False when somebody else holds it, None when this platform or this file system
        has no locks.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # EBADF: NFS locks only what is open for writing, and a folder never is.
        if error.errno not in _NO_SUCH_REQUEST and error.errno != errno.EBADF:
            raise
        return None
    return True


def stat_at(path: str, *, follow: bool = True) -> os.stat_result | None:
    """Return what is known of what is at a path; None when nothing is there."""
    try:
        return os.stat(path, follow_symlinks=follow)
    except FileNotFoundError:
        return None


def is_at(descriptor: int, path: str) -> bool:
    """Whether ``path``, itself no link, still names the open file or folder."""
    found = stat_at(path, follow=False)
    return found is not None and os.path.samestat(os.fstat(descriptor), found)


def take_over(descriptor: int, old: os.stat_result) -> None:
    """Give an open file the owner, where that is allowed, and the permission bits of an old one.

    Raises:
        OSError: the system refused.
    """
    if not hasattr(os, "fchown"):  # Windows
        return
    mode = stat.S_IMODE(old.st_mode)
    new = os.fstat(descriptor)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        try:
            os.fchown(descriptor, old.st_uid if os.geteuid() == 0 else -1, old.st_gid)
        except PermissionError:
            # Another group takes over: it gets what everybody had.
            mode = (mode & ~0o070) | (mode & 0o007) << 3
    os.fchmod(descriptor, mode)


def require_space(where: int | str, size: int) -> None:
    """Refuse early what cannot fit on the file system of an open file or folder, or of what is at a path.

    Raises:
        OSError: fewer than ``size`` bytes are free, the reserve of the superuser included.
    """
    room = _file_system_of(where)
    free = room.f_bfree * room.f_frsize if room is not None and room.f_blocks else size
    if size > free:
        reason = os.strerror(errno.ENOSPC)
        raise OSError(errno.ENOSPC, f"{reason}: {_size_text(size)} are needed, {_size_text(free)} are free")


def _size_text(size: int) -> str:
    return f"{size} bytes ({bytes_text(size)})" if size >= _KIB else pluralize(size, "bytes")


def is_read_only(descriptor: int) -> bool:
    """Whether the file system of an open file or folder takes no writes at all, as far as it can tell."""
    found = _file_system_of(descriptor)
    return found is not None and bool(found.f_flag & os.ST_RDONLY)


def _file_system_of(where: int | str) -> os.statvfs_result | None:
    try:
        return os.statvfs(where) if isinstance(where, str) else os.fstatvfs(where)
    except (AttributeError, OSError):  # Windows, or a file system that cannot tell
        return None


def go_direct(descriptor: int) -> bool:
    """Let writes bypass the page cache; False where the file system or the platform has no such thing.

    The flag is set on the open file. Asking for it in ``open`` leaves an empty file behind on some kernels when the
    answer is no.
    """
    flag = getattr(os, "O_DIRECT", 0)
    if fcntl is None or not flag:
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | flag)
    except OSError as error:
        if error.errno not in _NO_SUCH_REQUEST:
            raise
        return False
    return True


def leave_direct(descriptor: int) -> None:
    """Let writes go through the page cache again."""
    if fcntl is not None:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~getattr(os, "O_DIRECT", 0))


def reserve(descriptor: int, size: int) -> None:
    """Give a new file its ``size`` bytes on the disk at once, where the file system can; else do nothing.

    Threads that write into reserved blocks need not wait for each other while the file grows. ``posix_fallocate`` is
    not asked: where the file system cannot reserve, the C library writes into every block instead.

    Raises:
        OSError: the disk, the quota or the limit of the process has no room for them.
    """
    types = ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong
    if (reason := _call("fallocate", types, descriptor, 0, 0, size)) in _NO_ROOM:
        raise OSError(reason, os.strerror(reason))


def start_writeback(descriptor: int, offset: int, count: int) -> bool:
    """Ask the kernel to begin writing ``count`` bytes of the page cache to the disk, without waiting for them.

    The fsync at the end then finds most of its work done. Nothing is promised by this call.

    Returns:
        False where there is no such request, so that asking again is of no use.

    Raises:
        OSError: the disk refused what was written before.
    """
    types = ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_uint
    return _request("sync_file_range", types, descriptor, offset, count, _SYNC_FILE_RANGE_WRITE)


def _request(function: str, types: Sequence[Any], *arguments: Any) -> bool:
    """Ask for what a file system may have no request for: False then.

    Raises:
        OSError: the system refused.
    """
    reason = _call(function, types, *arguments)
    if reason is None or reason in _NO_SUCH_REQUEST or reason == errno.ESPIPE:
        return False
    if reason:
        raise OSError(reason, os.strerror(reason))
    return True


def _call(function: str, types: Sequence[Any], *arguments: Any) -> int | None:
    """Return the number of the error that a function of the C library ends with, 0 for none; None without it."""
    if sys.platform != "linux" or sys.maxsize <= 2**32:
        return None
    try:
        known = getattr(ctypes.CDLL(None, use_errno=True), function)
    except (OSError, AttributeError):  # a C library of another kind
        return None
    known.argtypes = types
    return ctypes.get_errno() if known(*arguments) else 0


def free_memory() -> int | None:
    """Return how many bytes of memory nobody uses, the page cache included among the users; None if unknown."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows, or a system without that question
        return None


def sync(descriptor: int) -> None:
    """Make the content of an open file durable. Asked once: a second ``fsync`` after a failed one may lie."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if fcntl is not None and full is not None:  # macOS: fsync alone stops at the drive's cache
        try:
            fcntl.fcntl(descriptor, full)
        except OSError as error:
            if error.errno not in _NO_SUCH_REQUEST:
                raise
        else:
            return
    os.fsync(descriptor)


def sync_folder(descriptor: int) -> None:
    """Make the names in an open folder durable; a file system that keeps none of its own (EINVAL) has nothing to do."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def sync_file_system(descriptor: int) -> bool:
    """Make everything on the file system of an open folder durable, in one call for any number of files.

    What the disk refused since the folder was opened is an error here, as with ``sync``.

    Returns:
        False where there is no such call, or where it would not tell of what was refused: nothing is promised then.

    Raises:
        OSError: the disk refused something.
    """
    return _syncs_as_a_whole(descriptor) and _request("syncfs", (ctypes.c_int,), descriptor)


def _syncs_as_a_whole(descriptor: int) -> bool:
    """Whether the kernel tells errors of ``syncfs`` (since 5.8), and the file system is one that has them."""
    about = ctypes.create_string_buffer(_STATFS_BYTES)  # larger than the answer, whose first word is the type
    if _call("fstatfs", (ctypes.c_int, ctypes.c_void_p), descriptor, about) != 0:
        return False
    kernel = re.match(r"(\d+)\.(\d+)", os.uname().release)
    tells = kernel is not None and (int(kernel[1]), int(kernel[2])) >= _TELLING_KERNEL
    return tells and ctypes.c_ulong.from_buffer(about).value in _SYNCED_AS_A_WHOLE


class OpenDescriptor:
    """What ``opener(*arguments)`` opens, a context manager that an interrupt cannot lose. A dropped one closes itself.

    Python handles signals between two instructions, never inside a call of C. In ``number = os.open(path)`` the call
    and the assignment are two instructions, and an interrupt between them loses the number. Here one call of C opens
    and records, and one call of C forgets and closes.

    Raises:
        OSError: the system refused.

    Example:
        >>> import tempfile
        >>> with OpenDescriptor(os.open, tempfile.mkdtemp(), os.O_RDONLY) as opened:
        ...     opened.number >= 0
        True
        >>> opened.number
        -1
    """

    # ``__del__`` is an attribute of the instance, a function of C: an interrupt inside a method would be lost.
    __slots__ = ("__del__", "_close", "_lockable", "_numbers")

    def __init__(self, opener: Callable[..., int] | None = None, *arguments: Any) -> None:
        self._lockable = False
        self._numbers = numbers = [-1]
        # ``pop`` gives each number once, then the -1 that ends the iterator. ``any`` goes on, as ``close`` gives None.
        self.__del__ = self._close = functools.partial(any, map(os.close, iter(numbers.pop, -1)))
        if opener is not None:
            numbers.extend(itertools.starmap(opener, (arguments,)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.finish()
        else:  # it says more than the system could
            self.close()

    @property
    def number(self) -> int:
        """The descriptor, of several the first; -1 when it is closed."""
        first = self._numbers[1:2]
        return first[0] if first else -1

    def open(self, opener: Callable[..., int], *arguments: Any) -> None:
        """Open what was made without an opener; once."""
        self._numbers.extend(itertools.starmap(opener, (arguments,)))

    def open_each(self, opener: Callable[..., int], *columns: Iterable[Any]) -> list[int]:
        """Open what each row of arguments says, and return those descriptors; they are closed with this one."""
        known = len(self._numbers)
        self._numbers.extend(map(opener, *columns))
        return self._numbers[known:]

    @property
    def numbers(self) -> list[int]:
        """All that are open: after an error of `open_each` those that come before the one that it is about."""
        return self._numbers[1:]

    def lock(self) -> bool | None:
        """Take its lock without waiting, as the function; closing gives it back."""
        self._lockable = True
        return lock(self.number)

    def unlock(self) -> None:
        """Give its lock back at once, also where a child that was forked meanwhile holds the file open."""
        if fcntl is not None and self._lockable and (number := self.number) >= 0:
            with contextlib.suppress(OSError):  # closing gives it back too
                fcntl.flock(number, fcntl.LOCK_UN)

    def close(self) -> None:
        """Give its lock back and close it, whatever the system says of that. May be called twice."""
        with contextlib.suppress(OSError):
            self.finish()

    def finish(self) -> None:
        """Give its lock back and close it.

        Raises:
            OSError: the system refused to close it, or tells of what it could not write.
        """
        if self._lockable:
            self.unlock()
        try:
            self._close()
        except OSError:
            while self._numbers:  # one that could not be closed well keeps no other open
                with contextlib.suppress(OSError):
                    self._close()
            raise


def open_folder(folder: str) -> OpenDescriptor | None:
    """Open ``folder`` so that it can be synced; None where the platform cannot open folders."""
    return None if os.name == "nt" else OpenDescriptor(os.open, folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
