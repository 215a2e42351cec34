"""A step of a run: whether it is saved, as what, and what has to happen once it is durable."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import operator
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, SupportsIndex, TypeAlias

import jax
import numpy as np

from treering._arrays.host import this_processes
from treering._background.saves import in_flight, reword, wait_for
from treering._background.writer import PendingSave
from treering._checkpoint.save import begin_save, counted
from treering._checkpoint.save_options import SaveOptions
from treering._format.document import INDEX_NAME
from treering._format.run_document import Resumes, StepNote, SupersededSteps, add_note
from treering._printable import kind_of
from treering._runs import gc
from treering._runs.fallback import require_whole
from treering._runs.folder import GONE, RunFolder
from treering._runs.iterators import replace_stateful_items, state_keys
from treering._runs.leases import end_leases, leave_leases
from treering._runs.outcomes import BegunSave
from treering._runs.results import StepSave
from treering._runs.run_state import RunState, require_step_number
from treering._runs.steps import latest_known, names_in, noted_steps, require_run, step_path, steps_from
from treering._store.waiting import warn_denied
from treering._values.arguments import require_flags, require_folder_name
from treering._values.checkpoint_names import LEFT_DOCUMENT, step_name, step_of_name
from treering._values.human import steps_text
from treering._values.processes import Processes
from treering._values.telemetry import note_duration
from treering.errors import (
    BusyError,
    CorruptError,
    ExistsError,
    NotFoundError,
    PermissionDeniedError,
    StoreError,
    TreeringError,
    UnsupportedError,
)
from treering.rules import Decision, unknown_metrics

_Given: TypeAlias = Mapping[str, Any] | None
_NUMBERS: Final = (int, float, np.generic, np.ndarray, jax.Array)
# Of numpy: truth values, ints, floats; V: those of ml_dtypes, bfloat16 for instance.
_KINDS: Final = "biufV"


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """Where a step stands among those that are there."""

    replaced: bool = False
    """Whether there was such a step."""
    left: Sequence[int] = ()
    """Later steps, which are left behind."""
    mark: str | None = None
    """That of the list of those, on the process that writes it down; None where nothing is left behind."""
    there: frozenset[int] | None = None
    """The steps that had a folder, or were in flight; None if unknown."""
    noted: bool = False
    """Whether the run has noted steps that were passed over."""

    def text(self, step: int) -> str:
        """Return what becomes of them, to follow the reason of a save."""
        replaced = f"; it replaces step {step}" if self.replaced else ""
        gone = f"; it removes the later {steps_text(self.left)}" if self.left else ""
        return replaced + gone


def save_step(run: RunState, step: SupportsIndex, tree: Any, **wishes: Any) -> StepSave:
    """Save a step of ``run``; ``Run.save`` says more, also of the other arguments."""
    start = time.perf_counter()
    try:
        saved = _save_step(run, step, tree, **wishes)
    except Exception as error:
        if not run.outcomes.forgives(error):
            raise
        number = operator.index(step)
        run.schedule.pass_over(number)
        return run.outcomes.fail(number, error, run.timeout, raises=this_processes(()).count == 1)
    if saved:
        note_duration("save/blocked", start)
    return saved


def _save_step(
    run: RunState,
    step: SupportsIndex,
    tree: Any,
    *,
    metrics: Mapping[str, Any] | None,
    metadata: Mapping[str, Any] | None,
    rollback: bool,
    force: bool,
    **others: Any,
) -> StepSave:
    decision: Decision | None = None
    number = operator.index(step) if isinstance(step, int | np.integer) else None
    processes, path = this_processes(()), run.path if number is None else step_path(run.path, number)

    def saves() -> bool:
        return run.schedule.saves(number, force=force) if decision is None else decision.save

    def counted_from() -> int | None:
        looking = f"look for the latest step of {run.shown!r}"
        return run.broadcast(lambda: latest_known(run.path), looking) if run.resumed is None else run.resumed

    with counted(path, saves=saves), _take_back_on_failure(run, path, processes, lambda: decision is not None):
        run.require_open()
        run.warn()
        step = require_step_number(step)
        require_flags(rollback=rollback, force=force)
        decision = run.schedule.decide(step, processes, latest=counted_from, force=force)
        if not decision.save:
            run.raise_unreported(raises=processes.count == 1)  # where others save, they can be told
            return StepSave(step=step, reason=decision.reason)
        order, items, note = Order(), None, dict[str, Any]()
        refusal: Exception | None = None
        try:
            run.raise_unreported()
            if processes.is_coordinator or rollback:
                order = order_of(run, step, rollback=rollback, is_coordinator=processes.is_coordinator)
            note = step_metadata(
                step, run.now(), metrics=metrics, metadata=metadata, temporary=decision.temporary, mark=order.mark
            )
            items = replace_stateful_items(tree)
            _announce(run, step, order, processes)
        except Exception as error:
            if processes.count == 1:
                raise
            refusal = error  # the others wait for this process, and are told
        path = step_path(run.path, step)
        begun = BegunSave(run.outcomes, step)
        run.has_saved = True
        with _undo_on_failure(run, order.mark, lambda: bool(in_flight(path))):
            replaces, timeout = rollback or step in run.passed, run.timeout_of(decision)
            options = SaveOptions.of(path, metadata=note, overwrite=replaces, timeout=timeout, **others)
            states = state_keys(tree) if processes.count > 1 else ()  # process 0 alone writes them
            options = dataclasses.replace(options, states=states, increment=run.increment)
            around = _collect_afterwards(run, order, begun) if processes.is_coordinator else None
            pending = begin_save(items, options, run=run.path, around=around, refusal=refusal, ended=begun.ended)
    if decision.final:
        _finish(run, pending, decision.signum)
    reason = decision.reason + order.text(step)
    return StepSave(step=step, reason=reason, temporary=decision.temporary, pending=pending)


def _finish(run: RunState, pending: PendingSave, signum: int | None) -> None:
    """Wait until the last step is durable, or has failed in a run that only warns of that; then let a signal go on."""
    wait_for(pending.path)
    if run.outcomes.warns:
        run.raise_unreported()
    else:
        pending.result()
    if signum is not None:
        run.signals.pass_signal_on(signum)


def _announce(run: RunState, step: int, order: Order, processes: Processes) -> None:
    """Write down what others have to know before a step is committed."""
    if order.mark is not None:
        with RunFolder(run.path) as folder:
            there = {each: attempt for each in order.left if (attempt := folder.attempt_of(each)) != GONE}
            folder.write_left(SupersededSteps(step=step, mark=order.mark, left=there))
    if run.calls is not None and processes.is_coordinator:
        run.calls.prepare(step)


@contextlib.contextmanager
def _take_back_on_failure(
    run: RunState, path: Path, processes: Processes, is_decided: Callable[[], bool]
) -> Iterator[None]:
    """Take back the decision of a process that is alone when a step was not saved: the next step makes up for it."""
    try:
        yield
    except BaseException as error:  # an interrupt too, before the save is handed over; raised again below
        forgiven = isinstance(error, Exception) and run.outcomes.warns  # else it would warn at each step
        if processes.count == 1 and is_decided() and not forgiven and not in_flight(path):
            run.schedule.take_back()
        raise


# ------------------------------------------------------------------------------------------------ before it is written


def order_of(run: RunState, step: int, *, rollback: bool, is_coordinator: bool) -> Order:
    """Compare a step with those that are there and in flight.

    Args:
        run: the run.
        step: the step that is to be saved.
        rollback: whether it may replace what is there, and leave later ones behind.
        is_coordinator: whether this process also removes what an earlier save has left behind and could not remove.

    Raises:
        ExistsError: it is there, or a later one is, and ``rollback`` is False.
        TreeringError: what was left behind cannot be removed.
    """
    # First: a save that ends now is seen by its name afterwards.
    flying = {pending.path.name for pending in in_flight(run.path)}
    names = set[str]()
    with contextlib.suppress(NotFoundError), RunFolder(run.path) as folder:
        listed = names_in(folder)
        names = {LEFT_DOCUMENT, *map(step_name, noted_steps(folder))} if listed is None else listed
        if INDEX_NAME in names or not run.known_place:
            require_run(folder, listed)
            run.known_place = True
    if not names:  # a run that is there goes on, whatever its name is
        require_folder_name(run.path, run.shown, "a run")
    # By names alone: a look into thousands of steps would hold up the loop.
    folders = frozenset([found for found in map(step_of_name, names | flying) if found is not None])
    noted = Resumes.NAME in names or bool(run.passed)
    if run.passed and not rollback:
        passed = _still_passed(run, step) - set(map(step_of_name, flying))
        if step > max(folders - passed, default=-1):
            return Order(replaced=step in passed & folders, there=folders, noted=noted)
    if step <= max(folders, default=-1):  # of some of them nothing but a tombstone may be left
        with contextlib.suppress(NotFoundError, StoreError), RunFolder(run.path) as folder:
            removed, untidy = folder.survey()
            # A first save in a bucket puts a tombstone in its place before it commits.
            folders -= removed - untidy - set(map(step_of_name, flying))
    if step > max(folders, default=-1):
        return Order(there=folders, noted=noted)
    # Only what is in flight knows which steps there will be: it may remove some, or fail.
    run.finish_saves()
    if is_coordinator and LEFT_DOCUMENT in names:
        with RunFolder(run.path) as folder:
            errors, remains = gc.remove_superseded(folder)
            if remains is not None and (rollback or step in remains.left):  # its name, or the list, is needed
                errors, _ = gc.remove_superseded(folder, force=True)
            gc.raise_first(errors)
    there = steps_from(run.path, step)
    later = [number for number in there if number > step]
    if not rollback and step in there and not later:
        what = f"step {step} of the run {run.shown!r} is there already"
        raise ExistsError(what, hint=f"a loop that resumes from it begins at {step + 1}; rollback=True replaces it")
    if not rollback and later:
        here = f"rollback=True continues here, and removes the steps after {step}"
        hint = f"run.branch(step, path) continues from an older step in a new run; {here}"
        raise ExistsError(f"step {step} of the run {run.shown!r} is older than its latest step, {later[-1]}", hint=hint)
    mark = secrets.token_hex(8) if is_coordinator and later else None
    return Order(replaced=step in there, left=later, mark=mark, noted=noted)


def step_metadata(
    step: int, saved: float, *, metrics: _Given, metadata: _Given, temporary: bool, mark: str | None = None
) -> dict[str, Any]:
    """Return the metadata of a step's checkpoint: the user's, and the run's own note.

    Args:
        step: its number.
        saved: when it is saved, in POSIX seconds.
        metrics: the user's numbers, by name.
        metadata: the user's JSON.
        temporary: whether it goes when a newer step is committed.
        mark: that of the list of the steps which it leaves behind, if it does.

    Raises:
        UnsupportedError: something is of another type, or cannot be noted.

    Example:
        >>> noted = step_metadata(7, 0.0, metrics={"loss": np.float32(0.5)}, metadata=None, temporary=False)
        >>> noted["treering"]["metrics"]
        {'loss': 0.5}
    """
    if not isinstance(metadata, Mapping | None):
        raise UnsupportedError(f"metadata is {kind_of(metadata)}, not a dict of JSON")
    note = StepNote(step=step, saved=saved, metrics=_numbers(metrics), temporary=temporary, mark=mark)
    return add_note(metadata or {}, note)


def _numbers(metrics: _Given) -> dict[str, float]:
    if not isinstance(metrics, Mapping | None):
        raise UnsupportedError(f"metrics is {kind_of(metrics)}, not a dict of numbers")
    given: Mapping[Any, Any] = metrics or {}
    for name in given:
        if not isinstance(name, str) or not name:
            raise UnsupportedError(f"the metric {name!r:.100} has no name: names are str")
    return {name: _number(name, value) for name, value in given.items()}


def _number(name: str, value: Any) -> float:
    kind = value.dtype.kind if isinstance(value, np.generic | np.ndarray | jax.Array) else "f"
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if isinstance(value, _NUMBERS) and np.ndim(value) == 0 and kind in _KINDS:
            return float(value)
    hint = "metrics are numbers that a float can hold: int, float, or an array without axes"
    raise UnsupportedError(f"the metric {name!r:.100} is {value!r:.100}, which is not a number", hint=hint)


def _still_passed(run: RunState, step: int) -> frozenset[int]:
    """Return this step and later ones that this process passed over when it resumed, and nobody has saved anew."""
    marks = {each: mark for each, mark in run.passed.items() if each >= step}
    with contextlib.suppress(NotFoundError), RunFolder(run.path) as folder:
        return folder.unchanged(marks) if marks else frozenset()
    return frozenset()


# --------------------------------------------------------------------------------------------------- once it is durable


@contextlib.contextmanager
def _undo_on_failure(run: RunState, mark: str | None, goes_on: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Take back what `_announce` has noted if the block fails, and what it has written if nothing was committed.

    Args:
        run: the run.
        mark: that of the list of superseded steps; None where nothing is superseded.
        goes_on: tells whether another thread carries the save out, which an interrupt of this one does not end.
    """
    try:
        yield
    except BaseException as error:  # an interrupt too; raised again below
        if goes_on():
            raise
        if run.calls is not None:
            run.calls.forget()
        if mark is not None:
            unanswered = isinstance(error, StoreError) and error.errno == errno.EIO
            with contextlib.suppress(TreeringError), RunFolder(run.path) as folder:  # the next save sweeps it
                found = folder.read_left()
                # A request to commit that was not answered may yet be carried out, and then the list has to be there.
                late = unanswered and folder.store.longest_delay > 0
                if not late and found is not None and found.mark == mark and folder.read_superseded() is None:
                    folder.remove_left()
        raise


