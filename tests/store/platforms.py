"""What a platform or a file system may lack: locks, hard links, names from open folders, memory for the page cache."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import limits
from treering._store.posix import descriptors, folder


def no_locks(*_: object) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def no_links(*_: object, **__: object) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def without_locks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fcntl, "flock", no_locks)


def without_links(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os, "link", no_links)


def without_dir_fd(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(folder, "FROM_DESCRIPTOR", False)


def without_nofollow(patch: pytest.MonkeyPatch) -> None:
    without_dir_fd(patch)
    patch.delattr(os, "O_NOFOLLOW")
    patch.setattr(folder, "CAREFUL", os.O_CLOEXEC)


def without_open_folders(patch: pytest.MonkeyPatch) -> None:
    without_dir_fd(patch)
    patch.setattr(descriptors, "open_folder", lambda path: Path(path).stat() and None)


def without_syncfs(patch: pytest.MonkeyPatch) -> None:
    """As with a kernel that keeps the errors of this call to itself."""
    patch.setattr(os, "uname", lambda: SimpleNamespace(release="4.18.0"))


def before_syncfs(patch: pytest.MonkeyPatch, act: Callable[[int], object]) -> None:
    """Do something before everything on a file system is made durable, each time that it is asked for."""
    real = descriptors.sync_file_system

    def sync_file_system(descriptor: int) -> bool:
        act(descriptor)
        return real(descriptor)

    patch.setattr(descriptors, "sync_file_system", sync_file_system)


def without_fcntl(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(descriptors, "fcntl", None)


def like_windows(patch: pytest.MonkeyPatch) -> None:
    without_dir_fd(patch)
    without_fcntl(patch)
    patch.setattr(descriptors, "open_folder", lambda path: None)
    for name in ("O_DIRECT", "O_NOFOLLOW", "fchown", "fstatvfs", "statvfs"):
        patch.delattr(os, name)


PLATFORMS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "linux": lambda patch: None,
    "past the page cache": limits.write_past_the_cache,
    "no locks": without_locks,
    "no hard links": without_links,
    "no dir_fd": without_dir_fd,
    "like windows": like_windows,
}
