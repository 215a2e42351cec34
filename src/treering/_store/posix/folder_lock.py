"""The right to write into a folder, held by one saver at a time.

The lock is on the folder itself, so nothing lies about and whatever ends its holder ends it. Where folders cannot be
locked, a lock file stands for it: its being there is the lock. Windows removes it with its holder; elsewhere somebody
has to, after a crash.
"""

from __future__ import annotations

import contextlib
import os

from treering._store.posix.folder import Folder
from treering._store.posix.open_descriptor import OpenDescriptor
from treering._values.checkpoint_names import LOCK_FILE


class FolderLock:
    """The lock of one open folder."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._file = OpenDescriptor()  # that of the lock file, where folders cannot be locked

    def take(self) -> bool:
        """Take the lock without waiting; False when somebody else holds it.

        Raises:
            OSError: the system refused to say.
        """
        answer = self._folder.lock()
        if answer is not None:
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
