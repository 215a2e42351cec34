"""Reading a checkpoint's folder: the index, and the data files that it names, from nowhere else."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path

from treering._store.api import LARGEST_DOCUMENT, Closable, Document, Reader, Store
from treering._store.failures import DataFileMissing, with_errno
from treering._store.resolve import opened_store
from treering._values.checkpoint_names import INDEX, attempt_of_tombstone
from treering._values.human import pluralize
from treering.errors import Corrupt, Format, NotFound, StoreFailed

_SHOWN_NAMES = 5
_NO_NAMES = frozenset({"", ".", ".."})


class OpenFolder(Closable):
    """A checkpoint's folder open for reading, a context manager. It takes no lock.

    Everything is looked up in the folder that was opened, links there are refused, and files once open stay whole
    whatever a later save does.

    Raises:
        NotFound: nothing is at the path.
        StoreFailed: a file is there, or the system refuses.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (path / "treering.json").write_bytes(b"{}")
        >>> with OpenFolder(path) as folder:
        ...     folder.read_index()
        b'{}'
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._store = opened_store(path)
        except OSError as error:
            raise StoreFailed.of(error, path, "read") from error

    def close(self) -> None:
        """Close the folder; files opened from it stay open."""
        self._store.close()

    def read_index(self) -> bytes:
        """Return the bytes of the index.

        Raises:
            NotFound: there is none; the hint says what is there instead.
            LinkRefused: it is a link.
            Format: it is larger than any index.
            StoreFailed: the system refuses.
        """
        try:
            return index_document(self._store).data
        except NotFound as error:
            message = f"there is no checkpoint in {os.fspath(self.path)!r}: it has no {INDEX!r}"
            raise with_errno(NotFound(message, hint=self._what_is_there()), errno.ENOENT, self.path) from error

    def open_files(self, names: Iterable[str]) -> dict[str, Reader]:
        """Open files by name, all or none; the caller closes them.

        Raises:
            DataFileMissing: one is not there.
            LinkRefused: one is a link.
            Corrupt: a name leads elsewhere.
            StoreFailed: the system refuses.
        """
        with contextlib.ExitStack() as undo:
            files = {name: undo.enter_context(self._open(name)) for name in dict.fromkeys(names)}
            undo.pop_all()
        return files

    def _open(self, name: str) -> Reader:
        if name in _NO_NAMES or not {"/", "\\", "\0", ":"}.isdisjoint(name):
            raise Corrupt(f"{os.fspath(self.path)!r} names a file outside of it: {name!r}")
        try:
            return self._store.open_file(name)
        except NotFound as error:
            missing = DataFileMissing(f"{name!r} is missing in {os.fspath(self.path)!r}")
            missing.name = name
            raise with_errno(missing, errno.ENOENT, self.path / name) from error

    def _holds_index(self, name: str) -> bool:
        try:
            return self._store.find(f"{name}/{INDEX}") is not None
        except OSError:
            return False

    def _what_is_there(self) -> str:
        """Say what is in the folder, checkpoints first."""
        try:
            names = sorted(self._store.names())
        except OSError as error:
            return f"the content cannot be read: {error.strerror}"
        if not names:
            return "it is empty"
        checkpoints = [name for name in names if self._holds_index(name)]
        if checkpoints:
            return f"there are checkpoints in it: {shown_names(checkpoints)}"
        if any(attempt_of_tombstone(name) for name in names):
            return "it holds the remains of one that was removed"
        if any(name.startswith(f".{INDEX}.") for name in names):
            return "it holds the files of a save that is running or was interrupted; try again"
        return f"it holds {shown_names(names)}"


def index_document(store: Store, name: str = INDEX) -> Document:
    """Return the index in an open store.

    Args:
        store: the place.
        name: its name there; one that was removed has another.

    Raises:
        NotFound: there is none.
        LinkRefused: it is a link.
        Format: it is larger than any index.
        StoreFailed: the system refuses.
    """
    with store.open_file(name) as file:
        if file.size > LARGEST_DOCUMENT:
            path = os.fspath(store.path / name)
            raise Format(f"{path!r} has {pluralize(file.size, 'bytes')}: no index is that large")
        return Document(file.read(0, file.size), file.version)


def shown_names(names: list[str]) -> str:
    """Return the first few names, as a sentence shows them."""
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(map(repr, names[:_SHOWN_NAMES])) + more
