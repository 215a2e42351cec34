"""Which steps of a run stay: what is known of them from one save to the next, and the removal of the others.

What a process knows is a cache, as ``run.json`` is, so that a save looks at no step that it need not. It counts while
``run.json`` is the one that this process wrote or read, for each program that saves or removes replaces that; and
before a step goes, the steps that decide it are looked at.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import secrets
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from treering._codec.key_document import HEAD_BYTES
from treering._format.document import read_names, read_summary
from treering._format.run_document import RunDocument, StepRecord, encode_run
from treering._runs.folder import NOT_READ, RunFolder, attempt_in, unless_denied
from treering._runs.leases import end_leases, held_error, held_steps, leave_leases, uncalled_steps
from treering._runs.removal import collect_errors, remove_step, remove_superseded, sweep_passing, tidy_step
from treering._runs.steps import document_in, is_current, note_records, open_run, read_record, read_run, records_in
from treering._values import timing
from treering.errors import BusyError, NotFoundError, PermissionDeniedError, TreeringError
from treering.rules import Policy, Verdict, find_deciders, removable, retained

# Up to this number, the steps that decide by being there are looked at each time; of more, those not seen here yet.
_FEW: Final = 32
# At most this number of folders in which something waited are looked into at each save; the others follow later.
_MOST_DUE: Final = 16
# More steps that are new here than this are listed, where one listing tells which of them were removed.
_FEW_NEW: Final = 4
_NOT_LOADED: Final = b""


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
        folders = {*(self._folders_in(run) if there is None else there), step}.difference(left)
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

    def _folders_in(self, run: RunFolder) -> Collection[int]:
        """Return the steps whose folders are there; where a bucket denies to list them, those that are known."""
        return unless_denied(run.store, run.folders, lambda: list(self.records))

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

    def read(run: RunFolder) -> list[Verdict]:
        verdicts = retained(keep, records_in(run).steps)
        going = _going(verdicts)
        held = held_steps(run, going) if going else {}
        return spare(verdicts, uncalled_steps(run, going) | held | dict(spared or {}))

    return read_run(path, read, [])


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
    return read_run(path, lambda run: _collect(run, keep, spared or {}), [])


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


def _collect(run: RunFolder, keep: Policy | None, spared: Mapping[int, str]) -> list[Verdict]:
    """Judge the steps, remove those that no rule keeps, and note the others."""
    records = records_in(run)
    verdicts = spare(retained(keep, records.steps), spared)
    verdicts = spare(verdicts, uncalled_steps(run, _going(verdicts)))  # another program may have them to do
    going = _going(verdicts)
    verdicts = spare(verdicts, end_leases(run, going) if going else {})
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


def _clear(
    run: RunFolder, going: dict[int, str | None], *, by_age: bool = False
) -> tuple[list[TreeringError], dict[int, str]]:
    """Remove these steps, and finish what was cut short in any; return what went wrong, and which of them are held."""
    errors, back = remove_superseded(run)
    back = run.read_superseded() if errors else back
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
            if remove_step(run, step, read_names, functools.partial(_attempt_to_remove, digest)):
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


def _attempt_to_remove(digest: str | None, data: bytes) -> str | None:
    """Return the attempt of an index that goes: only while it is the one that was judged, if any was."""
    if digest is None:
        return attempt_in(data) or secrets.token_hex(8)
    found = read_summary(data)
    return found.attempt if found.digest == digest else None