@contextlib.contextmanager
def _collect_afterwards(run: RunState, order: Order, save: BegunSave) -> Iterator[None]:
    """Do what process 0 does on the writing thread when a step is committed.

    Args:
        run: the run.
        order: where the step stands among the others.
        save: the save that the block carries out.
    """
    step = save.step
    with _undo_on_failure(run, order.mark):
        yield
    save.committed = time.monotonic()
    seconds = save.committed - save.begun
    try:
        if order.replaced or order.left:
            run.known.forget()
        more = len(in_flight(run.path)) > 1
        collect_after(run, step, order, seconds=seconds, more_follow=more)
        run.unmeasured = unknown_metrics(run.keep, run.known.records.values())
    except Exception as error:
        shown = os.fspath(step_path(run.path, step))
        raise reword(error, f"the save to {shown!r} is committed; a later part of it failed") from error
    finally:
        if run.calls is not None:
            run.calls.offer(step)


def collect_after(
    state: RunState, step: int, order: Order, *, seconds: float | None, more_follow: bool = False
) -> None:
    """Do what follows the commit of a step: remove the steps that the policy does not keep, and note the others.

    What this costs does not grow with the steps that stay: only those are looked at that are new here, that would go,
    or that decide it. What a dead process left in the folder of another step is for `treering._runs.gc.collect`; in a
    bucket the first save of a process looks for it too, by one listing, and then one a day.

    Args:
        state: the run.
        step: the step.
        order: where it stands among the others.
        seconds: how long the save took.
        more_follow: whether another save of the run is waiting, which will note this step too.

    Raises:
        StoreError: the system refused. The other steps are done all the same; what is left is for the next call.
        LinkRefusedError: ``run.json`` is a link.
    """
    errors: list[TreeringError] = []
    known = state.known
    with RunFolder(state.path) as run:
        back = None
        leased = (left_there := run.has_left()) and run.is_left_for_leases()
        if left_there and not leased:
            known.forget()
            errors, back = gc.remove_superseded(run)
            leased = run.is_left_for_leases() if back is None else back.leases
        hidden = run.superseded_steps() if back is not None else ()
        known.refresh(run, step, order.there, seconds=seconds, left={*order.left, *hidden})
        judged = _judge(state, run, step, errors, noted=order.noted)
        held = _find_held(run, known.records, judged, errors) if leased else ()
        spared = {*held, *(() if state.calls is None else state.calls.pending())}
        going = {old: digest for old, digest in judged.items() if old not in spared}
        state.spared = len(going) < len(judged) and known.denied is None
        if back is not None:
            going.pop(back.step, None)  # with it would go what hides the steps that it has left behind
        if going and known.denied is not None:
            warn_denied(state.path, known.denied, "steps that `keep` does not keep")
            going.clear()
        removed = _remove(state, run, going, errors, may_wait=more_follow)
        if run.store.grace:
            known.release(removed, run.store.grace)
        known.schedule(gc.tidy_steps(run, known.untidy(), step, errors, by_age=known.by_age))
        known.sweep(run)
        if leased and back is None and not held:
            with gc.collect_errors(errors):
                leave_leases(run)
    gc.raise_first(error for error in errors if not isinstance(error, BusyError))  # the next call comes by again


