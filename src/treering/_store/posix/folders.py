"""Where a path really leads, and folders that are durable before anything is put into them."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from treering._store.posix import descriptors, open_descriptor
from treering._store.posix.mounts import require_no_bucket


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
