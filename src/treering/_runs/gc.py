"""Which steps of a run stay: what is known of them from one save to the next, and the removal of the others.

A step is gone with one rename: its index becomes a tombstone, which lists the files that may go. Whoever comes later
finds it and goes on, as with what others did not finish, and with the later steps that a save over an earlier one
supersedes. ``docs/spec/run.md`` is the specification.

What a process knows is a cache, as ``run.json`` is, so that a save looks at no step that it need not. It counts while
``run.json`` is the one that this process wrote or read, for each program that saves or removes replaces that; and
before a step goes, the steps that decide it are looked at.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import math
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from treering._checkpoint.transaction import finish_removals, sweep_attempts
from treering._codec.key_document import HEAD_BYTES, is_tombstone_size
from treering._coordination.message_board import sweep_messages
from treering._format.document import read_names, read_summary
from treering._format.run_document import RunDocument, StepRecord, SupersededSteps, encode_run
from treering._runs.folder import NOT_READ, RunFolder, attempt_in, unless_denied
from treering._runs.leases import end_leases, held_error, held_steps, leave_leases, uncalled_steps
from treering._runs.steps import document_in, is_current, note_records, open_run, read_record, read_run, records_in
from treering._store.api import Document, Held, NamesIn, Outcome, Store, Transaction
from treering._store.failures import naming, with_errno
from treering._store.open_folder import find_index, index_document, key_content
from treering._store.waiting import has_waiting_names, list_names, listed_in, remove_waiting, sweep_old
from treering._values import checkpoint_names, timing
from treering._values.checkpoint_names import INDEX, is_data, is_message, is_message_folder, is_passing, step_name
from treering._values.telemetry import report
from treering.errors import BusyError, NotFoundError, PermissionDeniedError, TreeringError
from treering.rules import Policy, Verdict, find_deciders, removable, retained


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
        kinds = checkpoint_names.attempt_of_tombstone, checkpoint_names.attempt_of_journal
        if not over and not waits and not any(attempt_of(name) for attempt_of in kinds for name in names):
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


def _busy(shown: str) -> BusyError:
    error = BusyError(
        f"could not clear {shown!r}: another process is saving to this step, or another thread of this one"
    )
    return with_errno(error, errno.EBUSY, shown)


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
        for step in sorted(left.keys() - held):
            with collect_errors(errors):
                remove_step(run, step, read_names, functools.partial(_attempt_listed, left[step]))
        if not errors and not held:
            run.remove_left()
            return errors, None
    return errors, run.read_superseded() if errors else document


@contextlib.contextmanager
def collect_errors(errors: list[TreeringError]) -> Iterator[None]:
    """Add what the block raises to a list."""
    try:
        yield
    except TreeringError as error:
        errors.append(error)


# Up to this number, the steps that decide by being there are looked at each time; of more, those not seen here yet.
_FEW: Final = 32
# At most this number of folders in which something waited are looked into at each save; the others follow later.
_MOST_DUE: Final = 16
# More steps that are new here than this are listed, where one listing tells which of them were removed.
_FEW_NEW: Final = 4
_NOT_LOADED: Final = b""
_FindHeld: TypeAlias = Callable[[RunFolder, Collection[int]], Mapping[int, str]]


class KnownSteps:
    """The steps of one run, as its saves have found them. The thread that writes uses it, or all of it waits.

    Attributes:
        records: what is known of each step that can be read.
        by_age: whether what is left over is to be judged by its age too: at the first save of a process, then daily.
        denied: why the steps could not be listed; None where they could, or it was not tried.
        passed: the steps that were passed over when the run was resumed, which no rule counts.

    Example:
        >>> import pathlib, tempfile
        >>> import treering as tr
        >>> path = pathlib.Path(tempfile.mkdtemp())
        >>> for step in (1, 2, 3):
        ...     tr.save(path / f"step_{step:08d}", {"w": 1.5})
        >>> known = KnownSteps()
        >>> with RunFolder(path) as run:
        ...     known.refresh(run, 3, None, seconds=0.5)
        ...     list(known.removable(run, tr.KeepLast(2)))
        [1]
    """

    def __init__(self) -> None:
        # When what waits in the folders of steps may go, by the monotonic clock.
        self._due: dict[int, float] = {}
        self._surveyed = self._swept = -math.inf
        self.by_age = False
        self.denied: PermissionDeniedError | None = None
        self.passed: frozenset[int] = frozenset()
        self.forget()

    def forget(self) -> None:
        """Know nothing; the next save reads ``run.json`` again, and what that does not know from the steps."""
        self._head: bytes | None = _NOT_LOADED
        self._written = 0.0
        self.records: dict[int, StepRecord] = {}
        # Those whose index this process has seen, and those that it has looked at in this save.
        self._seen: set[int] = set()
        self._checked: set[int] = set()
        # Those that have no index, or none that can be read; and those in whose folders something may be left.
        self._blank: set[int] = set()
        self._untidy: set[int] = set()

    def refresh(
        self,
        run: RunFolder,
        step: int,
        there: Iterable[int] | None,
        *,
        seconds: float | None,
        left: Collection[int] = (),
    ) -> None:
        """Learn of a step that was committed, and which steps came or went since the last one.

        Args:
            run: the run's folder.
            step: the step.
            there: the steps whose folders are there, and those that were in flight; None to look.
            seconds: how long the save took.
            left: steps that were left behind: their folders may be there, but they are not.

        Raises:
            StoreError: the system refuses.
        """
        self._checked.clear()
        head = run.read_document(HEAD_BYTES)
        if self._head == _NOT_LOADED or head not in (None, self._head):
            self.forget()
            data = run.read_document()
            self.records = {record.step: record for record in document_in(data).steps}
            self._head = None if data is None else data[:HEAD_BYTES]
        if there is None:  # where a bucket denies to list them, those that are known
            there = unless_denied(run.store, run.folders, lambda: list(self.records))
        folders = {*there, step}.difference(left)
        self.drop(self.records.keys() - folders)
        self._blank &= folders
        # What processes that were late could still read of the save before this one is of no use any more.
        self._untidy.update([max(self.records)] if self.records else [])
        delay = run.store.longest_delay
        self.by_age = delay > 0.0 and time.monotonic() - self._surveyed > delay
        if self.by_age or len(folders - self.records.keys() - self._blank) > _FEW_NEW:
            self._survey(run, folders)
        self.drop([step])
        fresh = folders - self.records.keys() - (self._blank - {step})
        for each in sorted(fresh):
            self._look(run, each)
        self._untidy |= fresh - {step}  # its own save has swept there
        if step in self.records:
            self.records[step] = dataclasses.replace(self.records[step], seconds=seconds)

    def _survey(self, run: RunFolder, folders: set[int]) -> None:
        """List the steps that have a tombstone, and those to tidy, where one listing tells."""
        try:
            removed, untidy = run.survey()
        except PermissionDeniedError as error:
            self.denied = error
            return
        self.denied = None
        self._surveyed = time.monotonic() if self.by_age else self._surveyed
        self._blank |= folders & removed
        self._untidy |= untidy

    def _look(self, run: RunFolder, step: int, *, by_size: bool = False) -> bool:
        """Compare a step's record with its index, or its size alone; if they differ, read the index and return True."""
        old, record = self.records.pop(step, None), None
        with contextlib.suppress(*NOT_READ):  # it is never removed then, and no other one is kept in its place
            if old is not None and by_size:
                index = run.find_index(step)
                known = index is not None and index.is_file and index.size == old.index_nbytes
            else:
                known = old is not None and is_current(run, old)
            record = old if known else read_record(run, step)
        self._checked.add(step)
        if record is None:
            self._blank.add(step)
            self._seen.discard(step)
        else:
            self.records[step] = record
            self._blank.discard(step)
            self._seen.add(step)
        return record is None or record is not old

    def sweep(self, run: RunFolder) -> None:
        """Remove what dead processes left beside the steps, now and then: of one that died just now it is too early."""
        if time.monotonic() - self._swept > timing.current.passing:
            self._swept = time.monotonic()
            sweep_passing(run)

    def removable(self, run: RunFolder, keep: Policy | None) -> dict[int, str]:
        """Return the steps that a policy does not keep, each with the digest of its index; all that decides was read.

        Raises:
            StoreError: the system refuses.
        """
        while True:
            # A look puts its step last.
            known = [self.records[step] for step in sorted(self.records) if step not in self.passed]
            going = removable(keep, known)
            by_presence, by_value = find_deciders(keep, known, going)
            if len(by_presence) > _FEW:  # were the newest one gone, the step that was just saved might go in its favour
                by_presence = by_presence - self._seen | {known[-1].step}
            doubtful = {*going, *by_value, *by_presence} - self._checked
            if not doubtful:
                return {step: self.records[step].digest for step in going}
            for step in sorted(doubtful):
                if self._look(run, step, by_size=step not in going and step not in by_value):
                    self._untidy.add(step)

    def drop(self, steps: Iterable[int]) -> None:
        """Forget steps: those whose folders stay are looked at again by the next save."""
        for step in list(steps):
            self.records.pop(step, None)
            self._seen.discard(step)

    def untidy(self) -> list[int]:
        """Return, once, the steps in whose folders others may have left something."""
        due = set(sorted(step for step, end in self._due.items() if end <= time.monotonic())[:_MOST_DUE])
        for step in due:
            del self._due[step]
        found, self._untidy = sorted(self._untidy | due), set()
        return found

    def schedule(self, waits: Mapping[int, float]) -> None:
        """Look at the folders of steps again after so many seconds, when what waits there may go."""
        self._due.update((step, time.monotonic() + seconds) for step, seconds in waits.items())

    def release(self, removed: Iterable[int], grace: float) -> None:
        """Know steps to be removed, whose folders stay for the grace of the store."""
        self._blank.update(removed)
        self.schedule(dict.fromkeys(removed, grace))

    def write(self, run: RunFolder, keep: str | None, save_every: str | None, *, may_wait: bool) -> None:
        """Replace ``run.json``.

        Args:
            run: the run's folder.
            keep: text of the policy that the run keeps steps by.
            save_every: text of the policy that says when it saves.
            may_wait: whether the next save may do it for this one.

        Raises:
            StoreError: the system refuses; the old ``run.json`` is there.
            LinkRefusedError: ``run.json`` is a link.
        """
        if may_wait and time.monotonic() - self._written < timing.current.step_notes:
            return
        data = encode_run(RunDocument(keep, save_every, [self.records[step] for step in sorted(self.records)]))
        run.replace_document(data, sweep=not self._written)
        self._head, self._written = data[:HEAD_BYTES], time.monotonic()


