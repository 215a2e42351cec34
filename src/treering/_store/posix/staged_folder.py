"""A folder of files of other forms, made beside the path that it will have: it gets its name when all is durable."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from treering._store.api import StagedFolder
from treering._store.failures import naming, taken_meanwhile
from treering._store.pieces import write_all
from treering._store.posix import descriptors
from treering._store.posix.descriptors import OpenDescriptor
from treering._store.posix.folder import CAREFUL, NEW, make_folder, remove_folders, resolved_folder, sync_folder
from treering.errors import ExistsError, StoreError

_DIGITS = 20
_ATTEMPTS = 20


@contextlib.contextmanager
def stage_folder(path: Path, suffix: str) -> Iterator[StagedFolder]:
    """Make a folder; at the end of the block everything in it becomes durable, and then it gets its name.

    Until then it is called ``NAME``, ``suffix``, a dash and 20 digits. Its writer holds a lock on it for as long as it
    lives, so that the next one for the same path removes what a dead writer left, and nothing else.

    Args:
        path: the path that it gets; an empty folder may be there.
        suffix: what a name ends with that the program which reads the form takes for unfinished.

    Raises:
        ExistsError: something is at the path, or came there meanwhile.
        StoreError: the system refuses; nothing is at the path, unless the message says so.
    """
    shown = os.fspath(path)
    with naming(shown, "write"):
        target = resolved_folder(shown)
        _require_free(target, shown)
        made = make_folder(os.path.dirname(target))
        try:
            _sweep(target, suffix)
            staged, opened = _make(f"{target}{suffix}-")
        except BaseException:  # an interrupt too; raised again below
            remove_folders(made)
            raise
        try:
            with opened or contextlib.nullcontext():
                yield StagedFolder(staged, functools.partial(_write, staged))
                _sync_all(staged)
                _put_in_place(staged, target, shown)
        except BaseException:  # an interrupt too; raised again below
            _remove_tree(staged)
            remove_folders(made)
            raise
        try:
            sync_folder(os.path.dirname(target))
        except OSError as error:
            hint = "it is in place, but a power cut may undo it"
            raise StoreError.of(error, shown, "make durable", hint=hint) from error


def _write(staged: str, name: str, data: bytes) -> None:
    path = os.path.join(staged, *name.split("/"))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with OpenDescriptor(os.open, path, NEW | CAREFUL, 0o666) as opened:
        write_all(opened.number, memoryview(data))


def _require_free(target: str, shown: str) -> None:
    if os.path.isdir(target) and not os.listdir(target):
        return
    if os.path.lexists(target):
        hint = "such a folder cannot be replaced in one step; save to another path, or remove it"
        raise ExistsError(f"{shown!r} exists", hint=hint)


def _make(start: str) -> tuple[str, OpenDescriptor | None]:
    """Return a new folder, and what holds its lock."""
    for _ in range(_ATTEMPTS):
        path = f"{start}{int.from_bytes(os.urandom(16)) % 10**_DIGITS:0{_DIGITS}}"
        os.mkdir(path)
        opened = descriptors.open_folder(path)
        # A sweeper may have met it before it had its lock, and removed it.
        if opened is None or (opened.lock() is not False and descriptors.is_at(opened.number, path)):
            return path, opened
        opened.close()
        with contextlib.suppress(OSError):
            os.rmdir(path)
    raise OSError(errno.EAGAIN, "other processes keep removing its staged folder")


def _sweep(target: str, suffix: str) -> None:
    """Remove what dead writers of the same path left. What cannot be swept does not stand in the way of a save."""
    above, name = os.path.split(target)
    ours = re.compile(f"{re.escape(name + suffix)}-[0-9]{{{_DIGITS}}}")
    with contextlib.suppress(OSError):
        for left in filter(ours.fullmatch, os.listdir(above)):
            path = os.path.join(above, left)
            with contextlib.suppress(OSError), descriptors.open_folder(path) or contextlib.nullcontext() as opened:
                if opened is not None and opened.lock() and descriptors.is_at(opened.number, path):
                    _remove_tree(path)


def _remove_tree(path: str) -> None:
    import shutil  # what only reads starts sooner without it

    shutil.rmtree(path, ignore_errors=True)


def _sync_all(folder: str) -> None:
    """Make everything in a folder durable, its own names last."""
    for place, _, files in os.walk(folder, topdown=False, onerror=_refuse):
        for file in files:
            with OpenDescriptor(os.open, os.path.join(place, file), os.O_RDWR | CAREFUL) as opened:
                descriptors.sync(opened.number)
        sync_folder(place)


def _refuse(error: OSError) -> NoReturn:
    """Raise what the system says of a folder that cannot be listed: nothing in it would be durable."""
    raise error


def _put_in_place(staged: str, target: str, shown: str) -> None:
    try:
        if os.name == "nt" and os.path.isdir(target):  # Windows renames nothing over a folder
            os.rmdir(target)
        os.rename(staged, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise taken_meanwhile(shown) from error
        raise
