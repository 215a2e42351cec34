"""Removing a step, and finishing what others did not: the removal of a step, or a save that died.

The step is gone with one rename: its index becomes a tombstone, which lists the files that may go. Whoever comes later
finds it and goes on. ``docs/spec/run.md`` is the specification.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from treering._checkpoint.tombstones import finish_removals
from treering._coordination.message_board import FolderMessageBoard, stale_messages
from treering._store.failures import LinkRefused, naming
from treering._store.open_folder import index_bytes
from treering._store.posix.folder import Folder
from treering._store.posix.folder_lock import FolderLock
from treering._store.posix.journal import remove_leftover
from treering._store.run_folder import RunFolder, step_name
from treering._values import checkpoint_names
from treering._values.checkpoint_names import INDEX
from treering._values.telemetry import report
from treering.errors import Busy, TreeringError

NamesIn: TypeAlias = Callable[[bytes], Sequence[str]]
"""Gives the names of all data files that an index mentions; its own errors mean a damaged index."""


def remove_step(run: RunFolder, step: int, names_in: NamesIn, attempt_of: Callable[[bytes], str | None]) -> bool:
    """Remove a step: its index, the files that it lists, and its folder if nothing else is in it.

    Once the index is gone, so is the step. After an error the rest is left for whoever comes next.

    Args:
        run: the run's folder.
        step: the step.
        names_in: gives the names of all data files that an index mentions.
        attempt_of: gives the attempt of the step's index; None when this is not the index that should go.

    Returns:
        False when there is no such step, or it should not go.

    Raises:
        Busy: somebody is saving to it.
        LinkRefused: its index is a link.
        StoreFailed: the system refused.
        TreeringError: what ``attempt_of`` raises; nothing has changed.
    """
    shown = run.path / step_name(step)
    opened = run.open_step(step)
    if opened is None:
        return False
    with opened, _locked(opened, os.fspath(shown)) as folder:
        if folder is None:
            return False
        _tidy(folder, shown, names_in)
        old = folder.find(INDEX)
        if old is None:
            return False
        if not stat.S_ISREG(old.st_mode):
            raise LinkRefused(f"{os.fspath(shown / INDEX)!r} is not a file of its own", hint="remove it by hand")
        attempt = attempt_of(index_bytes(folder, shown / INDEX))
        if attempt is None:
            return False
        with report("remove", shown):
            _bury(folder, checkpoint_names.tombstone_of(attempt), old)
        _tidy(folder, shown, names_in)
        _sweep_messages(folder, folder.names(), _none_lives)
    return True


def tidy_step(run: RunFolder, step: int, names_in: NamesIn, *, newest: bool = True) -> None:
    """Finish in a step's folder what others did not: removals, and saves that died. An empty folder goes.

    Args:
        run: the run's folder.
        step: the step.
        names_in: gives the names of all data files that an index mentions.
        newest: whether it is the newest one, of which processes that were late may still read how its save ended. What
            they wrote to each other about an older one that is saved goes: nobody saves there again and sweeps it.

    Raises:
        Busy: somebody is saving to it.
        StoreFailed: the system refused.
    """
    folder = run.open_step(step)
    if folder is None:
        return
    with folder, naming(os.fspath(run.path / step_name(step)), "clear"):
        names = folder.names()
        if not names:
            # Without its lock, for a saver that has just made it would then be told that it is busy.
            _remove_folder(folder)
        over = not newest and INDEX in names and any(map(checkpoint_names.is_message, names))
        if not over and not any(map(_is_left_over, names)):
            return
        with _locked(folder, os.fspath(run.path / step_name(step))) as locked:
            if locked is not None:
                _tidy(locked, run.path / step_name(step), names_in)
                if over:
                    _sweep_messages(locked, names, _none_lives)


@contextlib.contextmanager
def _locked(folder: Folder, shown: str) -> Iterator[Folder | None]:
    """Hold the lock of a step's folder; afterwards the folder goes if it is empty. None when it is gone."""
    with naming(shown, "clear"):
        lock = FolderLock(folder)
        if not lock.take():
            raise _busy(shown)
        try:
            yield folder if folder.is_there() else None
        finally:
            lock.give_back()
        if not folder.names():
            _remove_folder(folder)


def _bury(folder: Folder, tombstone: str, old: os.stat_result) -> None:
    """Give the index, which is ``old``, the name of its tombstone; then the step is gone."""
    # Two names of one file would both stay, whatever a rename reports.
    folder.remove(tombstone)
    try:
        folder.replace(INDEX, tombstone)
    except OSError:
        # On a network file system it may be done, and only the answer lost.
        found = folder.find(tombstone)
        if found is None or not os.path.samestat(found, old):
            raise


def _tidy(folder: Folder, shown: Path, names_in: NamesIn) -> None:
    """Finish removals and sweep what dead attempts left; the folder is locked."""
    names = set(folder.names())
    live: Sequence[str] = ()
    if INDEX in names:
        try:
            live = names_in(index_bytes(folder, shown / INDEX))
        except TreeringError as error:
            if isinstance(error, OSError):
                raise
            return  # nobody can say which files are its own
    finish_removals(folder, os.fspath(shown), names, names_in, live)
    dead: set[str] = set()
    for journal in names:
        attempt = checkpoint_names.attempt_of_journal(journal)
        if attempt is not None:
            data = [name for name in checkpoint_names.data_of(attempt, names) if name not in live]
            if not remove_leftover(folder, journal, data):
                raise _busy(os.fspath(shown))
            dead.add(attempt)
    if dead:
        _sweep_messages(folder, names, lambda attempt: attempt not in dead)


def _sweep_messages(folder: Folder, names: Iterable[str], is_live: Callable[[str], bool]) -> None:
    """Remove the notes of attempts that nobody works on; the folder is locked."""
    for note in stale_messages(names, is_live, FolderMessageBoard(folder).get):
        with contextlib.suppress(OSError):  # it stands in nobody's way
            folder.remove(note)


def _none_lives(_: str) -> bool:
    """Whoever saves has the lock of the folder, or waits for the one who has it."""
    return False


def _is_left_over(name: str) -> bool:
    return (checkpoint_names.attempt_of_tombstone(name) or checkpoint_names.attempt_of_journal(name)) is not None


def _remove_folder(folder: Folder) -> None:
    """Remove it if it is empty: an empty folder is no step, and nobody's loss."""
    with contextlib.suppress(OSError):
        Path(folder.path).rmdir()


def _busy(shown: str) -> Busy:
    error = Busy(f"could not clear {shown!r}: another process is saving to this step")
    error.errno = errno.EBUSY
    error.strerror = os.strerror(errno.EBUSY)
    error.filename = shown
    return error
