"""Where a path really leads, folders that are durable before anything is put into them, and one open folder.

Names are looked up from the folder's own descriptor where the platform can, so that everything happens in the folder
that was opened, whatever is put at its path meanwhile. Elsewhere they are joined to its path.

Buckets that are mounted as folders can be read; a rename there is a copy, so nothing is saved to them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import re
import stat
from collections.abc import Sequence
from typing import Final, NamedTuple

from treering._store.api import Closable, Kind
from treering._store.posix import descriptors
from treering._store.posix.descriptors import OpenDescriptor
from treering._values.checkpoint_names import LOCK_FILE
from treering.errors import UnsupportedError

FROM_DESCRIPTOR = (
    hasattr(os, "link")
    and {os.access, os.link, os.mkdir, os.open, os.readlink, os.rename, os.rmdir, os.stat, os.unlink}
    <= os.supports_dir_fd
    and os.listdir in os.supports_fd
)
"""Whether this platform looks names up from an open folder."""

NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})
"""A file system without hard links, or with no more to this file, says one of these."""
# Or there are none to there, or none to files of others.
_NONE_TO_THERE = NO_LINKS | {errno.EXDEV, errno.EACCES}

# Where links can be told from what they lead to; elsewhere none was there a moment ago.
_NOT_FOLLOWED = {"follow_symlinks": False} if hasattr(os, "link") and os.link in os.supports_follow_symlinks else {}

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
"""How a file is opened that must not be there."""
CAREFUL = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""And how anything is: never through a link, and not for programs that are started."""
READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
"""How a file is opened to be read: without waiting, should it be a pipe that nobody writes to; files ignore that."""
# So many files are open at the same time where each of many is read.
_READ_TOGETHER: Final = 16