# -------------------------------------------------------------------------------------------------- garbage collection


def judge(path: Path, keep: Policy | None, *, spared: Mapping[int, str] | None = None) -> list[Verdict]:
    """Return what becomes of each step, ascending, and change nothing; `collect` says more."""
    return read_run(path, lambda run: _judge(run, records_in(run).steps, keep, spared or {}, held_steps), [])


def _judge(
    run: RunFolder, steps: Sequence[StepRecord], keep: Policy | None, spared: Mapping[int, str], find_held: _FindHeld
) -> list[Verdict]:
    verdicts = spare(retained(keep, steps), spared)
    going = _going(verdicts)
    # Another program may have them to do, or hold them.
    return spare(verdicts, {**uncalled_steps(run, going), **find_held(run, going)}) if going else verdicts


def _going(verdicts: Iterable[Verdict]) -> set[int]:
    return {verdict.step for verdict in verdicts if not verdict.kept}


def spare(verdicts: Iterable[Verdict], held: Mapping[int, str]) -> list[Verdict]:
    """Let steps stay that somebody holds, and say who does, or why else they stay."""
    return [
        dataclasses.replace(one, kept=True, reasons=(held[one.step],)) if not one.kept and one.step in held else one
        for one in verdicts
    ]


def collect(path: Path, keep: Policy | None, *, spared: Mapping[int, str] | None = None) -> list[Verdict]:
    """Remove the steps that a policy does not keep, the oldest first, and finish removals that were interrupted before.

    A step stays if another process has replaced it since it was judged, or is saving to it; the next call judges it
    again. Steps that cannot be read are not judged.

    Args:
        path: the run's folder; where none is there is nothing to do.
        keep: the policy; None keeps all but temporary steps that a newer one has replaced.
        spared: steps that stay all the same, each with why: what only this process knows.

    Returns:
        What becomes of each step, ascending.

    Raises:
        StoreError: the system refused. The other steps are done all the same; what is left is for the next call.
    """

    def remove(run: RunFolder) -> list[Verdict]:
        records = records_in(run)
        verdicts = _judge(run, records.steps, keep, spared or {}, end_leases)
        going = _going(verdicts)
        errors, held = _clear(run, {old.step: old.digest for old in records.steps if old.step in going}, by_age=True)
        with collect_errors(errors):
            note_records(run, records)
            run.drop_tombstones()
        sweep_passing(run)
        with collect_errors(errors):
            if run.is_left_for_leases():
                end_leases(run)
                leave_leases(run)
        raise_first(error for error in errors if not isinstance(error, BusyError))  # the next call comes by again
        return spare(verdicts, held)

    return read_run(path, remove, [])


