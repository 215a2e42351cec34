"""A step of a run: whether it is saved, as what, and what has to happen once it is durable."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np

from treering._arrays.host import this_processes
from treering._arrays.jobs import Progress
from treering._background.saves import in_flight, raise_unreported, reword, wait_for
from treering._checkpoint.save import begin_save, counted
from treering._checkpoint.save_options import SaveOptions
from treering._format.document import INDEX_NAME
from treering._runs.gc import collect_after
from treering._runs.iterators import replace_stateful_items, require_step_number, state_keys, step_metadata
from treering._runs.removal import announce_superseded, remove_superseded, withdraw_on_failure
from treering._runs.reports import find_unmeasured
from treering._runs.results import StepSave
from treering._runs.run_state import RunState
from treering._runs.steps import latest_known, noted_steps, open_run, step_path, steps_from
from treering._store.resolve import store_at
from treering._store.run_folder import LEFT_DOCUMENT, RunFolder, step_name, step_of_name
from treering._values.human import steps_text
from treering._values.processes import Processes
from treering.cadence import Decision
from treering.errors import ExistsError, NotFoundError, PermissionDeniedError, StoreError


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

    def text(self, step: int) -> str:
        """Return what becomes of them, to follow the reason of a save."""
        replaced = f"; it replaces step {step}" if self.replaced else ""
        gone = f"; it removes the later {steps_text(self.left)}" if self.left else ""
        return replaced + gone


def save_step(
    run: RunState,
    step: SupportsIndex,
    tree: Any,
    *,
    metrics: Mapping[str, Any] | None,
    metadata: Mapping[str, Any] | None,
    rollback: bool,
    force: bool,
    progress: Progress | bool | None,
) -> StepSave:
    """Save a step of ``run``; ``Run.save`` says more."""
    decision: Decision | None = None
    number = operator.index(step) if isinstance(step, int | np.integer) else None
    processes, path = this_processes(()), run.path if number is None else step_path(run.path, number)

    def saves() -> bool:
        return run.schedule.saves(number, force=force) if decision is None else decision.save

    with counted(path, saves=saves), _take_back_on_failure(run, processes, lambda: decision is not None):
        run.require_open()
        run.warn()
        step = require_step_number(step)
        decision = run.schedule.decide(step, processes, latest=_first_latest(run), force=force)
        if not decision.save:
            raise_unreported(run.path)
            return StepSave(step=step, reason=decision.reason)
        order = Order()
        items, note = None, dict[str, Any]()
        refusal: Exception | None = None
        try:
            raise_unreported(run.path)
            if processes.is_coordinator or rollback:
                order = order_of(run, step, rollback=rollback, is_coordinator=processes.is_coordinator)
            note = step_metadata(
                step, run.now(), metrics=metrics, metadata=metadata, temporary=decision.temporary, mark=order.mark
            )
            items = replace_stateful_items(tree)
            if order.mark is not None:
                announce_superseded(run.path, step, order.mark, order.left)
        except Exception as error:
            if processes.count == 1:
                raise
            refusal = error  # the others wait for this process, and are told
        begun, path = time.monotonic(), step_path(run.path, step)
        run.has_saved = True
        with withdraw_on_failure(run.path, order.mark):
            options = SaveOptions.of(path, metadata=note, overwrite=rollback, progress=progress, timeout=run.timeout)
            if processes.count > 1:  # process 0 alone writes them
                options = dataclasses.replace(options, states=state_keys(tree))
            around = _collect_afterwards(run, step, order, begun=begun) if processes.is_coordinator else None
            pending = begin_save(items, options, run=run.path, around=around, refusal=refusal)
    if decision.final:
        wait_for(pending.path)
        pending.result()
    if decision.final and decision.signum is not None:
        run.signals.pass_signal_on(decision.signum)
    reason = decision.reason + order.text(step)
    return StepSave(step=step, reason=reason, temporary=decision.temporary, pending=pending)


@contextlib.contextmanager
def _take_back_on_failure(run: RunState, processes: Processes, is_decided: Callable[[], bool]) -> Iterator[None]:
    """Let the rules of a process that is alone hear that a step was not saved: the next one makes up for it."""
    try:
        yield
    except Exception:  # whatever it is: the step was not saved; raised again below
        if processes.count == 1 and is_decided():
            run.schedule.take_back()
        raise


# ------------------------------------------------------------------------------------------------ before it is written


def _first_latest(run: RunState) -> int | None:
    """Return the latest step, where the rules count from it; alike on all processes."""
    if run.save_every is None or run.counts_from_latest:
        return None
    latest = run.latest(find_latest=latest_known)
    run.counts_from_latest = True
    return latest


def order_of(run: RunState, step: int, *, rollback: bool, is_coordinator: bool) -> Order:
    """Hold a step against those that are there and in flight.

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
    names = _names_in(run.path)
    if names is not None:
        if INDEX_NAME in names or not run.known_place:
            with contextlib.suppress(NotFoundError), open_run(run.path):
                run.known_place = True
        # By names alone: a look into thousands of steps would hold up the loop.
        folders = frozenset([found for found in map(step_of_name, names | flying) if found is not None])
        if step <= max(folders, default=-1):
            folders -= _removed_in(run.path)
        if step > max(folders, default=-1):
            return Order(there=folders)
    # Only what is in flight knows which steps there will be: it may remove some, or fail.
    wait_for(run.path)
    raise_unreported(run.path)
    if is_coordinator and names is not None and LEFT_DOCUMENT in names:
        with RunFolder(run.path) as folder:
            for error in remove_superseded(folder):
                raise error
    there = steps_from(run.path, step)
    later = [number for number in there if number > step]
    if not rollback and step in there and not later:
        what = f"step {step} of the run {run.shown!r} is there already"
        raise ExistsError(what, hint=f"a loop that resumes from it begins at {step + 1}; rollback=True replaces it")
    if not rollback and later:
        here = f"rollback=True continues here, and removes the steps after {step}"
        hint = f"run.branch(step, path) continues from an older step in a new run; {here}"
        raise ExistsError(f"step {step} of the run {run.shown!r} is older than its latest step, {later[-1]}", hint=hint)
    return Order(replaced=step in there, left=later, mark=secrets.token_hex(8) if is_coordinator and later else None)