class Folder(Closable):
    """An open folder, a context manager. Every method may raise ``OSError``.

    Attributes:
        path: where it was when it was opened.
    """

    def __init__(self, path: str, opened: OpenDescriptor | None = None) -> None:
        """Open the folder at an absolute path, or take over the descriptor of it that is open already.

        Raises:
            OSError: there is none, or it cannot be read.
        """
        self.path = path
        self._opened = descriptors.open_folder(path) if opened is None else opened
        self._lock_file: OpenDescriptor | None = None  # where folders cannot be locked

    def close(self) -> None:
        """Close the folder. May be called twice."""
        if self._opened is not None:
            self._opened.close()

    @property
    def descriptor(self) -> int | None:
        """The open folder, -1 when it is closed; None where the platform cannot open folders."""
        return None if self._opened is None else self._opened.number

    def place(self, name: str) -> tuple[str, int | None]:
        """Return what to ask the system for: a name and the descriptor to start from, or a whole path and None."""
        if self._opened is None or not FROM_DESCRIPTOR:
            return os.path.join(self.path, name), None
        if (start := self._opened.number) < 0:  # -1 would be the current folder to some calls
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return name, start

    def lock(self) -> bool:
        """Take the right to write into it without waiting, which one saver has at a time; closing gives it back.

        The lock is on the folder itself: it leaves no file, and ends with its holder. Where folders cannot be locked, a
        lock file stands for it: its being there is the lock. Windows removes it with its holder; elsewhere you have to,
        after a crash.

        Returns:
            False when another saver has it.

        Raises:
            OSError: the system refused to say.
        """
        answer = None if self._opened is None else self._opened.lock()
        if answer is not None:
            return answer
        if self._lock_file is not None and self._lock_file.number >= 0:
            return False
        self._lock_file = OpenDescriptor()
        with contextlib.suppress(FileExistsError):
            self.create(LOCK_FILE, flags=getattr(os, "O_TEMPORARY", 0), into=self._lock_file)
        return self._lock_file.number >= 0

    def unlock(self) -> None:
        """Let others have it at once; the folder is still open. May be called twice."""
        if self._lock_file is not None and self._lock_file.number >= 0:
            if os.name != "nt":  # Windows removes it when it is closed
                with contextlib.suppress(OSError):
                    self.remove(LOCK_FILE)
            self._lock_file.close()
        if self._opened is not None:
            self._opened.unlock()

    def below(self, name: str) -> Folder:
        """Open the folder ``name`` in it.

        Raises:
            OSError: there is none; ENOTDIR or ELOOP when it is a link or no folder.
        """
        path = os.path.join(self.path, name)
        if self.place(name)[1] is not None:
            return Folder(path, self._open(name, os.O_RDONLY | os.O_DIRECTORY))
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return Folder(path)

    def make_folder(self, name: str) -> None:
        """Make the folder ``name`` in it, with the same rights, if it is missing."""
        path, start = self.place(name)
        try:
            os.mkdir(path, dir_fd=start)
        except FileExistsError:
            return
        if start is not None:  # whoever may remove files here, may do so there
            with contextlib.suppress(OSError), self.below(name) as made:
                os.fchmod(made.descriptor or -1, stat.S_IMODE(os.fstat(start).st_mode))

    def remove_folder(self, name: str) -> None:
        """Remove the folder ``name`` in it, which must be empty."""
        path, start = self.place(name)
        os.rmdir(path, dir_fd=start)

    def names(self) -> list[str]:
        """Return all names in the folder."""
        path, start = self.place("")
        return os.listdir(path if start is None else start)

    def scan(self) -> dict[str, Kind]:
        """Return all names in the folder, and what they stand for, as far as it matters: a link is something other."""
        path, start = self.place("")
        with os.scandir(path if start is None else start) as entries:
            return {entry.name: _kind_of(entry) for entry in entries}

    def find(self, name: str) -> os.stat_result | None:
        """Return what is known of ``name``, itself perhaps a link; None when it is not there."""
        path, start = self.place(name)
        try:
            return os.stat(path, dir_fd=start, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def read_each(self, names: Sequence[str], most: int) -> list[tuple[int, bytes] | None]:
        """Return the sizes and the first bytes of many files; None where `open` would raise, and for what is no file.

        Only the last part of a name is sure to be no link.
        """
        if (start := self.place("")[1]) is None:
            return [None] * len(names)
        opener, flags = functools.partial(os.open, dir_fd=start), itertools.repeat(READ | CAREFUL)
        found: list[tuple[int, bytes] | None] = []
        while len(found) < len(names):
            some = names[len(found) : len(found) + _READ_TOGETHER]
            with OpenDescriptor() as opened:
                with contextlib.suppress(OSError):
                    opened.open_each(opener, some, flags)
                numbers = opened.numbers
                found += map(_size_and_head, numbers, itertools.repeat(most))
            if len(numbers) < len(some):
                found.append(None)
        return found

    def link_text(self, name: str) -> str:
        """Return where the link ``name`` leads, as it says."""
        path, start = self.place(name)
        return os.readlink(path, dir_fd=start)

    def require_writable(self, name: str) -> None:
        """Refuse a file ``name`` that this process may not write to, as its rights or its file system say."""
        path, start = self.place(name)
        if os.access(path, os.W_OK, dir_fd=start):
            return
        if self._opened is not None and descriptors.is_read_only(self._opened.number):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        raise PermissionError(errno.EACCES, f"{name!r} is write-protected")

    def create(
        self, name: str, mode: int = 0o666, flags: int = 0, *, into: OpenDescriptor | None = None
    ) -> OpenDescriptor:
        """Make the file ``name``, which must not be there, and return it open for writing: ``into``, or a new one."""
        return self._open(name, NEW | flags, mode, into)

    def open(self, name: str, flags: int) -> OpenDescriptor:
        """Open the file ``name``.

        Raises:
            OSError: ELOOP when it is a link.
        """
        if not hasattr(os, "O_NOFOLLOW") and (found := self.find(name)) is not None and stat.S_ISLNK(found.st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        return self._open(name, flags)

    def link(self, name: str, new: str) -> None:
        """Give the file ``name`` a second name that must not be there."""
        (path, start), (target, _) = self.place(name), self.place(new)
        os.link(path, target, src_dir_fd=start, dst_dir_fd=start)

    def link_from(self, source: Folder, name: str, new: str | None = None, *, read_only: bool = False) -> bool:
        """Give the file ``name`` of another folder the name ``new`` here; False where there can be no such link.

        Args:
            source: the other folder.
            name: the name there.
            new: the name here; None for the same one.
            read_only: whether nobody may write into it from now on, under either name.
        """
        if (found := source.find(name)) is None or not stat.S_ISREG(found.st_mode):
            return False
        (path, start), (target, there) = source.place(name), self.place(new or name)
        try:
            os.link(path, target, src_dir_fd=start, dst_dir_fd=there, **_NOT_FOLLOWED)
        except OSError as error:
            # Somebody may have removed it since it was found.
            if error.errno not in _NONE_TO_THERE and not (error.errno == errno.ENOENT and source.find(name) is None):
                raise
            return False
        if read_only and os.name != "nt":  # Windows removes no file that is read-only
            with contextlib.suppress(OSError):  # it is another user's
                os.chmod(target, stat.S_IMODE(found.st_mode) & ~0o222, dir_fd=there)
        return True

    def replace(self, name: str, new: str) -> None:
        """Rename the file ``name`` to ``new``, in the place of whatever is there."""
        (path, start), (target, _) = self.place(name), self.place(new)
        os.replace(path, target, src_dir_fd=start, dst_dir_fd=start)

    def remove(self, name: str) -> None:
        """Remove the file ``name``; one that is gone already is as well."""
        path, start = self.place(name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path, dir_fd=start)

    def sync(self) -> None:
        """Make the names in the folder durable."""
        if self._opened is not None:
            descriptors.sync_folder(self._opened.number)

    def sync_file_system(self) -> bool:
        """Make everything on its file system durable, as `descriptors.sync_file_system`."""
        return self._opened is not None and descriptors.sync_file_system(self._opened.number)

    def require_space(self, size: int) -> None:
        """Refuse early what cannot fit on its file system."""
        if self._opened is not None:
            descriptors.require_space(self._opened.number, size)

    def is_there(self) -> bool:
        """Whether its path still leads to it."""
        return self._opened is None or descriptors.is_at(self._opened.number, self.path)

    def _open(self, name: str, flags: int, mode: int = 0o666, into: OpenDescriptor | None = None) -> OpenDescriptor:
        opened, (path, start) = OpenDescriptor() if into is None else into, self.place(name)
        opened.open(functools.partial(os.open, dir_fd=start), path, flags | CAREFUL, mode)
        return opened


def _kind_of(entry: os.DirEntry[str]) -> Kind:
    if entry.is_dir(follow_symlinks=False):
        return Kind.PLACE
    return Kind.FILE if entry.is_file(follow_symlinks=False) else Kind.OTHER


def _size_and_head(number: int, most: int) -> tuple[int, bytes] | None:
    with contextlib.suppress(OSError):
        found = os.fstat(number)
        return (found.st_size, os.pread(number, most, 0)) if stat.S_ISREG(found.st_mode) else None
    return None


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
        UnsupportedError: it is in a bucket that is mounted as a folder.
    """
    missing: list[str] = []
    wanted = folder
    while (found := descriptors.stat_at(folder)) is None:
        missing.append(folder)
        if (above := os.path.dirname(folder)) == folder:
            raise FileNotFoundError(errno.ENOENT, f"there is no drive {folder!r}")
        folder = above
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, f"{folder!r} is a file, not a folder")
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


def remove_folders(made: Sequence[str]) -> None:
    """Remove folders that `make_folder` made, as far as they are empty."""
    with contextlib.suppress(OSError):
        for folder in reversed(made):
            os.rmdir(folder)


def sync_folder(path: str) -> None:
    """Make the names in the folder at a path durable."""
    if (opened := descriptors.open_folder(path)) is not None:
        with opened:
            descriptors.sync_folder(opened.number)


def sync_parent(path: str) -> None:
    """Make the name of ``path`` in its folder durable."""
    sync_folder(os.path.dirname(path))


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
        UnsupportedError: it is one; the hint says which URL to use.

    Example:
        >>> require_no_bucket("/", os.stat("/").st_dev)
    """
    if (mount := _bucket_of(device)) is not None:
        below = os.path.relpath(path, mount.point) if os.path.isabs(path) else path
        url = mount.url if below == "." else f"{mount.url}/{below}"
        what = f"{path!r} is in a bucket that {mount.program} shows as a folder: no save is safe there"
        raise UnsupportedError(what, hint=f"save to {url!r}; checkpoints that are there can be loaded")


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
