"""The system's refusals, told with the path that the caller named and with what to do."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from treering import errors
from treering._printable import show_path
from treering._values.checkpoint_names import INDEX
from treering._values.leaves_names import INDEX as LEAVES_INDEX

_Error = TypeVar("_Error", bound=OSError)

_HINTS = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EFBIG: "the file system or the limit of this process (ulimit -f) allows no file of that size",
    errno.EACCES: "the folder must be readable and writable, and so must the file if there is one",
    errno.EPERM: "the folder must be readable and writable, and so must the file if there is one",
    errno.EROFS: "use a folder on a file system that is not mounted read-only",
    errno.EMFILE: "this process has too many files open",
    errno.EISDIR: "pass the name of a file in that folder",
    errno.EBUSY: "a file that is a mount point cannot be replaced: save beside it",
}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


class naming:  # noqa: N801 - reads as a function; a generator would cost each of ten thousand leaves a microsecond
    """Turn every ``OSError`` of the block into a ``StoreError`` that names ``shown``; our own errors pass.

    Raises:
        StoreError: the system refused something in the block.
    """

    __slots__ = ("_action", "_shown")

    def __init__(self, shown: str, action: str) -> None:
        self._shown = shown
        self._action = action

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, errors.TreeringError):
            reading = self._action == "read" and error.errno != errno.EMFILE  # the other hints are about writing
            hint = None if reading else _hint(error.errno or 0, self._shown)
            # A server's answer is told in full by the message; what led to it is of no use to a reader.
            cause = None if "://" in self._shown else error
            raise errors.StoreError.of(error, self._shown, self._action, hint=hint) from cause


def _hint(reason: int, shown: str) -> str | None:
    if "://" in shown:
        return None  # of folders and files; a bucket says more itself
    if (hint := _HINTS.get(reason)) and reason in _NO_ROOM and _holds_something(shown):
        return f"{hint}; the path is unchanged"
    return hint


def _holds_something(path: str) -> bool:
    """Whether a file or a checkpoint is there; a folder without an index is perhaps the one that we have just made."""
    if os.path.isdir(path):
        return any(os.path.lexists(os.path.join(path, index)) for index in (INDEX, LEAVES_INDEX))
    return os.path.lexists(path)


def with_errno(error: _Error, number: int, path: str | os.PathLike[str]) -> _Error:
    """Return an error of our own with what Python's programs read in it: errno, its text, and the path.

    Example:
        >>> with_errno(errors.StoreError("there is no index"), errno.ENOENT, "ckpt").filename
        'ckpt'
    """
    error.errno, error.strerror, error.filename = number, os.strerror(number), show_path(os.fspath(path))
    return error


def missing_error(shown: str, name: str, what: str | None = None) -> errors.DataFileMissingError:
    """Return the error for a file that is not where it should be; ``what`` says more of it."""
    error = errors.DataFileMissingError(what or f"{shown!r} is missing")
    error.name = name
    return with_errno(error, errno.ENOENT, shown)


def link_error(shown: str) -> errors.LinkRefusedError:
    """Return the error for a link where only files and folders may be."""
    hint = "put a file or folder of its own in its place (cp -L)"
    return errors.LinkRefusedError(f"{shown!r} is a link, which may lead anywhere", hint=hint)


def busy_error(shown: str, what: str, hint: str | None = None) -> errors.BusyError:
    """Return the error for a save that other processes did not let in."""
    return with_errno(errors.BusyError(f"could not write {shown!r}: {what}", hint=hint), errno.EBUSY, shown)


def checkpoint_error(shown: str) -> errors.ExistsError:
    """Return the error for leaves that are saved where a checkpoint is: a reader would see only one of two forms."""
    error = errors.ExistsError(
        f"a checkpoint of treering.save is at {shown!r} already", hint="save to a directory of its own"
    )
    return with_errno(error, errno.EEXIST, shown)


def taken_meanwhile(shown: str) -> errors.ExistsError:
    """Return the error for a new file whose name another writer took while it was being written.

    Example:
        >>> taken_meanwhile("a.msgpack").message
        "'a.msgpack' was saved by another writer meanwhile"
    """
    hint = "nothing was changed; load it, save to another path, or overwrite it"
    return errors.ExistsError(f"{shown!r} was saved by another writer meanwhile", hint=hint)


@contextlib.contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Put a file's name in front of what is wrong with its content.

    Example:
        >>> with naming_file(Path("treering.json")):
        ...     raise errors.CorruptError("it is cut short")
        Traceback (most recent call last):
            ...
        treering.errors.CorruptError: 'treering.json': it is cut short
    """
    try:
        yield
    except errors.TreeringError as error:
        if isinstance(error, errors.CorruptError | errors.FormatError) and repr(os.fspath(path)) not in error.message:
            named = error.message.startswith(f"{path.name} ")
            rest = error.message.removeprefix(path.name) if named else f": {error.message}"
            error.message = f"{show_path(os.fspath(path))!r}{rest}"
        raise