def remove_steps(path: Path, steps: Iterable[int], *, by_age: bool = False) -> None:
    """Remove steps, whatever a policy says; one that is not there is gone already.

    A step whose index cannot be read is gone too, but its files stay: nothing proves who wrote them. With ``by_age``
    what is left over in a bucket is judged by its age too.

    Raises:
        BusyError: another process is saving to one of them, or holds it.
        StoreError: the system refused. The other steps are gone all the same.
    """
    errors: list[TreeringError] = []
    with contextlib.suppress(NotFoundError), open_run(path) as run:
        failed, held = _clear(run, dict.fromkeys(sorted(steps)), by_age=by_age)
        errors += failed + [held_error(step, by, os.fspath(path)) for step, by in held.items()]
        with collect_errors(errors):
            note_records(run, records_in(run))
    raise_first(errors)


def _clear(
    run: RunFolder, going: dict[int, str | None], *, by_age: bool = False
) -> tuple[list[TreeringError], dict[int, str]]:
    """Remove these steps, and finish what was cut short in any; return what went wrong, and which of them are held."""
    errors, back = remove_superseded(run)
    if back is not None:
        going.pop(back.step, None)  # with it would go what hides the steps that it has left behind
    held: dict[int, str] = {}
    with collect_errors(errors):
        # First it is said that they go, then leases are looked for: who begins to hold one sees that, or is seen.
        document = document_in(run.read_document()) if going else RunDocument()
        if any(record.step in going for record in document.steps):
            steps = [record for record in document.steps if record.step not in going]
            run.replace_document(encode_run(dataclasses.replace(document, steps=steps)))
        held = end_leases(run, going) if going else {}
        remove_judged(run, {step: digest for step, digest in going.items() if step not in held}, errors)
    tidy_steps(run, run.untidy(), max(run.folders(), default=-1), errors, by_age=by_age)
    return errors, held


