"""Owner and permission bits that a new file takes over from the one it will replace."""

from __future__ import annotations

import os
import stat


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
