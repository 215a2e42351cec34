"""What a process knows of a run's steps from one save to the next, so that a save looks at no step that it need not.

It is a cache, as ``run.json`` is. It counts while ``run.json`` is the one that this process wrote or read, for each
program that saves or removes replaces that; and before a step goes, the steps that decide it are looked at.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from treering import retention
from treering._codec.key_document import HEAD_BYTES
from treering._format.run_document import RunDocument, StepRecord, encode_run, record_text
from treering._runs.removal import NOT_READ
from treering._runs.steps import document_in, facts, is_current, read_record
from treering._store.run_folder import RunFolder
from treering._values import timing
from treering.errors import PermissionDeniedError
from treering.retention import Policy, StepFacts

# So many steps that decide by being there are looked at each time; of more, those that were not seen here yet.
_FEW: Final = 32
# So many folders in which something waited are looked into at each save; the others then follow.
_MOST_DUE: Final = 16
# More steps that are new here than this are listed, where one listing tells which of them were removed.
_FEW_NEW: Final = 4


class KnownSteps:
    """The steps of one run, as its saves have found them. The thread that writes uses it, or all of it waits.

    Attributes:
        metrics: the names of all metrics that any step had.
        by_age: whether what is left over is to be judged by its age too: at the first save of a process, then daily.
        denied: why the steps could not be listed; None where they could, or it was not tried.

    Example:
        >>> import pathlib, tempfile
        >>> import treering as tr
        >>> path = pathlib.Path(tempfile.mkdtemp())
        >>> for step in (1, 2, 3):
        ...     tr.save(path / f"step_{step:08d}", {"w": 1.5})
        >>> known = KnownSteps()
        >>> with RunFolder(path) as run:
        ...     known.bring_up(run, 3, None, seconds=0.5)
        ...     list(known.going(run, tr.KeepLast(2)))
        [1]
    """

    def __init__(self) -> None:
        # When what waits in the folders of steps may go, by the monotonic clock.
        self._due: dict[int, float] = {}
        self._surveyed = -math.inf
        self.by_age = False
        self.denied: PermissionDeniedError | None = None
        self.forget()

    def forget(self) -> None:
        """Know nothing; the next save reads ``run.json`` again, and what that does not know from the steps."""
        self._head: bytes | None = None
        self._loaded = False
        self._written = 0.0
        self._records: dict[int, StepRecord] = {}
        self._facts: dict[int, StepFacts] = {}
        self._texts: dict[int, str] = {}
        # Those whose index this process has seen; those that have none, or none that can be read; where to tidy.
        self._seen: set[int] = set()
        self._looked: set[int] = set()
        self._blank: set[int] = set()
        self._untidy: set[int] = set()
        self.metrics: set[str] = set()

    def bring_up(
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
        self._looked.clear()
        head = run.read_document_head()
        if not self._loaded or head not in (None, self._head):
            self._load(run)
        folders = {*(self._folders_in(run) if there is None else there), step}.difference(left)
        self.drop(self._records.keys() - folders)
        self._blank &= folders
        # What processes that were late could still read of the save before this one is of no use any more.
        self._untidy.update([max(self._records)] if self._records else [])
        delay = run.store.longest_delay
        self.by_age = delay > 0.0 and time.monotonic() - self._surveyed > delay
        if self.by_age or len(folders - self._records.keys() - self._blank) > _FEW_NEW:
            self._survey(run, folders)
        for each in sorted({step} | (folders - self._records.keys() - self._blank)):
            self._look(run, each, seconds if each == step else None)

    def _folders_in(self, run: RunFolder) -> Collection[int]:
        """Return the steps whose folders are there; where a bucket denies to list them, those that are known."""
        try:
            return run.folders()
        except PermissionDeniedError:
            if run.store.separate_rights:
                return self._records
            raise

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

    def going(self, run: RunFolder, keep: Policy | None) -> dict[int, str]:
        """Return the steps that a policy does not keep, each with the digest of its index; all that decides was read.

        Raises:
            StoreError: the system refuses.
        """
        checked = set(self._looked)
        while True:
            known = list(self._facts.values())
            going = retention.removable(keep, known)
            by_presence, by_value = find_deciders(keep, known, going)
            there = by_presence if len(by_presence) <= _FEW else by_presence - self._seen
            # Were the newest one gone, the step that was just saved might go in its favour.
            newest = [max(self._records)] if going else []
            doubtful = {*going, *by_value, *there, *newest} - checked
            if not doubtful:
                return {step: self._records[step].digest for step in going}
            for step in sorted(doubtful):
                self._check(run, step, by_size=step not in going and step not in by_value)
            checked |= doubtful

    def drop(self, steps: Iterable[int]) -> None:
        """Forget steps: those whose folders stay are looked at again by the next save."""
        for step in list(steps):
            for known in (self._records, self._facts, self._texts):
                known.pop(step, None)
            self._seen.discard(step)

    def untidy(self) -> list[int]:
        """Return, once, the steps in whose folders others may have left something."""
        due = set(sorted(step for step, end in self._due.items() if end <= time.monotonic())[:_MOST_DUE])
        for step in due:
            del self._due[step]
        found, self._untidy = sorted(self._untidy | due), set()
        return found

    def expect(self, waits: Mapping[int, float]) -> None:
        """Look at the folders of steps again after so many seconds, when what waits there may go."""
        self._due.update((step, time.monotonic() + seconds) for step, seconds in waits.items())

    def leave(self, removed: Iterable[int], grace: float) -> None:
        """Know steps to be removed, whose folders stay for the grace of the store."""
        self._blank.update(removed)
        self.expect(dict.fromkeys(removed, grace))

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
        # Only what is new is encoded: thousands of steps at once would hold up the other threads.
        for step in self._records.keys() - self._texts.keys():
            self._texts[step] = record_text(self._records[step])
        data = encode_run(RunDocument(keep, save_every), [self._texts[step] for step in sorted(self._texts)])
        run.replace_document(data, sweep=not self._written)
        self._head, self._written = data[:HEAD_BYTES], time.monotonic()

    def _load(self, run: RunFolder) -> None:
        self.forget()
        data = run.read_document()
        for record in document_in(data).steps:
            self._put(record)
        self._head, self._loaded = None if data is None else data[:HEAD_BYTES], True

    def _look(self, run: RunFolder, step: int, seconds: float | None) -> None:
        """Read what a step's own index says; where nothing was known of it, its folder is to be tidied too."""
        self.drop([step])
        if seconds is None:  # the save of this one has swept there
            self._untidy.add(step)
        record = None
        with contextlib.suppress(*NOT_READ):  # it is never removed then, and no other one is kept in its place
            record = read_record(run, step)
        if record is None:
            self._blank.add(step)
            return
        self._blank.discard(step)
        self._put(dataclasses.replace(record, seconds=seconds))
        self._seen.add(step)
        self._looked.add(step)

    def _check(self, run: RunFolder, step: int, *, by_size: bool) -> None:
        """Hold what is known of a step against its index, or its size alone, and read that where they differ."""
        record = self._records[step]
        with contextlib.suppress(*NOT_READ):
            if run.index_nbytes(step) == record.index_nbytes if by_size else is_current(run, record):
                self._seen.add(step)
                return
        self._look(run, step, None)

    def _put(self, record: StepRecord) -> None:
        self._records[record.step] = record
        self._facts[record.step] = facts(record)
        self.metrics.update(record.metrics)


