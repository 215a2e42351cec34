"""Removing a step, finishing what others did not, and the later steps that a save over an earlier one supersedes.

The step is gone with one rename: its index becomes a tombstone, which lists the files that may go. Whoever comes later
finds it and goes on. ``docs/spec/run.md`` is the specification.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from treering._checkpoint.transaction import finish_removals, sweep_attempts
from treering._codec.key_document import is_tombstone_size
from treering._coordination.message_board import sweep_messages
from treering._format.document import read_names
from treering._format.run_document import SupersededSteps
from treering._runs.folder import GONE, RunFolder, attempt_in, unless_denied
from treering._runs.leases import end_leases
from treering._store.api import Document, Held, NamesIn, Outcome, Store, Transaction
from treering._store.failures import naming, with_errno
from treering._store.open_folder import find_index, index_document, key_content
from treering._store.waiting import has_waiting_names, list_names, listed_in, remove_waiting, sweep_old
from treering._values import checkpoint_names, timing
from treering._values.checkpoint_names import INDEX, is_data, is_message, is_message_folder, is_passing, step_name
from treering._values.telemetry import report
from treering.errors import BusyError, LinkRefusedError, NotFoundError, TreeringError


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
        BusyError: somebody is saving to it.
        LinkRefusedError: its index is a link.
        StoreError: the system refused.
        TreeringError: what ``attempt_of`` raises; nothing has changed.
    """
    shown = run.path / step_name(step)
    folder = run.open_step(step)
    if folder is None:
        return False
    with folder, _locked(folder, os.fspath(shown)) as transaction:
        if transaction is None:
            return False
        if not folder.asks_by_request:
            _tidy(folder, transaction, names_in)
            found = find_index(folder)
            if found is None:
                return False
            if not found.is_file:
                raise LinkRefusedError(
                    f"{os.fspath(shown / INDEX)!r} is not a file of its own", hint="remove it yourself"
                )
        try:
            index = index_document(folder)
        except NotFoundError:
            return False
        attempt = attempt_of(index.data)
        if attempt is None:
            return False
        with report("remove", shown):
            outcome = transaction.delete(index.version, checkpoint_names.tombstone_of(attempt))
        if outcome is Outcome.LOST:
            return False
        if outcome is Outcome.UNKNOWN:
            raise OSError(errno.EIO, f"no answer came to PUT {INDEX!r}: the step may be removed")
        if not folder.grace:  # else its data wait, and what comes for them finds the rest
            _tidy(folder, transaction, names_in)
            # A process that saves holds the lock, or waits for it.
            sweep_messages(folder, folder.names(), lambda _: False)
    return True


def tidy_step(
    run: RunFolder, step: int, names_in: NamesIn, *, newest: bool = True, by_age: bool = False
) -> float | None:
    """Finish in a step's folder what others did not: removals, and saves that died. An empty folder goes.

    Args:
        run: the run's folder.
        step: the step.
        names_in: gives the names of all data files that an index mentions.
        newest: whether it is the newest one, of which processes that were late may still read how its save ended. What
            they wrote to each other about an older one goes, where that is all there is or a step is saved: nobody
            saves there again and sweeps it.
        by_age: whether attempts that may yet commit are kept from it, and swept, once they are older than a day.

    Returns:
        Seconds until superseded data that wait there may go; None where nothing waits.

    Raises:
        BusyError: somebody is saving to it.
        StoreError: the system refused.
    """
    folder = run.open_step(step)
    if folder is None:
        return None
    with folder, naming(os.fspath(run.path / step_name(step)), "clear"):
        names, removed = _look_into(folder)
        if not names:
            # Without its lock, for a saver that has just made it would then be told that it is busy.
            folder.remove("")
        there = INDEX in names
        messages = [name for name in names if is_message(name) or is_message_folder(name)]
        over = bool(messages) and not newest and (there or len(messages) == len(names))
        waits = removed or (has_waiting_names(names) if there else by_age and any(map(is_data, names)))
        if not there:
            for name in filter(is_message_folder, names):
                folder.at(name).remove("")
        if not over and not waits and not any(map(_is_left_over, names)):
            return None
        with _locked(folder, os.fspath(run.path / step_name(step))) as transaction:
            if transaction is None:
                return None
            seconds = _tidy(folder, transaction, names_in, names if folder.asks_by_request else None, by_age=by_age)
            if over:
                sweep_messages(folder, names, lambda _: False)
            return seconds


def sweep_passing(run: RunFolder) -> None:
    """Remove what dead processes left in a run's own folder: signs of life, and documents that never got their name.

    By their age alone, by the clock of the store: a process that lives and waits says so anew every few seconds. What
    cannot be swept is in nobody's way.
    """
    with contextlib.suppress(OSError):
        names = list(filter(is_passing, run.store.names()))
        oldest = run.store.transaction().now() - timing.current.passing if names else 0.0
        entries = filter(None, map(run.store.find, names))
        run.store.remove(*(entry.name for entry in entries if entry.is_file and entry.modified < oldest))


@contextlib.contextmanager
def _locked(folder: Store, shown: str) -> Iterator[Transaction | None]:
    """Hold the lock of a step's folder; afterwards the folder goes if it is empty. None when it is gone."""
    with naming(shown, "clear"):
        with folder.transaction() as transaction:
            try:
                if not transaction.lock():
                    raise _busy(shown)
            except FileNotFoundError:
                yield None
                return
            yield transaction
        folder.remove("")


