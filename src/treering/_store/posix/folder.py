"""One open folder and the names in it.

Names are looked up from the folder's own descriptor where the platform can, so that everything happens in the folder
that was opened, whatever is put at its path meanwhile. Elsewhere they are joined to its path.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat

from treering._store.closable import Closable
from treering._store.posix import descriptors, open_descriptor
from treering._store.posix.open_descriptor import OpenDescriptor
from treering._values.checkpoint_names import LOCK_FILE

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
        self._opened = open_descriptor.open_folder(path) if opened is None else opened

    def close(self) -> None:
        """Close the folder. May be called twice."""
        if self._opened is not None:
            with contextlib.suppress(OSError):
                self._opened.close()

    @property
    def descriptor(self) -> int | None:
        """The open folder, -1 when it is closed; None where the platform cannot open folders."""
        return None if self._opened is None else self._opened.number

    @property
    def _start(self) -> int | None:
        if self._opened is None or not FROM_DESCRIPTOR:
            return None
        if (start := self._opened.number) < 0:  # -1 would be the current folder to some calls
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return start

    def lock(self) -> bool | None:
        """Take its lock without waiting, as `descriptors.lock`; closing gives it back."""
        return None if self._opened is None else self._opened.lock()

    def unlock(self) -> None:
        """Give its lock back at once."""
        if self._opened is not None:
            self._opened.unlock()

    def below(self, name: str) -> Folder:
        """Open the folder ``name`` in it.

        Raises:
            OSError: there is none; ENOTDIR or ELOOP when it is a link or no folder.
        """
        path = os.path.join(self.path, name)
        if self._start is not None:
            return Folder(path, self._open(name, os.O_RDONLY | os.O_DIRECTORY))
        if os.path.islink(path):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        return Folder(path)

    def make_folder(self, name: str) -> None:
        """Make the folder ``name`` in it, with the same rights, if it is missing."""
        start = self._start
        try:
            os.mkdir(self._at(name, start), dir_fd=start)
        except FileExistsError:
            return
        if start is not None:  # whoever may remove files here, may do so there
            with contextlib.suppress(OSError), self.below(name) as made:
                os.fchmod(made.descriptor or -1, stat.S_IMODE(os.fstat(start).st_mode))

    def remove_folder(self, name: str) -> None:
        """Remove the folder ``name`` in it, which must be empty."""
        start = self._start
        os.rmdir(self._at(name, start), dir_fd=start)

    def names(self) -> list[str]:
        """Return all names in the folder."""
        return os.listdir(self.path if self._start is None else self._start)

    def folders(self) -> list[str]:
        """Return the names of the folders in it; a link to one is none."""
        with os.scandir(self.path if self._start is None else self._start) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]

    def find(self, name: str) -> os.stat_result | None:
        """Return what is known of ``name``, itself perhaps a link; None when it is not there."""
        start = self._start
        try:
            return os.stat(self._at(name, start), dir_fd=start, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def link_text(self, name: str) -> str:
        """Return where the link ``name`` leads, as it says."""
        start = self._start
        return os.readlink(self._at(name, start), dir_fd=start)

    def require_writable(self, name: str) -> None:
        """Refuse a file ``name`` that this process may not write to, as its rights or its file system say."""
        start = self._start
        if os.access(self._at(name, start), os.W_OK, dir_fd=start):
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
        start = self._start
        os.link(self._at(name, start), self._at(new, start), src_dir_fd=start, dst_dir_fd=start)

    def link_from(self, source: Folder, name: str) -> bool:
        """Give the file ``name`` of another folder the same name here; False where there can be no such link."""
        if (found := source.find(name)) is None or not stat.S_ISREG(found.st_mode):
            return False
        start, there = source._start, self._start
        try:
            os.link(source._at(name, start), self._at(name, there), src_dir_fd=start, dst_dir_fd=there, **_NOT_FOLLOWED)
        except OSError as error:
            if error.errno not in _NONE_TO_THERE:
                raise
            return False
        return True

    def replace(self, name: str, new: str) -> None:
        """Rename the file ``name`` to ``new``, in the place of whatever is there."""
        start = self._start
        os.replace(self._at(name, start), self._at(new, start), src_dir_fd=start, dst_dir_fd=start)

    def remove(self, name: str) -> None:
        """Remove the file ``name``; one that is gone already is as well."""
        start = self._start
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._at(name, start), dir_fd=start)

    def sync(self) -> None:
        """Make the names in the folder durable."""
        if self._opened is not None:
            descriptors.sync_folder(self._opened.number)

    def require_space(self, size: int) -> None:
        """Refuse early what cannot fit on its file system."""
        if self._opened is not None:
            descriptors.require_space(self._opened.number, size)

    def is_there(self) -> bool:
        """Whether its path still leads to it."""
        return self._opened is None or descriptors.is_at(self._opened.number, self.path)

    def _open(self, name: str, flags: int, mode: int = 0o666, into: OpenDescriptor | None = None) -> OpenDescriptor:
        opened, start = OpenDescriptor() if into is None else into, self._start
        opened.open(functools.partial(os.open, dir_fd=start), self._at(name, start), flags | CAREFUL, mode)
        return opened

    def _at(self, name: str, start: int | None) -> str:
        return os.path.join(self.path, name) if start is None else name


class FolderLock:
    """The right to write into an open folder, held by one saver at a time.

    The lock is on the folder itself: it leaves no file, and ends with its holder. Where folders cannot be locked, a
    lock file stands for it: its being there is the lock. Windows removes it with its holder; elsewhere you have to,
    after a crash.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._file = OpenDescriptor()  # that of the lock file, where folders cannot be locked

    def take(self) -> bool:
        """Take the lock without waiting; False when somebody else holds it.

        Raises:
            OSError: the system refused to say.
        """
        if (answer := self._folder.lock()) is not None:
            return answer
        with contextlib.suppress(FileExistsError):
            self._folder.create(LOCK_FILE, flags=getattr(os, "O_TEMPORARY", 0), into=self._file)
        return self._file.number >= 0

    def give_back(self) -> None:
        """Let others have it; the folder is still open. May be called twice."""
        if self._file.number >= 0:
            if os.name != "nt":  # Windows removes it when it is closed
                with contextlib.suppress(OSError):
                    self._folder.remove(LOCK_FILE)
            with contextlib.suppress(OSError):
                self._file.close()
        self._folder.unlock()
