"""A run, as its recipes see it: where it lies, its policies, what it waits for, and whether it is closed."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, SupportsIndex, TypeVar

import numpy as np

from treering._arrays.host import this_processes
from treering._background.saves import raise_unreported, wait_for
from treering._checkpoint.save_options import Increment
from treering._coordination.allgather import allgather_with_deadline, broadcast
from treering._coordination.message_board import PathMessageBoard
from treering._format.run_document import StepRecord
from treering._printable import kind_of, show_path
from treering._runs.folder import RunFolder
from treering._runs.gc import KnownSteps, collect, judge, remove_steps
from treering._runs.leases import NOT_CALLED, CommitCalls, Lease, StepWatch, held_in, hold_step
from treering._runs.outcomes import SaveOutcomes
from treering._runs.results import StepCommit
from treering._runs.schedule import SaveSchedule, Signals
from treering._runs.steps import missing_step, noted_steps, read_record, read_run, records_of, step_path, steps_of
from treering._store.resolve import absolute, new_folder_path
from treering._values import timing
from treering._values.arguments import require_flags, require_folder_name, timeout_seconds, wait_seconds
from treering._values.checkpoint_names import HIGHEST_STEP, step_of_name
from treering._values.human import near, steps_text
from treering._values.telemetry import warn_of
from treering.errors import (
    ClosedError,
    NotFoundError,
    StepsNotSavedWarning,
    TimedOutError,
    TreeringError,
    UnknownMetricWarning,
    UnsupportedError,
)
from treering.rules import Cadence, Decision, Policy, Verdict, best_steps, policy_text

T = TypeVar("T", bound=int | list[int] | None)

_SHOWN: Final = 10
_RESUMED: Final = "this process resumed from it, and no newer step was found whole yet"


class RunState:
    """A run of this process.

    Args:
        path: its folder.
        keep: which steps stay.
        save_every: when to save.
        timeout: seconds to wait for other processes; None for what the environment says.
        on_save_error: "raise", or "warn" where a failed save does not end training.
        max_failures: after how many failures in a row it does.
        search: other folders that may have steps of it.
        incremental: whether saves share files with the step before.
        full_every: every how many saves one shares none.
        on_commit: what is called for each step that was committed; None: nothing.

    Attributes:
        path: its folder; absolute, for the folder of the program may be another one when a save's turn comes.
        shown: the same, as the caller named it.
        keep: which steps stay.
        save_every: when to save.
        keep_text: which steps stay, as ``run.json`` has it; None where all do.
        save_every_text: when to save, as ``run.json`` has it; None: whenever a step is offered.
        timeout: seconds to wait for other processes.
        signals: those that let the next step be saved.
        schedule: decides when to save.
        known_place: whether the folder was found to be one of a run, or of nothing.
        unmeasured: the metrics that ``keep`` goes by and no step has, with the name that was probably meant; the last
            save found them out.
        outcomes: what became of the saves of this process.
        has_saved: whether this process has begun a save.
        known: what its saves know of its steps.
        roots: the folders that its steps are loaded from, its own first.
        resumed: the step that this process resumed from, where others were passed over, or other roots searched.
        passed: the steps of its own folder that this process passed over, each with the attempt of its index as far as
            process 0 knows it; a save may replace these.
        held: the step that this process resumed from, which stays until a newer one is found whole.
        calls: calls ``on_commit``, on process 0 alone; None where there is none.
        spared: whether the last save left a step because somebody held it, or ``on_commit`` was not called for it yet.
        now: the clock that a step's time is taken from, in POSIX seconds.
        increment: the steps whose files a save may share; None where each save writes everything.
        whole: the folder of the step that this process saved or loaded last, if any.
        damaged: those of the steps that it found damaged, and did not save or load since.

    Raises:
        UnsupportedError: an argument has no meaning.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, keep: Policy | None, save_every: Cadence | None, timeout: float | None,
        on_save_error: str = "raise", max_failures: int | None = None, search: Sequence[str | os.PathLike[str]] = (),
        incremental: bool = False, full_every: int | None = None,
        on_commit: Callable[[StepCommit], object] | None = None,
    ) -> None:  # fmt: skip
        _require_rule("keep", keep, Policy, "KeepLast(3)")
        _require_rule("save_every", save_every, Cadence, "SaveEvery(steps=1000)")
        self.path: Path = absolute(new_folder_path(path))
        self.shown = show_path(os.fspath(path))
        self.keep = keep
        self.save_every = save_every
        self.keep_text = None if keep is None else policy_text(keep)
        self.save_every_text = None if save_every is None else repr(save_every)
        self.timeout = timeout_seconds(timeout)
        self.outcomes = SaveOutcomes(self.path, self.shown, on_save_error, max_failures)
        self.signals = Signals()
        self.schedule = SaveSchedule(save_every, self.signals, gather=self.gather, shown=self.shown)
        self.known_place = False
        self.unmeasured: Mapping[str, str | None] = {}
        self.has_saved = False
        self.known = KnownSteps()
        self.now: Callable[[], float] = time.time
        self.roots: tuple[Path, ...] = (self.path, *_other_roots(self.path, search))
        self.resumed: int | None = None
        self.passed: dict[int, str | None] = {}
        self.held: int | None = None
        self.increment = _increment(self, incremental, full_every) if incremental or full_every is not None else None
        self.whole: list[Path] = []
        self.damaged: set[Path] = set()
        if not (on_commit is None or callable(on_commit)):
            raise UnsupportedError(f"on_commit is {on_commit!r:.100}, and must be a function of one StepCommit")
        self.calls = None if on_commit is None else CommitCalls(self.path, self.shown, on_commit)
        self.spared = False
        self._closed = False
        self._warned = False

    def require_open(self) -> None:
        """Refuse to save where nothing would wait for it.

        Raises:
            ClosedError: the run was closed.
        """
        if self._closed:
            raise ClosedError(f"the run {self.shown!r} was closed", hint="save inside its `with` block")

    def note_whole(self, path: Path) -> None:
        """Note the folder of a step that was saved or loaded, so that what the next save shares with it is whole."""
        if path.parent == self.path:  # else it is a step of another root
            self.whole[:] = [path]
            self.damaged.discard(path)

    def broadcast(self, work: Callable[[], T], doing: str, *, before: Callable[[], None] = lambda: None) -> T:
        """Return what ``work`` returns on process 0; all processes of the job call this, on the caller's thread.

        Args:
            work: what process 0 does; the answer has a form in JSON.
            doing: what for, as in ``"load the latest step of 'runs/a'"``.
            before: what each process does first; if it raises, all processes raise.

        Raises:
            TimedOutError, ProcessFailedError: other processes did not come, or broke off.
            TreeringError: what was raised on another process; this one raises its own.
        """
        board = functools.partial(PathMessageBoard.of, self.path)
        return broadcast(work, this_processes(()), board=board, timeout=self.timeout, doing=doing, before=before)

    def gather(self, said: bytes, doing: str) -> list[bytes]:
        """Return what all processes of the job say, in their order; each calls this, and it raises as `broadcast`."""
        board = PathMessageBoard.of(self.path)
        return allgather_with_deadline(said, this_processes(()), timeout=self.timeout, board=board, doing=doing)

    def wait(self, timeout: float | None) -> None:
        """Wait until nothing of the run is in flight; raise what failed, unless that was told.

        Raises:
            TimedOutError: it takes longer, or shows no progress any more.
            TreeringError: a save failed.
        """
        begun, timeout = time.monotonic(), wait_seconds(timeout)
        self.finish_saves(timeout)
        self.warn()
        end = time.monotonic() + self.timeout if timeout is None else begun + timeout
        self._await_calls(end)
        self._await_removals(end)

    def raise_unreported(self, *, raises: bool = True) -> None:
        """Raise what an earlier save failed at, or warn of it, unless that was told; `SaveOutcomes.settle` says more.

        Raises:
            TreeringError: an earlier save failed.
        """
        if self.calls is not None and self.calls.is_here():
            return  # what ``on_commit`` meets is only logged
        raise_unreported(self.path)
        self.outcomes.settle(raises=raises)

    def finish_saves(self, timeout: float | None = None) -> None:
        """Wait until nothing of the run is in flight; raise what failed, or warn of it, unless that was told.

        Raises:
            TimedOutError: it takes longer than ``timeout`` seconds, or shows no progress any more.
            TreeringError: a save failed.
        """
        wait_for(self.path, timeout)
        self.raise_unreported()

    def timeout_of(self, decision: Decision) -> float:
        """Return how long a save waits for others: not longer than this process is there, if that is known."""
        left = self.schedule.seconds_left() if decision.final else None
        return self.timeout if left is None else min(self.timeout, max(left, timing.current.linger))

    def warn(self) -> None:
        """Warn, once, where ``keep`` goes by metrics that no step has."""
        if self.unmeasured and not self._warned:
            self._warned = True
            meant = {name: f"; did you mean {close!r}?" if close else "" for name, close in self.unmeasured.items()}
            lines = [f"{name!r}{close}" for name, close in meant.items()]
            warn_of("no step has the metric of KeepBest, so it keeps all", lines, UnknownMetricWarning)

    def close(self, *, removals: bool = True, sweep: bool = False) -> None:
        """Wait, put handlers of signals back, and save no more.

        Args:
            removals: whether to wait for removals by process 0 too.
            sweep: whether process 0 removes what waited for readers and is past their grace.

        Raises:
            TreeringError: a save failed.
        """
        require_flags(sweep=sweep)
        self._closed = True
        try:
            self.finish_saves()
            if removals:
                self._await_calls(time.monotonic() + self.timeout)
                self._await_removals(time.monotonic() + self.timeout)
            if sweep and this_processes(()).is_coordinator:
                remove_steps(self.path, (), by_age=True)
        finally:
            self.signals.close()

    def leave(self, error: BaseException | None) -> None:
        """Close at the end of a block; an error that ended the block passes, with a note of what failed here."""
        if error is None:
            self.close()
            self.warn()
            self._warn_unsaved()
            return
        try:
            self.close(removals=False)
        except TreeringError as failed:
            error.add_note(f"In addition, in the run {self.shown!r}: {failed}")

    def _warn_unsaved(self) -> None:
        if self.schedule.unsaved is not None and this_processes(()).is_coordinator:
            first, last = self.schedule.unsaved
            what = f"a run ended with steps that were offered to {self.shown!r} after its last save, and not saved"
            steps = f"{last}" if first == last else f"{first} to {last}"
            line = f"{steps}; run.save({last}, tree, force=True) saves whatever save_every says"
            warn_of(what, [line], StepsNotSavedWarning)

    def _await_calls(self, end: float) -> None:
        """Wait until ``on_commit`` was called for all steps, then remove steps that stayed for that, or for a lease.

        Raises:
            TimedOutError: it was not, when the monotonic clock says ``end``.
        """
        if not this_processes(()).is_coordinator:
            return
        if self.calls is not None:
            if self.calls.is_here():
                return  # it would wait for itself
            self.calls.prepare(None)
            self.calls.wait(end)
        if self.spared:
            collect(self.path, self.keep, spared=self._stays())
            self.known.forget()
            self.spared = bool(held_in(self.path))

    def _stays(self) -> dict[int, str]:
        """Return the steps that stay whatever the rules say, each with why, as far as this process alone knows it."""
        stays = {} if self.calls is None else dict.fromkeys(self.calls.pending(), NOT_CALLED)
        return stays if self.held is None else stays | {self.held: _RESUMED}

    def _await_removals(self, end: float) -> None:
        """Wait until process 0 of the job has removed what has to go after the saves of this process.

        Raises:
            TimedOutError: it has not, when the monotonic clock says ``end``.
        """
        if not self.has_saved or this_processes(()).is_coordinator:
            return
        with self.outcomes.warning("waiting for the removals"):
            while going := self._still_there():
                if time.monotonic() >= end:
                    left = f"{steps_text(going)} of {self.shown!r}"
                    what = f"process 0 has not removed {left}, which `keep` does not keep"
                    hint = "find out what happened to it; all processes have to pass the same `keep`"
                    raise TimedOutError(what, hint=hint, missing=(0,))
                time.sleep(timing.current.removal_pause)

    def _still_there(self) -> list[int]:
        """Return the steps that process 0 is about to remove: of those that it spared, ``run.json`` still tells."""
        verdicts = judge(self.path, self.keep, spared=self._stays())
        going = [verdict.step for verdict in verdicts if not verdict.kept]
        spares = going and (self.calls is not None or read_run(self.path, RunFolder.has_left, False))
        noted = read_run(self.path, noted_steps, set[int]()) if spares else set()
        return [step for step in going if not {step, verdicts[-1].step} <= noted]

    # ------------------------------------------------------------------------------------------------ what is there

    def best(self, metric: str, mode: Literal["min", "max"]) -> int | None:
        """Return the step whose metric is best; ``Run.best`` says more."""
        steps = records_of(self.path).steps
        best = best_steps(steps, metric, mode)
        if best or not steps:
            return next(iter(best), None)
        # None would load the latest step.
        names = sorted({name for step in steps for name in step.metrics})
        if metric in names:
            raise NotFoundError(f"no step of the run {self.shown!r} is best: {metric!r} is nan in all that have it")
        close = near(metric, names)
        there = f"they have {', '.join(map(repr, names[:_SHOWN]))}" if names else "they have no metric"
        hint = f"did you mean {close!r}?" if close else there
        raise NotFoundError(f"no step of the run {self.shown!r} has the metric {metric!r}", hint=hint)

    def metrics(self, step: SupportsIndex) -> dict[str, float]:
        """Return the metrics of a step; ``Run.metrics`` says more."""
        step = require_step_number(step)
        wait_for(step_path(self.path, step))

        def read(run: RunFolder) -> StepRecord | None:
            return None if step in run.superseded_steps() else read_record(run, step)

        if (record := read_run(self.path, read, None)) is None:
            raise missing_step(self.shown, step, steps_of(self.path))
        return dict(record.metrics)

    def watch(self, *, after: SupportsIndex | None, timeout: Any, hold: bool) -> StepWatch:
        """Return the steps as they become durable; ``Run.watch`` says more."""
        if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):
            raise UnsupportedError(f"timeout is {timeout!r:.100}", hint="seconds, 0 or more, or None to watch for ever")
        require_flags(hold=hold)
        after = None if after is None else require_step_number(after)
        broadcast = None
        if this_processes(()).count > 1:
            broadcast = functools.partial(self.broadcast, doing=f"watch the steps of {self.shown!r}")
        return StepWatch(
            self.path, self.shown, after=after, timeout=timeout, hold=hold, broadcast=broadcast, patience=self.timeout
        )

    def hold(self, step: SupportsIndex, seconds: float) -> Lease:
        """Return a lease on a step; ``Run.hold`` says more."""
        step = require_step_number(step)
        wait_for(step_path(self.path, step))
        return hold_step(self.path, self.shown, step, seconds)

    def collect(self, *, dry_run: bool) -> list[Verdict]:
        """Return what stays and what goes; ``Run.gc`` says more."""
        require_flags(dry_run=dry_run)
        if dry_run:
            return judge(self.path, self.keep, spared=self._stays())
        doing = f"remove steps of {self.shown!r}"
        verdicts: list[Verdict] = []

        def judge_all() -> None:
            self.finish_saves()
            verdicts.extend(judge(self.path, self.keep, spared=self._stays()))

        def remove() -> None:
            collect(self.path, self.keep, spared=self._stays())
            self.known.forget()

        # All processes judge before process 0 removes, so that every process lists the steps that go.
        self.broadcast(lambda: None, doing, before=judge_all)
        self.broadcast(remove, doing)
        return verdicts

    def delete(self, step: SupportsIndex) -> None:
        """Remove a step; ``Run.delete`` says more."""
        step = require_step_number(step)

        def remove() -> None:
            remove_steps(self.path, [step])
            self.known.forget()

        self._change(step, remove, f"remove step {step} of {self.shown!r}")

    def branch(self, step: SupportsIndex, new: RunState) -> None:
        """Copy a step into a new run; ``Run.branch`` says more."""
        from treering._runs.copy_run import branch_step

        step = require_step_number(step)
        require_folder_name(new.path, new.shown, "a run")

        def copy() -> None:
            branch_step(self.path, step, new.path, keep=new.keep_text, save_every=new.save_every_text)

        self._change(step, copy, f"branch from step {step} of {self.shown!r}")

    def _change(self, step: int, act: Callable[[], None], doing: str) -> None:
        """Let process 0 do something with a step that is there, when nothing is in flight."""

        def work() -> None:
            if step not in (there := steps_of(self.path)):
                raise missing_step(self.shown, step, there)
            act()

        self.broadcast(work, doing, before=self.finish_saves)