def _judge(state: RunState, run: RunFolder, step: int, errors: list[TreeringError], *, noted: bool) -> dict[int, str]:
    """Return the steps that no rule keeps, each with the digest of its index; none where a rule fails."""
    known, judged = state.known, dict[int, str]()
    with gc.collect_errors(errors):  # a rule of the user's own may fail
        known.passed = run.unchanged(run.read_resumes().passed) if noted else frozenset()
        judged = known.removable(run, state.keep)
    with gc.collect_errors(errors):
        _let_go(state, step, judged)
    return judged


def _remove(
    state: RunState, run: RunFolder, going: Mapping[int, str], errors: list[TreeringError], *, may_wait: bool
) -> list[int]:
    """Note the steps that stay, then remove the others but for those that somebody holds; return the removed ones."""
    known = state.known
    noted = {old: known.records[old] for old in going}
    known.drop(going)
    with gc.collect_errors(errors):
        known.write(run, state.keep_text, state.save_every_text, may_wait=may_wait and not going)
    # Only now, for who began to hold one of them before has not read that it goes.
    spared = _find_held(run, going, going, errors)
    if spared:
        state.spared = True
        known.records |= {old: noted[old] for old in spared}
        with gc.collect_errors(errors):
            known.write(run, state.keep_text, state.save_every_text, may_wait=False)
    # One whose index turns out to be damaged stays, and ends no training: `gc` and `verify` say so.
    refused: list[TreeringError] = []
    removed = gc.remove_judged(run, {old: going[old] for old in going if old not in spared}, refused)
    errors += [error for error in refused if not isinstance(error, CorruptError)]
    return removed


def _find_held(
    run: RunFolder, steps: Collection[int], going: Collection[int], errors: list[TreeringError]
) -> Collection[int]:
    """Return those of the steps that somebody holds; all where that cannot be known."""
    try:
        return end_leases(run, steps) if steps else ()
    except PermissionDeniedError as error:
        if going:
            warn_denied(run.path, error, "steps that `keep` does not keep")
    except TreeringError as error:
        errors.append(error)
    return steps


def _let_go(state: RunState, step: int, going: dict[int, str]) -> None:
    """Keep the step that this process resumed from among those that go, until the one that was saved is found whole.

    Raises:
        CorruptError: it is damaged.
        StoreError: the system refuses to read it.
    """
    held, kept = state.held, None if state.held is None else going.pop(state.held, None)
    if held not in (None, step):
        require_whole(state.path, step)
        state.held = None
        going |= {} if kept is None else {held: kept}
