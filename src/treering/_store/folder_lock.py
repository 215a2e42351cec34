"""The right to write into a folder, held by one saver at a time.

The lock is on the folder itself, so nothing lies about and whatever ends its holder ends it. Where folders cannot be
locked, a lock file stands for it: its being there is the lock. Windows removes it with its holder; elsewhere somebody
has to, after a crash.
"""

from __future__ import annotations

import contextlib
import os

from treering._store import descriptors
from treering._store.folder import Folder

__all__ = ["LOCK_FILE", "FolderLock"]

LOCK_FILE = ".treering.lock"


class FolderLock:
    """The lock of one open folder."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._file: int | None = None
        self._locked = False

    @property
    def held(self) -> bool:
        """Whether it is ours."""
        return self._locked or self._file is not None

    def take(self) -> bool:
        """Take the lock without waiting; False when somebody else holds it.

        Raises:
            OSError: the system refused to say.
        """
        if self._folder.descriptor is not None:
            answer = descriptors.lock(self._folder.descriptor)
            if answer is not None:
                self._locked = answer
                return answer
        with contextlib.suppress(FileExistsError):
            self._file = self._folder.create(LOCK_FILE, flags=getattr(os, "O_TEMPORARY", 0))
        return self._file is not None

    def give_back(self) -> None:
        """Let others have it; the folder is still open."""
        descriptor, self._file = self._file, None
        if descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)
            with contextlib.suppress(OSError):
                self._folder.remove(LOCK_FILE)
        if self._locked and self._folder.descriptor is not None:
            descriptors.unlock(self._folder.descriptor)
        self._locked = False