def _increment(run: RunState, incremental: bool, full_every: int | None) -> Increment:
    """Return what says which steps a save may share files with: the one that this process saved or loaded last, if any.

    Never with one that was passed over when the run was resumed: its damage would be that of all that follow.

    Raises:
        UnsupportedError: the options of the run have no meaning.
    """
    number = full_every if type(full_every) is int else 0
    if incremental is not True or (full_every is not None and number < 1):
        given = f"incremental={incremental!r:.100}, full_every={full_every!r:.100}"
        hint = "full_every is a number of saves, 1 or more, and goes with incremental=True"
        raise UnsupportedError(f"a run cannot have {given}", hint=hint)

    def find() -> Iterator[Path]:
        yield from (path for path in run.whole[-1:] if path not in run.damaged)
        # It is gone, or nothing was saved or loaded by this process yet.
        with contextlib.suppress(TreeringError):
            latest = read_run(run.path, functools.partial(_latest_not_passed, known=run), None)
            if latest is not None:
                yield step_path(run.path, latest)

    return Increment(find=find, required=False, full_every=full_every, note=run.note_whole)


def _latest_not_passed(folder: RunFolder, known: RunState) -> int | None:
    passed = {*folder.unchanged(folder.read_resumes().passed), *folder.unchanged(known.passed)}
    passed.update(step for path in tuple(known.damaged) if (step := step_of_name(path.name)) is not None)
    return max(set(folder.steps()) - passed, default=None) if passed else folder.latest()