# -------------------------------------------------------------------------------------------------- which steps decide


def find_deciders(policy: Policy | None, facts: Sequence[StepFacts], going: Sequence[int]) -> tuple[set[int], set[int]]:
    """Return the steps by which a policy decides that others go.

    Args:
        policy: the policy; None where only temporary steps go.
        facts: all steps.
        going: the steps that go.

    Returns:
        The steps that decide by being there, and those that decide by a metric, or by when they were saved.

    Example:
        >>> facts = [StepFacts(step=step, saved=0.0, metrics={"loss": step}) for step in (1, 2, 3, 4, 5)]
        >>> find_deciders(retention.KeepLast(2) | retention.KeepBest("loss"), facts, [2, 3])
        ({4, 5}, {1})
    """
    if not going:
        return set(), set()
    by_presence, by_value = {max([fact.step for fact in facts])}, set[int]()
    lasting = [fact for fact in facts if not fact.temporary]
    for rule in policy.rules if isinstance(policy, retention.AnyRule) else (policy,):
        if isinstance(rule, retention.KeepLast):
            by_presence.update(rule.kept(lasting))
        elif isinstance(rule, retention.KeepBest):
            best = retention.best_steps(lasting, rule.metric, rule.mode)[: rule.n]
            # Where all are nan, one that has the metric decides that it is measured.
            having = [] if best else [fact.step for fact in lasting if rule.metric in fact.metrics][-1:]
            by_value.update(best, having)
        elif isinstance(rule, retention.KeepEvery):
            chosen = sorted(rule.kept(lasting)) if rule.interval is not None else []
            # For each step that goes, the last one before it that was chosen: it was saved too shortly after that.
            by_value.update(chosen[place - 1] for step in going if (place := bisect.bisect(chosen, step)))
        elif not isinstance(rule, retention.KeepSteps | None):  # a user's own
            by_value.update(fact.step for fact in facts)
    return by_presence, by_value
