"""The folders of attempts in a leaves directory on disk.

The folder of each attempt under ``.treering`` is locked while its saver lives, and swept when that one is dead.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Collection, Iterable

from treering._store.api import Kind
from treering._store.pieces import write_all
from treering._store.posix import descriptors
from treering._store.posix.descriptors import OpenDescriptor
from treering._store.posix.folder_tree import AS_FOLDER, FolderTree
from treering._values.leaves_names import ATTEMPTS, PENDING, RECORD, attempt_folder, is_attempt
from treering.errors import LinkRefusedError

_TRIES = 20


def list_attempts(tree: FolderTree) -> list[str]:
    """Return the attempts that have a folder.

    Raises:
        LinkRefusedError: ``.treering`` is a link.
        OSError: the system refused.
    """
    try:
        found = tree.scan((ATTEMPTS,))
    except FileNotFoundError:
        return []
    return sorted(name for name, kind in found.items() if kind is Kind.PLACE and is_attempt(name))


def pending_attempts(tree: FolderTree, attempts: Iterable[str]) -> frozenset[str]:
    """Return those attempts that wait for an index.

    Raises:
        OSError: the system refused.
    """
    return frozenset(one for one in attempts if tree.find(attempt_folder(one), PENDING) is not None)


def has_saver(tree: FolderTree, attempt: str) -> bool:
    """Tell whether the saver of an attempt is at work; False where that cannot be told.

    Raises:
        FileNotFoundError: it ended meanwhile.
        OSError: the system refused.
    """
    if descriptors.fcntl is None:
        return False
    with tree.open((ATTEMPTS,), attempt, AS_FOLDER) as opened:
        return opened.lock() is False


class AttemptFolder:
    """The folder of an attempt that this process has made and holds the lock of.

    Attributes:
        attempt: 16 hexadecimal digits, different for each save.
        parts: where it is.
        kept: an index names it, or it waits for one: `end` leaves it there.
    """

    def __init__(self, tree: FolderTree, attempt: str | None = None) -> None:
        """Make it, for an attempt that is known to others already, or for a new random one.

        Raises:
            LinkRefusedError: ``.treering`` is a link.
            OSError: the system refused; ENOENT when a saver that failed removed the directory meanwhile.
        """
        self._tree = tree
        self._opened: OpenDescriptor | None = None
        self.kept = False
        for _ in range(_TRIES):
            self.attempt = attempt or secrets.token_hex(8)
            self.parts = attempt_folder(self.attempt)
            try:
                tree.make(self.parts)
                if self._lock():
                    return
            except BaseException:  # an interrupt too: nothing half made stays; raised again below
                self.end()
                raise
            # A sweeper met it between its making and its lock, and took it for a leftover.
            self.end()
        raise OSError(errno.EAGAIN, "other processes keep removing its staged files")

    def write(self, name: str, data: bytes, old: os.stat_result | None = None) -> None:
        """Make a file in it, durable but for its name, with the rights of the file that it will replace, if any.

        Raises:
            OSError: the system refused.
        """
        self._tree.remove(self.parts, name)
        with self._tree.create(self.parts, name) as opened:
            if old is not None:
                descriptors.take_over(opened.number, old)
            write_all(opened.number, memoryview(data))
            descriptors.sync(opened.number)

    def end(self) -> None:
        """Let go of it. Unless it is kept it is removed, as far as that goes; so is ``.treering`` when it is empty."""
        if not self.kept:
            with contextlib.suppress(OSError, LinkRefusedError):  # what stays is swept by the next save
                remove_attempt(self._tree, self.attempt)
        if self._opened is not None:
            self._opened.close()
        if not self.kept:
            with contextlib.suppress(OSError, LinkRefusedError):
                self._tree.remove_empty((ATTEMPTS,))

    def _lock(self) -> bool:
        """Lock it, and look whether it still is there."""
        if descriptors.fcntl is None:  # Windows opens no folders, and sweeps nothing
            return True
        self._opened = self._tree.open((ATTEMPTS,), self.attempt, AS_FOLDER)
        if self._opened.lock() is False:
            return False
        found = self._tree.find((ATTEMPTS,), self.attempt)
        return found is not None and os.path.samestat(found, os.fstat(self._opened.number))


def remove_attempt(tree: FolderTree, attempt: str) -> None:
    """Remove the folder of an attempt: the record first, for what has none proves nothing.

    Raises:
        OSError: the system refused.
    """
    parts = attempt_folder(attempt)
    with contextlib.suppress(PermissionError):  # it may be empty, as one made under a umask that leaves no rights
        tree.remove(parts, RECORD)
    if not tree.remove_empty(parts):
        tree.remove_all(parts)


def remove_if_dead(tree: FolderTree, attempt: str, *, spared: Callable[[Collection[str]], bool]) -> None:
    """Remove the folder of an attempt that no index names, if its saver is dead.

    What cannot be removed stays, and does not stand in the way of a save. Where the lock of a folder cannot be
    asked for, whether a saver lives cannot be told, and nothing is removed.

    Args:
        tree: the directory.
        attempt: the attempt.
        spared: gets the names in that folder, and says whether somebody may need it yet.
    """
    with contextlib.suppress(OSError):
        try:
            opened = tree.open((ATTEMPTS,), attempt, AS_FOLDER)
        except PermissionError:  # made under a umask that leaves no rights: then nothing is in it
            tree.remove_empty(attempt_folder(attempt))
            return
        with opened:
            if opened.lock() and not spared(tree.scan(attempt_folder(attempt))):
                remove_attempt(tree, attempt)


def sweep_unfinished(tree: FolderTree) -> None:
    """Remove what died before it was durable, which nobody can need: else jobs that die again and again fill the disk.

    Raises:
        LinkRefusedError: ``.treering`` is a link.
    """
    with contextlib.suppress(OSError):
        for attempt in list_attempts(tree):
            remove_if_dead(tree, attempt, spared=lambda names: RECORD in names)