def _look_into(folder: Store) -> tuple[list[str], bool]:
    """Return the names in a step's folder, and whether there may be a tombstone in the place of its index."""
    if not folder.asks_by_request:
        names = folder.names()
        return names, INDEX in names and find_index(folder) is None
    try:
        sizes = {entry.name: entry.size for entry in folder.list()}
    except PermissionError:  # a save does without it; what needs it has been told
        return [], False
    listed = dict.fromkeys(top if is_message_folder(top := name.split("/")[0]) else name for name in sizes)
    return list(listed), is_tombstone_size(sizes.get(INDEX, 0))


def _tidy(
    folder: Store,
    transaction: Transaction,
    names_in: NamesIn,
    listed: Collection[str] | None = None,
    *,
    by_age: bool = False,
) -> float | None:
    """Finish removals, sweep what dead attempts left, remove what waited; the transaction has the lock of the folder.

    ``listed`` are the names in it, where they need not be listed again.

    Returns:
        Seconds until more of what waits there may go; None where nothing waits.
    """
    names = set(list_names(folder) if listed is None else listed)
    try:
        key, live = read_key(folder, names_in) if INDEX in names else (None, ())
    except TreeringError as error:
        if isinstance(error, OSError):
            raise
        return None  # nobody can say which files are its own
    finish_removals(folder, names, names_in, live)
    dead: set[str] = set()
    doubtful: set[str] = set()
    for attempt, life in sweep_attempts(transaction, names, live):
        if life is Held.YES:
            raise _busy(os.fspath(folder.path))
        (dead if life is Held.NO else doubtful).add(attempt)
    if dead:
        sweep_messages(folder, names, lambda attempt: attempt not in dead)
    unproved = doubtful or any(map(is_data, names.difference(live)))
    if by_age and unproved and sweep_old(folder, transaction, doubtful, names_in):
        key = read_key(folder, names_in)[0]  # it was changed
    return None if key is None else remove_waiting(folder, transaction, key, names)


def _is_left_over(name: str) -> bool:
    return (checkpoint_names.attempt_of_tombstone(name) or checkpoint_names.attempt_of_journal(name)) is not None


def _busy(shown: str) -> BusyError:
    return with_errno(
        BusyError(f"could not clear {shown!r}: another process is saving to this step"), errno.EBUSY, shown
    )


def read_key(folder: Store, names_in: NamesIn) -> tuple[Document | None, Collection[str]]:
    """Return what is in the place of the index, None for nothing, and all names that it lists.

    Raises:
        CorruptError, FormatError, UnsupportedError: it is damaged, or of a newer version.
        StoreError: the store refused.
    """
    try:
        key = key_content(folder)
    except NotFoundError:
        return None, ()
    return key, listed_in(key.data, names_in)


def announce_superseded(path: Path, step: int, mark: str, left: Iterable[int]) -> None:
    """Write durably which steps the save of ``step`` with this mark is going to supersede.

    Raises:
        StoreError: the system refuses; nothing is superseded.
    """
    with RunFolder(path) as run:
        there = {each: attempt for each in left if (attempt := run.attempt_of(each)) != GONE}
        run.write_left(SupersededSteps(step=step, mark=mark, left=there))


@contextlib.contextmanager
def withdraw_on_failure(path: Path, mark: str | None) -> Iterator[None]:
    """Remove the list with this mark if the block fails and the save of that list was not committed.

    Args:
        path: the run's folder.
        mark: that of the list; None where nothing is superseded.
    """
    try:
        yield
    except BaseException:  # an interrupt too: the save will not be committed; raised again below
        if mark is not None:
            with contextlib.suppress(TreeringError), RunFolder(path) as run:  # the next save sweeps it
                found = run.read_left()
                if found is not None and found.mark == mark and run.read_superseded() is None:
                    run.remove_left()
        raise


def remove_superseded(run: RunFolder, *, force: bool = False) -> tuple[list[TreeringError], SupersededSteps | None]:
    """Remove the superseded steps, then their list; a list whose save was never committed is removed alone.

    Args:
        run: the run's folder.
        force: whether steps go that somebody holds; else they stay, and their list, until that ends.

    Returns:
        What went wrong, and the list if it stays, for the next one to go by.
    """
    errors: list[TreeringError] = []
    document = None
    with collect_errors(errors):
        document = run.read_superseded()
        left = {} if document is None else document.left
        # Who holds stamps this document first, then reads it: without the stamp nobody has overlooked the list.
        held: Collection[int] = ()
        if document is not None and document.leases and left:
            look = functools.partial(end_leases, run, left, force=left if force else ())
            held = unless_denied(run.store, look, lambda: () if force else left)
        for step, attempt in left.items():
            with collect_errors(errors):
                if step not in held:
                    remove_step(run, step, read_names, functools.partial(_attempt_to_remove, attempt))
        if not errors and not held:
            run.remove_left()
            return errors, None
    return errors, document


@contextlib.contextmanager
def collect_errors(errors: list[TreeringError]) -> Iterator[None]:
    """Add what the block raises to a list."""
    try:
        yield
    except TreeringError as error:
        errors.append(error)


def _attempt_to_remove(listed: str | None, data: bytes) -> str | None:
    """Return the attempt of an index that goes: only while it is the one that was listed."""
    found = attempt_in(data)
    return (found or secrets.token_hex(8)) if found == listed else None
