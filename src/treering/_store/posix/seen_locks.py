"""Which process holds the lock of a file, found out by reading alone.

Whoever asks for a lock to learn whether it is free holds it for a moment, and a saver that wants it in that moment
fails. Linux shows all locks in ``/proc/locks``; elsewhere nothing can be said.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Final

from treering._store.locks import Locks

# File systems that this machine has to itself, and whose lock table has the numbers that ``stat`` gives.
_OF_THIS_MACHINE: Final = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "tmpfs"})
# Type, access, pid, device and inode of https://man7.org/linux/man-pages/man5/proc_locks.5.html, not of those who wait.
_LOCK: Final = re.compile(
    r"^\d+: (?:FLOCK|POSIX|OFDLCK) +\S+ +WRITE +(-?\d+) ([0-9a-f]+):([0-9a-f]+):(\d+) ", re.MULTILINE
)
# Of https://man7.org/linux/man-pages/man5/proc_pid_mountinfo.5.html: number, device, type of the file system.
_MOUNT: Final = re.compile(r"^(\d+) \d+ (\d+):(\d+) .*? - (\S+) ", re.MULTILINE)
_MOUNT_OF: Final = re.compile(r"^mnt_id:\s*(\d+)$", re.MULTILINE)
# The first namespace of process numbers has this number on every Linux; in others the locks of the rest are hidden.
_ALL_PROCESSES: Final = "pid:[4026531836]"
_STARTED: Final = 19  # the 22nd field of /proc/PID/stat, counted behind the name and the one before it

_UNSHOWN: Final = "this system does not show its locks"


def seen_locks(folder: int | None) -> Locks:
    """Look which files of the file system of an open folder are locked.

    Args:
        folder: its descriptor; None where the platform opens none.

    Example:
        >>> seen_locks(None)
        Locks(gap='this system does not show its locks', holders={})
    """
    proc = Path("/proc")
    try:
        mount = _MOUNT_OF.search((proc / "self" / "fdinfo" / str(folder)).read_text())
        mounts = _MOUNT.findall((proc / "self" / "mountinfo").read_text(errors="replace"))
        locks = _LOCK.findall((proc / "locks").read_text())
        all_seen = os.readlink(proc / "self" / "ns" / "pid") == _ALL_PROCESSES
    except OSError:
        return Locks(_UNSHOWN, {})
    here = next((found for found in mounts if mount is not None and found[0] == mount[1]), None)
    if here is None:
        return Locks(_UNSHOWN, {})
    _, major, minor, kind = here
    device = int(major), int(minor)
    # The device of the mount, not the one of ``stat``: btrfs shows another one there.
    holders = {
        int(inode): int(pid) for pid, first, second, inode in locks if (int(first, 16), int(second, 16)) == device
    }
    gap = None if all_seen else "locks of other containers are not shown here"
    if kind not in _OF_THIS_MACHINE:
        gap = f"on {kind} locks of other machines are not shown here"
    return Locks(gap, holders)


def started(process: int) -> float | None:
    """Return when a process of this machine started, as seconds since 1970; None where it does not run.

    Raises:
        OSError: the system does not show processes.

    Example:
        >>> import sys
        >>> sys.platform != "linux" or started(os.getpid()) > 1e9
        True
    """
    if (boot := re.search(r"^btime (\d+)$", Path("/proc/stat").read_text(), re.MULTILINE)) is None:
        raise OSError("the system does not show when it was started")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        # The name of the program stands in brackets, and may hold any text.
        fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(boot[1]) + int(fields[_STARTED]) / os.sysconf("SC_CLK_TCK")
    return None