def remove_judged(run: RunFolder, going: Mapping[int, str | None], errors: list[TreeringError]) -> list[int]:
    """Remove steps while their indexes have these digests, None: in any case; return those that were removed."""
    removed = []
    for step, digest in going.items():
        with collect_errors(errors):
            if remove_step(run, step, read_names, functools.partial(_attempt_judged, digest)):
                removed.append(step)
    return removed


def tidy_steps(
    run: RunFolder, steps: Iterable[int], newest: int, errors: list[TreeringError], *, by_age: bool = False
) -> dict[int, float]:
    """Finish in the folders of steps what others did not; return those where something waits, with the seconds left."""
    waits = {}
    for step in steps:
        with collect_errors(errors), contextlib.suppress(BusyError):  # a process that saves there has tidied first
            seconds = tidy_step(run, step, read_names, newest=step >= newest, by_age=by_age)
            if seconds is not None:
                waits[step] = seconds
    return waits


def raise_first(errors: Iterable[TreeringError]) -> None:
    for error in errors:
        raise error


def _attempt_judged(digest: str | None, data: bytes) -> str | None:
    """Return the attempt of an index that goes: only while it is the one that was judged, if any was."""
    if digest is None:
        return attempt_in(data) or secrets.token_hex(8)
    found = read_summary(data)
    return found.attempt if found.digest == digest else None


def _attempt_listed(listed: str | None, data: bytes) -> str | None:
    """Return the attempt of an index that goes: only while it is the one that was listed."""
    found = attempt_in(data)
    return (found or secrets.token_hex(8)) if found == listed else None
