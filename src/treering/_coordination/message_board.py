"""Small files by which the processes of a job tell each other how far they are: put, read by name, removed.

They lie in the folder that is saved into. A message is replaced at once: a reader gets the old one or the new one.
The folder is never listed to find them, because listings of network file systems are the last to become true.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from treering._coordination.messages import PrepareMessage
from treering._store.pieces import write_all
from treering._store.posix import open_descriptor
from treering._store.posix.folder import Folder
from treering._values.checkpoint_names import attempt_of_message, is_message, is_prepare, temporary_name
from treering._values.human import pluralize
from treering.errors import Corrupt

LARGEST_MESSAGE: Final = 64 << 20
"""No message is larger than this many bytes."""

# Without waiting, should one be a pipe that nobody writes to; files ignore that flag.
_READING: Final = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
_PIECE: Final = 1 << 20
# The file was replaced between its being found and its being opened, in words of different file systems.
_REPLACED: Final = frozenset({errno.ENOENT, errno.ESTALE})
_REFRESHED_AFTER: Final = 1.0


class MessageBoard(Protocol):
    """Where the processes of a job put their messages."""

    def put(self, name: str, data: bytes) -> None:
        """Make ``data`` the content of the message ``name``, at once, in the place of what was there.

        Raises:
            OSError: the system refused, or its answer was lost; it may be done all the same.
        """

    def get(self, name: str) -> bytes | None:
        """Return the content of the message ``name``; None where there is none.

        Raises:
            OSError: the system refused.
        """

    def remove(self, name: str) -> None:
        """Remove the message ``name``; one that is gone already is as well.

        Raises:
            OSError: the system refused, or its answer was lost.
        """


class FolderMessageBoard:
    """Messages in an open folder.

    Example:
        >>> import tempfile
        >>> with Folder(tempfile.mkdtemp()) as folder:
        ...     board = FolderMessageBoard(folder)
        ...     board.put(".treering-waiting-00003", b"here")
        ...     board.get(".treering-waiting-00003"), board.get(".treering-waiting-00004")
        (b'here', None)
    """

    def __init__(self, folder: Folder, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._refreshed = clock()

    def put(self, name: str, data: bytes) -> None:
        """Write aside, then rename.

        Nothing is fsynced: only processes that are alive read messages, and a power cut ends them all. What has to
        outlive it is the commit.

        Raises:
            OSError: the system refused, or the message is too large.
            ValueError: it is no name of a message.
        """
        if not is_message(name):
            raise ValueError(f"{name!r} is no name of a message")
        if len(data) > LARGEST_MESSAGE:
            raise OSError(errno.EFBIG, f"a message of {pluralize(len(data), 'bytes')}, more than {LARGEST_MESSAGE}")
        aside = temporary_name(name, secrets.token_hex(8))
        opened = self._folder.create(aside)
        try:
            with opened:
                write_all(opened.number, memoryview(data))
            self._folder.replace(aside, name)
        except BaseException:  # an interrupt too: nothing half written stays; raised again below
            with contextlib.suppress(OSError):  # a sweeper knows it by its name
                self._folder.remove(aside)
            raise

    def get(self, name: str) -> bytes | None:
        """Read it, up to the largest size.

        Raises:
            OSError: the system refused; a link, a pipe or something too large has that name.
        """
        try:
            opened = self._folder.open(name, _READING)
        except OSError as error:
            if error.errno not in _REPLACED:
                raise
            self._refresh()
            return None
        try:
            with opened:
                return _read_message(opened.number, name)
        except OSError as error:
            if error.errno not in _REPLACED:
                raise
            return None

    def remove(self, name: str) -> None:
        """Remove it.

        Raises:
            OSError: the system refused.
            ValueError: it is no name of a message.
        """
        if not is_message(name):
            raise ValueError(f"{name!r} is no name of a message")
        self._folder.remove(name)

    def _refresh(self) -> None:
        """Let a network file system look again, once a second.

        Its client may remember for a minute that a name was not there. Opening the folder anew makes it ask whether
        the folder has changed, and if so it forgets what it knew (NFS: close-to-open consistency).
        """
        if self._clock() - self._refreshed < _REFRESHED_AFTER:
            return
        with contextlib.suppress(OSError):  # only the wait gets longer
            open_descriptor.open_folder(self._folder.path)
        self._refreshed = self._clock()


class PathMessageBoard:
    """Messages in the folder that is at a path at that moment, if there is one.

    The processes that wait for process 0 to make the folder have none to open yet, and a saver that failed removes the
    one that it had made. A link at the path is followed.

    Example:
        >>> import tempfile
        >>> board = PathMessageBoard(tempfile.mkdtemp() + "/not there")
        >>> board.get(".treering-waiting-00003") is None
        True
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def put(self, name: str, data: bytes) -> None:
        """Put it into the folder.

        Raises:
            OSError: the system refused, or there is no folder.
        """
        with Folder(self._path) as folder:
            FolderMessageBoard(folder).put(name, data)

    def get(self, name: str) -> bytes | None:
        """Read it; None where there is no folder.

        Raises:
            OSError: the system refused.
        """
        try:
            with Folder(self._path) as folder:
                return FolderMessageBoard(folder).get(name)
        except FileNotFoundError:
            return None

    def remove(self, name: str) -> None:
        """Remove it; gone with its folder is gone.

        Raises:
            OSError: the system refused.
        """
        with contextlib.suppress(FileNotFoundError), Folder(self._path) as folder:
            FolderMessageBoard(folder).remove(name)


def stale_messages(
    names: Iterable[str], is_live: Callable[[str], bool], get: Callable[[str], bytes | None]
) -> tuple[str, ...]:
    """Return those of the names in a folder that are messages and may go.

    Args:
        names: names in the folder, of any kind.
        is_live: whether an attempt has a saver that lives; the own attempt has one.
        get: reads a message, for the name of a job's message does not tell its attempt.

    Example:
        >>> names = [".treering-0123456789abcdef-verdict", ".treering-fedcba9876543210-verdict", "config.json"]
        >>> stale_messages(names, "0123456789abcdef".__eq__, lambda name: None)
        ('.treering-fedcba9876543210-verdict',)
    """
    dead: list[str] = []
    for name in names:
        if not is_message(name):
            continue
        attempt = attempt_of_message(name)
        if attempt is None and is_prepare(name):
            attempt = _attempt_of_prepare(name, get)
        # A sign of life is of no attempt; whoever still waits puts it again.
        if attempt is None or not is_live(attempt):
            dead.append(name)
    return tuple(dead)


def _attempt_of_prepare(name: str, get: Callable[[str], bytes | None]) -> str | None:
    """Return the attempt that a job's message tells; None where it cannot be read."""
    with contextlib.suppress(OSError, Corrupt):
        data = get(name)
        if data is not None:
            return PrepareMessage.read(data).attempt
    return None


def _read_message(descriptor: int, name: str) -> bytes:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, f"{name!r} is not a file")
    pieces: list[bytes] = []
    left = LARGEST_MESSAGE
    while piece := os.read(descriptor, min(left, _PIECE) + 1):
        left -= len(piece)
        if left < 0:
            raise OSError(errno.EFBIG, f"{name!r} is larger than any message")
        pieces.append(piece)
    return b"".join(pieces)