def _names_in(path: Path) -> set[str] | None:
    """Return what lies in a run's folder; None where it cannot be read, for a reason that a closer look will tell.

    Where a bucket denies to list it, that is what ``run.json`` names.
    """
    try:
        with RunFolder(path) as folder:
            return set(folder.names())
    except NotFoundError:
        return set()
    except PermissionDeniedError:
        denied = store_at(path).separate_rights
        return {LEFT_DOCUMENT, *map(step_name, noted_steps(path))} if denied else None
    except StoreError:
        return None


def _removed_in(path: Path) -> set[int]:
    """Return the steps in a run's folder of which nothing but a tombstone is left."""
    try:
        with RunFolder(path) as folder:
            removed, untidy = folder.survey()
            return removed - untidy
    except (NotFoundError, StoreError):
        return set()


# --------------------------------------------------------------------------------------------------- once it is durable


@contextlib.contextmanager
def _collect_afterwards(run: RunState, step: int, order: Order, *, begun: float) -> Iterator[None]:
    """Do what process 0 does on the writing thread when a step is committed.

    Args:
        run: the run.
        step: the step that is saved in the block.
        order: where it stands among the others.
        begun: when the save began, of the monotonic clock.
    """
    with withdraw_on_failure(run.path, order.mark):
        yield
    seconds = time.monotonic() - begun
    try:
        if order.replaced or order.left:
            run.known.forget()
        more = len(in_flight(run.path)) > 1
        collect_after(run, step, there=order.there, left=order.left, seconds=seconds, more_follow=more)
        run.unmeasured = find_unmeasured(run.keep, run.known.metrics)
    except Exception as error:
        shown = os.fspath(step_path(run.path, step))
        raise reword(error, f"the save to {shown!r} is committed; a later part of it failed") from error
