"""Buckets that are mounted as folders. They can be read; a rename there is a copy, so nothing is saved to them."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from typing import Final, NamedTuple

from treering.errors import Unsupported

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