def _require_rule(name: str, given: object, kind: type[Policy | Cadence], example: str) -> None:
    if given is not None and not isinstance(given, kind):
        hint = f"write {name}=treering.{example}, say"
        raise UnsupportedError(f"{name} is {given!r:.100}, which is not a rule", hint=hint)


def _other_roots(path: Path, search: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return the folders to search beside the run's own, each once.

    Raises:
        UnsupportedError: it is one path, not a list of them.
    """
    if isinstance(search, str | os.PathLike):
        raise UnsupportedError(f"search is {search!r:.200}, but must be a list of paths", hint="write search=[path]")
    others = dict.fromkeys(absolute(new_folder_path(other)) for other in search)
    return [other for other in others if other != path]


def require_step_number(step: Any) -> int:
    """Return a step as an int; numpy's and jax's are taken too.

    Raises:
        UnsupportedError: it is no number of a step.

    Example:
        >>> require_step_number(np.int32(7))
        7
    """
    hint = "steps are ints from 0 to 2**63 - 1"
    try:
        number = operator.index(step)
    except TypeError:
        if not isinstance(step, str | float | None):
            hint = "the step is the first argument: run.save(step, tree), run.load(step, like=tree)"
            raise UnsupportedError(f"{kind_of(step)} is not a step", hint=hint) from None
        number = -1
    if isinstance(step, bool | np.bool_) or not 0 <= number <= HIGHEST_STEP:
        raise UnsupportedError(f"{step!r:.100} is not a step", hint=hint)
    return number
