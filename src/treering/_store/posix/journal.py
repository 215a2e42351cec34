"""The index of an attempt before it is the index of the checkpoint.

An empty journal is made before any data file. As long as it is there, it proves that the data files of its attempt
are an unfinished save. It becomes the index by being given that name, which is the commit.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from treering._store.api import Claim, Outcome, Version
from treering._store.pieces import write_all
from treering._store.posix import descriptors
from treering._store.posix.folder import NO_LINKS, Folder
from treering._store.posix.open_descriptor import OpenDescriptor
from treering._store.posix.reading import stat_of

if TYPE_CHECKING:
    from treering._store.posix.store import PosixStore


class Journal(Claim):
    """The journal of one attempt: its lock says that its writer lives, and it becomes the index by its name."""

    def __init__(self, store: PosixStore, name: str, index: str, base: Version | None) -> None:
        """Nothing is made yet; `make` does that.

        Args:
            store: where.
            name: its name.
            index: the name that it gets.
            base: the index that it will replace, whose rights it takes over; None for none.
        """
        self._store, self._folder = store, store.folder
        self._name, self._index = name, index
        self._base = base
        self._identity: os.stat_result | None = None
        self._done = False
        self._file = OpenDescriptor()

    def make(self) -> None:
        """Make and lock it; its name is durable before any data file's.

        Raises:
            OSError: the system refused, or a sweeper on another machine took it for a leftover.
        """
        old = stat_of(self._base)
        self._folder.create(self._name, 0o600 if old else 0o666, into=self._file)
        try:
            self._lock()
            if old:
                descriptors.take_over(self._file.number, old)
        except BaseException:  # an interrupt too: no journal without its writer; raised again below
            self.withdraw()
            raise
        if self._base is None:
            self._store.sync_above()
        self._folder.sync()

    def prepare(self, data: bytes) -> None:
        """Write the index into it, durably; the names of the data are durable before the index is."""
        write_all(self._file.number, memoryview(data))
        descriptors.sync(self._file.number)
        self._folder.sync()

    def commit(self) -> Outcome:
        """Link it where nothing was, else rename it over what was there."""
        self._identity = os.fstat(self._file.number)
        if descriptors.fcntl is None:  # Windows renames only what is closed
            self.close()
        try:
            self._become_first() if self._base is None else self._rename()
        except FileExistsError:
            return Outcome.LOST
        return Outcome.DONE

    def committed(self) -> bool:
        """Whether it has become the index of the folder.

        Raises:
            OSError: that cannot be known now.
        """
        if self._done or self._identity is None:
            return self._done
        found = self._folder.find(self._index)
        return found is not None and os.path.samestat(found, self._identity)

    def withdraw(self) -> None:
        """Remove it, if it can be, and let go of it."""
        if descriptors.fcntl is None:  # Windows removes only what is closed
            self.close()
        with contextlib.suppress(OSError):
            self._folder.remove(self._name)
        self.close()

    def close(self) -> None:
        """Let go of the file, and of its lock. May be called twice."""
        with contextlib.suppress(OSError):  # all that matters was synced
            self._file.close()

    def _lock(self) -> None:
        """Hold it as long as we live: folders of network file systems are locked for one machine only."""
        if self._file.lock() is False or self._folder.find(self._name) is None:
            raise FileNotFoundError(errno.ENOENT, "another machine removed it before it was locked")

    def _become_first(self) -> None:
        """Commit where no index is.

        Raises:
            FileExistsError: there is one now.
            OSError: the system refused.
        """
        try:
            self._folder.link(self._name, self._index)
            self._done = True
        except OSError as error:
            if self.committed():  # done, and only the answer was lost
                pass
            elif error.errno not in NO_LINKS:
                raise
            elif self._folder.find(self._index) is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
            else:
                # Without hard links the lock alone keeps a second saver out between that look and this step.
                self._rename()
                return
        with contextlib.suppress(OSError):  # as another name of the index it proves nothing any more
            self._folder.remove(self._name)

    def _rename(self) -> None:
        try:
            self._folder.replace(self._name, self._index)
            self._done = True
        except OSError:
            if not self.committed():
                raise


def remove_leftover(folder: Folder, journal: str, data: Sequence[str], name: str) -> bool:
    """Remove what a dead attempt left: its data files, then its journal, which is the proof that they may go.

    What cannot be removed stays, and does not stand in the way of a save.

    Args:
        folder: where.
        journal: the name of its journal.
        data: those of its data files.
        name: what the index is called.

    Returns:
        False when the attempt is not dead: its journal is locked.
    """
    # Opened for writing because NFS locks nothing else; without waiting, should it be a pipe.
    flags = os.O_WRONLY | getattr(os, "O_NONBLOCK", 0)
    with contextlib.suppress(OSError), folder.open(journal, flags) as opened:
        if opened.lock() is False:
            return False
        index = folder.find(name)
        # A power cut between the two steps of a commit leaves both names on one file: then it is no leftover.
        if index is None or not os.path.samestat(index, os.fstat(opened.number)):
            for one in data:
                folder.remove(one)
        if descriptors.fcntl is None:  # Windows removes only what is closed
            opened.close()
        folder.remove(journal)
    return True
