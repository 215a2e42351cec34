"""Where a path really leads, and folders that are durable before anything is put into them.

Buckets that are mounted as folders can be read; a rename there is a copy, so nothing is saved to them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import stat
from typing import Final, NamedTuple

from treering._store.posix import descriptors, open_descriptor
from treering.errors import Unsupported


def resolved(path: str) -> str:
    """Return the absolute path of the file that ``path`` names, links followed to the end.

    Raises:
        OSError: a folder or another thing that is no file stands there, its links cannot be followed, or the name is
            not possible.
    """
    whole, found = _followed(path)
    if found is not None:
        require_file(found)
    return whole


def resolved_folder(path: str) -> str:
    """Return the absolute path of the folder that ``path`` names, links followed to the end; it need not be there.

    Raises:
        OSError: something that is no folder stands there, its links cannot be followed, or the name is not possible.
    """
    whole, found = _followed(path)
    if found is not None and not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is a file, not a folder")
    return whole


def _followed(path: str) -> tuple[str, os.stat_result | None]:
    try:
        whole = os.path.realpath(path)
        found = descriptors.stat_at(whole, follow=False)
    except ValueError as error:  # a NUL, or half a surrogate pair
        raise OSError(errno.EINVAL, f"this cannot be the name of a file ({error})") from error
    if found is not None and stat.S_ISLNK(found.st_mode):
        # realpath says nothing of a circle, nor of a link that it could not read.
        raise OSError(errno.ELOOP, "the link there cannot be followed to its end")
    return whole, found


def require_file(found: os.stat_result) -> None:
    """Refuse what cannot be read by position and replaced as a whole.

    Raises:
        OSError: it is a folder, a device, a pipe or a socket.
    """
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is a device, a pipe or a socket, not a file")


def make_folder(folder: str) -> list[str]:
    """Make ``folder`` and its missing parents; each new name is durable before the next one is made.

    Returns:
        Those that were made here, the outermost first. After an error none of them is left, unless others use it.

    Raises:
        OSError: it cannot be made, or a file stands in the way.
        Unsupported: it is in a bucket that is mounted as a folder.
    """
    missing: list[str] = []
    wanted = folder
    while (found := _folder_at(folder)) is None:
        missing.append(folder)
        if (above := os.path.dirname(folder)) == folder:
            raise FileNotFoundError(errno.ENOENT, f"there is no drive {folder!r}")
        folder = above
    require_no_bucket(wanted, found.st_dev)
    made: list[str] = []
    try:
        for new in reversed(missing):
            with contextlib.suppress(FileExistsError):  # somebody else was faster
                os.mkdir(new)
                made.append(new)
            sync_parent(new)
    except BaseException:  # an interrupt too: nothing half made stays; raised again below
        remove_folders(made)
        raise
    return made


def remove_folders(made: list[str]) -> None:
    """Remove folders that `make_folder` made, as far as they are empty."""
    with contextlib.suppress(OSError):
        for folder in reversed(made):
            os.rmdir(folder)


def sync_folder(path: str) -> None:
    """Make the names in the folder at a path durable."""
    if (opened := open_descriptor.open_folder(path)) is not None:
        with opened:
            descriptors.sync_folder(opened.number)


def sync_parent(path: str) -> None:
    """Make the name of ``path`` in its folder durable."""
    sync_folder(os.path.dirname(path))


def _folder_at(path: str) -> os.stat_result | None:
    """Return what is known of a folder; None when nothing is there. A file there is an error, and so is not knowing."""
    if (found := descriptors.stat_at(path)) is not None and not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, f"{path!r} is a file, not a folder")
    return found


_MOUNTS: Final = "/proc/self/mountinfo"
# Device, root, mount point, type and source of https://man7.org/linux/man-pages/man5/proc_pid_mountinfo.5.html.
_FUSE: Final = re.compile(r"^\d+ \d+ (\d+):(\d+) (\S+) (\S+) .*? - fuse(?:blk)?(?:\.(\S+))? (\S+) ", re.MULTILINE)
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")
_SCHEMES: Final = {
    "gcsfuse": "gs",
    **dict.fromkeys(("s3fs", "mountpoint-s3", "goofys", "geesefs", "rclone"), "s3"),
    **dict.fromkeys(("blobfuse", "blobfuse2"), "az"),
}
"""Program -> the scheme of what it mounts, most of the time."""
_TELL_BUCKET: Final = frozenset({"gcsfuse", "goofys", "geesefs"})
"""Programs that give the bucket as the source of the mount."""


class _Mount(NamedTuple):
    program: str
    url: str
    point: str


def require_no_bucket(path: str, device: int) -> None:
    """Refuse to save to a path whose device, as ``stat`` gives it, is a mounted bucket.

    Raises:
        Unsupported: it is one; the hint says which URL to use.

    Example:
        >>> require_no_bucket("/", os.stat("/").st_dev)
    """
    if (mount := _bucket_of(device)) is not None:
        below = os.path.relpath(path, mount.point) if os.path.isabs(path) else path
        url = mount.url if below == "." else f"{mount.url}/{below}"
        what = f"{path!r} is in a bucket that {mount.program} shows as a folder: no save is safe there"
        raise Unsupported(what, hint=f"save to {url!r}; checkpoints that are there can be loaded")


@functools.lru_cache(maxsize=64)
def _bucket_of(device: int) -> _Mount | None:
    """Return the mounted bucket of a device; None for every other file system."""
    with contextlib.suppress(OSError, AttributeError):  # nothing is mounted so where there is no /proc, or no devices
        here = str(os.major(device)), str(os.minor(device))
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            found = _FUSE.findall(file.read())
        for *numbers, root, point, kind, source in reversed(found):
            program = kind or source
            if (*numbers,) == here and program in _SCHEMES:
                bucket = source.replace(":", "/", 1) if program in _TELL_BUCKET else "BUCKET"
                url = f"{_SCHEMES[program]}://{bucket}{root.rstrip('/')}"
                return _Mount(program, _plain(url).rstrip("/"), _plain(point))
    return None


def _plain(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), text)
