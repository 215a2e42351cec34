"""Reading a checkpoint's folder: the index, and the data files that it names, from nowhere else."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from treering._store.failures import DataFileMissing, LinkRefused
from treering._store.posix.folder import Folder
from treering._store.posix.folders import resolved_folder
from treering._store.posix.open_descriptor import OpenDescriptor
from treering._store.posix.reading import LocalFile
from treering._values.checkpoint_names import INDEX, attempt_of_tombstone
from treering._values.human import pluralize
from treering.errors import Corrupt, Format, NotFound, StoreFailed

LARGEST_INDEX = 2 << 30
"""No index is larger than this many bytes."""

# How the cache of the Hugging Face hub stores a snapshot's files: content by hash, beside the snapshots.
# https://huggingface.co/docs/huggingface_hub/guides/manage-cache
_HUB_LINK = re.compile(r"((?:\.\./){2,})blobs/([0-9a-f]{40}(?:[0-9a-f]{24})?)")
_SHOWN_NAMES = 5
_NO_NAMES = frozenset({"", ".", ".."})


class OpenFolder:
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
            self._folder = Folder(resolved_folder(os.fspath(path)))
        except OSError as error:
            raise StoreFailed.of(error, path, "read") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the folder; files opened from it stay open."""
        self._folder.close()

    def read_index(self) -> bytes:
        """Return the bytes of the index.

        Raises:
            NotFound: there is none; the hint says what is there instead.
            LinkRefused: it is a link.
            Format: it is larger than any index.
            StoreFailed: the system refuses.
        """
        try:
            return index_bytes(self._folder, self.path / INDEX)
        except NotFound as error:
            message = f"there is no checkpoint in {os.fspath(self.path)!r}: it has no {INDEX!r}"
            raise _not_found(NotFound(message, hint=self._what_is_there()), self.path) from error

    def open_files(self, names: Iterable[str]) -> dict[str, LocalFile]:
        """Open files by name, all or none; the caller closes them.

        Raises:
            DataFileMissing: one is not there.
            LinkRefused: one is a link.
            Corrupt: a name leads elsewhere.
            StoreFailed: the system refuses.
        """
        files: dict[str, LocalFile] = {}
        try:
            for name in names:
                if name not in files:
                    files[name] = self._open(name)
        except BaseException:  # an interrupt too: all or none stay open; raised again below
            for file in files.values():
                file.close()
            raise
        return files

    def _open(self, name: str) -> LocalFile:
        if name in _NO_NAMES or not {"/", "\\", "\0", ":"}.isdisjoint(name):
            raise Corrupt(f"{os.fspath(self.path)!r} names a file outside of it: {name!r}")
        try:
            return opened(self._folder, name, self.path / name)
        except NotFound as error:
            missing = DataFileMissing(f"{name!r} is missing in {os.fspath(self.path)!r}")
            missing.name = name
            raise _not_found(missing, self.path / name) from error

    def _what_is_there(self) -> str:
        """Say what is in the folder, checkpoints first."""
        try:
            names = sorted(self._folder.names())
        except OSError as error:
            return f"what is there cannot be read: {error.strerror}"
        if not names:
            return "it is empty"
        checkpoints = [name for name in names if os.path.lexists(os.path.join(self._folder.path, name, INDEX))]
        if checkpoints:
            return f"there are checkpoints in it: {shown_names(checkpoints)}"
        if any(attempt_of_tombstone(name) for name in names):
            return "it holds the remains of one that was removed"
        if any(name.startswith(f".{INDEX}.") for name in names):
            return "it holds the files of a save that is running, or did not end; try again"
        return f"it holds {shown_names(names)}"


def index_bytes(folder: Folder, path: Path, name: str = INDEX) -> bytes:
    """Return the bytes of the index in an open folder, which the caller calls ``path``.

    Args:
        folder: the folder.
        path: what the caller calls the index.
        name: its name in the folder; one that was removed has another.

    Raises:
        NotFound: there is none.
        LinkRefused: it is a link.
        Format: it is larger than any index.
        StoreFailed: the system refuses.
    """
    with opened(folder, name, path) as file:
        if file.size > LARGEST_INDEX:
            raise Format(f"{os.fspath(path)!r} has {pluralize(file.size, 'bytes')}: no index is that large")
        return file.read(0, file.size)


def opened(folder: Folder, name: str, path: Path) -> LocalFile:
    """Open a file of an open folder for reading.

    Raises:
        NotFound: it is not there.
        LinkRefused: it is a link that leads anywhere else than into the blobs of a hub snapshot.
        StoreFailed: the system refuses.
    """

    def opener(flags: int) -> OpenDescriptor:
        try:
            return folder.open(name, flags)
        except OSError as error:
            found = folder.find(name)
            if found is None or not stat.S_ISLNK(found.st_mode):
                raise
            return _open_blob(folder, name, flags, error)

    try:
        return LocalFile(path, opener)
    except StoreFailed as error:
        if error.errno == errno.ELOOP:
            hint = "copy the files themselves there (cp -L)"
            raise LinkRefused(f"{os.fspath(path)!r} is a link, which may lead anywhere", hint=hint) from error
        raise


def _open_blob(folder: Folder, name: str, flags: int, refused: OSError) -> OpenDescriptor:
    """Open what a link leads to: ``../../blobs/<hash>`` seen from ``snapshots/<revision>/``, or deeper below it."""
    found = _HUB_LINK.fullmatch(folder.link_text(name).replace(os.sep, "/"))
    if found is None:
        raise refused
    levels = found[1].count("/")
    parts = Path(folder.path).parts
    if len(parts) <= levels or parts[-levels] != "snapshots":
        raise refused
    blobs = os.path.join(*parts[:-levels], "blobs")
    if os.path.islink(blobs):
        raise refused
    with Folder(blobs) as below:
        return below.open(found[2], flags)


def _not_found(error: NotFound, path: Path) -> NotFound:
    error.errno = errno.ENOENT
    error.strerror = os.strerror(errno.ENOENT)
    error.filename = os.fspath(path)
    return error


def shown_names(names: list[str]) -> str:
    """Return the first few names, as a sentence shows them."""
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(map(repr, names[:_SHOWN_NAMES])) + more
