"""A new file beside the one it will replace: invisible under that name until it is whole and durable.

The staged file is called ``.NAME.<16 hex digits>.treering-tmp``. Its writer holds a lock on it for as long as it
lives, so a later save of the same name can tell the leftover of a dead writer (the lock can be taken) from the work of
a live one (it cannot).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from typing import Self

from treering._store.failures import taken_meanwhile
from treering._store.posix import descriptors, open_descriptor
from treering._store.posix.folder import CAREFUL, NEW, NO_LINKS
from treering._store.posix.open_descriptor import OpenDescriptor
from treering.errors import StoreError

_SUFFIX = ".treering-tmp"
_TOKEN_BYTES = 8
# The longest name that the usual file systems of Linux, macOS and Windows take, in bytes.
_NAME_MAX = 255
_ATTEMPTS = 20


class StagedFile:
    """The staged file for ``target``, a context manager: left without ``commit``, it is removed."""

    def __init__(self, target: str, shown: str, *, sweep: bool = True, new: bool = False) -> None:
        """Stage beside the absolute path ``target``, which the caller calls ``shown``.

        Args:
            target: the path.
            shown: what messages call it.
            sweep: whether to look through the folder for what dead writers of the same name left.
            new: whether nothing may be there when it is put in place.
        """
        self._sweeps = sweep and descriptors.fcntl is not None
        self._target = target
        self._shown = shown
        self._put = _put_new if new else os.replace
        self._folder, name = os.path.split(target)
        self._stem = _stem(name)
        self._path: str | None = None
        self._open_folder: OpenDescriptor | None = None
        self._file = OpenDescriptor()

    @property
    def descriptor(self) -> int:
        """The open file, for writing; -1 when it is closed."""
        return self._file.number

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.callback(self._discard)
            # Opened before anything is written: after the rename, only its fsync is left to fail.
            self._open_folder = open_descriptor.open_folder(self._folder)
            if self._sweeps:
                _sweep(self._folder, self._stem)
            old = descriptors.stat_at(self._target)
            # Closed to others until it has the rights of the old file, which may be as narrow.
            self._create(0o600 if old else 0o666)
            if old:
                if not os.access(self._target, os.W_OK):
                    raise PermissionError(errno.EACCES, "it is write-protected")
                descriptors.take_over(self.descriptor, old)
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._discard()

    def commit(self) -> None:
        """Make the content durable, put it in the place of ``target``, make that durable too.

        Raises:
            OSError: nothing has changed.
            ExistsError: it had to be new, and something is there; nothing has changed.
            StoreError: the new content is in place, but may not survive a power cut.
        """
        descriptors.sync(self.descriptor)
        if descriptors.fcntl is None:  # Windows renames only what is closed
            self._file.close()
        self._rename()
        try:
            if self._open_folder is not None:
                descriptors.sync_folder(self._open_folder.number)
            self._file.close()
        except OSError as error:
            hint = "the new content is in place, but a power cut may undo it: save again when the disk works"
            raise StoreError.of(error, self._shown, "make durable", hint=hint) from error

    def _rename(self) -> None:
        if self._path is None:
            return
        try:
            self._put(self._path, self._target)
        except OSError as error:
            # On a network file system a rename may be done and only its answer lost.
            if self.descriptor < 0 or not descriptors.is_at(self.descriptor, self._target):
                if self._put is _put_new and isinstance(error, FileExistsError):
                    raise taken_meanwhile(self._shown) from error
                raise
        if self._put is _put_new:
            with contextlib.suppress(OSError):  # a sweeper knows it by its name
                os.unlink(self._path)
        self._path = None

    def _create(self, mode: int) -> None:
        for _ in range(_ATTEMPTS):
            path = os.path.join(self._folder, f".{self._stem}.{secrets.token_hex(_TOKEN_BYTES)}{_SUFFIX}")
            self._path, self._file = path, OpenDescriptor()
            self._file.open(os.open, path, NEW | CAREFUL, mode)
            if self._file.lock() is not False and descriptors.is_at(self.descriptor, path):
                return
            # A sweeper met the file between its creation and its lock, and took it for a leftover.
            self._remove()
        raise OSError(errno.EAGAIN, "other processes keep removing its staged file")

    def _remove(self) -> None:
        """Remove the staged file if it is still there: the error that brought us here says more than one from here."""
        path = self._path
        if descriptors.fcntl is None:  # Windows removes only what is closed
            with contextlib.suppress(OSError):
                self._file.close()
        if path is not None:
            with contextlib.suppress(OSError):
                os.unlink(path)
            self._path = None
        with contextlib.suppress(OSError):
            self._file.close()

    def _discard(self) -> None:
        self._remove()
        if self._open_folder is not None:
            with contextlib.suppress(OSError):
                self._open_folder.close()


def _put_new(path: str, target: str) -> None:
    """Give a file a name that nothing may have.

    Raises:
        OSError: the system refused; FileExistsError where something is there.
    """
    if descriptors.fcntl is None:  # Windows renames nothing over a file
        os.rename(path, target)
        return
    try:
        os.link(path, target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
        os.replace(path, target)


def _stem(name: str) -> str:
    """Cut ``name`` so that the name of the staged file is not too long."""
    room = _NAME_MAX - len(f"..{_SUFFIX}") - 2 * _TOKEN_BYTES
    while len(os.fsencode(name)) > room:
        name = name[:-1]
    return name


def _sweep(folder: str, stem: str) -> None:
    """Remove what dead writers of the same name left. What cannot be swept does not stand in the way of a save."""
    start = f".{stem}."
    length = len(start) + 2 * _TOKEN_BYTES + len(_SUFFIX)
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if len(name) == length and name.startswith(start) and name.endswith(_SUFFIX):
                with contextlib.suppress(OSError):
                    _sweep_one(os.path.join(folder, name))


def _sweep_one(path: str) -> None:
    # Opened for writing because NFS gives an exclusive lock to nobody else; without waiting, should it be a pipe.
    with OpenDescriptor(os.open, path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK) as opened:
        if opened.lock() and descriptors.is_at(opened.number, path):
            os.unlink(path)
