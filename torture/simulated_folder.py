"""A checkpoint's folder in memory, with the rules of the real one, that watches whether they are kept.

What the real one does with system calls (`treering._checkpoint.transaction`) is one step each here: lock, look, sweep,
journal, exclusive first commit, overwrite, removal of what was superseded. Holders of locks are numbers; a killed one
holds nothing any more.

A leaves directory differs in one thing: many may write into it at once, and each commit replaces the one before.
"""

from __future__ import annotations

import errno
from collections.abc import Collection

from treering._coordination.message_board import stale_messages
from treering._values.checkpoint_names import attempt_of_message, decision_name
from treering.errors import BusyError, ExistsError

__all__ = ["SimulatedFolder", "Violation"]


class Violation(Exception):
    """A rule was broken."""


class SimulatedFolder:
    """One folder that several jobs may save into.

    Args:
        locks_are_seen: whether the lock of the folder holds for all machines; those of journals always do.
        for_leaves: whether it is a leaves directory.
        is_there: whether it is there from the beginning.
    """

    def __init__(self, *, locks_are_seen: bool, for_leaves: bool, is_there: bool) -> None:
        self.is_there = is_there
        """Whether the folder is there; process 0 makes it when it enters."""
        self.notes: dict[str, bytes] = {}
        """The notes there are."""
        self.older: dict[str, bytes | None] = {}
        """What each held before, for answers that are stale."""
        self.index: str | None = None
        """The attempt that is committed."""
        self.commits: list[str] = []
        """All attempts that ever were, in order."""
        self.journals: dict[str, int | None] = {}
        """Each attempt that is not committed, with the living holder of its lock."""
        self.data: set[tuple[str, int]] = set()
        """The data files, by attempt and process."""
        self.swept: set[str] = set()
        """Attempts that another saver has swept, as their process 0 was dead."""
        self.unsaid: set[str] = set()
        """Attempts whose verdict another saver has swept, as their process 0 had not entered, or had left."""
        self.unheard: set[str] = set()
        """Attempts of which a part was swept before their process 0 had entered."""
        self._locks_are_seen = locks_are_seen
        self._for_leaves = for_leaves
        self._lock: int | None = None
        self._replaces: set[str] = set()
        self._entered_over: dict[str, str | None] = {}
        self._entered: dict[str, int] = {}

    # ---------------------------------------------------------------------------------------------------- notes

    def put(self, name: str, data: bytes) -> None:
        """Replace a note.

        Raises:
            FileNotFoundError: there is no folder.
        """
        if not self.is_there:
            raise FileNotFoundError(errno.ENOENT, "there is no folder")
        self.older[name] = self.notes.get(name)
        self.notes[name] = data

    def remove(self, name: str) -> None:
        """Remove a note."""
        found = self.notes.pop(name, None)
        if found is not None:
            self.older[name] = found

    def messages(self) -> list[str]:
        """Return the names of all notes."""
        return sorted(self.notes)

    # ----------------------------------------------------------------------------------------- the saves of leaders

    def enter(self, holder: int, attempt: str, live: Collection[str] = (), *, overwrite: bool) -> None:
        """Lock, look, sweep, make the journal.

        Args:
            holder: the saver.
            attempt: its attempt.
            live: the attempts whose notes it leaves, beside those that have entered.
            overwrite: whether what is committed may be replaced.

        Raises:
            BusyError: another saver is at work.
            ExistsError: something is committed, and may not be replaced.
        """
        self.is_there = True  # who is refused makes it too, to say so
        if not self._for_leaves:
            self._require_alone(holder, overwrite=overwrite)
            self._lock = holder
        for dead in [dead for dead, owner in self.journals.items() if owner is None]:
            for file in [file for file in self.data if file[0] == dead]:
                self.remove_data(*file)
            del self.journals[dead]
            self.swept.add(dead)
        self.journals[attempt] = holder
        self._entered[attempt] = holder
        # In a leaves directory the folder of an attempt, with its lock, stays until process 0 has left.
        for name in stale_messages(list(self.notes), {*self._entered, *live}.__contains__, self.notes.get):
            self.remove(name)
            if (of := attempt_of_message(name)) is not None:
                (self.unsaid if name == decision_name(of) else self.unheard).add(of)
        self._entered_over[attempt] = self.index

    def _require_alone(self, holder: int, *, overwrite: bool) -> None:
        if self._lock is not None and (self._locks_are_seen or self._lock == holder):
            raise BusyError("another process is saving to this checkpoint")
        if self.index is not None and not overwrite:
            raise ExistsError("a checkpoint is there already")
        if any(owner is not None for owner in self.journals.values()):
            raise BusyError("another process is saving to this checkpoint")

    def commit(self, attempt: str, parts: tuple[bytes, ...], wanted: tuple[bytes, ...], *, tidy: bool = True) -> None:
        """Make an attempt the index, and remove what it supersedes, unless that fails or a kill comes between.

        Raises:
            ExistsError: somebody else committed a first save meanwhile.
            BusyError: somebody swept the journal.
            Violation: it is committed a second time, or without all that belongs to it.
        """
        if attempt in self.commits:
            raise Violation(f"attempt {attempt} is committed twice")
        if parts != wanted:
            raise Violation(f"attempt {attempt} is committed with {parts}, not with {wanted}")
        missing = [process for process in range(len(wanted)) if (attempt, process) not in self.data]
        if missing:
            raise Violation(f"attempt {attempt} is committed without the data of processes {missing}")
        if self._entered_over[attempt] is None and self.index is not None and not self._for_leaves:
            raise ExistsError("a checkpoint is there already")
        if attempt not in self.journals:
            raise BusyError("another process removed the new files")
        if self.index is not None:
            self._replaces.add(self.index)
        self.index = attempt
        self.commits.append(attempt)
        del self.journals[attempt]
        if tidy:
            for file in [file for file in self.data if file[0] in self._replaces]:
                self.remove_data(*file)
            self._replaces.clear()

    def withdraw_all(self, attempt: str) -> None:
        """Remove all there is of an attempt that is not committed, the proof last."""
        if self.index != attempt:
            for file in [file for file in self.data if file[0] == attempt]:
                self.remove_data(*file)
            self.journals.pop(attempt, None)

    def leave(self, holder: int, attempt: str) -> None:
        """End a save of process 0 without a kill: what it wrote and did not commit goes, the journal stays."""
        if self.index != attempt:
            self.remove_data(attempt, 0)
        self.release(holder)

    def release(self, holder: int) -> None:
        """Give back whatever a process holds, as its end does."""
        self._entered = {attempt: owner for attempt, owner in self._entered.items() if owner != holder}
        if self._lock == holder:
            self._lock = None
        for attempt, owner in self.journals.items():
            if owner == holder:
                self.journals[attempt] = None

    # ------------------------------------------------------------------------------------------------------------- data

    def add_data(self, attempt: str, process: int) -> None:
        """Write the data file of a process.

        Raises:
            Violation: nothing proves that it may go, should its writer be killed.
        """
        if attempt not in self.journals and attempt not in self.swept:
            raise Violation(f"process {process} writes data of attempt {attempt} and there is no journal of it")
        self.data.add((attempt, process))

    def remove_data(self, attempt: str, process: int) -> None:
        """Remove the data file of a process, if it is there.

        Raises:
            Violation: the index names it.
        """
        if attempt == self.index and (attempt, process) in self.data:
            raise Violation(f"the data of process {process} is removed while the index names it")
        self.data.discard((attempt, process))

    def save_alone(self) -> None:
        """Save anew when all is over.

        Raises:
            Violation: that does not work, or something of others is left after it.
        """
        if self.index != (self.commits[-1] if self.commits else None):
            raise Violation(f"the index is {self.index}, the last commit was {self.commits[-1:]}")
        attempt = "f" * 16
        try:
            self.enter(-1, attempt, overwrite=True)
        except BusyError as error:
            raise Violation(f"when all is over, a new save is refused: {error}") from None
        self.add_data(attempt, 0)
        self.commit(attempt, (b"",), (b"",))
        # What was written after a sweep, by a process that slept through it and was then killed, nobody can know.
        left = [file for file in self.data if file != (attempt, 0) and file[0] not in self.swept]
        if left or self.journals or self.notes:
            raise Violation(f"left over: data {left}, journals {list(self.journals)}, notes {list(self.notes)}")
