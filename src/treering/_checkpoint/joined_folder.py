"""Saving into a checkpoint's folder that process 0 of the job has entered: data files of its attempt, and notes.

Whoever joins takes no lock and makes no journal: those of process 0 stand for the attempt. It removes what it wrote
itself, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from treering._coordination.message_board import MessageBoard, PathMessageBoard
from treering._store.failures import naming
from treering._store.pieces import Buffer
from treering._store.posix.folder import Folder
from treering._store.posix.folders import make_folder, remove_folders, resolved_folder
from treering._store.posix.new_file import require_data_name, write_new_file
from treering._values.checkpoint_names import INDEX


class JoinedFolder:
    """The part of one process in the save of another, a context manager. Nothing is opened before it is needed.

    Attributes:
        board: the messages in the folder that is at the path.

    Args:
        path: the folder that process 0 makes.
        attempt: the attempt that process 0 has announced.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp())
        >>> with JoinedFolder(path, "0123456789abcdef") as joined:
        ...     joined.write_file("data-0123456789abcdef-00001-of-00002.safetensors", [b"tree"], 4)
        ...     joined.make_durable()
        >>> [entry.name for entry in path.iterdir()]
        ['data-0123456789abcdef-00001-of-00002.safetensors']
    """

    def __init__(self, path: Path, attempt: str) -> None:
        self.board: MessageBoard = PathMessageBoard(os.fspath(path))
        self._attempt = attempt
        self._shown = os.fspath(path)
        self._folder: Folder | None = None
        self._old: os.stat_result | None = None
        self._written: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()

    def make(self) -> None:
        """Make the folder, if process 0 has not: to leave a note there for process 0, should it come yet.

        Raises:
            OSError: the system refused.
        """
        make_folder(resolved_folder(self._shown))

    def require_space(self, size: int) -> None:
        """Refuse early what cannot fit.

        Raises:
            StoreFailed: the file system has fewer than ``size`` bytes free, or there is no folder.
        """
        with naming(self._shown, "write"):
            self._opened().require_space(size)

    def write_file(self, name: str, buffers: Iterable[Buffer], size: int) -> None:
        """Write a data file as `CheckpointFolder.write_file` does.

        Raises:
            StoreFailed: the system refused, or the buffers hold another number of bytes.
            ValueError: the name is not one of this attempt.
        """
        require_data_name(self._attempt, name)
        with naming(self._shown, "write"):
            folder = self._opened()
            self._written.append(name)
            try:
                write_new_file(folder, name, buffers, size, self._old)
            except FileExistsError:
                self._written.remove(name)  # somebody else's
                raise

    def make_durable(self) -> None:
        """Make the names of the written files durable; their content is.

        Raises:
            StoreFailed: the system refused.
        """
        with naming(self._shown, "write"):
            self._opened().sync()

    def withdraw(self) -> None:
        """Remove what was written here, as far as that goes; the journal of process 0 is the proof for the rest."""
        written, self._written = self._written, []
        if self._folder is not None:
            for name in written:
                with contextlib.suppress(OSError):  # the others may go all the same
                    self._folder.remove(name)

    def _opened(self) -> Folder:
        if self._folder is None:
            folder = Folder(resolved_folder(self._shown))
            try:
                self._old = folder.find(INDEX)
            except BaseException:  # an interrupt too: the descriptor must not leak; raised again below
                folder.close()
                raise
            self._folder = folder
        return self._folder


class TellingFolder:
    """A folder in which process 0 says that it could not enter: made for that if it is not there, a context manager.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "ckpt")
        >>> with TellingFolder(path) as telling:
        ...     telling.board.put(".treering-0123456789abcdef-verdict", b"refused")
        ...     telling.board.remove(".treering-0123456789abcdef-verdict")
        >>> path.exists()
        False
    """

    def __init__(self, path: Path) -> None:
        self.board: MessageBoard = PathMessageBoard(os.fspath(path))
        self._shown = os.fspath(path)
        self._made: list[str] = []

    def __enter__(self) -> Self:
        with naming(self._shown, "write"):
            self._made = make_folder(resolved_folder(self._shown))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        remove_folders(self._made)
