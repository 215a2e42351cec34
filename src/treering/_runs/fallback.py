"""The step to resume from: the newest of several roots, or an older one where that is damaged or was tried too often.

Process 0 names one step after the other, the newest first; all processes read it, and hear from each other what became
of that. So all go back together, to the same step, where only one of them met damage. What a program knows of it
afterwards is noted in ``.run.json.resumed``; ``docs/spec/run.md`` is the specification.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from treering import errors
from treering._checkpoint.forms import read_source
from treering._checkpoint.joint_load import not_shared
from treering._codec.documents import json_text
from treering._coordination.allgather import failed_collectives, last_allgather, name_both, raise_failures
from treering._coordination.messages import Failure
from treering._format.run_document import Resumes
from treering._printable import show_path
from treering._runs.folder import GONE, NOT_READ, RunFolder
from treering._runs.results import Fallback
from treering._runs.run_state import RunState
from treering._runs.steps import latest_of, missing_step, read_record, read_run, step_path, steps_of
from treering._store.resolve import store_at
from treering._values.human import pluralize
from treering._values.telemetry import warn_of

T = TypeVar("T")

Read: TypeAlias = Callable[[int | None, Path], Callable[[], T]]
"""Reads a step of a root, and returns what ends the load; None stands for a step where there is none."""

# Of a process's row, so many bytes are left for what it failed at.
_FAILURE_BYTES: Final = 400
_SHOWN: Final = 20
# A file system says so of bytes that it cannot give back; once may be a passing trouble.
_NOT_WRITABLE: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_NOT_GIVEN_BACK: Final = frozenset({errno.EIO, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO)})


class _Candidate(NamedTuple):
    """A step of one of the roots."""

    step: int
    root: int


class _Use(enum.IntEnum):
    """Whether a step is read, or why not."""

    READ = 0
    TRIED = 1
    LEFT = 2


class _Outcome(enum.StrEnum):
    """What became of a step that one process read."""

    WHOLE = "whole"
    BAD = "bad"
    """It is damaged."""
    AGAIN = "again"
    """The system could not read it, and may at a second try."""
    GONE = "gone"
    OTHER = "other"
    """Something failed that says nothing of the step."""


class NewestStep:
    """One search for the step to resume from; all processes make the same calls.

    Args:
        run: the run.
        fallback: whether to go back, and how often a step may be tried.
        entire: whether all leaves are read, so that a step is known to be whole afterwards.

    Raises:
        UnsupportedError: ``fallback`` is nothing that tells.

    Attributes:
        passed: the steps that were passed over, with why; alike on all processes.
        gone: the step that some did not find when they read it; None where all did.
    """

    def __init__(self, run: RunState, fallback: object, *, entire: bool = True) -> None:
        if not isinstance(fallback, bool | Fallback):
            hint = "write fallback=treering.Fallback(max_attempts=3), say"
            what = f"fallback={fallback!r:.100} is neither True, False nor a Fallback"
            raise errors.UnsupportedError(what, hint=hint)
        self._run = run
        self._entire = entire
        self._goes_back = bool(fallback)
        # Else only the latest step of the run's own folder is looked at.
        self._chooses = self._goes_back or len(run.roots) > 1
        self._most = fallback.max_attempts if isinstance(fallback, Fallback) else None
        self.passed: dict[_Candidate, str] = {}
        # Roots that could not be reached, as process 0 found.
        self._unreached: dict[int, errors.TreeringError] = {}
        self._tried_twice: set[_Candidate] = set()
        self.gone: _Candidate | None = None

    # ------------------------------------------------------------------------------------------------------ choosing

    def choose(self) -> list[int] | None:
        """Return the next step, its root and its use; None where no step is left. For process 0 alone.

        Raises:
            StoreError: a root cannot be reached, and the caller did not ask for a fallback, or no step is left.
        """
        if self._chooses:
            there = self.list_steps()
        else:
            there = [_Candidate(step, 0) for step in (latest_of(self._run.path),) if step is not None]
        for one in there:
            if one not in self.passed:
                use = _Use.READ
                if one.root and self._was_left_behind(one, [each.step for each in there if not each.root]):
                    use = _Use.LEFT
                elif self._most is not None and self.attempts(one) >= self._most:
                    use = _Use.TRIED
                return [*one, use]
        for lost in self._unreached.values():
            raise lost
        return None

    def list_steps(self) -> list[_Candidate]:
        """Return the steps of all roots, the newest first, and each first where the caller looks first."""
        found: list[_Candidate] = []
        for root, path in enumerate(self._run.roots):
            try:
                found += [_Candidate(step, root) for step in steps_of(path)]
            except errors.StoreError as error:
                if not root or not self._goes_back:
                    error.hint = error.hint or ("fallback=True does without it" if root else None)
                    raise
                self._unreached[root] = error
        return sorted(found, key=lambda one: (-one.step, one.root))

    def _was_left_behind(self, one: _Candidate, own: Sequence[int]) -> bool:
        """Whether the run has a step that is earlier, and was saved later: it went back, and left this one behind."""
        before = max((step for step in own if step < one.step), default=None)
        if before is None:
            return False
        with contextlib.suppress(*NOT_READ), RunFolder(self._run.path) as run, self._opened(one) as other:
            earlier, later = read_record(run, before), read_record(other, one.step)
            return earlier is not None and later is not None and earlier.saved > later.saved
        return False  # of a step that cannot be read nothing is known; whoever reads it is told

    def attempts(self, one: _Candidate) -> int:
        """Return how often the run was resumed from this save of a step."""
        with self._opened(one) as root:
            attempt = root.attempt_of(one.step)
        return read_run(self._run.path, _resumes_in, Resumes()).counts.get((one.step, attempt or GONE), 0)

    def _opened(self, one: _Candidate) -> RunFolder:
        return RunFolder(self._run.roots[one.root])

    def take(self, chosen: list[int]) -> _Candidate | None:
        """Return the step that `choose` gave, to be read; None where it is passed over."""
        step, root, use = chosen
        one = _Candidate(step, root)
        if use == _Use.TRIED:
            self.passed[one] = f"it was resumed {pluralize(self._most or 0, 'times')}, and no newer step was saved"
        if use == _Use.LEFT:
            self.passed[one] = f"{self._run.shown!r} has an earlier step that was saved later, and left this one behind"
        return one if use == _Use.READ else None

    # ------------------------------------------------------------------------------------------------------- reading

    def try_step(self, one: _Candidate, read: Read[T]) -> Callable[[], T] | None:
        """Read a step; return what ends the load, or None where another one is to be chosen.

        Raises:
            TreeringError: something failed that is no reason to go back, here or in another process.
        """
        failed, met = failed_collectives(), last_allgather()
        found: Callable[[], T] | Exception
        try:
            found = read(one.step, self._run.roots[one.root])
        except Exception as error:
            if failed_collectives() > failed:  # the others may be elsewhere
                raise
            found = error
        else:
            if last_allgather() > met:  # a joint load: all have read it
                return found
        return self._agree(one, found)

    def _agree(self, one: _Candidate, found: Callable[[], T] | Exception) -> Callable[[], T] | None:
        """Tell the others what was found, hear what they found, and pass over the step where it was damage."""
        own = found if isinstance(found, Exception) else None
        if self._goes_back and isinstance(own, errors.CorruptError):
            own.hint = None  # what it says to do is what happens now
        row: dict[str, Any] = {"outcome": self._outcome_of(one, own)}
        if own is not None and self._chooses:  # else nobody looks at it, and its text may fail
            row["failure"] = Failure.of(own).fit(_FAILURE_BYTES).to_node()
        doing = f"load step {one.step} of {self._run.shown!r}"
        try:
            heard = [json.loads(row) for row in self._run.gather(json_text(row).encode(), doing)]
        except errors.TreeringError as error:
            raise name_both(error, own) from own
        outcomes = [reply["outcome"] for reply in heard]
        if _Outcome.GONE in outcomes and self.gone != one:
            self.gone = one  # newer steps may have been saved meanwhile
            return None
        if {_Outcome.OTHER, _Outcome.GONE}.intersection(outcomes):
            if _Outcome.GONE in outcomes:
                gone = tuple(number for number, said in enumerate(outcomes) if said == _Outcome.GONE)
                if len(gone) < len(heard):  # who hears `NotFoundError` may begin a new run
                    raise not_shared(f"load step {one.step} of the run {self._run.shown!r}", gone)
            if own is not None:
                raise own
            if self._chooses:
                raise_failures(heard, doing)
        if _Outcome.AGAIN in outcomes:
            self._tried_twice.add(one)
            return None
        if _Outcome.BAD in outcomes:
            number = outcomes.index(_Outcome.BAD)
            said = f"process {number}: {heard[number]['failure']['message']}"
            self.passed[one] = str(own) if len(heard) == 1 else said
            return None
        return None if isinstance(found, Exception) else found

    def _outcome_of(self, one: _Candidate, error: Exception | None) -> _Outcome:
        if error is None:
            return _Outcome.WHOLE
        if isinstance(error, errors.NotFoundError | errors.NotSharedError):
            return _Outcome.GONE
        if isinstance(error, errors.CorruptError) and self._goes_back:
            return _Outcome.BAD
        refused = isinstance(error, errors.StoreError) and error.errno in _NOT_GIVEN_BACK and self._goes_back
        # A server that gives no answer has said nothing of the bytes.
        if refused and not store_at(self._run.roots[one.root]).asks_by_request:
            return _Outcome.BAD if one in self._tried_twice else _Outcome.AGAIN
        return _Outcome.OTHER

    # -------------------------------------------------------------------------------------------------------- ending

    def finish(self, one: _Candidate) -> None:
        """Note which steps were passed over, and that the run is resumed from this one; warn.

        Raises:
            StoreError: it cannot be noted.
        """
        if not self._chooses:
            return
        run = self._run
        marks: dict[int, str | None] = dict.fromkeys(step for step, root in self.passed if not root)

        def note() -> None:
            try:
                self._note(one, marks)
            except errors.StoreError as error:  # who may not write removes nothing either
                if self._most is not None or error.errno not in _NOT_WRITABLE:
                    raise

        if self._goes_back:
            run.broadcast(note, f"note the resume of {run.shown!r}")
            run.held = None if one.root else one.step
        run.passed, run.resumed = marks, one.step
        run.whole.clear()  # it may have been passed over
        lines = [f"{self._name(each)}: {why}" for each, why in self.passed.items()]
        left_out = {show_path(os.fspath(run.roots[root])): error for root, error in self._unreached.items()}
        lines += [f"{root!r} was left out: {error}" for root, error in left_out.items()]
        if lines:
            warn_of(f"resumed {run.shown!r} from step {one.step}, not from", lines, errors.StepPassedOverWarning)

    def _note(self, one: _Candidate, marks: dict[int, str | None]) -> None:
        """Write ``.run.json.resumed`` where it has to say something else; fill in the attempts of what was passed."""
        attempt = None
        if self._most is not None:
            with self._opened(one) as root:
                attempt = root.attempt_of(one.step)
            store_at(self._run.path).transaction().make()  # the first save may be yet to come
        with contextlib.suppress(errors.NotFoundError), RunFolder(self._run.path) as folder:
            old = _resumes_in(folder)
            marks.update({step: folder.attempt_of(step) for step in marks})
            still = {step: old.passed[step] for step in folder.unchanged(old.passed)} | marks
            cleared = one.step if self._entire and not one.root else None
            over = {step: mark for step, mark in still.items() if mark != GONE and step != cleared}
            counts: Mapping[tuple[int, str], int] = old.counts
            if attempt not in (None, GONE):
                key, again = (one.step, str(attempt)), {each.step for each in self.passed}
                counts = {each: count for each, count in counts.items() if each[0] in again}
                counts |= {key: old.counts.get(key, 0) + 1}
            if (new := Resumes(over, counts)) != old:
                folder.write_resumes(new)

    def require_none_passed(self) -> None:
        """Refuse to begin anew where there are steps, none of which can be used.

        Raises:
            CorruptError: there are; it says of each why.
        """
        if self.passed:
            lines = [f"{self._name(one)}: {why}" for one, why in self.passed.items()]
            more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
            told = "".join(f"\n  {line}" for line in lines[:_SHOWN])
            hint = "use a copy of a step, load one by its number, or begin in another folder"
            raise errors.CorruptError(f"no step of the run {self._run.shown!r} can be used:{told}{more}", hint=hint)

    def _name(self, one: _Candidate) -> str:
        of = f" of {show_path(os.fspath(self._run.roots[one.root]))!r}" if one.root else ""
        return f"step {one.step}{of}"


def load_newest(run: RunState, read: Read[T], fallback: bool | Fallback, *, entire: bool) -> T:
    """Return what is read of the newest step that can be used; None stands for it where there is none.

    Another program may save newer steps, and remove this one, while it is read. Then all processes choose again.
    """
    search = NewestStep(run, fallback, entire=entire)
    doing = f"look for the latest step of {run.shown!r}"
    while (chosen := run.broadcast(search.choose, doing, before=run.finish_saves)) is not None:
        one = search.take(chosen)
        ended = None if one is None else search.try_step(one, read)
        if one is not None and ended is not None:
            search.finish(one)
            return ended()
    search.require_none_passed()
    if search.gone is not None:  # whoever hears that nothing was ever saved may begin anew
        raise missing_step(run.shown, search.gone.step, [])
    return read(None, run.path)()


def newest_step(run: RunState) -> int | None:
    """Return the newest step of all roots of a run, without those that it left behind; None where there is none.

    Raises:
        StoreError: one of them cannot be reached.
    """
    search = NewestStep(run, fallback=False)
    while (chosen := search.choose()) is not None:
        if (one := search.take(chosen)) is not None:
            return one.step
    return None


def root_of(run: RunState, step: int) -> Path:
    """Return the root that a step is loaded from: the run's own folder, or the first other one that has it."""

    def find() -> int:
        return next((root for root, path in enumerate(run.roots) if step in steps_of(path)), 0)

    return run.roots[run.broadcast(find, f"look for step {step} of {run.shown!r}")]


def count_attempts(run: RunState, step: int) -> int:
    """Return how often a run was resumed from a step, without a newer one since; `Run.attempts` says more."""
    search = NewestStep(run, fallback=False)
    there = search.list_steps()
    one = next((each for each in there if each.step == step), None)
    if one is None:
        raise missing_step(run.shown, step, sorted({each.step for each in there}))
    over: frozenset[int] = read_run(run.path, RunFolder.passed_over, frozenset())
    is_newest = all(each.step <= step or (not each.root and each.step in over) for each in there)
    return search.attempts(one) if is_newest else 0


def require_whole(path: Path, step: int) -> None:
    """Open a step that was committed, and require its index and the size and header of each of its files to be right.

    Raises:
        CorruptError: one is not.
        StoreError: the system refuses.
    """
    with read_source(step_path(path, step), mapped=False) as source:
        source.arrays.check_files()


def _resumes_in(folder: RunFolder) -> Resumes:
    """Return what was noted of resumes; nothing where that is damaged, for then it is written anew."""
    try:
        return folder.read_resumes()
    except errors.CorruptError:
        return Resumes()
