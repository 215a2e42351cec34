"""New files in a checkpoint's folder; and the folder as a process sees it that joins the save of process 0.

Whoever joins takes no lock and makes no journal: those of process 0 stand for the attempt. It removes what it wrote
itself, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from treering._coordination.message_board import MessageBoard, PathMessageBoard
from treering._store.api import Store, Version
from treering._store.closable import Closable
from treering._store.failures import naming
from treering._store.pieces import Buffer
from treering._store.resolve import store_at
from treering._values.checkpoint_names import INDEX, require_data_name


class AttemptFiles(Closable):
    """The new data files of one attempt.

    Args:
        path: the folder.
        attempt: the attempt.

    Attributes:
        attempt: 16 hexadecimal digits; data files are called ``data-<attempt>-NNNNN-of-NNNNN.safetensors``.
    """

    def __init__(self, path: Path, attempt: str) -> None:
        self.attempt = attempt
        self._shown = os.fspath(path)
        self._store = store_at(path)
        self._opened = False
        self._old: Version | None = None
        self._written: list[str] = []

    def require_space(self, size: int) -> None:
        """Refuse early what cannot fit.

        Raises:
            StoreFailed: the file system has fewer than ``size`` bytes free, or there is no folder.
        """
        with naming(self._shown, "write"):
            self._open_store().require_space(size)

    def write_file(self, name: str, buffers: Iterable[Buffer], size: int) -> None:
        """Write the new file ``name``, durable but for its name, as the concatenation of ``buffers``.

        Args:
            name: a name of this attempt.
            buffers: C-contiguous buffers of any item type, asked for one after the other.
            size: how many bytes the buffers hold together.

        Raises:
            StoreFailed: the system refused, or the buffers hold another number of bytes.
            ValueError: the name is not one of this attempt.
        """
        require_data_name(self.attempt, name)
        with naming(self._shown, "write"):
            store = self._open_store()
            self._written.append(name)
            try:
                store.create(name, buffers, size, like=self._old)
            except FileExistsError:
                self._written.remove(name)  # somebody else's
                raise

    def _open_store(self) -> Store:
        if not self._opened:
            raise RuntimeError("the with block has not begun, or is over")
        return self._store


class JoinedFolder(AttemptFiles):
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
        super().__init__(path, attempt)
        self.board: MessageBoard = PathMessageBoard(self._shown)

    def close(self) -> None:
        """Close the folder; what was written stays."""
        self._opened = False
        self._store.close()

    def make(self) -> None:
        """Make the folder, if process 0 has not: to leave a note there for process 0, should it come yet.

        Raises:
            OSError: the system refused.
        """
        self._store.make()

    def make_durable(self) -> None:
        """Make the names of the written files durable; their content is.

        Raises:
            StoreFailed: the system refused.
        """
        with naming(self._shown, "write"):
            self._open_store().flush()

    def withdraw(self) -> None:
        """Remove what was written here, as far as that goes; the journal of process 0 is the proof for the rest."""
        written, self._written = self._written, []
        if self._opened:
            for name in written:
                with contextlib.suppress(OSError):  # the others may go all the same
                    self._store.remove(name)

    def _open_store(self) -> Store:
        if not self._opened:
            self._store.open()
            self._opened = True
            found = self._store.find(INDEX)
            self._old = None if found is None else found.version
        return self._store


@contextlib.contextmanager
def refusing_board(path: Path) -> Iterator[MessageBoard]:
    """Give the board of a folder that process 0 could not enter; made for that, and removed, if it is not there.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "ckpt")
        >>> with refusing_board(path) as board:
        ...     board.put(".treering-0123456789abcdef-verdict", b"refused")
        ...     board.remove_all((".treering-0123456789abcdef-verdict",))
        >>> path.exists()
        False
    """
    store = store_at(path)
    with naming(os.fspath(path), "write"):
        store.make()
    try:
        yield PathMessageBoard(os.fspath(path))
    finally:
        store.unmake()
