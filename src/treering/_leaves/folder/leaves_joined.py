"""A joint save into a leaves directory as the processes other than process 0 see it: they write, and commit nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from treering._leaves.folder.staged_files import StagedFiles
from treering._store.failures import LinkRefused, naming
from treering._store.posix.folder import Folder
from treering._store.posix.folder_tree import FolderTree
from treering._store.posix.folders import resolved_folder
from treering._values.leaves_names import ATTEMPTS

# A network file system may show a note before it shows the folder that was made before the note.
_PATIENCE: Final = 10.0
_PAUSE: Final = 0.02


class JoinedLeaves(StagedFiles):
    """What this process writes for an attempt whose folder process 0 has made and locked. A context manager.

    Args:
        path: the directory.
        attempt: the attempt.

    Raises:
        StoreFailed: the system refused, or the folder of the attempt is not there.
        LinkRefused: ``.treering`` there is a link.
    """

    def __init__(self, path: Path, attempt: str) -> None:
        super().__init__(os.fspath(path))
        with naming(self._shown, "write"), contextlib.ExitStack() as undo:
            folder = undo.enter_context(Folder(resolved_folder(self._shown)))
            tree = FolderTree(folder, self._shown)
            undo.callback(tree.close)
            self._opened(folder, tree, attempt)
            self._found = self._awaited()
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give everything back; the files stay. May be called twice."""
        folder, self._folder = self._folder, None
        if folder is not None:
            self._tree.close()
            folder.close()

    def path_of(self, folder: str) -> str:
        """Return the absolute path of a leaf's staged folder, for a manager of jax to write to.

        Raises:
            Unsupported: the folder's path is longer than the system takes.
        """
        return os.path.join(self._open_folder.path, *self._staged, *self._parts_of(folder))

    def make_durable(self) -> None:
        """Make what this process has written durable, and see that it lies where process 0 will look for it.

        Raises:
            StoreFailed: the system refused, or the folder of the attempt was removed meanwhile: process 0 is dead or
                has given up, and another saver swept what it left.
        """
        with naming(self._shown, "write"):
            self._sync_written()
            self._tree.forget(())
            found = self._attempt_found()
            if found is None or not os.path.samestat(found, self._found):
                raise _removed()

    def withdraw(self) -> None:
        """Remove the files that this process has written, as far as that goes.

        Folders are left to process 0, or to the next save: others may be about to write into them.
        """
        for parts, names in self._names.items():
            with contextlib.suppress(OSError, LinkRefused):
                self._tree.remove((*self._staged, *parts), *names)

    def _awaited(self) -> os.stat_result:
        deadline = time.monotonic() + _PATIENCE
        while (found := self._attempt_found()) is None:
            if time.monotonic() >= deadline:
                raise _removed()
            time.sleep(_PAUSE)
        return found

    def _attempt_found(self) -> os.stat_result | None:
        return self._tree.find((ATTEMPTS,), self.attempt)


def _removed() -> OSError:
    return OSError(errno.ESTALE, "the folder of this save was removed while it was written: process 0 gave up or died")
