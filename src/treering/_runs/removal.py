"""Removing a step, and finishing what others did not: the removal of a step, or a save that died.

The step is gone with one rename: its index becomes a tombstone, which lists the files that may go. Whoever comes later
finds it and goes on. ``docs/spec/run.md`` is the specification.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from treering._checkpoint.transaction import finish_removals, sweep_attempts, sweep_messages
from treering._store.api import Held, Outcome, Store, Version
from treering._store.failures import LinkRefused, naming, with_errno
from treering._store.open_folder import index_document
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
        _tidy(folder, names_in)
        found = folder.find(INDEX)
        if found is None:
            return False
        if not found.is_file:
            raise LinkRefused(f"{os.fspath(shown / INDEX)!r} is not a file of its own", hint="remove it yourself")
        index = index_document(folder)
        attempt = attempt_of(index.data)
        if attempt is None:
            return False
        with report("remove", shown):
            outcome = folder.retire(INDEX, checkpoint_names.tombstone_of(attempt), index.version)
        if outcome is Outcome.LOST:
            return False
        _tidy(folder, names_in)
        sweep_messages(folder, folder.names(), lambda _: False)  # a process that saves holds the lock, or waits for it
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
            folder.drop()
        over = not newest and INDEX in names and any(map(checkpoint_names.is_message, names))
        if not over and not any(map(_is_left_over, names)):
            return
        with _locked(folder, os.fspath(run.path / step_name(step))) as locked:
            if locked is not None:
                _tidy(locked, names_in)
                if over:
                    sweep_messages(locked, names, lambda _: False)


@contextlib.contextmanager
def _locked(folder: Store, shown: str) -> Iterator[Store | None]:
    """Hold the lock of a step's folder; afterwards the folder goes if it is empty. None when it is gone."""
    with naming(shown, "clear"):
        if not folder.lock():
            raise _busy(shown)
        try:
            yield folder if folder.is_current() else None
        finally:
            folder.unlock()
        if not folder.names():
            folder.drop()


def _tidy(folder: Store, names_in: NamesIn) -> None:
    """Finish removals and sweep what dead attempts left; the folder is locked."""
    names = set(folder.names())
    live: Sequence[str] = ()
    current: Version | None = None
    if INDEX in names:
        try:
            index = index_document(folder)
            live, current = names_in(index.data), index.version
        except TreeringError as error:
            if isinstance(error, OSError):
                raise
            return  # nobody can say which files are its own
    finish_removals(folder, names, names_in, live)
    dead: set[str] = set()
    for attempt, life in sweep_attempts(folder, names, live, current):
        if life is Held.YES:
            raise _busy(os.fspath(folder.path))
        if life is Held.NO:
            dead.add(attempt)
    if dead:
        sweep_messages(folder, names, lambda attempt: attempt not in dead)


def _is_left_over(name: str) -> bool:
    return (checkpoint_names.attempt_of_tombstone(name) or checkpoint_names.attempt_of_journal(name)) is not None


def _busy(shown: str) -> Busy:
    return with_errno(Busy(f"could not clear {shown!r}: another process is saving to this step"), errno.EBUSY, shown)
